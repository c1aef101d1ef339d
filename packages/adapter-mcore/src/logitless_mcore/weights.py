"""Hugging Face weights into a Megatron GPTModel's shards, and back.

One table says which tensors make a parameter and how they are laid out; both directions read it. Parameter names are
those of Megatron's local layer spec, of `layer_spec`, and of Transformer Engine's, which keeps a norm's weight in the
linear layer behind it.

Families: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and `Qwen2_5_VL`, tied or not, over any tensor-, pipeline- and
expert-parallel ranks. Checkpoints of none of them hold layers of multi-token prediction, and transformers drops those
of other families when it loads one; so a model's own stay as they were made, and do not go out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from logitless.errors import InvalidInputError, UnsupportedError
from logitless_mcore.capture import language_model, unwrapped
from logitless_mcore.experts import expert_names, kind_of, others_expert
from logitless_mcore.hf_settings import check_settings
from logitless_mcore.hf_source import HFSource, open_source
from logitless_mcore.hf_target import HFTarget, agree
from logitless_mcore.layouts import Copy, Gated, Layout, QueryKeyValue, Split, Vocabulary

__all__ = ["hf_weights", "load_hf_weights", "save_hf_weights"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PREDICTION = "mtp."  # what begins the names of multi-token prediction's parameters


@dataclass(frozen=True, slots=True)
class Rule:
    """The Hugging Face tensors that make one parameter, and how."""

    names: tuple[str, ...]
    layout: Layout


INPUT_NORM = Rule(("input_layernorm.weight",), Copy())
MLP_NORM = Rule(("post_attention_layernorm.weight",), Copy())
QKV, GATED = QueryKeyValue(), Gated()
# Of a layer, behind `decoder.layers.N.` here and `model.layers.N.` there.
LAYER = {
    "input_layernorm.weight": INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": INPUT_NORM,
    "self_attention.linear_qkv.weight": Rule(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), QKV),
    "self_attention.linear_qkv.bias": Rule(tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), QKV),
    "self_attention.q_layernorm.weight": Rule(("self_attn.q_norm.weight",), Copy()),
    "self_attention.k_layernorm.weight": Rule(("self_attn.k_norm.weight",), Copy()),
    "self_attention.linear_proj.weight": Rule(("self_attn.o_proj.weight",), Split(1)),
    "self_attention.linear_proj.bias": Rule(("self_attn.o_proj.bias",), Copy()),
    "pre_mlp_layernorm.weight": MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": MLP_NORM,
    "mlp.linear_fc1.weight": Rule(("mlp.gate_proj.weight", "mlp.up_proj.weight"), GATED),
    "mlp.linear_fc1.bias": Rule(("mlp.gate_proj.bias", "mlp.up_proj.bias"), GATED),
    "mlp.linear_fc2.weight": Rule(("mlp.down_proj.weight",), Split(1)),
    "mlp.linear_fc2.bias": Rule(("mlp.down_proj.bias",), Copy()),
    "mlp.router.weight": Rule(("mlp.gate.weight",), Copy()),
}
MODEL = {
    "embedding.word_embeddings.weight": Rule((EMBEDDING,), Vocabulary()),
    "decoder.final_layernorm.weight": Rule(("model.norm.weight",), Copy()),
    "output_layer.weight": Rule((HEAD,), Vocabulary()),
}
OURS = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
THEIRS = re.compile(r"model\.layers\.(\d+)\.(.+)")
DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")  # in old checkpoints; computed from the configuration


@dataclass(frozen=True, slots=True)
class Target:
    """A parameter of this rank, and the tensors that make it."""

    name: str
    parameter: Tensor
    names: tuple[str, ...]
    layout: Layout
    of_expert: bool = False


def _gpt(chunk: Any) -> Any:
    """The GPTModel within its wrappers."""
    inner = language_model(chunk)
    known = inner is unwrapped(chunk) or _tower_prefix(chunk) is not None
    if not known or not hasattr(getattr(inner, "decoder", None), "layers"):
        raise UnsupportedError(f"model: got a {type(unwrapped(chunk)).__qualname__}, expected Megatron's GPTModel")
    return inner


def _stages(model: Any) -> list[Any]:
    """One model, or the list of them that a virtual pipeline has."""
    return list(model) if isinstance(model, (Sequence, nn.ModuleList)) else [model]


def _chunks(model: Any) -> list[Any]:
    return [_gpt(chunk) for chunk in _stages(model)]


def _tower_prefix(chunk: Any) -> str | None:
    """Under which name a checkpoint has the vision tower of a model that has one."""
    found: str | None = getattr(unwrapped(chunk), "hf_tower", None)
    return found


def _tower_targets(chunk: Any) -> list[Target]:
    """The vision tower's parameters, where this stage has it; they are whole on every rank."""
    prefix, tower = _tower_prefix(chunk), getattr(unwrapped(chunk), "vision_model", None)
    if prefix is None or tower is None:
        return []
    named = tower.named_parameters()
    return [Target(f"vision_model.{name}", x, (prefix + name,), Copy()) for name, x in named]


