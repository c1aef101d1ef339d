"""How the torch backend cuts [n, V] into tiles, and one tile's logits.

Tiles depend on n, D, V, dtype, device and `workspace_bytes` only, never on which outputs or gradients are wanted:
the same call with or without a gradient gives the same bits.

Shape suffixes: n live tokens, R rows (tokens) of a tile, C columns (vocab rows) of a tile, K labels of a token,
D hidden size, V vocab rows, r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.types import Problem

__all__ = ["FLOOR", "Columns", "KeptTiles", "Rows", "TilePlan", "accumulation_dtype", "label_columns", "matmul"]

CPU_TILE = (512, 2048)  # 4 MB of fp32: stays in the last-level cache between the passes over it
GPU_TILE = (2048, 8192)  # large enough to hide the launches of those passes
CANDIDATES = 1024  # of a row, for top_p alone: most rows' kept tokens are fewer

# Least logit below the maximum. Finite, since 0·(-inf) would be NaN; and its exp is the least normal number, since
# arithmetic on denormal ones is slow, and a sum that holds a 1 does not see it.
FLOOR = {torch.float32: -87.0, torch.float64: -708.0}


def accumulation_dtype(problem: Problem) -> torch.dtype:
    """float32, or float64 where an input is float64."""
    return torch.promote_types(torch.promote_types(problem.hidden.dtype, problem.weight.dtype), torch.float32)


def operand_dtype(problem: Problem) -> torch.dtype:
    """What the products read: on a GPU the inputs' half type, summed in fp32; on a CPU always the wide one."""
    inputs = torch.promote_types(problem.hidden.dtype, problem.weight.dtype)
    return inputs if problem.hidden.is_cuda else torch.promote_types(inputs, torch.float32)


