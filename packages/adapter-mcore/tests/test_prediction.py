"""Multi-token prediction: losses and every gradient equal Megatron's own by its logits, and no logits exist."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from logitless import PackedBatch
from logitless.errors import InvalidInputError
from logitless.testing.distributed import run_ranks
from logitless.testing.memory import AllocationGuard

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
from megatron.core import parallel_state
from megatron_cpu import build_gpt, gpt_config, hf_config, parallel, scheduled

from logitless_mcore import (
    fused_forward_model_gen,
    fused_gptmodel_forward_no_padding,
    layer_spec,
    make_forward,
    model_forward_gen,
)
from logitless_mcore.spec import prediction_spec

TOLERANCE = 1e-5
TRAIN = SimpleNamespace(enable_train=True)
IDS = torch.randint(0, 128, (3, 11), generator=torch.Generator().manual_seed(2))
MASK = torch.zeros(3, 11, dtype=torch.int64)
MASK[0, 4:] = MASK[1, :9] = MASK[2, [1, 2, 5, 6, 10]] = 1
LABELS = torch.randint(0, 128, (3, 11), generator=torch.Generator().manual_seed(3))
SCORED = MASK * (torch.rand(3, 11, generator=torch.Generator().manual_seed(4)) < 0.7)
UPSTREAM = torch.randn(3, 11, generator=torch.Generator().manual_seed(5))


def build(depth: int, tied: bool = False, **changes: Any) -> Any:
    """A GPTModel of `depth` further heads in training mode, every parameter perturbed; alike in each process."""
    hf = hf_config("qwen2", tied)
    changes = {"mtp_num_layers": depth, "mtp_loss_scaling_factor": 0.7, **changes}
    config = gpt_config(hf, **changes)
    spec = layer_spec(config)
    torch.manual_seed(0)
    heads = {"mtp_block_spec": prediction_spec(config, spec)} if parallel_state.is_pipeline_last_stage() else {}
    gpt = build_gpt(hf, spec=spec, model=heads, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return gpt.train()


def tracked() -> dict[str, Tensor]:
    """What Megatron logs of its heads, taken out of its tracker."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper as Helper

    found = {name: x.clone() for name, x in Helper.tracker.items() if isinstance(x, Tensor)}
    Helper.tracker.clear()
    return found


