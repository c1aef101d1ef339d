"""Weights and settings of mixtures of experts: where each expert lies over expert-parallel ranks.

Parameter names are those of Megatron's experts one by one, and of its grouped ones, which number their weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["compared", "expert_names", "kind_of", "layers_with_experts", "one_by_one", "others_expert"]

OURS = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|linear_fc([12])\.weight(\d+))")
THEIRS = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
TOGETHER = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj")
PROJECTIONS = {"1": ("gate_proj.weight", "up_proj.weight"), "2": ("down_proj.weight",)}


def expert_names(name: str, gpt: Any, ep_rank: int | None = None) -> tuple[str, ...] | None:
    """Hugging Face's names of an expert's parameter, behind those of its layer; None for another parameter.

    Args:
        name: behind that of its layer.
        gpt: the model.
        ep_rank: whose expert; this rank's unless given.
    """
    match = OURS.fullmatch(name)
    if match is None:
        return None
    group = gpt.pg_collection.ep
    local = int(match[1] or match[4])
    number = (group.rank() if ep_rank is None else ep_rank) * (gpt.config.num_moe_experts // group.size()) + local
    return tuple(f"mlp.experts.{number}.{projection}" for projection in PROJECTIONS[match[2] or match[3]])


def kind_of(name: str) -> str:
    """A name behind its layer's, with no expert's number in it."""
    return THEIRS.sub(r"mlp.experts.N.\2", name)


def others_expert(name: str, gpt: Any) -> bool:
    """Whether a name behind its layer's is of an expert that some rank of this model has."""
    match = THEIRS.fullmatch(name)
    known = {projection for both in PROJECTIONS.values() for projection in both}
    return match is not None and match[2] in known and int(match[1]) < (gpt.config.num_moe_experts or 0)


def one_by_one(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """The experts that transformers 5 holds in one tensor, [E, 2·I, D] and [E, D, I], under a checkpoint's names."""
    matches = {name: TOGETHER.fullmatch(name) for name in tensors}
    if not any(matches.values()):
        return tensors
    found: dict[str, Any] = {}
    for name, match in matches.items():
        if match is None:
            found[name] = tensors[name]
            continue
        names = PROJECTIONS["1" if match[2] == "gate_up" else "2"]
        for number, expert in enumerate(tensors[name]):
            parts: list[Tensor] = list(expert.chunk(len(names)))
            found |= {f"{match[1]}.{number}.{own}": part for own, part in zip(names, parts, strict=True)}
    return found


def layers_with_experts(told: Mapping[str, Any]) -> list[int]:
    """1 for each layer of a Hugging Face configuration that has experts, 0 for a dense one."""
    step, dense, has = told.get("decoder_sparse_step", 1), told.get("mlp_only_layers") or [], _count(told) > 0
    return [int(has and i not in dense and (i + 1) % step == 0) for i in range(told["num_hidden_layers"])]


def _count(told: Mapping[str, Any]) -> int:
    return int(told.get("num_experts") or told.get("num_local_experts") or 0)


def compared(config: Any, told: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Megatron's name, what the model has, and what a Hugging Face configuration with experts says."""
    yield "num_moe_experts", config.num_moe_experts, _count(told)
    yield "moe_router_topk", config.moe_router_topk, told["num_experts_per_tok"]
    yield "moe_ffn_hidden_size", config.moe_ffn_hidden_size, told["moe_intermediate_size"]
    # A softmax of the chosen alone is one of all, made to sum to 1.
    yield "moe_router_pre_softmax", config.moe_router_pre_softmax, not told.get("norm_topk_prob", False)
    yield "moe_router_score_function", config.moe_router_score_function, "softmax"
    yield "moe_router_topk_scaling_factor", config.moe_router_topk_scaling_factor or 1.0, 1.0
    yield "moe_router_enable_expert_bias", bool(config.moe_router_enable_expert_bias), False
    yield "moe_router_num_groups", config.moe_router_num_groups, None
    yield "moe_expert_capacity_factor", config.moe_expert_capacity_factor, None
    yield "moe_shared_expert_intermediate_size", config.moe_shared_expert_intermediate_size, None
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        frequency = [int(i % frequency == 0) for i in range(config.num_layers)]
    yield "moe_layer_freq by layer", list(frequency), layers_with_experts(told)
