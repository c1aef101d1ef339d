"""Gradients: against finite differences, within the workspace, and no work for what is frozen."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import logitless
from logitless.testing import Example, MemoryTracker, ProductCounter, Results, check_results, random_example
from logitless.testing.conformance import OPTIONS
from logitless_torch.backward import _fp16_scale

TIGHT = 1 << 19
TOKENS, VOCAB, HIDDEN = 200, 2048, 256  # the logits are three times TIGHT, and so is the weight in float32
each_option = pytest.mark.parametrize("option", OPTIONS)


def function(example: Example, **options: Any) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The call as a function of its leaves."""

    def call(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = example.with_leaves(dict(zip(example.leaves(), leaves, strict=True))).score(backend="torch", **options)
        return (out.log_probs,) if out.entropy is None else (out.log_probs, out.entropy)

    return call


@each_option
@pytest.mark.parametrize("keep_bytes", [0, 400])
def test_gradcheck(option: str, keep_bytes: int) -> None:
    settings = dict(OPTIONS[option])
    if "vocab_size" in settings:
        settings["vocab_size"] = 11
    example = random_example(5, vocab=13, hidden_size=4, std=1.0, **settings).fresh()
    leaves = tuple(example.leaves().values())
    assert torch.autograd.gradcheck(function(example, keep_bytes=keep_bytes, workspace_bytes=2000), leaves)


def test_gradcheck_without_entropy() -> None:
    example = random_example(5, vocab=13, hidden_size=4, std=1.0).fresh()
    assert torch.autograd.gradcheck(function(example, entropy=False), tuple(example.leaves().values()))


@each_option
def test_compiled_equals_eager(option: str) -> None:
    example = random_example(9, vocab=43, hidden_size=8, dtype=torch.float32, **OPTIONS[option] | size_of(option))
    torch._dynamo.reset()
    eager = function(example)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    found = []
    for run in (eager, compiled):
        leaves = [leaf.clone().requires_grad_() for leaf in example.leaves().values()]
        outputs = run(*leaves)
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, [example.grad_log_probs, example.grad_entropy])])
    assert all(map(torch.equal, *found))


def size_of(option: str) -> dict[str, Any]:
    return {"vocab_size": 40} if "vocab_size" in OPTIONS[option] else {}


def accumulators(example: Example) -> int:
    """Bytes of every gradient, and of one float32 accumulator for each that is narrower."""
    wide = torch.promote_types(example.dtype, torch.float32)
    total = 0
    for leaf in example.leaves().values():
        total += leaf.numel() * (leaf.dtype.itemsize + (wide.itemsize if leaf.dtype != wide else 0))
    return total


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ignored", ["none", "some-validated", "some-unvalidated"])
def test_backward_stays_within_its_workspace(dtype: torch.dtype, ignored: str) -> None:
    example = random_example(
        TOKENS, vocab=VOCAB, hidden_size=HIDDEN, dtype=dtype, ignored=ignored != "none", bias=True, lora=(2,)
    ).fresh()
    options = {"backend": "torch", "workspace_bytes": TIGHT, "validate": ignored != "some-unvalidated"}
    out = example.score(**options)
    with MemoryTracker() as tracker:
        grads = example.pull(out)
    allowed = accumulators(example) + TIGHT + TOKENS * 8 * 16
    if ignored == "some-validated" and dtype in (torch.float64, torch.float32):
        allowed += example.hidden.nbytes + example.head.lora[0][0].nbytes  # sums of live tokens, then spread
    assert tracker.peak_bytes <= allowed
    check_results(Results(out, grads), example)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("workspace_bytes", [TIGHT, 4 * TIGHT])
def test_a_single_pass_stays_within_its_workspace(dtype: torch.dtype, workspace_bytes: int) -> None:
    """What it keeps of a chunk's logits counts as temporary memory."""
    example = random_example(3 * TOKENS, vocab=VOCAB, hidden_size=HIDDEN, dtype=dtype, ignored=False).fresh()
    with MemoryTracker() as tracker:
        loss, _ = logitless.linear_policy_loss(
            example.hidden,
            example.head,
            example.labels,
            lambda scores, index: scores.log_probs * example.grad_log_probs[index],
            workspace_bytes=workspace_bytes,
            backend="torch",
        )
    assert tracker.peak_bytes <= accumulators(example) + workspace_bytes + 3 * TOKENS * 8 * 16
    assert loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_spread_to_live_tokens_within_the_workspace(dtype: torch.dtype) -> None:
    """Long and narrow: a rounded copy of all sums would be eight times the workspace."""
    workspace_bytes = 1 << 17
    example = random_example(2000, vocab=50, hidden_size=HIDDEN, dtype=dtype, ignored=False)
    example.labels[7] = -100
    fresh = example.fresh(frozen=("weight",))
    out = fresh.score(backend="torch", workspace_bytes=workspace_bytes)
    with MemoryTracker() as tracker:
        fresh.pull(out)
    allowed = 2000 * HIDDEN * (4 + dtype.itemsize) + workspace_bytes + 2000 * 8 * 16
    assert tracker.peak_bytes <= allowed


