"""Plugins are found without being imported, chosen in a fixed order, and never able to break one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import logitless
from logitless import Request, _registry
from logitless._registry import BACKENDS, choose_backend, explain_choice, load, requested_backend, statuses
from logitless.errors import BrokenPluginError, InputTypeError, NotFoundError, UnsupportedError
from logitless.testing import ReferenceBackend, installed

REQUEST = Request(torch.device("cpu"), torch.float32, torch.float32, n_tokens=4, hidden_size=8, vocab_rows=16)


@dataclass
class Entry:
    """An entry point whose load is a function, and remembers that it ran."""

    name: str
    make: Callable[[], Any]
    dist_name: str = "acme"
    loads: list[str] = field(default_factory=list)

    @property
    def dist(self) -> Any:
        return SimpleNamespace(name=self.dist_name, version="1.2.3")

    def load(self) -> Any:
        self.loads.append(self.name)
        return self.make()


Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Replaces what is installed: `install(Entry, …, group=…)`."""
    found: dict[str, list[Entry]] = {}
    monkeypatch.setattr(_registry, "entry_points", lambda *, group: found.get(group, []))
    monkeypatch.delenv("LOGITLESS_BACKEND", raising=False)

    def clear() -> None:
        _registry._entries.cache_clear()
        _registry._attempt.cache_clear()

    def put(*entries: Entry, group: str = BACKENDS) -> None:
        found[group] = list(entries)
        clear()

    clear()
    yield put
    monkeypatch.undo()
    clear()


def backend(name: str = "good", priority: Any = 0, protocol: Any = 1, reason: Any = None) -> Any:
    def supports(request: Request) -> str | None:
        if isinstance(reason, Exception):
            raise reason
        return reason

    return SimpleNamespace(name=name, priority=priority, protocol=protocol, supports=supports)


def entry(name: str, **facts: Any) -> Entry:
    return Entry(name, lambda: backend(name, **facts))


def fails(error: BaseException) -> Callable[[], Any]:
    def load() -> Any:
        raise error

    return load


# Listing and loading


def test_listing_imports_nothing(install: Install) -> None:
    one, other = entry("one"), entry("other")
    install(one, other)
    assert list(_registry._entries(BACKENDS)) == ["one", "other"]
    assert one.loads == other.loads == []


def test_naming_one_loads_only_that(install: Install) -> None:
    one, other = entry("one"), entry("other")
    install(one, other)
    assert choose_backend(REQUEST, "one").name == "one"
    assert (one.loads, other.loads) == (["one"], [])


def test_a_class_is_instantiated_and_an_object_taken(install: Install) -> None:
    class Made:
        name, priority, protocol = "made", 0, 1

    install(Entry("made", lambda: Made), entry("object"))
    assert isinstance(load(BACKENDS, "made"), Made)
    assert load(BACKENDS, "object").name == "object"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (fails(ModuleNotFoundError("No module named 'gone'")), "ModuleNotFoundError: No module named 'gone'"),
        (fails(SystemExit("no licence")), "SystemExit: no licence"),
        (lambda: backend(protocol=2), "speaks protocol 2, this logitless speaks 1; pip install --upgrade logitless"),
        (lambda: backend(protocol=0), "speaks protocol 0, this logitless speaks 1; pip install --upgrade acme"),
        (lambda: backend(protocol="1"), "its protocol is '1', expected an int"),
        (lambda: backend(priority="high"), "its priority is 'high', expected an int"),
        (lambda: SimpleNamespace(name="bad"), "protocol"),
    ],
)
def test_a_broken_plugin_is_a_status_and_breaks_no_other(install: Install, make: Callable[[], Any], words: str) -> None:
    install(Entry("bad", make), entry("good"))
    bad, good = statuses(BACKENDS)
    assert (bad.name, bad.dist, bad.version, bad.ok) == ("bad", "acme", "1.2.3", False)
    assert words in str(bad.reason)
    assert isinstance(bad.error, BaseException)
    assert (good.ok, good.reason, good.error) == (True, None, None)
    assert choose_backend(REQUEST, None).name == "good"
    with pytest.raises(BrokenPluginError, match="backend 'bad' of acme 1.2.3"):
        choose_backend(REQUEST, "bad")


