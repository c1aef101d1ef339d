"""The aux_loss of a mixture of experts: transformers' number, beside the gradients that Megatron adds by itself."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cpu import build_gpt, hf_config, hf_model, parallel
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from logitless import PackedBatch
from logitless.errors import CollectiveError
from logitless.testing.distributed import run_ranks
from logitless_mcore import make_forward, to_value_model
from logitless_mcore.balance import Balance
from logitless_mcore.weights import load_hf_weights

SHAPE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
# No padding on two ranks of any kind: it is routed, and counted, as Megatron does.
SEQUENCES = [torch.arange(n) * step % 128 for n, step in ((8, 5), (12, 11), (4, 3))]


def transformers_number(hf: Any) -> Tensor:
    by_sequence = [hf(ids[None], output_router_logits=True).router_logits for ids in SEQUENCES]
    layers = tuple(torch.cat(parts).detach() for parts in zip(*by_sequence, strict=True))
    return load_balancing_loss_func(layers, hf.config.num_experts, hf.config.num_experts_per_tok)


def numbers(rank: int, size: int, hf: Any, parts: dict[str, int], changes: dict[str, Any]) -> list[Tensor | None]:
    """By every layout, each with a backward of the balancing losses alone."""
    found = []
    with parallel(**parts):
        gpt = build_gpt(hf.config, **changes).train()
        load_hf_weights(gpt, hf)
        batch = PackedBatch.from_sequences(SEQUENCES, align=4)
        cp = parts.get("cp", 1)
        for layout in ("thd",) if cp > 1 else ("thd", "nested"):
            gpt.zero_grad(set_to_none=True)
            out = make_forward(gpt, layout)(batch.shard(rank, cp) if cp > 1 else batch)
            assert not out.aux_loss.requires_grad
            found.append(out.aux_loss)
            (0.0 * out.log_probs).sum().backward()
            assert float(gpt.decoder.layers[0].mlp.router.weight.grad.abs().max()) > 1e-6
        return found


@pytest.mark.parametrize(
    ("parts", "changes"),
    [
        ({}, AUX),
        ({}, {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}),
        ({"tp": 2}, {**AUX, "sequence_parallel": True}),
        ({"cp": 2}, AUX),
        ({"ep": 2}, {**AUX, "moe_token_dispatcher_type": "allgather", "variable_seq_lengths": False}),
    ],
    ids=["one", "by-sequence", "tp2-sp", "cp2", "ep2"],
)
def test_equals_transformers(parts: dict[str, int], changes: dict[str, Any]) -> None:
    hf = hf_model("qwen3_moe", **SHAPE)
    expected = transformers_number(hf)
    assert float(expected) > SHAPE["num_experts_per_tok"] + 0.01  # not balanced, or all would be the same
    for of_rank in run_ranks(max(parts.values(), default=1), numbers, hf, parts, changes):
        for found in of_rank:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def absent(rank: int, size: int, hf: Any) -> None:
    batch = PackedBatch.from_sequences(SEQUENCES)
    with parallel():
        gpt = build_gpt(hf.config, **AUX).train()
        forward = make_forward(gpt)
        with torch.no_grad():
            assert forward(batch).aux_loss is None
        assert make_forward(gpt.eval())(batch).aux_loss is None
        assert make_forward(build_gpt(hf.config).train())(batch).aux_loss is None  # no loss to balance by
        assert make_forward(build_gpt(hf_config("qwen2")).train())(batch).aux_loss is None
        for method in ("uniform", "block"):  # all layers' activations, and the first one's alone
            again = {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 1}
            recomputed = build_gpt(hf.config, **AUX, **again).train()
            assert len(recomputed.decoder.layers) > 1
            out = make_forward(recomputed)(batch)
            assert out.aux_loss is None
            (0.0 * out.log_probs).sum().backward()
            assert float(recomputed.decoder.layers[0].mlp.router.weight.grad.abs().max()) > 1e-6
        critic = build_gpt(hf.config, **AUX).train()
        to_value_model(critic)
        assert float(make_forward(critic)(batch).aux_loss) >= 1.0


def survivor_of(rank: int, size: int) -> None:
    """Two ranks' call, of which the second dies before the number is summed."""
    router = SimpleNamespace(tp_cp_group=dist.group.WORLD, topk=2, _apply_aux_loss=lambda *args: None)
    balance = Balance(True)
    balance.seen_by(router)(torch.rand(5, 4), torch.rand(5, 4), torch.ones(5, 4))
    if rank == 1:
        os._exit(3)
    with pytest.raises(CollectiveError, match="look for the first error in the other ranks' logs"):
        balance.loss()


def test_a_rank_that_is_gone_is_told() -> None:
    with pytest.raises(RuntimeError) as found:
        run_ranks(2, survivor_of, seconds=10)
    assert str(found.value) == "rank 1: died without a word"


def test_where_there_is_none() -> None:
    run_ranks(1, absent, hf_model("qwen3_moe", **SHAPE))


def staged(rank: int, size: int, hf: Any) -> None:
    with parallel(pp=2):
        gpt = build_gpt(hf.config, **AUX).train()
        batch = PackedBatch.from_sequences(SEQUENCES)
        if rank == 1:
            hidden = torch.empty(sum(batch.padded_lengths), 1, hf.config.hidden_size)
            dist.recv(hidden, 0)
            gpt.set_input_tensor(hidden)
            assert make_forward(gpt)(batch).aux_loss is None
        else:
            dist.send(make_forward(gpt)(batch).detach(), 1)


def test_a_stage_does_not_pass_its_layers_off_as_all() -> None:
    run_ranks(2, staged, hf_model("qwen3_moe", **SHAPE))
