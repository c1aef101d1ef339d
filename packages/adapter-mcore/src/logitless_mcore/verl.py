"""verl's Megatron actors, with log-probabilities and entropies computed here.

With `use_fused_kernels=True` verl packs a batch, runs the model with `fused_output_processor` where it would make
logits (before Megatron-Core 0.18: with a forward of its own), and unpacks what comes out. `register` replaces the two,
so the packing stays verl's. The kernel alone is not to be replaced: under sequence parallelism the hidden states come
through a gather whose backward sums over the ranks, so d_hidden has to stay this rank's part.

verl calls nothing in its plugins, it only loads them: `verl_plugin` is what its entry point names. Its module imports
Megatron, and many processes that import verl never do; so ours are put in place when verl imports it.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from logitless.errors import UnsupportedError

__all__ = ["register", "state", "unregister"]

MADE_FOR = "verl 0.9.1"
MODULE = "verl.models.mcore.model_forward_fused"
PATCH, PROCESSOR, FORWARD, ENGINE = (
    "patch_fused_forward",
    "fused_output_processor",
    "_fused_GPTModel_forward",
    "fused_forward_model_engine",
)
PARAMETERS = {
    PATCH: {"model"},
    PROCESSOR: {"hidden_states", "output_layer", "output_weight", "labels", "context"},
    FORWARD: {"model", "labels", "temperature", "loss_mask"},
}
ORIGINALS = "_logitless_originals"  # on verl's module: what was replaced
REASON = "_logitless_reason"  # on verl's module: why it was not

logger = logging.getLogger(__name__)
_models: WeakKeyDictionary[nn.Module, Callable[[], Any]] = WeakKeyDictionary()  # of output layers, weakly


# --- where verl looks ------------------------------------------------------------------------------------------------


def _names(code: CodeType) -> Iterator[str]:
    """The globals and attributes that a function names, and those of the functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _moved(module: Any) -> str | None:
    """None if the seam is where it was in the verl that this was written for, else what is not."""
    for name, expected in PARAMETERS.items():
        function = getattr(module, name, None)
        if function is None:
            return f"{MODULE} has no {name}"
        missing = expected - set(inspect.signature(function).parameters)
        if missing:
            return f"{name} takes no {', '.join(sorted(missing))}"
    for caller, name in ((ENGINE, PROCESSOR), (PATCH, FORWARD)):
        if name not in _names(getattr(module, caller).__code__ if hasattr(module, caller) else (lambda: None).__code__):
            return f"{caller} does not use {name}"
    return None


def _replace(module: Any, functions: dict[str, Callable[..., Any]]) -> None:
    setattr(module, ORIGINALS, {name: getattr(module, name) for name in functions})
    for name, function in functions.items():
        setattr(module, name, function)


def _restore(module: Any) -> None:
    for name, function in module.__dict__.pop(ORIGINALS, {}).items():
        setattr(module, name, function)
    module.__dict__.pop(REASON, None)


def _refuse(module: Any, reason: str) -> None:
    """Have `use_fused_kernels=True` raise for this reason; verl would go on with its own kernel, and tell nobody."""

    def patch_fused_forward(model: nn.Module) -> None:
        raise UnsupportedError(f"use_fused_kernels: {reason}; VERL_USE_EXTERNAL_PLUGINS=none has verl's own kernel")

    logger.error("logitless-mcore does not score verl's Megatron models: %s", reason)
    setattr(module, REASON, reason)
    if hasattr(module, PATCH):
        _replace(module, {PATCH: patch_fused_forward})


def _install(module: Any) -> None:
    _restore(module)
    moved = _moved(module)
    if moved is not None:
        found = importlib.metadata.version("verl")
        _refuse(module, f"verl {found}: {moved}; logitless-mcore was written for {MADE_FOR}, install that")
        return
    _replace(module, {PATCH: _patch(module), PROCESSOR: _processor(module), FORWARD: _forward(module)})


