"""The one validator of the op: shapes and types on the host, values with at most one device-to-host copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real

import torch
from torch import Tensor

from logitless.errors import InputTypeError, InvalidInputError
from logitless.head import LMHead
from logitless.types import STATS

__all__ = ["check_call", "check_facts", "check_kept", "check_stats", "mask_labels", "value_facts"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Of temperatures, scales and caps: a backend's stand-in for −inf, 1e30, times FACTOR / SMALLEST / ln 2 stays float32.
SMALLEST, LARGEST, FACTOR = 1e-5, 1e5, 1e3
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _tensor(name: str, value: object, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputTypeError(f"{name}: got {type(value).__qualname__}, expected a tensor")
    if hasattr(type(value), "to_local"):  # told by duck type, so that torch.distributed.tensor is not imported
        raise InputTypeError(
            f"{name}: got a {type(value).__qualname__}, expected a plain tensor; pass its to_local(), with "
            "tp_group= for a head sharded by vocab rows; score inside of the forward for which FSDP gathers a weight"
        )
    if value.is_nested:
        raise InputTypeError(
            f"{name}: got a nested tensor, expected a dense one; pass the values() of a jagged "
            "one, of hidden and labels alike, or make a PackedBatch"
        )
    if value.dtype not in dtypes:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InputTypeError(f"{name}: got dtype {value.dtype}, expected one of {wanted}")
    if value.device != device:
        raise InvalidInputError(f"{name}: is on {value.device}, hidden is on {device}; move one of them")
    if value.layout != torch.strided:
        raise InvalidInputError(f"{name}: got layout {value.layout}, expected a dense tensor; call to_dense()")
    return value


def _shape(name: str, value: Tensor, expected: tuple[int, ...], why: str) -> None:
    if tuple(value.shape) != expected:
        raise InvalidInputError(f"{name}: got shape {tuple(value.shape)}, expected {expected} ({why})")


def _positive(name: str, value: object, largest: float) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputTypeError(f"{name}: got {type(value).__qualname__}, expected a positive number")
    if not SMALLEST <= value <= largest:  # type: ignore[operator]  # a Real compares with floats, without overflow
        raise InvalidInputError(
            f"{name}: got {value}, expected a positive finite number, from {SMALLEST} to {largest}, so that "
            "what is multiplied and divided by it stays float32"
        )


def _count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputTypeError(f"{name}: got {type(value).__qualname__}, expected a number of bytes (int)")
    if not least <= value < 1 << 63:
        raise InvalidInputError(f"{name}: got {value}, expected at least {least} and less than 2^63")


def _check_head(head: LMHead, device: torch.device, hidden_size: int, leading: tuple[int, ...], least: int) -> None:
    weight = _tensor("head.weight", head.weight, device, FLOATS)
    if weight.ndim != 2 or weight.shape[1] != hidden_size or weight.shape[0] < least:
        raise InvalidInputError(
            f"head.weight: got shape {tuple(weight.shape)}, expected (vocab rows >= {least}, {hidden_size}), "
            f"since hidden has size {hidden_size}; a Linear's weight is passed as it is, not transposed"
        )
    rows = weight.shape[0]
    if head.bias is not None:
        _shape("head.bias", _tensor("head.bias", head.bias, device, FLOATS), (rows,), "one for each vocab row")
    if isinstance(head.scale, bool) or not isinstance(head.scale, Real):
        raise InputTypeError(f"head.scale: got {type(head.scale).__qualname__}, expected a number")
    if not -FACTOR <= head.scale <= FACTOR:
        raise InvalidInputError(f"head.scale: got {head.scale}, expected a finite number, at most {FACTOR} either way")
    if head.softcap is not None:
        _positive("head.softcap", head.softcap, FACTOR)
    for name, size, lowest in (("vocab_size", head.vocab_size, 1), ("vocab_start", head.vocab_start, 0)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, (int, torch.SymInt))):
            raise InputTypeError(f"head.{name}: got {type(size).__qualname__}, expected an int or None")
        if size is not None and size < lowest:
            raise InvalidInputError(f"head.{name}: got {size}, expected at least {lowest}")
    if not isinstance(head.lora, (tuple, list)):
        raise InputTypeError(f"head.lora: got {type(head.lora).__qualname__}, expected a tuple or list of pairs (u, b)")
    for i, pair in enumerate(head.lora):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputTypeError(f"head.lora[{i}]: expected a pair (u [..., r], b [V, r])")
        u, b = (
            _tensor(f"head.lora[{i}].{name}", value, device, FLOATS) for name, value in zip("ub", pair, strict=True)
        )
        if b.ndim != 2 or b.shape[1] == 0:
            raise InvalidInputError(f"head.lora[{i}].b: got shape {tuple(b.shape)}, expected ({rows}, r) with r >= 1")
        _shape(f"head.lora[{i}].b", b, (rows, b.shape[1]), "b is [V, r]")
        _shape(f"head.lora[{i}].u", u, (*leading, b.shape[1]), "u is labels' shape and b's rank")
    if head.grad_buffer is not None:
        _tensor("head.grad_buffer", head.grad_buffer, device, (torch.float32,))
        _shape("head.grad_buffer", head.grad_buffer, tuple(weight.shape), "that of head.weight")
        if 0 in head.grad_buffer.stride() and head.grad_buffer.numel() > 1:
            raise InvalidInputError("head.grad_buffer: is an expanded tensor, which cannot be added into; clone it")
        if head.grad_buffer.requires_grad:
            raise InvalidInputError("head.grad_buffer: requires grad; pass a buffer that does not (it is written)")
        if torch.compiler.is_compiling():
            raise InvalidInputError("head.grad_buffer: it is written, so it works in eager mode only; leave it out")


def check_call(
    hidden: Tensor,
    head: LMHead,
    labels: Tensor,
    temperature: Tensor | float,
    ignore_index: int,
    keep_bytes: int,
    workspace_bytes: int,
    group_size: int,
    flags: Mapping[str, object],
) -> None:
    """Types, dtypes, devices, shapes and numbers of a call; reads no tensor's values."""
    if not isinstance(hidden, Tensor):
        raise InputTypeError(f"hidden: got {type(hidden).__qualname__}, expected a tensor [..., D]")
    _tensor("hidden", hidden, hidden.device, FLOATS)
    if hidden.is_meta:
        raise InvalidInputError("hidden: is on the meta device, which holds no values; expected a device that does")
    if hidden.ndim < 1 or hidden.shape[-1] == 0:
        raise InvalidInputError(f"hidden: got shape {tuple(hidden.shape)}, expected [..., D] with D >= 1")
    _tensor("labels", labels, hidden.device, INTEGERS)
    tokens = tuple(hidden.shape[:-1])
    if labels.shape[: len(tokens)] != tokens or labels.ndim > hidden.ndim or 0 in labels.shape[len(tokens) :]:
        raise InvalidInputError(
            f"labels: got shape {tuple(labels.shape)}, expected {tokens}, hidden's {tuple(hidden.shape)} without its "
            f"last dimension, or {(*tokens, 'K')} for K labels of each; labels are already shifted"
        )
    _check_head(head, hidden.device, hidden.shape[-1], tokens, 1 if group_size == 1 else 0)  # of a shard, none will do
    if head.vocab_start is not None and group_size == 1 and head.vocab_start != 0:
        raise InvalidInputError(
            f"head.vocab_start: got {head.vocab_start} without a tp_group of several ranks; pass it"
        )
    rows = head.weight.shape[0] * group_size
    if head.vocab_size is not None and (head.vocab_start is None or group_size == 1) and head.vocab_size > rows:
        raise InvalidInputError(
            f"head.vocab_size: got {head.vocab_size}, expected at most the {rows} rows of the weight on "
            f"{group_size} rank(s); pass the tp_group and vocab_start if the vocabulary is sharded"
        )
    if head.vocab_start is not None and group_size > 1 and head.vocab_size is None:
        raise InvalidInputError("head.vocab_size: got None with vocab_start, expected the rows of all shards together")
    if isinstance(temperature, Tensor):
        _tensor("temperature", temperature, hidden.device, FLOATS + INTEGERS)
        if temperature.ndim:
            _shape("temperature", temperature, tokens, "labels' shape, one for each token, or a number")
        if temperature.requires_grad:
            raise InvalidInputError("temperature: requires grad, but no gradient is given for it; detach it")
    else:
        _positive("temperature", temperature, LARGEST)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise InputTypeError(f"ignore_index: got {type(ignore_index).__qualname__}, expected an int")
    if not -(1 << 63) <= ignore_index < 1 << 63:
        raise InvalidInputError(f"ignore_index: got {ignore_index}, expected a 64-bit int")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise InputTypeError(f"{name}: got {type(flag).__qualname__}, expected True or False")
    _count("keep_bytes", keep_bytes, 0)
    _count("workspace_bytes", workspace_bytes, 1)


