"""The forward launched before the host knows which tokens are live, and what the last backward may overwrite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import logitless
from logitless._live import Live
from logitless.errors import InvalidInputError
from logitless.testing.divergence import check_divergence, random_divergence
from logitless.testing.example import Example, random_example
from logitless.testing.tolerance import check_gradients, check_results
from logitless_triton import forward, held
from logitless_triton.rounding import multiply_

HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float32)
WAYS: list[dict[str, Any]] = [{}, {"keep_bytes": 1 << 20}, {"keep_bytes": 1 << 20, "entropy_grad": False}]
each_way = pytest.mark.parametrize("options", WAYS, ids=["recompute", "kept", "kept-exponentials"])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def example_of(ignored: bool) -> Example:
    return random_example(40, vocab=301, hidden_size=24, dtype=DTYPE, device=DEVICE, ignored=ignored)


@pytest.fixture
def speculating(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the answer is there at once; here it is hidden until it is asked for, as on a GPU."""
    if not HAS_GPU:
        hidden = property(lambda self: self._facts[0] if self._known is None else None)
        monkeypatch.setattr(Live, "on_device", hidden)


@pytest.mark.usefixtures("speculating")
@pytest.mark.parametrize("ignored", [False, True], ids=["all-live", "some-ignored"])
@each_way
def test_speculation_changes_nothing(options: dict[str, Any], ignored: bool) -> None:
    example = example_of(ignored)
    checked, unchecked = (example.score(backend="triton", validate=v, **options) for v in (True, False))
    assert torch.equal(checked.log_probs, unchecked.log_probs) or not HAS_GPU
    if not options.get("entropy_grad", True):
        example = replace(example, grad_entropy=torch.zeros_like(example.grad_entropy))
    check_results(example.run(backend="triton", **options), example)


