"""A head whose vocab rows are spread over the ranks of a tensor-parallel group, as DTensors.

Two ways of calling such a head are known. Newer transformers give the linear layer a forward of its own, called with
the plain hidden states that all ranks hold. torch's `parallelize_module`, and older transformers, hang hooks on it: one
makes the hidden states a DTensor before, another takes a DTensor apart after. A DTensor weight that is met in any other
way is refused: were it FSDP's, left sharded, each rank would hold other tokens, and the op would mix them.

Shape suffixes: V vocab rows of this rank, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from logitless.errors import UnsupportedError

__all__ = ["HeadRows", "Results", "is_parallel_forward", "local_rows", "opened", "resharded", "sealed"]

PARALLEL_FORWARD = "TensorParallelLayer.install_forward.<locals>.tp_forward"

Results = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of a head that this rank holds; fields as those of `LMHead`, and the group that shares the others."""

    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    vocab_size: int | None = None
    vocab_start: int | None = None
    tp_group: Any = None


def _held(unit: nn.Module) -> list[nn.Parameter]:
    """What an FSDP2 unit holds itself: not the parameters of units inside of it."""
    inner = [child for child in unit.children() if not isinstance(child, FSDPModule)]
    own = [parameter for parameter in unit._parameters.values() if parameter is not None]
    return own + [parameter for child in inner for parameter in _held(child)]


@contextmanager
def resharded(model: nn.Module) -> Iterator[None]:
    """FSDP2 units whose parameters were sharded before the block are sharded after it.

    A forward leaves the root's gathered until a backward. An optimizer made then would hold tensors that are thrown
    away, and train no embeddings and no head.
    """
    before = [(unit, _held(unit)) for unit in model.modules() if isinstance(unit, FSDPModule)]
    try:
        yield
    finally:
        for unit, held in before:
            if any(now is not then for now, then in zip(_held(unit), held, strict=True)):
                unit.reshard()


def is_parallel_forward(function: Any) -> bool:
    """Whether transformers put this function in the place of a linear layer's forward, to run it tensor-parallel."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return name == PARALLEL_FORWARD and str(module).startswith("transformers.")


def local_rows(linear: nn.Linear, hidden: Tensor, parallel: bool, lora: bool) -> HeadRows:
    """What this rank multiplies `hidden` with; to be called inside of the head's forward, where FSDP has gathered it.

    Nothing is gathered here. Every rank scores the same tokens, so the gradient of a rank's rows is whole on that rank.

    Args:
        parallel: whether the layer's forward was one that `is_parallel_forward` knows.
        lora: whether adapters are at work on the head.

    Raises:
        UnsupportedError: the weight is a DTensor, and not that of a tensor-parallel head.
    """
    weight, bias = linear.weight, linear.bias
    if not isinstance(weight, DTensor):
        return HeadRows(weight, bias)
    mesh, rows = weight.device_mesh, weight.shape[0]
    hooked = isinstance(hidden, DTensor) and hidden.device_mesh == mesh and hidden.placements == (Replicate(),)
    if not (parallel or hooked) or mesh.ndim != 1 or weight.placements != (Shard(0),):
        raise UnsupportedError(
            f"the head's weight is a DTensor {weight.placements} in its own forward, expected one whose rows a "
            "tensor-parallel plan shards (colwise), or a tensor that FSDP has gathered; shard the head in one of these "
            "ways, or not at all"
        )
    if lora:
        raise UnsupportedError(
            "LoRA on a tensor-parallel head is not served; leave the head out of the plan, or out of target_modules"
        )
    each = -(-rows // mesh.size())  # as torch shards them: the last ranks may hold fewer
    start, local = min(mesh.get_local_rank() * each, rows), weight.to_local()
    local_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    for held in (local, local_bias):
        if held is not None and held.shape[0] != min(each, rows - start):
            raise UnsupportedError(
                f"the head has {rows} rows, and this rank {held.shape[0]} of its weight or bias, expected "
                f"{min(each, rows - start)}; shard both by rows, as torch does"
            )
    return HeadRows(local, local_bias, rows, start, mesh.get_group())


def sealed(results: Results, hidden: DTensor) -> DTensor:
    """The results as one DTensor that all ranks hold: all that a hook which expects the head's output lets through."""
    parts = [x.reshape(-1) for x in results if x is not None]
    return DTensor.from_local(torch.cat(parts), hidden.device_mesh, [Replicate()], run_check=False)


def opened(parcel: Tensor, results: Results) -> Results:
    """What was sealed, after the hooks."""
    flat = parcel.to_local() if isinstance(parcel, DTensor) else parcel
    sizes = [0 if x is None else x.numel() for x in results]
    if flat.ndim != 1 or flat.shape[0] != sum(sizes):
        raise UnsupportedError(
            f"a hook on the head made {tuple(flat.shape)} of its output, expected ({sum(sizes)},); have it replicated "
            "(output_layouts=Replicate())"
        )
    parts = zip(torch.split(flat, sizes), results, strict=True)
    return tuple(None if x is None else _like(part, x) for part, x in parts)


def _like(part: Tensor, x: Tensor) -> Tensor:
    part = part.view(x.shape).to(x.dtype)
    return part if x.requires_grad else part.detach()
