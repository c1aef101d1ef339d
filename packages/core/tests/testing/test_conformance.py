"""The kit of a backend: each check goes red on a backend with the defect that it is for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from broken_backends import DEFECTS, GOOD, Broken, ReadsWhatItDidNotWrite
from hypothesis import Phase, settings
from torch.testing._internal.optests import OpCheckError

from logitless import _registry
from logitless.testing import ReferenceBackend, cases, installed, random_example
from logitless.testing._conformance import OPTIONS
from logitless.testing._kit import same
from logitless.testing.conformance import BackendConformance
from logitless.testing.divergence import DivergenceConformance
from logitless.types import Request

CHECKS = [name for name, _ in inspect.getmembers(BackendConformance, inspect.isfunction) if name.startswith("test_")]


def run_check(name: str, backend_class: type[ReferenceBackend], arguments: dict[str, Any]) -> None:
    class Conformance(BackendConformance):
        backend = backend_class.name

    given = {"dtype": torch.float32, **arguments}
    with installed(backend_class(), alone=True):
        getattr(Conformance(), name)(**{key: value for key, value in given.items() if value is not None})


@pytest.fixture
def _unshrunk() -> Iterator[None]:
    """That an example fails is enough: to make it small would take most of these tests' time."""
    before = settings.get_current_profile_name()
    settings.register_profile("unshrunk", phases=[Phase.generate])
    settings.load_profile("unshrunk")
    yield
    settings.load_profile(before)


def test_every_check_has_a_defect() -> None:
    assert sorted(DEFECTS) == sorted(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_check_is_green_on_the_reference(name: str) -> None:
    run_check(name, GOOD.get(name, ReferenceBackend), DEFECTS[name][1])


@pytest.mark.usefixtures("_unshrunk")
@pytest.mark.parametrize("name", CHECKS)
def test_check_is_red_on_its_defect(name: str) -> None:
    defect, arguments = DEFECTS[name]
    with pytest.raises((AssertionError, pytest.fail.Exception, OpCheckError)):
        run_check(name, defect, arguments)


def test_unwritten_memory_that_is_read_is_seen() -> None:
    arguments = {"option": "plain", "tokens": 13}
    with pytest.raises(AssertionError, match="got nan"):
        run_check("test_options", ReadsWhatItDidNotWrite, arguments)


@pytest.mark.parametrize("field", ["log_probs", "d_hidden", "d_weight"])
def test_the_cases_own_values_count(field: str) -> None:
    case = cases()[0]
    wrong = replace(case, data={**case.data, field: (1.01 * torch.tensor(case.data[field])).tolist()})
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_check("test_cases", ReferenceBackend, {"dtype": torch.float64, "case": wrong})


@pytest.mark.parametrize("kit", [BackendConformance, DivergenceConformance])
def test_no_parameter_of_a_check_is_given_twice(kit: type) -> None:
    for name, check in inspect.getmembers(kit, inspect.isfunction):
        for mark in getattr(check, "pytestmark", ()):
            values = [repr(value) for value in mark.args[1]]
            assert len(set(values)) == len(values), name


def test_all_options_together_are_those_of_each() -> None:
    of_each = {key for name, option in OPTIONS.items() if name != "all" for key in option}
    assert {key for key, value in OPTIONS["all"].items() if value} == of_each - {"temperature"}


def test_upstream_gradients_are_scaled() -> None:
    example = random_example(5)
    scaled_up = example.scale_upstream(3.0)
    torch.testing.assert_close(scaled_up.grad_log_probs, 3.0 * example.grad_log_probs)
    torch.testing.assert_close(scaled_up.grad_entropy, 3.0 * example.grad_entropy)


def test_equal_bits_hold_nan_equal() -> None:
    x = torch.tensor([1.0, float("nan")])
    assert same(x, x.clone())
    assert not same(x, torch.tensor([1.0, 2.0]))
    assert not same(x, x.double())


def test_what_is_refused_must_be_refused() -> None:
    class Refuses(Broken):
        def supports(self, request: Request) -> str | None:
            return "no bias" if request.bias else None

    class Conformance(BackendConformance):
        backend = "broken"
        refuses = ("bias",)

    arguments: dict[str, Any] = {"dtype": torch.float32, "option": "bias", "tokens": 5}
    with installed(Refuses(), alone=True), pytest.raises(pytest.skip.Exception):
        Conformance().test_options(**arguments)
    with installed(Broken(), alone=True), pytest.raises(pytest.fail.Exception, match="the call was served"):
        Conformance().test_options(**arguments)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("test_kept_set", {"head": "plain", "kind": "k"}),
        ("test_several_labels", {"head": "plain", "kept": {}}),
        ("test_stats", {}),
        ("test_top_k_log_probs", {}),
    ],
)
def test_a_feature_that_is_not_named_must_be_refused(
    name: str, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(Broken):
        features = frozenset()

    with pytest.raises(pytest.skip.Exception, match="and says so"):
        run_check(name, Plain, arguments)
    monkeypatch.setattr(_registry, "_lacks", lambda backend, request: None)
    with pytest.raises(pytest.fail.Exception, match="the call was served"):
        run_check(name, Plain, arguments)
