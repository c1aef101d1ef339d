"""The least that a backend must do: plain heads in one process, the logits of as many tokens at a time as fit.

Shape suffixes: n tokens of a chunk, D hidden size, V vocab rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from logitless.types import Forwarded, Gradients, Needs, Problem, Request

LOGIT_TENSORS = 8  # of n by V that are held at once, at most


class AcmeBackend:
    """Chunks of tokens, in each of which the logits are held."""

    name = "acme"
    priority = -10
    protocol = 1

    def supports(self, request: Request) -> str | None:
        if request.bias or request.softcap or request.lora_rank or request.grad_buffer or request.group_size > 1:
            return "acme computes plain heads in one process only"
        if request.hidden_dtype != request.weight_dtype or request.hidden_dtype.itemsize < 4:
            return "acme computes float32 and float64 only"
        if request.policy_loss:
            return "acme has no single pass"
        return None if request.validate else "acme needs validate=True"

    def kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        return (0,)

    def forward(self, problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]) -> Forwarded:
        log_probs, entropies = [], []
        for rows in _chunks(problem):
            log_p_nV = _log_p(problem, rows)
            log_probs.append(log_p_nV.gather(1, problem.labels[rows, None])[:, 0])
            if entropy:
                entropies.append(_entropy(log_p_nV))
        log_prob = torch.cat(log_probs)
        return Forwarded(
            log_probs=log_prob,
            entropy=torch.cat(entropies) if entropy else None,
            stats=log_prob.new_zeros(4, len(log_prob)),
            kept=torch.zeros(kept_shape, dtype=torch.uint8, device=log_prob.device),
        )

    def backward(
        self,
        problem: Problem,
        stats: Tensor,
        kept: Tensor,
        grad_log_probs: Tensor,
        grad_entropy: Tensor | None,
        needs: Needs,
        grad_buffer: Tensor | None,
    ) -> Gradients:
        chunks = _chunks(problem)
        weight_VD = problem.weight[: problem.vocab_valid]
        d_hidden = torch.zeros_like(problem.hidden) if needs.hidden else None
        d_weight = torch.zeros_like(problem.weight) if needs.weight else None
        upstream = zip(
            chunks, grad_log_probs.split([len(rows) for rows in chunks]), _parts(grad_entropy, chunks), strict=True
        )
        for rows, g_n, e_n in upstream:
            log_p_nV = _log_p(problem, rows)
            p_nV = log_p_nV.exp()
            dz_nV = -g_n[:, None] * p_nV
            dz_nV.scatter_add_(1, problem.labels[rows, None], g_n[:, None])
            if e_n is not None:
                dz_nV -= e_n[:, None] * p_nV * (log_p_nV - (p_nV * log_p_nV).sum(-1, keepdim=True))
            dz_nV *= problem.scale / _temperature(problem, rows)
            if d_hidden is not None:
                d_hidden[rows] = dz_nV @ weight_VD
            if d_weight is not None:
                d_weight[: problem.vocab_valid].addmm_(dz_nV.T, problem.hidden[rows])
        return Gradients(hidden=d_hidden, weight=d_weight)


def _chunks(problem: Problem) -> Sequence[Tensor]:
    """Indices of the live tokens, as many at a time as the workspace has room for; one empty chunk if there is none."""
    live = problem.live
    if live is None:
        live = torch.arange(len(problem.labels), device=problem.labels.device)
    return live.split(max(1, problem.workspace_bytes // (LOGIT_TENSORS * problem.weight.shape[0] * 8)))


def _parts(grad: Tensor | None, chunks: Sequence[Tensor]) -> Sequence[Tensor | None]:
    return [None] * len(chunks) if grad is None else grad.split([len(rows) for rows in chunks])


def _log_p(problem: Problem, rows: Tensor) -> Tensor:
    z_nV = problem.hidden[rows] @ problem.weight[: problem.vocab_valid].T
    return (z_nV * (problem.scale / _temperature(problem, rows))).log_softmax(-1)


def _temperature(problem: Problem, rows: Tensor) -> Tensor | float:
    t = problem.temperature
    return t[rows, None] if isinstance(t, Tensor) else t


def _entropy(log_p_nV: Tensor) -> Tensor:
    return -(log_p_nV.exp() * log_p_nV).sum(-1).clamp(-math.log(log_p_nV.shape[1]), 0.0)
