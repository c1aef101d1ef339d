"""What a family does to its logits, found by trying it: a stand-in for the head returns chosen values.

Configs mislead: some carry `final_logit_softcapping` or `logit_scale` and their forward ignores it. So no attribute
is read: every element of a [batch, position, vocabulary] block gets a value of its own draw, and one of `z -> s·z`,
`z -> c·tanh(s·z/c)` and `z -> z + a buffer's numbers` must explain all that comes out, in train and in eval mode. One
fit over the whole block also refuses what depends on the batch row, the position, the vocab row or the other values of
a row.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from logitless.errors import UnsupportedError
from logitless_hf.capture import capture, check_linear, first_stream
from logitless_hf.head import find_head
from logitless_hf.sharding import resharded

__all__ = ["Transform", "identify", "probe_inputs", "probe_tokens", "set_mode", "undisturbed"]

BATCH, LENGTH = 2, 4
SMALLEST, LARGEST = 2.0**-12, 2.0**24  # the one tells the slope, the other a cap
# Powers of two and small integers survive a cast to bf16 unrounded. A small vocabulary takes the first of them.
POINTS = [
    *(sign * point for point in (SMALLEST, LARGEST) for sign in (1, -1)),
    *sorted((3.0 * i for i in range(-20, 21)), key=abs),
    *(sign * 2.0**exponent for exponent in range(-11, 24) for sign in (1, -1)),
]
RELATIVE = 5e-6  # a few roundings of float32
ABSOLUTE = 1e-9


@dataclass(frozen=True, slots=True)
class Transform:
    """`z -> s·z`, or `z -> c·tanh(s·z/c)` with a softcap c, or `z -> z + o` with the buffer named `offset`, [V]."""

    scale: float = 1.0
    softcap: float | None = None
    offset: str | None = None


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever runs within leaves random states, buffers, modes, `requires_grad`, shards as they were, to the bit."""
    device_types = {"cpu"} | {parameter.device.type for parameter in model.parameters()} - {"meta"}
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    python_state = random.getstate()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=gpus))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(resharded(model))
            for device_type in device_types:
                stack.enter_context(torch.autocast(device_type, enabled=False))
            yield
    finally:
        random.setstate(python_state)
        for module, mode in modes:
            module.training = mode
        for module, name, buffer, copy in buffers:
            module._buffers[name] = buffer
            if buffer is not None and copy is not None and not torch.equal(buffer, copy):
                with torch.no_grad():
                    buffer.copy_(copy)


def set_mode(model: nn.Module, training: bool) -> None:
    """Of every module; not by `model.train()`, which a class may override."""
    for module in model.modules():
        module.training = training


@contextmanager
def _tracked(model: nn.Module) -> Iterator[dict[int, str]]:
    """Every parameter, and every buffer beside the head, requires grad; yields the names of these leaves by id.

    Logits that then require grad depend on one of them, even where it is frozen, or zero as yet. Buffers inside of the
    trunk are left alone. The others are replaced by a copy that is no leaf, which a forward may write to.
    """
    outer = find_head(model).outer
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    frozen = [
        parameter
        for parameter in model.parameters()
        if not parameter.requires_grad and parameter.is_floating_point() and not parameter.is_inference()
    ]
    replaced = []
    for path, module in model.named_modules():
        if any(child is outer for child in module.modules()):
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    leaf = buffer.detach().clone().requires_grad_()
                    names[id(leaf)] = f"{path}.{name}".lstrip(".")
                    replaced.append((module, name, buffer, leaf))
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        for module, name, _, leaf in replaced:
            module._buffers[name] = leaf.clone()
        yield names
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for module, name, buffer, _ in replaced:
            module._buffers[name] = buffer


def _ancestors(output: Tensor, names: dict[int, str]) -> list[str]:
    """Names of the tensors that `output` depends on, by its autograd graph."""
    found, seen, stack = set(), set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(names.get(id(node.variable), "a tensor of shape " + str(tuple(node.variable.shape))))
        stack.extend(following for following, _ in node.next_functions)
    return sorted(found)


