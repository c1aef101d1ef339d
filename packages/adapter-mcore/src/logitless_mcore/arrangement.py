"""How the sequences of a `PackedBatch` stand in what a Megatron model takes.

Both layouts are one thing: sequences one after another, each padded to a length. "thd" pads to what tensor and context
parallelism divide by; "bshd" pads all to the same length, so that the row of tokens is rows of equal length.

Shape suffixes: B sequences, S columns of the caller's layout, M true tokens, T tokens with padding, P = T / cp tokens
of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from logitless import PackedBatch
from logitless.errors import InputTypeError, InvalidInputError, UnsupportedError

__all__ = ["Arrangement", "Layout", "Ranks", "arrange", "as_batch", "as_rows", "lengthened", "ramp"]

Layout = Literal["thd", "bshd"]
Of = Literal["token", "prediction", "sequence"]
IGNORE_INDEX = -100
TAKES_INDEX = "seq_idx" in {field.name for field in fields(PackedSeqParams)}  # older layers make it themselves
FP8_TOKENS, FP8_TOTAL = 16, 128  # Transformer Engine's fp8 products want dimensions of multiples of these


# --- which part of the batch is this rank's --------------------------------------------------------------------------


def _size(getter: Callable[[], int]) -> int:
    try:
        return max(1, getter())
    except AssertionError:  # Megatron's way of saying that there are no groups: then this process is all there is
        return 1


@dataclass(frozen=True, slots=True)
class Ranks:
    """Sizes of the groups that the tokens of a batch are laid out for."""

    tp: int = 1
    cp: int = 1
    cp_rank: int = 0
    cp_group: Any = None

    @classmethod
    def present(cls) -> Ranks:
        """Those of `megatron.core.parallel_state`; one rank where it is not initialized."""
        tp = _size(parallel_state.get_tensor_model_parallel_world_size)
        cp = _size(parallel_state.get_context_parallel_world_size)
        if cp == 1:
            return cls(tp)
        group = parallel_state.get_context_parallel_group(check_initialized=False)
        return cls(tp, cp, parallel_state.get_context_parallel_rank(), group)

    @classmethod
    def of(cls, model: Any) -> Ranks:
        """Those that a Megatron model was built with."""
        groups = getattr(model, "pg_collection", None)
        tp, cp = getattr(groups, "tp", None), getattr(groups, "cp", None)
        if tp is None or cp is None:
            return cls.present()
        return cls(tp.size(), cp.size(), cp.rank(), cp)

    @property
    def align(self) -> int:
        """What every sequence's padded length divides by."""
        return 2 * self.tp * self.cp if self.cp > 1 else self.tp


# --- arrangements ----------------------------------------------------------------------------------------------------


