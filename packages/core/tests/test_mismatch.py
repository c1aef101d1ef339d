"""Worked values, sums that add up, and what must not be looked at."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from logitless import PackedBatch
from logitless.errors import InputTypeError, InvalidInputError
from logitless.mismatch import Mismatch, rollout_mismatch
from logitless.testing.distributed import run_ranks

TRAINER = torch.tensor([-1.0, -2.0, -0.5, -3.0])
ENGINE = torch.tensor([-1.0, -1.8, -0.65, -3.09])  # Δ 0, −0.2, 0.15, 0.09: ratios 1, 0.819, 1.162, 1.094


def test_worked_values() -> None:
    found = rollout_mismatch(TRAINER, ENGINE)
    assert found.tokens == 4
    assert found.outside == 2
    k3 = [0.0, math.exp(-0.2) - 1 + 0.2, math.exp(0.15) - 1 - 0.15, math.exp(0.09) - 1 - 0.09]
    expected = {
        "tokens": 4,
        "mean_delta": 0.01,
        "mean_abs_delta": 0.11,
        "max_abs_delta": 0.2,
        "kl": sum(k3) / 4,
        "share_outside": 0.5,
    }
    report = json.loads(json.dumps(found.to_dict()))
    assert report.pop("ratio_interval") == [0.9, 1.1]
    assert report == pytest.approx(expected, abs=1e-7)


def test_equal_log_probs_have_none() -> None:
    assert rollout_mismatch(TRAINER, TRAINER.clone()) == Mismatch(4)


def test_kl_is_that_of_the_distributions() -> None:
    """In expectation over the engine's tokens: here each token as often as the engine samples it."""
    g = torch.Generator().manual_seed(0)
    count = torch.tensor([1, 2, 3, 10, 24])
    engine = (count.double() / count.sum()).log()
    trainer = (engine + 0.3 * torch.randn(5, generator=g, dtype=torch.float64)).log_softmax(-1)
    token = torch.arange(5).repeat_interleave(count)
    found = rollout_mismatch(trainer[token], engine[token])
    kl = float((engine.exp() * (engine - trainer)).sum())
    assert found.kl == pytest.approx(kl, rel=1e-9)
    assert -found.mean_delta == pytest.approx(kl, rel=1e-9)


def test_masked_tokens_are_not_looked_at() -> None:
    trainer, engine = TRAINER.clone(), ENGINE.clone()
    trainer[1], engine[3] = torch.nan, -torch.inf
    found = rollout_mismatch(trainer, engine, torch.tensor([1, 0, 1, 0]))
    assert asdict(found) == pytest.approx(asdict(rollout_mismatch(TRAINER[[0, 2]], ENGINE[[0, 2]])))
    with pytest.raises(InvalidInputError, match="NaN or infinite values at tokens that count"):
        rollout_mismatch(trainer, engine, torch.tensor([1, 1, 1, 0]))
    with pytest.raises(InvalidInputError, match="NaN or infinite"):
        rollout_mismatch(trainer, engine, torch.tensor([1, 0, 1, 1]))


def test_parts_add_up() -> None:
    first, second = rollout_mismatch(TRAINER[:3], ENGINE[:3]), rollout_mismatch(TRAINER[3:], ENGINE[3:])
    for parts in (first + second, second + first + Mismatch()):  # the largest in either
        assert asdict(parts) == pytest.approx(asdict(rollout_mismatch(TRAINER, ENGINE)))


def test_of_one_token() -> None:
    assert rollout_mismatch(TRAINER[1:2], ENGINE[1:2]).mean_abs_delta == pytest.approx(0.2)


def test_of_no_tokens() -> None:
    for found in (rollout_mismatch(TRAINER[:0], ENGINE[:0]), rollout_mismatch(TRAINER, ENGINE, torch.zeros(4))):
        assert found == Mismatch()
        assert found.kl == found.share_outside == found.mean_abs_delta == 0.0


def test_a_packed_batch() -> None:
    """The engine's log-probs stand at their tokens, padding and prompts hold anything, and scores come packed."""
    batch = PackedBatch.from_padded(
        torch.tensor([[0, 5, 6, 7], [5, 6, 7, 8]]),
        torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
        loss_mask=torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]]),
    )
    engine = torch.tensor([[torch.nan, torch.nan, -1.0, -1.8], [torch.nan, torch.nan, -0.65, -3.09]])
    trainer = torch.zeros(7)
    trainer[[0, 1, 4, 5]] = TRAINER
    found = rollout_mismatch(trainer, batch.pack(engine, of="token"), batch.labels != -100)
    assert asdict(found) == pytest.approx(asdict(rollout_mismatch(TRAINER, ENGINE)))


def test_an_engine_that_calls_a_token_impossible_still_gives_json() -> None:
    found = rollout_mismatch(TRAINER, torch.tensor([-1.0, -9999.0, -0.5, -3.0]))
    assert found.max_abs_delta == 9997.0
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["kl"] is None


def of_rank(rank: int, size: int) -> Mismatch:
    part: list[Tensor] = [x[rank * 3 : (rank + 1) * 3] for x in (TRAINER, ENGINE)]
    return rollout_mismatch(*part, group=dist.group.WORLD)


def test_ranks_see_the_whole() -> None:
    for found in run_ranks(2, of_rank):
        assert asdict(found) == pytest.approx(asdict(rollout_mismatch(TRAINER, ENGINE)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((TRAINER, [1.0]), InputTypeError, "rollout_log_probs: got list, expected a float tensor"),
        ((TRAINER.long(), ENGINE), InputTypeError, "log_probs: got torch.int64"),
        ((TRAINER, ENGINE[:3]), InvalidInputError, r"rollout_log_probs: got shape \(3,\), expected \(4,\)"),
        ((TRAINER, ENGINE, torch.ones(2)), InvalidInputError, r"mask: got shape \(2,\), expected \(4,\)"),
    ],
    ids=["list", "ints", "shape", "mask"],
)
def test_bad_input_is_named(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rollout_mismatch(*arguments)
