"""How a problem is cut: within the workspace, and by nothing but its sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from logitless.types import Problem
from logitless_torch.tiles import TilePlan, matmul

WIDE = 512 << 20


def problem(
    tokens: int = 40,
    vocab: int = 90,
    hidden_size: int = 8,
    *,
    dtype: torch.dtype = torch.float32,
    workspace_bytes: int = WIDE,
    **more: Any,
) -> Problem:
    torch.manual_seed(0)
    facts = {
        "bias": None,
        "lora_u": None,
        "lora_b": None,
        "labels": torch.randint(vocab, (tokens,)),
        "temperature": 1.0,
        "scale": 1.0,
        "softcap": None,
        "vocab_start": 0,
        "vocab_valid": vocab,
        "vocab_size": vocab,
        "live": None,
        "dead": None,
        **more,
    }
    hidden = torch.randn(tokens, hidden_size).to(dtype)
    weight = torch.randn(vocab, hidden_size).to(dtype)
    return Problem(hidden=hidden, weight=weight, workspace_bytes=workspace_bytes, **facts)


@pytest.mark.parametrize("workspace_bytes", [1, 3000, 20_000, WIDE])
@pytest.mark.parametrize("vocab_valid", [90, 61, 1])
def test_tiles_cover_everything_once(workspace_bytes: int, vocab_valid: int) -> None:
    plan = TilePlan(problem(workspace_bytes=workspace_bytes, vocab_valid=vocab_valid))
    seen = torch.zeros(40, 90)
    for columns in plan.each_columns():
        for rows in plan.each_rows(plan.whole()):
            assert columns.weight_CD.shape == (columns.stop - columns.start, 8)
            assert torch.equal(rows.hidden_RD, plan.problem.hidden[rows.start : rows.stop])
            seen[rows.start : rows.stop, columns.start : columns.stop] += 1
    assert torch.equal(seen, torch.ones(40, 90).masked_fill(torch.arange(90) >= vocab_valid, 0))


@pytest.mark.parametrize("workspace_bytes", [1, 3000, 20_000, 200_000])
def test_a_tile_fits_the_workspace_or_is_one_element(workspace_bytes: int) -> None:
    plan = TilePlan(problem(workspace_bytes=workspace_bytes))
    assert plan._bytes(plan.rows, plan.columns) <= workspace_bytes or plan.rows == plan.columns == 1


def test_live_tokens_are_taken_by_block_and_in_order() -> None:
    live = torch.tensor([1, 4, 5, 30, 39])
    plan = TilePlan(problem(live=live, workspace_bytes=300))
    taken = [rows.hidden_RD for rows in plan.each_rows(plan.whole())]
    assert len(taken) > 1
    assert torch.equal(torch.cat(taken), plan.problem.hidden[live])
    labels = torch.cat([rows.label_R for rows in plan.each_rows(plan.whole())])
    assert torch.equal(labels, plan.problem.labels[live])


def test_no_live_token_is_no_block() -> None:
    plan = TilePlan(problem(live=torch.empty(0, dtype=torch.int64)))
    assert list(plan.each_rows(plan.whole())) == []


def test_the_plan_depends_on_sizes_only() -> None:
    plain = TilePlan(problem(workspace_bytes=20_000))
    torch.manual_seed(1)
    other = TilePlan(
        problem(
            workspace_bytes=20_000,
            bias=torch.randn(90),
            softcap=3.0,
            scale=0.5,
            temperature=torch.rand(40) + 0.5,
        )
    )
    assert (plain.rows, plain.columns) == (other.rows, other.columns)


def test_half_weights_are_widened_tile_by_tile() -> None:
    plan = TilePlan(problem(dtype=torch.bfloat16, workspace_bytes=3000))
    columns = next(plan.each_columns())
    assert columns.weight_CD.dtype == torch.float32
    assert len(columns.weight_CD) < 90


def test_scratch_is_reused() -> None:
    plan = TilePlan(problem(workspace_bytes=20_000))
    rows, columns = next(plan.each_rows(plan.whole())), next(plan.each_columns())
    first = plan.scratch(0, rows, columns)
    assert plan.scratch(0, rows, columns).data_ptr() == first.data_ptr()
    assert plan.scratch(1, rows, columns).data_ptr() != first.data_ptr()


@pytest.mark.parametrize("accumulate", [False, True])
def test_matmul_writes_or_adds(accumulate: bool) -> None:
    a, b, start = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, 5)
    out = start.clone() if accumulate else torch.full((3, 5), float("nan"))
    matmul(a, b, out, accumulate=accumulate)
    torch.testing.assert_close(out, a @ b + start if accumulate else a @ b)
