"""Kept sets, several labels and statistics: a chunk of tokens' logits are held in fp32, in the workspace.

One pass over the products, as in `logitless_triton.forward`, whose kernel also stores each tile's x. What a kept set
needs is then looked up in memory, mostly in a few tiles of each row (`logitless_triton.shortlist`): a row of V logits
is written once, 4V bytes, where a second pass over the products would take 2DV operations. Without a kept set M, log2 S
and the entropy are the plain forward's, and so are one label's scores, bit by bit.

    log_prob = ((x − M)·f − log2 S)·ln 2, less ln(1 + e^that) for a label that is not kept: it alone is added to S

Labels are read off the held logits, so a label that is the row's maximum, or on the threshold's side of a tie, is so
exactly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import Forwarded, Problem
from logitless_triton.candidates import listed
from logitless_triton.forward import Scores, forward_pass, scan
from logitless_triton.kept import Kept
from logitless_triton.layout import LOGITS, held_rows
from logitless_triton.listing import Listing
from logitless_triton.rounds import kept_sums, search
from logitless_triton.rows import LOG2E, Rows, Work
from logitless_triton.shortlist import find
from logitless_triton.threshold import SUMS
from logitless_triton.tile import LN2, LOWEST, ceil_div

__all__ = ["Held", "HeldScores", "forward", "held_pass", "needs_logits"]

_LOWEST_KEY = -(0x7F800000 + 1)  # `logitless_triton.listing.key_of` −inf


def needs_logits(problem: Problem) -> bool:
    """Whether a forward has to hold logits."""
    truncated = problem.top_k is not None or problem.top_p is not None
    return truncated or problem.labels.ndim == 2 or bool(problem.stats)


class Held:
    """Logits of up to so many rows, in whole tiles; what lies beyond the vocabulary is anything, but for a `Listing`.

    `best` is how many of a row's largest logits are looked for, 0 where they are not.
    """

    def __init__(self, work: Work, best: int = 0) -> None:
        p, width = work.problem, work.config.forward.columns
        self.work, self.width = work, width
        everyones = best if p.group is None else best * p.group.size()
        short = best > 0 or (work.truncated and p.group is None)
        self.chunk = held_rows(work.n, p.vocab_size, width, p.workspace_bytes, short=short, best=everyones)
        self.tiles = ceil_div(work.head.valid, width)
        self.buffer = work.empty(min(self.chunk, work.n), self.tiles * width)

    def spans(self) -> list[tuple[int, int]]:
        """The chunks of tokens."""
        return [(start, min(start + self.chunk, self.work.n)) for start in range(0, self.work.n, self.chunk)]

    def kept(self, rows: Rows) -> Kept:
        """Where the forward's kernel puts them."""
        return Kept(LOGITS, self.work.head.valid, self.width, self.of(rows))

    def of(self, rows: Rows) -> Tensor:
        """[m, whole tiles] of a block of rows that was scanned last."""
        return self.buffer[: rows.count]

    def ended(self, rows: Rows) -> Tensor:
        """`of`, with −inf beyond the vocabulary."""
        logits, valid = self.of(rows), self.work.head.valid
        if valid < logits.shape[1]:
            logits[:, valid:] = -math.inf
        return logits

    def scan(self, rows: Rows) -> Tensor:
        """Hold the logits of a block of rows; tiles' statistics [3, tiles, >= m]."""
        parts = self.work.empty(3, self.tiles, ceil_div(rows.count, 16) * 16)
        scan(self.work, rows, self.kept(rows), None, parts)
        self.ended(rows)
        return parts

    def every_tile(self, rows: Rows, top: Tensor) -> Listing:
        """All of them, for each row; their numbers are not read."""
        count = rows.labels.new_full((rows.count,), self.tiles, dtype=torch.int32)
        outside = torch.full_like(top, -math.inf)
        return Listing(self.work, self.ended(rows), rows.f, top, count.unsqueeze(1), count, outside)


