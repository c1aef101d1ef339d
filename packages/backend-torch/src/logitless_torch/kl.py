"""Divergence of two heads, tile by tile of both; equals `logitless.reference.linear_kl`.

Per token, of the student's logits z and the teacher's: M = max z and S = Σ e^(z−M) of each, and of the one that weighs
the divergence, a, over the other, b,

    gap = Σ e^(z_a−M_a)·((z_a − M_a) − (z_b − M_b))        KL(a‖b) = gap/S_a + log S_b − log S_a

in one sweep. Jensen-Shannon weighs logarithms of a mixture, so it takes another one, when both normalisers are known.
What is kept are both heads' logits of the leading tiles: every sweep but the first reads them.

Shape suffixes: n live tokens, R rows (tokens) of a tile, C columns (vocab rows) of a tile; index 0 is the student's, 1
the teacher's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import Gradients, Needs, Problem
from logitless_torch.backward import NEGLIGIBLE, Sums
from logitless_torch.tiles import FLOOR, Columns, KeptTiles, Rows, TilePlan

__all__ = ["kl_backward", "kl_forward"]

LOWEST = -1e30  # where maxima start: finite, and so are the differences of two


class Plans:
    """Both heads' tiles, cut alike; each may take half of the workspace, and of what is kept."""

    def __init__(self, student: Problem, teacher: Problem, kept: Tensor | None) -> None:
        half = max(1, student.workspace_bytes // 2)
        self.both = tuple(TilePlan(replace(p, workspace_bytes=half)) for p in (student, teacher))
        rows, columns = min(plan.rows for plan in self.both), min(plan.columns for plan in self.both)
        for plan in self.both:
            plan.rows, plan.columns = rows, columns
        self.halves = student.hidden.new_empty(2, 0, dtype=torch.uint8) if kept is None else kept.view(2, -1)

    def sweep(self, *, again: bool) -> Iterator[tuple[Columns, Columns]]:
        """The blocks of columns, of which each tile's logits are to be asked for once; `again`: not the first time."""
        self.again = again
        self.kept = [KeptTiles(plan, half) for plan, half in zip(self.both, self.halves, strict=True)]
        return zip(*(plan.each_columns() for plan in self.both), strict=True)

    def each_rows(self) -> Iterator[tuple[Rows, Rows]]:
        return zip(*(plan.each_rows(plan.whole()) for plan in self.both), strict=True)

    def logits(self, rows: tuple[Rows, Rows], columns: tuple[Columns, Columns]) -> tuple[Tensor, Tensor]:
        """Both heads' tempered logits [R, C], in the first scratch tile of each."""
        tiles = self.scratch(0, rows, columns)
        for plan, row, column, tile, kept in zip(self.both, rows, columns, tiles, self.kept, strict=True):
            place, is_kept = kept.next(row, column)
            if is_kept and self.again:
                tile.copy_(place)
                continue
            plan.logits(row, column, tile)
            if is_kept:
                place.copy_(tile)
        return tiles

    def scratch(self, index: int, rows: tuple[Rows, Rows], columns: tuple[Columns, Columns]) -> tuple[Tensor, Tensor]:
        """One more tile [R, C] of each."""
        student, teacher = self.both
        return student.scratch(index, rows[0], columns[0]), teacher.scratch(index, rows[1], columns[1])


def _fold(parts: Tensor, weigh: int) -> Tensor:
    """Statistics [k, 5, n] of blocks of columns, or of ranks, to those of all: rows M, M, S, S and gap."""
    top = parts[:, :2].amax(0)
    shift = parts[:, :2] - top
    factor = shift.exp()
    gap = (parts[:, 4] + parts[:, 2 + weigh] * (shift[:, weigh] - shift[:, 1 - weigh])) * factor[:, weigh]
    gap = gap.masked_fill_(factor[:, weigh] == 0, 0.0)  # what is infinite where nothing weighs it counts nothing
    return torch.cat((top, (parts[:, 2:4] * factor).sum(0), gap.sum(0, keepdim=True)))


def _tile_statistics(
    plans: Plans, rows: tuple[Rows, Rows], columns: tuple[Columns, Columns], weigh: int, gap: bool
) -> Tensor:
    """[5, R] of one tile."""
    differences, exps = plans.logits(rows, columns), plans.scratch(1, rows, columns)
    maxima, sums = [], []
    for d_RC, e_RC in zip(differences, exps, strict=True):
        max_R1 = d_RC.amax(1, keepdim=True).clamp_(min=LOWEST)
        torch.threshold_(torch.exp(d_RC.sub_(max_R1), out=e_RC), torch.finfo(e_RC.dtype).tiny, 0.0)
        maxima.append(max_R1.squeeze(1))
        sums.append(e_RC.sum(1))
    gap_R = torch.zeros_like(sums[0])
    if gap:
        ratio_RC = plans.both[0].scratch(2, rows[0], columns[0])
        torch.sub(differences[weigh], differences[1 - weigh], out=ratio_RC)
        gap_R = torch.linalg.vecdot(exps[weigh], ratio_RC.masked_fill_(exps[weigh] == 0, 0.0))  # 0·log(0/b) = 0
    return torch.stack((*maxima, *sums, gap_R))


def _mixture_sums(
    plans: Plans, rows: tuple[Rows, Rows], columns: tuple[Columns, Columns], stats: Tensor, beta: float
) -> Tensor:
    """[2, R] of one tile: Σ p·log(p/m) and Σ q·log(q/m), by p's ratio to q, which is exactly 1 where they are equal."""
    logs = plans.logits(rows, columns)
    for x_RC, top_R, log_sum_R in zip(logs, stats[:2], stats[2:4], strict=True):
        x_RC.sub_(top_R.unsqueeze(1)).sub_(log_sum_R.unsqueeze(1)).clamp_(min=FLOOR[x_RC.dtype])
    p_RC, q_RC = (torch.exp(x, out=e) for x, e in zip(logs, plans.scratch(1, rows, columns), strict=True))
    ratio_RC, other_RC = plans.scratch(2, rows, columns)
    torch.sub(logs[1], logs[0], out=ratio_RC)
    torch.neg(ratio_RC, out=other_RC)
    found = (
        torch.linalg.vecdot(weight, x.expm1_().mul_(share).log1p_())
        for weight, x, share in ((p_RC, ratio_RC, beta), (q_RC, other_RC, 1.0 - beta))
    )
    return torch.stack(tuple(found)).neg_()


def kl_forward(
    student: Problem, teacher: Problem, *, direction: str, beta: float, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Divergences [n] and, for the backward, M and log S of both and what p's slope is relative to: [5, n].

    `kept` is filled with logits.
    """
    plans, weigh = Plans(student, teacher, None if kept is None else kept.zero_()), 1 if direction == "forward" else 0
    plan = plans.both[0]
    stats = student.hidden.new_zeros(5, plan.n, dtype=plan.dtype)
    stats[:2] = LOWEST
    for columns in plans.sweep(again=False):
        for rows in plans.each_rows():
            mine = stats[:, rows[0].start : rows[0].stop]
            tile = _tile_statistics(plans, rows, columns, weigh, direction != "jsd")
            mine.copy_(_fold(torch.stack((mine, tile)), weigh))
    if student.group is not None:
        stats = _fold(gather_stacked(stats, student.group), weigh)
    sums, gap = stats[2:4].clone(), stats[4].clone()
    stats[2:4] = sums.log()
    if direction != "jsd":
        value = (gap / sums[weigh] + (stats[3 - weigh] - stats[2 + weigh])).clamp(min=0.0)
        stats[4] = value
        return value, stats
    shares = torch.zeros_like(stats[:2])
    for columns in plans.sweep(again=True):
        for rows in plans.each_rows():
            span = slice(rows[0].start, rows[0].stop)
            shares[:, span] += _mixture_sums(plans, rows, columns, stats[:, span], beta)
    if student.group is not None:
        shares = gather_stacked(shares, student.group).sum(0)
    stats[4] = shares[0]
    # The sum, not each of the two: next to equal heads their roundings are large, of opposite sign, and cancel.
    return (beta * shares[1] + (1.0 - beta) * shares[0]).clamp_(min=0.0), stats


def _dz(
    plans: Plans,
    rows: tuple[Rows, Rows],
    columns: tuple[Columns, Columns],
    stats: Tensor,
    up_R1: Tensor,
    direction: str,
    beta: float,
) -> Tensor:
    """`up`·(p − q), `up`·p·(log(p/q) − KL) or `up`·(1 − β)·p·(log(p/m) − KL(p‖m)) of one tile, through the softcap."""
    z_RC, log_q_RC = plans.logits(rows, columns)
    (log_p_RC, q_RC), p_RC = plans.scratch(1, rows, columns), plans.both[0].scratch(2, rows[0], columns[0])
    torch.sub(z_RC, stats[0].unsqueeze(1), out=log_p_RC).sub_(stats[2].unsqueeze(1))
    log_q_RC.sub_(stats[1].unsqueeze(1)).sub_(stats[3].unsqueeze(1))
    torch.threshold_(torch.exp(log_p_RC, out=p_RC), NEGLIGIBLE, 0.0)
    if direction == "forward":
        dz_RC = p_RC.sub_(torch.threshold_(torch.exp(log_q_RC, out=q_RC), NEGLIGIBLE, 0.0))
    else:
        if direction == "reverse":
            slope_RC = log_p_RC.sub_(log_q_RC)
        else:
            floor = FLOOR[plans.both[0].dtype]
            torch.sub(log_q_RC.clamp_(min=floor), log_p_RC.clamp_(min=floor), out=q_RC)
            slope_RC = q_RC.expm1_().mul_(beta).log1p_().mul_(beta - 1.0)
        relative = stats[4] * (1.0 if direction == "reverse" else 1.0 - beta)
        slope_RC.masked_fill_(p_RC == 0, 0.0)
        dz_RC = p_RC.mul_(slope_RC.sub_(relative.unsqueeze(1)))
    cap = plans.both[0].problem.softcap
    if cap is not None:
        tanh_RC = z_RC.div_(rows[0].inverse_temperature).div_(cap)
        dz_RC.mul_(tanh_RC.square_().neg_().add_(1.0))
    return dz_RC.mul_(up_R1)


def kl_backward(
    student: Problem,
    teacher: Problem,
    stats: Tensor,
    grad: Tensor,
    needs: Needs,
    *,
    direction: str,
    beta: float,
    kept: Tensor | None = None,
) -> Gradients:
    """The student's gradients for upstream [n]; the products of those that nobody needs are not run."""
    plans = Plans(student, teacher, kept)
    plan = plans.both[0]
    sums = Sums(plan, needs, None, by_tile=True)
    # |p·(log(p/q) − KL)| is at most KL + 1: what float16's dz must have room for.
    sums.begin_pass(plan.whole(), (grad if direction == "forward" else grad * (1.0 + stats[4]), None))
    for columns in plans.sweep(again=True):
        sums.open(columns[0])
        for rows in plans.each_rows():
            span = slice(rows[0].start, rows[0].stop)
            factor = rows[0].inverse_temperature * student.scale
            if sums.dz_scale is not None:
                factor = sums.dz_scale * factor
            up_R1 = grad[span].unsqueeze(1) * factor
            sums.add(_dz(plans, rows, columns, stats[:, span], up_R1, direction, beta), rows[0], columns[0])
        sums.close(columns[0])
    return sums.finish()