def _targets(gpt: Any) -> list[Target]:
    """This rank's parameters; the output layer's own copy of a tied embedding, on the last stage, comes from there."""
    found, unknown = [], []
    for name, parameter in gpt.named_parameters():
        if name.startswith(PREDICTION):
            continue
        match = OURS.fullmatch(name)
        if match is None:
            rule, prefix = MODEL.get(name), ""
        else:  # a stage counts its own layers from 0, `layer_number` the model's from 1
            rule, prefix = _rule(match[2], gpt), f"model.layers.{gpt.decoder.layers[int(match[1])].layer_number - 1}."
        if rule is None:
            unknown.append(name)
            continue
        names = tuple(prefix + x for x in rule.names)
        if names == (HEAD,) and gpt.share_embeddings_and_output_weights:
            names = (EMBEDDING,)
        of_expert = match is not None and expert_names(match[2], gpt) is not None
        found.append(Target(name, parameter, names, rule.layout, of_expert))
    if unknown:
        raise UnsupportedError(
            f"model: nothing is known of {_listed(unknown)}; expected the parameters of a GPTModel, dense or of "
            "experts, without adapters (load the weights before they are added)"
        )
    return found


def _rule(name: str, gpt: Any) -> Rule | None:
    """Of a parameter, by its name behind its layer's."""
    names = expert_names(name, gpt)
    if names is None:
        return LAYER.get(name)
    return Rule(names, GATED if len(names) == 2 else Split(1))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return ", ".join(sorted(names)[:6]) + more


# --- in -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load_hf_weights(model: Any, source: Any, *, check_config: bool = True) -> None:
    """Copy a Hugging Face model's weights into this rank's parameters, in place, in the parameters' dtype.

    Call it on every rank, before an optimizer makes its fp32 copies. A vocabulary that is padded in Megatron gets
    zeros there, and `set_vocab_size` is told, so that the padding stays out of the softmax. Layers of multi-token
    prediction are left as they are: no checkpoint of these families holds any.

    Args:
        model: GPTModel, wrapped in DDP or Float16Module or not; a list of them with a virtual pipeline.
        source: a folder with config.json and safetensors, a Hugging Face model, or a dict of names to tensors. A dict
            comes without a configuration, so nothing but names and shapes is checked.
        check_config: refuse a model whose settings differ from the source's configuration.

    Raises:
        InvalidInputError: names, shapes or dtypes do not match, or the model's settings differ, each rank's of its own
            parameters, which it checks before it writes any; or a file cannot be read, perhaps after some were written.
        UnsupportedError: the family or a parameter is not understood.
    """
    opened = open_source(source)
    chunks = _chunks(model)
    if opened.config is not None and check_config:
        for gpt in chunks:
            check_settings(gpt, opened.config, opened.where)
    targets = [(gpt, _with_tied_head(target, opened)) for gpt in chunks for target in _targets(gpt)]
    stages = _stages(model)
    targets += [(_gpt(stage), target) for stage in stages for target in _tower_targets(stage)]
    _check_names([target for _, target in targets], opened, chunks[0], _tower_prefix(stages[0]))
    for gpt, target in targets:
        _shard(gpt, target, [opened.blank(name) for name in target.names], opened.where)
    for gpt, target in targets:
        _fill(gpt, target, opened)


def _with_tied_head(target: Target, source: HFSource) -> Target:
    """An untied model takes its head from a tied checkpoint's embedding, which is saved once."""
    tied = source.config is not None and source.config.get("tie_word_embeddings", False)
    if target.names == (HEAD,) and HEAD not in source and tied:
        return Target(target.name, target.parameter, (EMBEDDING,), target.layout)
    return target


