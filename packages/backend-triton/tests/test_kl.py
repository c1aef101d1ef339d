"""Divergences of two heads: the contract, on the GPU if there is one, else in the interpreter; sharded vocabularies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from logitless.errors import UnsupportedError
from logitless.testing import AllocationGuard
from logitless.testing.divergence import DIRECTIONS, DivergenceConformance, check_divergence, random_divergence

HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says aloud what a GPU does silently


class TestTritonDivergence(DivergenceConformance):
    backend = "triton"
    device = "cuda" if HAS_GPU else "cpu"
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32, torch.float16)


@pytest.mark.skipif(HAS_GPU, reason="what the kernels' launchers allocate is seen on the CPU")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_of_tokens_by_vocabulary_is_held(direction: str) -> None:
    """The logits of 96 tokens are twelve times the workspace; gradients and their sums are allowed for."""
    tokens, vocab, workspace = 96, 4096, 1 << 17
    case = random_divergence(tokens, direction=direction, vocab=vocab, hidden_size=16, dtype=torch.float32)
    fresh = replace(case, student=case.student.fresh())
    gradient = vocab * 16 * 4
    with AllocationGuard(workspace):
        value = fresh.value(backend="triton", workspace_bytes=workspace)
    with AllocationGuard(max(workspace, gradient)):
        grads = torch.autograd.grad(value, list(fresh.student.leaves().values()), case.student.grad_log_probs)
    check_divergence((value, dict(zip(case.student.leaves(), grads, strict=True))), case)


def test_float16_keeps_small_and_large_gradients() -> None:
    """dz is scaled by the largest |g|·(1 + KL): upstream gradients of 1e-4, and a reverse KL of hundreds of nats."""
    case = random_divergence(
        20, direction="reverse", dtype=torch.float16, std=60.0, device="cuda" if HAS_GPU else "cpu"
    )
    for factor in (1e-4, 1.0):
        scaled = replace(case, student=case.student.scale_upstream(factor))
        check_divergence(scaled.run(backend="triton"), scaled)


def test_dtypes_of_the_reference_are_asked_about() -> None:
    """A reference in float64 is not served, whatever the student is; by hand so, and by the choice of another."""
    case = random_divergence(5, dtype=torch.float32, device="cuda" if HAS_GPU else "cpu")
    wide = replace(case, teacher=case.teacher.to(torch.float64))
    with pytest.raises(UnsupportedError, match="torch.float64, and it serves"):
        wide.value(backend="triton")
