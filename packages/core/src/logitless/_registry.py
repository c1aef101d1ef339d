"""Plugins: listed from package metadata, loaded by name, and never able to break one another.

A plugin that is installed but does not load is a status, not an exception, until somebody asks for it by name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from logitless.errors import BrokenPluginError, InputTypeError, LogitlessError, NotFoundError, UnsupportedError
from logitless.types import PROTOCOL, Adapter, Backend, ForwardFn, Request

__all__ = [
    "Choice",
    "PluginStatus",
    "adapters",
    "backends",
    "choose_backend",
    "explain_choice",
    "load",
    "make_forward",
    "requested_backend",
    "statuses",
    "use_backend",
]

BACKENDS, ADAPTERS, COMMANDS = "logitless.backends", "logitless.adapters", "logitless.commands"
INSTALL = {
    BACKENDS: {"torch": "logitless-torch", "triton": "logitless-triton"},
    ADAPTERS: {"hf": "logitless-hf", "mcore": "logitless-mcore"},
    COMMANDS: {"bench": "logitless", "score": "logitless-hf"},
}
ENVIRONMENT = "LOGITLESS_BACKEND"
FEATURES = {
    "kept_set": "scores over a kept set (top_k, top_p)",
    "several_labels": "several labels of a token",
    "stats": "further statistics (stats)",
    "top_k_log_probs": "the most likely tokens (top_k_log_probs)",
}

_override: ContextVar[str | None] = ContextVar("logitless_backend", default=None)


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """One installed plugin: whether it loads, and if not, why (`error` is the exception itself)."""

    name: str
    dist: str
    version: str
    ok: bool
    reason: str | None = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Which backend serves a request, and why each other one does not."""

    name: str | None
    refused: dict[str, str]


