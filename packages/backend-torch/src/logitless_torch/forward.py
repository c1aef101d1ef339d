"""Forward of the torch backend: each row's statistics, tile by tile.

For a row with logits z: M = max z, R = Σ_{v≠label} e^(z−M), T = Σ e^(z−M)·(z−M). The label is left out of R so that
log_prob = −log1p(R) keeps its digits where p(label) is near 1: log(1 + R) of a float sum does not. T is relative to
M, not Σ p·z: that loses four digits when logits share an offset of 1e4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import Forwarded, Problem
from logitless_torch.tiles import Columns, Rows, TilePlan

__all__ = ["FLOOR", "KeptTiles", "Statistics", "forward", "forward_pass", "label_columns"]

# Least logit below the maximum. Finite, since 0·(-inf) would be NaN; and its exp is the least normal number, since
# arithmetic on denormal ones is slow, and a sum that holds a 1 does not see it.
FLOOR = {torch.float32: -87.0, torch.float64: -708.0}


@dataclass(frozen=True, slots=True)
class Statistics:
    """Running statistics of rows; all [n]."""

    max: Tensor
    rest: Tensor  # R
    moment: Tensor  # T
    label: Tensor  # the label's logit, -inf until its column has been seen

    @classmethod
    def empty(cls, n: int, like: Tensor, dtype: torch.dtype) -> Statistics:
        lowest = torch.finfo(dtype).min  # finite: -inf − -inf would be NaN
        return cls(
            like.new_full((n,), lowest, dtype=dtype),
            like.new_zeros(n, dtype=dtype),
            like.new_zeros(n, dtype=dtype),
            like.new_full((n,), -math.inf, dtype=dtype),
        )

    def rows(self, span: slice) -> Statistics:
        """Views of a block's entries."""
        return Statistics(self.max[span], self.rest[span], self.moment[span], self.label[span])

    def total(self) -> Tensor:
        """Σ e^(z−M), the label's term included."""
        return self.rest + (self.label - self.max).exp()

    def absorb(self, other: Statistics) -> None:
        """Fold another block of columns into these, in place."""
        total, other_total = self.total(), other.total()
        top = torch.maximum(self.max, other.max)
        rest, moment = torch.zeros_like(top), torch.zeros_like(top)
        for part, part_total in ((self, total), (other, other_total)):
            shift = (part.max - top).clamp_(min=FLOOR[self.max.dtype])
            factor = shift.exp()
            rest += part.rest * factor
            moment += (part.moment + part_total * shift) * factor
        self.rest.copy_(rest)
        self.moment.copy_(moment)
        self.label.copy_(torch.maximum(self.label, other.label))
        self.max.copy_(top)

    def across(self, group: Any) -> Statistics:
        """Folded over the ranks that share the vocabulary, in rank order: the same bits on each."""
        parts = gather_stacked(torch.stack((self.max, self.rest, self.moment, self.label)), group)
        whole = Statistics(*parts[0])
        for part in parts[1:]:
            whole.absorb(Statistics(*part))
        return whole

    def finish(self, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """log_prob, log Σ e^(z−M) and entropy."""
        below = self.label - self.max
        log_sum = torch.where(below == 0, self.rest.log1p(), self.total().log())
        entropy = (log_sum - self.moment / self.total()).clamp(0.0, math.log(vocab_size))
        return (below - log_sum).clamp(max=0.0) + 0.0, log_sum, entropy


def _tile_statistics(plan: TilePlan, z_RC: Tensor, rows: Rows, columns: Columns) -> Statistics:
    """Statistics of one tile; leaves z as it was."""
    d_RC, e_RC = plan.scratch(1, rows, columns), plan.scratch(2, rows, columns)
    local_R1, inside_R1 = label_columns(plan, rows, columns)
    label_R1 = z_RC.gather(1, local_R1).masked_fill_(~inside_R1, -math.inf)
    max_R1 = z_RC.amax(1, keepdim=True).clamp_(min=torch.finfo(z_RC.dtype).min)
    torch.sub(z_RC, max_R1, out=d_RC).clamp_(min=FLOOR[plan.dtype])
    torch.exp(d_RC, out=e_RC)
    moment_R = torch.linalg.vecdot(e_RC, d_RC)
    e_RC.scatter_(1, local_R1, e_RC.gather(1, local_R1).masked_fill_(inside_R1, 0.0))
    return Statistics(max_R1.squeeze(1), e_RC.sum(1), moment_R, label_R1.squeeze(1))


def label_columns(plan: TilePlan, rows: Rows, columns: Columns) -> tuple[Tensor, Tensor]:
    """[R, 1] each row's label as a column of the tile, clamped into it, and whether it is one of its columns."""
    width = columns.stop - columns.start
    local_R1 = (rows.label_R - plan.problem.vocab_start - columns.start).unsqueeze(1)
    inside_R1 = (local_R1 >= 0) & (local_R1 < width)
    return local_R1.clamp_(0, width - 1), inside_R1


class KeptTiles:
    """Logits of the leading tiles of a pass, as many as fit a buffer, in the order in which the pass visits them."""

    def __init__(self, plan: TilePlan, buffer: Tensor) -> None:
        self.plan, self.flat, self.offset = plan, buffer.view(plan.dtype), 0

    def next(self, rows: Rows, columns: Columns) -> tuple[Tensor, bool]:
        """Where the next tile's logits are, and whether that is in the buffer; else it is a scratch tile."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        begin, self.offset = self.offset, self.offset + shape[0] * shape[1]
        if self.offset <= self.flat.shape[0]:
            return self.flat[begin : self.offset].view(shape), True
        return self.plan.scratch(0, rows, columns), False


def forward_pass(plan: TilePlan, tokens: range, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log_prob [m], entropy [m] and the backward's statistics [4, m] of a range of m live tokens; fills `kept`."""
    problem = plan.problem
    running = Statistics.empty(len(tokens), problem.hidden, plan.dtype)
    tiles = KeptTiles(plan, kept)
    for columns in plan.each_columns():
        for rows in plan.each_rows(tokens):
            z_RC, _ = tiles.next(rows, columns)
            plan.logits(rows, columns, z_RC)
            span = slice(rows.start - tokens.start, rows.stop - tokens.start)
            running.rows(span).absorb(_tile_statistics(plan, z_RC, rows, columns))
    if problem.group is not None:
        running = running.across(problem.group)
    log_prob, log_sum, entropy = running.finish(problem.vocab_size)
    return log_prob, entropy, torch.stack((running.max, log_sum, entropy, log_prob))


def forward(problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]) -> Forwarded:
    """Scores of the live tokens; keeps the logits of as many leading tiles as fit in `kept_shape`."""
    plan = TilePlan(problem)
    kept = problem.hidden.new_zeros(kept_shape, dtype=torch.uint8)
    log_prob, entropy_n, stats = forward_pass(plan, plan.whole(), kept)
    return Forwarded(log_prob, entropy_n if entropy else None, stats, kept)
