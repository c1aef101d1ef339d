"""Attention within each sequence of a packed row, in place of a model's own for the length of one call.

transformers' sdpa and eager attention tell packed sequences apart, if at all, by a mask of [T, T]. Here the family's
mask becomes a small tensor that says which sequences there are and how far a token sees, and reaches each layer on
the mask's own way, whatever keywords the family passes on; each sequence is then attended to by itself: on a GPU in
one call of torch's `varlen_attn` where it serves, else in turn by `scaled_dot_product_attention`.

Shape suffixes: B sequences, H query heads, G key heads, T packed tokens, L tokens of one sequence, E head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from logitless.errors import UnsupportedError
from logitless_hf.recurrent import by_sequence, recurrent_layers, text_model

__all__ = ["FLASH", "attention_configs", "implementations", "packed_attention"]

FLASH = frozenset({"flash_attention_2", "flash_attention_3"})
PACKED = {"sdpa": "logitless_packed_sdpa", "eager": "logitless_packed_eager"}
KEY = "_attn_implementation_internal"  # where a config keeps its choice: its setter would also set its sub-configs
CHECKPOINTERS = ("_gradient_checkpointing_func", "checkpoint_fn")  # of transformers, and of torch's CheckpointWrapper
ABSENT = object()
BLOCK = 256  # queries that a window is cut into at least
# Keywords that families pass on to every attention and that change nothing here.
HARMLESS = {
    *("position_ids", "cache_position", "use_cache", "return_dict", "output_hidden_states", "layer_idx"),
    *("sliding_window", "is_causal"),  # sdpa and eager go by the mask, if there is one, and so does this
}

_lengths: ContextVar[tuple[int, ...] | None] = ContextVar("logitless_packed_lengths", default=None)


# --- the mask -----------------------------------------------------------------------------------------------------


def _check_mask(mask_function: Callable[..., Any], lengths: Sequence[int], window: int | None, device: Any) -> None:
    """Refuse a mask that is not causal, within `window`: looked at where each token's view begins and ends."""
    size_B = torch.tensor(lengths, device=device)
    end_B = size_B.cumsum(0)
    end_T, start_T = (x.repeat_interleave(size_B, output_size=sum(lengths)) for x in (end_B, end_B - size_B))
    place_T = torch.arange(sum(lengths), device=device)
    first_T = start_T if window is None else torch.maximum(start_T, place_T - window + 1)
    zero_T = torch.zeros_like(place_T)

    def sees(key_T: Tensor) -> Tensor:
        return torch.as_tensor(mask_function(zero_T, zero_T, place_T, key_T), device=device)

    seen_T = sees(place_T) & sees(first_T)
    before_T = sees((first_T - 1).clamp(min=0)) & (first_T > start_T)
    after_T = sees(torch.minimum(place_T + 1, end_T - 1)) & (place_T + 1 < end_T)
    if not bool((seen_T & ~before_T & ~after_T).all()):
        raise UnsupportedError(
            f"the model's attention mask is not causal within {window or 'all'} tokens, as packed attention is, for "
            f"sequences of up to {max(lengths)} tokens; use layout='bshd'"
        )


