"""Mixtures of experts: weights in and out, and every dispatcher that runs on a CPU against its own logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cpu import build_gpt, hf_config, hf_gradients, hf_model, parallel, run_model
from oracle import Expected, expect
from torch import Tensor

from logitless import PackedBatch
from logitless.errors import InvalidInputError, UnsupportedError
from logitless.testing.distributed import run_ranks
from logitless_mcore import fused_forward_model_gen, make_forward, model_forward_gen
from logitless_mcore.experts import one_by_one
from logitless_mcore.weights import hf_weights, load_hf_weights, save_hf_weights

TOLERANCE = 1e-5
SHAPE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
IDS = torch.randint(0, 128, (3, 12), generator=torch.Generator().manual_seed(2))
MASK = torch.zeros(3, 12, dtype=torch.int64)
MASK[0, 4:] = MASK[1, :9] = MASK[2, [1, 2, 5, 6, 10]] = 1
LABELS = torch.randint(0, 128, (3, 12), generator=torch.Generator().manual_seed(3))
UPSTREAM = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(5))


# --- weights --------------------------------------------------------------------------------------------------------


def published(hf: Any, folder: Path) -> dict[str, Tensor]:
    """What a checkpoint of it holds, expert by expert."""
    from safetensors.torch import load_file

    hf.save_pretrained(folder)
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


@pytest.mark.parametrize(("tp", "ep", "pp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)], ids=str)
def test_weights_come_in_and_go_out(tp: int, ep: int, pp: int, tmp_path: Path) -> None:
    hf = hf_model("qwen3_moe", **SHAPE)
    names = published(hf, tmp_path / "hf")
    assert sum(".experts." in name for name in names) == 2 * 4 * 3
    expected = hf(IDS, use_cache=False).logits.detach()
    mine = tmp_path / "mine"

    def run(rank: int, size: int) -> float:
        worst = 0.0
        dispatcher = "alltoall" if ep == 1 else "allgather"
        with parallel(tp=tp, ep=ep, pp=pp), torch.no_grad():
            for source in (hf, tmp_path / "hf", names):
                gpt = build_gpt(hf.config, moe_token_dispatcher_type=dispatcher, variable_seq_lengths=ep == 1).eval()
                for parameter in gpt.parameters():
                    parameter.fill_(float("nan"))
                load_hf_weights(gpt, source)
                found = dict(hf_weights(gpt))
                if pp == 1:
                    assert found.keys() == names.keys()
                for name, tensor in found.items():
                    assert torch.equal(tensor, names[name]), name
                positions = torch.arange(IDS.shape[1]).expand_as(IDS)
                out = run_model(gpt, input_ids=IDS, position_ids=positions, attention_mask=None)
                if out is not None:
                    worst = max(worst, float((out - expected).abs().max()))
            save_hf_weights(gpt, mine, config=hf.config)
        return worst

    assert max(run_ranks(tp * ep * pp, run)) <= TOLERANCE
    again = type(hf).from_pretrained(mine)
    assert torch.equal(again(IDS, use_cache=False).logits, expected)


def test_dense_layers_between_and_settings_that_differ() -> None:
    hf = hf_model("qwen3_moe", **SHAPE, mlp_only_layers=[0])

    def run(rank: int, size: int) -> None:
        with parallel(), torch.no_grad():
            gpt = build_gpt(hf.config, moe_layer_freq=[0, 1]).eval()
            load_hf_weights(gpt, hf)
            positions = torch.arange(IDS.shape[1]).expand_as(IDS)
            out = run_model(gpt, input_ids=IDS, position_ids=positions, attention_mask=None)
            torch.testing.assert_close(out, hf(IDS, use_cache=False).logits, rtol=0, atol=TOLERANCE)
            for changes, told in [
                ({"moe_layer_freq": 1}, "moe_layer_freq by layer"),
                ({"moe_router_pre_softmax": True}, "moe_router_pre_softmax"),
                ({"moe_router_topk": 3}, "moe_router_topk"),
                ({"moe_router_score_function": "sigmoid"}, "moe_router_score_function"),
            ]:
                with pytest.raises(InvalidInputError, match=told):
                    load_hf_weights(build_gpt(hf.config, **{"moe_layer_freq": [0, 1], **changes}), hf)
            shared = build_gpt(hf.config, moe_layer_freq=[0, 1], moe_shared_expert_intermediate_size=16)
            with pytest.raises(UnsupportedError, match="shared_experts"):
                load_hf_weights(shared, hf, check_config=False)

    run_ranks(1, run)


# --- forwards -------------------------------------------------------------------------------------------------------


def build(**changes: Any) -> Any:
    """In training mode, every parameter perturbed, and alike in each process."""
    torch.manual_seed(0)
    gpt = build_gpt(hf_config("qwen3_moe", **SHAPE), **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return gpt.train()


def by_logits(gpt: Any, data_format: str) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [B, S] by the model's own logits."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    def processor(output: Tensor, label: Tensor) -> dict[str, Tensor]:
        log_p = gather_from_tensor_model_parallel_region(output).float().log_softmax(-1)
        return {
            "log_probs": log_p.gather(-1, label[..., None])[..., 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
        }

    out = model_forward_gen()(gpt, IDS, MASK, None, {}, processor, {"label": LABELS}, data_format=data_format)
    return out["log_probs"], out["entropy"]


def by_hidden_states(gpt: Any, data_format: str) -> tuple[Tensor, Tensor]:
    out = fused_forward_model_gen()(gpt, IDS, None, MASK, LABELS, MASK, 1.0, {}, data_format=data_format)
    return out["log_probs"], out["entropy"]


def tracked() -> dict[str, Tensor]:
    """The auxiliary losses by layer that Megatron logged since the last call."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # before 0.18
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        own = get_moe_layer_wise_logging_tracker()
        found = {name: entry["values"].clone() for name, entry in own.items()}
        own.clear()
        return found
    metrics = get_moe_metrics_tracker().metrics
    found = {name: entry.values.clone() for name, entry in metrics.items()}
    metrics.clear()
    return found


