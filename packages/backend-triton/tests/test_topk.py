"""Scores over the tokens that a sampler kept: values, gradients, ties, the border, what is read and held."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from full_logits import DEVICE, FULL, HAS_GPU, STATS, check, example_of, truth

import logitless
from logitless import reference
from logitless.testing import AllocationGuard
from logitless_triton import forward as forward_module
from logitless_triton import held as held_module
from logitless_triton import rows as rows_module
from logitless_triton.config import Config, Device, Tile, trying
from logitless_triton.layout import held_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says aloud what a GPU does silently


@pytest.mark.parametrize(
    ("option", "kept"),
    [({}, {"top_k": 20, "top_p": 0.6}), (FULL, {"top_k": 7}), (FULL, {"top_p": 0.8, "validate": False})],
    ids=["plain-k-p", "full-k", "full-p"],
)
def test_equals_the_logits_in_full(option: dict[str, Any], kept: dict[str, Any]) -> None:
    check(example_of(**option), **kept)


def test_a_scale_of_0_makes_ties_of_all() -> None:
    example = example_of()
    head = replace(example.head, scale=0.0)
    out = logitless.linear_log_probs(example.hidden, head, example.labels, top_k=3, top_p=0.5, backend="triton")
    right = reference.linear_log_probs(example.hidden, head, example.labels, top_k=3, top_p=0.5)
    torch.testing.assert_close(out.log_probs, right.log_probs)
    torch.testing.assert_close(out.entropy, right.entropy)


def test_float16() -> None:
    check(example_of(dtype=torch.float16), top_k=9, top_p=0.9)


def test_chunks_of_few_tokens() -> None:
    """What has room for the logits of two tokens, and of none."""
    assert [held_rows(13, 300, 128, room, short=True) for room in (6800, 1)] == [2, 1]
    check(example_of(4), top_k=7, workspace_bytes=6800)
    check(example_of(2), top_k=7, workspace_bytes=1)


@pytest.mark.skipif(HAS_GPU, reason="a GPU does so by itself")
def test_as_on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits stored through a descriptor, in quarters of a tile, and a program for each row."""
    blocks: list[tuple[torch.dtype, list[int]]] = []
    original = forward_module.descriptor

    def descriptor(tensor: torch.Tensor, block: list[int]) -> Any:
        blocks.append((tensor.dtype, block))
        return original(tensor, block)

    monkeypatch.setattr(forward_module, "descriptor", descriptor)
    monkeypatch.setattr(rows_module, "device_facts", lambda device: Device((9, 0), 3))
    tile = Tile(32, 64, 16, warps=4, stages=2, per_sm=2)
    with trying(Config(tile, tile, tile)):
        check(example_of(3, torch.float16, ignored=False), top_k=20, top_p=0.8)
    assert (torch.float32, [32, 16]) in blocks


