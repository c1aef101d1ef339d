"""What a model does to its logits, found by trying it, and a check of its scores against its own logits.

The product in the output layer is replaced by chosen values, each of its own draw, for one forward of the model; one of
`z -> s·z` and `z -> c·tanh(s·z/c)` must explain all that comes out, whatever the configuration calls it. Then eight
tokens are scored both ways. What is not understood is refused.

Shape suffixes: S tokens of the one row, V vocab rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor, nn

from logitless.errors import UnsupportedError
from logitless_mcore.arrangement import Ranks
from logitless_mcore.capture import forward_as, language_model, run_scored
from logitless_mcore.head import Asked, Scored, Transform, score, vocab_size_of, why_not
from logitless_mcore.prediction import LOSS, Ahead, depth_of, without_prediction

__all__ = ["examined", "forget"]

TOKENS = 8
SMALLEST, LARGEST = 2.0**-12, 2.0**24  # the one tells the slope, the other a cap
POINTS = [
    *(sign * point for point in (SMALLEST, LARGEST) for sign in (1, -1)),
    *sorted((3.0 * i for i in range(-20, 21)), key=abs),
    *(sign * 2.0**exponent for exponent in range(-11, 24) for sign in (1, -1)),
]
RELATIVE, ABSOLUTE = 5e-6, 1e-9  # a few roundings of float32

_known: WeakKeyDictionary[nn.Module, Transform] = WeakKeyDictionary()


def examined(model: Any, backend: str | None = None) -> Transform:
    """What the model's last stage does to its logits; examined at the first call, on every rank of its groups at once.

    Raises:
        UnsupportedError: it is not understood, or its scores differ from its own logits.
    """
    inner = language_model(model)
    if inner not in _known:
        with _undisturbed(inner):
            _known[inner] = _examine(inner, backend)
    return _known[inner]


def forget(model: Any) -> None:
    """Examine the model again at its next call: for a head or a configuration that was changed."""
    _known.pop(language_model(model), None)


def _examine(inner: Any, backend: str | None) -> Transform:
    name = type(inner).__qualname__
    reason = why_not(inner.output_layer)
    if reason is not None:
        raise UnsupportedError(f"{name}: {reason}")
    if depth_of(inner) and getattr(inner, "mtp", None) is None:
        raise UnsupportedError(
            f"{name}: its multi-token prediction layers are on another pipeline stage than its head, expected the same"
        )
    if any(parameter.is_meta for parameter in inner.parameters()):
        raise UnsupportedError(f"{name}: its parameters are on the meta device; load its weights before it is scored")
    inputs = _probe(inner)
    with without_prediction(inner):
        transform = _identify(inner, inputs)
        _self_check(inner, inputs, transform, backend)
    if depth_of(inner):
        _check_ahead(inner, inputs, transform, backend)
    return transform


# --- running it by itself --------------------------------------------------------------------------------------------


@contextmanager
def _undisturbed(inner: Any) -> Iterator[None]:
    """Whatever runs within leaves modes, random states and a pipeline stage's input as they were."""
    modes = [(module, module.training) for module in inner.modules()]
    stage_input = inner.decoder.input_tensor
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=gpus))
            stack.enter_context(torch.no_grad())
            for module in inner.modules():
                module.training = False
            yield
    finally:
        inner.decoder.input_tensor = stage_input
        for module, mode in modes:
            module.training = mode


def _device(inner: Any) -> torch.device:
    found: torch.device = next(inner.parameters()).device
    return found