def probe_tokens(model: nn.Module) -> Tensor:
    """[BATCH, LENGTH] distinct token ids (where the vocabulary has so many), none of them the padding's."""
    config: Any = getattr(model, "config", None)
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    rows, padding = embeddings.weight.shape[0], getattr(config, "pad_token_id", None)
    device = "cpu" if embeddings.weight.is_meta else embeddings.weight.device  # accelerate's hooks move what they get
    ids = [i for i in range(5, rows) if i != padding] or [i for i in range(rows) if i != padding] or [0]
    tokens = [ids[i % len(ids)] for i in range(BATCH * LENGTH)]
    return torch.tensor(tokens, device=device).view(BATCH, LENGTH)


def probe_inputs(model: nn.Module) -> dict[str, Tensor]:
    """The probe's tokens, by the names that the model's forward has for text: an encoder-decoder takes them twice, and
    some vision-language models want to be told, when they train, that none of them is an image's."""
    tokens = probe_tokens(model)
    inputs, taken = {"input_ids": tokens}, inspect.signature(type(model).forward).parameters
    if "decoder_input_ids" in taken:
        inputs["decoder_input_ids"] = tokens
    if "mm_token_type_ids" in taken:
        inputs["mm_token_type_ids"] = torch.zeros_like(tokens)
    return inputs


def _points(vocab: int) -> Tensor:
    """[BATCH, LENGTH, vocab] float64, each of POINTS many times over, in a fixed random order."""
    generator = torch.Generator().manual_seed(0)
    count = BATCH * LENGTH * vocab
    values = torch.tensor(POINTS, dtype=torch.float64)
    drawn = values[torch.randint(len(values), (count,), generator=generator)]
    drawn[: len(values)] = values[:count]
    return drawn[torch.randperm(count, generator=generator)].view(BATCH, LENGTH, vocab)


def _observe(
    model: nn.Module, call: Callable[..., Any], points: Tensor, offset: str | None = None
) -> tuple[Tensor, float, list[str]]:
    """What the model makes of these logits, float64 on the CPU; the relative rounding of its own arithmetic; and what
    else the outcome depends on, but for the buffer `offset`, which is given numbers that are subtracted again."""

    def answer(hidden: Tensor) -> Tensor:
        if first_stream(hidden).shape[:-1] != points.shape[:-1]:
            raise UnsupportedError(f"the head got {tuple(hidden.shape)}, expected {(BATCH, LENGTH, hidden.shape[-1])}")
        # Never in bf16: a family's own arithmetic on the logits would be rounded, and the fit misled.
        dtype = torch.float32 if hidden.device.type == "mps" else torch.float64
        answered = points.to(hidden.device, dtype, copy=True)  # a family may write to its logits
        if hidden.ndim == 4:  # the other streams' are NaN, so that none is in the logits
            answered = answered.unsqueeze(1)
            others = torch.full_like(answered, math.nan).expand(-1, hidden.shape[1] - 1, -1, -1)
            answered = torch.cat([answered, others], 1)
        return answered

    drawn = torch.zeros((), dtype=torch.float64)
    with torch.enable_grad(), _tracked(model) as names:
        if offset is not None:
            path, _, name = offset.rpartition(".")
            buffers = model.get_submodule(path)._buffers
            drawn = (torch.arange(points.shape[-1], dtype=torch.float64) * 7919) % 31 - 15
            before = model.get_buffer(offset)
            buffers[name] = drawn.view_as(before).to(before)
        output, _, _ = capture(model, lambda: call(**probe_inputs(model)), answer)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise UnsupportedError(f"the output, a {type(output).__qualname__}, has no logits")
        if logits.shape != points.shape:
            raise UnsupportedError(f"the head gives {tuple(points.shape)}, the model {tuple(logits.shape)}: a slice")
        causes = _ancestors(logits, names) if logits.requires_grad else []
    return logits.detach().to("cpu", torch.float64) - drawn, 4 * torch.finfo(logits.dtype).eps, causes


