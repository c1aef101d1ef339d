"""What only a GPU takes, in the interpreter: TMA descriptors and a Hopper's tiles, passes over whole gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from logitless import TokenLogProbs, linear_log_probs, reference
from logitless.testing.divergence import check_divergence, random_divergence
from logitless.testing.example import Example, random_example
from logitless.testing.tolerance import check_results
from logitless_triton import config, dz, forward, rounding, rows, sums
from logitless_triton.config import Config, Device, Tile, config_for, trying

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does so by itself"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
HOPPER, AMPERE = Device((9, 0), 3), Device((8, 0), 3)
SMALL = Tile(32, 64, 16, warps=4, stages=2, per_sm=2)
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "kept": {"keep_bytes": 1 << 20},
    "kept-exponentials": {"keep_bytes": 1 << 20, "entropy_grad": False},
}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"bias": True, "lora": (3,), "softcap": 5.0, "vocab_size": 163, "per_token_temperature": True},
    "negative": {"scale": -0.7},
}


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Runs on a Hopper, so to say; whether each operand that asked for a descriptor got one."""
    from logitless_triton import kl_products  # with Triton, when its interpreter has been chosen

    found: list[bool] = []

    def spied(tensor: Tensor, block: list[int], inner: Any = forward.descriptor) -> Any:
        made = inner(tensor, block)
        found.append(made is not None)
        return made

    for module in (forward, dz, kl_products):
        monkeypatch.setattr(module, "descriptor", spied)
    monkeypatch.setattr(rows, "device_facts", lambda device: HOPPER)
    return found


def example_of(dtype: torch.dtype = torch.float16, hidden_size: int = 24, **head: Any) -> Example:
    return random_example(40, vocab=170, hidden_size=hidden_size, dtype=dtype, **head)


@pytest.mark.parametrize(
    ("way", "head"), [*((way, "full") for way in WAYS), ("recompute", "negative"), ("kept", "plain")]
)
def test_descriptors_give_the_same_bits_as_pointers(way: str, head: str, described: list[bool]) -> None:
    example = example_of(**HEADS[head])
    if way == "kept-exponentials":
        example = replace(example, grad_entropy=torch.zeros_like(example.grad_entropy))
    with trying(Config(SMALL, SMALL, SMALL)):
        got = example.run(backend="triton", **WAYS[way])
        check_results(got, example)
        assert described
        assert all(described)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows, "device_facts", lambda device: AMPERE)
            plain = example.run(backend="triton", **WAYS[way])
    assert torch.equal(got.scores.log_probs, plain.scores.log_probs)
    for name, gradient in got.gradients.items():
        assert torch.equal(gradient, plain.gradients[name]), name  # type: ignore[arg-type]


def test_logits_that_are_held_too(described: list[bool]) -> None:
    """Several labels of a token are looked up in float32 logits: twice as wide as what is kept in half precision."""
    example = random_example(17, vocab=100, hidden_size=16, dtype=torch.float16, bias=True)
    labels = torch.stack((example.labels, example.labels.flip(0)), dim=-1)

    def score() -> TokenLogProbs:
        return linear_log_probs(example.hidden, example.head, labels, backend="triton")

    with trying(Config(SMALL, SMALL, SMALL)):
        got = score()
        assert described
        assert all(described)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rows, "device_facts", lambda device: AMPERE)
            plain = score()
    expected = reference.linear_log_probs(example.hidden.double(), example.to(torch.float64).head, labels)
    torch.testing.assert_close(got.log_probs.double(), expected.log_probs, rtol=0.0, atol=1e-4)
    assert torch.equal(got.log_probs, plain.log_probs)
    assert torch.equal(got.entropy, plain.entropy)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_a_hoppers_own_tiles(dtype: torch.dtype, described: list[bool]) -> None:
    example = example_of(dtype, bias=True)
    check_results(example.run(backend="triton"), example)
    assert all(described)


def test_rows_that_no_descriptor_can_read_are_read_by_pointers(described: list[bool]) -> None:
    """They start at multiples of 46 bytes, where 16 would have to divide."""
    example = example_of(hidden_size=23)
    check_results(example.run(backend="triton"), example)
    assert not any(described[:2])