def _probe(inner: Any) -> dict[str, Any]:
    """A call on one row of tokens; a later pipeline stage is also given hidden states to start from."""
    ranks, device = Ranks.of(inner), _device(inner)
    count = -(-TOKENS // (2 * ranks.tp)) * 2 * ranks.tp
    if not inner.pre_process:
        generator = torch.Generator().manual_seed(0)
        rows = count // ranks.tp if inner.config.sequence_parallel else count
        hidden = torch.randn(rows, 1, inner.config.hidden_size, generator=generator)
        inner.set_input_tensor(hidden.to(device, inner.config.pipeline_dtype or inner.config.params_dtype))
    rows = vocab_size_of(inner) or inner.vocab_size
    positions = torch.arange(count, device=device)
    tokens = (5 + 7919 * positions) % rows
    axes = getattr(inner, "position_embedding_type", None) == "mrope"  # [3, 1, S]
    position_ids = positions.expand(3, 1, -1) if axes else positions[None]
    inputs = {"input_ids": tokens[None], "position_ids": position_ids, "attention_mask": None}
    embedding = getattr(inner, "embedding", None)
    if inner.config.sequence_parallel and not getattr(embedding, "scatter_to_sequence_parallel", True):
        # Its wrapper's task, once images are in place. By itself, Megatron-Core does it since 0.18.
        whole = inner.embedding(input_ids=tokens[None], position_ids=positions[None])
        inputs["decoder_input"] = scatter_to_sequence_parallel_region(whole, group=inner.pg_collection.tp)
    return inputs


# --- what it does to its logits --------------------------------------------------------------------------------------


def _identify(inner: Any, inputs: dict[str, Any]) -> Transform:
    output_layer = inner.output_layer
    seen: list[Tensor] = []

    def points(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = input.shape[0] * (output_layer.tp_group.size() if output_layer.sequence_parallel else 1)
        generator = torch.Generator().manual_seed(len(seen))
        count = rows * input.shape[1] * weight.shape[0]
        values = torch.tensor(POINTS, dtype=torch.float64)
        drawn = values[torch.randint(len(values), (count,), generator=generator)]
        drawn[: len(values)] = values[:count]
        block = drawn[torch.randperm(count, generator=generator)].view(rows, input.shape[1], weight.shape[0])
        seen.append(block)
        return block.to(input.device)

    with forward_as(output_layer, points, "_forward_impl"):
        out = inner(**inputs)
    if len(seen) != 1:
        raise UnsupportedError(f"{type(output_layer).__qualname__}: multiplies {len(seen)} times, expected once")
    x = seen[0].transpose(0, 1)  # [1, S, V] of this rank
    if not isinstance(out, Tensor):
        raise UnsupportedError(f"{type(inner).__qualname__}: returned a {type(out).__qualname__}, expected logits")
    if out.shape[-1] == x.shape[-1] * output_layer.tp_group.size():  # gathered; every rank drew the same
        out = out[..., : x.shape[-1]]
    if out.shape != x.shape:
        raise UnsupportedError(f"its output layer gives {tuple(x.shape)}, the model {tuple(out.shape)}")
    return _fit(x, out.to("cpu", torch.float64), 4 * torch.finfo(out.dtype).eps)


def _fit(x: Tensor, y: Tensor, rounding: float) -> Transform:
    """The transform that explains all of `y`, shaped as `x`; its numbers are good to `rounding`."""
    if not torch.isfinite(y).all():
        raise UnsupportedError("the model makes some logits infinite or NaN: a mask over the vocabulary?")
    smallest = x.abs() == SMALLEST
    plain = Transform(_snap(float((y[smallest] / x[smallest]).median()), rounding))
    if plain.scale != 0 and _explains(plain, x, y, rounding):
        return plain
    cap = _snap(float(y.abs().max()), rounding)
    bend = ((y / cap).abs() > 0.1) & ((y / cap).abs() < 0.9)  # there the slope is best told from the cap
    if bend.any():
        slope = float((cap * torch.atanh(y[bend] / cap) / x[bend]).median())
        capped = Transform(_snap(slope, rounding), cap)
        if _explains(capped, x, y, rounding):
            return capped
    raise UnsupportedError(
        "what the model does to its logits is neither a scale nor a softcap (nor both), the same for every row"
    )


def _snap(value: float, tolerance: float) -> float:
    """The shortest decimal that is as good as `value`: 0.3, not 0.30000001192."""
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 17))
    return next((short for short in candidates if abs(short - value) <= tolerance * abs(value)), value)


