"""How gradients are summed: fp16 ones that are tiny, mixed dtypes, and blocks of any size."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from logitless.testing.example import random_example
from logitless.testing.tolerance import check_gradients, check_results
from logitless_triton import backward, sums
from logitless_triton.layout import Blocks
from logitless_triton.rows import Work
from logitless_triton.sums import matmul

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("size", [1e-7, 1e6])
def test_fp16_gradients_neither_vanish_nor_overflow(size: float) -> None:
    """Upstream gradients of a mean over millions of tokens, or scaled up: dz as it is would leave fp16's range."""
    example = random_example(50, dtype=torch.float16, device=DEVICE, ignored=False)
    example = replace(example, grad_log_probs=example.grad_log_probs * size, grad_entropy=example.grad_entropy * size)
    buffer = torch.zeros_like(example.head.weight, dtype=torch.float32)
    example.with_head(grad_buffer=buffer).run(backend="triton", frozen=("hidden",))
    check_gradients({"hidden": None, "weight": buffer}, example, dtypes={"weight": torch.float32})


def test_nan_does_not_take_small_fp16_gradients_with_it() -> None:
    """The scale that keeps them in fp16's range is made of what is finite."""
    example = random_example(50, dtype=torch.float16, device=DEVICE, ignored=False, lora=(3,))
    exact = random_example(50, dtype=torch.float32, device=DEVICE, ignored=False, lora=(3,))
    small = example.with_head(lora=exact.head.lora).scale_upstream(1e-7)
    broken = replace(small, grad_log_probs=small.grad_log_probs.index_fill(0, torch.tensor(0, device=DEVICE), math.nan))
    want, got = (each.run(backend="triton").gradients["lora_u0"] for each in (small, broken))
    assert want is not None
    assert got is not None
    assert bool(got[0].isnan().all())
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-2, atol=1e-3 * float(want.abs().max()))


@pytest.mark.parametrize("entropy_grad", [True, False])
def test_the_first_product_does_not_wait_for_d_weight_to_be_made(
    entropy_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device would wait with it, where the tokens are few."""
    example = random_example(20, dtype=torch.float32, device=DEVICE, ignored=False)
    events: list[object] = []
    empty = Work.empty

    def making(work: Work, *shape: int, **options: Any) -> torch.Tensor:
        events.append(shape)
        return empty(work, *shape, **options)

    def multiplying(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        events.append("product")
        matmul(a, b, out, **options)

    monkeypatch.setattr(Work, "empty", making)
    for module in (sums, backward):
        monkeypatch.setattr(module, "matmul", multiplying)
    example.run(backend="triton", keep_bytes=1 << 30, entropy_grad=entropy_grad)
    assert events.count("product") == 2
    assert events.index("product") < events.index(tuple(example.head.weight.shape))


@pytest.mark.parametrize("keep_bytes", [0, 1 << 30])
def test_narrow_hidden_beside_an_fp32_head_is_computed_in_fp32(
    keep_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No product has a dtype that cuBLAS does not write, though the interpreter's stand-in would."""

    def cublas(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
        assert out.dtype in (a.dtype, torch.float32)
        matmul(a, b, out, **options)

    monkeypatch.setattr(sums, "matmul", cublas)
    example = random_example(20, dtype=torch.float32, device=DEVICE)
    example = replace(example, hidden=example.hidden.bfloat16())
    got = example.run(backend="triton", keep_bytes=keep_bytes)
    check_results(got, example)
    hidden = got.gradients["hidden"]
    assert hidden is not None
    assert hidden.dtype == torch.bfloat16


def test_fp32_lora_pair_beside_a_half_head() -> None:
    """The pair is not rounded to the head's dtype: scores and the pair's gradients are better than that."""
    example = random_example(20, dtype=torch.float16, device=DEVICE, lora=(3,))
    exact = random_example(20, dtype=torch.float32, device=DEVICE, lora=(3,))
    example = example.with_head(lora=exact.head.lora)
    got = example.run(backend="triton")
    check_results(got, example)
    assert all(got.gradients[name].dtype == torch.float32 for name in ("lora_u0", "lora_b0"))


@pytest.mark.parametrize("n", [1, 13, 8192, 65536])
@pytest.mark.parametrize("workspace_bytes", [1, 1 << 20, 512 << 20, 1 << 40])
@pytest.mark.parametrize("scaled", [False, True])
def test_blocks_cover_all_and_fit(n: int, workspace_bytes: int, scaled: bool) -> None:
    columns, hidden_size, item = 151936, 4096, 2
    blocks = Blocks.plan(n, columns, hidden_size, item, workspace_bytes, scaled=scaled, multiprocessors=132)
    for spans, end in ((blocks.of_tokens(n), n), (blocks.of_columns(0, columns), columns)):
        assert spans[0][0] == 0
        assert spans[-1][1] == end
        assert all(a[1] == b[0] for a, b in pairwise(spans))
    if workspace_bytes == 1 << 40:
        assert blocks.columns >= columns
    tile = 4 * hidden_size * blocks.columns if scaled or blocks.tokens < n else 0
    smallest = 16 * 256 * item + 4 * hidden_size * 256
    assert blocks.tokens * blocks.columns * item + tile <= max(workspace_bytes, smallest)


def test_blocks_that_were_faster_are_chosen() -> None:
    """65536 tokens, D 4096, V 151936 on an H200: recompute took these times the products."""
    measured = {(16384, 10240): 1.021, (16384, 10880): 1.032, (21888, 8448): 1.014, (65536, 4224): 1.031}
    shape = {"n": 65536, "columns": 151936, "hidden_size": 4096}
    times = {each: Blocks(*each)._cost(**shape, multiprocessors=132, parts=1) for each in measured}
    assert min(times, key=lambda each: times[each]) == (21888, 8448)
    assert times[16384, 10240] < times[16384, 10880]
    plan = Blocks.plan(**shape, item=2, workspace_bytes=512 << 20, scaled=False, multiprocessors=132)
    assert plan == Blocks(21888, 8448)


def test_blocks_that_are_estimated_as_good_as_equal_are_wide() -> None:
    """8192 tokens on an H200: of 30464 columns recompute took 57.2 and 59.4 ms, of 25344 57.9 and 59.9."""
    shape = {"n": 8192, "columns": 151936, "hidden_size": 4096}
    narrow, wide = (Blocks(8192, columns)._cost(**shape, multiprocessors=132, parts=1) for columns in (25344, 30464))
    assert narrow < wide
    plan = Blocks.plan(**shape, item=2, workspace_bytes=512 << 20, scaled=False, multiprocessors=132)
    assert plan == Blocks(8192, 30464)
