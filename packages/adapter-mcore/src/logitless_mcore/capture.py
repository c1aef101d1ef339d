"""The last hidden states of a Megatron model, without a patch that outlives the call.

Where a model's forward takes an `output_processor` (GPTModel since Megatron-Core 0.18), it gets one, through a hook on
the language model itself, so that wrappers around it need not pass it on. Elsewhere (older GPTModel, HybridModel) the
output layer's `forward` is replaced on that one instance for the call: no module changes place, so state dicts and
sharded checkpoints are what they were, even meanwhile. Either way the output layer is called through `__call__`, so
that its hooks fire: those of distributed optimizers gather its weight.

Shape suffixes: s tokens (of this sequence-parallel rank), b rows, D hidden size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from logitless.errors import UnsupportedError

if TYPE_CHECKING:
    from logitless_mcore.prediction import Ahead

__all__ = ["forward_as", "is_last_stage", "language_model", "run_scored", "unwrapped"]

Score = Callable[[Tensor, Any, Tensor | None], Any]
"""Hidden states [s, b, D], the output layer, and the weight that it is given if that is not its own, to anything."""


def unwrapped(model: Any) -> Any:
    """The model inside of DDP, Float16Module and their like."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    return model


def language_model(model: Any) -> Any:
    """The module that holds the output layer: a wrapper's `language_model`, or the unwrapped model."""
    inner = unwrapped(model)
    return unwrapped(getattr(inner, "language_model", inner))


def is_last_stage(model: Any) -> bool:
    """Whether this pipeline stage has the output layer."""
    return bool(getattr(unwrapped(model), "post_process", getattr(language_model(model), "post_process", True)))


@functools.cache
def _takes_processor(cls: Hashable) -> bool:
    return "output_processor" in inspect.signature(cls.forward).parameters  # type: ignore[attr-defined]


@contextmanager
def forward_as(module: Any, function: Any, name: str = "forward") -> Iterator[None]:
    """Within the block, the module has `function` in place of its method, or attribute, of that name."""
    before = module.__dict__.get(name)
    module.__dict__[name] = function
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


def run_scored(
    model: Any,
    inputs: Mapping[str, Any],
    score: Score,
    call: Callable[..., Any] | None = None,
    *,
    ahead: Ahead | None = None,
) -> Any:
    """Run a model's last stage, or `call` of it, with `score` where it would make logits; what `score` returned.

    Further heads of multi-token prediction are scored by `ahead`, and do not run without it.

    Raises:
        UnsupportedError: the model calls its output layer never, or more than once.
    """
    from logitless_mcore.prediction import without_prediction

    inner = language_model(model)
    cls: Any = type(inner)
    found: list[Any] = []

    def fused(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        if ahead is not None and ahead.awaited:
            return ahead.take(hidden, inner.output_layer, weight), None
        if found:
            raise UnsupportedError(f"{type(inner).__qualname__}: calls its output layer more than once in a forward")
        found.append(score(hidden, inner.output_layer, weight))
        return hidden.new_zeros(*hidden.shape[:-1], 0), None  # "logits" of no columns

    def processor(*, hidden_states: Tensor, output_weight: Tensor | None, **_: Any) -> Any:
        return inner.output_layer(hidden_states, weight=output_weight)[0]

    def asks(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "output_processor": processor}

    with ExitStack() as stack:
        stack.enter_context(without_prediction(inner) if ahead is None else ahead.scored())
        stack.enter_context(forward_as(inner.output_layer, fused))
        if _takes_processor(cls):
            stack.callback(inner.register_forward_pre_hook(asks, with_kwargs=True).remove)
        (call or model)(**inputs)
    if not found:
        raise UnsupportedError(f"{type(inner).__qualname__}: its forward never calls its output layer")
    return found[0]