def by_logits(gpt: Any, data_format: str, temperature: float, mtp: Any) -> Any:
    """Log-probs [B, S] of the labels, by the model's own logits over all tensor-parallel ranks; of the last stage."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def processor(output: Tensor, label: Tensor, label_mask: Tensor) -> dict[str, Tensor]:
        loss = vocab_parallel_cross_entropy(output.float() / temperature, label)
        return {"log_probs": -loss * label_mask}

    arguments = {"label": LABELS, "label_mask": SCORED}
    forward = model_forward_gen()
    return forward(gpt, IDS, MASK, None, {}, processor, arguments, data_format=data_format, mtp_config=mtp)


def by_hidden_states(gpt: Any, data_format: str, temperature: float, mtp: Any) -> Any:
    return fused_forward_model_gen()(
        gpt, IDS, None, MASK, LABELS, SCORED, temperature, {}, data_format=data_format, mtp_config=mtp
    )


Way = Callable[[Any, str, float, Any], Any]


def step(gpt: Any, way: Way, data_format: str, mtp: Any) -> tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]:
    """Scores, gradients and what was logged, of one step."""
    gpt.zero_grad(set_to_none=True)
    tracked()
    log_probs = way(gpt, data_format, 0.8, mtp)["log_probs"]
    (UPSTREAM * log_probs).sum().backward()
    return log_probs.detach(), {name: p.grad for name, p in gpt.named_parameters()}, tracked()


def same_step(rank: int, size: int, depth: int, tied: bool, changes: dict[str, Any]) -> list[float]:
    worst = []
    with parallel(tp=size):
        gpt = build(depth, tied, **changes)
        for data_format in ("thd", "bshd"):
            expected, wanted, logged = step(gpt, by_logits, data_format, TRAIN)
            found, grads, own_log = step(gpt, by_hidden_states, data_format, TRAIN)
            _, without, _ = step(gpt, by_hidden_states, data_format, None)
            worst.append(float((found - expected).abs().max()))
            assert logged.keys() == own_log.keys()
            assert logged
            for name, x in logged.items():
                torch.testing.assert_close(own_log[name], x, rtol=0, atol=TOLERANCE, msg=name)
            felt = 0.0
            for name, want in wanted.items():
                if name.startswith("mtp."):
                    assert without[name] is None, name
                elif without[name] is not None:
                    felt = max(felt, float((grads[name] - without[name]).abs().max()))
                assert float(want.abs().max()) > 0, name
                worst.append(float((grads[name] - want).abs().max()) / max(1.0, float(want.abs().max())))
            assert felt > 1e-3  # the further heads reach the rest of the model
    return worst


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"])
@pytest.mark.parametrize(("depth", "tied"), [(1, False), (2, False), (2, True)], ids=["1", "2", "2-tied"])
def test_steps_equal_those_by_logits(depth: int, tied: bool, tp: int, sp: bool) -> None:
    for worst in run_ranks(tp, same_step, depth, tied, {"sequence_parallel": sp}):
        assert max(worst) <= TOLERANCE, worst


def test_losses_by_token_equal_those_by_logits() -> None:
    for worst in run_ranks(1, same_step, 2, False, {"calculate_per_token_loss": True}):
        assert max(worst) <= TOLERANCE, worst


def test_gradients_of_the_further_heads_alone() -> None:
    """Where the model's own loss is worth nothing."""

    def run(rank: int, size: int) -> None:
        with parallel():
            gpt = build(1)
            grads = []
            for way in (by_logits, by_hidden_states):
                gpt.zero_grad(set_to_none=True)
                (0.0 * way(gpt, "thd", 1.0, TRAIN)["log_probs"]).sum().backward()
                grads.append({name: p.grad.clone() for name, p in gpt.named_parameters() if p.grad is not None})
            tracked()
            assert float(grads[0]["output_layer.weight"].abs().max()) > 1e-3
            for name, want in grads[0].items():
                torch.testing.assert_close(grads[1][name], want, rtol=0, atol=TOLERANCE, msg=name)

    run_ranks(1, run)


# --- the other forwards ---------------------------------------------------------------------------------------------


