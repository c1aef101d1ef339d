"""Scores over the tokens that a sampler keeps (`logitless.reference.keep`): the logits of a block of rows are held.

One pass over the products. A kept set is all tokens whose logit is at least a threshold t: with top_k the k-th largest
logit; with top_p the smallest t such that the tokens above it have less than p of the mass. Both are found among a
row's largest logits; where those hold less than p, by bisection over all floats, which also serves where the host may
not be asked (`validate=False`). From t, in one more look at what is held: R and T as in `logitless_torch.forward`, over
the kept tokens, where R leaves out the largest logit.

Shape suffixes as in `logitless_torch.tiles`; k candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import STATS, Forwarded
from logitless_torch.tiles import FLOOR, KeptTiles, Rows, TilePlan, label_columns

__all__ = ["kept_pass"]


def kept_pass(plan: TilePlan, tokens: range, kept: Tensor) -> Forwarded:
    """Scores of a range of m live tokens, statistics [4 + K, m] and extras; `kept`, if not empty, is to hold a block.

    The statistics are M, log S, the entropy, the threshold, and of each label the share of its normaliser that is not
    its own where it had to be added to the kept tokens: 1 where it is one of them.
    """
    p = plan.problem
    held = kept
    if not kept.shape[0]:
        size = min(plan.rows, len(tokens)) * p.vocab_valid * plan.dtype.itemsize
        held = p.hidden.new_empty(size, dtype=torch.uint8)
    blocks = [_Block(plan, rows, held).scores() for rows in plan.each_rows(tokens)]
    several = p.labels.ndim == 2
    if not blocks:
        blocks = [_nothing(plan, p.labels.shape[1] if several else 1)]
    return Forwarded(
        torch.cat([block.log_probs if several else block.log_probs.squeeze(1) for block in blocks]),
        torch.cat([block.entropy for block in blocks if block.entropy is not None]),
        torch.cat([block.stats for block in blocks], 1),
        kept,
        torch.cat([block.extras for block in blocks if block.extras is not None], 1) if p.stats else None,
    )


def _nothing(plan: TilePlan, labels: int) -> Forwarded:
    """Scores of no token."""
    like = plan.problem.hidden.new_empty(0, dtype=plan.dtype)
    rows = sum(labels if STATS[name] else 1 for name in plan.problem.stats)
    extras = like.new_empty(rows, 0)
    return Forwarded(like.new_empty(0, labels), like, like.new_empty(4 + labels, 0), like, extras)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of a block's kept tokens, over all ranks; [R], but for labels."""

    rest: Tensor
    moment: Tensor
    squares: Tensor
    sum: Tensor  # Σ z, of the whole vocabulary
    label_RK: Tensor
    dropped: Tensor  # the largest logit that is not kept


