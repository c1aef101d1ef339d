"""Scores tile by tile: the running statistics, what is kept, and what is allocated."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import logitless
from logitless.testing import AllocationGuard, MemoryTracker, check_scores, random_example
from logitless_torch.forward import Statistics

TIGHT = 1 << 19
TOKENS, VOCAB, HIDDEN = 200, 2048, 256  # the logits are three times TIGHT, and so is the weight in float32


def statistics(z: torch.Tensor, label: torch.Tensor) -> Statistics:
    """Of one block of columns, from the definition; a label of -1 is in another block."""
    inside = label >= 0
    own = z.gather(1, label.clamp(min=0)[:, None])[:, 0].masked_fill(~inside, -math.inf)
    top = z.amax(1)
    e = (z - top[:, None]).exp()
    rest = e.sum(1) - torch.where(inside, (own - top).exp(), 0.0)
    return Statistics(top, rest, (e * (z - top[:, None])).sum(1), own)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 300.0])
def test_statistics_absorb_in_any_order(offset: float) -> None:
    torch.manual_seed(0)
    z = torch.randn(6, 30, dtype=torch.float64) * 3 + offset
    label = torch.tensor([0, 9, 10, 19, 20, 29])
    log_p = z.log_softmax(1)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        running = Statistics.empty(6, z, torch.float64)
        for block in order:
            start, inside = 10 * block, (label >= 10 * block) & (label < 10 * block + 10)
            running.absorb(statistics(z[:, start : start + 10], torch.where(inside, label - start, -1)))
        log_prob, log_sum, entropy = running.finish(30)
        torch.testing.assert_close(log_prob, log_p.gather(1, label[:, None])[:, 0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(1), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(running.max + log_sum, z.logsumexp(1), rtol=1e-12, atol=1e-12)


def test_columns_at_the_lowest_finite_number_are_as_good_as_gone() -> None:
    """finfo.min is how many programs mask; over a whole tile, Σe·(its maximum − the row's) would be −inf·0."""
    example = random_example(5, vocab=2300, dtype=torch.float32, bias=True, ignored=False)
    assert example.head.bias is not None
    columns = torch.arange(2300) < 2100
    found = []
    for low in (torch.finfo(torch.float32).min, -math.inf):
        bias = example.head.bias.masked_fill(columns, low)
        masked = replace(example.with_head(bias=bias), labels=torch.arange(2200, 2205))
        got = masked.run(backend="torch", workspace_bytes=1 << 16)
        assert got.scores.entropy is not None
        found.append([got.scores.log_probs, got.scores.entropy, *got.gradients.values()])
    for lowest, gone in zip(*found, strict=True):
        torch.testing.assert_close(lowest, gone)


def test_an_empty_block_changes_nothing() -> None:
    z = torch.randn(4, 8, dtype=torch.float64)
    running = Statistics.empty(4, z, torch.float64)
    running.absorb(statistics(z, torch.tensor([0, 3, 7, 2])))
    before = [x.clone() for x in (running.max, running.rest, running.moment, running.label)]
    running.absorb(Statistics.empty(4, z, torch.float64))
    after = [running.max, running.rest, running.moment, running.label]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_asked_for_do_not_change_the_bits(dtype: torch.dtype) -> None:
    example = random_example(70, vocab=2300, dtype=dtype, per_token_temperature=True)
    want = example.fresh().score(backend="torch", workspace_bytes=TIGHT).log_probs
    for options in ({"entropy": False}, {"entropy_grad": False}, {"keep_bytes": 100_000}, {"keep_bytes": 1 << 30}):
        got = example.fresh().score(backend="torch", workspace_bytes=TIGHT, **options).log_probs
        assert torch.equal(got, want), options
    with torch.no_grad():
        assert torch.equal(example.score(backend="torch", workspace_bytes=TIGHT).log_probs, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ignored", ["none", "some-validated", "some-unvalidated"])
def test_forward_stays_within_its_workspace(dtype: torch.dtype, ignored: str) -> None:
    """No [N, V] logits, no widened weight, no copy of the live hidden states."""
    example = random_example(
        TOKENS, vocab=VOCAB, hidden_size=HIDDEN, dtype=dtype, ignored=ignored != "none", bias=True, lora=(2,)
    )
    options = {"backend": "torch", "workspace_bytes": TIGHT, "validate": ignored != "some-unvalidated"}
    with torch.no_grad(), AllocationGuard(TIGHT), MemoryTracker() as tracker:
        out = example.score(**options)
    assert tracker.peak_bytes <= TIGHT + token_shaped(TOKENS)
    check_scores(out, example)


def token_shaped(tokens: int) -> int:
    """Outputs, statistics and indices: a few numbers for each token."""
    return tokens * 8 * 16


@pytest.mark.parametrize("keep_bytes", [0, 50_000, 1 << 30])
def test_no_more_is_kept_than_asked_for(keep_bytes: int) -> None:
    example = random_example(TOKENS, vocab=VOCAB, dtype=torch.float32, ignored=False).fresh()
    with MemoryTracker() as tracker:
        out = example.score(backend="torch", workspace_bytes=TIGHT, keep_bytes=keep_bytes)
        held = tracker.live_bytes
    asked = min(keep_bytes, TOKENS * VOCAB * 4)
    assert asked - 8 <= held <= asked + token_shaped(TOKENS)
    assert tracker.peak_bytes <= held + TIGHT + token_shaped(TOKENS)
    del out


def test_without_gradients_nothing_is_kept() -> None:
    example = random_example(TOKENS, vocab=VOCAB, dtype=torch.float32)
    with AllocationGuard(TIGHT):
        example.score(backend="torch", workspace_bytes=TIGHT, keep_bytes=1 << 30)


@pytest.mark.parametrize("rest", [1e-2, 1e-5, 1e-7])
def test_a_confident_token_loses_no_digit(rest: float) -> None:
    """log_prob = -log1p(R) where the label is the maximum: log(1 + R) keeps no digit of an R below 6e-8."""
    z = torch.zeros(1, 8)
    z[0, 3] = math.log(7 / rest)
    out = logitless.linear_log_probs(z, torch.eye(8), torch.tensor([3]), backend="torch")
    exact = z.double().log_softmax(1)[0, 3]
    torch.testing.assert_close(out.log_probs[0].double(), exact, rtol=1e-5, atol=0.0)


def test_a_tokens_score_does_not_depend_on_its_neighbours_values() -> None:
    example = random_example(20, vocab=500, dtype=torch.float32, ignored=False)
    other = random_example(20, vocab=500, dtype=torch.float32, ignored=False, seed=1)
    mixed = replace(example, hidden=torch.cat((example.hidden[:10], other.hidden[10:])))
    whole, part = example.score(backend="torch"), mixed.score(backend="torch")
    assert torch.equal(whole.log_probs[:10], part.log_probs[:10])
