"""Backward of the torch backend: logits again (or kept), dz, and the products of dz.

    dz = g·(onehot − p) − e·p·(log p + H), then through 1/T, the softcap's 1 − tanh² and the scale

Where the label's p is near 1, 1 − p is −expm1(log p), which keeps its digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.types import Gradients, Needs, Problem
from logitless_torch.forward import FLOOR, kept_tile
from logitless_torch.tiles import Columns, Rows, TilePlan, matmul

__all__ = ["backward"]


@dataclass(frozen=True, slots=True)
class Upstream:
    """What a block of rows needs to make dz; all [R, 1]."""

    normalizer: Tensor  # M
    log_sum: Tensor
    entropy: Tensor
    grad_log_prob: Tensor
    grad_entropy: Tensor | None


def _upstream(
    problem: Problem, rows: Rows, stats: Tensor, grad_log_probs: Tensor, grad_entropy: Tensor | None
) -> Upstream:
    """A block's entries, with 1/T and the scale folded into the gradients, so that dz is with respect to h·W."""
    span = slice(rows.start, rows.stop)
    normalizer, log_sum, entropy = stats[:, span].unsqueeze(-1)
    factor = rows.inverse_temperature * problem.scale
    g = grad_log_probs[span].unsqueeze(1) * factor
    e = None if grad_entropy is None else grad_entropy[span].unsqueeze(1) * factor
    return Upstream(normalizer, log_sum, entropy, g, e)


def _dz(plan: TilePlan, rows: Rows, columns: Columns, z_RC: Tensor, up: Upstream) -> Tensor:
    """dz of one tile, in the accumulation dtype; leaves z as it was."""
    problem, cap = plan.problem, plan.problem.softcap
    d_RC, p_RC = plan.scratch(1, rows, columns), plan.scratch(2, rows, columns)
    torch.sub(z_RC, up.normalizer, out=d_RC).sub_(up.log_sum).clamp_(min=FLOOR)
    torch.exp(d_RC, out=p_RC)

    local_R1 = (rows.label_R - problem.vocab_start - columns.start).unsqueeze(1)
    inside_R1 = (local_R1 >= 0) & (local_R1 < z_RC.shape[1])
    local_R1 = local_R1.clamp_(0, z_RC.shape[1] - 1)
    own_R1 = up.grad_log_prob * d_RC.gather(1, local_R1).expm1_().neg_()

    if up.grad_entropy is None:
        own_R1 = torch.where(inside_R1, own_R1, -up.grad_log_prob * p_RC.gather(1, local_R1))
        dz_RC = p_RC.mul_(-up.grad_log_prob)
    else:
        slope_RC = d_RC.add_(up.entropy).mul_(up.grad_entropy)
        slope_R1 = slope_RC.gather(1, local_R1) * p_RC.gather(1, local_R1)
        own_R1 = torch.where(inside_R1, own_R1, -up.grad_log_prob * p_RC.gather(1, local_R1)) - slope_R1
        dz_RC = p_RC.mul_(slope_RC.add_(up.grad_log_prob).neg_())
    dz_RC.scatter_(1, local_R1, own_R1)
    if cap is not None:
        tanh_RC = torch.div(z_RC, rows.inverse_temperature, out=d_RC).div_(cap)
        dz_RC.mul_(tanh_RC.square_().neg_().add_(1.0))
    return dz_RC


class _Sums:
    """The gradients that are needed, summed in the accumulation dtype."""

    def __init__(self, plan: TilePlan, needs: Needs, grad_buffer: Tensor | None) -> None:
        p = plan.problem

        def zeros(needed: bool, *shape: int) -> Tensor | None:
            return p.hidden.new_zeros(shape, dtype=plan.dtype) if needed else None

        self.hidden = zeros(needs.hidden, plan.n, p.hidden.shape[1])
        self.bias = zeros(needs.bias, p.weight.shape[0])
        self.lora_u = zeros(needs.lora_u, plan.n, 0 if p.lora_u is None else p.lora_u.shape[1])
        self.lora_b = zeros(needs.lora_b, p.weight.shape[0], 0 if p.lora_b is None else p.lora_b.shape[1])
        self.weight = None
        if needs.weight:
            self.weight = (
                torch.zeros_like(p.weight, memory_format=torch.contiguous_format)
                if grad_buffer is None
                else grad_buffer
            )
        self.plan = plan
        self.tile: Tensor | None = None

    def open(self, columns: Columns) -> None:
        """Before a block of vocab rows: where its d_weight is summed; in place where the dtype allows."""
        if self.weight is not None:
            place = self.weight[columns.start : columns.stop]
            self.tile = place if place.dtype == self.plan.dtype else torch.zeros_like(place, dtype=self.plan.dtype)

    def close(self, columns: Columns) -> None:
        """After it: round the sums once."""
        if self.weight is not None and self.tile is not None and self.tile.dtype != self.weight.dtype:
            self.weight[columns.start : columns.stop].add_(self.tile)

    def add(self, dz_RC: Tensor, rows: Rows, columns: Columns) -> None:
        """The products of one tile's dz."""
        dz = dz_RC.to(self.plan.operand)
        if self.hidden is not None:
            matmul(dz, columns.weight_CD, self.hidden[rows.start : rows.stop], accumulate=True)
        if self.tile is not None:
            matmul(dz.T, rows.hidden_RD, self.tile, accumulate=True)
        if self.bias is not None:
            self.bias[columns.start : columns.stop] += dz_RC.sum(0)
        if self.lora_u is not None and columns.lora_b_Cr is not None:
            self.lora_u[rows.start : rows.stop].addmm_(dz_RC, columns.lora_b_Cr)
        if self.lora_b is not None and rows.lora_u_Rr is not None:
            self.lora_b[columns.start : columns.stop].addmm_(dz_RC.T, rows.lora_u_Rr)


def _spread(sums: Tensor | None, like: Tensor | None, live: Tensor | None) -> Tensor | None:
    """[n, ...] sums to [N, ...] gradients in their input's dtype, exactly 0 at tokens that are not live."""
    if sums is None or like is None:
        return None
    if live is None:
        return sums.to(like.dtype)
    return torch.zeros_like(like, memory_format=torch.contiguous_format).index_copy_(0, live, sums.to(like.dtype))


def backward(
    problem: Problem,
    stats: Tensor,
    kept: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    needs: Needs,
    grad_buffer: Tensor | None,
) -> Gradients:
    """Gradients for upstream [n] gradients; the products of those that nobody needs are not run."""
    plan = TilePlan(problem)
    sums = _Sums(plan, needs, grad_buffer)
    offset = 0
    for columns in plan.each_columns():
        sums.open(columns)
        for rows in plan.each_rows():
            tile = kept_tile(plan, kept, offset, rows, columns)
            if tile is None:
                tile = plan.scratch(0, rows, columns)
                plan.logits(rows, columns, tile)
            offset += tile.numel()
            up = _upstream(problem, rows, stats, grad_log_probs, grad_entropy)
            sums.add(_dz(plan, rows, columns, tile, up), rows, columns)
        sums.close(columns)
    return Gradients(
        hidden=_spread(sums.hidden, problem.hidden, problem.live),
        weight=sums.weight if grad_buffer is None else None,
        bias=None if sums.bias is None or problem.bias is None else sums.bias.to(problem.bias.dtype),
        lora_u=_spread(sums.lora_u, problem.lora_u, problem.live),
        lora_b=None if sums.lora_b is None or problem.lora_b is None else sums.lora_b.to(problem.lora_b.dtype),
    )
