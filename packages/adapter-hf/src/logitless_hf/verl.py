"""verl's Hugging Face actors (its FSDP engines), with log-probabilities and entropies computed here.

With `use_fused_kernels=True` verl hands each model to `patch_forward_with_backends`, and from then on calls it with
`temperature=` and `shift_labels=`, and reads `log_probs` and `entropy`. `register` puts a function of ours there:
it binds the one model, where verl's own overwrites the forward of its class. verl's kernel is not replaced, nor used.

verl calls nothing in its plugins, it only loads them: `verl_plugin` is what its entry point names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

import logitless
from logitless.errors import BrokenPluginError, NotFoundError, UnsupportedError
from logitless_hf.binding import bind_always
from logitless_hf.values import is_value_model

__all__ = ["refuse", "register", "state", "unregister"]

MADE_FOR = "verl 0.9.1"
MODULE = "verl.models.transformers.monkey_patch"
CALLER = "apply_monkey_patch"
SEAM = "patch_forward_with_backends"
PARAMETERS = ("model", "use_fused_kernels", "fused_kernels_backend")
# The engine that calls the model. One that passes no labels would have each Ulysses shard score past its own end.
ENGINE, PASSED = "workers/engine/fsdp/transformer_impl.py", 'extra_args["shift_labels"]'
ORIGINAL = "_logitless_original"  # on a function of ours: verl's
REASON = "_logitless_reason"  # on one that refuses: why
AUTOMATIC = (None, "auto")
OWN = "set VERL_USE_EXTERNAL_PLUGINS=none to have verl's own kernels"


def _version() -> str:
    try:
        return f"verl {version('verl')}"
    except PackageNotFoundError:
        return "this verl"


def _original(module: Any) -> Callable[..., Any] | None:
    """verl's own function, whatever stands in its place."""
    found = getattr(module, SEAM, None)
    original: Callable[..., Any] | None = getattr(found, ORIGINAL, found)
    return original


def _moved(module: Any) -> str | None:
    """None if the seam is where it was in the verl that this was written for, else what is not."""
    original, caller = _original(module), getattr(module, CALLER, None)
    if original is None:
        return f"{MODULE} has no {SEAM}"
    found = tuple(inspect.signature(original).parameters)
    if found != PARAMETERS:
        return f"{SEAM} takes ({', '.join(found)}), expected ({', '.join(PARAMETERS)})"
    if SEAM not in getattr(getattr(caller, "__code__", None), "co_names", ()):
        return f"{CALLER} does not call {SEAM}"
    engine = Path(str(sys.modules["verl"].__file__)).parent / ENGINE
    if not engine.is_file() or PASSED not in engine.read_text():
        return f"verl/{ENGINE} passes no shift_labels"
    return None


def _backend(name: str | None) -> str | None:
    """What `fused_kernel_options.impl_backend` names, as logitless knows it."""
    if name in AUTOMATIC:
        return None
    found = {status.name: status for status in logitless.backends()}
    if name not in found:
        installed = ", ".join(sorted(found)) or "none"
        hint = "; liger is verl's own" if name == "liger" else ""
        raise NotFoundError(
            f"fused_kernel_options.impl_backend: got {name!r}, expected 'auto' or an installed backend of logitless "
            f"({installed}){hint}; pip install logitless-torch or logitless-triton, or {OWN}"
        )
    if not found[name].ok:
        raise BrokenPluginError(f"fused_kernel_options.impl_backend: {name!r} is broken: {found[name].reason}")
    return name


def _bind(model: nn.Module, impl_backend: str | None) -> None:
    name = type(model).__qualname__
    if is_value_model(model):
        raise UnsupportedError(f"{name}: is a value model, which has no scores; leave use_fused_kernels off for it")
    if type(model).forward.__module__.startswith("verl."):
        raise UnsupportedError(
            f"{name}: verl has overwritten its forward (a vision-language model's) by one that does not run without "
            f"positions of four rows, so it cannot be tried out; leave use_fused_kernels off, or {OWN}"
        )
    # Not examined yet: it lies on the CPU, on some ranks without weights, and its attention may want a GPU. All ranks
    # make their first scoring call together, so there they may meet in collectives.
    bind_always(model, _backend(impl_backend), at_once=False)
    print(f"logitless-hf {version('logitless-hf')} scores {name}, by backend {impl_backend or 'auto'}")


def _ours(original: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(original)
    def patch_forward_with_backends(
        model: nn.Module, use_fused_kernels: bool = False, fused_kernels_backend: str | None = None
    ) -> None:
        if use_fused_kernels:
            _bind(model, fused_kernels_backend)
        else:
            original(model, use_fused_kernels, fused_kernels_backend)

    setattr(patch_forward_with_backends, ORIGINAL, original)
    return patch_forward_with_backends


def register() -> None:
    """Have `use_fused_kernels=True` of verl's FSDP engines score here; doing it again changes nothing.

    Raises:
        UnsupportedError: verl's seam is not where it was in the version that this module was written for.
    """
    module: Any = importlib.import_module(MODULE)
    moved = _moved(module)
    if moved is not None:
        raise UnsupportedError(f"{_version()}: {moved}; logitless-hf was written for {MADE_FOR}, install that")
    setattr(module, SEAM, _ours(_original(module)))  # type: ignore[arg-type]  # there, or it had moved


def refuse(reason: str) -> None:
    """Have `use_fused_kernels=True` raise for this reason, where verl's function can be found at all.

    verl would otherwise go on with its own kernels, and tell nobody.
    """
    module: Any = sys.modules.get(MODULE)
    original = _original(module)
    if original is None:
        return

    @functools.wraps(original)
    def patch_forward_with_backends(
        model: nn.Module, use_fused_kernels: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if use_fused_kernels:
            raise UnsupportedError(f"use_fused_kernels: {reason}; or {OWN}")
        return original(model, use_fused_kernels, *args, **kwargs)

    setattr(patch_forward_with_backends, ORIGINAL, original)
    setattr(patch_forward_with_backends, REASON, reason)
    setattr(module, SEAM, patch_forward_with_backends)


def unregister() -> None:
    """Give verl its own function back. Models that are bound stay so until `logitless_hf.unbind`."""
    module = sys.modules.get(MODULE)
    original = _original(module)
    if original is not None:
        setattr(module, SEAM, original)


def state() -> str:
    """ "registered", "not registered", or "refused: " and why, in this process."""
    found = getattr(sys.modules.get(MODULE), SEAM, None)
    if hasattr(found, REASON):
        return f"refused: {getattr(found, REASON)}"
    return "registered" if hasattr(found, ORIGINAL) else "not registered"