class _Block:
    """A block of rows with all of its logits, in tiles, and their maxima."""

    def __init__(self, plan: TilePlan, rows: Rows, held: Tensor) -> None:
        self.plan, self.rows, self.group = plan, rows, plan.problem.group
        self.tiles: list[tuple[range, Tensor]] = []
        buffer = KeptTiles(plan, held)
        count = rows.stop - rows.start
        self.max_R = plan.problem.hidden.new_full((count,), torch.finfo(plan.dtype).min, dtype=plan.dtype)
        self.largest_R = torch.zeros_like(self.max_R, dtype=torch.int64)
        self.best_Rk = self.max_R.new_empty(count, 0)
        for columns in plan.each_columns():
            z_RC, _ = buffer.next(rows, columns)
            plan.logits(rows, columns, z_RC)
            self.tiles.append((range(columns.start, columns.stop), z_RC))
            self._look(z_RC, columns.start)
        if self.best_Rk.shape[1] < plan.candidates:  # a rank's few rows: all ranks hand in as many
            missing = plan.candidates - self.best_Rk.shape[1]
            self.best_Rk = torch.nn.functional.pad(self.best_Rk, (0, missing), value=-math.inf)
        self.own_R: Tensor | bool = True  # whether this rank has the largest logit
        if self.group is not None:
            self._join()
        self.max_R1 = self.max_R.unsqueeze(1)

    def _look(self, z_RC: Tensor, start: int) -> None:
        """Take a tile's maximum and its largest logits into account."""
        max_R, at_R = z_RC.max(1)
        self.largest_R = torch.where(max_R > self.max_R, at_R + start, self.largest_R)
        self.max_R = torch.maximum(self.max_R, max_R)
        count = self.plan.candidates
        found_Rk = z_RC.topk(min(count, z_RC.shape[1])).values if count > 1 else max_R.unsqueeze(1)
        if self.best_Rk.shape[1]:
            both = torch.cat((self.best_Rk, found_Rk), 1)
            found_Rk = both.topk(min(count, both.shape[1])).values
        self.best_Rk = found_Rk

    def _join(self) -> None:
        """Maxima and largest logits of all ranks; of several ranks with the largest logit the first has it."""
        everyone = gather_stacked(torch.cat((self.max_R.unsqueeze(0), self.best_Rk.T)), self.group)  # [ranks, 1 + k, R]
        maxima = everyone[:, 0]
        rank = torch.distributed.get_rank(self.group)
        top_R = maxima.amax(0)
        self.own_R = (maxima[rank] == top_R) & ~(maxima[:rank] == top_R).any(0)
        self.max_R = top_R
        self.best_Rk = everyone[:, 1:].permute(2, 0, 1).flatten(1).topk(self.plan.candidates).values

    def scores(self) -> Forwarded:
        """Of the block's tokens; log_probs are [R, K]."""
        p = self.plan.problem
        threshold_R = self._threshold()
        sums = self._sums(threshold_R.unsqueeze(1))
        log_sum, total = sums.rest.log1p(), sums.rest + 1.0
        below_RK = sums.label_RK - self.max_R1
        is_kept_RK = sums.label_RK >= threshold_R.unsqueeze(1)
        over_RK = (below_RK - log_sum.unsqueeze(1)).exp()  # a label's mass, over the kept tokens'
        added_RK = torch.where(is_kept_RK, 0.0, over_RK.log1p())
        log_prob_RK = (below_RK - log_sum.unsqueeze(1) - added_RK).clamp(max=0.0) + 0.0
        entropy = (log_sum - sums.moment / total).clamp(0.0, math.log(p.vocab_size))
        # Halfway to the next logit: a backward whose logits are off by rounding draws the same line. Not where that is
        # the next logit itself, which is the neighbouring float or −inf.
        line_R = (threshold_R + sums.dropped) / 2
        line_R = torch.where((line_R > sums.dropped) & (line_R <= threshold_R), line_R, threshold_R)
        stats = torch.cat((torch.stack((self.max_R, log_sum, entropy, line_R)), added_RK.neg().exp().T))
        found = {
            "sum_sq_probs": (sums.squares / total.square()).unsqueeze(0),
            "mean_logit": (sums.sum / p.vocab_size).unsqueeze(0),
            "is_argmax": (sums.label_RK == self.max_R1).T,
            "is_kept": is_kept_RK.T,
        }
        extras = torch.cat([found[name].to(self.plan.dtype) for name in p.stats]) if p.stats else None
        return Forwarded(log_prob_RK, entropy, stats, stats, extras)

    # The threshold

    def _threshold(self) -> Tensor:
        """[R] the least logit that is kept."""
        p = self.plan.problem
        threshold_R = torch.full_like(self.max_R, -math.inf)
        if p.top_k is not None:
            threshold_R = self.best_Rk[:, p.top_k - 1]
        if p.top_p is None:
            return threshold_R
        wanted_R = self._mass(threshold_R, above=False) * p.top_p
        mass_Rk = (self.best_Rk - self.max_R1).double().exp()
        before_Rk = mass_Rk.cumsum(1) - mass_Rk
        last_R1 = ((before_Rk < wanted_R.unsqueeze(1)).sum(1, keepdim=True) - 1).clamp_(min=0)
        found_R = torch.maximum(threshold_R, self.best_Rk.gather(1, last_R1).squeeze(1))
        if p.top_k is not None or self.plan.candidates == p.vocab_size:
            return found_R
        held_R = before_Rk[:, -1] + mass_Rk[:, -1] >= wanted_R
        if p.dead is not None:  # the host may not be asked
            return torch.where(held_R, found_R, self._search(wanted_R, None))
        beyond = held_R.logical_not().nonzero().squeeze(1)
        if beyond.shape[0]:
            found_R[beyond] = self._search(wanted_R[beyond], beyond)
        return found_R

    def _search(self, wanted_r: Tensor, rows: Tensor | None) -> Tensor:
        """The smallest t such that the logits above it have less than the wanted mass, of all rows or of some."""
        high = _ordered(self.max_R if rows is None else self.max_R[rows])
        low = torch.full_like(high, int(_ordered(self.max_R.new_tensor([-math.inf]))))
        for _ in range(self.plan.dtype.itemsize * 8):
            middle = (low & high) + ((low ^ high) >> 1)  # their mean; the sum may overflow
            less = self._mass(_unordered(middle, self.plan.dtype), above=True, rows=rows) < wanted_r
            high, low = torch.where(less, middle, high), torch.where(less, low, middle)
        return _unordered(high, self.plan.dtype)

    def _mass(self, limit_r: Tensor, *, above: bool, rows: Tensor | None = None) -> Tensor:
        """[r] float64 Σ e^(z−M) of logits above a limit, or of those and the ones at it."""
        mass_r = torch.zeros_like(limit_r, dtype=torch.float64)
        max_r1, limit_r1 = self.max_R1 if rows is None else self.max_R1[rows], limit_r.unsqueeze(1)
        for columns, z_RC in self.tiles:
            z, e = (self.plan.scratch(i, self.rows, columns)[: len(limit_r)] for i in (1, 2))
            z = z_RC if rows is None else torch.index_select(z_RC, 0, rows, out=z)
            torch.sub(z, max_r1, out=e).clamp_(min=FLOOR[self.plan.dtype]).exp_()
            e.masked_fill_(z <= limit_r1 if above else z < limit_r1, 0.0)
            mass_r += e.sum(1)
        if self.group is not None:
            mass_r = gather_stacked(mass_r, self.group).sum(0)
        return mass_r

    # Sums over what is kept

    def _sums(self, threshold_R1: Tensor) -> _Sums:
        zeros, lowest_R = torch.zeros_like(self.max_R), torch.full_like(self.max_R, -math.inf)
        rest, moment, squares, total, dropped = zeros, zeros, zeros, zeros, lowest_R
        label_RK: Tensor | None = None
        for columns, z_RC in self.tiles:
            d_RC, e_RC = self.plan.scratch(1, self.rows, columns), self.plan.scratch(2, self.rows, columns)
            local_RK, inside_RK = label_columns(self.plan, self.rows, columns)
            seen_RK = z_RC.gather(1, local_RK).masked_fill_(~inside_RK, -math.inf)
            label_RK = seen_RK if label_RK is None else torch.maximum(label_RK, seen_RK)
            torch.sub(z_RC, self.max_R1, out=d_RC).clamp_(min=FLOOR[self.plan.dtype])
            outside_RC = z_RC < threshold_R1
            torch.exp(d_RC, out=e_RC).masked_fill_(outside_RC, 0.0)
            moment = moment + torch.linalg.vecdot(e_RC, d_RC)
            if "sum_sq_probs" in self.plan.problem.stats:
                squares = squares + torch.linalg.vecdot(e_RC, e_RC)
            if "mean_logit" in self.plan.problem.stats:
                total = total + z_RC.sum(1)
            rest = rest + self._without_largest(e_RC, columns).sum(1)
            dropped = torch.maximum(dropped, d_RC.copy_(z_RC).masked_fill_(~outside_RC, -math.inf).amax(1))
        if label_RK is None:
            label_RK = lowest_R.unsqueeze(1).expand(-1, *self.rows.label_R.shape[1:] or (1,))
        sums = _Sums(rest, moment, squares, total, label_RK, dropped)
        return sums if self.group is None else self._across(sums)

    def _without_largest(self, e_RC: Tensor, columns: range) -> Tensor:
        at_R1 = (self.largest_R - columns.start).unsqueeze(1)
        inside_R1 = (at_R1 >= 0) & (at_R1 < len(columns))
        if isinstance(self.own_R, Tensor):
            inside_R1 &= self.own_R.unsqueeze(1)
        at_R1.clamp_(0, len(columns) - 1)
        return e_RC.scatter_(1, at_R1, e_RC.gather(1, at_R1) - inside_R1.to(e_RC.dtype))

    def _across(self, sums: _Sums) -> _Sums:
        own = torch.stack((sums.rest, sums.moment, sums.squares, sums.sum, sums.dropped, *sums.label_RK.T))
        everyone = gather_stacked(own, self.group)
        added, largest = everyone[:, :4].sum(0), everyone[:, 4:].amax(0)
        return replace(
            sums,
            **dict(zip(("rest", "moment", "squares", "sum"), added, strict=True)),
            dropped=largest[0],
            label_RK=largest[1:].T,
        )


def _ordered(x: Tensor) -> Tensor:
    """Integers in the order of the floats."""
    bits = x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)
    largest = torch.iinfo(bits.dtype).max
    return (bits ^ ((bits >> (x.dtype.itemsize * 8 - 1)) & largest)).long()


def _unordered(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats that `_ordered` made them of."""
    bits = keys.to(torch.int32 if dtype == torch.float32 else torch.int64)
    largest = torch.iinfo(bits.dtype).max
    return (bits ^ ((bits >> (dtype.itemsize * 8 - 1)) & largest)).view(dtype)