class HeldScores:
    """Scores of n tokens, and what they are made of, as they are filled in.

    Statistics for the backward: M, log2 S, the entropy, the line between kept and dropped logits, and of each label
    the log-prob, with its sign turned where the label is not kept; of one label and no kept set the plain forward's.
    """

    def __init__(self, work: Work) -> None:
        p, n = work.problem, work.n
        self.work, self.labels = work, p.labels.shape[1] if p.labels.ndim == 2 else 1
        self.plain = Scores(work, n)
        self.own = work.empty(len(SUMS) + 1 + self.labels, n)  # this rank's: SUMS, Σ x, x of the labels
        factor, labels, valid = work.factor(0, n), work.labels(0, n).reshape(n, self.labels), work.head.valid
        self.f = factor if isinstance(factor, Tensor) else work.empty(n).fill_(factor)
        self.columns = labels.clamp(0, max(valid - 1, 0))  # [n, K] those of the labels
        self.elsewhere = ((labels < 0) | (labels >= valid)).T  # [K, n] the label is another rank's
        self.threshold = work.empty(n)
        self.top = work.empty(2, n)  # M and S of the whole vocabulary
        several = p.labels.ndim == 2
        self.log_prob = work.empty(n, self.labels) if several else work.empty(n)
        self.entropy = work.empty(n)
        self.stats = work.empty(4 + self.labels, n) if several or work.truncated else self.plain.stats
        self.extras = work.empty(sum(self.labels if name.startswith("is_") else 1 for name in p.stats), n)

    def finish(self, start: int, stop: int) -> None:
        """Scores of tokens start to stop, from what `held_pass` has found in their logits."""
        p, span, count = self.work.problem, slice(start, stop), len(SUMS)
        rest, largest, moment, squares, dropped, total, *_ = own = self.own[:, span]
        label = own[count + 1 :].masked_fill_(self.elsewhere[:, span], -math.inf).T
        if p.group is not None:
            everyone = gather_stacked(own, p.group)
            rest, largest, moment, squares = everyone[:, :4].sum(0)
            dropped, total, label = everyone[:, 4].amax(0), everyone[:, 5].sum(0), everyone[:, count + 1 :].amax(0).T
        f, top = self.f[span], self.top[0, span]
        below = ((label - top.unsqueeze(1)) * f.unsqueeze(1) * LN2).clamp(max=0.0)  # [m, K]
        is_kept = torch.ones_like(below, dtype=torch.bool)
        if self.work.truncated:
            threshold, whole = self.threshold[span], self.top[1, span]
            rest = torch.where(whole.isnan(), whole, rest + (largest - 1.0))  # NaN in a tile that was not read
            mass, log_s = rest + 1.0, rest.log1p()
            entropy = (log_s - moment * LN2 / mass).clamp(0.0, math.log(p.vocab_size))
            is_kept = label >= threshold.unsqueeze(1)
            log_prob, coded = _truncated(below - log_s.unsqueeze(1), is_kept)
            self._store(span, log_prob, entropy)
            self.stats[:4, span] = torch.stack((top, log_s * LOG2E, entropy, _line(threshold, dropped)))
            self.stats[4:, span] = coded.T
        else:
            mass, plain = self.top[1, span], self.plain.stats[:, span]
            if p.labels.ndim == 2:
                log_prob = (below - plain[1].unsqueeze(1) * LN2).clamp(max=0.0) + 0.0
                self._store(span, log_prob, plain[2])
                self.stats[:4, span] = torch.stack((*plain[:3], torch.full_like(top, -math.inf)))
                self.stats[4:, span] = log_prob.T
            else:
                self._store(span, plain[3].unsqueeze(1), plain[2])
        found = {
            "sum_sq_probs": (squares / mass.square()).unsqueeze(0),
            "mean_logit": (total * f * (LN2 / p.vocab_size)).unsqueeze(0),
            "is_argmax": (label == top.unsqueeze(1)).T,
            "is_kept": is_kept.T,
        }
        if p.stats:
            self.extras[:, span] = torch.cat([found[name].to(self.extras.dtype) for name in p.stats])

    def _store(self, span: slice, log_prob: Tensor, entropy: Tensor) -> None:
        is_unknown = self.top[0, span] <= LOWEST.value  # as `logitless_triton.combine` has it
        log_prob = log_prob.masked_fill(is_unknown.unsqueeze(1), math.nan)
        self.log_prob[span] = log_prob if self.log_prob.ndim == 2 else log_prob.squeeze(1)
        self.entropy[span] = entropy.masked_fill(is_unknown, math.nan)