@pytest.mark.parametrize("direction", ["forward", "reverse", "jsd"])
def test_divergences(direction: str, described: list[bool]) -> None:
    case = random_divergence(
        20, direction=direction, dtype=torch.float16, vocab=170, ref_hidden_size=16, softcap=6.0, bias=True
    )
    check_divergence(case.run(backend="triton"), case)
    assert described
    assert all(described)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float16), (torch.float16, torch.float32)], ids=str)
@pytest.mark.parametrize("direction", ["forward", "jsd"])
def test_heads_of_two_dtypes(
    direction: str, dtypes: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose tiles are not of one width: they meet in the narrower."""
    monkeypatch.setattr(rows, "device_facts", lambda device: AMPERE)
    student, teacher = dtypes
    case = random_divergence(20, direction=direction, dtype=student, vocab=170, ref={"dtype": teacher})
    check_divergence(case.run(backend="triton"), case)


def test_tiles_by_architecture_and_dtype() -> None:
    """None but the interpreter's serve it, and on a GPU none of its tiles does."""
    interpreter = config_for(Device(config.INTERPRETED, 1), torch.float16, 4096)
    for device in (HOPPER, AMPERE):
        full = config_for(device, torch.float32, 4096)
        assert full.forward == full.dz == full.held == config_for(HOPPER, torch.float32, 64).forward
        for hidden_size in (64, 2048, 4096):
            half = config_for(device, torch.bfloat16, hidden_size)
            assert half == config_for(device, torch.float16, hidden_size)
            for tile in (half.forward, half.dz, half.held):
                staged = 2 * tile.depth * (tile.rows + tile.columns) * tile.stages  # bytes of operands of a program
                assert tile.per_sm * staged <= 227 << 10
            assert half != interpreter


@pytest.fixture
def cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor says that it is on a GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        yield


@pytest.mark.usefixtures("cuda_tensors")
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (97, 131)], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.0, -2.5, float("nan")])
def test_multiply_is_mul(shape: tuple[int, int], factor: float) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    expected = x * factor
    assert rounding.multiply_(x, torch.tensor(factor)) is x
    assert torch.equal(x.nan_to_num(7.0), expected.nan_to_num(7.0))
    turned = torch.randn(4, 3).T  # not contiguous: torch's own
    assert torch.equal(rounding.multiply_(turned.clone(), torch.tensor(2.0)), turned * 2.0)


@pytest.mark.usefixtures("cuda_tensors")
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (97, 131)], ids=str)
def test_rounded_is_to(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert rounding.rounded(x, torch.float32) is x
    found = rounding.rounded(x, torch.float16)
    assert found.dtype == torch.float16
    assert torch.equal(found, x.half())


@pytest.mark.usefixtures("cuda_tensors")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32], ids=["half", "float"])
@pytest.mark.parametrize("b_dtype", [torch.float16, torch.float32], ids=["half", "wide"])
def test_products_are_summed_in_float32(
    accumulate: bool, out_dtype: torch.dtype, b_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With float32 products in place of a GPU's `out_dtype=`; a wide b keeps its digits by entering in two parts."""
    mm, addmm = torch.mm, torch.addmm

    def wide_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert a.dtype == b.dtype == torch.float16
        return mm(a.to(out_dtype), b.to(out_dtype), out=out)

    def wide_addmm(x: Tensor, a: Tensor, b: Tensor, *, out: Tensor, beta: int = 1, **options: Any) -> Tensor:
        assert a.dtype == b.dtype == torch.float16
        return out.copy_(addmm(x.float(), a.float(), b.float(), beta=beta))

    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)
    g = torch.Generator().manual_seed(0)
    a, b, start = (torch.randn(shape, generator=g) for shape in ((9, 33), (33, 5), (9, 5)))
    a, b, out = a.half(), b.to(b_dtype), start.to(out_dtype)
    exact = a.double() @ b.double() + (out.double() if accumulate else 0.0)
    sums.matmul(a, b, out, accumulate=accumulate)
    assert out.dtype == out_dtype
    tolerance = 1e-5 if out_dtype == torch.float32 else 2e-3
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
