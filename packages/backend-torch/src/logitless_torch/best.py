"""The k largest logits of each row, tile by tile; equals `logitless.reference.top_k_log_probs`.

Shape suffixes as in `logitless_torch.tiles`; k of the whole vocabulary's best, q of a tile's, P rows of a part of a
block: a quarter of the workspace is for the tile, half for a part's candidates, whatever k is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import Problem
from logitless_torch.forward import Statistics, tile_statistics
from logitless_torch.tiles import TilePlan

__all__ = ["top_k_log_probs"]

Best = tuple[Tensor, Tensor]
"""Logits and ids, largest first."""


def top_k_log_probs(problem: Problem, k: int) -> tuple[Tensor, Tensor]:
    """Ids [n, k] and log-probs [n, k] of the k largest logits, largest first; of equal ones the lowest id first."""
    # Labels [N, 1]: the sum then leaves out the largest logit.
    quarter = max(1, problem.workspace_bytes // 4)
    problem = replace(problem, labels=problem.labels.unsqueeze(1), workspace_bytes=quarter)
    plan = TilePlan(problem)
    running = Statistics.empty(plan.n, problem.hidden, plan.dtype, problem)
    value_nk = problem.hidden.new_full((plan.n, k), -float("inf"), dtype=plan.dtype)
    id_nk = torch.full_like(value_nk, torch.iinfo(torch.int64).max, dtype=torch.int64)
    for columns in plan.each_columns():
        for rows in plan.each_rows(plan.whole()):
            z_RC = plan.scratch(0, rows, columns)
            plan.logits(rows, columns, z_RC)
            running.rows(slice(rows.start, rows.stop)).absorb(tile_statistics(plan, z_RC, rows, columns))
            spare_RC, first_id = plan.scratch(1, rows, columns), columns.start + problem.vocab_start
            for part in _parts(rows.stop - rows.start, k + min(k, z_RC.shape[1]), plan):
                value_Pq, id_Pq = _of_tile(z_RC[part], spare_RC[part], first_id, k)
                span = slice(rows.start + part.start, rows.start + part.stop)
                value_Pq, id_Pq = torch.cat((value_nk[span], value_Pq), 1), torch.cat((id_nk[span], id_Pq), 1)
                value_nk[span], id_nk[span] = _merged(value_Pq, id_Pq, k)
    if problem.group is not None:
        running = running.across(problem.group)
        for part in _parts(plan.n, k * problem.group.size(), plan):
            ranks = (gather_stacked(x[part].T, problem.group) for x in (value_nk, id_nk))
            values, ids = (x.permute(2, 0, 1).flatten(1) for x in ranks)
            value_nk[part], id_nk[part] = _merged(values, ids, k)
    log_sum_n1 = running.rest.log1p().unsqueeze(1)
    return id_nk, value_nk.sub_(running.max.unsqueeze(1)).sub_(log_sum_n1).clamp_(max=0.0).add_(0.0)


def _parts(count: int, candidates: int, plan: TilePlan) -> Iterator[slice]:
    """Rows of which so many candidates fit half the workspace, one at least."""
    # At most, as `_merged` holds them: as given, by id and by value, with the orders of both, and the tile's own.
    each = candidates * (4 * plan.dtype.itemsize + 5 * torch.int64.itemsize)
    step = max(1, 2 * plan.problem.workspace_bytes // each)
    return (slice(first, min(first + step, count)) for first in range(0, count, step))


def _of_tile(z_PC: Tensor, spare_PC: Tensor, first_id: int, k: int) -> Best:
    """The best of a tile's rows, at most k; overwrites `spare_PC`."""
    width = z_PC.shape[1]
    value_Pq, at_Pq = z_PC.topk(min(k, width), 1)
    least_P1 = value_Pq[:, -1:]
    # Which of the logits equal to the least are taken is not defined: take those of the lowest ids.
    rank_C = torch.arange(width, 0, -1, device=z_PC.device, dtype=z_PC.dtype)
    equal_Pq = spare_PC.copy_(z_PC == least_P1).mul_(rank_C).topk(value_Pq.shape[1], 1).indices
    slot_q, larger_P1 = torch.arange(value_Pq.shape[1], device=z_PC.device), (value_Pq > least_P1).sum(1, keepdim=True)
    filled_Pq = equal_Pq.gather(1, (slot_q - larger_P1).clamp_(min=0))
    at_Pq = torch.where(slot_q < larger_P1, at_Pq, filled_Pq).sort(1).values
    return z_PC.gather(1, at_Pq), at_Pq + first_id


def _merged(value: Tensor, ids: Tensor, k: int) -> Best:
    """The k best; of equal ones the lowest ids, so that places not filled yet come last."""
    ids, order = ids.sort(1)
    value, by_value = value.gather(1, order).sort(dim=1, descending=True, stable=True)
    return value[:, :k], ids.gather(1, by_value[:, :k])