def ramp(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each token of sequences in one row: its sequence, and its place in it."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=device)
    row = torch.repeat_interleave(counts, output_size=sum(lengths))
    begins = torch.tensor([0, *accumulate(lengths)][: len(lengths)], dtype=torch.int64, device=device)
    return row, torch.arange(sum(lengths), device=device) - begins.index_select(0, row)


def lengthened(batch: PackedBatch, padded_lengths: Sequence[int]) -> PackedBatch:
    """The same batch, whole, with each sequence padded on to these lengths; none may become shorter."""
    if tuple(padded_lengths) == batch.padded_lengths:
        return batch
    device = batch.input_ids.device
    begins = torch.tensor([0, *accumulate(padded_lengths)], dtype=torch.int32, device=device)
    row_T, offset_T = ramp(padded_lengths, device)
    old_T = torch.tensor(batch.padded_lengths, dtype=torch.int64, device=device).index_select(0, row_T)
    inside_T = offset_T < old_T
    last_T = torch.minimum(offset_T, (old_T - 1).clamp(min=0))
    source_T = batch.cu_seqlens_padded.long().index_select(0, row_T) + last_T

    def taken(x: Tensor, fill: int) -> Tensor:
        room = torch.nn.functional.pad(x, (0, 1))  # what an empty last sequence points at
        return room.index_select(-1, source_T).masked_fill(~inside_T, fill)

    position_ids = torch.nn.functional.pad(batch.position_ids, (0, 1)).index_select(-1, source_T)
    row_M, _ = ramp(batch.lengths, device)
    return replace(
        batch,
        input_ids=taken(batch.input_ids, 0),
        labels=taken(batch.labels, IGNORE_INDEX),
        position_ids=position_ids.masked_fill(old_T == 0, 0) + (offset_T - last_T),
        cu_seqlens_padded=begins,
        max_seqlen=max(padded_lengths, default=0),
        padded_lengths=tuple(padded_lengths),
        place_M=batch.place_M + (begins - batch.cu_seqlens_padded).long().index_select(0, row_M),
    )


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A whole batch as a model of these ranks takes it.

    Attributes:
        batch: padded as the layout wants.
        layout: "thd": [1, P, ...]; "bshd": [B, S', ...], aligned left.
        ranks: for which it is.
        offsets: of the nested tensor that it came from, so that results can be combined with it.
    """

    batch: PackedBatch
    layout: Layout
    ranks: Ranks
    offsets: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(B, S') or (1, P): what a model's output begins with."""
        total = sum(self.batch.padded_lengths)
        if self.layout == "bshd":
            return len(self.batch.padded_lengths), self.batch.max_seqlen
        return 1, total // self.ranks.cp

    @property
    def params(self) -> PackedSeqParams | None:
        """What tells a model the sequences apart: the padded lengths in every field, of the whole batch; None in rows.

        Padding belongs to its sequence: it comes last, so that no token sees it under a causal mask.
        """
        if self.layout == "bshd":
            return None
        cu_seqlens, longest = self.batch.cu_seqlens_padded, self.batch.max_seqlen
        told: dict[str, Any] = {}
        if TAKES_INDEX:  # without it, Mamba layers carry their state from one sequence into the next
            row, _ = ramp(self.batch.padded_lengths, cu_seqlens.device)
            told["seq_idx"] = row.int()[None]
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            cu_seqlens_q_padded=cu_seqlens,
            cu_seqlens_kv_padded=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            **told,
        )

    def occupied(self) -> Arrangement:
        """Of a batch without any token, one with padding in it: a model cannot run on nothing, and its ranks must."""
        lengths = self.batch.padded_lengths
        if sum(lengths):
            return self
        if not lengths:
            raise InvalidInputError("input_ids: got no sequence, expected at least one; it may have no tokens")
        width = self.ranks.align
        padded = [width] * len(lengths) if self.layout == "bshd" else [*lengths[:-1], width]
        return replace(self, batch=lengthened(self.batch, padded))

    def shaped(self, x: Tensor) -> Tensor:
        """[..., T] of the whole batch as the model takes it: [..., 1, P] or [..., B, S']."""
        if self.ranks.cp > 1:
            x = x.index_select(-1, self._shard().input_ids)
        return x.reshape(*x.shape[:-1], *self.shape)

    def pack(self, x: Any, of: Of = "prediction", fill: float = 0.0, *, name: str = "x") -> Tensor:
        """Values of the caller's layout as the model takes them; `fill` at padding.

        Args:
            x: [B, S, ...], or nested [B, j, ...]; [B, ...] for "sequence".
            of: "token" shifts: x of a token goes where that token is predicted, within its sequence. "sequence"
                spreads one value over its tokens.
            fill: what stands where no value belongs.
            name: of the caller's argument, for errors.
        """
        try:
            packed = self.batch.pack(x, of, fill)
        except (InputTypeError, InvalidInputError) as error:
            raise type(error)(f"{name}: {str(error).partition(': ')[2]}") from error
        return self.part(packed).reshape(*self.shape, *packed.shape[1:])

    def part(self, x: Tensor) -> Tensor:
        """[T, ...] of the whole packed batch to this context-parallel rank's [P, ...]; what it was without them."""
        return x.index_select(0, self._shard().input_ids) if self.ranks.cp > 1 else x

    def unpack(self, x: Tensor) -> Tensor:
        """[1, P, ...] or [B, S', ...] of every context-parallel rank back into the caller's layout, 0 elsewhere.

        Over context parallelism each rank's own part carries its gradient.
        """
        if not isinstance(x, Tensor) or tuple(x.shape[:2]) != self.shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__qualname__
            raise InvalidInputError(f"output: got {got}, expected a tensor that begins with {self.shape}")
        flat = x.flatten(0, 1)
        if self.ranks.cp > 1:
            flat = self._shard().gather(flat, self.ranks.cp_group)
        out: Tensor = self.batch.unpack(flat)
        if self.offsets is not None:
            out = torch.nested.nested_tensor_from_jagged(out.values(), self.offsets)
        return out

    def _shard(self) -> PackedBatch:
        """This rank's shard, with the places of its tokens in the whole batch for ids."""
        places = torch.arange(sum(self.batch.padded_lengths), device=self.batch.input_ids.device)
        return replace(self.batch, input_ids=places).shard(self.ranks.cp_rank, self.ranks.cp)


def as_rows(attention_mask: Any, name: str = "attention_mask") -> PackedBatch:
    """The sequences of a mask [B, S]; `name` is the argument's."""
    if not isinstance(attention_mask, Tensor):
        raise InputTypeError(f"{name}: got {type(attention_mask).__qualname__}, expected a tensor [B, S] of 0 and 1")
    if attention_mask.is_nested or attention_mask.ndim != 2:
        raise InvalidInputError(f"{name}: got {tuple(attention_mask.shape)}, expected a tensor [B, S] of 0 and 1")
    return PackedBatch.from_padded(torch.zeros_like(attention_mask, dtype=torch.int64), attention_mask)


def as_batch(x: Any) -> tuple[PackedBatch, Tensor | None]:
    """The sequences of a nested tensor [B, j, ...] of any dtype, and its offsets."""
    if not isinstance(x, Tensor) or not x.is_nested or x.layout != torch.jagged:
        got = f"a tensor of layout {x.layout}" if isinstance(x, Tensor) else type(x).__qualname__
        raise InputTypeError(f"input_ids: got {got}, expected a nested tensor of layout torch.jagged [B, j, ...]")
    nested: Any = x
    if nested._ragged_idx != 1:
        raise InvalidInputError("input_ids: its ragged dimension is not the second; transpose it back to [B, j, ...]")
    places = torch.zeros(nested.values().shape[0], dtype=torch.int64, device=x.device)
    like = torch.nested.nested_tensor_from_jagged(places, nested.offsets(), nested.lengths())
    batch = PackedBatch.from_nested(like)
    whole = nested.lengths() is None and places.shape[0] == sum(batch.lengths)
    return batch, nested.offsets() if whole else None


def arrange(
    batch: PackedBatch,
    layout: Layout,
    ranks: Ranks,
    *,
    sequence_parallel: bool = True,
    fp8: bool = False,
    offsets: Tensor | None = None,
) -> Arrangement:
    """Pad a whole batch as a layout and these ranks want it.

    "thd": each sequence to a multiple of tp, or of 2·tp·cp; with fp8 of 16 as well, and the last one until the total
    divides by 128 times that. "bshd": all to the longest, with sequence parallelism to a multiple of tp.
    """
    lengths = batch.padded_lengths
    if layout == "bshd":
        if ranks.cp > 1:
            raise UnsupportedError(
                f"context parallelism of {ranks.cp} takes packed sequences; got the layout 'bshd', expected 'thd'"
            )
        align = ranks.tp if sequence_parallel else 1
        longest = math.ceil(max(lengths, default=0) / align) * align
        return Arrangement(lengthened(batch, [longest] * len(lengths)), layout, ranks, offsets)
    align = math.lcm(FP8_TOKENS, ranks.align) if fp8 else ranks.align
    padded = [math.ceil(length / align) * align for length in lengths]
    if fp8 and padded:
        padded[-1] += -sum(padded) % (FP8_TOTAL * ranks.align)
    return Arrangement(lengthened(batch, padded), layout, ranks, offsets)
