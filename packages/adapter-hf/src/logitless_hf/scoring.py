"""A scoring call, from its keywords to its output; and the examination of a model before the first one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from logitless import LMHead, linear_log_probs, linear_policy_loss
from logitless.errors import InvalidInputError, LogitlessError, UnsupportedError
from logitless_hf.capture import OTHERWISE, call_head, capture, emptied
from logitless_hf.head import find_head, has_weights
from logitless_hf.labels import IGNORE_INDEX, next_token_labels
from logitless_hf.outputs import CausalLMOutputForPPO, scored_output
from logitless_hf.probe import Transform, identify, probe_inputs, probe_tokens, set_mode, undisturbed
from logitless_hf.sharding import HeadRows, Results
from logitless_hf.values import is_value_model, valued_output

__all__ = ["HeadReport", "Options", "Uncast", "examine", "scored_forward", "valued_forward"]


class Uncast:
    """A temperature that no mixed precision of FSDP2 finds, and casts, among a call's keywords."""

    def __init__(self, temperature: Tensor | float) -> None:
        self.temperature = temperature


@dataclass(frozen=True, slots=True)
class Options:
    """The keywords of a scoring call that are not the family's."""

    temperature: Tensor | float | Uncast = 1.0
    entropy: bool = True
    entropy_grad: bool = True
    labels: Tensor | None = None
    shift_labels: Tensor | None = None
    loss_fn: Callable[..., Any] | None = None
    keep_bytes: int = 0
    top_k: int | None = None
    top_p: float | None = None
    stats: Sequence[str] = ()


OPTIONS = tuple(field.name for field in fields(Options))  # here, since dynamo does not trace `fields`
OF_SCORES = ("loss_fn", "top_k", "top_p", "stats")  # what a value model has not


@dataclass(frozen=True, slots=True)
class HeadReport:
    """What stands between a model's hidden states and its logits: `logits = c·tanh(s·(h·Wᵀ + b)/c)`.

    Attributes:
        model: the model's class.
        vocab_size, hidden_size, dtype: of the head's weight; None if there is no such head.
        bias: whether the head has one.
        own_forward: whether the head's module has a forward of its own, in which more than `weight` may be.
        offset: the name of the buffer of V numbers that the model adds to its logits; None if it adds none.
        scale, softcap: s and c.
        adapters: the LoRA adapters on the head that were active.
        reason: None if the head is understood, else why not.
        values: whether this is a value model, which has a number for each token in place of logits.
    """

    model: str
    vocab_size: int | None = None
    hidden_size: int | None = None
    dtype: torch.dtype | None = None
    bias: bool = False
    scale: float = 1.0
    softcap: float | None = None
    adapters: tuple[str, ...] = ()
    reason: str | None = None
    values: bool = False
    own_forward: bool = False
    offset: str | None = None

    @property
    def transform(self) -> Transform:
        return Transform(self.scale, self.softcap, self.offset)

    @classmethod
    def of(cls, model: nn.Module, transform: Transform) -> HeadReport:
        head = find_head(model)
        rows, size = head.linear.weight.shape
        return cls(
            type(model).__qualname__,
            vocab_size=rows,
            hidden_size=size,
            dtype=head.linear.weight.dtype,
            bias=head.linear.bias is not None,
            scale=transform.scale,
            softcap=transform.softcap,
            adapters=head.adapters,
            own_forward=head.own,
            offset=transform.offset,
        )

    @classmethod
    def refused(cls, model: nn.Module, reason: str) -> HeadReport:
        return cls(type(model).__qualname__, reason=reason)


