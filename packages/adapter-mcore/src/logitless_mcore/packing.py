"""The eight packing functions of the reference design, under its names: thin calls into `arrange`.

Every mask is of 0 and 1, of any dtype. Labels are shifted within their sequence, and before they are cut for context
parallelism. Values of any dtype may be packed, with trailing dimensions; gradients flow.

Shape suffixes: B sequences, S columns, j ragged, S' columns of the longest sequence, P packed tokens of this rank.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from logitless import PackedBatch
from logitless.errors import InvalidInputError
from logitless_mcore.arrangement import Arrangement, Ranks, arrange, as_batch, as_rows, lengthened

__all__ = [
    "arranged_as",
    "postprocess_bshd",
    "postprocess_bshd_no_padding",
    "postprocess_packed_seqs",
    "postprocess_thd_no_padding",
    "preprocess_bshd",
    "preprocess_bshd_no_padding",
    "preprocess_packed_seqs",
    "preprocess_thd_no_padding",
]


def preprocess_packed_seqs(
    input_ids: Tensor, attention_mask: Tensor, pre_process: bool = True, use_fp8_padding: bool = False
) -> tuple[Tensor, PackedSeqParams]:
    """Pack padded rows: [B, S, ...] to this rank's [1, P, ...], with what tells the sequences apart.

    Args:
        input_ids: ids, or any values of the tokens.
        attention_mask: [B, S], 0 and 1 of any dtype, padded left, right or with holes.
        pre_process: False returns `input_ids` as they are.
        use_fp8_padding: pad as Transformer Engine's fp8 wants it.
    """
    batch = as_rows(attention_mask)
    arrangement = arrange(batch, "thd", Ranks.present(), fp8=use_fp8_padding)
    return arrangement.pack(input_ids, name="input_ids") if pre_process else input_ids, arrangement.params


def arranged_as(
    packed_seq_params: Any, batch: PackedBatch, batch_size: int, offsets: Tensor | None, ranks: Ranks | None = None
) -> Arrangement:
    """The arrangement that made these parameters, for the present ranks unless others are given."""
    cu_seqlens = packed_seq_params.cu_seqlens_q_padded
    bounds = (packed_seq_params.cu_seqlens_q if cu_seqlens is None else cu_seqlens).tolist()
    padded = [end - begin for begin, end in pairwise(bounds)]
    lengths = batch.lengths
    if len(lengths) != batch_size or len(padded) != batch_size:
        raise InvalidInputError(
            f"batch_size: got {batch_size}, for {len(lengths)} sequences and packed_seq_params of {len(padded)}"
        )
    if any(short < true for short, true in zip(padded, lengths, strict=True)):
        raise InvalidInputError(f"packed_seq_params: its lengths {padded} do not hold sequences of {list(lengths)}")
    return Arrangement(lengthened(batch, padded), "thd", ranks or Ranks.present(), offsets)


def postprocess_packed_seqs(
    output: Tensor,
    packed_seq_params: PackedSeqParams,
    attention_mask: Tensor,
    batch_size: int,
    seq_len: int,
    post_process: bool = True,
) -> Tensor:
    """Undo `preprocess_packed_seqs`: every rank's [1, P, ...] to [B, S, ...], 0 where the mask is 0.

    `post_process=False` returns `output` as it is.
    """
    if not post_process:
        return output
    batch = as_rows(attention_mask)
    if attention_mask.shape[1] != seq_len:
        raise InvalidInputError(f"seq_len: got {seq_len}, expected attention_mask's {attention_mask.shape[1]}")
    return arranged_as(packed_seq_params, batch, batch_size, None).unpack(output)


def preprocess_bshd(
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
    sequence_parallel: bool = False,
    pre_process: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Align rows left: ids [B, S, ...], mask and positions [B, S] to [B, S', ...], S' the longest sequence.

    With `sequence_parallel`, S' divides by tp. `pre_process=False` returns `input_ids` as they are.
    """
    batch = as_rows(attention_mask)
    rows = arrange(batch, "bshd", Ranks.present(), sequence_parallel=sequence_parallel)
    ids = rows.pack(input_ids, name="input_ids") if pre_process else input_ids
    return ids, rows.pack(attention_mask), rows.pack(position_ids, name="position_ids")