@pytest.mark.parametrize(
    ("frozen", "products"),
    [((), 3), (("weight",), 2), (("hidden",), 2), (("hidden", "weight"), 1)],
    ids=["nothing", "weight", "hidden", "both"],
)
def test_products_of_frozen_inputs_are_not_run(frozen: tuple[str, ...], products: int) -> None:
    """Logits again, d_hidden and d_weight: 2NDV each. With the bias alone left, only the logits."""
    tokens, vocab, hidden_size = 20, 300, 16
    example = random_example(
        tokens, vocab=vocab, hidden_size=hidden_size, dtype=torch.float32, ignored=False, bias=True
    )
    fresh = example.fresh(frozen)
    out = fresh.score(backend="torch")
    with ProductCounter() as counter, MemoryTracker() as tracker:
        fresh.pull(out)
    assert counter.flops == products * 2 * tokens * hidden_size * vocab
    if "weight" in frozen:
        assert tracker.largest_bytes < max(vocab * hidden_size, tokens * vocab + 1) * 4


@pytest.mark.parametrize(("tokens", "vocab"), [(20, 300), (5, 7)])  # a multiple of 8 bytes, and none
def test_kept_logits_are_not_made_again(tokens: int, vocab: int) -> None:
    hidden_size = 16
    example = random_example(tokens, vocab=vocab, hidden_size=hidden_size, dtype=torch.float32, ignored=False).fresh()
    out = example.score(backend="torch", keep_bytes=tokens * vocab * 4)
    with ProductCounter() as counter:
        example.pull(out)
    assert counter.flops == 2 * 2 * tokens * hidden_size * vocab


def test_work_is_for_live_tokens_only() -> None:
    tokens, vocab, hidden_size = 20, 300, 16
    example = random_example(tokens, vocab=vocab, hidden_size=hidden_size, dtype=torch.float32, ignored=False)
    example.labels[4:] = -100
    with ProductCounter() as counter:
        example.run(backend="torch")
    assert counter.flops == 4 * 2 * 4 * hidden_size * vocab


def test_gradient_of_half_inputs_is_summed_in_float32_over_many_tiles() -> None:
    """d_weight in bf16 sums over 40 blocks of tokens would be 4 floors off."""
    example = random_example(400, vocab=60, dtype=torch.bfloat16, ignored=False)
    got = example.run(backend="torch", workspace_bytes=1 << 12)
    check_results(got, example)


def test_float16_keeps_small_gradients() -> None:
    example = random_example(50, dtype=torch.float16)
    tiny = example.scale_upstream(1e-4)
    check_results(tiny.run(backend="torch"), tiny)


@pytest.mark.parametrize(("size", "exponent"), [(1.0, 8), (1e-6, 27), (3e4, -7), (0.0, 60)])
@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_float16_scale_brings_the_largest_dz_near_256(size: float, exponent: int, bad: float) -> None:
    """Whatever one token's upstream gradient is: NaN in it must not reach the others."""
    example = random_example(4, dtype=torch.float16)
    problem = SimpleNamespace(scale=1.0, temperature=1.0, live=None, hidden=example.hidden)
    grads = torch.tensor([size, -size / 3, bad, 0.0])
    scale = _fp16_scale(problem, range(4), (grads, None))  # type: ignore[arg-type]
    assert float(scale) == 2.0**exponent


@pytest.mark.parametrize("rest", [1e-3, 1e-6])
def test_a_confident_tokens_gradient_loses_no_digit(rest: float) -> None:
    """g·(1 − p) by −expm1(log p): the difference itself keeps no digit of a 1 − p near 6e-8."""
    z = torch.zeros(1, 8)
    z[0, 3] = math.log(7 / rest)
    leaf, exact = z.clone().requires_grad_(), z.double().requires_grad_()
    logitless.linear_log_probs(leaf, torch.eye(8), torch.tensor([3]), backend="torch").log_probs.sum().backward()
    (-torch.log1p(torch.exp(exact[0, :3].logsumexp(0) - exact[0, 3]) * 7 / 3)).backward()
    assert leaf.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(leaf.grad[0, 3].double(), exact.grad[0, 3], rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(("logit", "dz"), [(-60.0, -math.exp(-60.0)), (-80.0, 0.0)], ids=["small", "negligible"])
def test_what_is_no_denormal_number_keeps_its_gradient(logit: float, dz: float) -> None:
    """p is 9e-27, and 2e-35, which is 0: times a small upstream gradient it would be denormal, and slow."""
    weight = torch.tensor([[0.0], [logit]], requires_grad=True)
    out = logitless.linear_log_probs(torch.ones(1, 1), weight, torch.zeros(1).long(), backend="torch")
    (grad,) = torch.autograd.grad(out.log_probs, weight, torch.ones(1))
    assert grad[1].item() == pytest.approx(dz, rel=1e-4, abs=0.0)


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    example = random_example(30, dtype=torch.float32, bias=True)
    want = example.run(backend="torch")
    fresh = example.fresh()
    out = checkpoint(function(fresh), *fresh.leaves().values(), use_reentrant=False)
    got = fresh.pull(logitless.TokenLogProbs(*out))
    for name, grad in want.gradients.items():
        assert torch.equal(grad, got[name])  # type: ignore[arg-type]
