"""HybridModel, whose forward takes no output_processor: patterns of attention and MLP layers, whole or in the parts of
tensor, context and pipeline parallelism, against the logits of the whole model.

Its final norm is Transformer Engine's whatever the spec says, so torch's stands in while a model is built here. Mamba
layers need a GPU, Transformer Engine and mamba_ssm.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cpu import alone, gpt_config, hf_config, parallel, scheduled
from oracle import summed_over_tp
from torch import Tensor

from logitless import PackedBatch
from logitless.testing.distributed import run_ranks
from logitless.testing.memory import AllocationGuard
from logitless_mcore import keep_rotary_on_device, layer_spec, make_forward
from logitless_mcore.spec import RMSNorm, transformer_engine

pytest.importorskip(
    "megatron.core.models.hybrid.hybrid_block", reason="HybridModel came with 0.18", exc_type=ImportError
)
from megatron.core import parallel_state
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

TOLERANCE = 1e-5
SEQUENCES = [torch.arange(n) * step % 128 for n, step in ((7, 5), (12, 11), (1, 3), (4, 7))]


def build(tied: bool = False, vocab: int = 128, pattern: str = "*-*-", **changes: Any) -> Any:
    """Alternating layers of attention alone and MLP alone, every parameter perturbed."""
    config = gpt_config(hf_config("qwen2"), num_layers=len(pattern), **changes)
    dense = layer_spec(config).layer_specs[0].submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=dense.input_layernorm,
        self_attention=dense.self_attention,
        self_attn_bda=dense.self_attn_bda,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=dense.pre_mlp_layernorm, mlp=dense.mlp, mlp_bda=dense.mlp_bda, self_attention=IdentityOp
    )
    parts = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=TransformerLayer, submodules=mlp),
    )
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid_block, "TENorm", RMSNorm)
        model = HybridModel(
            config,
            ModuleSpec(module=hybrid_block.HybridStack, submodules=parts),
            vocab_size=vocab,
            max_sequence_length=256,
            hybrid_layer_pattern=pattern,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return keep_rotary_on_device(model)


@dataclass
class Whole:
    """Of the model on one rank: parameters, scores by its logits, and the gradients of Σ g·log_prob + e·entropy."""

    state: dict[str, Tensor]
    scores: Tensor  # [2, tokens that have a next one]
    grads: dict[str, Tensor]


def loss_of(log_probs: list[Tensor], entropies: list[Tensor]) -> Tensor:
    """Of scores of each sequence's tokens but the last."""
    generator = torch.Generator().manual_seed(3)
    loss = torch.zeros(())
    for lp, ent in zip(log_probs, entropies, strict=True):
        g, e = torch.randn(2, len(lp), generator=generator)
        loss = loss + (g * lp).sum() + (e * ent).sum()
    return loss


