"""Two pipeline stages through Megatron's own schedule: stages that are not the last give their raw tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from logitless import PackedBatch
from logitless.testing.distributed import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
from megatron.core import parallel_state
from megatron_cpu import build_gpt, hf_model, parallel, scheduled
from oracle import Expected, deviation, expect, load, summed_over_tp

from logitless_mcore import fused_forward_model_gen, fused_gptmodel_forward_no_padding, make_forward

MICRO_BATCHES = ((7, 12), (5, 1, 9))
TOLERANCE = 1e-5


def sequences() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randint(0, 128, (n,), generator=generator) for n in lengths] for lengths in MICRO_BATCHES]


def jagged(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def by_make_forward(gpt: Any, layout: str) -> Any:
    forward = make_forward(gpt, layout)

    def run(ids: list[torch.Tensor]) -> Any:
        batch = PackedBatch.from_sequences(ids)
        out = forward(batch)
        return out, lambda out: (batch.unpack(out.log_probs), batch.unpack(out.entropy))

    return run


def by_fused_rows(gpt: Any) -> Any:
    forward = fused_forward_model_gen()

    def run(ids: list[torch.Tensor]) -> Any:
        rows = jagged(ids).to_padded_tensor(0)
        mask = torch.arange(rows.shape[1]) < torch.tensor([[len(one)] for one in ids])
        out = forward(gpt, rows, None, mask, rows.roll(-1, 1), mask, 1.0, None)
        return out, lambda out: [[x[i, : len(one)] for i, one in enumerate(ids)] for x in out.values()]

    return run


def by_fused_nested(gpt: Any, data_format: str) -> Any:
    def run(ids: list[torch.Tensor]) -> Any:
        out = fused_gptmodel_forward_no_padding(gpt, jagged(ids), data_format=data_format)
        return out, lambda out: [x.unbind() for x in out.values()]

    return run


def step(gpt: Any, run: Any, expected: Expected) -> tuple[float, float]:
    """One step over both micro-batches; on the last stage, the errors of log_probs and entropy."""
    worst = [0.0, 0.0]

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        ids, first = next(iterator)
        out, parts_of = run(ids)

        def loss_func(out: Any) -> Any:
            log_probs, entropy = parts_of(out)
            loss = torch.zeros(())
            for i, (lp, ent) in enumerate(zip(log_probs, entropy, strict=True), start=first):
                g, e = expected.upstream[i]
                loss = loss + (g * lp[:-1]).sum() + (e * ent[:-1]).sum()
                if len(g):
                    worst[0] = max(worst[0], float((lp[:-1] - expected.log_probs[i]).abs().max()))
                    worst[1] = max(worst[1], float((ent[:-1] - expected.entropy[i]).abs().max()))
            return loss * len(MICRO_BATCHES), {"loss": loss.detach()}

        return out, loss_func

    batches = sequences()
    data = iter([(batches[0], 0), (batches[1], len(batches[0]))])
    scheduled(gpt, forward_step, data, len(batches))
    return worst[0], worst[1]


def errors(rank: int, size: int, hf: Any, expected: Expected, tied: bool, tp: int, sp: bool) -> list[Any]:
    found = []
    with parallel(tp=tp, pp=2):
        config = {"sequence_parallel": sp, "deallocate_pipeline_outputs": True, "batch_p2p_comm": False}
        gpt = load(build_gpt(hf.config, **config), hf, tied)
        ways = [make(gpt, layout) for make in (by_make_forward, by_fused_nested) for layout in ("thd", "bshd")]
        for way in [*ways, by_fused_rows(gpt)]:
            gpt.zero_grad()
            scores = step(gpt, way, expected)
            if tied:  # as `finalize_model_grads` does
                weight = gpt.shared_embedding_or_output_weight()
                dist.all_reduce(weight.grad, group=parallel_state.get_embedding_group())
            summed_over_tp(gpt)
            found.append((*scores, *deviation(gpt, expected, tied)))
    return found


@pytest.mark.parametrize(("family", "tp"), [("qwen2", 1), ("qwen2", 2), ("qwen3", 1), ("llama", 1)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_equals_hugging_face(tied: bool, family: str, tp: int) -> None:
    hf = hf_model(family, tied, num_hidden_layers=4)
    expected = expect(hf, [ids for batch in sequences() for ids in batch])
    for of_rank in run_ranks(2 * tp, errors, hf, expected, tied, tp, tp > 1):
        for found in of_rank:
            assert max(found[:3]) <= TOLERANCE, found
