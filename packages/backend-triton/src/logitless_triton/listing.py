"""Held logits of which each row's listed tiles are read: how kernels of them are launched, and what they begin with.

A program serves one row (in the interpreter, whose time goes by programs, more), whose bits depend on nothing else.
Logits are compared as keys, integers in the order of the floats; two of them say between which a threshold lies.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from logitless_triton.layout import STEP
from logitless_triton.tile import ceil_div

__all__ = [
    "RESIDENT",
    "Listing",
    "blocks",
    "factors",
    "float_of",
    "key_of",
    "load_bracket",
    "program_rows",
    "tile_logits",
]

RESIDENT = {"maxnreg": 80}
"""Registers of a thread: six programs of a multiprocessor, on an H200 all rows of a chunk at once."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Logits of m rows, and which tiles of each are to be read, in ascending order."""

    work: Any
    held: Tensor  # [m, whole tiles], −inf beyond the vocabulary
    f: Tensor  # [m]
    top: Tensor  # [m] M of all ranks
    ids: Tensor  # [m, tiles] int32; not read of a row of which all tiles are
    count: Tensor  # [m] int32
    outside: Tensor  # [m] the largest x of the other tiles
    mass: Tensor | None = None  # [m] Σ 2^((x−M)·f) of those that are to be read, where it is asked for

    def launch(self, kernel: Any, *own: Any, **named: Any) -> None:
        """Run a kernel over the rows: of held, ids, count_ptr, what is its own, N, stride_ids and stride_held."""
        rows = self.held.shape[0]
        named |= {"N": rows, "stride_ids": self.ids.stride(0), "stride_held": self.held.stride(0)}
        kernel[(ceil_div(rows, named["ROWS"]),)](self.held, self.ids, self.count, *own, **named)


def blocks(work: Any, most: int = STEP) -> dict[str, int]:
    """Rows of a program, and how many of each row's logits it looks at together, if not `most`."""
    rows, block = (16, 512) if work.interpreted else (1, most)
    return {"WIDTH": work.config.forward.columns, "ROWS": rows, "BLOCK": block, "num_warps": 4}


@triton.jit
def program_rows(N, ROWS: tl.constexpr):
    """A program's rows [ROWS], and which of them there are."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    return rows, rows < N


@triton.jit
def factors(f_ptr, M_ptr, rows, inside):
    """f and M [ROWS]."""
    return tl.load(f_ptr + rows, mask=inside, other=0.0), tl.load(M_ptr + rows, mask=inside, other=0.0)


@triton.jit
def key_of(x):
    """An integer in the order of the floats; of −0.0 that of 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def float_of(key):
    """The float of which `key_of` makes it."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_bracket(bracket, rows, N, inside):
    """Two keys [ROWS]: a row's threshold is at or above the first, and below the second."""
    return tl.load(bracket + rows, mask=inside, other=0), tl.load(bracket + N + rows, mask=inside, other=0)


@triton.jit
def tile_logits(held, ids, rows, first, count, stride_held, stride_ids, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Logits [ROWS, BLOCK // WIDTH, WIDTH] of the listed tiles from the first on, −inf after the last; their columns.

    A tile's columns are an axis, so that the compiler sees 16 bytes of one mask; likewise it has to see that rows start
    at whole tiles.
    """
    place = first + tl.arange(0, BLOCK // WIDTH)[None, :]
    rows = rows.to(tl.int64)
    listed = place < count[:, None]
    some = listed & (count < stride_held // WIDTH)[:, None]  # of all tiles nothing waits for their numbers
    tile = tl.where(some, tl.load(ids + rows[:, None] * stride_ids + place, mask=some, other=0), place)
    cols = tile[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    at = held + rows[:, None, None] * (stride_held // WIDTH * WIDTH) + cols
    return tl.load(at, mask=listed[:, :, None], other=-float("inf")), cols, listed[:, :, None]
