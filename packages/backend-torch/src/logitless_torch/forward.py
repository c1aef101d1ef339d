"""Forward of the torch backend: each row's statistics, tile by tile.

For a row with logits z: M = max z, R = Σ_{v≠label} e^(z−M), T = Σ e^(z−M)·(z−M). The label is left out of R so that
log_prob = −log1p(R) keeps its digits where p(label) is near 1: log(1 + R) of a float sum does not. T is relative to
M, not Σ p·z: that loses four digits when logits share an offset of 1e4. With several labels it is the largest logit,
once, that is left out of R: a label that is not the largest has p <= 1/2, and needs no such care.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import Forwarded, Problem
from logitless_torch.kept import kept_pass
from logitless_torch.tiles import FLOOR, Columns, KeptTiles, Rows, TilePlan, label_columns

__all__ = ["Statistics", "forward", "forward_pass", "tile_statistics"]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Running statistics of rows; all [n], but for several labels' logits."""

    max: Tensor
    rest: Tensor  # R
    moment: Tensor  # T
    label: Tensor  # [n] or [n, K], the label's logit, -inf until its column has been seen
    squares: Tensor | None = None  # Σ e^2(z−M), where asked for
    sum: Tensor | None = None  # Σ z, where asked for

    @classmethod
    def empty(cls, n: int, like: Tensor, dtype: torch.dtype, problem: Problem | None = None) -> Statistics:
        lowest = torch.finfo(dtype).min  # finite: -inf − -inf would be NaN
        shape = () if problem is None else problem.labels.shape[1:]
        wanted = () if problem is None else problem.stats
        return cls(
            like.new_full((n,), lowest, dtype=dtype),
            like.new_full((n,), -1.0 if shape else 0.0, dtype=dtype),  # of no columns, less the largest
            like.new_zeros(n, dtype=dtype),
            like.new_full((n, *shape), -math.inf, dtype=dtype),
            like.new_zeros(n, dtype=dtype) if "sum_sq_probs" in wanted else None,
            like.new_zeros(n, dtype=dtype) if "mean_logit" in wanted else None,
        )

    def rows(self, span: slice) -> Statistics:
        """Views of a block's entries."""
        squares, total = (None if x is None else x[span] for x in (self.squares, self.sum))
        return Statistics(self.max[span], self.rest[span], self.moment[span], self.label[span], squares, total)

    def total(self) -> Tensor:
        """Σ e^(z−M), the term that was left out included."""
        return self.rest + (1.0 if self.label.ndim == 2 else (self.label - self.max).exp())

    def absorb(self, other: Statistics) -> None:
        """Fold another block of columns into these, in place."""
        total, other_total = self.total(), other.total()
        top = torch.maximum(self.max, other.max)
        rest, moment = torch.zeros_like(top), torch.zeros_like(top)
        squares = None if self.squares is None else torch.zeros_like(top)
        largest_here = self.max >= other.max
        for part, part_total, largest in ((self, total, largest_here), (other, other_total, ~largest_here)):
            shift = (part.max - top).clamp_(min=FLOOR[self.max.dtype])
            factor = shift.exp()
            without = part.rest if self.label.ndim == 1 else torch.where(largest, part.rest, part_total)
            rest += without * factor
            moment += (part.moment + part_total * shift) * factor
            if squares is not None and part.squares is not None:
                squares += part.squares * factor * factor
        self.rest.copy_(rest)
        self.moment.copy_(moment)
        self.label.copy_(torch.maximum(self.label, other.label))
        self.max.copy_(top)
        if squares is not None and self.squares is not None:
            self.squares.copy_(squares)
        if self.sum is not None and other.sum is not None:
            self.sum.add_(other.sum)

    def across(self, group: Any) -> Statistics:
        """Folded over the ranks that share the vocabulary, in rank order: the same bits on each."""
        whole, *others = (self._of_rows(part) for part in gather_stacked(self._as_rows(), group))
        for part in others:
            whole.absorb(part)
        return whole

    def _as_rows(self) -> Tensor:
        several = self.label.ndim == 2
        given = [self.max, self.rest, self.moment, self.squares, self.sum]
        return torch.stack([x for x in (*given, *(self.label.T if several else (self.label,))) if x is not None])

    def _of_rows(self, rows: Tensor) -> Statistics:
        """As `self`, from what `_as_rows` made of another."""
        top, rest, moment, *others = rows
        squares = None if self.squares is None else others.pop(0)
        total = None if self.sum is None else others.pop(0)
        label = torch.stack(others, 1) if self.label.ndim == 2 else others[0]
        return Statistics(top, rest, moment, label, squares, total)

    def finish(self, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """log_prob, log Σ e^(z−M) and entropy."""
        if self.label.ndim == 2:
            log_sum = self.rest.log1p()
            below = self.label - self.max.unsqueeze(1)
            log_prob = below - log_sum.unsqueeze(1)
        else:
            below = self.label - self.max
            log_sum = torch.where(below == 0, self.rest.log1p(), self.total().log())
            log_prob = below - log_sum
        entropy = (log_sum - self.moment / self.total()).clamp(0.0, math.log(vocab_size))
        # Nothing is above −inf, which the maximum begins just above: such a token has no scores.
        lowest = self.max <= torch.finfo(self.max.dtype).min
        nothing = lowest & (self.label == -math.inf if self.label.ndim == 1 else (self.label == -math.inf).any(1))
        log_prob = log_prob.clamp(max=0.0) + 0.0
        log_prob = log_prob.masked_fill(nothing if log_prob.ndim == 1 else nothing.unsqueeze(1), math.nan)
        return log_prob, log_sum, entropy.masked_fill(nothing, math.nan)

    def extras(self, problem: Problem) -> Tensor | None:
        """`Problem.stats` in their order, [rows, n]; of a whole vocabulary, where every label is kept."""
        if not problem.stats:
            return None
        found: list[Tensor] = []
        for name in problem.stats:
            if name == "sum_sq_probs" and self.squares is not None:
                found.append(self.squares / self.total().square())
            elif name == "mean_logit" and self.sum is not None:
                found.append(self.sum / problem.vocab_size)
            else:
                labels = self.label.T if self.label.ndim == 2 else self.label.unsqueeze(0)
                true = labels == self.max if name == "is_argmax" else torch.ones_like(labels)
                found.extend(true.to(self.max.dtype))
        return torch.stack(found)


def tile_statistics(plan: TilePlan, z_RC: Tensor, rows: Rows, columns: Columns) -> Statistics:
    """Statistics of one tile; leaves z as it was."""
    d_RC, e_RC = plan.scratch(1, rows, columns), plan.scratch(2, rows, columns)
    wanted = plan.problem.stats
    local_RK, inside_RK = label_columns(plan, rows, columns)
    label_RK = z_RC.gather(1, local_RK).masked_fill_(~inside_RK, -math.inf)
    if rows.label_R.ndim == 2:
        max_R1, largest_R1 = z_RC.max(1, keepdim=True)
        max_R1.clamp_(min=torch.finfo(z_RC.dtype).min)
    else:
        max_R1 = z_RC.amax(1, keepdim=True).clamp_(min=torch.finfo(z_RC.dtype).min)
    torch.sub(z_RC, max_R1, out=d_RC).clamp_(min=FLOOR[plan.dtype])
    torch.exp(d_RC, out=e_RC)
    moment_R = torch.linalg.vecdot(e_RC, d_RC)
    squares_R = torch.linalg.vecdot(e_RC, e_RC) if "sum_sq_probs" in wanted else None
    sum_R = z_RC.sum(1) if "mean_logit" in wanted else None
    if rows.label_R.ndim == 2:
        e_RC.scatter_(1, largest_R1, e_RC.gather(1, largest_R1) - 1.0)  # not 0: all columns may be -inf
    else:
        e_RC.scatter_(1, local_RK, e_RC.gather(1, local_RK).masked_fill_(inside_RK, 0.0))
        label_RK = label_RK.squeeze(1)
    return Statistics(max_R1.squeeze(1), e_RC.sum(1), moment_R, label_RK, squares_R, sum_R)


def forward_pass(plan: TilePlan, tokens: range, kept: Tensor) -> Forwarded:
    """Scores of a range of m live tokens, statistics and extras; fills `kept`, and hands it over."""
    problem = plan.problem
    if plan.held:
        return kept_pass(plan, tokens, kept)
    running = Statistics.empty(len(tokens), problem.hidden, plan.dtype, problem)
    tiles = KeptTiles(plan, kept)
    for columns in plan.each_columns():
        for rows in plan.each_rows(tokens):
            z_RC, _ = tiles.next(rows, columns)
            plan.logits(rows, columns, z_RC)
            span = slice(rows.start - tokens.start, rows.stop - tokens.start)
            running.rows(span).absorb(tile_statistics(plan, z_RC, rows, columns))
    if problem.group is not None:
        running = running.across(problem.group)
    log_prob, log_sum, entropy = running.finish(problem.vocab_size)
    if log_prob.ndim == 1:
        stats = torch.stack((running.max, log_sum, entropy, log_prob))
    else:
        everything = torch.full_like(log_sum, -math.inf)
        stats = torch.cat((torch.stack((running.max, log_sum, entropy, everything)), torch.ones_like(log_prob.T)))
    return Forwarded(log_prob, entropy, stats, kept, running.extras(problem))


def forward(problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]) -> Forwarded:
    """Scores of the live tokens; keeps the logits of as many leading tiles as fit in `kept_shape`."""
    plan = TilePlan(problem)
    kept = problem.hidden.new_zeros(kept_shape, dtype=torch.uint8)
    out = forward_pass(plan, plan.whole(), kept)
    return out if entropy else replace(out, entropy=None)
