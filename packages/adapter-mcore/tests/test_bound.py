"""A bound Megatron model against the Hugging Face model of the same weights, and against its own logits path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_cpu import build_gpt, hf_model, parallel
from oracle import Expected, deviation, expect, load, summed_over_tp

import logitless
from logitless import PackedBatch
from logitless.testing.distributed import run_ranks
from logitless_mcore import make_forward

LENGTHS = (7, 12, 1, 5)
TOLERANCE = 1e-5


def sequences(vocab: int = 128) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in LENGTHS]


def scores_and_gradients(
    rank: int, size: int, hf: Any, expected: Expected, tied: bool, sp: bool, temperature: float
) -> dict[str, tuple[float, float, float, str]]:
    """Errors of log_probs, entropy and the parameters' gradients, in every layout."""
    found = {}
    with parallel(tp=size):
        gpt = load(build_gpt(hf.config, sequence_parallel=sp), hf, tied)
        for layout in ("thd", "bshd", "nested"):
            gpt.zero_grad()
            batch = packed(layout)
            out = make_forward(gpt, layout)(batch, temperature=temperature)
            parts = [list(batch.unpack(x).unbind() if layout == "nested" else batch.unpack(x)) for x in scores(out)]
            terms = zip(expected.upstream, *parts, strict=True)
            sum((g * lp[:-1]).sum() + (e * ent[:-1]).sum() for (g, e), lp, ent in terms).backward()  # type: ignore[union-attr]
            summed_over_tp(gpt)
            assert all(float(x[-1]) == 0.0 for own in parts for x in own)
            errors = [
                max(float((x[:-1] - y).abs().max()) for x, y in zip(own, other, strict=True) if len(y))
                for own, other in zip(parts, (expected.log_probs, expected.entropy), strict=True)
            ]
            found[layout] = (*errors, *deviation(gpt, expected, tied))
    return found  # type: ignore[return-value]


def scores(out: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(out, logitless.CausalLMOutputForPPO)
    assert out.logits is None
    return out.log_probs, out.entropy  # type: ignore[return-value]


def packed(layout: str) -> PackedBatch:
    if layout == "nested":
        return PackedBatch.from_nested(torch.nested.nested_tensor(sequences(), layout=torch.jagged))
    return PackedBatch.from_sequences(sequences())


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_equals_hugging_face(family: str, tied: bool, tp: int, sp: bool) -> None:
    hf = hf_model(family, tied)
    expected = expect(hf, sequences(), 0.8)
    for of_rank in run_ranks(tp, scores_and_gradients, hf, expected, tied, sp, 0.8):
        for layout, found in of_rank.items():
            assert max(found[:3]) <= TOLERANCE, (layout, found)
