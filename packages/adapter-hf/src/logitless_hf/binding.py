"""Bind a model: the same object, of a subclass whose forward can also return scores.

The class of the one instance is swapped. A closure set on the instance would run the old model after `deepcopy`, and
one made by `functools.wraps` would be stripped by accelerate; a patch of the class would change every other instance.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from logitless.errors import InputTypeError, InvalidInputError, UnsupportedError
from logitless_hf.head import has_weights
from logitless_hf.outputs import CausalLMOutputForPPO, for_ddp, unrounded
from logitless_hf.scoring import OPTIONS, HeadReport, examine, scored_forward, valued_forward
from logitless_hf.traffic import passing

__all__ = ["Binding", "bind", "bind_always", "binding_of", "inspect_head", "is_bound_class", "posing_as", "unbind"]

Model = TypeVar("Model", bound=nn.Module)
STATE = "_logitless"  # where a bound instance keeps its Binding
MARK = "_logitless_base"  # in the namespace of a bound class
# What transformers' forwards would swallow, and give logits as if nothing had been asked.
OF_SCORES = ("temperature", "entropy", "entropy_grad", "loss_fn", "keep_bytes", "top_k", "top_p", "stats")


@dataclass
class Binding:
    """What a bound instance remembers; it holds no reference to the model, so that copies are independent."""

    backend: str | None = None
    always: bool = False  # scores without being asked, as `patch_forward_with_backends` promises
    report: HeadReport | None = None  # None: the model had no weights yet, and is examined at its first call
    generating: int = 0
    calling: int = 0
    scores: CausalLMOutputForPPO | None = None  # of the call that is under way


def binding_of(model: nn.Module) -> Binding | None:
    """The model's binding, or None if it is not bound."""
    found: Binding | None = model.__dict__.get(STATE)
    return found


def _restore(base: Any) -> Any:
    return bound_class(base).__new__(bound_class(base))


@functools.cache
def bound_class(base: Any) -> Any:
    """The subclass of `base` that its bound instances are of; it has the same name, signature and module."""
    parameters = inspect.signature(base.forward).parameters
    of_scores = tuple(name for name in OF_SCORES if name not in parameters)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        binding = binding_of(self)
        if binding is None:  # built from the class of a bound model, or unbound under a wrapper of this forward
            return base.forward(self, *args, **kwargs)
        if not binding.generating and not torch.compiler.is_compiling():
            _check_spelling(tuple(name for name in kwargs if name not in parameters))
        asked = kwargs.pop("return_log_probs", binding.always and not binding.generating)
        with passing(self, scoring=asked):
            if not asked:
                _check_unasked([name for name in of_scores if name in kwargs and not binding.generating])
                return base.forward(self, *args, **kwargs)
            # Not through __call__, whose hooks have run.
            report = binding.report or _examine(self, functools.partial(forward, self))
            if report.values:
                return for_ddp(valued_forward(self, base.forward, args, kwargs))
            output = scored_forward(self, base.forward, report, binding.backend, args, kwargs)
            if binding.calling:
                binding.scores = output
            return for_ddp(output)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        binding = binding_of(self)
        if binding is None or torch.compiler.is_compiling():
            return base.__call__(self, *args, **kwargs)
        binding.calling += 1
        try:
            return unrounded(base.__call__(self, *args, **kwargs), binding.scores)
        finally:
            binding.calling -= 1
            binding.scores = None

    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        binding = binding_of(self)
        if binding is None:
            return base.generate(self, *args, **kwargs)
        binding.generating += 1
        try:
            return base.generate(self, *args, **kwargs)
        finally:
            binding.generating -= 1

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        reduced = base.__reduce_ex__(self, protocol)
        return (_restore, (base,), *reduced[2:]) if type(self) is bound_class(base) else reduced

    namespace: dict[str, Any] = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    namespace |= {MARK: base, "__reduce_ex__": __reduce_ex__, "forward": posing_as(forward, base.forward)}
    namespace["__call__"] = __call__
    if hasattr(base, "generate"):
        namespace["generate"] = posing_as(generate, base.generate)
    return type(base)(base.__name__, (base,), namespace)


@functools.cache
def _check_spelling(names: tuple[str, ...]) -> None:
    """Of keywords that the family's forward does not name: with `**kwargs` it swallows any."""
    known = ("return_log_probs", *OPTIONS)
    for name in names:
        meant = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if meant:
            raise InvalidInputError(f"{name}: got a keyword that the model does not name, expected {meant[0]}, or none")


def _check_unasked(given: list[str]) -> None:
    if given:
        raise InvalidInputError(
            f"{', '.join(given)}: got without return_log_probs=True, expected only with it, since logits have no use "
            "for it; ask for scores, or leave it out"
        )


def is_bound_class(cls: type) -> bool:
    """Whether `bind` made this class."""
    return MARK in cls.__dict__


