"""Faults of earlier implementations of this op, each by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from logitless import LMHead, linear_log_probs, reference
from logitless.errors import InvalidInputError
from logitless.testing import (
    AllocationGuard,
    Results,
    check_gradients,
    check_results,
    check_scores,
    random_example,
)

each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
WORKSPACES = pytest.mark.parametrize("workspace_bytes", [1 << 17, 512 << 20], ids=["tight", "default"])


@WORKSPACES
@pytest.mark.parametrize("offset", [0.0, -30.0], ids=["plain", "logits-near-minus-30"])
def test_columns_beyond_a_vocabulary_that_no_tile_divides_are_masked(offset: float, workspace_bytes: int) -> None:
    example = random_example(20, vocab=1500, dtype=torch.float32, bias=True)
    assert example.head.bias is not None
    example = example.with_head(bias=example.head.bias + offset)
    check_results(example.run(backend="torch", workspace_bytes=workspace_bytes), example)


@pytest.mark.parametrize("offset", [-30.0, -1e3, -6e4])
def test_a_running_maximum_does_not_start_at_zero(offset: float) -> None:
    example = random_example(20, vocab=1500, dtype=torch.float32, bias=True)
    example = example.with_head(bias=torch.full((1500,), offset))
    got = example.run(backend="torch", workspace_bytes=1 << 16)
    assert got.scores.entropy is not None
    assert bool(got.scores.log_probs.isfinite().all())
    assert bool(got.scores.entropy.isfinite().all())
    check_results(got, example)


def test_an_ignored_label_reads_nothing() -> None:
    example = random_example(20, dtype=torch.float32)
    got = example.run(backend="torch")
    assert got.scores.entropy is not None
    dead, d_hidden = ~example.live, got.gradients["hidden"]
    assert d_hidden is not None
    assert int(dead.sum()) == 5
    for tensor in (got.scores.log_probs, got.scores.entropy, d_hidden):
        assert not tensor[dead].count_nonzero()
        assert not tensor[dead].signbit().any()


@pytest.mark.parametrize("label", [157, 10**6, -1])
def test_a_label_out_of_range_is_an_error(label: int) -> None:
    example = random_example(20, dtype=torch.float32)
    example.labels[3] = label
    with pytest.raises(InvalidInputError, match=f"labels: got {label} at flat position 3"):
        example.score(backend="torch")


@pytest.mark.parametrize("part", ["bias", "lora", "scale", "softcap"])
def test_no_part_of_the_head_is_skipped(part: str) -> None:
    parts = {"bias": {"bias": True}, "lora": {"lora": (3,)}, "scale": {"scale": 0.5}, "softcap": {"softcap": 2.0}}
    example = random_example(20, dtype=torch.float32, **parts[part])
    check_results(example.run(backend="torch"), example)
    bare = replace(example, head=LMHead(example.head.weight)).score(backend="torch").log_probs
    with pytest.raises(AssertionError, match="tokens are off"):
        check_scores(replace(example.score(backend="torch"), log_probs=bare), example)


def test_a_bias_and_a_lora_together() -> None:
    example = random_example(20, dtype=torch.float32, bias=True, lora=(2, 3), scale=1.5, softcap=6.0)
    check_results(example.run(backend="torch"), example)


@each_half
def test_outputs_are_float32(dtype: torch.dtype) -> None:
    out = random_example(20, dtype=dtype).score(backend="torch")
    assert out.entropy is not None
    assert out.log_probs.dtype == out.entropy.dtype == torch.float32


@each_half
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_temperature_does_not_round_logits_to_half(dtype: torch.dtype, temperature: float) -> None:
    example = random_example(60, dtype=dtype, temperature=temperature, std=5.0)
    check_results(example.run(backend="torch"), example)


@each_half
def test_d_weight_is_summed_in_float32_over_many_chunks(dtype: torch.dtype) -> None:
    example = random_example(600, vocab=64, hidden_size=16, dtype=dtype, ignored=False)
    check_results(example.run(backend="torch", workspace_bytes=1 << 12), example)


def test_a_hidden_that_is_not_contiguous_gets_its_gradient() -> None:
    example = random_example((4, 5), dtype=torch.float32)
    beneath = example.hidden.transpose(0, 1).contiguous().requires_grad_()
    seen = replace(example, hidden=beneath.transpose(0, 1))
    assert not seen.hidden.is_contiguous()
    out = seen.score(backend="torch")
    torch.autograd.backward([out.log_probs, out.entropy], [example.grad_log_probs, example.grad_entropy])
    assert beneath.grad is not None
    check_gradients({"hidden": beneath.grad.transpose(0, 1), "weight": None}, example)


def test_sum_backward_works() -> None:
    example = random_example(20, dtype=torch.float32)
    fresh = example.fresh()
    fresh.score(backend="torch").log_probs.sum().backward()
    ones = replace(
        example,
        grad_log_probs=torch.ones_like(example.grad_log_probs),
        grad_entropy=torch.zeros_like(example.grad_entropy),
    )
    check_gradients({"hidden": fresh.hidden.grad, "weight": fresh.head.weight.grad}, ones)


@pytest.mark.parametrize("temperature", [2, 2.0, torch.tensor(2), torch.tensor(2.0)], ids=repr)
def test_any_number_is_a_temperature(temperature: float | torch.Tensor) -> None:
    example = random_example(20, dtype=torch.float32)
    got = linear_log_probs(example.hidden, example.head, example.labels, temperature=temperature, backend="torch")
    check_scores(got, replace(example, temperature=2.0))


@pytest.mark.parametrize("hidden_size", [1, 3, 100, 127, 129])
def test_any_hidden_size(hidden_size: int) -> None:
    example = random_example(20, hidden_size=hidden_size, dtype=torch.float32)
    check_results(example.run(backend="torch"), example)


def test_a_temperature_vector_as_long_as_the_vocabulary_is_per_token() -> None:
    example = random_example(50, vocab=50, dtype=torch.float32, per_token_temperature=True)
    check_results(example.run(backend="torch"), example)


def test_labels_longer_than_hidden_are_an_error_with_both_shapes() -> None:
    example = random_example(20, dtype=torch.float32)
    longer = replace(example, labels=torch.zeros(21, dtype=torch.int64))
    with pytest.raises(InvalidInputError, match=r"labels: got shape \(21,\), expected \(20,\), hidden's \(20, 24\)"):
        longer.score(backend="torch")


@each_half
def test_a_frozen_weight_costs_no_gradient(dtype: torch.dtype) -> None:
    vocab, hidden_size = 3000, 64
    example = random_example(10, vocab=vocab, hidden_size=hidden_size, dtype=dtype)
    fresh = example.fresh(frozen=("weight",))
    with AllocationGuard(vocab * hidden_size * dtype.itemsize - 1):
        grads = fresh.pull(fresh.score(backend="torch", workspace_bytes=1 << 17))
    assert grads["weight"] is None
    check_gradients(grads, example)


def test_the_entropy_is_optional_and_differentiable_when_asked() -> None:
    example = random_example(20, dtype=torch.float32)
    assert example.score(backend="torch", entropy=False).entropy is None
    fresh = example.fresh()
    out = fresh.score(backend="torch")
    assert out.entropy is not None
    grads = torch.autograd.grad(out.entropy, (fresh.hidden, fresh.head.weight), example.grad_entropy)
    alone = replace(example, grad_log_probs=torch.zeros_like(example.grad_log_probs))
    check_gradients(dict(zip(("hidden", "weight"), grads, strict=True)), alone)


@pytest.mark.parametrize("backward_inside", [True, False], ids=["inside", "outside"])
def test_autocast_is_the_same_forward_and_backward(backward_inside: bool) -> None:
    example = random_example(40, dtype=torch.float32)
    fresh = example.fresh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fresh.score(backend="torch")
        if backward_inside:
            grads = fresh.pull(out)
    if not backward_inside:
        grads = fresh.pull(out)
    half = example.to(torch.bfloat16)
    check_scores(out, half)
    assert all(grad is not None and grad.dtype == torch.float32 for grad in grads.values())
    check_gradients({name: grad.bfloat16() for name, grad in grads.items() if grad is not None}, half)


@each_half
def test_half_hidden_with_a_float32_head_is_computed_in_float32(dtype: torch.dtype) -> None:
    base = random_example(40, dtype=torch.float32)
    example = replace(base, hidden=base.hidden.to(dtype))
    got = example.run(backend="torch")
    check_results(got, example)
    grads = got.gradients
    assert grads["hidden"] is not None
    assert grads["weight"] is not None
    assert (grads["hidden"].dtype, grads["weight"].dtype) == (dtype, torch.float32)


@pytest.mark.parametrize("validate", [True, False], ids=["validated", "unvalidated"])
@pytest.mark.parametrize("tokens", [0, 6], ids=["empty", "all-masked"])
def test_a_batch_with_nothing_to_score_is_zeros(tokens: int, validate: bool) -> None:
    example = random_example(tokens, dtype=torch.float32, bias=True, lora=(2,))
    example = replace(example, labels=torch.full_like(example.labels, -100))
    got = example.run(backend="torch", validate=validate)
    assert got.scores.entropy is not None
    assert got.scores.log_probs.tolist() == got.scores.entropy.tolist() == [0.0] * tokens
    for name, grad in got.gradients.items():
        assert grad is not None, name
        assert not grad.count_nonzero(), name


def test_the_reference_itself_agrees_with_log_softmax() -> None:
    """What all of the above is compared with."""
    example = random_example(20)
    log_p = (example.hidden @ example.head.weight.T).log_softmax(-1)[example.live]
    out = reference.linear_log_probs(example.hidden, example.head, example.labels)
    want = log_p.gather(-1, example.labels[example.live][:, None])[:, 0]
    torch.testing.assert_close(out.log_probs[example.live], want, rtol=1e-12, atol=1e-12)


def test_matmul_precision_of_the_program_does_not_reach_the_op() -> None:
    example = random_example(60, hidden_size=64, dtype=torch.float32)
    want = example.run(backend="torch")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        got = example.run(backend="torch")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert isinstance(got, Results)
    assert torch.equal(got.scores.log_probs, want.scores.log_probs)
    for name, grad in want.gradients.items():
        assert torch.equal(grad, got.gradients[name])  # type: ignore[arg-type]