def same_step(rank: int, size: int, parts: dict[str, int], changes: dict[str, Any]) -> list[float]:
    """Both ways in both layouts; errors of scores and of every gradient."""
    worst, scores = [], {}
    with parallel(**parts):
        gpt = build(**changes)
        make_forward(gpt)  # so that its examination is not in what is logged
        for data_format in ("thd", "bshd"):
            found = []
            for way in (by_logits, by_hidden_states):
                gpt.zero_grad(set_to_none=True)
                tracked()
                own = torch.stack(way(gpt, data_format))
                (UPSTREAM * own * MASK).sum().backward()
                scores[way, data_format] = own.detach() * MASK
                found.append(({name: p.grad for name, p in gpt.named_parameters()}, tracked()))
            (wanted, logged), (grads, own_log) = found
            worst.append(float((scores[by_logits, data_format] - scores[by_hidden_states, data_format]).abs().max()))
            assert logged.keys() == own_log.keys()
            assert bool(logged) == ("moe_aux_loss_coeff" in changes)
            for name, x in logged.items():
                assert float(x.abs().sum()) > 0
                torch.testing.assert_close(own_log[name], x, rtol=0, atol=TOLERANCE)
            for name, want in wanted.items():
                assert (want is None) == (grads[name] is None), name
                if want is not None:
                    worst.append(float((grads[name] - want).abs().max()) / max(1.0, float(want.abs().max())))
        thd, bshd = scores[by_hidden_states, "thd"], scores[by_hidden_states, "bshd"]
        worst.append(float((thd - bshd).abs().max()))
    return worst


