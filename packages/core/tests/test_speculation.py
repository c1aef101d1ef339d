"""A backend that begins before the host knows which tokens are live. The backend here is the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from logitless import TokenLogProbs, linear_policy_loss
from logitless._live import Live
from logitless.errors import InvalidInputError
from logitless.testing import Example, ReferenceBackend, check_gradients, check_results, installed, random_example
from logitless.types import Forwarded, Problem


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the device is not known until it is read; a CPU knows at once."""
    monkeypatch.setattr(Live, "on_device", property(lambda self: self._facts[0] if self._known is None else None))


def small(**options: Any) -> Example:
    return random_example(9, vocab=43, hidden_size=8, dtype=torch.float32, **options)


class Speculates(ReferenceBackend):
    """Is called before the host knows which tokens are live, and counts its calls."""

    name = "speculates"
    speculates = True

    def __init__(self, settles: bool = False) -> None:
        self.settles = settles
        self.counts: list[torch.Tensor | None] = []
        self.settled = 0

    def forward(self, problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]) -> Forwarded:
        self.counts.append(problem.live_count)
        if self.settles and problem.settle is not None:
            problem.settle()
            self.settled += 1
        problem = replace(problem, labels=problem.labels.clamp(0))
        return super().forward(problem, entropy=entropy, entropy_grad=entropy_grad, kept_shape=kept_shape)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("ignored", [False, True])
def test_speculation_is_done_again_where_tokens_are_ignored(ignored: bool) -> None:
    example, backend = small(ignored=ignored), Speculates()
    with installed(backend, alone=True):
        check_results(example.run(), example)
    assert [None if count is None else int(count) for count in backend.counts] == (
        [int(example.live.sum()), None] if ignored else [9]
    )


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("buffered", [False, True], ids=["", "grad-buffer"])
@pytest.mark.parametrize("ignored", [False, True], ids=["all-live", "some-ignored"])
def test_a_single_pass_is_speculated_up_to_its_loss(ignored: bool, buffered: bool) -> None:
    example, backend, seen = small(ignored=ignored), Speculates(), []
    fresh = example.fresh()
    buffer = torch.zeros_like(example.head.weight) if buffered else None

    def loss_fn(scores: TokenLogProbs, index: torch.Tensor) -> torch.Tensor:
        assert scores.entropy is not None
        seen.append(index)
        return fresh.grad_log_probs[index] * scores.log_probs + fresh.grad_entropy[index] * scores.entropy

    with installed(backend, alone=True):
        head = replace(fresh.head, grad_buffer=buffer)
        loss, _ = linear_policy_loss(fresh.hidden, head, fresh.labels, loss_fn)
        grads = torch.autograd.grad(loss, fresh.hidden if buffered else (fresh.hidden, fresh.head.weight))
    found = dict(zip(("hidden", "weight"), (*grads, buffer), strict=False))
    check_gradients(found, example)
    assert torch.equal(torch.cat(seen), fresh.live.nonzero().squeeze(1))
    counts = [None if count is None else int(count) for count in backend.counts]
    assert counts == ([int(example.live.sum()), None] if ignored else [9])


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_speculated_single_pass_raises_before_its_loss_is_run() -> None:
    fresh = small().fresh()
    labels = fresh.labels.index_fill(0, torch.tensor([3]), -1)
    with installed(Speculates(), alone=True), pytest.raises(InvalidInputError, match="got -1 at flat position 3"):
        linear_policy_loss(fresh.hidden, fresh.head, labels, lambda scores, index: pytest.fail("a loss of what?"))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("ignored", [False, True], ids=["all-live", "some-ignored"])
@pytest.mark.parametrize("asked", [{"stats": ("mean_logit",)}, {"top_k": 3}, {}], ids=["stats", "kept-set", "labels"])
def test_a_backend_may_settle_it_in_the_middle(asked: dict[str, Any], ignored: bool) -> None:
    """What comes after is run for live tokens alone: once, with all of them or with some."""
    example, backend = small(ignored=ignored), Speculates(settles=True)
    labels = example.labels if asked else example.labels.unsqueeze(1).expand(-1, 2)
    example = replace(example, labels=labels)
    with installed(ReferenceBackend(), alone=True):
        plain = example.score(**asked)
    with installed(backend, alone=True):
        out = example.score(**asked)
    assert torch.equal(out.log_probs, plain.log_probs)
    assert (out.stats is not None) == ("stats" in asked)
    assert len(backend.counts) == (2 if ignored else 1)
    assert backend.settled == (0 if ignored else 1)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_single_pass_over_a_kept_set_is_speculated() -> None:
    fresh, backend = small(ignored=False).fresh(), Speculates()
    with installed(backend, alone=True):
        loss, out = linear_policy_loss(fresh.hidden, fresh.head, fresh.labels, lambda s, index: s.log_probs, top_k=3)
    with installed(ReferenceBackend(), alone=True):
        assert torch.equal(out.log_probs, fresh.score(top_k=3).log_probs.detach())
    assert torch.equal(loss, out.log_probs.sum())
    assert [int(count) for count in backend.counts if count is not None] == [9]


def test_on_a_cpu_nothing_is_speculated() -> None:
    backend = Speculates()
    with installed(backend, alone=True):
        small().score()
    assert backend.counts == [None]
