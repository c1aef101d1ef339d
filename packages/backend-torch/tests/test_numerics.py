"""Extremes of values and sizes, repeated and neighbouring calls: what the conformance checks leave open."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import logitless
from logitless import reference
from logitless.testing import Example, check_gradients, check_results, check_scores, random_example
from logitless.types import TokenLogProbs
from logitless_torch.tiles import CPU_TILE, TilePlan

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
ROWS, COLUMNS = CPU_TILE


def run(example: Example, **options: Any) -> Any:
    return example.run(backend="torch", **options)


def check(example: Example, **options: Any) -> Any:
    got = run(example, **options)
    check_results(got, example)
    return got


def some_nan(example: Example, at: int) -> list[int]:
    """Tokens whose scores or d_hidden are NaN, with every other token right."""
    got = run(example)
    truth = example.truth()
    scores = torch.stack((got.scores.log_probs, got.scores.entropy)).isnan().any(0)
    clean = torch.arange(example.labels.shape[0]) != at
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(
            getattr(got.scores, name)[clean].double(), getattr(truth.scores, name)[clean], rtol=1e-3, atol=1e-3
        )
    grads, right = got.gradients["hidden"][clean].double(), truth.gradients["hidden"][clean]
    torch.testing.assert_close(grads, right, rtol=0.05, atol=0.05 * float(right.abs().max()))
    return (scores | got.gradients["hidden"].isnan().any(-1)).nonzero().flatten().tolist()


# Values


@each_dtype
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_offset_through_the_product(dtype: torch.dtype, offset: float) -> None:
    """A column of hidden that is 1, and of the weight that is ±1e4: every partial sum of a product is rounded there.

    So the products' own rounding is allowed for: what float32 products of the whole make of it, twice.
    """
    example = random_example(20, vocab=300, dtype=dtype)
    hidden, weight = example.hidden.clone(), example.head.weight.clone()
    hidden[:, 0], weight[:, 0] = 1.0, offset
    example = replace(example, hidden=hidden).with_head(weight=weight)
    truth, live = example.truth(), example.live
    plain = example.to(torch.promote_types(dtype, torch.float32)).reference()
    for workspace_bytes in (1 << 14, 512 << 20):
        got = run(example, workspace_bytes=workspace_bytes)
        for name in ("log_probs", "entropy"):
            exact = getattr(truth.scores, name)[live]
            off, own = (float((getattr(x.scores, name)[live] - exact).detach().abs().max()) for x in (got, plain))
            assert off <= 2 * own + 1e-4
        # d_hidden's column 0 is 1e4·Σdz, which cancels to nothing but rounding; the others must not feel it.
        for name, columns in (("hidden", slice(1, None)), ("weight", slice(None))):
            exact = truth.gradients[name][:, columns]
            off, own = (float((x.gradients[name][:, columns] - exact).norm()) for x in (got, plain))
            assert off <= 2 * own + max(4 * torch.finfo(dtype).eps, 1e-10) * float(exact.norm())


@each_dtype
def test_one_hot_peaks(dtype: torch.dtype) -> None:
    """Logits of 0 and 512 alone: as good as 0 and 0 at the peak, −512 elsewhere, and gradients that are exact."""
    labels = torch.tensor([0, 1, 2, 2, 4])
    peaks = torch.tensor([0, 1, 2, 3, 0])
    eye = torch.eye(5, dtype=dtype)
    hidden = (512 * eye[peaks]).requires_grad_()
    weight = eye.clone().requires_grad_()
    out = logitless.linear_log_probs(hidden, weight, labels, backend="torch")
    assert out.entropy is not None
    assert out.log_probs.tolist() == pytest.approx([0.0, 0.0, 0.0, -512.0, -512.0], rel=0.0, abs=1e-35)
    assert out.entropy.tolist() == pytest.approx([0.0] * 5, rel=0.0, abs=1e-35)
    d_hidden, d_weight = torch.autograd.grad(out.log_probs.sum(), (hidden, weight))
    dz = eye[labels] - eye[peaks]
    torch.testing.assert_close(d_hidden, dz, rtol=0.0, atol=1e-35)
    torch.testing.assert_close(d_weight, dz.T @ hidden.detach(), rtol=0.0, atol=1e-33)


@each_dtype
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("leaf", ["hidden", "lora_u0"])
def test_bad_values_stay_in_their_own_token(dtype: torch.dtype, bad: float, leaf: str) -> None:
    example = random_example(13, dtype=dtype, lora=(3,), ignored=False)
    leaves = example.leaves()
    leaves[leaf] = leaves[leaf].index_fill(0, torch.tensor([4]), bad)
    assert some_nan(example.with_leaves(leaves), 4) == [4]


@each_dtype
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("which", ["grad_log_probs", "grad_entropy"])
def test_a_bad_upstream_gradient_stays_in_its_own_token(dtype: torch.dtype, bad: float, which: str) -> None:
    """In float16 too, where all dz share one scale."""
    clean = random_example(13, dtype=dtype, ignored=False)
    dirty = replace(clean, **{which: getattr(clean, which).index_fill(0, torch.tensor([4]), bad)})
    got = run(dirty)
    check_scores(got.scores, clean)
    grad = got.gradients["hidden"]
    assert (~grad.isfinite()).any(-1).nonzero().flatten().tolist() == [4]
    mended = grad.index_copy(0, torch.tensor([4]), clean.truth().gradients["hidden"][4:5].to(dtype))
    check_gradients({"hidden": mended, "weight": None}, clean)


@pytest.mark.parametrize("columns", [[3], [0, 1, 2], [156]])
@pytest.mark.parametrize("workspace_bytes", [3000, 512 << 20])
def test_a_column_at_plus_infinity_is_nan_as_in_the_reference(columns: list[int], workspace_bytes: int) -> None:
    """inf − inf: no distribution is left, in any token; never a number that looks like one."""
    example = random_example(9, dtype=torch.float64, bias=True, ignored=False)
    assert example.head.bias is not None
    example = example.with_head(bias=example.head.bias.index_fill(0, torch.tensor(columns), math.inf))
    out = example.score(backend="torch", workspace_bytes=workspace_bytes)
    want = reference.linear_log_probs(example.hidden, example.head, example.labels)
    assert out.entropy is not None
    assert want.log_probs.isnan().all()
    assert not out.log_probs.isfinite().any()
    assert out.entropy.isnan().all()


def test_minus_infinity_through_the_product() -> None:
    """A weight row of −inf under a hidden state that is positive: the column is gone, its token's scores are right."""
    example = random_example(9, dtype=torch.float64, ignored=False)
    weight = example.head.weight.index_fill(0, torch.tensor([0, 50, 156]), -math.inf)
    labels = torch.full((9,), 7)
    example = replace(example, hidden=example.hidden.abs() + 0.1, labels=labels).with_head(weight=weight)
    for workspace_bytes in (3000, 512 << 20):
        check_scores(example.score(backend="torch", workspace_bytes=workspace_bytes), example)


