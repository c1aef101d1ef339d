"""Extremes of values and sizes, on the GPU if there is one, else in the interpreter; beside the conformance checks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import logitless
from logitless.testing import Example, Results, check_gradients, check_results, check_scores, random_example
from logitless_triton.combine import TILES as FOLDED
from logitless_triton.config import config_for, device_facts

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32, torch.float16)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says aloud what a GPU does silently
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
TILE = config_for(device_facts(torch.device(DEVICE)), torch.float32, 8).forward


def example_of(tokens: int, **options: Any) -> Example:
    return random_example(tokens, device=DEVICE, **options)


def run(example: Example, **options: Any) -> Results:
    return example.run(backend="triton", **options)


def at(index: int) -> torch.Tensor:
    return torch.tensor([index], device=DEVICE)


# Values


@each_dtype
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_offset_through_the_product(dtype: torch.dtype, offset: float) -> None:
    """Every partial sum of a product is rounded at 1e4, and cuBLAS has several: four times what float32 makes of it."""
    example = example_of(20, vocab=140, dtype=dtype)
    hidden, weight = example.hidden.clone(), example.head.weight.clone()
    hidden[:, 0], weight[:, 0] = 1.0, offset
    example = replace(example, hidden=hidden).with_head(weight=weight)
    truth, live = example.truth(), example.live
    plain = example.to(torch.float32).reference()
    got = run(example)
    for name in ("log_probs", "entropy"):
        exact = getattr(truth.scores, name)[live]
        off, own = (float((getattr(x.scores, name)[live] - exact).detach().abs().max()) for x in (got, plain))
        assert off <= 4 * own + 1e-4
    for name, columns in (("hidden", slice(1, None)), ("weight", slice(None))):
        exact = truth.gradients[name][:, columns]
        off, own = (float((x.gradients[name][:, columns] - exact).norm()) for x in (got, plain))
        assert off <= 4 * own + 4 * torch.finfo(dtype).eps * float(exact.norm())


@each_dtype
def test_one_hot_peaks(dtype: torch.dtype) -> None:
    """Logits of 0 and 512 alone: 0 and 0 at the peak, −512 elsewhere, and gradients as exact."""
    labels, peaks = (torch.tensor(x, device=DEVICE) for x in ([0, 1, 2, 2, 4], [0, 1, 2, 3, 0]))
    eye = torch.eye(5, dtype=dtype, device=DEVICE)
    hidden, weight = (512 * eye[peaks]).requires_grad_(), eye.clone().requires_grad_()
    out = logitless.linear_log_probs(hidden, weight, labels, backend="triton")
    assert out.entropy is not None
    assert out.log_probs.tolist() == pytest.approx([0.0, 0.0, 0.0, -512.0, -512.0], rel=1e-6, abs=1e-35)
    assert out.entropy.tolist() == pytest.approx([0.0] * 5, rel=0.0, abs=1e-35)
    d_hidden, d_weight = torch.autograd.grad(out.log_probs.sum(), (hidden, weight))
    dz = eye[labels] - eye[peaks]
    torch.testing.assert_close(d_hidden, dz, rtol=0.0, atol=1e-35)
    torch.testing.assert_close(d_weight, dz.T @ hidden.detach(), rtol=0.0, atol=1e-33)


def others_are_right(got: Results, clean: Example, which: int) -> None:
    """All tokens but one have the scores and d_hidden of the clean example."""
    rest = torch.arange(clean.labels.shape[0], device=DEVICE) != which
    kept = replace(
        clean,
        hidden=clean.hidden[rest],
        labels=clean.labels[rest],
        grad_log_probs=clean.grad_log_probs[rest],
        grad_entropy=clean.grad_entropy[rest],
        head=replace(clean.head, lora=tuple((u[rest], b) for u, b in clean.head.lora)),
    )
    scores = logitless.TokenLogProbs(got.scores.log_probs[rest], got.scores.entropy[rest])
    check_scores(scores, kept)
    grads = {**dict.fromkeys(kept.leaves()), "hidden": got.gradients["hidden"][rest]}
    check_gradients(grads, kept)


@each_dtype
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("leaf", ["hidden", "lora_u0"])
def test_bad_values_stay_in_their_own_token(dtype: torch.dtype, bad: float, leaf: str) -> None:
    clean = example_of(13, dtype=dtype, lora=(3,), ignored=False)
    leaves = clean.leaves()
    leaves[leaf] = leaves[leaf].index_fill(0, at(4), bad)
    got = run(clean.with_leaves(leaves))
    others_are_right(got, clean, 4)
    assert not got.scores.log_probs[4].isfinite()
    assert got.scores.entropy[4].isnan()
    assert got.gradients["hidden"].isnan().any(-1).nonzero().flatten().tolist() == [4]


@each_dtype
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("which", ["grad_log_probs", "grad_entropy"])
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_a_bad_upstream_gradient_stays_in_its_own_token(
    dtype: torch.dtype, bad: float, which: str, keep_bytes: int
) -> None:
    """In float16 too, where all dz share one scale."""
    clean = example_of(13, dtype=dtype, ignored=False)
    got = run(replace(clean, **{which: getattr(clean, which).index_fill(0, at(4), bad)}), keep_bytes=keep_bytes)
    check_scores(got.scores, clean)
    others_are_right(got, clean, 4)
    assert (~got.gradients["hidden"].isfinite()).any(-1).nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("column", [3, TILE.columns - 1, TILE.columns, 299])
def test_a_column_at_plus_infinity_is_nan_as_in_the_reference(column: int) -> None:
    """inf − inf: no distribution is left, in any token; never a number that looks like one."""
    example = example_of(9, vocab=300, dtype=torch.float32, bias=True, ignored=False)
    assert example.head.bias is not None
    out = example.with_head(bias=example.head.bias.index_fill(0, at(column), math.inf)).score(backend="triton")
    assert out.entropy is not None
    assert not out.log_probs.isfinite().any()
    assert out.entropy.isnan().all()


# Sizes


@pytest.mark.parametrize("lowest", [-1e30, -2e38, -math.inf])
@pytest.mark.parametrize("kept", [{}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("several", [False, True])
def test_a_row_of_which_no_logit_is_above_the_lowest_is_nan(lowest: float, kept: dict[str, Any], several: bool) -> None:
    """Not what −inf beyond the vocabulary makes of it; one logit above it is enough."""
    hidden, weight = torch.ones(2, 3, device=DEVICE), torch.zeros(300, 3, device=DEVICE)
    bias = torch.full((300,), lowest, device=DEVICE)
    labels = torch.tensor([[1, 2], [298, 299]] if several else [1, 299], device=DEVICE)
    out = logitless.linear_log_probs(hidden, logitless.LMHead(weight, bias), labels, backend="triton", **kept)
    assert out.log_probs.isnan().all()
    assert out.entropy is not None
    assert out.entropy.isnan().all()
    bias[:2] = -9e29
    out = logitless.linear_log_probs(hidden, logitless.LMHead(weight, bias), labels * 0, backend="triton", **kept)
    torch.testing.assert_close(out.entropy, torch.full((2,), math.log(2.0), device=DEVICE), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("head", [{}, {"softcap": 1e3}, {"scale": 1e3}], ids=str)
@pytest.mark.parametrize("temperature", [1e-5, 1e5])
def test_the_last_tiles_end_is_masked_at_any_temperature(temperature: float, head: dict[str, float]) -> None:
    """What stands for −inf there times f stays finite, and far below every logit."""
    example = random_example(9, vocab=301, dtype=torch.float32, device=DEVICE, ignored=False)
    example = replace(example.with_head(**head), temperature=temperature)
    out = example.score(backend="triton")
    want = logitless.reference.linear_log_probs(example.hidden, example.head, example.labels, temperature=temperature)
    torch.testing.assert_close(out.entropy, want.entropy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.log_probs, want.log_probs, rtol=1e-3, atol=1e-3)


@each_dtype
@pytest.mark.parametrize(
    "vocab",
    [2, 3, 131, pytest.param(131_072, marks=pytest.mark.skipif(not HAS_GPU, reason="a minute in the interpreter"))],
)
def test_vocabularies(dtype: torch.dtype, vocab: int) -> None:
    example = example_of(3, vocab=vocab, hidden_size=2, dtype=dtype, bias=True)
    example = replace(example, labels=torch.tensor([0, -100, vocab - 1], device=DEVICE))
    check_results(run(example), example)


@pytest.mark.parametrize(
    ("tokens", "vocab"),
    [(tokens, TILE.columns + 1) for tokens in (0, 1, TILE.rows - 1, TILE.rows, TILE.rows + 1)]
    + [(TILE.rows + 1, vocab) for vocab in (TILE.columns - 1, TILE.columns)],
)
def test_around_a_tile(tokens: int, vocab: int) -> None:
    example = example_of(tokens, vocab=vocab, hidden_size=3, dtype=torch.float32, ignored=False)
    for keep_bytes in (0, 1 << 20):
        check_results(run(example, keep_bytes=keep_bytes), example)


@pytest.mark.parametrize("beyond", [1, 0] if HAS_GPU else [1])
def test_more_tiles_than_are_folded_at_a_time(beyond: int) -> None:
    example = example_of(3, vocab=FOLDED * TILE.columns + beyond, hidden_size=3, dtype=torch.float32, ignored=False)
    check_results(run(example), example)


@pytest.mark.parametrize("tokens", [15, 16, 17])
def test_around_a_chunk(tokens: int) -> None:
    """Chunks of 16 tokens, which a small workspace makes; two passes and one."""
    example = example_of(tokens, vocab=140, hidden_size=3, dtype=torch.float32, ignored=False)
    check_results(run(example, workspace_bytes=1), example)
    g, e, fresh = example.grad_log_probs, example.grad_entropy, example.fresh()
    seen: list[int] = []

    def loss_fn(scores: logitless.TokenLogProbs, index: torch.Tensor) -> torch.Tensor:
        assert scores.entropy is not None
        seen.append(len(index))
        return g[index] * scores.log_probs + e[index] * scores.entropy

    loss, _ = logitless.linear_policy_loss(
        fresh.hidden, fresh.head, fresh.labels, loss_fn, workspace_bytes=1, backend="triton"
    )
    grads = torch.autograd.grad(loss, (fresh.hidden, fresh.head.weight))
    check_gradients(dict(zip(("hidden", "weight"), grads, strict=True)), example)
    assert seen == [16] * (tokens // 16) + [tokens % 16] * (tokens % 16 > 0)


# Neighbours


@each_dtype
def test_a_tokens_bits_do_not_depend_on_its_neighbours_values(dtype: torch.dtype) -> None:
    """Scores and d_hidden; how many tokens there are, and where they stand: test_bits."""
    example = example_of(70, vocab=140, dtype=dtype, ignored=False)
    other = example_of(70, vocab=140, dtype=dtype, ignored=False, seed=1)
    mixed = {
        name: torch.cat((getattr(example, name)[:35], getattr(other, name)[35:]))
        for name in ("hidden", "labels", "grad_log_probs", "grad_entropy")
    }
    for keep_bytes in (0, 1 << 20):
        whole = run(example, keep_bytes=keep_bytes)
        part = run(replace(example, **mixed), keep_bytes=keep_bytes)
        assert torch.equal(whole.scores.log_probs[:35], part.scores.log_probs[:35])
        assert torch.equal(whole.scores.entropy[:35], part.scores.entropy[:35])
        assert not torch.equal(whole.scores.log_probs[35:], part.scores.log_probs[35:])
        if dtype != torch.float16:  # whose dz share a scale that is a power of two, and depends on all
            assert torch.equal(whole.gradients["hidden"][:35], part.gradients["hidden"][:35])
