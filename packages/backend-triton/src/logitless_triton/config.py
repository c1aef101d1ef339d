"""Tile shapes, from a table: by architecture and dtype, measured where the comment says so. Nothing is tuned at a call.

The bits of a score depend on the forward's tile and on D and V alone; never on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch

__all__ = ["INTERPRETED", "Config", "Device", "Tile", "config_for", "device_facts", "trying"]

INTERPRETED = (0, 0)
"""The "capability" of Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel's work unit: rows (tokens) × columns (vocab rows), stepping through D by depth."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    per_sm: int  # programs resident on a multiprocessor: with two, one's epilogue runs under the other's products
    group: int = 8  # row tiles that share a column tile's weights in L2


@dataclass(frozen=True, slots=True)
class Config:
    """The tiles of the kernels that multiply."""

    forward: Tile
    dz: Tile
    held: Tile  # the forward's of a kept set and of the most likely tokens, which hold logits

    @property
    def holding(self) -> Config:
        """The tiles of such a call."""
        return replace(self, forward=self.held)


@dataclass(frozen=True, slots=True)
class Device:
    """What a launch has to know of where it runs."""

    capability: tuple[int, int]
    multiprocessors: int

    @property
    def has_tma(self) -> bool:
        return self.capability >= (9, 0)


@cache
def _cuda_facts(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device((properties.major, properties.minor), properties.multi_processor_count)


def device_facts(device: torch.device) -> Device:
    """Capability and size of a device; a CPU stands for the interpreter."""
    if device.type != "cuda":
        return Device(INTERPRETED, 1)
    return _cuda_facts(torch.cuda.current_device() if device.index is None else device.index)


_trial: list[Config] = []


@contextmanager
def trying(config: Config) -> Iterator[None]:
    """Within the block every call takes these tiles: for `logitless tune`, whose scores then have other bits."""
    _trial.append(config)
    try:
        yield
    finally:
        _trial.pop()


# Made once: a small call's backward waits for each microsecond of the host.
_INTERPRETED = Tile(64, 128, 32, warps=1, stages=1, per_sm=2)
# IEEE products run on the plain cores: a small tile, whatever the architecture.
_IEEE = Tile(64, 64, 32, warps=4, stages=2, per_sm=2)
# Measured on an H200. Two programs of 128×128 hide their epilogues under each other's products, which weighs most where
# D is small; one of 128×256 reads less into the chip, so that a card at its power limit keeps a higher clock. For a
# kept set's forward it was no faster, and took 0.4 to 0.9 ms more where that is 16 to 18.
_PAIR = Tile(128, 128, 64, warps=4, stages=3, per_sm=2)
_WIDE = Tile(128, 256, 64, warps=8, stages=3, per_sm=1)
# Not measured. Three stages of 128×128×32 take 48 KB, which fits every Ampere and Ada card.
_AMPERE = Tile(128, 128, 32, warps=4, stages=3, per_sm=2)


def config_for(device: Device, dtype: torch.dtype, hidden_size: int) -> Config:
    """The tiles for operands of a dtype and a hidden size."""
    if _trial:
        return _trial[-1]
    if device.capability == INTERPRETED:
        return Config(_INTERPRETED, _INTERPRETED, _INTERPRETED)
    if dtype == torch.float32:
        return Config(_IEEE, _IEEE, _IEEE)
    if device.has_tma:
        return Config(_WIDE if hidden_size >= 3584 else _PAIR, _WIDE if hidden_size >= 2048 else _PAIR, _PAIR)
    return Config(_AMPERE, _AMPERE, _AMPERE)
