"""Several labels of a token, and further statistics, from the one pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import logitless
from logitless import reference
from logitless._call import make_call
from logitless._ops import _backward_op, linear_log_probs_op
from logitless.errors import InvalidInputError
from logitless.testing import AllocationGuard, Example, ProductCounter, Results, random_example

FULL: dict[str, Any] = {"bias": True, "scale": 0.8, "softcap": 5.0, "vocab_size": 150, "lora": (2, 3)}
STATS = ("sum_sq_probs", "mean_logit", "is_argmax", "is_kept")


def several(tokens: int | tuple[int, ...] = 11, each: int = 4, seed: int = 0, **options: Any) -> Example:
    """Labels [..., K]: some tokens ignored whole, some labels alone, one label twice."""
    example = random_example(tokens, seed=seed, **options)
    noise = torch.Generator().manual_seed(seed)
    shape = (*example.labels.shape, each)
    labels = torch.randint(options.get("vocab_size") or len(example.head.weight), shape, generator=noise)
    labels[torch.rand(shape, generator=noise) < 0.2] = -100
    labels[example.labels == -100] = -100
    if each > 1:
        labels[..., -1] = labels[..., 0]
    upstream = torch.randn(shape, generator=noise, dtype=torch.float64).to(example.grad_log_probs.dtype)
    return replace(example, labels=labels, grad_log_probs=upstream)


def truth(example: Example, **options: Any) -> Results:
    """From the logits in full."""
    fresh = example.to(torch.float64).fresh()
    out = reference.linear_log_probs(
        fresh.hidden, fresh.head, fresh.labels, temperature=fresh.temperature, stats=STATS, **options
    )
    return Results(out, fresh.pull(out))


def check(example: Example, want: Results, rtol: float = 1e-10, atol: float = 1e-12, **options: Any) -> None:
    got = example.run(backend="torch", stats=STATS, **options)
    assert got.scores.stats is not None
    assert want.scores.stats is not None
    pairs = [(got.scores.log_probs, want.scores.log_probs), (got.scores.entropy, want.scores.entropy)]
    pairs += [(got.gradients[name], want.gradients[name]) for name in want.gradients]
    pairs += [(got.scores.stats[name], want.scores.stats[name]) for name in STATS]
    for mine, right in pairs:
        assert mine is not None
        assert right is not None
        assert not mine.dtype.is_floating_point or right.dtype.is_floating_point
        torch.testing.assert_close(mine.double(), right.double(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("kept", [{}, {"top_k": 9}, {"top_p": 0.7}], ids=str)
@pytest.mark.parametrize("option", [{}, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("validate", [True, False])
def test_equals_the_logits_in_full(kept: dict[str, Any], option: dict[str, Any], validate: bool) -> None:
    example = several((3, 5), per_token_temperature=bool(option), **option)
    want = truth(example, **kept)
    for options in ({}, {"workspace_bytes": 5000}, {"workspace_bytes": 5000, "keep_bytes": 7000}):
        check(example, want, validate=validate, **options, **kept)


def test_one_of_one_equals_one() -> None:
    example = random_example(13, dtype=torch.float32)
    single = example.run(backend="torch")
    column = replace(
        example, labels=example.labels.unsqueeze(1), grad_log_probs=example.grad_log_probs.unsqueeze(1)
    ).run(backend="torch")
    torch.testing.assert_close(column.scores.log_probs.squeeze(1), single.scores.log_probs, rtol=1e-6, atol=1e-6)
    for name, grad in single.gradients.items():
        torch.testing.assert_close(column.gradients[name], grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    example = several(dtype=dtype, std=4.0)
    got, want = example.run(backend="torch"), truth(example)
    torch.testing.assert_close(got.scores.log_probs.double(), want.scores.log_probs, rtol=1e-5, atol=2e-5)
    for name, grad in want.gradients.items():
        mine = got.gradients[name]
        assert mine is not None
        error = float((mine.double() - grad).norm() / grad.norm())
        assert error < {torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]


def test_confident_labels_keep_their_digits() -> None:
    """log_prob is −log1p of what is beside the largest logit, and its gradient −expm1 of it."""
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[12.0], [0.0], [1.0]])
    out = logitless.linear_log_probs(hidden, weight, torch.tensor([[0, 1]]), entropy=False, backend="torch")
    rest = math.exp(-12) + math.exp(-11)
    assert out.log_probs[0, 0].item() == pytest.approx(-math.log1p(rest), rel=1e-6)
    (grad,) = torch.autograd.grad(out.log_probs[0, 0], hidden)
    p = [math.exp(x - 12) / (1 + rest) for x in (0, 1)]
    assert grad.item() == pytest.approx(12 * sum(p) - p[1], rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 50),
    each=st.integers(1, 6),
    top_k=st.none() | st.integers(1, 60),
    workspace_bytes=st.sampled_from([3000, 512 << 20]),
    validate=st.booleans(),
)
def test_any_labels(seed: int, vocab: int, each: int, top_k: int | None, workspace_bytes: int, validate: bool) -> None:
    example = several(7, each, seed, vocab=vocab, hidden_size=4, bias=True)
    want = truth(example, top_k=top_k)
    check(example, want, 1e-9, 1e-11, top_k=top_k, workspace_bytes=workspace_bytes, validate=validate)


def test_gradcheck() -> None:
    example = several(5, 3, vocab=20, hidden_size=4)

    def scores(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = example.with_leaves(dict(zip(example.leaves(), leaves, strict=True)))
        out = named.score(backend="torch")
        assert out.entropy is not None
        return out.log_probs, out.entropy

    assert torch.autograd.gradcheck(scores, tuple(example.fresh().leaves().values()))


def test_replayed_set() -> None:
    """The ids that an engine kept, scored together: the log-prob over them, whatever the policy would keep now."""
    example = random_example(6, ignored=False)
    ids = reference.top_k_log_probs(example.hidden, example.head, 5)[0]
    log_probs = example.score(backend="torch", top_k=None).log_probs
    labels = torch.cat((ids[:, :1], ids), 1)
    all_of_them = logitless.linear_log_probs(example.hidden, example.head, labels, entropy=False).log_probs
    replayed = all_of_them[:, 0] - all_of_them[:, 1:].logsumexp(1)
    want = logitless.linear_log_probs(example.hidden, example.head, ids[:, 0], top_k=5).log_probs
    torch.testing.assert_close(replayed, want, rtol=1e-12, atol=1e-12)
    assert log_probs.shape == (6,)


def test_one_pass_over_the_products_of_live_tokens() -> None:
    example = several(40, 3)
    live = int((example.labels != -100).any(-1).sum())
    with torch.no_grad(), ProductCounter() as products:
        example.score(backend="torch", stats=STATS)
    assert products.flops == 2 * live * example.head.weight.numel()


def test_no_logits_in_full() -> None:
    example = several(200, 3, vocab=2048, hidden_size=32, dtype=torch.float32)
    with torch.no_grad(), AllocationGuard(1 << 18):
        example.score(backend="torch", stats=STATS, workspace_bytes=1 << 18)


def test_statistics_change_no_bits() -> None:
    example = random_example(30, dtype=torch.float32)
    want, got = example.run(backend="torch"), example.run(backend="torch", stats=STATS)
    assert torch.equal(got.scores.log_probs, want.scores.log_probs)
    assert all(torch.equal(got.gradients[name], want.gradients[name]) for name in want.gradients)
    assert got.scores.stats is not None
    assert list(got.scores.stats) == list(STATS)
    assert not any(x.requires_grad for x in got.scores.stats.values())
    assert want.scores.stats is None


def test_only_what_was_asked_for() -> None:
    example = random_example(9)
    assert set(example.score(backend="torch", stats=["mean_logit"]).stats or ()) == {"mean_logit"}


def test_bad_labels_unvalidated_are_not_a_number() -> None:
    example = several(4, 3)
    example.labels[:] = torch.tensor([[1, 2, 3], [1, 999, -100], [-100, -100, -100], [0, -100, 1]])
    out = example.score(backend="torch", validate=False)
    assert out.log_probs.isnan().tolist() == [[False] * 3, [False, True, False], [False] * 3, [False] * 3]
    assert out.log_probs[2].count_nonzero() == 0
    assert out.entropy is not None
    assert out.entropy[2] == 0
    with pytest.raises(InvalidInputError, match="got 999 at flat position 4"):
        example.score(backend="torch")


def test_single_pass_takes_one_label() -> None:
    example = several(4, 3)
    with pytest.raises(InvalidInputError, match="one label for each"):
        logitless.linear_policy_loss(example.hidden, example.head, example.labels, lambda s, i: s.log_probs)


def test_compiled_equals_eager() -> None:
    example = several(9, 3, vocab=43, hidden_size=8, dtype=torch.float32)

    def score(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = example.with_leaves(dict(zip(example.leaves(), leaves, strict=True)))
        out = named.score(backend="torch", stats=STATS, keep_bytes=500)
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


def test_opcheck() -> None:
    fresh = several(9, 3, vocab=43, hidden_size=8, dtype=torch.float32).fresh()
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
    )
    torch.library.opcheck(linear_log_probs_op, (*call.args, True, True, 1000, list(STATS)))
    with torch.no_grad():
        _, _, *made, _ = linear_log_probs_op(*call.args, True, True, 1000, [])
    still = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in call.args)
    needs = [True, True, False, False, False]
    sound = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (*still, *made, fresh.grad_log_probs, fresh.grad_entropy, needs)
    torch.library.opcheck(_backward_op, arguments, test_utils=sound)