def test_the_cause_of_a_failed_load_is_kept_and_not_retried(install: Install) -> None:
    cause = ImportError("first")
    bad = Entry("bad", fails(cause))
    install(bad)
    for _ in range(2):
        with pytest.raises(BrokenPluginError) as caught:
            load(BACKENDS, "bad")
        assert caught.value.__cause__ is cause
    assert bad.loads == ["bad"]


def test_two_distributions_of_one_name(install: Install) -> None:
    install(replace(entry("twin"), dist_name="acme"), replace(entry("twin"), dist_name="zeta"), entry("good"))
    good, one, other = statuses(BACKENDS)
    assert good.ok
    assert [(line.dist, line.ok) for line in (one, other)] == [("acme", False), ("zeta", False)]
    with pytest.raises(BrokenPluginError, match="acme and zeta; uninstall all but one"):
        load(BACKENDS, "twin")
    assert choose_backend(REQUEST, None).name == "good"


def test_one_distribution_found_twice_is_one(install: Install) -> None:
    install(entry("good"), entry("good"))
    assert [line.ok for line in statuses(BACKENDS)] == [True]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("triton", "no installed package provides the backend 'triton'; pip install logitless-triton"),
        ("mystery", "no installed package provides the backend 'mystery'; installed: good"),
    ],
)
def test_a_name_that_nobody_provides(install: Install, name: str, words: str) -> None:
    install(entry("good"))
    with pytest.raises(NotFoundError, match=words):
        load(BACKENDS, name)


# Choice


def test_the_highest_priority_that_can_serve(install: Install) -> None:
    install(entry("a", priority=1), entry("b", priority=9, reason="it has no GPU"), entry("c", priority=5))
    choice = explain_choice(REQUEST)
    assert choice.name == "c"
    assert choice.refused == {"a": "priority 1 is lower than c's", "b": "it has no GPU"}
    assert choose_backend(REQUEST, None).name == "c"


def test_equal_priorities_go_by_name(install: Install) -> None:
    install(entry("b"), entry("a"))
    assert choose_backend(REQUEST, None).name == "a"


def test_a_named_backend_that_cannot_serve_does_not_fall_back(install: Install) -> None:
    install(entry("good"), entry("picky", reason="it wants bf16"))
    with pytest.raises(UnsupportedError, match="backend 'picky' cannot serve this call: it wants bf16"):
        choose_backend(REQUEST, "picky")
    assert explain_choice(REQUEST, "picky").refused["good"] == "'picky' was asked for"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"kept_set": True}, "scores over a kept set (top_k, top_p)"),
        ({"several_labels": True}, "several labels of a token"),
        ({"stats": ("is_argmax",)}, "further statistics (stats)"),
        ({"best": True}, "the most likely tokens (top_k_log_probs)"),
    ],
    ids=["kept-set", "several-labels", "stats", "best"],
)
def test_a_backend_that_does_not_name_a_feature_is_never_asked(asked: dict[str, Any], words: str) -> None:
    """A plugin of before would not know the field, and serve what it cannot."""

    class Older(ReferenceBackend):
        name = "older"
        priority = 100
        features = frozenset()

    class Newer(ReferenceBackend):
        name = "newer"

    request = replace(REQUEST, **asked)
    with installed(Older(), Newer(), alone=True):
        choice = explain_choice(request)
        assert choice.name == "newer"
        assert words in choice.refused["older"]
        with pytest.raises(UnsupportedError) as caught:
            choose_backend(request, "older")
        assert words in str(caught.value)
        assert choose_backend(REQUEST, None).name == "older"


