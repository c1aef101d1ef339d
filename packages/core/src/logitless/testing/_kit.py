"""What all kits share: what a subclass may set and what it may not weaken, and how a check is skipped, run and failed.

A class whose checks are quietly not run, or quietly replaced, would look like a pass: both are errors when the class
is made.
"""

from __future__ import annotations

import functools
import inspect
import unittest
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["Kit", "expect", "forall", "hook", "same"]

F = TypeVar("F", bound=Callable[..., Any])


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal bits, NaN included."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a.detach().nan_to_num(nan=-7.25), b.detach().nan_to_num(nan=-7.25))


def expect(condition: object, message: str) -> None:
    """Fail the check unless the condition holds."""
    if not condition:
        pytest.fail(message)


def hook(function: F) -> F:
    """Marks a method that a subclass is meant to define."""
    function.is_hook = True  # type: ignore[attr-defined]
    return function


class Kit:
    """Base of the kits. pytest collects every subclass, whatever its name, but for one with `__test__ = False`."""

    __test__ = False
    _kit: ClassVar[bool] = True
    skips: ClassVar[Mapping[str, str]] = {}
    """Checks that do not apply, by name, and why."""

    def __init_subclass__(cls, *, kit: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._kit = kit
        if kit:
            cls.__test__ = False
            return
        if "__test__" not in vars(cls):
            cls.__test__ = True
        cls._guard()

    @classmethod
    def _guard(cls) -> None:
        kits = [base for base in cls.__mro__ if vars(base).get("_kit")]
        own = [base for base in cls.__mro__ if base not in kits and base is not object]
        methods = {
            name: value
            for base in reversed(kits)
            for name, value in vars(base).items()
            if callable(value) or isinstance(value, property)
        }
        hooks = {name for name, value in methods.items() if getattr(value, "is_hook", False)}
        fixed = {name for name in methods.keys() - hooks if not name.startswith("__")}
        if issubclass(cls, unittest.TestCase) or {"__init__", "__new__"} & {
            name for base in own for name in vars(base)
        }:
            raise TypeError(
                f"{cls.__qualname__} is a unittest.TestCase or has an __init__ or __new__: pytest would run none of "
                "its checks; use fixtures, or the hooks"
            )
        redefined = sorted(fixed & {name for base in own for name in vars(base)})
        if redefined:
            raise TypeError(f"{cls.__qualname__} redefines {', '.join(redefined)}: name it otherwise, or use `skips`")
        checks = {name for name in fixed if name.startswith("test_")}
        for name, reason in cls.skips.items():
            if name not in checks:
                raise TypeError(f"{cls.__qualname__}.skips names no check: {name}")
            if not isinstance(reason, str) or not reason:
                raise TypeError(f"{cls.__qualname__}.skips[{name!r}]: got {reason!r}, expected the reason")
        if cls.__test__:
            missing = [name for base in kits for name in inspect.get_annotations(base) if not hasattr(cls, name)]
            missing += [name for name in hooks if getattr(getattr(cls, name), "__isabstractmethod__", False)]
            if missing:
                raise TypeError(
                    f"{cls.__qualname__} lacks {', '.join(sorted(missing))}; set them, or `__test__ = False` for a "
                    "base that is not to be run itself"
                )

    @hook
    def around(self, check: Callable[[], None]) -> None:
        """Runs a check; a subclass may do so in a process of its own, or within groups of ranks."""
        check()

    def parameters(self) -> Mapping[str, tuple[Any, Any]]:
        """Values and ids of what a check asks for by an argument of that name."""
        return {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each check runs with each value of what it asks for."""
        for name, (values, ids) in self.parameters().items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=ids)

    @pytest.fixture(autouse=True)
    def _prepare(self, request: pytest.FixtureRequest) -> None:
        reason = self.skips.get(getattr(request.node, "originalname", ""))
        if reason:
            pytest.skip(reason)
        check = request.node.obj

        @functools.wraps(check)
        def run(**arguments: Any) -> None:
            self.around(functools.partial(check, **arguments))

        request.node.obj = run


def forall(check: Callable[[Any], None], strategy: SearchStrategy[Any], *, examples: int) -> None:
    """Run a check on what a hypothesis strategy draws: the same examples at every run, and none kept on disk."""
    from hypothesis import HealthCheck, given, settings

    run: Any = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run(given(strategy)(check))()