class _OnImport(MetaPathFinder):
    """Puts ours in place right after verl's module has run; what goes wrong is told, and refused, not raised there."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == MODULE else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                _install(module)

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010  # one loader's, not its class's
        return spec


def register() -> None:
    """Have `use_fused_kernels=True` of verl's Megatron engine score here; doing it again changes nothing.

    A verl whose seam has moved is told of in the log, as an error, and its `use_fused_kernels=True` then raises.
    """
    if not any(isinstance(finder, _OnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OnImport())
    module = sys.modules.get(MODULE)
    if module is not None:
        _install(module)


def unregister() -> None:
    """Give verl its own functions back. Models that it has patched since keep ours, on Megatron-Core before 0.18."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _OnImport)]
    module = sys.modules.get(MODULE)
    if module is not None:
        _restore(module)


def state() -> str:
    """ "registered", "waiting" (verl has not imported Megatron yet), "not registered", or "refused: " and why."""
    module = sys.modules.get(MODULE)
    if hasattr(module, REASON):
        return f"refused: {getattr(module, REASON)}"
    if hasattr(module, ORIGINALS):
        return "registered"
    return "waiting" if any(isinstance(finder, _OnImport) for finder in sys.meta_path) else "not registered"


# --- what stands there -----------------------------------------------------------------------------------------------


def _patch(module: Any) -> Callable[[nn.Module], None]:
    original: Callable[[nn.Module], None] = getattr(module, PATCH)

    def patch_fused_forward(model: nn.Module) -> None:
        """Examine the model, on every rank of its groups at once, and let verl choose its way to the hidden states."""
        from logitless_mcore.examine import examined

        inner = module._get_patching_model(model)
        if inner is None:
            raise UnsupportedError(f"use_fused_kernels: {type(model).__qualname__} holds no GPTModel")
        if inner.post_process:
            examined(inner)
            _models[inner.output_layer] = ref(inner)
            print(f"logitless-mcore {importlib.metadata.version('logitless-mcore')} scores {type(inner).__qualname__}")
        original(model)

    return patch_fused_forward


def _scorer(inner: Any, labels: Tensor, temperature: float) -> Callable[[Tensor, Any, Tensor | None], Any]:
    """Scores hidden states [s, b, D] for labels [b, s]."""
    from logitless_mcore.examine import examined
    from logitless_mcore.head import Asked, Scored, score, vocab_size_of

    transform, vocab_size, asked = examined(inner), vocab_size_of(inner), Asked(labels.t(), temperature)

    def scored(hidden: Tensor, output_layer: Any, weight: Tensor | None) -> Scored:
        return score(hidden, output_layer, weight, transform, vocab_size, asked)

    return scored


def _output(module: Any, hidden: Tensor | None, scored: Any) -> Any:
    """verl's output; scores [b·s], as its kernel gives them."""
    output = module.CausalLMOutputForPPO(
        loss=None, logits=None, past_key_values=None, hidden_states=hidden, attentions=None
    )
    output.log_probs, output.entropy = scored.log_probs.t().flatten(), scored.entropy.t().flatten()
    return output


def _processor(module: Any) -> Callable[..., Any]:
    def fused_output_processor(
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        labels: Tensor,
        context: Any,
        **_: Any,
    ) -> Any:
        from logitless_mcore.capture import forward_as

        found, scorer = [], _scorer(_models[output_layer](), labels, context.temperature)

        def head(hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
            found.append(scorer(hidden, output_layer, weight))
            return hidden.new_zeros(*hidden.shape[:-1], 0), None

        with forward_as(output_layer, head):  # called, so that its hooks fire: a distributed optimizer's gather weights
            output_layer(hidden_states, weight=output_weight)
        return _output(module, hidden_states, found[0])

    return fused_output_processor


def _forward(module: Any) -> Callable[..., Any]:
    signature = inspect.signature(getattr(module, FORWARD))

    def _fused_GPTModel_forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward, scored at its output layer."""
        from logitless_mcore.capture import run_scored

        given = dict(signature.bind(model, *args, **kwargs).arguments)
        inputs = {**given, **given.pop("kwargs", {})}
        labels, temperature = inputs.pop("labels", None), inputs.pop("temperature", 1.0)
        for name in ("model", "kwargs", "loss_mask"):
            inputs.pop(name, None)
        if not model.post_process:
            return model.forward_backup(**inputs)
        return _output(
            module, None, run_scored(model, inputs, _scorer(model, labels, temperature), model.forward_backup)
        )

    return _fused_GPTModel_forward