def logits_of(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and a weight whose products are the logits [N, V], exactly."""
    return torch.eye(len(z), device=DEVICE), z.T.contiguous().to(DEVICE)


def kept_of(z: torch.Tensor, **kept: Any) -> torch.Tensor:
    """[N, V] what the op keeps of rows of logits."""
    hidden, weight = logits_of(z)
    labels = torch.arange(z.shape[1], device=DEVICE).expand(z.shape).contiguous()
    stats = logitless.linear_log_probs(hidden, weight, labels, backend="triton", stats=("is_kept",), **kept).stats
    assert stats is not None
    return stats["is_kept"].cpu()


@pytest.mark.parametrize(
    "kept",
    [{"top_k": 1}, {"top_k": 40}, {"top_k": 299}, {"top_p": 0.05}, {"top_p": 0.999}, {"top_k": 90, "top_p": 0.95}],
    ids=str,
)
def test_any_row(kept: dict[str, Any]) -> None:
    """Flat and peaked rows, with and without ties, negative ones and large ones: every column is told as it is."""
    noise = torch.Generator().manual_seed(3)
    z = torch.randn(20, 300, generator=noise) * torch.tensor([0.01, 0.5, 2.0, 9.0]).repeat(5).unsqueeze(1)
    z[4:8] += torch.tensor([[-40.0], [40.0], [1e4], [-1e4]])
    z[8:12] = z[8:12].round()  # ties in every tile
    z[12] = 0.0
    z[13] = z[13].clamp(max=0.0) * 0.0  # some of them −0.0
    z[14] = -z[14].abs()
    z[15, 7:] = -1e20
    z[16] = z[16].sort().values
    z[17] *= 1e-4 if "top_p" in kept else 1e-30  # where masses are equal the reference's sort of them is not defined
    assert torch.equal(kept_of(z, **kept), reference.keep(z.double(), **kept))


def test_ten_tokens_three_kept() -> None:
    """log_prob − log Σ kept p; a label outside is scored as if it alone were added."""
    z = torch.arange(10.0).expand(4, 10)
    hidden, weight = logits_of(z)
    labels = torch.tensor([9, 7, 6, 0], device=DEVICE)
    got = logitless.linear_log_probs(hidden, weight, labels, backend="triton", top_k=3, stats=("is_kept",))
    top = sum(map(math.exp, (7, 8, 9)))
    want = [9 - math.log(top), 7 - math.log(top), 6 - math.log(top + math.exp(6)), -math.log(top + 1)]
    torch.testing.assert_close(got.log_probs.cpu(), torch.tensor(want), rtol=1e-6, atol=1e-6)
    assert got.stats is not None
    assert got.stats["is_kept"].tolist() == [True, True, False, False]


def test_confident_tokens_keep_their_digits() -> None:
    """log_prob is −log1p of what is kept beside the largest logit."""
    z = torch.tensor([[12.0, 0.0, 1.0, -1.0]])
    hidden, weight = logits_of(z)
    got = logitless.linear_log_probs(hidden, weight, torch.zeros(1, dtype=torch.long, device=DEVICE), top_k=3)
    assert got.log_probs.item() == pytest.approx(-math.log1p(math.exp(-12) + math.exp(-11)), rel=1e-5)


def test_a_set_of_everything_is_a_plain_call() -> None:
    example = example_of()
    want = example.run(backend="triton")
    for kept in ({"top_k": 300}, {"top_k": 10**6}, {"top_p": 1.0}):
        got = example.run(backend="triton", **kept)
        assert torch.equal(got.scores.log_probs, want.scores.log_probs)
        assert all(torch.equal(got.gradients[name], want.gradients[name]) for name in want.gradients)


def test_single_pass_and_outputs_asked_for() -> None:
    """The same bits, whatever else is wanted; the gradients of the single pass are the reference's."""
    example, kept = example_of(bias=True), {"top_k": 20, "top_p": 0.6}
    with torch.no_grad():
        want = example.score(backend="triton", **kept).log_probs
    for options in ({"entropy": False}, {"keep_bytes": 1 << 20, "stats": STATS}):
        assert torch.equal(example.fresh().score(backend="triton", **options, **kept).log_probs, want), options
    fresh, g, e = example.fresh(), example.grad_log_probs, example.grad_entropy

    def loss_fn(scores: logitless.TokenLogProbs, index: torch.Tensor) -> torch.Tensor:
        assert scores.entropy is not None
        return g[index] * scores.log_probs + e[index] * scores.entropy

    options = {"backend": "triton", "workspace_bytes": 14_000, **kept}
    loss, out = logitless.linear_policy_loss(fresh.hidden, fresh.head, fresh.labels, loss_fn, **options)
    grads = torch.autograd.grad(loss, list(fresh.leaves().values()))
    if HAS_GPU:  # off a GPU a product's bits depend on a row's place
        assert torch.equal(out.log_probs, want)
    torch.testing.assert_close(out.log_probs, want, rtol=1e-6, atol=1e-6)
    for (name, right), grad in zip(truth(example, **kept).gradients.items(), grads, strict=True):
        assert right is not None
        assert float((grad.double() - right).norm() / right.norm()) < 1e-5, name


def test_grad_buffer_and_a_frozen_hidden() -> None:
    example = example_of()
    buffer = torch.zeros_like(example.head.weight)
    got = example.with_head(grad_buffer=buffer).run(backend="triton", frozen=("hidden",), top_k=4)
    assert got.gradients["hidden"] is None
    torch.testing.assert_close(buffer.double(), truth(example, top_k=4).gradients["weight"], rtol=1e-4, atol=1e-5)


def test_nothing_is_done_for_tokens_that_are_ignored() -> None:
    example = example_of()
    dead = replace(example, labels=torch.full_like(example.labels, -100))
    got = dead.run(backend="triton", stats=STATS, top_k=5)
    assert got.scores.log_probs.count_nonzero() == 0
    assert all(grad is not None and grad.count_nonzero() == 0 for grad in got.gradients.values())


def test_not_a_number_stays_in_its_token() -> None:
    """In a hidden state, and in a column of a tile that nothing else would have read."""
    example = example_of(6, ignored=False)
    options: dict[str, Any] = {"backend": "triton", "top_k": 2, "top_p": 0.9}
    want = example.score(**options)
    example.hidden[4] = math.nan
    got = example.run(**options)
    others = torch.arange(6, device=DEVICE) != 4
    assert got.scores.log_probs[4].isnan()
    assert got.scores.entropy is not None
    assert got.scores.entropy[4].isnan()
    torch.testing.assert_close(got.scores.log_probs[others], want.log_probs[others], rtol=0, atol=0)
    assert got.gradients["hidden"] is not None
    assert got.gradients["hidden"][others].isfinite().all()
    bias = torch.zeros(300, device=DEVICE)
    bias[256:], bias[290] = -100.0, math.nan
    assert example_of(6, ignored=False).with_head(bias=bias).score(**options).log_probs.isnan().all()


def test_columns_of_minus_infinity() -> None:
    """A tile without any finite logit, and fewer finite ones than k."""
    example = example_of(9, ignored=False)
    bias = torch.zeros(300, device=DEVICE)
    bias[60:] = -math.inf
    masked = example.with_head(bias=bias)
    smaller = example.with_head(weight=example.head.weight[:60].contiguous())
    labels = example.labels % 60
    for kept in ({"top_k": 5}, {"top_p": 0.7}, {"top_k": 90}, {"top_k": 90, "top_p": 0.9}):
        got = replace(masked, labels=labels).score(backend="triton", **kept)
        want = truth(replace(smaller, labels=labels), **kept).scores
        torch.testing.assert_close(got.log_probs.double(), want.log_probs, rtol=1e-5, atol=1e-5)
        assert got.entropy is not None
        torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(HAS_GPU, reason="what the kernels' launchers allocate is seen on the CPU")
@pytest.mark.parametrize("kept", [{"top_k": 7}, {"top_p": 0.9}], ids=str)
def test_no_logits_in_full(kept: dict[str, Any]) -> None:
    example = example_of(12, vocab=1000, hidden_size=16)
    workspace = 1 << 14  # a third of the logits
    with AllocationGuard(workspace), torch.no_grad():
        example.score(backend="triton", workspace_bytes=workspace, **kept)


@pytest.mark.parametrize("kept", [{"top_k": 2}, {"top_p": 0.8}], ids=str)
def test_few_tiles_are_read(kept: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies elsewhere may be anything once the tiles' maxima are known."""
    example = example_of(9, vocab=2000, ignored=False, std=12.0)
    example = replace(example, labels=(example.hidden @ example.head.weight.T).argmax(1))
    want, original, counts = truth(example, **kept), held_module.listed, []

    def listed(*arguments: Any, **options: Any) -> Any:
        logits, whole, bracket = original(*arguments, **options)
        (rows, tiles), lengths = logits.ids.shape, logits.count.tolist()
        counts.extend(lengths)
        for row, count in enumerate(lengths):
            read = torch.zeros(tiles, dtype=torch.bool)
            read[logits.ids[row, :count].long().cpu()] = True
            logits.held.view(rows, tiles, -1)[row, ~read] = 1e6
        return logits, whole, bracket

    monkeypatch.setattr(held_module, "listed", listed)
    got = example.run(backend="triton", **kept)
    assert sum(counts) < 9 * 16 / 2
    torch.testing.assert_close(got.scores.log_probs.double(), want.scores.log_probs, rtol=1e-5, atol=5e-5)
    for name, right in want.gradients.items():
        found = got.gradients[name]
        assert found is not None
        assert right is not None
        assert float((found.double() - right).norm() / right.norm()) < 1e-4, name


def test_line_between_kept_and_dropped() -> None:
    """Halfway, so that a backward whose logits are a little off draws it alike; below all where nothing is dropped."""
    above = torch.tensor([2.0, 1.0, 3.0, 1.0])
    near = torch.nextafter(above[1], torch.tensor(0.0)).item()
    below = torch.tensor([1.0, near, -math.inf, -1024.0])
    assert held_module._line(above, below).tolist() == [1.5, 1.0, -math.inf, -511.5]