def postprocess_bshd(
    result: Tensor,
    attention_mask: Tensor,
    original_attention_mask: Tensor,
    origin_seqlen: int,
    post_process: bool = True,
) -> Tensor:
    """Undo `preprocess_bshd`: [B, S', ...] to [B, origin_seqlen, ...], 0 where the original mask is 0.

    Args:
        result: with its `attention_mask` [B, S'].
        attention_mask: the one that `preprocess_bshd` returned.
        original_attention_mask: [B, origin_seqlen], the one that it was given.
        origin_seqlen: S.
        post_process: False returns `result` as it is.
    """
    if not post_process:
        return result
    here = as_rows(attention_mask)
    there = as_rows(original_attention_mask, "original_attention_mask")
    if original_attention_mask.shape[1] != origin_seqlen:
        raise InvalidInputError(
            f"origin_seqlen: got {origin_seqlen}, expected original_attention_mask's {original_attention_mask.shape[1]}"
        )
    if here.lengths != there.lengths:
        raise InvalidInputError(
            f"attention_mask: its rows hold {list(here.lengths)} tokens, the original's {list(there.lengths)}"
        )
    out: Tensor = there.unpack(here.pack(result, "prediction"))
    return out


def preprocess_thd_no_padding(
    input_ids: Tensor, pre_process: bool = True, need_roll: bool = False
) -> tuple[Tensor, PackedSeqParams]:
    """Pack a nested tensor: [B, j, ...] to this rank's [1, P, ...], with what tells the sequences apart.

    `need_roll` makes labels of ids: each place gets the next token of its own sequence, and 0 after the last; they are
    shifted before they are cut for context parallelism. `pre_process=False` returns `input_ids` as they are.
    """
    batch, offsets = as_batch(input_ids)
    packing = arrange(batch, "thd", Ranks.present(), offsets=offsets)
    return _rolled(packing, input_ids, need_roll) if pre_process else input_ids, packing.params


def _rolled(arrangement: Arrangement, x: Tensor, roll: bool) -> Tensor:
    return arrangement.pack(x, "token" if roll else "prediction")


def postprocess_thd_no_padding(
    output: Tensor,
    packed_seq_params: PackedSeqParams,
    input_ids: Tensor,
    batch_size: int,
    post_process: bool = True,
) -> Tensor:
    """Undo `preprocess_thd_no_padding`: every rank's [1, P, ...] to nested [B, j, ...] with the lengths of `input_ids`.

    `post_process=False` returns `output` as it is.
    """
    if not post_process:
        return output
    batch, offsets = as_batch(input_ids)
    return arranged_as(packed_seq_params, batch, batch_size, offsets).unpack(output)


def preprocess_bshd_no_padding(
    input_ids: Tensor, pre_process: bool = True, need_roll: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a nested tensor: [B, j, ...] to [B, S', ...], with their mask (bool) and positions, [B, S'].

    S' is the longest sequence, rounded up to what tp divides. `need_roll` and `pre_process` as in
    `preprocess_thd_no_padding`.
    """
    batch, offsets = as_batch(input_ids)
    rows = arrange(batch, "bshd", Ranks.present(), offsets=offsets)
    true = torch.ones(sum(batch.lengths), dtype=torch.bool, device=batch.input_ids.device)
    mask = torch.zeros(rows.shape[0] * rows.shape[1], dtype=torch.bool, device=true.device)
    mask = mask.index_copy(0, rows.batch.place_M, true).view(rows.shape)
    return _rolled(rows, input_ids, need_roll) if pre_process else input_ids, mask, rows.shaped(rows.batch.position_ids)


def postprocess_bshd_no_padding(output: Tensor, attention_mask: Tensor, post_process: bool = True) -> Tensor:
    """Undo `preprocess_bshd_no_padding`: [B, S', ...] to nested [B, j, ...], the places where `attention_mask` is 1.

    `post_process=False` returns `output` as it is.
    """
    if not post_process:
        return output
    batch = as_rows(attention_mask)
    offsets = torch.tensor([0, *accumulate(batch.lengths)], device=output.device)
    return torch.nested.nested_tensor_from_jagged(batch.pack(output, "prediction"), offsets)
