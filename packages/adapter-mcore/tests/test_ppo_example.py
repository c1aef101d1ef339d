"""`examples/ppo_mcore.py` on two processes: data-, tensor- and pipeline-parallel."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cpu import parallel

from logitless.testing.distributed import run_ranks

PATH = Path(__file__).resolve().parents[3] / "examples" / "ppo_mcore.py"


def load_example() -> Any:
    if not PATH.is_file():
        pytest.skip("the examples are not part of the package", allow_module_level=True)
    spec = importlib.util.spec_from_file_location("ppo_mcore", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ppo_mcore"] = module  # where its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


ppo_mcore = load_example()


def rows(rank: int, size: int, tp: int, pp: int) -> list[tuple[float, ...]]:
    with parallel(tp=tp, pp=pp):
        found = ppo_mcore.train(torch.device("cpu"))
        return [(row.ratio_error, row.policy_loss, row.value_loss, row.entropy) for row in found]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)], ids=["dp2", "tp2", "pp2"])
def test_the_first_ratio_is_one_and_then_the_policy_moves(tp: int, pp: int) -> None:
    for found in [of_rank for of_rank in run_ranks(2, rows, tp, pp) if of_rank]:
        assert len(found) == 4
        assert [row[0] for row in found][::2] == [0.0, 0.0]  # of each rollout's first update
        assert all(row[0] > 1e-4 for row in found[1::2])
        assert found[1][1] < found[0][1]  # the clipped loss falls
        assert found[1][2] < found[0][2]


def test_tensor_parallelism_trains_alike() -> None:
    whole, sharded = run_ranks(1, rows, 1, 1)[0], run_ranks(2, rows, 2, 1)[0]
    torch.testing.assert_close(torch.tensor(sharded), torch.tensor(whole), rtol=1e-4, atol=1e-4)