def test_a_supports_that_raises_is_the_plugins_fault(install: Install) -> None:
    install(entry("good"), entry("bad", priority=9, reason=ZeroDivisionError("oh")))
    assert choose_backend(REQUEST, None).name == "good"
    assert "its supports() raised ZeroDivisionError: oh" in explain_choice(REQUEST).refused["bad"]
    with pytest.raises(BrokenPluginError, match="backend 'bad': its supports"):
        choose_backend(REQUEST, "bad")


def test_no_backend_at_all(install: Install) -> None:
    install()
    with pytest.raises(NotFoundError, match="pip install logitless-torch"):
        choose_backend(REQUEST, None)


def test_none_that_can_serve(install: Install) -> None:
    install(entry("a", reason="too small"), Entry("b", fails(ImportError("gone"))))
    with pytest.raises(UnsupportedError, match="a: too small; b: backend 'b' of acme 1.2.3 does not load"):
        choose_backend(REQUEST, None)


def test_argument_then_block_then_environment(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    assert requested_backend(None) is None
    monkeypatch.setenv("LOGITLESS_BACKEND", "environment")
    assert requested_backend(None) == "environment"
    with logitless.use_backend("block"):
        assert requested_backend(None) == "block"
        assert requested_backend("argument") == "argument"
        with logitless.use_backend("inner"):
            assert requested_backend(None) == "inner"
        assert requested_backend(None) == "block"
    assert requested_backend(None) == "environment"
    monkeypatch.setenv("LOGITLESS_BACKEND", "")
    assert requested_backend(None) is None


def test_the_block_ends_with_an_exception(install: Install) -> None:
    install()
    with pytest.raises(KeyError), logitless.use_backend("block"):
        raise KeyError
    assert requested_backend(None) is None


def test_a_backend_is_asked_for_by_its_name() -> None:
    for odd in (3, b"torch", torch.zeros(0), torch.nn.Linear):
        with pytest.raises(InputTypeError, match=r"backend: got \w+, expected a name or None"):
            _registry.requested_backend(odd)  # type: ignore[arg-type]


def test_the_op_follows_the_choice() -> None:
    class Other(ReferenceBackend):
        name = "other"
        seen = 0

        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            Other.seen += 1
            return super().forward(*arguments, **keywords)

    hidden, weight, labels = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    with installed(ReferenceBackend(), Other(), alone=True):
        logitless.linear_log_probs(hidden, weight, labels, backend="reference")
        assert Other.seen == 0
        with logitless.use_backend("other"):
            logitless.linear_log_probs(hidden, weight, labels)
        assert Other.seen == 1


# Adapters


def adapter(name: str, reason: str | None = None) -> Entry:
    plugin = SimpleNamespace(
        name=name,
        protocol=1,
        supports=lambda model: reason,
        make_forward=lambda model, layout, backend: (name, model, layout, backend),
    )
    return Entry(name, lambda: plugin)


def test_make_forward_takes_the_adapter_that_knows_the_model(install: Install) -> None:
    install(adapter("a", "it is no such model"), adapter("b"), group=_registry.ADAPTERS)
    found: Any = logitless.make_forward("model", layout="bshd", backend="torch")
    assert found == ("b", "model", "bshd", "torch")


def test_make_forward_tells_each_adapters_reason(install: Install) -> None:
    install(adapter("a", "it is no such model"), Entry("b", fails(ImportError("gone"))), group=_registry.ADAPTERS)
    with pytest.raises(UnsupportedError, match="knows a str: a: it is no such model; b: adapter 'b'"):
        logitless.make_forward("model")


def test_an_adapter_whose_supports_raises_hides_no_other(install: Install) -> None:
    broken = SimpleNamespace(name="a", protocol=1, supports=lambda model: model.config)
    install(Entry("a", lambda: broken), adapter("b", "it is no such model"), group=_registry.ADAPTERS)
    with pytest.raises(UnsupportedError, match="a: its supports.. raised AttributeError: .*; b: it is no such model"):
        logitless.make_forward("model")


def test_make_forward_without_adapters(install: Install) -> None:
    install()
    with pytest.raises(NotFoundError, match="pip install logitless-hf or logitless-mcore"):
        logitless.make_forward("model")
    assert logitless.adapters() == []
