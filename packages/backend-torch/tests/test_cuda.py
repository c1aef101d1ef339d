"""The contract again on a CUDA device, where products of half inputs are taken in half and summed in float32."""

from __future__ import annotations

import pytest
import torch

from logitless.testing import check_results, random_example
from logitless.testing.conformance import BackendConformance

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


class TestTorchOnCuda(BackendConformance):
    backend = "torch"
    device = "cuda"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_float16_keeps_gradients_of_any_size(scale: float) -> None:
    """dz in float16 is scaled by a power of two: at upstream gradients of 1e-6 it would lose 7 %, at 1e4 overflow."""
    example = random_example(300, vocab=3000, hidden_size=64, dtype=torch.float16, device="cuda")
    example = example.scale_upstream(scale)
    check_results(example.run(backend="torch"), example)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sizes_of_several_tiles(dtype: torch.dtype) -> None:
    example = random_example(3000, vocab=9001, hidden_size=256, dtype=dtype, device="cuda")
    for workspace_bytes in (512 << 20, 8 << 20):
        check_results(example.run(backend="torch", workspace_bytes=workspace_bytes), example)


@pytest.mark.parametrize("newer", [False, True], ids=["older-setting", "newer-setting"])
def test_tf32_does_not_leak_in(newer: bool) -> None:
    example = random_example(300, vocab=3000, hidden_size=512, dtype=torch.float32, device="cuda")
    want = example.run(backend="torch")
    if newer:
        before, torch.backends.cuda.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision, "tf32"
    else:
        torch.set_float32_matmul_precision("high")
    try:
        got = example.run(backend="torch")
    finally:
        if newer:
            torch.backends.cuda.matmul.fp32_precision = before
        else:
            torch.set_float32_matmul_precision("highest")
    assert torch.equal(got.scores.log_probs, want.scores.log_probs)
    for name, grad in want.gradients.items():
        assert torch.equal(grad, got.gradients[name])  # type: ignore[arg-type]


def test_one_copy_to_the_host_at_most() -> None:
    """validate=True reads the values once; validate=False never, so that a CUDA graph can capture it."""
    example = random_example(50, dtype=torch.bfloat16, device="cuda", ignored=False)
    example.score(backend="torch", validate=False)  # loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        example.run(backend="torch", validate=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_replays() -> None:
    example = random_example(50, dtype=torch.bfloat16, device="cuda")
    static = example.fresh(frozen=("hidden", "weight"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        static.score(backend="torch", validate=False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = static.score(backend="torch", validate=False)
    other = random_example(50, dtype=torch.bfloat16, device="cuda", seed=1)
    static.hidden.copy_(other.hidden)
    static.labels.copy_(other.labels)
    graph.replay()
    want = static.score(backend="torch", validate=False)
    assert torch.equal(out.log_probs, want.log_probs)
