"""The kit of divergences: each check goes red on a backend with the fault that it is for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from broken_backends import leaky, loud_last_row, nan_for_nothing, scaled
from torch import Tensor

from logitless.testing import ReferenceBackend, installed
from logitless.testing.divergence import DivergenceConformance
from logitless.types import Gradients, Needs, Problem, Request

CHECKS = [name for name, _ in inspect.getmembers(DivergenceConformance, inspect.isfunction) if name.startswith("test_")]


class Broken(ReferenceBackend):
    """The reference with one fault in its divergences."""

    name = "broken"


def valuing(change: Callable[[Problem, Tensor], Tensor]) -> type[Broken]:
    """A backend whose divergences are changed."""

    class Fault(Broken):
        def kl_forward(self, student: Problem, teacher: Problem, **keywords: Any) -> tuple[Tensor, Tensor]:
            value, stats = super().kl_forward(student, teacher, **keywords)
            return change(student, value), stats

    return Fault


def reading(change: Callable[[Problem], Problem]) -> type[Broken]:
    """A backend that misreads the student, forward and backward."""

    class Fault(Broken):
        def kl_forward(self, student: Problem, teacher: Problem, **keywords: Any) -> tuple[Tensor, Tensor]:
            return super().kl_forward(change(student), teacher, **keywords)

        def kl_backward(self, student: Problem, *rest: Any, **keywords: Any) -> Gradients:
            return super().kl_backward(change(student), *rest, **keywords)

    return Fault


def backward(change: Callable[[Problem, Gradients], Gradients]) -> type[Broken]:
    """A backend whose gradients are changed."""

    class Fault(Broken):
        def kl_backward(self, student: Problem, *rest: Any, **keywords: Any) -> Gradients:
            return change(student, super().kl_backward(student, *rest, **keywords))

    return Fault


class WrongWithAFrozenHidden(Broken):
    def kl_backward(
        self, student: Problem, teacher: Problem, stats: Tensor, grad: Tensor, needs: Needs, **keywords: Any
    ) -> Gradients:
        found = super().kl_backward(student, teacher, stats, grad, needs, **keywords)
        return found if needs.hidden else scaled("weight", 1.01)(student, found)


class TakesAShardForTheWhole(Broken):
    def supports(self, request: Request) -> str | None:
        return None


class UsesUp(Broken):
    """Overwrites what it kept."""

    def kl_backward(self, *args: Any, kept: Tensor | None = None, **keywords: Any) -> Gradients:
        found = super().kl_backward(*args, kept=kept, **keywords)
        if kept is not None:
            kept.zero_()
        return found


class KeepsMore(Broken):
    def kl_kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        return (keep_bytes + 8,)


class KeepsAnother(Broken):
    """Rounds by what it keeps."""

    def kl_forward(self, *args: Any, kept: Tensor | None = None, **keywords: Any) -> tuple[Tensor, Tensor]:
        value, stats = super().kl_forward(*args, kept=kept, **keywords)
        return value if kept is None else value * (1 + 1e-6), stats


class KeepsWrongly(Broken):
    def kl_forward(self, *args: Any, kept: Tensor | None = None, **keywords: Any) -> tuple[Tensor, Tensor]:
        value, stats = super().kl_forward(*args, kept=kept, **keywords)
        if kept is not None:
            kept.view(stats.dtype).mul_(1.01)
        return value, stats


def drift() -> type[Broken]:
    calls = []

    def change(student: Problem, value: Tensor) -> Tensor:
        calls.append(None)
        return value * (1 - 2e-7 * len(calls))

    return valuing(change)


def off(student: Problem, value: Tensor) -> Tensor:
    return value + 1e-3


def tight(student: Problem, value: Tensor) -> Tensor:
    return off(student, value) if student.workspace_bytes < 1 << 16 else value


def overflows(student: Problem, value: Tensor) -> Tensor:
    assert student.bias is not None
    return value + 0.0 * student.bias.exp().max()


def infinite_where_nothing_weighs(student: Problem, value: Tensor) -> Tensor:
    assert student.bias is not None
    return value / (student.bias.min() > -1e3)


FAULTS: dict[str, tuple[type[Broken], dict[str, Any]]] = {
    "test_options": (reading(lambda p: replace(p, softcap=None)), {"option": "softcap"}),
    "test_beta": (drift(), {"direction": None, "beta": 0.3}),
    "test_keep_bytes": (UsesUp, {"share": 16, "upstream": 1.0, "options": {}}),
    "test_many_tiles": (valuing(tight), {"workspace_bytes": 1 << 15, "vocab": 300}),
    "test_flat_and_peaked": (valuing(lambda p, value: value.clamp(max=50.0)), {"std": 60.0}),
    "test_common_offset": (valuing(overflows), {"offset": 1e4}),
    "test_minus_infinity": (valuing(lambda p, value: value.clamp(max=1e4)), {"gone": "student"}),
    "test_weightless_columns": (valuing(infinite_where_nothing_weighs), {}),
    "test_masked_tokens_are_exactly_zero": (reading(lambda p: replace(p, dead=None)), {"validate": False}),
    "test_no_token_counts": (backward(nan_for_nothing), {"tokens": 6}),
    "test_nan_stays_in_its_own_token": (backward(leaky), {"spoilt": "student"}),
    "test_absent_gradients_are_none": (WrongWithAFrozenHidden, {}),
    "test_equal_heads": (valuing(off), {}),
    "test_properties": (reading(loud_last_row), {}),
    "test_sharded": (TakesAShardForTheWhole, {"cuts": (0, 150, 300), "reduce": True, "keep_bytes": (0, 0)}),
    "test_compiled_equals_eager": (drift(), {"keep_bytes": 0}),
}


def run_check(name: str, backend_class: type[ReferenceBackend], arguments: dict[str, Any]) -> None:
    class TestOne(DivergenceConformance):
        backend = backend_class.name

    given = {"dtype": torch.float32, "direction": "forward", **arguments}
    with installed(backend_class(), alone=True):
        getattr(TestOne(), name)(**{key: value for key, value in given.items() if value is not None})


def test_every_check_has_a_fault() -> None:
    assert sorted(FAULTS) == sorted(CHECKS)


@pytest.mark.parametrize("name", [name for name in CHECKS if name != "test_sharded"])  # which the reference refuses
def test_check_is_green_without_a_fault(name: str) -> None:
    run_check(name, ReferenceBackend, FAULTS[name][1])


@pytest.mark.parametrize("name", CHECKS)
def test_check_is_red_on_its_fault(name: str) -> None:
    fault, arguments = FAULTS[name]
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_check(name, fault, arguments)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (UsesUp, "the second backward"),
        (KeepsMore, "bytes, allowed"),
        (KeepsAnother, "changed the divergence's bits"),
        (KeepsWrongly, "L2 error"),
    ],
)
def test_keeping_is_checked(fault: type[Broken], message: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=message):
        run_check("test_keep_bytes", fault, FAULTS["test_keep_bytes"][1])