def matmul(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """`out = a @ b` or `out += a @ b`, summed and stored in out's dtype."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out, beta=1 if accumulate else 0)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


@dataclass(frozen=True, slots=True)
class Rows:
    """A block of live tokens."""

    start: int
    stop: int
    hidden_RD: Tensor
    lora_u_Rr: Tensor | None
    label_R: Tensor  # or [R, K]
    inverse_temperature: Tensor | float  # [R, 1] or a number


@dataclass(frozen=True, slots=True)
class Columns:
    """A block of vocab rows."""

    start: int
    stop: int
    weight_CD: Tensor
    bias_C: Tensor | None
    lora_b_Cr: Tensor | None


class TilePlan:
    """Blocks of tokens and of vocab rows, and the scratch buffers of one tile."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype = accumulation_dtype(problem)
        self.n = problem.labels.shape[0] if problem.live is None else problem.live.shape[0]
        self.operand = operand_dtype(problem)
        self.held = problem.top_k is not None or problem.top_p is not None
        rows, columns = GPU_TILE if problem.hidden.is_cuda else CPU_TILE
        # Sized by the whole vocabulary, not this rank's rows: ranks with uneven shards must cut tokens alike.
        rows, columns = min(rows, max(self.n, 1)), min(columns, problem.vocab_size)
        allowed = problem.workspace_bytes
        if self.held:
            allowed = max(allowed, 2 * self._held_bytes(1))  # one token's worth, at least
            rows = min(rows, allowed // 2 // self._held_bytes(1))
        while self._bytes(rows, columns) > allowed and (rows > 1 or columns > 1):
            if rows >= columns:
                rows = (rows + 1) // 2
            else:
                columns = (columns + 1) // 2
        self.rows, self.columns = rows, columns
        self._scratch: dict[int, Tensor] = {}

    def _bytes(self, rows: int, columns: int) -> int:
        """Temporary bytes of a tile, at worst: three scratch tiles and a narrow dz, both operands copied, d_weight."""
        width, narrow = self.dtype.itemsize, self.operand.itemsize
        hidden_size, given = self.problem.hidden.shape[1], self.problem.hidden.dtype
        gathered = given.itemsize if given != self.operand else 0  # live rows are gathered first, and then widened
        tile = rows * columns * (3 * width + (narrow if narrow < width else 0)) + self._held_bytes(rows)
        tile += 2 * rows * columns if self.held else 0  # masks
        return tile + rows * hidden_size * (narrow + gathered) + columns * hidden_size * (narrow + width)

    def _held_bytes(self, rows: int) -> int:
        """Of a kept set: the logits of a block of rows, and its candidates, at worst twice sorted."""
        if not self.held:
            return 0
        return rows * (self.problem.vocab_size * self.dtype.itemsize + 64 * self.candidates)

    @property
    def candidates(self) -> int:
        """Of a kept set: how many of a row's largest logits are looked at first."""
        p = self.problem
        return min(p.vocab_size, CANDIDATES if p.top_k is None else p.top_k)

    @property
    def spare_bytes(self) -> int:
        """What a tile leaves of `workspace_bytes`."""
        return max(0, self.problem.workspace_bytes - self._bytes(self.rows, self.columns))

    def scratch(self, index: int, rows: Rows, columns: Columns | range) -> Tensor:
        """A contiguous [R, C] buffer, reused by every tile; its content is whatever the last tile left."""
        if index not in self._scratch:
            self._scratch[index] = self.problem.hidden.new_empty(self.rows * self.columns, dtype=self.dtype)
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        return self._scratch[index][: shape[0] * shape[1]].view(shape)

    def whole(self) -> range:
        """All live tokens; passes run over a range that begins with a block."""
        return range(self.n)

    def each_columns(self) -> Iterator[Columns]:
        p = self.problem
        for start in range(0, p.vocab_valid, self.columns):
            stop = min(start + self.columns, p.vocab_valid)
            yield Columns(
                start,
                stop,
                p.weight[start:stop].to(self.operand),
                None if p.bias is None else p.bias[start:stop].to(self.dtype),
                None if p.lora_b is None else p.lora_b[start:stop].to(self.dtype),
            )

    def each_rows(self, tokens: range) -> Iterator[Rows]:
        """The blocks of a range of live tokens."""
        p = self.problem
        for first in range(tokens.start, tokens.stop, self.rows):
            last = min(first + self.rows, tokens.stop)

            def take(tensor: Tensor, first: int = first, last: int = last) -> Tensor:
                return tensor[first:last] if p.live is None else tensor.index_select(0, p.live[first:last])

            def read(tensor: Tensor, dtype: torch.dtype, take: Callable[[Tensor], Tensor] = take) -> Tensor:
                block = take(tensor).to(dtype)
                if p.dead is None:
                    return block
                mask_R1 = take(p.dead).unsqueeze(1)
                return block.masked_fill(mask_R1, 0.0) if dtype == tensor.dtype else block.masked_fill_(mask_R1, 0.0)

            hidden_RD = read(p.hidden, self.operand)
            lora_u_Rr = None if p.lora_u is None else read(p.lora_u, self.dtype)
            inverse: Tensor | float
            if isinstance(p.temperature, Tensor):
                inverse = take(p.temperature).to(self.dtype).reciprocal().unsqueeze(1)
            else:
                inverse = 1.0 / p.temperature
            yield Rows(first, last, hidden_RD, lora_u_Rr, take(p.labels), inverse)

    def logits(self, rows: Rows, columns: Columns, out: Tensor) -> None:
        """The tile's final logits, tempered: `c·tanh(s·(h·W + b + u·B)/c)/T`."""
        matmul(rows.hidden_RD, columns.weight_CD.T, out)
        if rows.lora_u_Rr is not None and columns.lora_b_Cr is not None:
            out.addmm_(rows.lora_u_Rr, columns.lora_b_Cr.T)
        if columns.bias_C is not None:
            out.add_(columns.bias_C)
        cap = self.problem.softcap
        if cap is not None:
            out.mul_(self.problem.scale / cap).tanh_()
        factor = rows.inverse_temperature * (self.problem.scale if cap is None else cap)
        if isinstance(factor, Tensor) or factor != 1.0:
            out.mul_(factor)


def label_columns(plan: TilePlan, rows: Rows, columns: Columns | range) -> tuple[Tensor, Tensor]:
    """[R, K] each row's labels as columns of the tile, clamped into it, and whether they are of its columns."""
    width = columns.stop - columns.start
    local_RK = rows.label_R - plan.problem.vocab_start - columns.start
    local_RK = local_RK if local_RK.ndim == 2 else local_RK.unsqueeze(1)
    inside_RK = (local_RK >= 0) & (local_RK < width)
    return local_RK.clamp_(0, width - 1), inside_RK


class KeptTiles:
    """Logits of the leading tiles of a pass, as many as fit a buffer, in the order in which the pass visits them."""

    def __init__(self, plan: TilePlan, buffer: Tensor) -> None:
        # Not a view of what is empty: hooks of saved tensors may bring that back with any stride.
        self.flat = buffer.view(plan.dtype) if buffer.shape[0] else buffer.new_empty(0, dtype=plan.dtype)
        self.plan, self.offset = plan, 0

    def next(self, rows: Rows, columns: Columns) -> tuple[Tensor, bool]:
        """Where the next tile's logits are, and whether that is in the buffer; else it is a scratch tile."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        begin, self.offset = self.offset, self.offset + shape[0] * shape[1]
        if self.offset <= self.flat.shape[0]:
            return self.flat[begin : self.offset].view(shape), True
        return self.plan.scratch(0, rows, columns), False