def _offset(model: nn.Module, causes: list[str], vocab: int) -> str:
    """The buffer of a number for each vocab row, if that is all there is."""
    if len(causes) == 1 and causes[0] in {name for name, buffer in model.named_buffers() if buffer.numel() == vocab}:
        return causes[0]
    told = ", ".join(causes[:3]) + (f" and {len(causes) - 3} more" if len(causes) > 3 else "")
    raise UnsupportedError(f"what the model does to its logits depends on {told}")


def _snap(value: float, tolerance: float) -> float:
    """The shortest decimal that is as good as `value`: 0.3, not 0.30000001192."""
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 17))
    return next((short for short in candidates if abs(short - value) <= tolerance * abs(value)), value)


def _explains(transform: Transform, x: Tensor, y: Tensor) -> bool:
    z = transform.scale * x
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    return bool(((z - y).abs() <= RELATIVE * y.abs() + ABSOLUTE).all())


def _why_not(x: Tensor, y: Tensor) -> str:
    """Which of the block's axes the outcome depends on, beside the value itself."""
    for axis, name in ((2, "vocab row"), (1, "position"), (0, "batch row")):
        for value in POINTS:
            hit = x == value
            count = hit.sum(axis)
            low = torch.where(hit, y, math.inf).amin(axis)
            high = torch.where(hit, y, -math.inf).amax(axis)
            if ((high - low)[count > 1] > 1e-5 * high[count > 1].abs() + 1e-7).any():
                return f"what the model does to its logits depends on the {name}"
    return "what the model does to its logits is neither a scale nor a softcap (nor both)"


def _fit(x: Tensor, y: Tensor, rounding: float) -> Transform:
    """The transform that explains all of `y`, [BATCH, LENGTH, V] like `x`; its numbers are good to `rounding`."""
    if not torch.isfinite(y).all():
        raise UnsupportedError("the model makes some logits infinite or NaN: a mask over the vocabulary?")
    smallest = x.abs() == SMALLEST
    plain = Transform(_snap(float((y[smallest] / x[smallest]).median()), rounding))
    if plain.scale != 0 and _explains(plain, x, y):
        return plain
    cap = _snap(float(y.abs().max()), rounding)
    bend = ((y / cap).abs() > 0.1) & ((y / cap).abs() < 0.9)  # there the slope is best told from the cap
    if bend.any():
        slope = float((cap * torch.atanh(y[bend] / cap) / x[bend]).median())
        capped = Transform(_snap(slope, rounding), cap)
        if _explains(capped, x, y):
            return capped
    raise UnsupportedError(_why_not(x, y))


def _identify(model: nn.Module, call: Callable[..., Any], points: Tensor) -> Transform:
    """In the mode that the model is in."""
    observed, rounding, causes = _observe(model, call, points)
    if not causes:
        return _fit(points, observed, rounding)
    offset = _offset(model, causes, points.shape[-1])
    observed, rounding, causes = _observe(model, call, points, offset)
    if causes or _fit(points, observed, rounding) != Transform():
        raise UnsupportedError(f"what the model does to its logits depends on {offset}, and more than adds it")
    return Transform(offset=offset)


def identify(model: nn.Module, call: Callable[..., Any]) -> Transform:
    """What the model does between its head and its logits, by running it in eval and in train mode.

    Args:
        model: holds the head; to be run inside `undisturbed`.
        call: runs the model's own forward: `call(**probe_inputs(model))` gives an output with logits.

    Raises:
        UnsupportedError: it is not understood; the message says why.
    """
    points = _points(find_head(model).linear.out_features)
    found = []
    for training in (False, True):
        set_mode(model, training)
        check_linear(model, lambda: call(**probe_inputs(model)))
        found.append(_identify(model, call, points))
    if found[0] != found[1]:
        raise UnsupportedError(
            f"the model treats its logits differently in eval, {found[0]}, and train mode, {found[1]}"
        )
    return found[0]