def check_kept(top_k: object, top_p: object, vocab_size: int) -> tuple[int | None, float | None]:
    """top_k and top_p, None where they keep every token."""
    if top_k is not None:
        if isinstance(top_k, bool) or not isinstance(top_k, int):
            raise InputTypeError(f"top_k: got {type(top_k).__qualname__}, expected an int or None")
        if top_k < 1:
            raise InvalidInputError(f"top_k: got {top_k}, expected at least 1, or None to keep every token")
        top_k = None if top_k >= vocab_size else top_k
    if top_p is not None:
        if isinstance(top_p, bool) or not isinstance(top_p, Real):
            raise InputTypeError(f"top_p: got {type(top_p).__qualname__}, expected a number or None")
        if not 0.0 < top_p <= 1.0:  # type: ignore[operator]
            raise InvalidInputError(f"top_p: got {top_p}, expected more than 0 and at most 1, which keeps every token")
        top_p = None if top_p == 1.0 else float(top_p)
    return top_k, top_p


def check_stats(stats: object) -> tuple[str, ...]:
    """The names, each once."""
    if isinstance(stats, str) or not isinstance(stats, Sequence):
        raise InputTypeError(f"stats: got {type(stats).__qualname__}, expected a tuple of names, such as ('is_kept',)")
    unknown = [name for name in stats if not isinstance(name, str) or name not in STATS]
    if unknown:
        raise InvalidInputError(f"stats: got {unknown[0]!r}, expected some of {', '.join(map(repr, STATS))}")
    return tuple(dict.fromkeys(stats))


