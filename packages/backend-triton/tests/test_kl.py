"""Divergences of two heads: the contract, on the GPU if there is one, else in the interpreter; sharded vocabularies."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from logitless import linear_kl
from logitless.errors import UnsupportedError
from logitless.testing import AllocationGuard
from logitless.testing.divergence import DIRECTIONS, DivergenceConformance, check_divergence, random_divergence
from logitless_triton import config

HAS_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says aloud what a GPU does silently


class TestTritonDivergence(DivergenceConformance):
    backend = "triton"
    device = "cuda" if HAS_GPU else "cpu"
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32, torch.float16)


@pytest.mark.skipif(HAS_GPU, reason="what the kernels' launchers allocate is seen on the CPU")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_of_tokens_by_vocabulary_is_held(direction: str) -> None:
    """Both heads' logits are 12 times the workspace; in the backward the largest is d_weight, a sixth of them."""
    tokens, vocab, workspace = 48, 2048, 1 << 16
    case = random_divergence(tokens, direction=direction, vocab=vocab, hidden_size=16, dtype=torch.float32)
    fresh = replace(case, student=case.student.fresh())
    gradient = vocab * 16 * 4
    with AllocationGuard(workspace):
        value = fresh.value(backend="triton", workspace_bytes=workspace)
    with AllocationGuard(max(workspace, gradient)):
        grads = torch.autograd.grad(value, list(fresh.student.leaves().values()), case.student.grad_log_probs)
    check_divergence((value, dict(zip(case.student.leaves(), grads, strict=True))), case)


@pytest.mark.parametrize("head", [{}, {"bias": True, "per_token_temperature": True}], ids=["plain", "full"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_part_of_a_blocks_tokens(direction: str, head: dict[str, bool]) -> None:
    """The backward makes the logits of at most half of these again at a time, and of some columns only."""
    device = "cuda" if HAS_GPU else "cpu"
    case = random_divergence(300, direction=direction, dtype=torch.float32, vocab=1500, device=device, **head)
    check_divergence(case.run(backend="triton", workspace_bytes=5 << 19), case)


def test_blocks_fill_whole_waves() -> None:
    """Of 264 programs: 32 row tiles by 66 column tiles are 8 turns, by the 84 that fit 10.2."""
    from logitless_triton.kl import _whole_waves

    tile = config.Tile(128, 128, 64, warps=4, stages=3, per_sm=2)
    work = SimpleNamespace(config=config.Config(tile, tile), programs=lambda tile: 132 * tile.per_sm)
    assert _whole_waves(work, 4096, 84 * 128) == 66 * 128
    assert _whole_waves(work, 4096, 1) == 256  # one pair of tiles at least


@pytest.mark.parametrize("upstream", [1e-4, 1.0])
def test_float16_has_room_for_large_divergences(upstream: float) -> None:
    """p = (½, ½) against q = (1, e^-1200): dz = ±300 times a scale of 2^8 for the largest g alone would be infinite."""
    device = "cuda" if HAS_GPU else "cpu"
    hidden, weight = torch.ones(1, 1, dtype=torch.float16, device=device), torch.zeros(2, 1, device=device).half()
    weight.requires_grad_()
    ref = torch.tensor([[0.0], [-1200.0]], dtype=torch.float16, device=device)
    value = linear_kl(hidden, weight, hidden, ref, direction="reverse", backend="triton")
    (grad,) = torch.autograd.grad(value, weight, torch.full_like(value, upstream))
    torch.testing.assert_close(
        grad.flatten().float().cpu(), torch.tensor([-300.0, 300.0]) * upstream, rtol=2e-3, atol=0
    )


def test_dtypes_of_the_reference_are_asked_about() -> None:
    """A reference in float64 is not served, whatever the student is; by hand so, and by the choice of another."""
    case = random_divergence(5, dtype=torch.float32, device="cuda" if HAS_GPU else "cpu")
    wide = replace(case, teacher=case.teacher.to(torch.float64))
    with pytest.raises(UnsupportedError, match="torch.float64, and it serves"):
        wide.value(backend="triton")