def _packed_mask(
    *,
    mask_function: Callable[..., Any],
    kv_length: int,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: Any = None,
    cache_position: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """What `AttentionMaskInterface` asks for: int64 [1 + B, 1, 1, 1] on the CPU, the window (0: none) and the lengths.

    A window of no token, which some configs name where no layer has one, gives -1: no layer may use it. Any attention
    but the one below fails with such a tensor, so it cannot be taken for a mask.
    """
    lengths = _lengths.get()
    padded = attention_mask is not None and not bool(attention_mask.all())  # some make one that is true everywhere
    if lengths is None or padded or kv_length != sum(lengths):
        raise UnsupportedError("packed attention: the model asks for a mask that is not of the packed row")
    if local_size is not None and local_size < 1:
        return torch.tensor([-1, *lengths]).view(-1, 1, 1, 1)
    if device is None:
        device = "cpu" if cache_position is None else cache_position.device
    _check_mask(mask_function, lengths, local_size, device)
    return torch.tensor([local_size or 0, *lengths]).view(-1, 1, 1, 1)


def _read(mask: Any, total: int) -> tuple[int | None, list[int]]:
    """The window and the lengths that `_packed_mask` wrote."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.int64 or mask.ndim != 4 or mask.shape[1:] != (1, 1, 1):
        got = f"a mask {tuple(mask.shape)} of {mask.dtype}" if isinstance(mask, Tensor) else type(mask).__qualname__
        raise UnsupportedError(f"packed attention: the family's layer gives {got}, not the mask of a packed row")
    window, *lengths = mask.flatten().tolist()
    if window < 0:
        raise UnsupportedError("packed attention: got a mask with a window of no token")
    if sum(lengths) != total:
        raise UnsupportedError(f"packed attention: got {total} tokens, expected {sum(lengths)}")
    return window or None, lengths


# --- one sequence -------------------------------------------------------------------------------------------------


def _attend(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout: float, scale: float | None
) -> Tensor:
    """[1, H, Q, E] queries at the end of [1, G, K, E] keys; causal, within the window."""
    grouped = query.shape[1] != key.shape[1]
    mask, causal = None, query.shape[2] == key.shape[2]
    if not causal or (window is not None and window < key.shape[2]):
        mask, causal = _band(query, key, window), False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _attend_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    dropout: float,
    scale: float | None,
    *,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same with what torch's attention does not know; softmax in float32 or wider.

    Args:
        softcap: scores are c·tanh(z/c).
        sinks: [H] scores of one more key for each head, whose value is 0.
    """
    groups = query.shape[1] // key.shape[1]
    query = torch.unflatten(query, 1, (key.shape[1], groups))  # (1, G, H/G, Q, E)
    scores = query @ key.unsqueeze(2).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~_band(query, key, window), float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(1, -1, groups, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    weights = functional.dropout(weights[..., : key.shape[2]], dropout)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


def _band(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """[Q, K] bool: which keys each query sees."""
    queries, keys = query.shape[-2], key.shape[-2]
    place = torch.arange(keys - queries, keys, device=query.device).unsqueeze(1)
    behind = place - torch.arange(keys, device=query.device)
    return (behind >= 0) if window is None else (behind >= 0) & (behind < window)


def _attend_sequence(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, window: int | None
) -> Tensor:
    """[1, H, L, E]; with a window, in blocks that see themselves and the block before: linear in L."""
    length = query.shape[2]
    if window is None or length <= window:
        return attend(query, key, value, None)
    step = max(window, BLOCK)
    # Split and joined, not sliced: the gradient of a slice is as large as what it was cut from.
    blocks = [torch.split(x, step, dim=2) for x in (query, key, value)]
    out = []
    for i, part in enumerate(blocks[0]):
        keys, values = (x[i] if i == 0 else torch.cat((x[i - 1], x[i]), dim=2) for x in blocks[1:])
        out.append(attend(part, keys, values, window))
    return torch.cat(out, dim=2)


# --- all sequences at once ------------------------------------------------------------------------------------------


@cache
def _varlen_attn() -> tuple[Callable[..., Any], bool] | None:
    """torch's `varlen_attn` and whether it groups heads; None where it takes no scale and window (torch < 2.11)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return (varlen_attn, "enable_gqa" in known) if {"scale", "window_size"} <= known.keys() else None


def _flash_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel under `varlen_attn` runs on these."""
    size = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= 256
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, lengths: list[int], scale: float | None
) -> Tensor | None:
    """[1, H, T, E] of every sequence, in one call; None if torch has no kernel for it."""
    found = _varlen_attn()
    if found is None or not _flash_takes(query, key, value):
        return None
    kernel, groups = found
    grouped: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if groups:
            grouped["enable_gqa"] = True
        else:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(query.device)
    rows = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (T, H or G, E)
    reach = (-1 if window is None else window - 1, 0)  # tokens before, tokens after the one that looks
    longest = max(lengths)
    out: Tensor = kernel(*rows, borders, borders, longest, longest, scale=scale, window_size=reach, **grouped)
    return out.transpose(0, 1).unsqueeze(0)


# --- the row ------------------------------------------------------------------------------------------------------


def _packed_forward(
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What `AttentionInterface` asks for, in place of the implementation `own`.

    Args:
        query, key, value: [1, H, T, E], [1, G, T, E] and [1, G, T, E of values].
        attention_mask: what `_packed_mask` made.
        softcap, s_aux: as of `_attend_eager`; s_aux are its sinks.
        rest: keywords that are not understood are refused.

    Returns:
        [1, T, H, E of values], and no weights.
    """
    unknown = [name for name, x in rest.items() if name not in HARMLESS and x is not None and x is not False]
    if own != "eager":  # transformers' sdpa leaves them out, or raises
        extras = {"softcap": softcap, "s_aux": s_aux}
        unknown += [
            f"{name} (load the model with attn_implementation='eager')" for name in extras if extras[name] is not None
        ]
    if unknown:
        raise UnsupportedError(f"packed attention: got {', '.join(unknown)}, which it does not understand")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise UnsupportedError(f"packed attention: got queries {tuple(query.shape)}, keys {tuple(key.shape)}: a cache?")
    window, lengths = _read(attention_mask, query.shape[2])
    plain = softcap is None and s_aux is None
    if plain and not dropout:
        at_once = _attend_varlen(query, key, value, window, lengths, scaling)
        if at_once is not None:
            return at_once.transpose(1, 2).contiguous(), None
    inner = _attend if plain else partial(_attend_eager, softcap=softcap, sinks=s_aux)
    attend = partial(inner, dropout=dropout, scale=scaling)
    queries, keys, values = (torch.split(x, lengths, dim=2) for x in (query, key, value))
    rows = zip(queries, keys, values, strict=True)
    out = torch.cat([_attend_sequence(attend, q, k, v, window) for q, k, v in rows], dim=2)
    return out.transpose(1, 2).contiguous(), None


# --- in a model's place of its own ----------------------------------------------------------------------------------


def _register() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    for own, name in PACKED.items():
        if name not in AttentionInterface._global_mapping:
            AttentionInterface.register(name, partial(_packed_forward, own))
            AttentionMaskInterface.register(name, _packed_mask)


def _tower_configs(model: nn.Module) -> set[int]:
    """Ids of configs that only modules beside the text model have: those of vision and audio towers."""
    text = text_model(model)
    own: set[int] = set()
    others: set[int] = set()
    inside = set(text.modules())
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None:
            beside = module not in inside and not any(child is text for child in module.modules())
            (others if beside else own).add(id(config))
    return others - own


def attention_configs(model: nn.Module) -> list[Any]:
    """Every config that a module of the text model reads its attention implementation from, sub-configs too."""
    found: dict[int, Any] = {}
    towers = _tower_configs(model)
    waiting = [module.__dict__.get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if KEY in getattr(config, "__dict__", {}) and id(config) not in found and id(config) not in towers:
            found[id(config)] = config
            waiting.extend(config.__dict__.values())
    return list(found.values())


def _choices(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where the names of attention implementations stand: configs, and modules that keep a copy."""
    found = [(config.__dict__, KEY) for config in attention_configs(model)]
    towers = _tower_configs(model)
    modules = (module for module in model.modules() if id(module.__dict__.get("config")) not in towers)
    copies = [module.__dict__ for module in modules if "_attn_implementation" in module.__dict__]
    return found + [(copy, "_attn_implementation") for copy in copies]


def implementations(model: nn.Module) -> set[str]:
    """Names of the attention implementations that the model is set to."""
    return {str(place[name]) for place, name in _choices(model) if place[name] is not None}


@contextmanager
def _switched(changes: list[tuple[dict[str, Any], str, Any]], lengths: tuple[int, ...]) -> Iterator[None]:
    before = [(place, name, place.get(name, ABSENT)) for place, name, _ in changes]
    token = _lengths.set(lengths)
    try:
        for place, name, new in changes:
            place[name] = new
        yield
    finally:
        for place, name, own in before:
            if own is ABSENT:
                place.pop(name, None)
            else:
                place[name] = own
        _lengths.reset(token)


@contextmanager
def packed_attention(model: nn.Module, lengths: Sequence[int]) -> Iterator[None]:
    """Within the block, a call of the model with one row of such sequences attends within each of them.

    Recurrent layers run on each by itself. Layers that are recomputed in the backward, by gradient checkpointing, do
    so in the same way after the block.

    Args:
        model: its implementations are sdpa or eager; others are left as they are.
        lengths: of the sequences, T in all; those of length 0 take no part.
    """
    _register()
    sizes = tuple(length for length in lengths if length)
    changes = [(place, name, PACKED.get(place[name], place[name])) for place, name in _choices(model)]
    changes += [(m.__dict__, "forward", by_sequence(m.forward, sizes)) for m in recurrent_layers(model)]

    def again(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            with _switched(changes, sizes):
                return function(*args, **kwargs)

        return checkpoint(recomputed, *args, **kwargs)

    changes += [
        (module.__dict__, name, partial(again, module.__dict__[name]))
        for module in model.modules()
        for name in CHECKPOINTERS
        if callable(module.__dict__.get(name))
    ]
    with _switched(changes, sizes):
        yield