AUX = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
GATHER = {"moe_token_dispatcher_type": "allgather", "variable_seq_lengths": False}
KINDS = {
    "alltoall": AUX,
    "allgather": {**AUX, **GATHER},
    "shared-expert": {**AUX, "moe_shared_expert_intermediate_size": 32},
    "aux-by-sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "z-loss": {"moe_z_loss_coeff": 0.01},
    "sigmoid-bias": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_those_by_logits(kind: str) -> None:
    changes = dict(KINDS[kind])
    if kind == "z-loss":
        changes["moe_aux_loss_coeff"] = 0.0
    (worst,) = run_ranks(1, same_step, {}, changes)
    assert max(worst) <= TOLERANCE, worst


@pytest.mark.parametrize(
    ("ranks", "parts", "changes"),
    [
        (2, {"ep": 2}, {}),
        (2, {"ep": 2}, GATHER),
        (2, {"tp": 2}, {"sequence_parallel": True}),
    ],
    ids=["ep2-alltoall", "ep2-allgather", "tp2-sp"],
)
def test_steps_of_ranks_equal_those_by_logits(ranks: int, parts: dict[str, int], changes: dict[str, Any]) -> None:
    for worst in run_ranks(ranks, same_step, parts, {**AUX, **changes}):
        assert max(worst) <= TOLERANCE, worst


def spread(rank: int, size: int, hf: Any, expected: Expected, parts: dict[str, int], changes: dict[str, Any]) -> float:
    """Of experts on other ranks, each with its half of the sequences: the worst error against one process."""
    from megatron.core import parallel_state

    with parallel(**parts):
        gpt = build_gpt(hf.config, **changes)
        load_hf_weights(gpt, hf)
        replica = parallel_state.get_data_parallel_rank()
        mine = range(replica, len(EACH), 2)
        batch = PackedBatch.from_sequences([EACH[i] for i in mine])
        out = make_forward(gpt)(batch, temperature=0.8)
        loss, worst = torch.zeros(()), 0.0
        for kind, wanted in enumerate((expected.log_probs, expected.entropy)):
            for i, own in zip(mine, batch.unpack(out.entropy if kind else out.log_probs), strict=True):
                loss = loss + (expected.upstream[i][kind] * own[:-1]).sum()
                worst = max(worst, float((own[:-1] - wanted[i]).detach().abs().max()))
        loss.backward()
        for parameter in gpt.parameters():
            if getattr(parameter, "allreduce", True):  # Megatron's mark of what is not an expert's
                dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
        grads, found = one_by_one(expected.grads), hf_gradients(gpt)
        assert sum(".experts." in name for name in found) == 2 * 2 * 3  # half of the experts, in both layers
        for name, grad in found.items():
            want = grads[name]
            assert float(want.abs().max()) > 0, name
            worst = max(worst, float((grad - want).abs().max()) / max(1.0, float(want.abs().max())))
    return worst


EACH = [ids[:length] for ids, length in zip(IDS.repeat(2, 1), (8, 6, 5, 7), strict=False)]  # as many for each replica


@pytest.mark.parametrize(
    ("parts", "changes"),
    [
        ({"ep": 2}, {}),
        ({"ep": 2}, GATHER),
        ({"tp": 2, "ep": 2}, {**GATHER, "sequence_parallel": True}),  # gloo has no all-gather of unequal parts
    ],
    ids=["ep2-alltoall", "ep2-allgather", "tp2-sp-ep2-allgather"],
)
def test_experts_of_other_ranks_equal_one_process(parts: dict[str, int], changes: dict[str, Any]) -> None:
    hf = hf_model("qwen3_moe", **SHAPE)
    expected = expect(hf, EACH, 0.8)
    for worst in run_ranks(2 * parts.get("tp", 1), spread, hf, expected, parts, changes):
        assert worst <= TOLERANCE


def test_auxiliary_losses_reach_the_gradients() -> None:
    def run(rank: int, size: int) -> float:
        with parallel():
            grads = []
            for changes in ({}, AUX):
                gpt = build(**changes)
                (0.0 * by_hidden_states(gpt, "thd")[0]).sum().backward()
                grads.append(gpt.decoder.layers[0].mlp.router.weight.grad)
            tracked()
            assert float(grads[0].abs().max()) == 0.0
            return float(grads[1].abs().max())

    assert run_ranks(1, run)[0] > 1e-6


def replayed(rank: int, size: int, cp: int) -> None:
    """Routes taken by logits, then given to the fused forward of a model whose routers have changed."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    with parallel(tp=size // cp, cp=cp), torch.no_grad():
        gpt = build(moe_enable_routing_replay=True, sequence_parallel=size > cp).eval()
        forward = make_forward(gpt)
        batch = PackedBatch.from_padded(IDS, MASK, align=2 * cp if cp > 1 else 1)
        if cp > 1:
            batch = batch.shard(rank, cp)
        act = RouterReplay.set_global_router_replay_action
        act(RouterReplayAction.RECORD)
        before = by_logits(gpt, "thd")[0]
        routes = [x.clone() for x in RouterReplay.get_recorded_data()]
        RouterReplay.clear_global_indices()
        forward(batch)
        for mine, theirs in zip(RouterReplay.get_recorded_data(), routes, strict=True):
            assert torch.equal(mine, theirs)
        RouterReplay.clear_global_indices()
        for layer in gpt.decoder.layers:
            layer.mlp.router.weight.neg_()
        other = by_hidden_states(gpt, "thd")[0]
        RouterReplay.clear_global_indices()
        RouterReplay.set_replay_data(routes)
        act(RouterReplayAction.REPLAY_FORWARD)
        by_own_logits = by_logits(gpt, "thd")[0]
        RouterReplay.set_replay_data(routes)
        fused = by_hidden_states(gpt, "thd")[0]
        RouterReplay.clear_global_router_replay_action()
        torch.testing.assert_close(fused * MASK, by_own_logits * MASK, rtol=0, atol=TOLERANCE)
        assert float(((other - fused) * MASK).abs().max()) > 1e-3
        assert float(((before - fused) * MASK).abs().max()) > 1e-3


@pytest.mark.parametrize(("size", "cp"), [(1, 1), (2, 1), (2, 2)], ids=["one", "tp2-sp", "cp2"])
def test_router_replay_sees_the_packing_of_the_forward(size: int, cp: int) -> None:
    run_ranks(size, replayed, cp)