@functools.cache
def _entries(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Entry points of a group by name, one a distribution; nothing is imported."""
    found: dict[str, dict[str, EntryPoint]] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, {}).setdefault(_dist(entry)[0], entry)
    return {name: tuple(by_dist.values()) for name, by_dist in sorted(found.items())}


def _dist(entry: EntryPoint) -> tuple[str, str]:
    return (entry.dist.name, entry.dist.version) if entry.dist is not None else ("unknown", "unknown")


@functools.cache
def _attempt(group: str, name: str) -> tuple[Any, LogitlessError | None]:
    """The plugin, or why it cannot be had; whatever its import raises is kept, so that a retry tells the same."""
    entries = _entries(group).get(name)
    kind = group.removeprefix("logitless.").removesuffix("s")
    if entries is None:
        dist = INSTALL[group].get(name)
        hint = f"pip install {dist}" if dist else f"installed: {', '.join(_entries(group)) or 'none'}"
        return None, NotFoundError(f"no installed package provides the {kind} {name!r}; {hint}")
    if len(entries) > 1:
        dists = " and ".join(sorted(_dist(entry)[0] for entry in entries))
        return None, BrokenPluginError(f"the {kind} {name!r} is provided by {dists}; uninstall all but one")
    dist, version = _dist(entries[0])
    where = f"{kind} {name!r} of {dist} {version}"
    try:
        plugin = entries[0].load()
        plugin = plugin() if isinstance(plugin, type) else plugin
        protocol = PROTOCOL if group == COMMANDS else plugin.protocol
        if not isinstance(protocol, int):
            raise TypeError(f"its protocol is {protocol!r}, expected an int")
        if group == BACKENDS and not isinstance(plugin.priority, int):
            raise TypeError(f"its priority is {plugin.priority!r}, expected an int")
    except (Exception, SystemExit) as error:
        broken = BrokenPluginError(f"{where} does not load: {type(error).__name__}: {error}")
        broken.__cause__ = error
        return None, broken
    if protocol != PROTOCOL:
        return None, BrokenPluginError(
            f"{where} speaks protocol {protocol}, this logitless speaks {PROTOCOL}; "
            f"pip install --upgrade {'logitless' if protocol > PROTOCOL else dist}"
        )
    return plugin, None


def load(group: str, name: str) -> Any:
    """The plugin of that name; NotFoundError or BrokenPluginError say why it cannot be had."""
    plugin, error = _attempt(group, name)
    if error is not None:
        raise error
    return plugin


def statuses(group: str) -> list[PluginStatus]:
    """A line for every installed plugin of the group; loads each, and none can break another."""
    lines = []
    for name, entries in _entries(group).items():
        error = _attempt(group, name)[1]
        for entry in entries:
            reason = None if error is None else str(error)
            lines.append(PluginStatus(name, *_dist(entry), error is None, reason, error and (error.__cause__ or error)))
    return lines


def backends() -> list[PluginStatus]:
    """Every installed backend and whether it loads."""
    return statuses(BACKENDS)


def adapters() -> list[PluginStatus]:
    """Every installed adapter and whether it loads."""
    return statuses(ADAPTERS)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the block, calls that name no backend use this one, and raise if it cannot serve."""
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def requested_backend(argument: str | None) -> str | None:
    """The name that somebody asked for: argument, then `use_backend`, then LOGITLESS_BACKEND; None if nobody did."""
    if not isinstance(argument, (str, type(None))):
        raise InputTypeError(f"backend: got {type(argument).__qualname__}, expected a name or None")
    return argument or _override.get() or os.environ.get(ENVIRONMENT) or None


def _lacks(backend: Any, request: Request) -> str | None:
    """Why a backend cannot serve a request that asks for attributes which it may leave out."""
    lacking = request.features - getattr(backend, "features", frozenset())
    if lacking:
        served = " and ".join(FEATURES[name] for name in sorted(lacking))
        return f"it does not serve {served}; take another backend, such as torch"
    if request.ref_dtypes is None or (hasattr(backend, "kl_forward") and hasattr(backend, "kl_backward")):
        return None
    return "it computes no divergences (linear_kl); take another backend, such as torch"


def explain_choice(request: Request, requested: str | None = None) -> Choice:
    """What `choose_backend` would take, without raising."""
    serving: dict[str, int] = {}
    refused: dict[str, str] = {}
    for name in dict.fromkeys((*_entries(BACKENDS), *([requested] if requested else []))):
        plugin, error = _attempt(BACKENDS, name)
        try:
            reason = str(error) if error is not None else _lacks(plugin, request) or plugin.supports(request)
        except Exception as raised:  # a plugin's fault must not hide the others
            reason = f"its supports() raised {type(raised).__name__}: {raised}"
        if reason is None:
            serving[name] = plugin.priority
        else:
            refused[name] = reason
    if requested is not None:
        chosen = requested if requested in serving else None
    else:
        chosen = min(serving, key=lambda name: (-serving[name], name), default=None)
    for name in serving.keys() - {chosen}:
        refused[name] = (
            f"{requested!r} was asked for" if requested else f"priority {serving[name]} is lower than {chosen}'s"
        )
    return Choice(chosen, refused)


def choose_backend(request: Request, requested: str | None) -> Backend:
    """The backend for a request; a requested one that cannot serve raises with its reason, nothing falls back."""
    if requested is not None:
        backend: Backend = load(BACKENDS, requested)
        try:
            reason = _lacks(backend, request) or backend.supports(request)
        except Exception as error:
            raise BrokenPluginError(f"backend {requested!r}: its supports() raised {error!r}") from error
        if reason is not None:
            raise UnsupportedError(f"backend {requested!r} cannot serve this call: {reason}")
        return backend
    choice = explain_choice(request)
    if choice.name is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.refused.items())
        if not choice.refused:
            raise NotFoundError("no backend is installed; pip install logitless-torch")
        raise UnsupportedError(f"no installed backend can serve this call: {reasons}")
    chosen: Backend = load(BACKENDS, choice.name)
    return chosen


def make_forward(model: Any, layout: str = "thd", backend: str | None = None) -> ForwardFn:
    """Bind the model through the adapter that knows it, reversibly, for batches of that layout.

    Args:
        model: a model of a framework whose adapter is installed.
        layout: "thd" (packed), "bshd" (padded) or "nested".
        backend: name of the backend; None chooses at each call.

    Raises:
        NotFoundError: no adapter is installed.
        UnsupportedError: no installed adapter knows the model; the message holds each one's reason.
    """
    reasons = []
    for status in adapters():
        adapter: Adapter | None = load(ADAPTERS, status.name) if status.ok else None
        try:
            reason = status.reason if adapter is None else adapter.supports(model)
        except Exception as raised:  # a plugin's fault must not hide the others
            reason = f"its supports() raised {type(raised).__name__}: {raised}"
        if adapter is not None and reason is None:
            return adapter.make_forward(model, layout, backend)
        reasons.append(f"{status.name}: {reason}")
    if not reasons:
        raise NotFoundError("no adapter is installed; pip install logitless-hf or logitless-mcore")
    raise UnsupportedError(f"no installed adapter knows a {type(model).__qualname__}: {'; '.join(reasons)}")
