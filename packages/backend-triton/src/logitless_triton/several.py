"""What `logitless_triton.dz` multiplies p with, over a kept set or for several labels of a token.

A label that is not kept was scored as if it alone were added, with c of the mass left to the others, so its g counts c
times for them. Of several labels, with G = Σ g·c in A's place of g,

    dz at a label y = −Σ_{labels that are y} g·k·expm1(log p') − (G − Σ_{labels that are y} g)·k·p − e·k·p·(log p + H)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from logitless_triton.rows import Rows, Work

__all__ = ["label_coefficients"]


def label_coefficients(
    work: Work, rows: Rows, stats: Tensor, g: Tensor, e: Tensor | None, dz_scale: Tensor | None
) -> Tensor:
    """[2 + K, m]: A, B and dz at each label; where labels are the same token they have the same.

    Args:
        stats: [4 + K, m], the forward's (`logitless_triton.held.HeldScores`).
        g: [m] or [m, K].
    """
    entropy, coded = stats[2].unsqueeze(1), stats[4:].T  # [m, K]
    labels = rows.labels.view(coded.shape)
    k = (rows.f * work.head.slope).unsqueeze(1)
    k = k if dz_scale is None else k * dz_scale
    g = g.reshape(coded.shape) * k
    is_added = coded > 0.0
    log_p = -coded.abs()
    share = torch.where(is_added, -log_p.expm1(), 1.0)
    same = torch.zeros_like(g)  # Σ g over the labels that are the same token, in the order of the labels
    for i in range(g.shape[1]):
        same += g[:, i : i + 1].where(labels == labels[:, i : i + 1], 0.0)
    whole = (g * share).sum(1, keepdim=True)
    p = torch.where(is_added, 0.0, log_p.exp())
    at_labels = -log_p.expm1() * same - p * (whole - same)
    a, b = -whole, torch.zeros_like(whole)
    if e is not None:
        upstream = e.unsqueeze(1) * k
        a, b = a - upstream * entropy, -math.log(2.0) * upstream
        at_labels -= upstream * p * (log_p.clamp(min=-1e4) + entropy)
    return torch.cat((a, b, at_labels), 1).T.contiguous()
