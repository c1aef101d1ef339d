"""Many sequences in one row of tokens without padding, and the way back to where they came from.

Labels are made here, before anything is cut: shift first, then pack, then shard, so that no label ever crosses a
sequence's or a shard's border. No loop over tokens; one device-to-host copy when a batch is made, two with a
`loss_mask` of floats.

Shape suffixes: B sequences, S columns of a padded layout, M true tokens, T packed tokens (alignment padding included),
P = T / size tokens of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from logitless._batch_checks import check_align, check_gathered, check_int, check_loss_mask, check_rows
from logitless._origin import Origin, TrueTokens, listed_tokens, nested_tokens, padded_tokens
from logitless._segments import (
    Scheme,
    cumulated,
    fill_bins,
    last_tokens,
    lengths_fields,
    placed,
    ramp,
    shard_index,
    split_bins,
)
from logitless.collectives import all_reduce_max, gather_own_gradient
from logitless.errors import InvalidInputError

__all__ = ["IGNORE_INDEX", "PackedBatch", "PaddedBatch"]

IGNORE_INDEX = -100

Of = Literal["token", "prediction", "sequence"]


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Sequences in rows, aligned left, padded right: [B, S]."""

    input_ids: Tensor  # [B, S], 0 at padding
    attention_mask: Tensor  # [B, S] bool
    position_ids: Tensor  # [B, S] or [3, B, S], [4, B, S]
    labels: Tensor  # [B, S], ignore_index at padding
    index: Tensor  # [T] where each packed token stands in the flattened rows

    def to_packed(self, x: Tensor) -> Tensor:
        """[B, S, ...] results back into the packed batch's order: [T, ...]."""
        return x.flatten(0, 1).index_select(0, self.index)

    def to_rows(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[T, ...] in the packed batch's order into these rows: [B, S, ...]."""
        rows, columns = self.input_ids.shape
        return placed(x, self.index, rows * columns, fill).view(rows, columns, *x.shape[1:])

    def packed_index(self, flat: Tensor) -> Tensor:
        """Where tokens with these indices in the flattened rows stand in the packed batch."""
        packed = torch.arange(self.index.shape[0], device=flat.device)
        return flat.new_zeros(self.input_ids.numel()).index_copy(0, self.index, packed).index_select(0, flat)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Tokens of many sequences in one row, with what it takes to score them and to go back.

    Attributes:
        input_ids: [T], 0 at alignment padding; [P] of a shard.
        position_ids: [T], or [3, T], [4, T] for mrope; counted on through alignment padding.
        labels: [T], the next token of the same sequence; `ignore_index` at a sequence's end, at padding, and where
            `loss_mask` excludes that next token.
        cu_seqlens: [B+1] int32, cumulated true lengths.
        cu_seqlens_padded: [B+1] int32, where each sequence begins in `input_ids`; of the whole batch on a shard too.
        max_seqlen: longest padded length.
        lengths: true lengths, on the host.
        sequences: which sequences of the batch it was split from these are.
        shard_of: (rank, size, scheme) of a shard, else None.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    cu_seqlens_padded: Tensor
    max_seqlen: int
    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    sequences: tuple[int, ...]
    shard_of: tuple[int, int, Scheme] | None
    source_M: Tensor  # where each true token stands in the flattened origin
    place_M: Tensor  # where it stands in the packed row
    origin: Origin

    # --- making one -----------------------------------------------------------------------------------------------

    @classmethod
    def from_padded(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        align: int = 1,
    ) -> PackedBatch:
        """From [B, S] ids and a 0/1 mask of any dtype: padded left, right, or with holes, which are closed.

        Args:
            input_ids: [B, S] integers.
            attention_mask: [B, S], 1 at tokens.
            loss_mask: [B, S] aligned with tokens: 0 at t means that token t is not scored. Of floats, 0 and 1 alone:
                weights belong to the loss.
            position_ids: [B, S], or [3, B, S], [4, B, S]; by default each sequence counts from 0.
            align: each sequence is padded to a multiple of this.
        """
        return _build(padded_tokens(input_ids, attention_mask, loss_mask, position_ids), align)

    @classmethod
    def from_nested(
        cls,
        input_ids: Tensor,
        *,
        loss_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        align: int = 1,
    ) -> PackedBatch:
        """From a jagged nested tensor of ids [B, j]; masks and positions are nested alike (or position_ids [k, M])."""
        return _build(nested_tokens(input_ids, loss_mask, position_ids), align)

    @classmethod
    def from_sequences(
        cls,
        input_ids: Sequence[Tensor | Sequence[int]],
        *,
        loss_mask: Sequence[Tensor | Sequence[int]] | None = None,
        position_ids: Sequence[Tensor] | None = None,
        align: int = 1,
        device: torch.device | str | None = None,
    ) -> PackedBatch:
        """From a list of id sequences (tensors [L] or lists of ints); masks and positions are lists alike."""
        return _build(listed_tokens(input_ids, loss_mask, position_ids, device), align)

    # --- values along with it -------------------------------------------------------------------------------------

    def pack(self, x: Any, of: Of = "token", fill: float = 0.0) -> Tensor:
        """Values in the origin's layout, [B, S, ...], nested or a list, into batch order [T, ...], of a shard its own.

        Args:
            x: one value (or row of trailing dimensions) for each position of the origin; [B, ...] for "sequence".
            of: "token": x at t belongs to token t (advantages, rewards, a rollout engine's log-probs), and goes where
                that token is the label, as `loss_mask` does. "prediction": x at t belongs to the prediction made at
                t (what `unpack` returned), and stays at t. "sequence": one value for each sequence, spread over its
                tokens.
            fill: what stands where no value belongs.
        """
        if of == "sequence":
            return self._own(self._spread(x, fill))
        flat = self.origin.flatten(x)
        if of == "prediction":
            source, place = self.source_M, self.place_M
        elif of == "token":
            source, place = self.source_M[1:], self.place_M[:-1]  # token t is predicted one place before it
        else:
            raise InvalidInputError(f"of: got {of!r}, expected 'token', 'prediction' or 'sequence'")
        out = placed(flat.index_select(0, source), place, sum(self.padded_lengths), fill)
        return self._own(out.index_fill(0, self._last_places(), fill) if of == "token" else out)

    def unpack(self, x: Tensor, fill: float = 0.0) -> Any:
        """[T, ...] in batch order back into the origin's layout; `fill` where it holds no token of the batch."""
        self._whole("unpack")
        check_rows("x", x, sum(self.padded_lengths), "[T, ...]", "packed token", self.input_ids.device)
        return self.origin.restore(x.index_select(0, self.place_M), self.source_M, fill)

    def to_padded(self) -> PaddedBatch:
        """Rows aligned left, as wide as the longest padded sequence, for models that take [B, S]."""
        self._whole("to_padded")
        row_T, offset_T = ramp(self.padded_lengths, self.input_ids.device)
        shape = (len(self.lengths), self.max_seqlen)
        index_T = row_T * self.max_seqlen + offset_T

        def rows(x: Tensor, fill: int) -> Tensor:
            flat = x.new_full((*x.shape[:-1], shape[0] * shape[1]), fill).index_copy(-1, index_T, x)
            return flat.view(*x.shape[:-1], *shape)

        mask = torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=self.input_ids.device)
        mask = mask.index_fill(0, index_T.index_select(0, self.place_M), True)
        return PaddedBatch(
            rows(self.input_ids, 0),
            mask.view(shape),
            rows(self.position_ids, 0),
            rows(self.labels, IGNORE_INDEX),
            index_T,
        )

    # --- cutting it -----------------------------------------------------------------------------------------------

    def micro_batches(self, max_tokens: int, group: Any = None) -> list[PackedBatch]:
        """Whole sequences in batches of at most `max_tokens` packed tokens, evenly filled.

        With a data-parallel `group`, every rank gets as many as the rank that needs the most; a rank with too few
        sequences gets idle batches (one sequence of no true tokens), so that collectives in the model stay in step.
        """
        self._whole("micro_batches")
        check_int("max_tokens", max_tokens, 0)
        idle = bool(self.lengths) and not self.sequences
        if idle and group is None:
            return [self]
        sizes = () if idle else self.padded_lengths
        long = next((i for i, size in enumerate(sizes) if size > max_tokens), None)
        bins: list[list[int]] = [[]] if idle else [] if long is not None else fill_bins(sizes, max_tokens)
        failed = long is not None
        if group is not None:  # where this rank is idle or in error, too: the others wait for its count
            most = torch.tensor([len(bins), failed], device=self.input_ids.device)
            all_reduce_max(most, group)
            count, failed = most.tolist()
            bins = split_bins(bins, sizes, count)
        if long is not None:
            raise InvalidInputError(
                f"max_tokens: got {max_tokens}, expected at least {sizes[long]}, the packed length of sequence {long}"
            )
        if failed:
            raise InvalidInputError(
                f"max_tokens: got {max_tokens}; another rank of the group has a sequence that is longer than its own "
                "max_tokens, and says which"
            )
        return [self._select(sorted(members)) if members else self._idle() for members in bins]

    def shard(self, rank: int, size: int, scheme: Scheme = "zigzag") -> PackedBatch:
        """This rank's tokens for context or sequence parallelism.

        "zigzag" cuts each sequence into 2·size chunks and takes chunks rank and 2·size−1−rank (even work under a
        causal mask); every padded length must divide by 2·size. "contiguous" takes the rank-th part of the whole row;
        T must divide by size.
        """
        self._whole("shard")
        check_int("rank", rank, 0)
        check_int("size", size, 1)
        if not 0 <= rank < size:
            raise InvalidInputError(f"rank: got {rank}, expected 0 to {size - 1} for size {size}")
        index_P = shard_index(self.padded_lengths, rank, size, scheme, self.input_ids.device)
        return replace(
            self,
            input_ids=self.input_ids.index_select(0, index_P),
            position_ids=self.position_ids.index_select(-1, index_P),
            labels=self.labels.index_select(0, index_P),
            shard_of=(rank, size, scheme),
        )

    def gather(self, x: Tensor, group: Any) -> Tensor:
        """[P, ...] of every rank's shard into [T, ...] in the whole batch's order, on every rank.

        The gradient is that of a loss which every rank computes alike from the gathered whole: each rank's shard gets
        its own rows' gradient, once.
        """
        if self.shard_of is None:
            return x
        check_gathered(x, group, self.shard_of, self.input_ids.shape[0], self.padded_lengths)
        _, size, scheme = self.shard_of
        parts = [shard_index(self.padded_lengths, r, size, scheme, x.device) for r in range(size)]
        inverse = torch.argsort(torch.cat(parts))
        return gather_own_gradient(x, group).index_select(0, inverse)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _whole(self, what: str) -> None:
        if self.shard_of is not None:
            raise InvalidInputError(f"{what}: this is a shard {self.shard_of}; call it on the batch that was sharded")

    def _own(self, x: Tensor) -> Tensor:
        """[T, ...] of the whole batch to this shard's [P, ...]."""
        if self.shard_of is None:
            return x
        return x.index_select(0, shard_index(self.padded_lengths, *self.shard_of, x.device))

    def _spread(self, x: Tensor, fill: float) -> Tensor:
        """[B, ...] to [T, ...]."""
        check_rows("x", x, len(self.sequences), "[B, ...]", "sequence", self.input_ids.device)
        row_M, _ = ramp(self.lengths, x.device)
        return placed(x.index_select(0, row_M), self.place_M, sum(self.padded_lengths), fill)

    def _last_places(self) -> Tensor:
        """Where each sequence's last true token stands: what it would predict is not there."""
        return self.place_M.index_select(0, last_tokens(self.lengths, self.place_M.device))

    def _select(self, members: Sequence[int]) -> PackedBatch:
        """The batch of some of the sequences, in that order."""
        lengths = [self.lengths[i] for i in members]
        device = self.input_ids.device
        begins = torch.tensor(cumulated(self.lengths), device=device)[:-1]
        row_M, offset_M = ramp(lengths, device)
        chosen = torch.tensor(members, device=device)
        true_M = begins.index_select(0, chosen).index_select(0, row_M) + offset_M
        padded_lengths = tuple(self.padded_lengths[i] for i in members)
        row_T, offset_T = ramp(padded_lengths, device)
        padded_begins = self.cu_seqlens_padded[:-1].long().index_select(0, chosen)
        packed_T = padded_begins.index_select(0, row_T) + offset_T
        origin, source_M = self.origin.select(self.source_M.index_select(0, true_M), row_M, lengths)
        return PackedBatch(
            input_ids=self.input_ids.index_select(0, packed_T),
            position_ids=self.position_ids.index_select(-1, packed_T),
            labels=self.labels.index_select(0, packed_T),
            sequences=tuple(self.sequences[i] for i in members),
            shard_of=None,
            source_M=source_M,
            origin=origin,
            **lengths_fields(lengths, padded_lengths, device),
        )

    def _idle(self) -> PackedBatch:
        """One sequence of no true tokens, as long as the shortest packed one: nothing to score, but it runs."""
        width = min((size for size in self.padded_lengths if size), default=1)
        device = self.input_ids.device
        none = self.source_M[:0]
        origin, source_M = self.origin.select(none, none, ())
        return PackedBatch(
            input_ids=self.input_ids.new_zeros(width),
            position_ids=torch.arange(width, device=device).expand(*self.position_ids.shape[:-1], width),
            labels=self.labels.new_full((width,), IGNORE_INDEX),
            sequences=(),
            shard_of=None,
            source_M=source_M,
            origin=origin,
            **lengths_fields((0,), (width,), device),
        )


