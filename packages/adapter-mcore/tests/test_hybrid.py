"""HybridModel, whose forward takes no output_processor: patterns of attention and MLP layers against its own logits.

Its final norm is Transformer Engine's whatever the spec says, so torch's stands in while a model is built here. Mamba
layers need a GPU, Transformer Engine and mamba_ssm.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cpu import gpt_config, hf_config, parallel
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
        )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return keep_rotary_on_device(model)


def by_logits(model: Any, batch: PackedBatch, temperature: float) -> tuple[list[Tensor], list[Tensor]]:
    """Scores of each sequence run by itself, at t of the token after t, by logits of all tensor-parallel ranks."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for ids in SEQUENCES:
        wide = torch.nn.functional.pad(ids, (0, len(ids) % 2))[None]
        positions = torch.arange(wide.shape[1])[None]
        logits = gather_from_tensor_model_parallel_region(model(wide, positions, None))[0, : len(ids)]
        log_p = (logits.float() / temperature).log_softmax(-1)
        found[0].append(log_p[:-1].gather(-1, ids[1:, None])[:, 0])
        found[1].append(-(log_p.exp() * log_p).sum(-1)[:-1])
    return found


def same_step(rank: int, size: int, tied: bool, sp: bool) -> list[float]:
    worst = []
    generator = torch.Generator().manual_seed(3)
    upstream = [torch.randn(2, max(len(ids) - 1, 0), generator=generator) for ids in SEQUENCES]
    with parallel(tp=size):
        model = build(tied, sequence_parallel=sp)
        keys, batch = list(model.state_dict()), PackedBatch.from_sequences(SEQUENCES)

        def step(log_probs: list[Tensor], entropies: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            model.zero_grad(set_to_none=True)
            terms = zip(upstream, log_probs, entropies, strict=True)
            sum((g * lp).sum() + (e * ent).sum() for (g, e), lp, ent in terms).backward()  # type: ignore[union-attr]
            summed_over_tp(model)  # norms, of which a rank of a sequence saw only its own tokens
            scores = torch.stack([torch.cat(log_probs), torch.cat(entropies)]).detach()
            return scores, {name: p.grad for name, p in model.named_parameters()}

        expected, wanted = step(*by_logits(model, batch, 0.8))
        for layout in ("thd", "bshd", "nested"):
            out = make_forward(model, layout)(batch, temperature=0.8)
            found, grads = step(*([x[:-1] for x in batch.unpack(own)] for own in (out.log_probs, out.entropy)))
            worst.append(float((found - expected).abs().max()))
            for name, want in wanted.items():
                assert float(want.abs().max()) > 0, name
                worst.append(float((grads[name] - want).abs().max()) / max(1.0, float(want.abs().max())))
        assert list(model.state_dict()) == keys
    return worst


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_steps_equal_those_by_logits(tied: bool, tp: int, sp: bool) -> None:
    for worst in run_ranks(tp, same_step, tied, sp):
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
    from megatron.core import parallel_state, tensor_parallel
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