def _check_names(targets: Sequence[Target], source: HFSource, gpt: Any, tower: str | None = None) -> None:
    wanted = {name for target in targets for name in target.names}
    missing = [name for name in wanted if name not in source]
    if missing:
        raise InvalidInputError(f"source: {source.where} lacks {_listed(missing)}, which the model has parameters for")
    matches = [THEIRS.fullmatch(name) for name in wanted]
    own_layers = {int(match[1]) for match in matches if match}
    # What a layer of another stage may hold is what one of ours does; a stage without layers cannot tell.
    kinds = {kind_of(match[2]) for match in matches if match}
    if not kinds or gpt.config.num_moe_experts:  # and layers with experts differ from those without
        kinds |= {name for rule in LAYER.values() for name in rule.names}
        kinds |= {f"mlp.experts.N.{x}_proj.weight" for x in ("gate", "up", "down")}
    elsewhere = {name for rule in MODEL.values() for name in rule.names}
    unexpected = []
    tower_elsewhere = tower is not None and not any(name.startswith(tower) for name in wanted)
    for name in source:
        if tower is not None and tower_elsewhere and name.startswith(tower):
            continue
        match = THEIRS.fullmatch(name)
        if name in wanted or name in elsewhere or DERIVED.fullmatch(name):
            continue
        if match and int(match[1]) < gpt.config.num_layers:
            if int(match[1]) in own_layers:
                if others_expert(match[2], gpt):
                    continue
            elif kind_of(match[2]) in kinds:
                continue
        unexpected.append(name)
    if unexpected:
        raise InvalidInputError(
            f"source: {source.where} holds {_listed(unexpected)}, which the model has no parameters for (it has "
            f"{gpt.config.num_layers} layers; add_qkv_bias={gpt.config.add_qkv_bias}, "
            f"qk_layernorm={gpt.config.qk_layernorm}, add_bias_linear={gpt.config.add_bias_linear})"
        )
    if HEAD in source and EMBEDDING in wanted and gpt.share_embeddings_and_output_weights:
        head, embedding = source.read(HEAD), source.read(EMBEDDING)
        if head is not embedding and not torch.equal(head, embedding):
            raise InvalidInputError(
                f"model: share_embeddings_and_output_weights=True, but {HEAD} and {EMBEDDING} of {source.where} differ"
            )


def _shard(gpt: Any, target: Target, parts: list[Tensor], where: str) -> Tensor:
    """This rank's part of a parameter, checked; parts on the meta device tell whether it can be made."""
    group = _tp_group(gpt, target)
    said = f"{' + '.join(target.names)} {' + '.join(str(tuple(part.shape)) for part in parts)}"
    odd = [part.dtype for part in parts if part.dtype not in FLOATS]
    if odd:
        raise InvalidInputError(
            f"source: {said} of {where} is {odd[0]}, expected float32, bfloat16, float16 or float64; of a "
            "quantised checkpoint, save it dequantised first"
        )
    try:
        shard = target.layout.shard(parts, gpt, group.rank(), group.size())
    except RuntimeError as error:  # of view and cat, where the parts do not fit each other
        raise InvalidInputError(f"source: {said} of {where} does not make {target.name}: {error}") from error
    if shard.shape != target.parameter.shape:
        raise InvalidInputError(
            f"source: {said} of {where} gives {tuple(shard.shape)} for {target.name} on each of "
            f"{group.size()} tensor-parallel ranks, expected {tuple(target.parameter.shape)}"
        )
    return shard


def _fill(gpt: Any, target: Target, source: HFSource) -> None:
    parts = [source.read(name) for name in target.names]
    target.parameter.copy_(_shard(gpt, target, parts, source.where))
    if isinstance(target.layout, Vocabulary):
        from logitless_mcore.head import set_vocab_size

        set_vocab_size(gpt, parts[0].shape[0])


def _tp_group(gpt: Any, target: Target) -> Any:
    return gpt.pg_collection.expt_tp if target.of_expert else gpt.pg_collection.tp


