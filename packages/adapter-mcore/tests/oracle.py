"""What a Megatron model must equal: the Hugging Face model of the same weights, sequence by sequence, by its logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

__all__ = ["Expected", "deviation", "expect", "load", "local_shards", "summed_over_tp"]


@dataclass
class Expected:
    """Scores of each sequence, at t of the token after t, and the gradients of Σ g·log_prob + e·entropy."""

    log_probs: list[Tensor]
    entropy: list[Tensor]
    grads: dict[str, Tensor]
    upstream: list[tuple[Tensor, Tensor]]  # g and e


def expect(model: Any, sequences: Sequence[Tensor], temperature: float = 1.0) -> Expected:
    """By the model's own logits."""
    generator = torch.Generator().manual_seed(11)
    log_probs, entropies, upstream = [], [], []
    model.zero_grad()
    loss = torch.zeros(())
    for ids in sequences:
        log_p = (model(input_ids=ids[None]).logits[0].float() / temperature).log_softmax(-1)
        scored = log_p[:-1].gather(-1, ids[1:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)[:-1]
        g, e = torch.randn(2, len(ids) - 1, generator=generator) / 8
        loss = loss + (g * scored).sum() + (e * entropy).sum()
        log_probs.append(scored.detach())
        entropies.append(entropy.detach())
        upstream.append((g, e))
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Expected(log_probs, entropies, grads, upstream)


def local_shards(state: Mapping[str, Tensor], config: Any, tied: bool, rows: int | None = None) -> dict[str, Tensor]:
    """Weights (or gradients) of a Hugging Face model as this rank's part of Megatron's, of names of local layers.

    Args:
        state: by the names of transformers.
        config: Megatron's.
        tied: whether embedding and head are one.
        rows: of the padded vocabulary; the padding is of zeros.
    """
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    pp, stage = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    groups, head_size = config.num_query_groups, config.kv_channels

    def column(x: Tensor) -> Tensor:
        return x.chunk(tp, 0)[rank]

    def vocabulary(name: str) -> Tensor:
        x = state[name]
        return column(torch.cat([x, x.new_zeros((rows or len(x)) - len(x), x.shape[1])]))

    def qkv(layer: str, kind: str) -> Tensor:
        parts = [state[f"{layer}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
        shaped = [part.view(groups, -1, head_size, *part.shape[1:]) for part in parts]
        return torch.cat(shaped, 1).flatten(0, 2).chunk(tp, 0)[rank]

    out = {}
    if stage == 0:
        out["embedding.word_embeddings.weight"] = vocabulary("model.embed_tokens.weight")
    if stage == pp - 1:
        out["decoder.final_layernorm.weight"] = state["model.norm.weight"]
        if not tied or pp > 1:
            out["output_layer.weight"] = vocabulary("model.embed_tokens.weight" if tied else "lm_head.weight")
    here = config.num_layers // pp
    for i in range(here):
        hf, mcore = f"model.layers.{i + stage * here}", f"decoder.layers.{i}"
        out[f"{mcore}.input_layernorm.weight"] = state[f"{hf}.input_layernorm.weight"]
        out[f"{mcore}.pre_mlp_layernorm.weight"] = state[f"{hf}.post_attention_layernorm.weight"]
        out[f"{mcore}.self_attention.linear_qkv.weight"] = qkv(hf, "weight")
        out[f"{mcore}.self_attention.linear_proj.weight"] = state[f"{hf}.self_attn.o_proj.weight"].chunk(tp, 1)[rank]
        if config.add_qkv_bias:
            out[f"{mcore}.self_attention.linear_qkv.bias"] = qkv(hf, "bias")
        if config.qk_layernorm:
            out[f"{mcore}.self_attention.q_layernorm.weight"] = state[f"{hf}.self_attn.q_norm.weight"]
            out[f"{mcore}.self_attention.k_layernorm.weight"] = state[f"{hf}.self_attn.k_norm.weight"]
        gate_up = [column(state[f"{hf}.mlp.{name}_proj.weight"]) for name in ("gate", "up")]
        out[f"{mcore}.mlp.linear_fc1.weight"] = torch.cat(gate_up)
        out[f"{mcore}.mlp.linear_fc2.weight"] = state[f"{hf}.mlp.down_proj.weight"].chunk(tp, 1)[rank]
    return out


def load(gpt: Any, model: Any, tied: bool) -> Any:
    """Give this rank's GPTModel the weights of a Hugging Face model."""
    shards = local_shards(dict(model.named_parameters()), gpt.config, tied, gpt.vocab_size)
    own = dict(gpt.named_parameters())
    assert own.keys() == shards.keys(), own.keys() ^ shards.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(shards[name])
    return gpt


def summed_over_tp(gpt: Any) -> None:
    """What Megatron's `finalize_model_grads` sums: norms of which each rank saw only its tokens, or only its heads."""
    for name, parameter in gpt.named_parameters():
        of_heads = "q_layernorm" in name or "k_layernorm" in name
        if of_heads or getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())


def deviation(gpt: Any, expected: Expected, tied: bool) -> tuple[float, str]:
    """The largest error of a parameter's gradient, relative to its largest entry if that is above 1, and whose."""
    shards = local_shards(expected.grads, gpt.config, tied, gpt.vocab_size)
    worst = [(0.0, "")]
    for name, parameter in gpt.named_parameters():
        assert parameter.grad is not None, name
        scale = max(1.0, float(shards[name].abs().max()))
        worst.append((float((parameter.grad - shards[name]).abs().max()) / scale, name))
    return max(worst)