# Sizes


@each_dtype
@pytest.mark.parametrize("vocab", [2, 3, 131, 131_072])
def test_vocabularies(dtype: torch.dtype, vocab: int) -> None:
    example = random_example(3, vocab=vocab, hidden_size=2, dtype=dtype, bias=True)
    check(example)
    check(replace(example, labels=torch.tensor([0, -100, vocab - 1])), workspace_bytes=1 << 16)


def test_two_tokens_are_a_sigmoid() -> None:
    gap = torch.tensor([0.0, 1e-8, 1.0, -1.0, 30.0, -30.0, 700.0, -700.0], dtype=torch.float64)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    out = logitless.linear_log_probs(gap.unsqueeze(1), weight, torch.zeros(8, dtype=torch.int64), backend="torch")
    assert out.entropy is not None
    sigmoid = torch.nn.functional.logsigmoid
    torch.testing.assert_close(out.log_probs, sigmoid(gap), rtol=1e-12, atol=0.0)
    both = -(gap.sigmoid() * sigmoid(gap) + (-gap).sigmoid() * sigmoid(-gap))
    torch.testing.assert_close(out.entropy, both, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("tokens", [0, 1, ROWS - 1, ROWS, ROWS + 1])
@pytest.mark.parametrize("vocab", [COLUMNS - 1, COLUMNS, COLUMNS + 1])
def test_around_a_tile(tokens: int, vocab: int) -> None:
    check(random_example(tokens, vocab=vocab, hidden_size=3, dtype=torch.float32, ignored=False))


@pytest.mark.parametrize("tokens", [15, 16, 17])
@pytest.mark.parametrize("vocab", [31, 32, 33])
def test_around_a_tile_cut_to_the_workspace(tokens: int, vocab: int) -> None:
    """Tiles of 16 tokens by 16 columns, and single-pass chunks of 16 tokens."""
    example = random_example(tokens, vocab=vocab, hidden_size=3, dtype=torch.float64, ignored=False)
    workspace_bytes = 16 * 16 * 3 * 8 + 16 * 3 * 8 + 16 * 3 * 16
    seen: list[tuple[int, int]] = []
    init = TilePlan.__init__

    def watched(self: TilePlan, problem: Any) -> None:
        init(self, problem)
        seen.append((self.rows, self.columns))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TilePlan, "__init__", watched)
        check(example, workspace_bytes=workspace_bytes)
    assert all(rows <= 16 and columns <= 17 for rows, columns in seen)
    assert seen
    g, e = example.grad_log_probs, example.grad_entropy
    fresh = example.fresh()

    def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
        assert scores.entropy is not None
        return g[index] * scores.log_probs + e[index] * scores.entropy

    loss, _ = logitless.linear_policy_loss(
        fresh.hidden, fresh.head, fresh.labels, loss_fn, workspace_bytes=workspace_bytes, backend="torch"
    )
    grads = torch.autograd.grad(loss, (fresh.hidden, fresh.head.weight))
    check_gradients(dict(zip(("hidden", "weight"), grads, strict=True)), example)


