"""What a kit's subclass may set, and that its checks cannot be lost or replaced unseen."""

from __future__ import annotations

import unittest
from typing import Any

import pytest

from logitless.testing._kit import Kit
from logitless.testing.adapter import AdapterConformance
from logitless.testing.conformance import BackendConformance
from logitless.testing.divergence import DivergenceConformance

pytest_plugins = ["pytester"]
KITS = (BackendConformance, AdapterConformance, DivergenceConformance)
SETTINGS: dict[type[Kit], dict[str, Any]] = {
    BackendConformance: {"backend": "x"},
    DivergenceConformance: {"backend": "x"},
    AdapterConformance: {
        "adapter": "x",
        "make_model": lambda self, dtype: None,
        "logits": lambda self, model, ids: ids,
    },
}
each_kit = pytest.mark.parametrize("kit", KITS)


def test_a_check_cannot_be_redefined() -> None:
    with pytest.raises(TypeError, match="redefines test_peaked: name it otherwise, or use `skips`"):
        type("Sly", (BackendConformance,), {"backend": "x", "test_peaked": lambda self, dtype: None})
    with pytest.raises(TypeError, match="redefines check"):
        type("Sly", (BackendConformance,), {"backend": "x", "check": lambda self, *rest: None})


def test_a_property_cannot_be_replaced() -> None:
    with pytest.raises(TypeError, match="redefines plugin"):
        type("TestSly", (AdapterConformance,), {**SETTINGS[AdapterConformance], "plugin": object()})


def test_own_checks_can_be_added() -> None:
    type("Fine", (BackendConformance,), {"backend": "x", "test_mine": lambda self: None, "sizes": (3, 5, 2)})


@pytest.mark.parametrize("setting", [{"skips": {"test_peeked": "?"}}, {"refuses": {"softcaps"}}], ids=str)
def test_a_misspelt_setting_is_an_error(setting: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="test_peeked|softcaps"):
        type("Typo", (BackendConformance,), {"backend": "x", **setting})


@each_kit
@pytest.mark.parametrize("name", ["pytest_generate_tests", "parameters", "_prepare"])
def test_the_machinery_cannot_be_redefined(kit: type[Kit], name: str) -> None:
    with pytest.raises(TypeError, match=f"redefines {name}"):
        type("TestSly", (kit,), {**SETTINGS[kit], name: lambda self, metafunc: None})


@each_kit
def test_a_base_beside_the_kit_cannot_replace_a_check(kit: type[Kit]) -> None:
    check = next(name for name in dir(kit) if name.startswith("test_"))
    beside = type("Beside", (), {check: None})
    with pytest.raises(TypeError, match=f"redefines {check}"):
        type("TestSly", (beside, kit), SETTINGS[kit])


@each_kit
def test_a_subclass_of_a_subclass_cannot_either(kit: type[Kit]) -> None:
    base = type("TestFine", (kit,), SETTINGS[kit])
    check = next(name for name in dir(kit) if name.startswith("test_"))
    with pytest.raises(TypeError, match=f"redefines {check}"):
        type("TestSly", (base,), {check: lambda self: None})


@each_kit
@pytest.mark.parametrize("lost", ["init", "new", "unittest"])
def test_a_class_that_pytest_would_not_run_is_told(kit: type[Kit], lost: str) -> None:
    bases = (kit, unittest.TestCase) if lost == "unittest" else (kit,)
    more = {} if lost == "unittest" else {f"__{lost}__": lambda self: None}
    with pytest.raises(TypeError, match="pytest would run none of its checks"):
        type("TestLost", bases, {**SETTINGS[kit], **more})


@each_kit
def test_what_must_be_set_is_told(kit: type[Kit]) -> None:
    with pytest.raises(TypeError, match=f"TestBare lacks .*{next(iter(SETTINGS[kit]))}"):
        type("TestBare", (kit,), {})
    type("Base", (kit,), {"__test__": False})


def test_a_skip_without_a_reason_is_an_error() -> None:
    with pytest.raises(TypeError, match="expected the reason"):
        type("TestMute", (BackendConformance,), {"backend": "x", "skips": {"test_peaked": ""}})


OWN = """
from logitless.testing._kit import Kit

ran = []

class Pair(Kit, kit=True):
    def parameters(self):
        return {"size": ((1, 2), None)}

    def test_one(self, size):
        ran.append(size)

    def test_two(self):
        ran.append("two")

class Whatever(Pair):
    skips = {"test_two": "nothing to do"}

    def around(self, check):
        ran.append("before")
        check()
        ran.append("after")

class Base(Pair):
    __test__ = False

def test_what_ran():
    assert ran == ["before", 1, "after", "before", 2, "after"]
"""


def test_a_subclass_of_any_name_is_run_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own=OWN)
    done = pytester.runpytest_inprocess("-v", "-p", "no:cacheprovider")
    done.assert_outcomes(passed=3, skipped=1)
    done.stdout.fnmatch_lines(["*Whatever::test_one?1?*", "*Whatever::test_two SKIPPED (nothing to do)*"])


def test_a_check_that_fails_around_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own=OWN.replace("ran.append(size)", "assert size == 1"))
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-k", "test_one")
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["E*assert 2 == 1"])
