"""Backward of the torch backend: logits again (or kept), dz, and the products of dz.

    dz = g·(onehot − p) − e·p·(log p + H), then through 1/T, the softcap's 1 − tanh² and the scale

Where the label's p is near 1, 1 − p is −expm1(log p), which keeps its digits.

Over a kept set p is 0 outside of it. A label outside was scored as if it alone were added, with c of the mass left to
the others: its g counts c times for them. Of several labels, with G = Σ g·c, dz is −G·p but at the labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.collectives import all_reduce
from logitless.types import Gradients, Needs, Problem
from logitless_torch.tiles import FLOOR, Columns, KeptTiles, Rows, TilePlan, label_columns, matmul

__all__ = ["Grads", "Sums", "backward", "backward_pass"]

NEGLIGIBLE = 1e-30  # a p below it gives 0 exactly: its dz would be denormal, and slow every product

Grads = tuple[Tensor, Tensor | None]
"""Upstream gradients of log_prob [m] or [m, K], and entropy [m]."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """What a block of rows needs to make dz; all [R, 1]."""

    normalizer: Tensor  # M
    log_sum: Tensor
    entropy: Tensor
    grad_log_prob: Tensor
    grad_entropy: Tensor | None
    line: Tensor | None = None  # the least logit that is kept
    labels: Labels | None = None


@dataclass(frozen=True, slots=True)
class Labels:
    """What a block of rows with several labels or a kept set needs besides; [R, K]."""

    grad: Tensor  # Σ g over the labels that are the same token
    share: Tensor  # c


def _upstream(
    plan: TilePlan, rows: Rows, span: slice, stats: Tensor, grads: Grads, dz_scale: Tensor | None
) -> Upstream:
    """A block's entries, with 1/T and the scale folded into the gradients, so that dz is with respect to h·W."""
    normalizer, log_sum, entropy, line = stats[:4, span].unsqueeze(-1)
    factor = rows.inverse_temperature * plan.problem.scale
    if dz_scale is not None:
        factor = dz_scale * factor
    e = None if grads[1] is None else grads[1][span].unsqueeze(1) * factor
    if stats.shape[0] == 4:
        return Upstream(normalizer, log_sum, entropy, grads[0][span].unsqueeze(1) * factor, e)
    share_RK = stats[4:, span].T
    g_RK = grads[0][span].view(share_RK.shape) * factor
    labels = Labels(_same_label(g_RK, rows.label_R), share_RK)
    g_R1 = (g_RK * share_RK).sum(1, keepdim=True)
    return Upstream(normalizer, log_sum, entropy, g_R1, e, line if plan.held else None, labels)


def _same_label(g_RK: Tensor, label: Tensor) -> Tensor:
    """[R, K] sums over the labels that are the same token, in the order of the labels."""
    if g_RK.shape[1] == 1:
        return g_RK
    total = torch.zeros_like(g_RK)
    for k in range(g_RK.shape[1]):
        total += g_RK[:, k : k + 1].where(label == label[:, k : k + 1], 0.0)
    return total


def _dz(plan: TilePlan, rows: Rows, columns: Columns, z_RC: Tensor, up: Upstream) -> Tensor:
    """dz of one tile, in the accumulation dtype; leaves z as it was."""
    d_RC, p_RC = plan.scratch(1, rows, columns), plan.scratch(2, rows, columns)
    torch.sub(z_RC, up.normalizer, out=d_RC).sub_(up.log_sum).clamp_(min=FLOOR[plan.dtype])
    torch.threshold_(torch.exp(d_RC, out=p_RC), NEGLIGIBLE, 0.0)
    if up.line is not None:
        p_RC.masked_fill_(z_RC < up.line, 0.0)
    local_R1, inside_R1 = label_columns(plan, rows, columns)
    others_R1 = -p_RC.gather(1, local_R1)
    label_R1 = _at_labels(up, inside_R1, d_RC.gather(1, local_R1), others_R1)
    if up.grad_entropy is None:
        dz_RC = p_RC.mul_(-up.grad_log_prob)
    else:
        slope_RC = d_RC.add_(up.entropy).mul_(up.grad_entropy)
        label_R1 += slope_RC.gather(1, local_R1) * others_R1
        dz_RC = p_RC.mul_(slope_RC.add_(up.grad_log_prob).neg_())
    if label_R1.shape[1] > 1:
        local_R1, label_R1 = _inside_only(local_R1, inside_R1, label_R1)
    dz_RC.scatter_(1, local_R1, label_R1)
    cap = plan.problem.softcap
    if cap is not None:
        tanh_RC = torch.div(z_RC, rows.inverse_temperature, out=d_RC).div_(cap)
        dz_RC.mul_(tanh_RC.square_().neg_().add_(1.0))
    return dz_RC


