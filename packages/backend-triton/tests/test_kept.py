"""What is kept: how much of it, right gradients from either way of keeping, and rows that are out of E's range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import logitless
from logitless.testing.example import Example, random_example
from logitless.testing.tolerance import check_gradients, check_results
from logitless.types import Request
from logitless_triton.kept import Kept
from logitless_triton.layout import DIFFERENCES, EXPONENTIALS, NOTHING, kept_length, mode_of, tiles_that_fit

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.bfloat16, torch.float32] if HAS_GPU else [torch.float32]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def request_of(n: int, vocab: int, **options: Any) -> Request:
    settings = {"hidden_dtype": torch.float32, "weight_dtype": torch.float32, **options}
    return Request(torch.device("cpu"), n_tokens=n, hidden_size=8, vocab_rows=vocab, **settings)


@pytest.mark.parametrize("entropy_grad", [True, False])
@pytest.mark.parametrize(("n", "vocab"), [(1, 1), (13, 157), (100, 5000)])
def test_never_more_than_allowed_and_everything_if_it_fits(n: int, vocab: int, entropy_grad: bool) -> None:
    request = request_of(n, vocab, entropy_grad=entropy_grad)
    tiles = -(-vocab // 128)
    whole = kept_length(request, 1 << 40)
    mode = DIFFERENCES if entropy_grad else EXPONENTIALS
    assert mode_of(whole) == mode
    assert tiles_that_fit(whole, n, 128, 4, mode, vocab) == tiles
    found = []
    for keep_bytes in range(0, whole + 100, max(1, whole // 50)):
        length = kept_length(request, keep_bytes)
        assert length <= keep_bytes
        assert mode_of(length) == (mode if length else NOTHING)
        found.append(tiles_that_fit(length, n, 128, 4, mode_of(length), vocab))
    assert found == sorted(found)
    assert len(set(found)) > min(tiles, 10) // 2


def test_values_end_with_the_kept_columns() -> None:
    """And are the body itself where its tiles end there: the device may be waiting for the host."""
    body = torch.arange(3.0 * 256).view(3, 256)
    assert torch.equal(Kept(DIFFERENCES, 200, 128, body).values, body[:, :200])
    assert Kept(DIFFERENCES, 256, 128, body).values is body


def test_nothing_for_no_tokens() -> None:
    assert kept_length(request_of(0, 100), 1 << 30) == 0


def test_half_precision_differences_where_the_way_of_exponentials_is_closed() -> None:
    closed = [
        {"bias": True},
        {"softcap": True},
        {"lora_rank": 3},
        {"group_size": 2},
        {"weight_dtype": torch.float16, "hidden_dtype": torch.float16},
    ]
    for options in closed:
        assert mode_of(kept_length(request_of(13, 157, entropy_grad=False, **options), 1 << 30)) == DIFFERENCES


def without_entropy(example: Example) -> Example:
    return replace(example, grad_entropy=torch.zeros_like(example.grad_entropy))


@each_dtype
@pytest.mark.parametrize("keep_bytes", [1 << 30, 40_000], ids=["whole", "partly"])
@pytest.mark.parametrize(
    "options",
    [{}, {"per_token_temperature": True}, {"scale": -1.5}, {"vocab_size": 131}, {"std": 0.0}, {"scale": 0.0}],
    ids=lambda options: "-".join(options) or "plain",
)
def test_exponentials(dtype: torch.dtype, keep_bytes: int, options: dict[str, Any]) -> None:
    example = random_example(50, dtype=dtype, device=DEVICE, **options)
    got = example.run(backend="triton", keep_bytes=keep_bytes, entropy_grad=False)
    check_results(got, without_entropy(example), factors={"weight": 1.3})


@each_dtype
def test_exponentials_out_of_range_are_made_again(dtype: torch.dtype) -> None:
    """Labels far below −67 nats and above in one tile, the least and the most likely ones of all included."""
    example = random_example(50, dtype=dtype, device=DEVICE, std=60.0, ignored=False)
    z = example.hidden.double() @ example.head.weight.double().T
    place = torch.arange(50, device=DEVICE) % 3
    labels = torch.where(place == 0, z.argmin(-1), torch.where(place == 1, z.argmax(-1), example.labels))
    example = without_entropy(replace(example, labels=labels))
    truth = example.truth()
    exact = truth.scores.log_probs.detach()
    assert float(exact.min()) < -200
    assert int((exact > -60).sum()) > 10
    got = example.run(backend="triton", keep_bytes=1 << 30, entropy_grad=False)
    check_results(got, example, truth=truth, factors={"weight": 1.3})


@each_dtype
@pytest.mark.parametrize("entropy_grad", [True, False])
def test_a_graph_can_be_gone_through_twice(dtype: torch.dtype, entropy_grad: bool) -> None:
    example = random_example(50, dtype=dtype, device=DEVICE).fresh()
    out = example.score(backend="triton", keep_bytes=1 << 30, entropy_grad=entropy_grad)
    leaves = list(example.leaves().values())
    first, second = (
        torch.autograd.grad(out.log_probs, leaves, example.grad_log_probs, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_dtype
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_exponentials_with_a_frozen_input(dtype: torch.dtype, frozen: str) -> None:
    example = without_entropy(random_example(50, dtype=dtype, device=DEVICE))
    got = example.run(backend="triton", frozen=(frozen,), keep_bytes=1 << 30, entropy_grad=False)
    assert got.gradients[frozen] is None
    check_gradients(got.gradients, example, factors={"weight": 1.3})


@each_dtype
def test_exponentials_into_a_grad_buffer(dtype: torch.dtype) -> None:
    example = without_entropy(random_example(50, dtype=dtype, device=DEVICE))
    buffer = torch.zeros_like(example.head.weight, dtype=torch.float32)
    for times in (1.0, 2.0):
        got = example.with_head(grad_buffer=buffer).run(backend="triton", keep_bytes=1 << 30, entropy_grad=False)
        rounded = (buffer / times).to(dtype)  # the 1.3 are of gradients in their input's dtype
        check_gradients({**got.gradients, "weight": rounded}, example, factors={"weight": 1.3})


@each_dtype
def test_single_pass_keeps_within_the_workspace(dtype: torch.dtype) -> None:
    """As many chunks as it takes, with an uneven last one; gradients as from two passes."""
    example = random_example(300, dtype=dtype, device=DEVICE, ignored=False)
    fresh, chunks = example.fresh(), []

    def loss_fn(scores: logitless.TokenLogProbs, index: torch.Tensor) -> torch.Tensor:
        chunks.append(len(index))
        assert scores.entropy is not None
        return example.grad_log_probs[index] * scores.log_probs + example.grad_entropy[index] * scores.entropy

    room = 256 * 2 * (128 * fresh.hidden.element_size() + 4)
    loss, _ = logitless.linear_policy_loss(
        fresh.hidden, fresh.head, fresh.labels, loss_fn, backend="triton", workspace_bytes=room
    )
    assert chunks == [256, 44]
    leaves = fresh.leaves()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    check_gradients(dict(zip(leaves, grads, strict=True)), example)