def by_logits(tied: bool) -> Whole:
    """Each sequence by itself, at t of the token after t."""
    model, log_probs, entropies = build(tied), [], []
    for ids in SEQUENCES:
        log_p = (model(ids[None], torch.arange(len(ids))[None], None)[0].float() / 0.8).log_softmax(-1)
        log_probs.append(log_p[:-1].gather(-1, ids[1:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1)[:-1])
    loss_of(log_probs, entropies).backward()
    scores = torch.stack([torch.cat(log_probs), torch.cat(entropies)]).detach()
    own = dict(model.named_parameters())
    return Whole({name: p.detach() for name, p in own.items()}, scores, {name: p.grad for name, p in own.items()})


def part_of(whole: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """What of these weights, or gradients, is this rank's, by its own names."""
    groups, found = model.pg_collection, {}
    before = len(model.decoder.layers) * groups.pp.rank()
    for name, parameter in model.named_parameters():
        source = re.sub(r"layers\.(\d+)", lambda i: f"layers.{before + int(i[1])}", name)
        x = whole["embedding.word_embeddings.weight"] if source not in whole else whole[source]
        if getattr(parameter, "tensor_model_parallel", False):
            blocks = x.chunk(2) if "linear_fc1" in name else [x]  # gate and up
            x = torch.cat(
                [block.chunk(groups.tp.size(), parameter.partition_dim)[groups.tp.rank()] for block in blocks]
            )
        found[name] = x
    return found


def errors(rank: int, size: int, whole: Whole, tied: bool, tp: int, cp: int, pp: int, sp: bool) -> list[float]:
    worst = []
    with parallel(tp=tp, cp=cp, pp=pp):
        model = build(tied, sequence_parallel=sp, deallocate_pipeline_outputs=True, batch_p2p_comm=False)
        with torch.no_grad():
            for name, weight in part_of(whole.state, model).items():
                model.get_parameter(name).copy_(weight)
        keys, wanted, group = list(model.state_dict()), part_of(whole.grads, model), model.pg_collection.cp
        batch = PackedBatch.from_sequences(SEQUENCES, align=2 * tp * cp if cp > 1 else 1)
        shard = batch.shard(group.rank(), cp) if cp > 1 else batch
        for layout in ("thd", "bshd", "nested") if cp == 1 else ("thd", "nested"):
            forward = make_forward(model, layout)

            def loss_func(out: Any) -> tuple[Tensor, dict[str, Tensor]]:
                parts = [batch.unpack(shard.gather(x, group)) for x in (out.log_probs, out.entropy)]
                log_probs, entropies = ([x[:-1] for x in own] for own in parts)
                found = torch.stack([torch.cat(log_probs), torch.cat(entropies)]).detach()
                worst.append(float((found - whole.scores).abs().max()))
                loss = loss_of(log_probs, entropies)
                return loss / cp, {"loss": loss.detach()}  # Megatron's schedule multiplies by cp

            def forward_step(
                data: Any, model: Any, forward: Any = forward, loss_func: Any = loss_func
            ) -> tuple[Any, Any]:
                return forward(shard, temperature=0.8), loss_func

            model.zero_grad(set_to_none=True)
            scheduled(model, forward_step)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=group)
            summed_over_tp(model)  # norms, of which a rank of a sequence saw only its own tokens
            if tied and pp > 1:  # as `finalize_model_grads` does
                weight = model.shared_embedding_or_output_weight()
                dist.all_reduce(weight.grad, group=parallel_state.get_embedding_group())
            for name, want in wanted.items():
                assert float(want.abs().max()) > 0, name
                grad = model.get_parameter(name).grad
                worst.append(float((grad - want).abs().max()) / max(1.0, float(want.abs().max())))
        assert list(model.state_dict()) == keys
    return worst


@pytest.mark.parametrize(
    ("tp", "cp", "pp", "sp"),
    [(1, 1, 1, False), (2, 1, 1, False), (2, 1, 1, True), (1, 2, 1, False), (1, 1, 2, False)],
    ids=["tp1", "tp2", "tp2-sp", "cp2", "pp2"],
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_steps_equal_those_by_logits_of_one_rank(tied: bool, tp: int, cp: int, pp: int, sp: bool) -> None:
    whole = alone(lambda: by_logits(tied))
    for worst in run_ranks(tp * cp * pp, errors, whole, tied, tp, cp, pp, sp):
        assert max(worst) <= TOLERANCE, worst


def test_no_logits_exist() -> None:
    def run(rank: int, size: int) -> None:
        rows, ids = 8192, torch.arange(256)
        with parallel():
            model = build(vocab=rows)
            forward = make_forward(model)
            with AllocationGuard(4 * rows * 64):
                forward(PackedBatch.from_sequences([ids])).log_probs.sum().backward()
            with pytest.raises(AssertionError, match="8388608 bytes"), AllocationGuard(4 * rows * 64):
                model(ids[None], ids[None], None)

    run_ranks(1, run)


# --- Mamba layers ---------------------------------------------------------------------------------------------------


def no_mamba() -> str | None:
    """Why Mamba layers cannot run here, or None."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    engine = transformer_engine()
    if engine is not None:
        return f"Transformer Engine is {engine}"
    return None if importlib.util.find_spec("mamba_ssm") else "mamba_ssm is not installed"


@pytest.mark.skipif(no_mamba() is not None, reason=f"Mamba layers: {no_mamba()}")
def test_mamba_layers_keep_packed_sequences_apart(tmp_path: Path) -> None:
    """In bf16: scores near those of each sequence by its logits, and no gradient for another sequence's tokens."""
    from megatron.core import tensor_parallel
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        settings = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "ffn_hidden_size": 512}
        half = {"bf16": True, "params_dtype": torch.bfloat16, "hidden_dropout": 0.0, "attention_dropout": 0.0}
        shape = {"vocab_size": 128, "max_sequence_length": 256, "hybrid_layer_pattern": "M*M-"}
        model = HybridModel(TransformerConfig(**settings, **half), hybrid_stack_spec, **shape).cuda().bfloat16()
        sequences = [(torch.arange(n) * step % 128).cuda() for n, step in ((7, 5), (40, 11), (4, 7))]
        batch, leaves = PackedBatch.from_sequences(sequences), []

        def leaf(module: Any, args: Any, output: Tensor) -> Tensor:
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

        forward = make_forward(model, "thd")
        hook = model.embedding.register_forward_hook(leaf)
        parts = batch.unpack(forward(batch).log_probs)
        hook.remove()
        (grad,) = torch.autograd.grad(parts[1].sum(), leaves)
        before, own, after = grad[:, 0].split([7, 40, 4])
        assert float(own.abs().max()) > 0
        assert float(before.abs().max()) == float(after.abs().max()) == 0.0
        for ids, found in zip(sequences, parts, strict=True):
            log_p = model(ids[None], torch.arange(len(ids)).cuda()[None], None)[0].float().log_softmax(-1)
            wanted = log_p[:-1].gather(-1, ids[1:, None])[:, 0]
            torch.testing.assert_close(found[:-1], wanted, rtol=0.05, atol=0.05)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