def value_facts(labels: Tensor, temperature: Tensor | None, ignore_index: int) -> Tensor:
    """[3] int64 of all N > 0 tokens: how many are live, their least and greatest label; [4] with bad temperatures.

    Args:
        labels: [N] or [N, K] int64; a token is live if one of its labels is.
        temperature: [N], or None where a number was checked before.
    """
    facts = labels.new_empty(3 if temperature is None else 4)
    count, low, high, *cold = facts.unbind()
    live = labels != ignore_index
    torch.aminmax(labels * live, out=(low, high))  # not `where` and `stack`: each is a kernel or two more on a GPU
    if live.ndim == 2:
        live = live.any(1)
    torch.sum(live, 0, dtype=torch.int64, out=count)
    if temperature is not None:
        bad = live & ~((temperature >= SMALLEST) & (temperature <= LARGEST))
        torch.sum(bad, 0, dtype=torch.int64, out=cold[0])
    return facts


def check_facts(
    facts: list[int], labels: Tensor, temperature: Tensor | None, ignore_index: int, vocab_size: int
) -> int:
    """How many labels are live, from `value_facts`; raises if one, or the temperature of one, is out of range."""
    count, low, high, *cold = facts
    if low < 0 or high >= vocab_size:
        labels = labels.flatten()
        seen = torch.where(labels != ignore_index, labels, 0)
        at = int(((seen < 0) | (seen >= vocab_size)).nonzero()[0, 0])
        raise InvalidInputError(
            f"labels: got {int(labels[at])} at flat position {at} (range {low} to {high}), expected 0 to "
            f"{vocab_size - 1} or ignore_index {ignore_index}; check the tokenizer against the head's vocab_size"
        )
    if cold and cold[0] and temperature is not None:
        live = labels != ignore_index
        bad = (live.any(1) if live.ndim == 2 else live) & ~((temperature >= SMALLEST) & (temperature <= LARGEST))
        at = int(bad.nonzero()[0, 0])
        raise InvalidInputError(
            f"temperature: got {float(temperature[at])} at flat position {at}, expected positive finite numbers, from "
            f"{SMALLEST} to {LARGEST} wherever the label is not ignored"
        )
    return count


def mask_labels(hidden: Tensor, mask: Tensor | None, ignore_index: int) -> Tensor:
    """[...] 0 where a token of hidden [..., D] is live, `ignore_index` elsewhere: what calls know tokens by."""
    if not isinstance(hidden, Tensor):
        raise InputTypeError(f"hidden: got {type(hidden).__qualname__}, expected a tensor [..., D]")
    shape = hidden.shape[:-1]
    if mask is None:
        return torch.zeros(shape, dtype=torch.int64, device=hidden.device)
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__qualname__
        raise InputTypeError(f"mask: got {got}, expected a bool tensor, True where a token counts (labels != -100)")
    if mask.shape != shape or mask.device != hidden.device:
        raise InvalidInputError(
            f"mask: got shape {tuple(mask.shape)} on {mask.device}, expected {tuple(shape)} on {hidden.device}, one "
            "for each hidden state"
        )
    return torch.where(mask, 0, ignore_index)