def _at_labels(up: Upstream, inside: Tensor, log_p: Tensor, others: Tensor) -> Tensor:
    """[R, K] of each label what its column gets from log_prob's gradients; `others` are −p there."""
    if up.labels is None:
        return torch.where(inside, -log_p.expm1(), others) * up.grad_log_prob
    own = -(log_p + up.labels.share.log()).expm1() * up.labels.grad
    return torch.where(inside, own + others * (up.grad_log_prob - up.labels.grad), others * up.grad_log_prob)


def _inside_only(local: Tensor, inside: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of other tiles moved onto a row's first label of this one: written twice, a column gets one value."""
    first = inside.long().argmax(1, keepdim=True)
    there = inside | ~inside.any(1, keepdim=True)
    return torch.where(there, local, local.gather(1, first)), torch.where(there, value, value.gather(1, first))


def _fp16_scale(problem: Problem, tokens: range, grads: Grads) -> Tensor:
    """The power of two that brings the largest dz near 2^8: small ones survive fp16, large ones fit."""
    factor: Tensor | float = problem.scale
    if isinstance(problem.temperature, Tensor):
        live = problem.temperature if problem.live is None else problem.temperature[problem.live]
        factor = factor / live[tokens.start : tokens.stop]
    else:
        factor = factor / problem.temperature
    # NaN and inf are their own token's: a scale made of them would spoil every token.
    sizes = [grad.abs().sum(1) if grad.ndim == 2 else grad for grad in grads if grad is not None]
    finite = [(size * factor).abs().nan_to_num(0.0, 0.0) for size in sizes]
    largest = torch.stack([size.amax() for size in finite]).amax()
    exponent = 8.0 - largest.clamp(min=1e-30).log2().ceil()
    return exponent.clamp(-60.0, 60.0).exp2()


class Sums:
    """The gradients that are needed, summed in the accumulation dtype over any number of passes.

    d_weight is summed where it will stand if the dtype allows; else, `by_tile`, in a tile that is rounded when its
    block of columns is done (right when one pass covers all tokens), or in one buffer that is rounded at the end.
    """

    def __init__(self, plan: TilePlan, needs: Needs, grad_buffer: Tensor | None, *, by_tile: bool) -> None:
        p, self.plan, self.grad_buffer = plan.problem, plan, grad_buffer

        def zeros(needed: bool, like: Tensor | None, rows: int | None = None) -> Tensor | None:
            if not needed or like is None:
                return None
            return like.new_zeros((like.shape[0] if rows is None else rows, *like.shape[1:]), dtype=plan.dtype)

        self.hidden = zeros(needs.hidden, p.hidden, plan.n)
        self.bias = zeros(needs.bias, p.bias)
        self.lora_u = zeros(needs.lora_u, p.lora_u, plan.n)
        self.lora_b = zeros(needs.lora_b, p.lora_b)
        self.weight = grad_buffer
        if needs.weight and grad_buffer is None:
            dtype = p.weight.dtype if by_tile else plan.dtype
            self.weight = p.weight.new_zeros(p.weight.shape, dtype=dtype)
        self.tile: Tensor | None = None
        self.dz_scale: Tensor | None = None  # power of two by which all sums are too large (fp16 operands)

    def begin_pass(self, tokens: range, grads: Grads) -> None:
        """Take the scale that a pass's upstream gradients ask for; what was summed before follows it."""
        if self.plan.operand != torch.float16 or not tokens:
            return
        scale = _fp16_scale(self.plan.problem, tokens, grads).to(self.plan.dtype)
        self._multiply(scale if self.dz_scale is None else scale / self.dz_scale)
        self.dz_scale = scale

    def _multiply(self, factor: Tensor) -> None:
        for sums in (self.hidden, self.bias, self.lora_u, self.lora_b, self.weight if not self._tiled else None):
            if sums is not None:
                sums.mul_(factor)

    @property
    def _tiled(self) -> bool:
        """Whether d_weight is summed in a tile first: another dtype, or a caller's buffer that must not be scaled."""
        if self.weight is None:
            return False
        return self.weight.dtype != self.plan.dtype or (
            self.grad_buffer is not None and self.plan.operand == torch.float16
        )

    def open(self, columns: Columns) -> None:
        """Before a block of vocab rows."""
        if self.weight is not None:
            place = self.weight[columns.start : columns.stop]
            self.tile = torch.zeros_like(place, dtype=self.plan.dtype) if self._tiled else place

    def close(self, columns: Columns) -> None:
        """After it: round the tile's sums once."""
        if self.weight is not None and self.tile is not None and self._tiled:
            tile = self.tile if self.dz_scale is None else self.tile.div_(self.dz_scale)
            self.weight[columns.start : columns.stop].add_(tile)

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

    def finish(self, *, half: bool = True) -> Gradients:
        """Rounded once to the inputs' dtypes, exactly 0 at tokens that are not live, whole over the ranks.

        `half=False` leaves the gradients of float16 inputs in the dtype of their sums.
        """
        p = self.plan.problem
        if self.dz_scale is not None:
            self._multiply(self.dz_scale.reciprocal())
        if p.group is not None and p.reduce_hidden_grad:
            for whole in (self.hidden, self.lora_u):
                if whole is not None:
                    all_reduce(whole, p.group)

        def rounded(sums: Tensor | None, like: Tensor | None, of_tokens: bool = False) -> Tensor | None:
            if sums is None or like is None:
                return None
            dtype = like.dtype if half or like.dtype != torch.float16 else sums.dtype
            return _spread(sums, like, dtype, p.live, self.plan.rows) if of_tokens else sums.to(dtype)

        return Gradients(
            hidden=rounded(self.hidden, p.hidden, of_tokens=True),
            weight=rounded(self.weight, p.weight) if self.grad_buffer is None else None,
            bias=rounded(self.bias, p.bias),
            lora_u=rounded(self.lora_u, p.lora_u, of_tokens=True),
            lora_b=rounded(self.lora_b, p.lora_b),
        )


def _spread(sums: Tensor, like: Tensor, dtype: torch.dtype, live: Tensor | None, rows: int) -> Tensor:
    """[n, ...] sums to [N, ...] gradients, a block of rows at a time."""
    if live is None:
        return sums.to(dtype)
    grad = like.new_zeros(like.shape, dtype=dtype)
    for first in range(0, live.shape[0], rows):
        grad.index_copy_(0, live[first : first + rows], sums[first : first + rows].to(dtype))
    return grad


def backward_pass(plan: TilePlan, tokens: range, stats: Tensor, kept: Tensor, grads: Grads, sums: Sums) -> None:
    """Add a range of m live tokens' gradients to the sums; stats [4, m] and upstream gradients [m] are theirs."""
    sums.begin_pass(tokens, grads)
    tiles = KeptTiles(plan, kept)
    for columns in plan.each_columns():
        sums.open(columns)
        for rows in plan.each_rows(tokens):
            z_RC, is_kept = tiles.next(rows, columns)
            if not is_kept:
                plan.logits(rows, columns, z_RC)
            span = slice(rows.start - tokens.start, rows.stop - tokens.start)
            up = _upstream(plan, rows, span, stats, grads, sums.dz_scale)
            sums.add(_dz(plan, rows, columns, z_RC, up), rows, columns)
        sums.close(columns)


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
    sums = Sums(plan, needs, grad_buffer, by_tile=True)
    backward_pass(plan, plan.whole(), stats, kept, (grad_log_probs, grad_entropy), sums)
    return sums.finish()
