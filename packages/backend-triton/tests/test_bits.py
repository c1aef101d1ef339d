"""A token's log_prob has the same bits alone, among others, kept, recomputed, in a single pass and under no_grad."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import logitless
from logitless.testing.example import Example, random_example

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if HAS_GPU else [torch.float32]
SIZE: dict[str, Any] = (
    {"tokens": 4096, "vocab": 5001, "hidden_size": 200} if HAS_GPU else {"tokens": 70, "vocab": 157, "hidden_size": 24}
)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def example_of(dtype: torch.dtype) -> Example:
    return random_example(dtype=dtype, device=DEVICE, ignored=False, std=4.0, **SIZE)


def part(example: Example, tokens: slice | torch.Tensor) -> Example:
    return replace(
        example,
        hidden=example.hidden[tokens].contiguous(),
        labels=example.labels[tokens],
        grad_log_probs=example.grad_log_probs[tokens],
        grad_entropy=example.grad_entropy[tokens],
    )


@each_dtype
@pytest.mark.parametrize("count", [1, 16, 17, 63] + [100, 1000, 1008, 1023, 1096] * HAS_GPU)
def test_do_not_depend_on_the_number_of_tokens(dtype: torch.dtype, count: int) -> None:
    example = example_of(dtype)
    whole = example.score(backend="triton")
    few = part(example, slice(0, count)).score(backend="triton")
    assert torch.equal(few.log_probs, whole.log_probs[:count])
    assert torch.equal(few.entropy, whole.entropy[:count])


@each_dtype
@pytest.mark.skipif(not HAS_GPU, reason="the interpreter's products are numpy's, whose bits depend on a row's place")
def test_do_not_depend_on_neighbours_or_order(dtype: torch.dtype) -> None:
    example = example_of(dtype)
    whole = example.score(backend="triton")
    order = torch.randperm(SIZE["tokens"], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    shuffled = part(example, order).score(backend="triton")
    assert torch.equal(shuffled.log_probs, whole.log_probs[order])
    assert torch.equal(shuffled.entropy, whole.entropy[order])
    labels = torch.where(order % 3 == 0, -100, example.labels)
    for validate in (True, False):
        some = replace(example, labels=labels).score(backend="triton", validate=validate)
        assert torch.equal(some.log_probs, whole.log_probs.masked_fill(order % 3 == 0, 0.0))


@each_dtype
def test_do_not_depend_on_how(dtype: torch.dtype) -> None:
    example = example_of(dtype)
    with torch.no_grad():
        plain = example.score(backend="triton")
    ways: dict[str, dict[str, Any]] = {
        "without entropy": {"entropy": False},
        "recomputed": {},
        "kept": {"keep_bytes": 1 << 30},
        "partly kept": {"keep_bytes": SIZE["tokens"] * 128 * 5},
        "kept without entropy_grad": {"keep_bytes": 1 << 30, "entropy_grad": False},
        "little workspace": {"workspace_bytes": 1 << 14},
        "unvalidated": {"validate": False},
    }
    for name, options in ways.items():
        out = example.fresh().score(backend="triton", **options)
        assert torch.equal(out.log_probs, plain.log_probs), name
        assert out.entropy is None or torch.equal(out.entropy, plain.entropy), name
    for workspace_bytes in (1 << 14, 512 << 20):
        fresh = example.fresh()
        _, out = logitless.linear_policy_loss(
            fresh.hidden,
            fresh.head,
            fresh.labels,
            lambda scores, index: scores.log_probs,
            backend="triton",
            workspace_bytes=workspace_bytes,
        )
        assert torch.equal(out.log_probs, plain.log_probs)


@each_dtype
@pytest.mark.skipif(not HAS_GPU, reason="one thread repeats itself; races need a GPU")
def test_fifty_runs_are_equal(dtype: torch.dtype) -> None:
    example = example_of(dtype)
    for options in ({}, {"keep_bytes": 1 << 30}, {"keep_bytes": 1 << 30, "entropy_grad": False}):
        first = example.run(backend="triton", **options)
        for _ in range(50):
            again = example.run(backend="triton", **options)
            assert torch.equal(again.scores.log_probs, first.scores.log_probs)
            assert torch.equal(again.scores.entropy, first.scores.entropy)
            for name, grad in first.gradients.items():
                assert torch.equal(again.gradients[name], grad), name
