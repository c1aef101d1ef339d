"""A problem as the kernels read it: the head's constants, and blocks of live tokens.

Shape suffixes: n live tokens, m tokens of a block, D hidden size, V vocab rows, r LoRA rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from logitless.types import Problem
from logitless_triton.config import INTERPRETED, Config, Device, Tile, config_for, device_facts
from logitless_triton.layout import partials_rows

__all__ = ["LOG2E", "Head", "Rows", "Work", "part"]

LOG2E = math.log2(math.e)


def part(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Rows start to stop; where that is all, without a view: the device may be waiting for the host."""
    return tensor if stop - start == tensor.shape[0] else tensor[start:stop]


@dataclass(slots=True)
class Head:
    """The head of a problem; `factor` and `pre` are those of `logitless_triton.tile`."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    lora_b: Tensor | None  # [V, r]
    valid: int  # rows that are real
    softcap: bool
    negate: bool  # the scale is negative, and no softcap has taken it up
    pre: float
    factor: float  # f = factor / T
    slope: float  # dz/dx = slope·f, softcap's 1 − tanh² aside

    @classmethod
    def of(cls, problem: Problem) -> Head:
        scale, cap = problem.scale, problem.softcap
        if scale == 0:
            cap = 1.0  # of any size: x is tanh(0·x), so that all are equal, as z are
        size = max(abs(scale), 1e-20) if cap is None else cap  # not 0 in fp32: times f, −inf has to stay −inf
        return cls(
            weight=problem.weight,
            bias=None if problem.bias is None else problem.bias.contiguous(),
            lora_b=problem.lora_b,
            valid=problem.vocab_valid,
            softcap=cap is not None,
            negate=cap is None and scale < 0,
            pre=1.0 if cap is None else scale / cap,
            factor=size * LOG2E,
            slope=scale / (size * LOG2E),
        )

    @property
    def hidden_size(self) -> int:
        return self.weight.shape[1]

    @property
    def rank(self) -> int:
        return 0 if self.lora_b is None else self.lora_b.shape[1]

    @property
    def lora_strides(self) -> tuple[int, ...]:
        return (0, 0) if self.lora_b is None else self.lora_b.stride()

    def columns(self, start: int, stop: int) -> Head:
        """The head of a block of vocab rows."""
        return Head(
            weight=self.weight[start:stop],
            bias=None if self.bias is None else self.bias[start:stop],
            lora_b=None if self.lora_b is None else self.lora_b[start:stop],
            valid=stop - start,
            softcap=self.softcap,
            negate=self.negate,
            pre=self.pre,
            factor=self.factor,
            slope=self.slope,
        )


@dataclass
class Rows:
    """A block of live tokens."""

    hidden: Tensor  # [m, D] in the operands' dtype; a view of the input where that needs no copy
    lora_u: Tensor | None  # [m, r]
    labels: Tensor  # [m] or [m, K] int64, rows of this rank's weight; out of range where another rank has it
    factor: Tensor | float  # f [m] float32; one number where it is the same for all tokens

    @property
    def count(self) -> int:
        return self.hidden.shape[0]

    @cached_property
    def f(self) -> Tensor:
        """[m] float32, for what takes no number: filling it is one launch more."""
        if isinstance(self.factor, Tensor):
            return self.factor
        return self.hidden.new_full((self.count,), self.factor, dtype=torch.float32)

    @property
    def lora_strides(self) -> tuple[int, ...]:
        return (0, 0) if self.lora_u is None else self.lora_u.stride()

    def span(self, start: int, stop: int) -> Rows:
        """Some of these rows."""
        lora_u = None if self.lora_u is None else self.lora_u[start:stop]
        factor = self.factor[start:stop] if isinstance(self.factor, Tensor) else self.factor
        return Rows(self.hidden[start:stop], lora_u, self.labels[start:stop], factor)

    def with_labels(self, labels: Tensor) -> Rows:
        """The same tokens with other labels."""
        return replace(self, labels=labels)

    def with_factors(self, f: Tensor) -> Rows:
        """The same tokens with f [m] as numbers in memory."""
        return replace(self, factor=f)


class Work:
    """A problem with what follows from it: the head, the device, the tiles.

    Args:
        holds: takes the tiles of held logits, as a kept set always does.
    """

    def __init__(self, problem: Problem, *, holds: bool = False) -> None:
        self.problem = problem
        self.head = Head.of(problem)
        self.n = problem.labels.shape[0] if problem.live is None else problem.live.shape[0]
        self.operand = torch.promote_types(problem.hidden.dtype, problem.weight.dtype)
        self.device: Device = device_facts(problem.hidden.device)
        config = config_for(self.device, self.operand, problem.hidden.shape[1])
        self.config: Config = config.holding if holds or self.truncated else config

    @property
    def truncated(self) -> bool:
        """Whether the scores are those of a kept set."""
        return self.problem.top_k is not None or self.problem.top_p is not None

    @property
    def item(self) -> int:
        """Bytes of an operand's number."""
        return self.operand.itemsize

    @property
    def partials_rows(self) -> int:
        """Tokens whose partial statistics are held at a time."""
        return partials_rows(self.problem.vocab_size, self.config.forward.columns, self.problem.workspace_bytes)

    @property
    def interpreted(self) -> bool:
        return self.device.capability == INTERPRETED

    def programs(self, tile: Tile) -> int:
        """Programs of a persistent grid."""
        return self.device.multiprocessors * tile.per_sm

    def multiplying(self, tile: Tile) -> dict[str, Any]:
        """What a kernel that multiplies is launched with, whatever else it does."""
        rank = self.head.rank
        return {
            "BM": tile.rows,
            "BN": tile.columns,
            "BK": tile.depth,
            "BR": max(16, min(64, 1 << (rank - 1).bit_length())) if rank else 16,
            "GROUP": tile.group,
            "PROGRAMS": self.programs(tile),
            "SOFTCAP": self.head.softcap,
            "NEGATE": self.head.negate,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory on the problem's device."""
        return self.problem.hidden.new_empty(shape, dtype=dtype)

    def _take(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """Of live tokens start to stop."""
        if self.problem.live is not None:
            return tensor.index_select(0, self.problem.live[start:stop])
        return part(tensor, start, stop)

    def labels(self, start: int, stop: int) -> Tensor:
        """Labels of live tokens start to stop, as `Rows` has them."""
        labels = self._take(self.problem.labels, start, stop)
        return labels - self.problem.vocab_start if self.problem.vocab_start else labels

    def factor(self, start: int, stop: int) -> Tensor | float:
        """f of live tokens start to stop, as `Rows` has it."""
        temperature = self.problem.temperature
        if isinstance(temperature, Tensor):
            return self.head.factor / self._take(temperature, start, stop).float()
        return self.head.factor / temperature

    def rows(self, start: int, stop: int) -> Rows:
        """Live tokens start to stop, gathered where tokens are ignored; dead ones (validate=False) read as 0."""
        p, span = self.problem, (start, stop)
        hidden = self._take(p.hidden, *span).to(self.operand)
        lora_u = None if p.lora_u is None else self._take(p.lora_u, *span)
        if p.dead is not None:
            dead = self._take(p.dead, *span).unsqueeze(1)
            hidden = hidden.masked_fill(dead, 0.0)
            lora_u = None if lora_u is None else lora_u.masked_fill(dead, 0.0)
        return Rows(hidden, lora_u, self.labels(*span), self.factor(*span))
