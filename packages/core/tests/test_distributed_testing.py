"""`run_ranks` as it is on GPUs, as far as a machine without them can tell."""

from __future__ import annotations

import unittest
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logitless.errors import InvalidInputError
from logitless.testing.distributed import RANKS, _MadeOn, _moved, run_ranks

ELSEWHERE = torch.device("meta")


@dataclass(frozen=True)
class Pair:
    name: str
    x: Tensor


def test_what_a_rank_makes_is_on_its_device() -> None:
    generator = torch.Generator().manual_seed(0)
    with _MadeOn(ELSEWHERE):
        drawn = torch.randn(3, generator=generator, requires_grad=True)
        named = torch.zeros(3, device="cpu")
        linear = nn.Linear(2, 3)
    assert drawn.device == linear.weight.device == ELSEWHERE
    assert drawn.is_leaf
    assert drawn.requires_grad
    assert named.device.type == "cpu"


def test_arguments_are_moved() -> None:
    leaf = torch.ones(2, requires_grad=True)
    moved: Any = _moved({"a": [leaf, 3], "pair": Pair("p", leaf), "model": nn.Linear(2, 2)}, ELSEWHERE)
    tensors = [moved["a"][0], moved["pair"].x, moved["model"].weight]
    assert all(x.device == ELSEWHERE and x.requires_grad and x.is_leaf for x in tensors)
    assert moved["a"][1] == 3
    assert moved["pair"].name == "p"
    assert leaf.device.type == "cpu"


def test_too_few_gpus_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS, "nccl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(unittest.SkipTest, match="2 ranks need as many GPUs; here are 1"):
        run_ranks(2, lambda rank, size: None)


def test_ranks_of_another_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS, "mpi")
    with pytest.raises(InvalidInputError, match="LOGITLESS_RANKS: got 'mpi'"):
        run_ranks(1, lambda rank, size: None)