def _explains(transform: Transform, x: Tensor, y: Tensor, rounding: float) -> bool:
    z = transform.scale * x
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    return bool(((z - y).abs() <= max(RELATIVE, rounding) * y.abs() + ABSOLUTE).all())


# --- scores against its own logits -----------------------------------------------------------------------------------


def _whole(logits: Tensor, output_layer: Any) -> Tensor:
    """[1, S, V of every rank]."""
    group, rows = output_layer.tp_group, output_layer.output_size_per_partition
    if group.size() == 1 or logits.shape[-1] != rows:
        return logits
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _self_check(inner: Any, inputs: dict[str, Any], transform: Transform, backend: str | None) -> None:
    output_layer, temperature = inner.output_layer, 0.7
    logits = _whole(inner(**inputs), output_layer)
    vocab = vocab_size_of(inner) or logits.shape[-1]
    labels = (torch.arange(logits.shape[1], device=logits.device)[None] * 7919) % vocab
    asked = Asked(labels.t(), temperature, backend=backend)

    def scored(hidden: Tensor, layer: Any, weight: Tensor | None) -> Scored:
        return score(hidden, layer, weight, transform, vocab_size_of(inner), asked)

    found: Scored = run_scored(inner, inputs, scored)
    wide = logits[..., :vocab].to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_p = wide.log_softmax(-1)
    expected = log_p.gather(-1, labels[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    assert found.entropy is not None
    worst = max(float((a - b.t()).abs().max()) for a, b in zip(expected, (found.log_probs, found.entropy), strict=True))
    tolerance = 1e-3 + 2 * _rounding(inner, logits) * float(wide.abs().max())
    if not worst <= tolerance:
        raise UnsupportedError(
            f"{type(inner).__qualname__}: scores differ from the model's own logits by {worst:.3g} nats, more than "
            f"{tolerance:.3g}: something stands between its output layer and its logits that the probe does not see"
        )


def _check_ahead(inner: Any, inputs: dict[str, Any], transform: Transform, backend: str | None) -> None:
    """The further heads' losses, as `_self_check` compares the model's own scores: over all rows, padding included."""
    ids, own = inputs["input_ids"], getattr(inner, LOSS)
    inputs = {**inputs, "labels": ids, "loss_mask": torch.ones_like(ids, dtype=torch.float32)}
    expected: list[Tensor] = []
    largest = 0.0

    def watched(labels: Tensor, logits: Tensor) -> Any:
        nonlocal largest
        largest = max(largest, float(logits.abs().max()))
        expected.append(own(labels, logits))
        return expected[-1]

    with forward_as(inner, watched, LOSS):
        inner(**inputs)
    ahead = Ahead(inner, transform, None, backend)
    asked = Asked(ids.t(), entropy=False, backend=backend)

    def scored(hidden: Tensor, layer: Any, weight: Tensor | None) -> Scored:
        return score(hidden, layer, weight, transform, None, asked)

    run_scored(inner, inputs, scored, ahead=ahead)
    worst = max(float((a - b).abs().max()) for a, b in zip(expected, ahead.losses, strict=False))
    tolerance = 1e-3 + 2 * _rounding(inner, expected[0]) * largest
    if not worst <= tolerance:
        raise UnsupportedError(
            f"{type(inner).__qualname__}: the losses of its multi-token prediction heads differ from those of their "
            f"logits by {worst:.3g} nats, more than {tolerance:.3g}"
        )


def _rounding(inner: Any, logits: Tensor) -> float:
    found = max(torch.finfo(logits.dtype).eps, torch.finfo(next(inner.parameters()).dtype).eps)
    return found if logits.device.type == "cpu" else max(found, 2**-10)  # the model's own product may be in TF32
