"""Where a model's head is, and what it multiplies: the linear layer, and the LoRA adapters that wrap it.

The head is looked up at every call, since PEFT may wrap it, merge it or switch adapters after `bind`. PEFT's classes
are told by name, so that PEFT need not be installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from logitless.errors import UnsupportedError
from logitless_hf.sharding import is_parallel_forward

__all__ = ["Head", "find_head", "has_weights", "in_slot", "lora_pairs", "own_weight"]

LORA_LINEAR = "peft.tuners.lora.layer.Linear"
MODULES_TO_SAVE = ".ModulesToSaveWrapper"
UNPLAIN = (
    "merge it (merge_adapter()) or disable it to score; to train, leave the head out of target_modules, or name it in "
    "modules_to_save"
)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Head:
    """The module in the head's slot, and the linear layer inside of it; they differ where PEFT wraps the head."""

    outer: nn.Module
    linear: nn.Linear
    adapters: tuple[str, ...] = ()  # LoRA adapters of `outer` that are at work
    parallel: bool = False  # whether transformers runs `linear` tensor-parallel, by a forward of its own
    own: bool = False  # whether `linear` is of a subclass whose forward is another than nn.Linear's


def _qualified(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _saved_module(wrapper: Any) -> nn.Module:
    """The module that PEFT's `modules_to_save` wrapper would call."""
    names = wrapper.active_adapters
    chosen = None if wrapper.disable_adapters or not names else names[0]
    saved: nn.ModuleDict = wrapper.modules_to_save
    original: nn.Module = wrapper.original_module
    return saved[chosen] if chosen is not None and chosen in saved else original


def _lora_adapters(layer: Any) -> tuple[str, ...]:
    """The adapters that a PEFT layer adds to its base now; a layer that does more than plain LoRA is refused."""
    if layer.disable_adapters:
        if layer.merged:
            layer.unmerge()  # as the layer's own forward does
        return ()
    if layer.merged:
        return ()
    kind = _qualified(layer)
    if kind != LORA_LINEAR:
        raise UnsupportedError(f"the head is wrapped by PEFT's {kind}, expected {LORA_LINEAR}, plain LoRA; {UNPLAIN}")
    names = tuple(name for name in layer.active_adapters if name in layer.lora_A)
    for name in names:
        variant = getattr(layer, "lora_variant", {}).get(name)
        if layer.use_dora.get(name) or variant is not None:
            got = "DoRA" if variant is None else type(variant).__qualname__
            raise UnsupportedError(
                f"LoRA adapter {name!r} on the head is a variant, {got}, expected plain LoRA; use that, or {UNPLAIN}"
            )
        if layer.lora_B[name].bias is not None:
            raise UnsupportedError(
                f"LoRA adapter {name!r} on the head has a bias, expected none; use lora_bias=False, or {UNPLAIN}"
            )
    return names


def lora_pairs(head: Head, hidden: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """`(u [..., r], b [V, r])` of each active adapter, with `u = scaling·A(dropout(hidden))`, as PEFT computes it."""
    layer: Any = head.outer
    pairs = []
    for name in head.adapters:
        a = layer.lora_A[name]
        u = a(layer.lora_dropout[name](hidden.to(a.weight.dtype))) * layer.scaling[name]
        pairs.append((u, layer.lora_B[name].weight))
    return tuple(pairs)


def _own_forward(linear: nn.Linear) -> Any:
    own = linear.__dict__.get("_old_forward" if "_hf_hook" in linear.__dict__ else "forward", type(linear).forward)
    return getattr(own, "__func__", own)


def find_head(model: nn.Module) -> Head:
    """The head as it is now.

    Raises:
        UnsupportedError: there is none, or it is not a linear layer in a float dtype, alone or with plain LoRA.
    """
    name = type(model).__qualname__
    try:
        outer = model.get_output_embeddings()  # type: ignore[operator]
    except Exception as error:
        raise UnsupportedError(f"{name}: get_output_embeddings() raised {type(error).__name__}: {error}") from error
    if not isinstance(outer, nn.Module):
        raise UnsupportedError(f"{name}: get_output_embeddings() gave {outer!r}, expected the module of the head")
    linear: Any = outer
    adapters: tuple[str, ...] = ()
    if _qualified(outer).endswith(MODULES_TO_SAVE):
        linear = _saved_module(outer)
    elif hasattr(outer, "get_base_layer"):
        adapters = _lora_adapters(outer)
        linear = outer.get_base_layer()  # type: ignore[operator]
    if not isinstance(linear, nn.Linear):
        raise UnsupportedError(f"{name}: the head is a {_qualified(linear)}, expected an nn.Linear")
    own = _own_forward(linear)
    parallel = is_parallel_forward(own)
    if own not in (nn.Linear.forward, type(linear).forward) and not parallel:
        raise UnsupportedError(
            f"{name}: the head, a {_qualified(linear)}, has a forward on its instance, other than its class's; make "
            "it that of a subclass of nn.Linear"
        )
    if hasattr(linear.weight, "ds_id") and not linear.weight.numel():
        raise UnsupportedError(
            f"{name}: DeepSpeed's ZeRO-3 holds the head's weight in parts, which is not served; use ZeRO-1 or ZeRO-2, "
            "or FSDP2 (fully_shard)"
        )
    if linear.weight.dtype not in FLOATS or tuple(linear.weight.shape) != (linear.out_features, linear.in_features):
        raise UnsupportedError(
            f"{name}: the head's weight is {linear.weight.dtype} {tuple(linear.weight.shape)}, expected a float "
            f"{(linear.out_features, linear.in_features)}; a quantised head is not understood"
        )
    return Head(outer, linear, adapters, parallel, not parallel and own is not nn.Linear.forward)


def own_weight(linear: nn.Linear, hidden: Tensor) -> Tensor:
    """What a head whose own forward is linear multiplies with, [V, D], by calling that on the unit vectors.

    Whatever the forward does to its product row by row (a learned scale, say) is in here, and so are its gradients. It
    costs as much as D more tokens, and a second weight's memory.

    Args:
        hidden: [..., D], whose dtype and device the forward is called with.
    """
    if isinstance(linear.weight, DTensor) or isinstance(hidden, DTensor):
        raise UnsupportedError(
            f"the head, a {_qualified(linear)} with a forward other than nn.Linear's, is sharded in its own forward; "
            "leave it out of the tensor-parallel plan, or let FSDP gather it"
        )
    rows: Tensor = type(linear).forward(linear, torch.eye(linear.in_features, dtype=hidden.dtype, device=hidden.device))
    return rows.T


def has_weights(model: nn.Module) -> bool:
    """Whether no parameter is on the meta device, but for those that accelerate's hooks bring in when they are due."""
    return not any(
        parameter.is_meta and "_hf_hook" not in module.__dict__
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )


@contextmanager
def in_slot(model: nn.Module, module: nn.Module, stand_in: nn.Module) -> Iterator[None]:
    """Within the block, `stand_in` is wherever `module` is registered in the model."""
    slots = [(parent, key) for parent in model.modules() for key, child in parent._modules.items() if child is module]
    if not slots:
        raise UnsupportedError(f"{type(model).__qualname__}: the head is not registered as a submodule of the model")
    for parent, key in slots:
        parent._modules[key] = stand_in
    try:
        yield
    finally:
        for parent, key in slots:
            parent._modules[key] = module
