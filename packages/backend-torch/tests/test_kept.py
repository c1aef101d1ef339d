"""Scores over the tokens that a sampler kept: values, gradients, ties, the border, memory, cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import logitless
from logitless import LMHead, reference
from logitless._call import make_call
from logitless._ops import linear_log_probs_op
from logitless.testing import AllocationGuard, Example, MemoryTracker, ProductCounter, Results, random_example
from logitless_torch import kept as kept_module
from logitless_torch import tiles

FULL: dict[str, Any] = {
    "bias": True,
    "scale": 0.8,
    "softcap": 5.0,
    "vocab_size": 150,
    "lora": (2, 3),
    "per_token_temperature": True,
}
SETS: dict[str, dict[str, Any]] = {
    "k": {"top_k": 7},
    "k1": {"top_k": 1},
    "p": {"top_p": 0.8},
    "k-p": {"top_k": 20, "top_p": 0.6},
}
STATS = ("sum_sq_probs", "mean_logit", "is_argmax", "is_kept")
each_set = pytest.mark.parametrize("kept", SETS.values(), ids=SETS)


def truth(example: Example, **kept: Any) -> Results:
    """From the logits in full."""
    fresh = example.to(torch.float64).fresh()
    out = reference.linear_log_probs(
        fresh.hidden, fresh.head, fresh.labels, temperature=fresh.temperature, stats=STATS, **kept
    )
    return Results(out, fresh.pull(out))


def check(example: Example, rtol: float, atol: float, **options: Any) -> Results:
    """Scores, statistics and gradients against the logits in full."""
    got = example.run(backend="torch", stats=STATS, **options)
    want = truth(example, **{name: options[name] for name in ("top_k", "top_p") if name in options})
    pairs = [(got.scores.log_probs, want.scores.log_probs), (got.scores.entropy, want.scores.entropy)]
    pairs += [(got.gradients[name], want.gradients[name]) for name in want.gradients]
    assert got.scores.stats is not None
    assert want.scores.stats is not None
    pairs += [(got.scores.stats[name], want.scores.stats[name]) for name in STATS]
    for mine, right in pairs:
        assert mine is not None
        assert right is not None
        assert (mine.dtype == torch.bool) == (right.dtype == torch.bool)
        torch.testing.assert_close(mine.double(), right.double(), rtol=rtol, atol=atol)
    return got


@each_set
@pytest.mark.parametrize("workspace_bytes", [1, 6000, 512 << 20])
@pytest.mark.parametrize("option", [{}, FULL], ids=["plain", "full"])
def test_equals_the_logits_in_full(kept: dict[str, Any], workspace_bytes: int, option: dict[str, Any]) -> None:
    check(random_example(21, **option), 1e-10, 1e-12, workspace_bytes=workspace_bytes, **kept)


@each_set
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(kept: dict[str, Any], dtype: torch.dtype) -> None:
    """Scores as exact as ever; gradients rounded to the inputs' dtype."""
    example = random_example(21, dtype=dtype, std=4.0)
    got, want = example.run(backend="torch", **kept), truth(example, **kept)
    torch.testing.assert_close(got.scores.log_probs.double(), want.scores.log_probs, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(got.scores.entropy.double(), want.scores.entropy, rtol=1e-5, atol=2e-5)
    for name, grad in want.gradients.items():
        mine = got.gradients[name]
        assert mine is not None
        assert mine.dtype == dtype
        error = float((mine.double() - grad).norm() / grad.norm())
        assert error < {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]


@each_set
def test_gradcheck(kept: dict[str, Any]) -> None:
    """Finite differences, the set held constant: no logit is near its border."""
    example = random_example(5, vocab=30, hidden_size=4, bias=True, softcap=9.0, scale=1.2)

    def scores(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = example.with_leaves(dict(zip(example.leaves(), leaves, strict=True)))
        out = named.score(backend="torch", **kept)
        assert out.entropy is not None
        return out.log_probs, out.entropy

    assert torch.autograd.gradcheck(scores, tuple(example.fresh().leaves().values()), eps=1e-7, atol=1e-5)


def ten(*labels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden, weight and labels such that the ten logits are 0, 1, ..., 9 for every label."""
    weight = torch.arange(10, dtype=torch.float64).unsqueeze(1)
    return torch.ones(len(labels), 1, dtype=torch.float64), weight, torch.tensor(labels)


def test_ten_tokens_three_kept() -> None:
    """log_prob − log Σ kept p."""
    hidden, weight, labels = ten(9, 8, 7)
    plain = logitless.linear_log_probs(hidden, weight, labels).log_probs
    log_kept = plain.exp().sum().log()
    assert log_kept.item() == pytest.approx(
        math.log((math.e**9 + math.e**8 + math.e**7) / sum(map(math.exp, range(10))))
    )
    for options in ({"top_k": 3}, {"top_p": 0.95}):
        got = logitless.linear_log_probs(hidden, weight, labels, **options)
        torch.testing.assert_close(got.log_probs, plain - log_kept, rtol=1e-13, atol=1e-14)
        p = (plain - log_kept).exp()
        torch.testing.assert_close(got.entropy, -(p * p.log()).sum().expand(3), rtol=1e-13, atol=1e-14)


def test_the_ratio_is_one_where_the_untruncated_score_is_biased() -> None:
    """A rollout engine that sampled from three tokens of ten reports the log-probs of what it sampled from."""
    hidden, weight, labels = ten(9, 8, 7)
    rollout = (hidden @ weight.T)[:, 7:].log_softmax(-1).gather(1, (labels - 7).unsqueeze(1)).squeeze(1)
    biased = (logitless.linear_log_probs(hidden, weight, labels).log_probs - rollout).exp()
    ours = (logitless.linear_log_probs(hidden, weight, labels, top_k=3).log_probs - rollout).exp()
    assert torch.all(biased < 0.951)
    torch.testing.assert_close(ours, torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-14)
    again = logitless.linear_log_probs(hidden, weight, labels, top_k=3).log_probs
    new = logitless.linear_log_probs(hidden.requires_grad_(), weight, labels, top_k=3, entropy=False).log_probs
    assert torch.equal((new - again).exp(), torch.ones(3, dtype=torch.float64))


def test_a_label_outside_is_scored_as_if_it_were_added() -> None:
    hidden, weight, labels = ten(6, 0)
    got = logitless.linear_log_probs(hidden, weight, labels, top_k=3, stats=("is_kept",))
    top = sum(map(math.exp, (7, 8, 9)))
    want = [6 - math.log(top + math.exp(6)), 0 - math.log(top + 1)]
    torch.testing.assert_close(got.log_probs, torch.tensor(want, dtype=torch.float64), rtol=1e-13, atol=0)
    assert got.stats is not None
    assert got.stats["is_kept"].tolist() == [False, False]
    inside = logitless.linear_log_probs(hidden, weight, labels, top_k=4).log_probs[0]
    torch.testing.assert_close(got.log_probs[0], inside, rtol=1e-13, atol=0)  # just inside, the same number


TIED = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])


def kept_of(z: torch.Tensor, **kept: Any) -> list[bool]:
    """What the op keeps of a row of logits, label by label."""
    count = z.shape[1]
    labels = torch.arange(count).unsqueeze(0)
    out = logitless.linear_log_probs(
        torch.ones(1, 1), z.T.contiguous(), labels, backend="torch", stats=("is_kept",), **kept
    )
    assert out.stats is not None
    return out.stats["is_kept"][0].tolist()


def test_ties_at_the_border_are_all_kept() -> None:
    assert kept_of(TIED, top_k=1) == [True, False, False, False, False]
    assert kept_of(TIED, top_k=2) == [True, True, True, True, False]
    p = TIED.softmax(-1)[0]
    assert kept_of(TIED, top_p=float(p[0]) * 0.99) == [True, False, False, False, False]
    assert kept_of(TIED, top_p=float(p[0]) + 0.01) == [True, True, True, True, False]
    assert kept_of(TIED, top_k=2, top_p=0.999) == [True, True, True, True, False]


def samplers(z: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """What transformers' warpers and vLLM's PyTorch sampler leave: written from their definition."""
    if top_k is not None:
        z = z.masked_fill(z < z.topk(min(top_k, z.shape[-1])).values[..., -1:], -math.inf)
    if top_p is not None:
        ascending, order = z.sort(-1)
        drop = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
        drop[..., -1] = False
        z = z.masked_fill(drop.scatter(-1, order, drop), -math.inf)
    return z > -math.inf


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 40),
    top_k=st.none() | st.integers(1, 70),
    top_p=st.none() | st.floats(0.02, 0.995),
    std=st.sampled_from([0.1, 2.0, 8.0]),
    workspace_bytes=st.sampled_from([3000, 512 << 20]),
    candidates=st.sampled_from([1, 3, 1024]),
    validate=st.booleans(),
)
def test_any_set(
    seed: int,
    vocab: int,
    top_k: int | None,
    top_p: float | None,
    std: float,
    workspace_bytes: int,
    candidates: int,
    validate: bool,
) -> None:
    """The samplers' set, where no logits are equal; values and gradients, however many candidates are looked at."""
    example = random_example(6, vocab=vocab, hidden_size=4, seed=seed, std=std)
    z = example.hidden @ example.head.weight.T
    assert torch.equal(reference.keep(z, top_k, top_p), samplers(z, top_k, top_p))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CANDIDATES", candidates)
        check(example, 1e-9, 1e-11, top_k=top_k, top_p=top_p, workspace_bytes=workspace_bytes, validate=validate)


def test_a_backward_whose_logits_are_rounded_otherwise_draws_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least of the kept logits would else be left out, or the largest of the others taken in."""
    example = random_example(21, dtype=torch.float32).fresh()
    leaves = list(example.leaves().values())
    weights = example.grad_log_probs.float()
    exact = torch.autograd.grad(example.score(backend="torch", top_k=7).log_probs, leaves, weights)
    out, logits = example.score(backend="torch", top_k=7), tiles.TilePlan.logits
    for factor in (1.0 - 1e-6, 1.0 + 1e-6):

        def off(plan: Any, rows: Any, columns: Any, z: torch.Tensor, factor: float = factor) -> None:
            logits(plan, rows, columns, z)
            z.mul_(factor)

        monkeypatch.setattr(tiles.TilePlan, "logits", off)
        found = torch.autograd.grad(out.log_probs, leaves, weights, retain_graph=True)
        for mine, right in zip(found, exact, strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_the_line_between_neighbouring_floats() -> None:
    """Their mean is one of them, and here the one that is not kept."""
    dropped = torch.tensor(1.0)
    least = torch.nextafter(dropped, dropped + 1)
    assert (dropped + least) / 2 == dropped
    weight = torch.stack((torch.tensor(2.0), least, dropped, torch.tensor(0.0))).unsqueeze(1).requires_grad_()
    out = logitless.linear_log_probs(torch.ones(1, 1), weight, torch.zeros(1).long(), top_k=2, backend="torch")
    (grad,) = torch.autograd.grad(out.log_probs, weight, torch.ones(1))
    assert (grad.flatten() != 0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_and_their_order(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.tensor([-math.inf, info.min, -1.5, -info.tiny, 0.0, info.tiny, 1.0, info.max, math.inf], dtype=dtype)
    keys = kept_module._ordered(x)
    assert torch.all(keys[1:] > keys[:-1])
    assert torch.equal(kept_module._unordered(keys, dtype), x)


def test_search_beyond_the_candidates_draws_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat rows, whose kept tokens are more than the candidates, beside peaked ones."""
    example = random_example(12, vocab=400, hidden_size=8, std=0.5, ignored=False)
    example.hidden[::2] *= 40
    want = example.run(backend="torch", top_p=0.9)
    searched = []
    original = kept_module._Block._search
    monkeypatch.setattr(
        kept_module._Block, "_search", lambda self, w, rows: searched.append(rows) or original(self, w, rows)
    )
    monkeypatch.setattr(tiles, "CANDIDATES", 16)
    got = example.run(backend="torch", top_p=0.9)
    assert [rows.tolist() for rows in searched] == [[1, 3, 5, 7, 9, 11]]
    torch.testing.assert_close(got.scores.log_probs, want.scores.log_probs, rtol=1e-12, atol=1e-12)
    unasked = example.run(backend="torch", top_p=0.9, validate=False)
    assert searched[-1] is None
    torch.testing.assert_close(unasked.scores.log_probs, want.scores.log_probs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kept", [{"top_k": 1000}, {"top_p": 1.0}, {"top_k": 157}], ids=str)
def test_a_set_of_everything_is_a_plain_call(kept: dict[str, Any]) -> None:
    example = random_example(9, dtype=torch.float32)
    want, got = example.run(backend="torch"), example.run(backend="torch", **kept)
    assert torch.equal(got.scores.log_probs, want.scores.log_probs)
    assert all(torch.equal(got.gradients[name], want.gradients[name]) for name in want.gradients)


@each_set
def test_outputs_asked_for_do_not_change_the_bits(kept: dict[str, Any]) -> None:
    example = random_example(30, dtype=torch.float32)
    want = example.fresh().score(backend="torch", **kept).log_probs
    others = ({"entropy": False}, {"entropy_grad": False}, {"keep_bytes": 1 << 20}, {"stats": STATS})
    for options in others:
        assert torch.equal(example.fresh().score(backend="torch", **options, **kept).log_probs, want), options
    with torch.no_grad():
        assert torch.equal(example.score(backend="torch", **kept).log_probs, want)
    assert torch.equal(example.fresh().score(backend="torch", **kept).log_probs, want)


@each_set
@pytest.mark.parametrize("workspace_bytes", [2500, 1 << 20])
def test_single_pass(kept: dict[str, Any], workspace_bytes: int) -> None:
    example = random_example(21, bias=True)
    g, e = example.grad_log_probs, example.grad_entropy
    fresh = example.fresh()

    def loss_fn(scores: logitless.TokenLogProbs, index: torch.Tensor) -> torch.Tensor:
        assert scores.entropy is not None
        return g[index] * scores.log_probs + e[index] * scores.entropy

    options = {"backend": "torch", "workspace_bytes": workspace_bytes, **kept}
    with ProductCounter() as products:
        loss, out = logitless.linear_policy_loss(fresh.hidden, fresh.head, fresh.labels, loss_fn, **options)
    want = truth(example, **kept)
    torch.testing.assert_close(out.log_probs, want.scores.log_probs, rtol=1e-10, atol=1e-12)
    for (name, right), grad in zip(
        want.gradients.items(), torch.autograd.grad(loss, list(fresh.leaves().values())), strict=True
    ):
        torch.testing.assert_close(grad, right, rtol=1e-10, atol=1e-11, msg=name)
    assert products.flops == 6 * int(example.live.sum()) * example.head.weight.numel()  # each logit is made once


TOKENS, VOCAB, HIDDEN = 60, 2048, 64
LIMIT = 1 << 18  # half of the logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_set
def test_no_logits_in_full(dtype: torch.dtype, kept: dict[str, Any]) -> None:
    example = random_example(TOKENS, vocab=VOCAB, hidden_size=HIDDEN, dtype=dtype)
    fresh = example.fresh()
    gradients = 2 * sum(leaf.numel() * 4 for leaf in fresh.leaves().values())
    with AllocationGuard(max(LIMIT, VOCAB * HIDDEN * 4)), MemoryTracker() as tracker:
        fresh.pull(fresh.score(backend="torch", workspace_bytes=LIMIT, **kept))
    assert tracker.peak_bytes < LIMIT + gradients + TOKENS * 8 * 16
    with torch.no_grad(), AllocationGuard(LIMIT), MemoryTracker() as tracker:
        example.score(backend="torch", workspace_bytes=LIMIT, **kept)
    assert tracker.peak_bytes <= LIMIT + TOKENS * 8 * 24


@each_set
def test_one_pass_over_the_products_of_live_tokens(kept: dict[str, Any]) -> None:
    example = random_example(40, ignored=True)
    live = int(example.live.sum())
    with torch.no_grad(), ProductCounter() as products:
        example.score(backend="torch", workspace_bytes=4000, **kept)
    assert products.flops == 2 * live * example.head.weight.numel()
    dead = random_example(40, ignored=True)
    dead.labels[:] = -100
    with ProductCounter() as products:
        got = dead.run(backend="torch", stats=STATS, **kept)
    assert products.calls == 0
    assert got.scores.log_probs.count_nonzero() == 0
    assert all(grad is not None and grad.count_nonzero() == 0 for grad in got.gradients.values())


@each_set
def test_compiled_equals_eager(kept: dict[str, Any]) -> None:
    example = random_example(9, vocab=43, hidden_size=8, dtype=torch.float32)

    def score(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = example.with_leaves(dict(zip(example.leaves(), leaves, strict=True)))
        out = named.score(backend="torch", stats=STATS, **kept)
        assert out.entropy is not None
        assert out.stats is not None
        return out.log_probs, out.entropy, *out.stats.values()

    torch._dynamo.reset()
    found = []
    for function in (score, torch.compile(score, fullgraph=True, backend="aot_eager")):
        leaves = [leaf.clone().requires_grad_() for leaf in example.leaves().values()]
        out = function(*leaves)
        grads = torch.autograd.grad(out[:2], leaves, [example.grad_log_probs, example.grad_entropy])
        found.append([*out, *grads])
    assert all(map(torch.equal, *found))


@each_set
def test_opcheck(kept: dict[str, Any]) -> None:
    fresh = random_example(9, vocab=43, hidden_size=8, dtype=torch.float32).fresh()
    call, _ = make_call(
        fresh.hidden,
        fresh.head,
        fresh.labels,
        temperature=1.0,
        entropy=True,
        entropy_grad=True,
        ignore_index=-100,
        tp_group=None,
        reduce_hidden_grad=True,
        keep_bytes=0,
        workspace_bytes=1 << 20,
        validate=True,
        backend="torch",
        stats=STATS,
        **kept,
    )
    torch.library.opcheck(linear_log_probs_op, (*call.args, True, True, 1000, list(STATS)))


def test_not_a_number_stays_in_its_token() -> None:
    example = random_example(9, ignored=False, dtype=torch.float32)
    want = example.run(backend="torch", top_k=5, top_p=0.9)
    example.hidden[4] = math.nan
    got = example.run(backend="torch", top_k=5, top_p=0.9)
    others = torch.arange(9) != 4
    assert got.scores.log_probs[4].isnan()
    assert torch.equal(got.scores.log_probs[others], want.scores.log_probs[others])
    assert got.gradients["hidden"] is not None
    assert got.gradients["hidden"][others].isfinite().all()


def test_columns_of_minus_infinity() -> None:
    example = random_example(9, vocab=40, ignored=False)
    bias = torch.zeros(40, dtype=torch.float64)
    bias[::2] = -math.inf
    example.labels[:] = torch.arange(1, 19, 2)
    masked = example.with_head(bias=bias)
    smaller = example.with_head(weight=example.head.weight[1::2].contiguous())
    smaller.labels[:] = torch.arange(9)
    for kept in ({"top_k": 5}, {"top_p": 0.7}, {"top_k": 30}):
        got = logitless.linear_log_probs(masked.hidden, masked.head, torch.arange(1, 19, 2), backend="torch", **kept)
        want = smaller.score(backend="torch", **kept)
        torch.testing.assert_close(got.log_probs, want.log_probs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got.entropy, want.entropy, rtol=1e-12, atol=1e-12)


def test_head_alone_may_train() -> None:
    example = random_example(9)
    got, want = example.run(backend="torch", frozen=("hidden",), top_k=4), truth(example, top_k=4)
    assert got.gradients["hidden"] is None
    torch.testing.assert_close(got.gradients["weight"], want.gradients["weight"], rtol=1e-10, atol=1e-12)


def test_grad_buffer() -> None:
    example = random_example(9, dtype=torch.float32)
    buffer = torch.zeros_like(example.head.weight)
    example.with_head(grad_buffer=buffer).run(backend="torch", top_k=4)
    torch.testing.assert_close(buffer.double(), truth(example, top_k=4).gradients["weight"], rtol=1e-5, atol=1e-6)


def test_whole_head_is_an_lm_head() -> None:
    """A plain tensor and an LMHead are the same."""
    example = random_example(5)
    one = logitless.linear_log_probs(example.hidden, example.head.weight, example.labels, top_k=3)
    other = logitless.linear_log_probs(example.hidden, LMHead(example.head.weight), example.labels, top_k=3)
    assert torch.equal(one.log_probs, other.log_probs)