def _build(tokens: TrueTokens, align: int) -> PackedBatch:
    """A batch from its true tokens, one after another."""
    check_align(align)
    ids_M, loss_M, position_M, lengths = tokens.ids_M, tokens.loss_M, tokens.position_M, tokens.origin.lengths
    device = ids_M.device
    if ids_M.dtype not in (torch.int32, torch.int64):  # what embeddings take
        ids_M = ids_M.long()
    padded_lengths = [-(-length // align) * align for length in lengths]
    fields = lengths_fields(lengths, padded_lengths, device)
    place_M, total = fields["place_M"], sum(padded_lengths)

    label_M = torch.full_like(ids_M, IGNORE_INDEX, dtype=torch.int64)
    label_M[:-1] = ids_M[1:]
    if loss_M is not None:
        check_loss_mask(loss_M)
        label_M[:-1] = label_M[:-1].masked_fill(loss_M[1:] == 0, IGNORE_INDEX)
    label_M.index_fill_(0, last_tokens(lengths, device), IGNORE_INDEX)

    row_T, offset_T = ramp(padded_lengths, device)
    if position_M is None:
        position_ids = offset_T
    else:  # through the padding, count on from the last true position
        last_T = torch.tensor([max(length - 1, 0) for length in lengths], dtype=torch.int64, device=device)[row_T]
        true_T = torch.minimum(offset_T, last_T)
        begins = torch.tensor(cumulated(lengths)[:-1], dtype=torch.int64, device=device)[row_T]
        position_ids = position_M.index_select(-1, begins + true_T) + (offset_T - true_T)
    return PackedBatch(
        input_ids=ids_M.new_zeros(total).index_copy(0, place_M, ids_M),
        position_ids=position_ids,
        labels=label_M.new_full((total,), IGNORE_INDEX).index_copy(0, place_M, label_M),
        sequences=tuple(range(len(lengths))),
        shard_of=None,
        source_M=tokens.source_M,
        origin=tokens.origin,
        **fields,
    )