# --- out ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def hf_weights(model: Any, *, vocab_size: int | None = None) -> Iterator[tuple[str, Tensor]]:
    """This pipeline stage's tensors under their Hugging Face names, whole, one parameter at a time.

    A collective over the tensor- and expert-parallel groups: all their ranks must run through it, and each gets every
    tensor, in the parameter's dtype and on its device; a tensor may share memory with a parameter.

    Args:
        model: as for `load_hf_weights`.
        vocab_size: rows of the unpadded vocabulary; by default what `set_vocab_size` was told, else all.
    """
    from logitless_mcore.head import vocab_size_of

    for chunk in _stages(model):
        gpt = _gpt(chunk)
        for target in _tower_targets(chunk):
            yield target.names[0], target.parameter.detach()
        rows = vocab_size_of(gpt) if vocab_size is None else vocab_size
        for target in _targets(gpt):
            if target.name == "output_layer.weight" and gpt.share_embeddings_and_output_weights:
                continue  # a tied checkpoint holds it once
            if target.names == (EMBEDDING,) and not gpt.pre_process:
                continue  # multi-token prediction's copy, on the last stage
            shards = _gathered(target, gpt)
            parts = target.layout.merge(shards, gpt)
            if isinstance(target.layout, Vocabulary):
                parts = [part[:rows] for part in parts]
            yield from _of_every_expert(target, parts, gpt)


def _of_every_expert(target: Target, parts: list[Tensor], gpt: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors, and those that make the same parameter on other expert-parallel ranks."""
    group = gpt.pg_collection.ep
    if not target.of_expert or group.size() == 1:
        yield from zip(target.names, parts, strict=True)
        return
    match, layer = OURS.fullmatch(target.name), THEIRS.fullmatch(target.names[0])
    assert match is not None  # every expert is of a layer
    assert layer is not None
    everywhere = [[torch.empty_like(part) for _ in range(group.size())] for part in parts]
    for own, part in zip(everywhere, parts, strict=True):
        dist.all_gather(own, part.contiguous(), group=group)
    for rank, of_rank in enumerate(zip(*everywhere, strict=True)):
        for name, part in zip(expert_names(match[2], gpt, rank) or (), of_rank, strict=True):
            yield f"model.layers.{layer[1]}.{name}", part


def _gathered(target: Target, gpt: Any) -> list[Tensor]:
    group = _tp_group(gpt, target)
    own = target.parameter.detach()
    if group.size() == 1 or isinstance(target.layout, Copy):
        return [own]
    shards = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(shards, own.contiguous(), group=group)
    return shards


def save_hf_weights(
    model: Any, folder: str | Path, *, config: Any = None, vocab_size: int | None = None, file_bytes: int = 5 << 30
) -> None:
    """Write the model as a Hugging Face checkpoint: safetensors by pipeline stage, with their index.

    A collective over all ranks; the first data-parallel replica writes, and all return when the checkpoint is whole.
    Files get their names then: a save that fails leaves one that was in the folder as it was.

    Args:
        model: as for `load_hf_weights`.
        folder: made if it is not there, on a file system that all ranks see.
        config: a Hugging Face configuration, written as config.json beside the weights.
        vocab_size: see `hf_weights`.
        file_bytes: a new file is begun before one grows beyond this.

    Raises:
        InvalidInputError: the folder holds a checkpoint in one file, which would be loaded in place of this one.
        CollectiveError: another rank could not write; that one raises what it met.
    """
    from megatron.core import parallel_state

    if Path(folder, "model.safetensors").exists():  # before anything is written; every rank sees it
        raise InvalidInputError(
            f"folder: {folder} holds model.safetensors, which transformers would load in place of the files that are "
            "saved here; remove it, or give another folder"
        )
    place, groups = Path(folder), _chunks(model)[0].pg_collection
    stage, replica = groups.pp.rank(), parallel_state.get_data_parallel_rank(with_context_parallel=True)
    writes = groups.tp.rank() == 0 and replica == 0
    place.mkdir(parents=True, exist_ok=True)
    target = HFTarget(place, stage, file_bytes)
    for name, tensor in hf_weights(model, vocab_size=vocab_size):
        if writes:
            target.put(name, tensor)
    target.flush()
    try:
        agree(target.error)
        stages: list[Any] = [None] * groups.pp.size()
        dist.all_gather_object(stages, (target.index, target.total), group=groups.pp)
        target.publish()
        agree(target.error)
        if writes and stage == 0:
            target.write_index(stages, config)
        agree(target.error)
    finally:
        target.discard()