@pytest.mark.usefixtures("speculating")
@pytest.mark.parametrize("ignored", [False, True], ids=["all-live", "some-ignored"])
@pytest.mark.parametrize(
    "asked", [{"top_k": 5}, {"top_p": 0.9}, {"stats": ("sum_sq_probs",)}, {}], ids=["k", "p", "stats", "labels"]
)
def test_logits_that_were_not_made_are_not_looked_at(
    asked: dict[str, Any], ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first kernel is launched; what reads the logits that it holds waits, and runs for live tokens alone."""
    example, events = example_of(ignored), []
    if not asked:
        example = replace(example, labels=example.labels.unsqueeze(1).expand(-1, 2))
    scan, gather = forward.scan, torch.Tensor.gather
    for module in (forward, held):
        monkeypatch.setattr(module, "scan", lambda work, rows, *a: (events.append(rows.count), scan(work, rows, *a)))
    monkeypatch.setattr(torch.Tensor, "gather", lambda x, *a: (events.append("read"), gather(x, *a))[1])
    unspeculated = example.score(backend="triton", validate=False, **asked)
    before, events[:] = list(events), []
    out = example.score(backend="triton", **asked)
    live = int((example.labels != -100).reshape(40, -1).any(1).sum())
    assert before == [40, "read"]
    assert events == ([40, live, "read"] if ignored else [40, "read"])
    assert torch.equal(out.log_probs, unspeculated.log_probs)


@pytest.mark.usefixtures("speculating")
@pytest.mark.parametrize("ignored", [False, True], ids=["all-live", "some-ignored"])
def test_a_single_pass_over_a_kept_set_reads_no_logits_that_were_not_made(
    ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, found = example_of(ignored), []
    find = held._find
    monkeypatch.setattr(held, "_find", lambda held, rows, *a: found.append(rows.count) or find(held, rows, *a))
    fresh = example.fresh()
    loss, out = logitless.linear_policy_loss(
        fresh.hidden, fresh.head, fresh.labels, lambda scores, index: scores.log_probs, backend="triton", top_k=5
    )
    assert found == [int((example.labels != -100).sum())]
    want = example.score(backend="triton", top_k=5)
    assert torch.equal(out.log_probs, want.log_probs)
    torch.testing.assert_close(loss.detach(), want.log_probs.sum())


@pytest.mark.usefixtures("speculating")
@pytest.mark.parametrize("ignored", [False, True], ids=["all-live", "some-ignored"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_a_divergence_is_speculated_up_to_its_first_logits(
    direction: str, ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from logitless_triton import kl_products  # with Triton, when its interpreter has been chosen

    case = random_divergence(
        40, direction=direction, vocab=301, hidden_size=24, dtype=DTYPE, device=DEVICE, ignored=ignored
    )
    seen, scan, student = [], forward.scan, kl_products._launch
    for module in (held, kl_products):
        monkeypatch.setattr(module, "scan", lambda work, rows, *a: (seen.append(rows.count), scan(work, rows, *a)))
    monkeypatch.setattr(kl_products, "_launch", lambda *a, **k: (seen.append("student"), student(*a, **k)))
    value = case.value(backend="triton")
    live = int((case.student.labels != -100).sum())
    assert seen == ([40] if ignored else []) + [live, live if direction == "jsd" else "student"]
    check_divergence((value.detach(), case.run(backend="triton")[1]), case)


@pytest.mark.usefixtures("speculating")
def test_a_bad_label_still_raises_at_the_call() -> None:
    example = example_of(False)
    with pytest.raises(InvalidInputError, match="labels: got 301 at flat position 3"):
        replace(example, labels=example.labels.index_fill(0, torch.tensor([3], device=DEVICE), 301)).score(
            backend="triton"
        )


@each_way
def test_a_retained_graph_gives_the_same_bits_again(options: dict[str, Any]) -> None:
    fresh = example_of(False).fresh()
    out = fresh.score(backend="triton", **options)
    outputs, upstream = [out.log_probs], [fresh.grad_log_probs]
    if options.get("entropy_grad", True):
        outputs, upstream = [*outputs, out.entropy], [*upstream, fresh.grad_entropy]
    leaves = (fresh.hidden, fresh.head.weight)
    first, second = (torch.autograd.grad(outputs, leaves, upstream, retain_graph=True) for _ in range(2))
    last = torch.autograd.grad(outputs, leaves, upstream)
    for one, other, final in zip(first, second, last, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(final, one, rtol=2e-2 if HAS_GPU else 1e-5, atol=1e-3 if HAS_GPU else 1e-6)


def test_the_last_backward_is_right_where_it_overwrites() -> None:
    example = example_of(False)
    check_gradients(example.run(backend="triton", keep_bytes=1 << 20).gradients, example)


@pytest.mark.skipif(not HAS_GPU, reason="off a GPU it is torch's own mul_")
@pytest.mark.parametrize("factor", [1.0, 0.0, -2.5, float("nan")])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (4099, 1031)])
def test_multiply_is_mul(factor: float, shape: tuple[int, int]) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        x, by = torch.randn(shape, device="cuda", dtype=dtype), torch.tensor(factor, device="cuda")
        expected = (x.float() * by).to(dtype)
        assert multiply_(x, by) is x
        assert torch.equal(x.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.usefixtures("speculating")
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("ignored", [False, True], ids=["all-live", "some-ignored"])
def test_speculation_changes_no_single_pass(ignored: bool, chunks: int) -> None:
    example, seen = random_example(300, vocab=301, hidden_size=24, dtype=DTYPE, device=DEVICE, ignored=ignored), []
    fresh = example.fresh()

    def loss_fn(scores: logitless.TokenLogProbs, index: torch.Tensor) -> torch.Tensor:
        assert scores.entropy is not None
        seen.append(index)
        return fresh.grad_log_probs[index] * scores.log_probs + fresh.grad_entropy[index] * scores.entropy

    room = 1 << 29 if chunks == 1 else 256 * 3 * (128 * fresh.hidden.element_size() + 4)
    loss, _ = logitless.linear_policy_loss(
        fresh.hidden, fresh.head, fresh.labels, loss_fn, backend="triton", workspace_bytes=room
    )
    leaves = fresh.leaves()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    check_gradients(dict(zip(leaves, grads, strict=True)), example)
    assert torch.equal(torch.cat(seen), fresh.live.nonzero().squeeze(1))
    assert ignored or len(seen) == chunks


def test_single_pass_takes_an_upstream_gradient() -> None:
    fresh = example_of(False).fresh()

    def loss_fn(scores: logitless.TokenLogProbs, index: torch.Tensor) -> torch.Tensor:
        assert scores.entropy is not None
        return fresh.grad_log_probs[index] * scores.log_probs + fresh.grad_entropy[index] * scores.entropy

    found = []
    for factor in (1.0, 0.5):
        loss, _ = logitless.linear_policy_loss(fresh.hidden, fresh.head, fresh.labels, loss_fn, backend="triton")
        found.append(torch.autograd.grad(loss * factor, (fresh.hidden, fresh.head.weight)))
    for one, half in zip(*found, strict=True):
        assert torch.equal(one * 0.5, half)
