"""Core attention for a Megatron layer spec that takes packed sequences (THD) and padded rows (BSHD) without
Transformer Engine: torch's `varlen_attn` on a GPU, each sequence by itself through SDPA elsewhere.

Under context parallelism every rank gathers the keys and values of all ranks, and each of its two chunks of a sequence
(zig-zag, as Megatron cuts it) attends to the prefix that ends with it.

Shape suffixes: B sequences or rows, S tokens of a row, T packed tokens of this rank, H query heads, G key heads of this
rank, E head size.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from logitless.errors import InvalidInputError, UnsupportedError

__all__ = ["PackedAttention"]

CAUSAL = {"causal", "padding_causal"}
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_SIZE = 256


class PackedAttention(nn.Module):
    """What a layer spec calls `core_attention`; without parameters.

    Attends causally within each sequence, within `config.window_size` where that layer has a window. Outputs equal
    `softmax(q kᵀ · scale) v` for each sequence by itself.

    Raises:
        UnsupportedError: the configuration asks for what it does not compute (an attention sink, cross attention).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        from megatron.core.transformer.utils import is_layer_window_attention

        super().__init__()
        if getattr(config, "softmax_type", "vanilla") != "vanilla":
            raise UnsupportedError(f"softmax_type: got {config.softmax_type!r}, expected 'vanilla'")
        if attention_type != "self":
            raise UnsupportedError(f"attention_type: got {attention_type!r}, expected 'self'")
        self.config = config
        self.attn_mask_type = attn_mask_type
        # Not softmax_scale / layer_number: query-key layer scaling is undone by the softmax, and guards only fp16.
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(k_channels or config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = tuple(config.window_size) if windowed else None
        self.cp_group: Any = getattr(pg_collection, "cp", None)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[T, H, E], [T, G, E], [T, G, E] with packed_seq_params of format thd, else [S, B, H, E] and its like.

        Args:
            attention_mask: of rows alone: bool, broadcastable to [B, H, S, S], true where a key is hidden; a causal
                layer hides what comes later in any case.

        Returns:
            [T, H·E] or [S, B, H·E].
        """
        if attention_bias is not None:
            raise UnsupportedError("attention_bias: this attention takes none")
        kind = (self.attn_mask_type if attn_mask_type is None else attn_mask_type).name
        if kind not in CAUSAL and kind != "no_mask" and attention_mask is None:
            raise UnsupportedError(f"attn_mask_type: got {kind!r} without an attention_mask")
        packed = packed_seq_params
        if packed is not None and packed.qkv_format == "thd":
            cu_seqlens = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
            local = getattr(packed, "local_cp_size", None) is not None  # the group then goes with the batch
            group = packed.cp_group if local or getattr(packed, "cp_group", None) is not None else self.cp_group
            return self._packed(query, key, value, cu_seqlens, int(packed.max_seqlen_q), kind in CAUSAL, group)
        group = self.cp_group
        if group is not None and group.size() > 1:
            return self._rows_over_ranks(query, key, value, attention_mask, kind in CAUSAL, group)
        return self._rows(query, key, value, None if kind == "no_mask" else attention_mask, kind in CAUSAL)

    # --- packed ---------------------------------------------------------------------------------------------------

    def _packed(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, causal: bool, group: Any
    ) -> Tensor:
        """[T, H·E]; `cu_seqlens` [B+1] and `longest` are of the padded lengths over all ranks of `group`."""
        cu_seqlens = cu_seqlens.to(device=query.device, dtype=torch.int32)
        if group is None or group.size() == 1:
            return self._attend(query, key, value, cu_seqlens, cu_seqlens, longest, longest, causal).flatten(1)
        if not causal:
            raise UnsupportedError("attn_mask_type: context parallelism here is for causal attention alone")
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        size, local = group.size(), query.shape[0]
        # One collective for both; its gradient is reduce-scattered.
        both = gather_from_sequence_parallel_region(torch.cat((key, value), -1).contiguous(), group=group)
        outs, places = [], []
        # A call for each of the two chunks: within one, no key is picked twice, so that the gradient of index_select
        # is one addition to each place, whose order cannot matter.
        for slot, chunk in enumerate((group.rank(), 2 * size - 1 - group.rank())):
            place, index, cu_q, cu_k = _chunk_prefix(cu_seqlens, size, slot, chunk, local)
            part = query.index_select(0, place)
            keys, values = both.index_select(0, index).split((key.shape[-1], value.shape[-1]), -1)
            outs.append(self._attend(part, keys, values, cu_q, cu_k, longest // (2 * size), longest, True))
            places.append(place)
        return torch.cat(outs).index_select(0, torch.cat(places).argsort()).flatten(1)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        longest_q: int,
        longest_k: int,
        causal: bool,
    ) -> Tensor:
        """[T, H, E of values]: within each sequence, whose last query sees its last key."""
        dropping = self.training and self.dropout > 0
        if _takes_varlen(query, value, self.window) and not dropping:
            left, right = self.window or (-1, -1)
            window = (left, 0 if causal else right)
            return _varlen(query, key, value, cu_q, cu_k, longest_q, longest_k, window, self.scale)
        lengths_q, lengths_k = torch.stack((cu_q, cu_k)).diff().tolist()
        if sum(lengths_q) != query.shape[0] or sum(lengths_k) != key.shape[0]:
            raise InvalidInputError(
                f"packed_seq_params: its lengths add up to {sum(lengths_q)} queries and {sum(lengths_k)} keys on this "
                f"rank, but there are {query.shape[0]} and {key.shape[0]}; under context parallelism each padded "
                "length must divide by twice the number of ranks"
            )
        batched = [x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)]
        queries, keys, values = (
            torch.split(x, n, 2) for x, n in zip(batched, (lengths_q, lengths_k, lengths_k), strict=True)
        )
        rows = zip(queries, keys, values, strict=True)
        outs = [self._sdpa(q, k, v, None, causal) for q, k, v in rows]
        return torch.cat(outs, 2).squeeze(0).transpose(0, 1)

    # --- padded rows ----------------------------------------------------------------------------------------------

    def _rows(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, causal: bool) -> Tensor:
        """[S, B, H·E]; `hidden` is true where a key is not seen."""
        visible = None if hidden is None or not hidden.numel() else ~hidden.bool()
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return self._sdpa(q, k, v, visible, causal).permute(2, 0, 1, 3).flatten(2)

    def _rows_over_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, causal: bool, group: Any
    ) -> Tensor:
        """The same, of rows of one length that are cut zig-zag over the context-parallel ranks."""
        if hidden is not None and hidden.numel():
            raise UnsupportedError("attention_mask: padded rows under context parallelism take none; pack them (thd)")
        columns, rows = query.shape[:2]
        whole = columns * group.size()
        cu_seqlens = torch.arange(rows + 1, device=query.device) * whole
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
        out = self._packed(q, k, v, cu_seqlens, whole, causal, group)
        return out.view(rows, columns, -1).transpose(0, 1)

    # --- either ---------------------------------------------------------------------------------------------------

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, causal: bool) -> Tensor:
        """[B, H, Q, E], [B, G, K, E], [B, G, K, E] and a bool mask of what is seen, to [B, H, Q, E]."""
        queries, keys = query.shape[2], key.shape[2]
        if visible is not None or self.window is not None or (causal and queries != keys):
            visible = self._seen(queries, keys, visible, causal, query.device)
        dropout = self.dropout if self.training else 0.0
        with self._dropout_rng(dropout):
            return functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=visible,
                dropout_p=dropout,
                is_causal=causal and visible is None,
                scale=self.scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )

    def _seen(self, queries: int, keys: int, visible: Tensor | None, causal: bool, device: torch.device) -> Tensor:
        behind = torch.arange(keys - queries, keys, device=device).unsqueeze(1) - torch.arange(keys, device=device)
        left, right = self.window or (-1, -1)
        seen = torch.ones_like(behind, dtype=torch.bool)
        if left >= 0:
            seen &= behind <= left
        if causal or right >= 0:
            seen &= behind >= -(0 if causal else right)
        if visible is None:
            return seen
        seen = seen & visible
        # A padding token that sees nothing sees itself: a softmax over nothing is NaN, and so are its gradients.
        return seen | (~seen.any(-1, keepdim=True) & (behind == 0))

    def _dropout_rng(self, dropout: float) -> Any:
        """Ranks that hold different heads drop differently, as Megatron's own attention does."""
        if not dropout or self.config.sequence_parallel:
            return nullcontext()
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        return get_cuda_rng_tracker().fork()


# --- context parallelism ------------------------------------------------------------------------------------------


def _chunk_prefix(
    cu_seqlens: Tensor, size: int, slot: int, chunk: int, local: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For one chunk of each sequence on this rank: its queries, and the keys up to its end. No host copy.

    Args:
        cu_seqlens: [B+1] int32, over all `size` ranks; each length divides by 2·size.
        slot: 0 or 1, which of this rank's chunks of a sequence.
        chunk: which of the 2·size chunks of the sequence that is.
        local: T.

    Returns:
        Where the chunks' queries stand among this rank's [T/2]; where the keys stand among the gathered
        [size · T, ...], in order; and both cumulated lengths [B+1] int32.
    """
    begin_B, chunk_B = cu_seqlens[:-1].long(), cu_seqlens.diff().long() // (2 * size)
    row, offset = _ramp(chunk_B, local // 2)
    place = begin_B[row] // size + slot * chunk_B[row] + offset
    row, offset = _ramp(chunk_B * (chunk + 1), (local // 2) * (chunk + 1))
    length = chunk_B[row].clamp(min=1)
    other = offset // length  # which chunk the key lies in
    owner = torch.where(other < size, other, 2 * size - 1 - other)
    index = owner * local + begin_B[row] // size + (other >= size) * length + offset % length
    cu_q = cu_seqlens // (2 * size)
    return place, index, cu_q, cu_q * (chunk + 1)


def _ramp(length_B: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For `total` tokens in sequences of these lengths: each one's sequence, and its place in it."""
    row = torch.repeat_interleave(length_B, output_size=total)
    begin_B = length_B.cumsum(0) - length_B
    return row, torch.arange(total, device=length_B.device) - begin_B[row]


# --- torch's varlen kernel ----------------------------------------------------------------------------------------


@functools.cache
def _varlen_attn() -> tuple[Callable[..., Any], frozenset[str]] | None:
    """torch's kernel and the names of its parameters; None before torch 2.10."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _takes_varlen(query: Tensor, value: Tensor, window: tuple[int, ...] | None) -> bool:
    found = _varlen_attn()
    return (
        found is not None
        and query.is_cuda
        and query.dtype in FLASH_DTYPES
        and query.shape[-1] == value.shape[-1] <= FLASH_HEAD_SIZE
        and query.shape[-1] % 8 == 0
        and (window is None or "window_size" in found[1])
    )


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    window: tuple[int, int],
    scale: float,
) -> Tensor:
    found = _varlen_attn()
    if found is None:
        raise UnsupportedError(f"torch {torch.__version__} has no varlen_attn; it came with 2.10")
    kernel, parameters = found
    options: dict[str, Any] = (
        {"window_size": window} if "window_size" in parameters else {"is_causal": window == (-1, 0)}
    )
    own_scale = query.shape[-1] ** -0.5
    if "scale" in parameters:
        options["scale"] = scale
    elif not math.isclose(scale, own_scale):  # torch 2.10
        query = query * (scale / own_scale)
    heads, groups = query.shape[1], key.shape[1]
    if heads != groups and "enable_gqa" in parameters:  # torch 2.12
        options["enable_gqa"] = True
    elif heads != groups:
        key, value = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
    out: Tensor = kernel(query, key, value, cu_q, cu_k, longest_q, longest_k, **options)
    return out
