"""Forward of the torch backend: each row's statistics, tile by tile.

For a row with logits z: M = max z, R = Σ_{v≠label} e^(z−M), T = Σ e^(z−M)·(z−M). The label is left out of R so that
log_prob = −log1p(R) keeps its digits where p(label) is near 1: log(1 + R) of a float sum does not. T is relative to
M, not Σ p·z: that loses four digits when logits share an offset of 1e4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.types import Forwarded, Problem
from logitless_torch.tiles import Columns, Rows, TilePlan

__all__ = ["FLOOR", "Statistics", "forward", "kept_tile"]

FLOOR = -1e4  # e^FLOOR is 0 in fp32 and fp64, and 0·FLOOR is 0 where 0·(-inf) would be NaN


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

    def rows(self, rows: Rows) -> Statistics:
        """Views of a block's entries."""
        span = slice(rows.start, rows.stop)
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
            shift = (part.max - top).clamp_(min=FLOOR)
            factor = shift.exp()
            rest += part.rest * factor
            moment += (part.moment + part_total * shift) * factor
        self.rest.copy_(rest)
        self.moment.copy_(moment)
        self.label.copy_(torch.maximum(self.label, other.label))
        self.max.copy_(top)

    def finish(self, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """log_prob, log Σ e^(z−M) and entropy."""
        below = self.label - self.max
        log_sum = torch.where(below == 0, self.rest.log1p(), self.total().log())
        entropy = (log_sum - self.moment / self.total()).clamp(0.0, math.log(vocab_size))
        return (below - log_sum).clamp(max=0.0) + 0.0, log_sum, entropy


def _tile_statistics(z_RC: Tensor, e_RC: Tensor, rows: Rows, columns: Columns, vocab_start: int) -> Statistics:
    """Statistics of one tile; overwrites z and e."""
    lowest = torch.finfo(z_RC.dtype).min
    local_R1 = (rows.label_R - vocab_start - columns.start).unsqueeze(1)
    inside_R1 = (local_R1 >= 0) & (local_R1 < z_RC.shape[1])
    local_R1 = local_R1.clamp_(0, z_RC.shape[1] - 1)
    label_R1 = z_RC.gather(1, local_R1).masked_fill_(~inside_R1, -math.inf)
    max_R1 = z_RC.amax(1, keepdim=True).clamp_(min=lowest)
    z_RC.sub_(max_R1).clamp_(min=FLOOR)
    torch.exp(z_RC, out=e_RC)
    moment_R = torch.linalg.vecdot(e_RC, z_RC)
    e_RC.scatter_(1, local_R1, e_RC.gather(1, local_R1).masked_fill_(inside_R1, 0.0))
    return Statistics(max_R1.squeeze(1), e_RC.sum(1), moment_R, label_R1.squeeze(1))


def kept_tile(plan: TilePlan, kept: Tensor, offset: int, rows: Rows, columns: Columns) -> Tensor | None:
    """The kept buffer's place for a tile that starts `offset` elements in, or None where it does not fit."""
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    stop = offset + shape[0] * shape[1]
    flat = kept.view(plan.dtype)
    return flat[offset:stop].view(shape) if stop <= flat.shape[0] else None


def forward(problem: Problem, *, entropy: bool, kept_shape: tuple[int, ...]) -> Forwarded:
    """Scores of the live tokens; keeps the logits of as many leading tiles as fit in `kept_shape`."""
    plan = TilePlan(problem)
    kept = problem.hidden.new_zeros(kept_shape, dtype=torch.uint8)
    running = Statistics.empty(plan.n, problem.hidden, plan.dtype)
    offset = 0
    for columns in plan.each_columns():
        for rows in plan.each_rows():
            z_RC = plan.scratch(0, rows, columns)
            plan.logits(rows, columns, z_RC)
            tile = kept_tile(plan, kept, offset, rows, columns)
            offset += z_RC.numel()
            if tile is not None:
                tile.copy_(z_RC)
            e_RC = plan.scratch(1, rows, columns)
            running.rows(rows).absorb(_tile_statistics(z_RC, e_RC, rows, columns, problem.vocab_start))
    log_prob, log_sum, entropy_n = running.finish(problem.vocab_size)
    stats = torch.stack((running.max, log_sum, entropy_n))
    return Forwarded(log_prob, entropy_n if entropy else None, stats, kept)