def posing_as(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the original's name, documentation and signature, which Trainer and `generate` inspect."""
    functools.update_wrapper(function, original)
    del function.__wrapped__  # type: ignore[attr-defined]  # accelerate strips what has one
    function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return function


def _causal_lm(model: Any) -> nn.Module:
    """The model that has the head: inside of a PeftModel, or the model itself."""
    if not isinstance(model, nn.Module):
        raise InputTypeError(f"model: got {type(model).__qualname__}, expected a transformers model")
    inner: Any = model
    if hasattr(model, "get_base_model"):
        inner = model.get_base_model()  # type: ignore[operator]
    for name in ("_orig_mod", "module"):
        if name in inner._modules and not hasattr(type(inner), "get_output_embeddings"):
            raise UnsupportedError(
                f"{type(inner).__qualname__}: it wraps a model; bind its .{name} instead, before it is wrapped"
            )
    if not hasattr(inner, "get_output_embeddings"):
        raise UnsupportedError(f"{type(inner).__qualname__} has no get_output_embeddings(), so no head is known")
    found: nn.Module = inner
    return found


def _examine(model: nn.Module, call: Callable[..., Any]) -> HeadReport:
    """Fill in the report of a bound model; `call` runs it."""
    binding: Binding = model.__dict__[STATE]

    def scored(report: HeadReport, **kwargs: Any) -> Any:
        binding.report = report
        return call(**kwargs, return_log_probs=True)

    try:
        report: HeadReport = examine(model, functools.partial(call, return_log_probs=False), scored)
    except BaseException:
        binding.report = None
        raise
    binding.report = report
    return report


@contextmanager
def _restored_on_error(model: nn.Module) -> Iterator[None]:
    try:
        yield
    except BaseException:
        unbind(model)
        raise


def _bind(model: Model, backend: str | None, always: bool, at_once: bool = True) -> Model:
    target = _causal_lm(model)
    unbind(model)
    base: Any = type(target)
    own = target.__dict__.get("forward")
    hooked = "_hf_hook" in target.__dict__
    if own is not None and not hooked:
        raise UnsupportedError(
            f"{base.__qualname__}: its instance has a forward of its own, a {type(own).__qualname__}; bind the model "
            "before it is patched or prepared for mixed precision"
        )
    target.__class__ = bound_class(base)
    target.__dict__[STATE] = Binding(backend, always)
    with _restored_on_error(target):
        if hooked:  # accelerate's hook calls what it found as _old_forward
            target.__dict__["_old_forward"] = MethodType(bound_class(base).forward, target)
        if at_once and has_weights(target):
            _examine(target, target)
    return model


def bind(model: Model, backend: str | None = None) -> Model:
    """Teach a model to return scores in place of logits; the same object comes back.

    Afterwards `model(..., return_log_probs=True, temperature=1.0, entropy=True, entropy_grad=True, labels=None,
    shift_labels=None, loss_fn=None, keep_bytes=0, top_k=None, top_p=None, stats=())` returns a `CausalLMOutputForPPO`;
    without `return_log_probs` the model is as it was. `top_k`, `top_p` and `stats` are those of
    `logitless.linear_log_probs`; labels of either name may hold K tokens for each position, [batch, sequence, K].

    What the family does to its logits is identified by running it on eight tokens, and the result checked against the
    model's own logits; random states, buffers, modes and gradients stay as they are. A model on the meta device is
    examined at its first scoring call. A PeftModel has its inner model bound. A sharded model is bound on all ranks.
    What is changed about the head afterwards (a config's softcap, say) needs another `bind`. While one thread scores,
    another may not call the model.

    Args:
        model: a transformers causal language model.
        backend: name of a logitless backend; None chooses at each call.

    Raises:
        UnsupportedError: the head is not understood; the message says why, and the model is as it was, or unbound if it
            was bound: its scores would be those of the head as it was understood before.
        NotFoundError: no backend is installed.
    """
    return _bind(model, backend, always=False)


def bind_always(model: Model, backend: str | None = None, at_once: bool = True) -> Model:
    """`bind`, but the model returns scores without being asked, except within `generate`.

    Without `at_once` it is examined at its first scoring call: for one that some ranks hold on the meta device as yet.
    """
    return _bind(model, backend, always=True, at_once=at_once)


def unbind(model: Model) -> Model:
    """Make a bound model what it was before `bind`; the same object comes back. Nothing happens if it is not bound."""
    target = _causal_lm(model)
    binding = target.__dict__.pop(STATE, None)
    bound: Any = type(target)
    if binding is None and not is_bound_class(bound):
        return model
    base: Any = bound.__mro__[1]
    if bound is not bound_class(base):
        target.__dict__[STATE] = binding
        raise UnsupportedError(f"{bound.__qualname__}: its class was changed after bind; undo that first")
    target.__class__ = base
    if getattr(target.__dict__.get("_old_forward"), "__func__", None) is bound.forward:
        target.__dict__["_old_forward"] = MethodType(base.forward, target)
    if getattr(target.__dict__.get("forward"), "__func__", None) is bound.forward:  # left by accelerate's unwrap_model
        del target.__dict__["forward"]
    return model


def inspect_head(model: nn.Module) -> HeadReport:
    """What stands between a model's hidden states and its logits; nothing about the model changes.

    A head that is not understood gives a report with the `reason`. Scores are checked, so a backend must be installed.
    """
    target = _causal_lm(model)
    bound = binding_of(target)
    if bound is not None and bound.report is not None:
        return bound.report
    try:
        _bind(target, None, always=False)
        report = target.__dict__[STATE].report
        unbind(target)
    except UnsupportedError as error:
        return HeadReport.refused(target, str(error))
    return report if report is not None else HeadReport.refused(target, "the model has no weights yet (meta device)")