def _truncated(over: Tensor, is_kept: Tensor) -> tuple[Tensor, Tensor]:
    """log_probs [m, K] of labels whose masses over the kept set's are e^over; and the same, coded for the backward."""
    log_prob = torch.where(is_kept, over, over - over.exp().log1p()).clamp(max=0.0) + 0.0
    return log_prob, torch.where(is_kept, log_prob, -log_prob)


def _line(threshold: Tensor, dropped: Tensor) -> Tensor:
    """[m] halfway to the next logit: a backward whose logits are off by rounding draws the same line."""
    line = (threshold + dropped) / 2
    line = torch.where((line > dropped) & (line <= threshold), line, threshold)
    return torch.where(dropped == -math.inf, dropped, line)


def held_pass(held: Held, rows: Rows, scores: HeldScores, start: int) -> None:
    """Look at a block of rows, the tokens from `start` on; `HeldScores.finish` makes scores of it."""
    work, p, span = held.work, held.work.problem, slice(start, start + rows.count)
    own = scores.own[:, span]
    if work.truncated:
        rows = rows.with_factors(scores.f[span])
        scores.top[:, span] = _find(held, rows, held.scan(rows), scores.threshold[span], own)
    else:
        one = rows if rows.labels.ndim == 1 else rows.with_labels(rows.labels[:, 0].contiguous())
        forward_pass(work, one, held.kept(rows), scores.plain, start)
        scores.top[:, span] = scores.plain.stats[:2, span]
        scores.top[1, span].exp2_()
        if "sum_sq_probs" in p.stats:
            every = held.every_tile(rows, scores.top[0, span])
            kept_sums(every, torch.full_like(every.count, _LOWEST_KEY, dtype=torch.int64), scores.threshold[span], own)
    if "mean_logit" in p.stats:
        own[len(SUMS)] = held.of(rows)[:, : work.head.valid].sum(1)
    if work.head.valid:
        own[len(SUMS) + 1 :] = held.of(rows).gather(1, scores.columns[span]).T


def _find(held: Held, rows: Rows, parts: Tensor, threshold: Tensor, out: Tensor) -> Tensor:
    """M and S [2, m] of a block of rows; fills in the threshold [m], and this rank's sums over what it keeps."""
    work, p, f, total = held.work, held.work.problem, rows.f, None
    group = p.group
    logits, whole, bracket = listed(work, held.of(rows), f, parts, group, k=p.top_k, p=p.top_p)
    mass = whole[1]

    def kept(bracket: Tensor, wanted: Tensor, *, summed: int, count: bool, total: Tensor | None = None) -> Tensor:
        """Keys [m] of the thresholds, with `threshold` and `out` filled in."""
        if group is None:
            return find(logits, bracket, wanted, threshold, out, summed=summed, count=count, total=total)
        least = search(logits, bracket, wanted, group, count=count)
        kept_sums(logits, least, threshold, out)
        return least

    summed = 4 if "sum_sq_probs" in p.stats else 3  # of `SUMS`
    if p.top_k is not None:
        wanted = torch.full_like(f, float(p.top_k))
        least = kept(bracket, wanted, summed=summed if p.top_p is None else 2, count=True)
        if p.top_p is not None:
            own = out[:2].sum(0)
            mass = total = own if group is None else gather_stacked(own, group).sum(0)
            bracket = torch.stack((least, bracket[1]))
    if p.top_p is not None:
        kept(bracket, mass * p.top_p, summed=summed, count=False, total=total)
    return whole


def forward(problem: Problem, *, entropy: bool) -> Forwarded:
    """Scores of the live tokens, by chunks whose logits fit the workspace; keeps nothing."""
    work = Work(problem)
    held, scores = Held(work), HeldScores(work)
    for start, stop in held.spans():
        held_pass(held, work.rows(start, stop), scores, start)
    scores.finish(0, work.n)
    nothing = work.empty(0, dtype=torch.uint8)
    extras = scores.extras if problem.stats else None
    return Forwarded(scores.log_prob, scores.entropy if entropy else None, scores.stats, nothing, extras)
