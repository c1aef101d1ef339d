"""A GPU's way with half inputs, on a CPU: the operands stay half and their products are summed in float32.

PyTorch has those products (`out_dtype=`) on GPUs alone, so here float32 products stand in for them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from logitless import TokenLogProbs, linear_kl, linear_policy_loss
from logitless.testing import check_gradients, check_results, random_example
from logitless.testing.divergence import check_divergence, random_divergence
from logitless.testing.example import Results
from logitless.types import Problem
from logitless_torch import tiles

HALVES = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])
each_scale = pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])


def inputs_dtype(problem: Problem) -> torch.dtype:
    return torch.promote_types(problem.hidden.dtype, problem.weight.dtype)


@pytest.fixture(autouse=True)
def half_operands(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Dtypes of the operands whose products were summed in another one."""
    seen, mm, addmm = [], torch.mm, torch.addmm

    def wide_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        seen.append(a.dtype)
        return mm(a.to(out_dtype), b.to(out_dtype), out=out)

    def wide_addmm(x: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if out_dtype is not None:
            seen.append(a.dtype)
            a, b = a.to(out_dtype), b.to(out_dtype)
        return addmm(x, a, b, **options)

    monkeypatch.setattr(tiles, "operand_dtype", inputs_dtype)
    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)
    return seen


@each_half
@each_scale
@pytest.mark.parametrize("workspace_bytes", [512 << 20, 1 << 14], ids=["one tile", "many tiles"])
def test_gradients_of_any_size(
    dtype: torch.dtype, scale: float, workspace_bytes: int, half_operands: list[torch.dtype]
) -> None:
    """In float16 dz is scaled by a power of two: at 1e-6 it would be lost, at 1e4 be infinite."""
    example = random_example(40, vocab=300, dtype=dtype, bias=True, lora=(3,)).scale_upstream(scale)
    check_results(example.run(backend="torch", workspace_bytes=workspace_bytes), example)
    assert set(half_operands) == {dtype}


@each_half
@each_scale
def test_a_grad_buffer_is_not_scaled(dtype: torch.dtype, scale: float) -> None:
    """What was in it before stays as it was."""
    example = random_example(40, vocab=300, dtype=dtype).scale_upstream(scale)
    want = example.truth().gradients["weight"]
    assert want is not None
    start = scale * torch.randn(300, 24, generator=torch.Generator().manual_seed(1))
    buffer = start.clone()
    got = example.with_head(grad_buffer=buffer).run(backend="torch", workspace_bytes=1 << 14)
    check_gradients({**got.gradients, "weight": buffer - start}, example, dtypes={"weight": torch.float32})


@each_half
def test_passes_whose_gradients_differ_in_size(dtype: torch.dtype) -> None:
    """A pass of larger gradients takes a smaller scale, which what was summed before follows."""
    size = torch.logspace(-4, 2, 64)
    example = random_example(64, vocab=300, dtype=dtype, bias=True)
    g, e = example.grad_log_probs * size, example.grad_entropy * size
    example = replace(example, grad_log_probs=g, grad_entropy=e)
    fresh, chunks = example.fresh(), []

    def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
        chunks.append(index)
        assert scores.entropy is not None
        return g[index] * scores.log_probs + e[index] * scores.entropy

    loss, scores = linear_policy_loss(
        fresh.hidden, fresh.head, fresh.labels, loss_fn, workspace_bytes=1 << 12, backend="torch"
    )
    leaves = fresh.leaves()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    assert len(chunks) > 3
    check_results(Results(scores, dict(zip(leaves, grads, strict=True))), example)


@each_half
@each_scale
@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_divergences(dtype: torch.dtype, scale: float, direction: str) -> None:
    case = random_divergence(20, direction=direction, dtype=dtype, vocab=90, bias=True)
    case = replace(case, student=case.student.scale_upstream(scale))
    check_divergence(case.run(backend="torch"), case)


def test_far_from_its_reference_a_divergences_dz_has_room_in_float16() -> None:
    """KL(student‖reference) is 1000 nats, and dz half of that: 2^8 times as much would be infinite."""
    student = torch.zeros(2, 1, dtype=torch.float16, requires_grad=True)
    reference = torch.tensor([[0.0], [-2000.0]], dtype=torch.float16)
    hidden = torch.ones(1, 1, dtype=torch.float16)
    value = linear_kl(hidden, student, hidden, reference, direction="reverse", backend="torch")
    assert value.item() == pytest.approx(1000.0 + math.log(0.5))
    (grad,) = torch.autograd.grad(value, student, torch.ones(1))
    assert grad.flatten().tolist() == [-500.0, 500.0]
