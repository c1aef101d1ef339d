"""The precision contract at real vocabularies, over the range of logits that models make, in every way of the backward.

Needs a GPU: the float64 truth of 256,000 columns, and the kernels that are compiled for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from logitless.head import LMHead
from logitless.testing.example import Example, random_example
from logitless.testing.tolerance import check_results

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="real vocabularies need a GPU")
TOKENS, HIDDEN = 64, 128
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "kept": {"keep_bytes": 1 << 30},
    "partly-kept": {"keep_bytes": 4 << 20},
    "exponentials": {"keep_bytes": 1 << 30, "entropy_grad": False},
}


def shaped(vocab: int, dtype: torch.dtype, logits: str) -> Example:
    """Flat, peaked or confident logits, and logits near an offset that all columns share."""
    std = {"flat": 0.01, "peaked": 5.0}.get(logits, 1.0)
    temperature = 0.7 if logits == "cold" else 1.0
    example = random_example(
        TOKENS, vocab=vocab, hidden_size=HIDDEN, dtype=dtype, device="cuda", std=std, temperature=temperature
    )
    weight = example.head.weight.clone()
    if logits == "confident":  # every other token's label is far ahead of the rest
        rows = torch.arange(0, TOKENS, 2, device="cuda")
        weight[example.labels[rows].clamp(min=0)] = (example.hidden[rows].float() * 0.15).to(dtype)
    offset = {"near -30": -30.0, "offset 1e4": 1e4}.get(logits)
    bias = None if offset is None else torch.full((vocab,), offset, dtype=dtype, device="cuda")
    return replace(example, head=LMHead(weight, bias=bias))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("logits", ["flat", "usual", "peaked", "confident", "cold", "near -30", "offset 1e4"])
@pytest.mark.parametrize("vocab", [1500, 50257, 128256, 151936, 256000])
def test_contract(vocab: int, logits: str, way: str) -> None:
    example = shaped(vocab, torch.bfloat16, logits)
    if way == "exponentials":
        example = replace(example, grad_entropy=torch.zeros_like(example.grad_entropy))
    check_results(example.run(backend="triton", **WAYS[way]), example)


@pytest.mark.parametrize("logits", ["usual", "peaked", "cold"])
def test_contract_in_half_precision(logits: str) -> None:
    example = shaped(128256, torch.float16, logits)
    for way in ("recompute", "kept"):
        check_results(example.run(backend="triton", **WAYS[way]), example)


@pytest.mark.parametrize("far", [40.0, 75.0, 120.0])
def test_labels_out_of_the_range_of_exponentials(far: float) -> None:
    """Labels so unlikely that E = 2^(x − x_label) overflows: those rows are made again."""
    example = shaped(50257, torch.bfloat16, "usual")
    hidden, weight = example.hidden.clone(), example.head.weight.clone()
    hidden[:, 0], weight[:, 0] = 1.0, 0.0
    weight[example.labels.clamp(min=0)[: TOKENS // 2], 0] = -far
    example = replace(example, hidden=hidden, head=LMHead(weight), grad_entropy=torch.zeros_like(example.grad_entropy))
    check_results(example.run(backend="triton", **WAYS["exponentials"]), example)


def test_a_token_alone_and_among_8192_has_the_same_bits() -> None:
    example = random_example(8192, vocab=32003, hidden_size=256, dtype=torch.bfloat16, device="cuda", ignored=False)
    whole = example.score(backend="triton")
    for at in (0, 17, 4095, 8191):
        one = replace(example, hidden=example.hidden[at : at + 1], labels=example.labels[at : at + 1])
        assert torch.equal(one.score(backend="triton").log_probs, whole.log_probs[at : at + 1])
