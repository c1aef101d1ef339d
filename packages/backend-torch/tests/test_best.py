"""The most likely tokens: ids, ties, log-probs and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless import LMHead, reference, top_k_log_probs
from logitless._call import make_call
from logitless.best import top_k_log_probs_op
from logitless.errors import InputTypeError, InvalidInputError, UnsupportedError
from logitless.testing import AllocationGuard, ProductCounter, ReferenceBackend, installed, random_example


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 60),
    k=st.integers(1, 60),
    grid=st.sampled_from([None, 1.0]),
    workspace_bytes=st.sampled_from([1, 4000, 512 << 20]),
)
def test_any_k(seed: int, vocab: int, k: int, grid: float | None, workspace_bytes: int) -> None:
    """With a grid, whole logits: most of them are equal to others."""
    k = min(k, vocab)
    example = random_example(6, vocab=vocab, hidden_size=3, seed=seed, std=1.0)
    hidden, weight = example.hidden, example.head.weight
    if grid is not None:
        hidden, weight = hidden.round(), weight.round()
    ids, log_probs = top_k_log_probs(hidden, weight, k, backend="torch", workspace_bytes=workspace_bytes)
    want_ids, want = reference.top_k_log_probs(hidden, LMHead(weight), k)
    torch.testing.assert_close(log_probs, want, rtol=1e-11, atol=1e-12)
    if grid is not None or vocab > 1:
        assert torch.equal(ids, want_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_a_whole_head(dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"bias": True, "scale": 0.8, "softcap": 5.0, "vocab_size": 150, "lora": (2,)}
    example = random_example((2, 5), dtype=dtype, per_token_temperature=True, **options)
    exact = example.to(torch.float64)
    for k in (1, 7, 150):
        ids, log_probs = top_k_log_probs(example.hidden, example.head, k, temperature=example.temperature)
        want_ids, want = reference.top_k_log_probs(exact.hidden, exact.head, k, temperature=exact.temperature)
        assert log_probs.dtype == torch.float32
        torch.testing.assert_close(log_probs.double(), want, rtol=1e-5, atol=2e-5)
        if k == 7:
            assert torch.equal(ids, want_ids)


def test_columns_of_minus_infinity_come_last_by_id() -> None:
    bias = torch.full((12,), -float("inf"))
    bias[[3, 8]] = torch.tensor([1.0, 2.0])
    ids, log_probs = top_k_log_probs(torch.zeros(1, 2), LMHead(torch.zeros(12, 2), bias), 5, workspace_bytes=1)
    assert ids.tolist() == [[8, 3, 0, 1, 2]]
    assert log_probs[0, 2:].tolist() == [-float("inf")] * 3


def test_gradients() -> None:
    example = random_example(6)
    fresh, exact = example.fresh(), example.fresh()
    (ids, got), (_, want) = (
        top_k_log_probs(fresh.hidden, fresh.head, 4),
        reference.top_k_log_probs(exact.hidden, exact.head, 4),
    )
    assert not ids.requires_grad
    upstream = torch.randn(got.shape, dtype=torch.float64)
    mine = torch.autograd.grad(got, list(fresh.leaves().values()), upstream)
    right = torch.autograd.grad(want, list(exact.leaves().values()), upstream)
    for a, b in zip(mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_masked_tokens_cost_nothing() -> None:
    example = random_example(10)
    mask = torch.arange(10) % 3 == 0
    with torch.no_grad(), ProductCounter() as products:
        ids, log_probs = top_k_log_probs(example.hidden, example.head, 4, mask=mask)
    assert products.flops == 2 * 4 * example.head.weight.numel()
    assert torch.all(ids[~mask] == -100)
    assert log_probs[~mask].count_nonzero() == 0
    want_ids, want = reference.top_k_log_probs(example.hidden, example.head, 4)
    assert torch.equal(ids[mask], want_ids[mask])
    torch.testing.assert_close(log_probs[mask], want[mask])
    unasked = top_k_log_probs(example.hidden, example.head, 4, mask=mask, validate=False)
    assert torch.equal(unasked[0], ids)


def test_no_logits_in_full() -> None:
    example = random_example(300, vocab=4096, hidden_size=16, dtype=torch.float32)
    with torch.no_grad(), AllocationGuard(1 << 18):
        top_k_log_probs(example.hidden, example.head, 20, workspace_bytes=1 << 18)


def test_compiles_and_passes_opcheck() -> None:
    example = random_example(9, vocab=43, hidden_size=8, dtype=torch.float32)

    def best(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return top_k_log_probs(hidden, weight, 3, backend="torch")

    torch._dynamo.reset()
    compiled = torch.compile(best, fullgraph=True, backend="aot_eager")
    for trained in (False, True):
        found = []
        for function in (best, compiled):
            leaves = [x.clone().requires_grad_(trained) for x in (example.hidden, example.head.weight)]
            ids, log_probs = function(*leaves)
            grads = torch.autograd.grad(log_probs.sum(), leaves) if trained else ()
            found.append([ids, log_probs, *grads])
        assert all(map(torch.equal, *found))
    call, _ = make_call(
        example.hidden,
        example.head,
        torch.zeros(9, dtype=torch.int64),
        temperature=1.0,
        entropy=False,
        entropy_grad=False,
        ignore_index=-100,
        tp_group=None,
        reduce_hidden_grad=True,
        keep_bytes=0,
        workspace_bytes=1 << 20,
        validate=True,
        backend="torch",
    )
    torch.library.opcheck(top_k_log_probs_op, (*call.args, 3))


def test_bad_arguments() -> None:
    hidden, weight = torch.zeros(2, 3), torch.zeros(5, 3)
    for k, error in ((0, InvalidInputError), (6, InvalidInputError), (1.0, InputTypeError), (True, InputTypeError)):
        with pytest.raises(error, match="k: got"):
            top_k_log_probs(hidden, weight, k)
    with pytest.raises(InputTypeError, match="mask: got"):
        top_k_log_probs(hidden, weight, 2, mask=torch.ones(2))
    with pytest.raises(InvalidInputError, match="mask: got shape"):
        top_k_log_probs(hidden, weight, 2, mask=torch.ones(3, dtype=torch.bool))


class Plain(ReferenceBackend):
    features = frozenset()


def test_a_backend_without_it_is_refused() -> None:
    with installed(Plain(), alone=True), pytest.raises(UnsupportedError, match="top_k_log_probs"):
        top_k_log_probs(torch.zeros(2, 3), torch.zeros(5, 3), 2)
