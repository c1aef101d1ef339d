"""The k largest logits of each row, tile by tile; equals `logitless.reference.top_k_log_probs`.

Shape suffixes as in `logitless_torch.tiles`; k of the whole vocabulary's best, q of a tile's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import Problem
from logitless_torch.forward import Statistics, tile_statistics
from logitless_torch.tiles import Columns, Rows, TilePlan

__all__ = ["top_k_log_probs"]

Best = tuple[Tensor, Tensor]
"""Logits and ids, largest first."""


def top_k_log_probs(problem: Problem, k: int) -> tuple[Tensor, Tensor]:
    """Ids [n, k] and log-probs [n, k] of the k largest logits, largest first; of equal ones the lowest id first."""
    # Labels [N, 1]: the sum then leaves out the largest logit. A tile's best take as much memory again as the tile.
    labels_N1, workspace = problem.labels.unsqueeze(1), max(1, problem.workspace_bytes // 4)
    problem = replace(problem, labels=labels_N1, workspace_bytes=workspace)
    plan = TilePlan(problem)
    running = Statistics.empty(plan.n, problem.hidden, plan.dtype, problem)
    value_nk = problem.hidden.new_full((plan.n, k), -float("inf"), dtype=plan.dtype)
    id_nk = torch.full_like(value_nk, torch.iinfo(torch.int64).max, dtype=torch.int64)
    for columns in plan.each_columns():
        for rows in plan.each_rows(plan.whole()):
            z_RC = plan.scratch(0, rows, columns)
            plan.logits(rows, columns, z_RC)
            span = slice(rows.start, rows.stop)
            running.rows(span).absorb(tile_statistics(plan, z_RC, rows, columns))
            value_Rq, id_Rq = _of_tile(plan, z_RC, rows, columns, k)
            value_Rq, id_Rq = torch.cat((value_nk[span], value_Rq), 1), torch.cat((id_nk[span], id_Rq), 1)
            value_nk[span], id_nk[span] = _merged(value_Rq, id_Rq, k)
    if problem.group is not None:
        running = running.across(problem.group)
        values, ids = (gather_stacked(x.T, problem.group).permute(2, 0, 1).flatten(1) for x in (value_nk, id_nk))
        value_nk, id_nk = _merged(values, ids, k)
    log_sum_n1 = running.rest.log1p().unsqueeze(1)
    below_nk = value_nk - running.max.unsqueeze(1)
    return id_nk, (below_nk - log_sum_n1).clamp(max=0.0) + 0.0


def _of_tile(plan: TilePlan, z_RC: Tensor, rows: Rows, columns: Columns, k: int) -> Best:
    """The tile's best, at most k."""
    width = z_RC.shape[1]
    value_Rq, at_Rq = z_RC.topk(min(k, width), 1)
    least_R1 = value_Rq[:, -1:]
    # Which of the logits equal to the least are taken is not defined: take those of the lowest ids.
    rank_C = torch.arange(width, 0, -1, device=z_RC.device, dtype=z_RC.dtype)
    equal_Rq = plan.scratch(1, rows, columns).copy_(z_RC == least_R1).mul_(rank_C).topk(value_Rq.shape[1], 1).indices
    slot_q, larger_R1 = torch.arange(value_Rq.shape[1], device=z_RC.device), (value_Rq > least_R1).sum(1, keepdim=True)
    filled_Rq = equal_Rq.gather(1, (slot_q - larger_R1).clamp_(min=0))
    at_Rq = torch.where(slot_q < larger_R1, at_Rq, filled_Rq).sort(1).values
    return z_RC.gather(1, at_Rq), at_Rq + (columns.start + plan.problem.vocab_start)


def _merged(value: Tensor, ids: Tensor, k: int) -> Best:
    """The k best; of equal ones the lowest ids, so that places not filled yet come last."""
    ids, order = ids.sort(1)
    value, by_value = value.gather(1, order).sort(dim=1, descending=True, stable=True)
    return value[:, :k], ids.gather(1, by_value[:, :k])