# Repetition


@each_dtype
@pytest.mark.parametrize("options", [{}, {"keep_bytes": 1 << 20, "workspace_bytes": 1 << 14}], ids=["plain", "kept"])
def test_fifty_runs_are_equal(dtype: torch.dtype, options: dict[str, Any]) -> None:
    example = random_example(20, vocab=100, dtype=dtype, bias=True, lora=(2,), per_token_temperature=True)
    first = run(example, **options)
    for _ in range(49):
        again = run(example, **options)
        assert torch.equal(again.scores.log_probs, first.scores.log_probs)
        assert torch.equal(again.scores.entropy, first.scores.entropy)
        assert all(torch.equal(again.gradients[name], grad) for name, grad in first.gradients.items())


@each_dtype
def test_a_tokens_bits_do_not_depend_on_its_neighbours_values(dtype: torch.dtype) -> None:
    """Scores and d_hidden, where shapes and the workspace are the same, as the torch backend promises."""
    example = random_example(40, vocab=300, dtype=dtype, ignored=False)
    other = random_example(40, vocab=300, dtype=dtype, ignored=False, seed=1)
    mixed = {
        name: torch.cat((getattr(example, name)[:20], getattr(other, name)[20:]))
        for name in ("hidden", "labels", "grad_log_probs", "grad_entropy")
    }
    whole, part = run(example, workspace_bytes=1 << 15), run(replace(example, **mixed), workspace_bytes=1 << 15)
    assert torch.equal(whole.scores.log_probs[:20], part.scores.log_probs[:20])
    assert torch.equal(whole.scores.entropy[:20], part.scores.entropy[:20])
    assert not torch.equal(whole.scores.log_probs[20:], part.scores.log_probs[20:])
    assert torch.equal(whole.gradients["hidden"][:20], part.gradients["hidden"][:20])