def nested_and_bound(rank: int, size: int) -> None:
    with parallel(tp=size):
        gpt = build(2)
        lengths = [7, 9, 5]
        sequences = [row[:length] for row, length in zip(IDS, lengths, strict=True)]
        grads = []

        def finish(log_probs: Tensor, weights: Tensor) -> None:
            (weights * log_probs).sum().backward()
            grads.append({name: p.grad.clone() for name, p in gpt.named_parameters()})
            gpt.zero_grad(set_to_none=True)

        nested = torch.nested.nested_tensor(sequences, layout=torch.jagged)
        weights = torch.cat([row[:length] for row, length in zip(UPSTREAM, lengths, strict=True)])
        finish(fused_gptmodel_forward_no_padding(gpt, nested, mtp_config=TRAIN)["log_probs"].values(), weights)
        batch = PackedBatch.from_sequences(sequences)
        for layout in ("thd", "bshd", "nested"):
            forward = make_forward(gpt, layout)
            finish(forward(batch, mtp=True).log_probs, weights)

            def loss_fn(scores: Any, index: Tensor) -> Tensor:
                return weights[index] * scores.log_probs

            finish(forward(batch, mtp=True, loss_fn=loss_fn).loss, torch.ones(()))
        tracked()
        for other in grads[1:]:
            for name, want in grads[0].items():
                torch.testing.assert_close(other[name], want, rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("tp", [1, 2])
def test_every_forward_trains_the_heads_alike(tp: int) -> None:
    run_ranks(tp, nested_and_bound)


def in_parts(rank: int, size: int, tp: int, cp: int, pp: int, sp: bool) -> list[dict[str, Tensor]]:
    """Scores and gradients of one step by Megatron's schedule, by logits and by hidden states."""
    found = []
    with parallel(tp=tp, cp=cp, pp=pp):
        gpt = build(2, sequence_parallel=sp, deallocate_pipeline_outputs=True, batch_p2p_comm=False)
        for way in (by_logits, by_hidden_states):
            gpt.zero_grad(set_to_none=True)
            scores = {}

            def loss_func(out: Any, scores: dict[str, Tensor] = scores) -> tuple[Tensor, dict[str, Tensor]]:
                scores["log_probs"] = out["log_probs"].detach().clone()
                return (UPSTREAM * out["log_probs"]).sum(), {}

            def forward_step(data: Any, model: Any, way: Way = way, loss_func: Any = loss_func) -> tuple[Any, Any]:
                return way(model, "thd", 0.8, TRAIN), loss_func

            scheduled(gpt, forward_step)
            for parameter in gpt.parameters():
                dist.all_reduce(parameter.grad, group=gpt.pg_collection.cp)
            found.append({**scores, **{name: p.grad for name, p in gpt.named_parameters()}})
            tracked()
    return found


@pytest.mark.parametrize(
    ("tp", "cp", "pp", "sp"),
    [(1, 2, 1, False), (2, 2, 1, True), (1, 1, 2, False)],
    ids=["cp2", "tp2-sp-cp2", "pp2"],
)
def test_the_parts_of_a_model_equal_their_logits(tp: int, cp: int, pp: int, sp: bool) -> None:
    of_ranks = run_ranks(tp * cp * pp, in_parts, tp, cp, pp, sp)
    assert "log_probs" in of_ranks[-1][0]
    assert any(name.startswith("mtp.") for name in of_ranks[-1][0])
    for logits, fused in of_ranks:
        assert logits.keys() == fused.keys()
        for name, want in logits.items():
            assert float(want.abs().max()) > 0, name
            torch.testing.assert_close(fused[name], want, rtol=0, atol=TOLERANCE, msg=name)


# --- memory, and what is left alone -----------------------------------------------------------------------------------


def guarded(rank: int, size: int) -> None:
    """The head is 2 MiB; the logits of these tokens would be 8 MiB for each head."""
    rows, tokens = 8192, 256
    with parallel():
        gpt = wide(rows)
        ids = torch.arange(tokens)[None]
        batch = PackedBatch.from_sequences([ids[0]])
        forward = make_forward(gpt)
        limit = 4 * rows * 64 + 1
        with AllocationGuard(limit):
            forward(batch, mtp=True).log_probs.sum().backward()
        tracked()
        inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": None, "labels": ids}
        with pytest.raises(AssertionError, match="8388608 bytes"), AllocationGuard(limit):
            gpt(**inputs)
        tracked()


def wide(rows: int) -> Any:
    hf = hf_config("qwen2", vocab_size=rows)
    config = gpt_config(hf, mtp_num_layers=2)
    spec = layer_spec(config)
    return build_gpt(hf, spec=spec, model={"mtp_block_spec": prediction_spec(config, spec)}, mtp_num_layers=2).train()


def test_no_logits_exist() -> None:
    run_ranks(1, guarded)


def test_a_model_that_does_not_look_ahead_is_not_asked_to() -> None:
    def run(rank: int, size: int) -> None:
        with parallel():
            forward = make_forward(build_gpt(hf_config("qwen2")))
            with pytest.raises(InvalidInputError, match="without multi-token prediction"):
                forward(PackedBatch.from_sequences([IDS[0]]), mtp=True)

    run_ranks(1, run)