@cache
def _parameters(forward: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
    """Names of a forward's parameters after `self`, and whether it takes any other keyword."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    named = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _family_call(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name."""
    names, _ = _parameters(forward)
    if len(args) > len(names):
        raise InvalidInputError(f"got {len(args)} positional arguments, expected at most {len(names)}")
    call = dict(zip(names[: len(args)], args, strict=True))
    twice = call.keys() & kwargs.keys()
    if twice:
        raise InvalidInputError(f"{', '.join(sorted(twice))}: given both by position and by name")
    return {**call, **kwargs}


def _prepare(model: nn.Module, forward: Callable[..., Any], call: dict[str, Any]) -> None:
    """Set the call to return an output object and, unless it says otherwise, to fill no cache."""
    names, open_ended = _parameters(forward)
    returns_dict = call.pop("return_dict", None)
    if returns_dict is None:
        returns_dict = getattr(getattr(model, "config", None), "return_dict", True)
    if not returns_dict:
        raise InvalidInputError("return_dict: got False, expected True; scores come as an output object, not a tuple")
    for name in ("logits_to_keep", "num_logits_to_keep"):
        keep = call.get(name)
        if keep is not None and (isinstance(keep, Tensor) or keep != 0):
            raise InvalidInputError(f"{name}: scores are made for every position; leave it out, and ignore by labels")
    for name, value in (("return_dict", True), ("use_cache", call.get("use_cache") or False)):
        if open_ended or name in names:
            call[name] = value


def _targets(options: Options, call: Mapping[str, Any], encoder_decoder: bool) -> Tensor:
    """The token that each position scores."""
    if options.shift_labels is not None:
        return options.shift_labels
    if encoder_decoder:
        tokens = call.get("decoder_input_ids")
        if tokens is None or options.labels is not None:
            raise InvalidInputError(
                "decoder_input_ids: expected for an encoder-decoder, without labels; the token after each of them is "
                "scored, or what shift_labels say"
            )
        names = ("attention_mask", "position_ids")
        return next_token_labels(tokens, {name: call.get(f"decoder_{name}") for name in names})
    tokens = options.labels if options.labels is not None else call.get("input_ids")
    if tokens is None:
        raise InvalidInputError("labels: got none, and no input_ids to take them from; pass labels or shift_labels")
    return next_token_labels(tokens, call)


def _temperature(given: Tensor | float | Uncast) -> Tensor | float:
    """As it was given; in 16 bits it is refused, since 0.7 would be 0.69921875."""
    if isinstance(given, Uncast):
        return given.temperature
    if isinstance(given, Tensor) and given.dtype in (torch.float16, torch.bfloat16):
        raise InvalidInputError(
            f"temperature: got {given.dtype}, expected float32, or a number. FSDP2's mixed precision casts the tensors "
            "that a model is called with: pass a number there, or set cast_forward_inputs=False"
        )
    return given


def _stand_in_call(model: nn.Module, call: Mapping[str, Any]) -> dict[str, Any]:
    """A call for one token in place of none: families reshape by what is there, and every rank must run its trunk."""
    rest = {name: value for name, value in call.items() if not isinstance(value, Tensor)}
    return {**rest, **{name: value[:1, :1] for name, value in probe_inputs(model).items()}}


@contextmanager
def _otherwise_told() -> Iterator[None]:
    """What a model whose head is not understood can be scored with is said at `bind` and, once, at a call after it."""
    try:
        yield
    except UnsupportedError as error:
        if str(error).endswith(OTHERWISE):
            raise
        raise UnsupportedError(f"{error}; {OTHERWISE}") from error


@contextmanager
def _foreign_ids_told(model: nn.Module, call: Mapping[str, Any]) -> Iterator[None]:
    """Name the id that the embedding stumbles over; not beforehand, since to look at ids on a GPU is to wait for it."""
    try:
        yield
    except IndexError as error:
        rows = getattr(model.get_input_embeddings(), "num_embeddings", 0)  # type: ignore[operator]
        for name in ("input_ids", "decoder_input_ids"):
            ids = call.get(name)
            if not rows or not isinstance(ids, Tensor) or isinstance(ids, DTensor):
                continue
            outside = (ids < 0) | (ids >= rows)
            if outside.any():
                place = tuple(outside.nonzero()[0].tolist())
                raise InvalidInputError(
                    f"{name}: got {int(ids[place])} at {place}, expected 0 to {rows - 1}, the rows of the model's "
                    "embedding; check the tokenizer against the model's vocab_size, and pad with an id of it"
                ) from error
        raise


def valued_forward(
    model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> CausalLMOutputForPPO:
    """Run a value model's `forward(model, ...)`; the output has `values`, and no scores.

    Raises:
        InvalidInputError: the call asks for what only scores have.
    """
    call = _family_call(forward, args, kwargs)
    options = Options(**{name: call.pop(name) for name in OPTIONS if name in call})
    for name in OF_SCORES:
        if getattr(options, name):
            raise InvalidInputError(f"{name}: got some, expected none; a value model has no distribution, use .values")
    _prepare(model, forward, call)
    tokens = call.get("input_ids")
    if not isinstance(tokens, Tensor):
        raise InvalidInputError(f"input_ids: got {type(tokens).__qualname__}, expected a tensor")
    if tokens.numel():
        with _foreign_ids_told(model, call):
            output = forward(model, **call)
        return valued_output(model, output, tokens.shape)
    values: Tensor = valued_output(model, forward(model, **_stand_in_call(model, call)), (1, 1))["values"]
    return CausalLMOutputForPPO(values=values.flatten()[:0].view(tokens.shape))


def _bias(model: nn.Module, offset: str | None, rows: HeadRows) -> Tensor | None:
    """That of the head and the buffer `offset`, of this rank's vocab rows."""
    if offset is None:
        return rows.bias
    start = rows.vocab_start or 0
    added = model.get_buffer(offset).flatten()[start : start + rows.weight.shape[0]]
    return added if rows.bias is None else rows.bias + added


def scored_forward(
    model: nn.Module,
    forward: Callable[..., Any],
    report: HeadReport,
    backend: str | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> CausalLMOutputForPPO:
    """Run the family's `forward(model, ...)` with its head captured, and score its hidden states as the report says.

    Raises:
        InvalidInputError: the call cannot be scored; the message names the argument. An id outside of the vocabulary
            is named on a CPU alone: on a GPU it is an assertion of the device.
        UnsupportedError: the head is not what it was at `bind`.
    """
    transform = report.transform
    call = _family_call(forward, args, kwargs)
    options = Options(**{name: call.pop(name) for name in OPTIONS if name in call})
    temperature = _temperature(options.temperature)
    _prepare(model, forward, call)
    targets = _targets(options, call, "decoder_input_ids" in _parameters(forward)[0])
    empty = targets.numel() == 0
    if empty:
        call = _stand_in_call(model, call)
    with _otherwise_told(), emptied(model, transform.offset), _foreign_ids_told(model, call):
        output, hidden, head = capture(model, lambda: forward(model, **call))
        if head.own and not report.own_forward:  # whether that is linear was tried out at `bind` alone
            raise UnsupportedError(
                f"the head, a {type(head.linear).__qualname__} with a forward of its own, was put there after bind; "
                "bind the model again"
            )
    tokens = targets.shape[: hidden.ndim - 1]
    if empty:  # what the family returned is of the stand-in token
        output, hidden = CausalLMOutputForPPO(), hidden.flatten(0, -2)[:0].view(*tokens, hidden.shape[-1])
    if tokens != hidden.shape[:-1] or targets.ndim > hidden.ndim:
        name = "labels" if options.shift_labels is None else "shift_labels"
        raise InvalidInputError(
            f"{name}: got shape {tuple(targets.shape)}, expected {tuple(hidden.shape[:-1])}, one for each position, or "
            "K more of each in a last dimension"
        )
    if options.stats and options.loss_fn is not None:
        raise InvalidInputError("stats: got some with a loss_fn, expected none: its single pass makes no statistics")

    def op(hidden: Tensor, rows: HeadRows, lora: tuple[tuple[Tensor, Tensor], ...]) -> Results:
        bias = _bias(model, transform.offset, rows)
        sizes = rows.vocab_size, rows.vocab_start
        head = LMHead(rows.weight, bias, transform.scale, transform.softcap, *sizes, lora)
        asked: dict[str, Any] = {
            "hidden": hidden,
            "head": head,
            "tp_group": rows.tp_group,
            "labels": targets.to(hidden.device),
            "temperature": temperature,
            "entropy": options.entropy,
            "entropy_grad": options.entropy_grad,
            "ignore_index": IGNORE_INDEX,
            "backend": backend,
            "top_k": options.top_k,
            "top_p": options.top_p,
        }
        if options.loss_fn is None:
            scores = linear_log_probs(**asked, keep_bytes=options.keep_bytes, stats=options.stats)
            found = scores.stats or {}
            # Cloned, since they are views: FSDP2 hangs its backward on what a module returns, and warns of views.
            entropy = None if scores.entropy is None else scores.entropy.clone()
            return scores.log_probs.clone(), entropy, None, *(found[name] for name in options.stats)
        loss, scores = linear_policy_loss(**asked, loss_fn=options.loss_fn)
        return scores.log_probs, scores.entropy, loss

    log_probs, entropy, loss, *further = call_head(head, hidden, op)
    stats = dict(zip(options.stats, further, strict=True)) or None
    return scored_output(output, log_probs, entropy, loss, stats=stats)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def examine(model: nn.Module, plain: Callable[..., Any], scored: Callable[..., CausalLMOutputForPPO]) -> HeadReport:
    """Identify what the model does to its logits, and check scores against its own logits.

    Args:
        model: its parameters have values.
        plain: runs the family's forward.
        scored: `scored(report, **call)` runs a scoring call of a model that is as the report says.
    """
    if not has_weights(model):
        raise UnsupportedError("the model's parameters are on the meta device; load its weights before it is called")
    plain = partial(plain, return_dict=True, use_cache=False)
    try:
        with _otherwise_told(), undisturbed(model):
            if is_value_model(model):
                valued_output(model, plain(input_ids=probe_tokens(model)), probe_tokens(model).shape)
                return HeadReport(type(model).__qualname__, values=True)
            find_head(model)
            # First, with the head in its slot: FSDP2 settles at a model's first call which modules it holds together.
            logits = _own_logits(model, plain)
            report = HeadReport.of(model, identify(model, plain))
            _self_check(model, report, logits, partial(scored, report))
    except (LogitlessError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            f"{type(model).__qualname__} does not run on text alone, so what it does to its logits cannot be tried "
            f"out: {type(error).__name__}: {error}; {OTHERWISE}"
        ) from error
    return report


@torch.no_grad()
def _own_logits(model: nn.Module, plain: Callable[..., Any]) -> Tensor:
    """What the model makes of the probe's tokens, in eval mode; [batch, position, vocabulary]."""
    set_mode(model, training=False)
    output = plain(**probe_inputs(model))
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or isinstance(logits, DTensor):
        got = f"{type(logits).__qualname__} as" if logits is not None else "no"
        raise UnsupportedError(f"the output, a {type(output).__qualname__}, has {got} logits, expected a plain tensor")
    return logits


@torch.no_grad()
def _self_check(
    model: nn.Module, report: HeadReport, logits: Tensor, scored: Callable[..., CausalLMOutputForPPO]
) -> None:
    """Scores of eight tokens against the model's own logits, in eval mode."""
    set_mode(model, training=False)
    if logits.shape[-1] != report.vocab_size:
        raise UnsupportedError(
            f"the model gives {logits.shape[-1]} of {report.vocab_size} logits: a tensor-parallel plan that leaves "
            "them sharded? Gather the head's output (transformers: colwise_gather_output)"
        )
    temperature, shape = 0.7, logits.shape[:-1]
    labels = (torch.arange(shape.numel(), device=logits.device).view(shape) * 7919) % logits.shape[-1]
    scores = scored(**probe_inputs(model), shift_labels=labels, temperature=temperature)
    if scores.log_probs is None or scores.entropy is None:
        raise UnsupportedError("the model's forward does not pass the scores on")
    log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    log_probs, entropy = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    weight = find_head(model).linear.weight
    rounding = max(torch.finfo(logits.dtype).eps, torch.finfo(weight.dtype).eps)
    if weight.device.type != "cpu":
        rounding = max(rounding, 2**-10)  # the model's own product may be in TF32
    tolerance = 1e-3 + 2 * rounding * float(logits.abs().max()) / temperature
    worst = max(float((a - b).abs().max()) for a, b in ((log_probs, scores.log_probs), (entropy, scores.entropy)))
    if not worst <= tolerance:
        raise UnsupportedError(
            f"scores differ from the model's own logits by {worst:.3g} nats, more than {tolerance:.3g}: something "
            "stands between its head and its logits that the probe does not see"
        )
