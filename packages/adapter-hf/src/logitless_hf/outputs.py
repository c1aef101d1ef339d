"""What a bound model returns: transformers' causal-LM output with scores in place of logits."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, fields, make_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import register_pytree_node
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import generic

from logitless.errors import UnsupportedError

__all__ = ["CausalLMOutputForPPO", "for_ddp", "scored_output", "unrounded"]


class _FlattenedByItems:
    """A pytree node by its items: `values` is a field here, and transformers' flattening calls `output.values()`."""

    def __init_subclass__(cls) -> None:
        made = cls.__dict__.get("_rebuilt_as", cls)

        def flatten(output: Any) -> tuple[list[Any], tuple[str, ...]]:
            return [value for _, value in output.items()], tuple(output.keys())

        def unflatten(values: Iterable[Any], keys: tuple[str, ...]) -> Any:
            return made(**dict(zip(keys, values, strict=True)))

        register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"{cls.__module__}.{cls.__qualname__}")
        registered: set[type] = getattr(generic, "_registered_model_output_types", set())
        registered.add(cls)  # newer transformers also register lazily


@dataclass
class CausalLMOutputForPPO(_FlattenedByItems, CausalLMOutputWithPast):
    """The family's own output, without logits, and with scores.

    Attributes:
        log_probs: [batch, sequence] nats; at position t that of its label (the next token); 0.0 where ignored.
        entropy: the same shape, nats; None if it was not asked for.
        loss: what the call's `loss_fn` gave, summed; None without one.
        values: [batch, sequence] of a value model, whose other scores are None; else None.
        aux_loss: the router's loss, where the family returns one.
        stats: the statistics that were asked for, by name; None if none were.
    """

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None  # type: ignore[assignment]
    aux_loss: Tensor | None = None
    stats: dict[str, Tensor] | None = None

    if "cache" in {field.name for field in fields(CausalLMOutputWithPast)}:  # renamed in transformers 5.24

        @property
        def past_key_values(self) -> Any:
            """The same as `cache`."""
            return self.cache

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (_extra(self), dict(self))


_OWN = tuple(field.name for field in fields(CausalLMOutputForPPO))


def _extra(output: Any) -> tuple[str, ...]:
    """Names of the fields that are the family's only."""
    return tuple(field.name for field in fields(output) if field.name not in _OWN)


_classes: dict[tuple[str, ...], type[CausalLMOutputForPPO]] = {}  # a dict, since dynamo traces into what is cached


def _with_fields(extra: tuple[str, ...]) -> type[CausalLMOutputForPPO]:
    """The class that also has these fields: transformers takes a field that is not declared for a mistake."""
    if not extra:
        return CausalLMOutputForPPO
    cls = _classes.get(extra)
    if cls is None:  # at the check that `bind` makes, so not while compiling
        declared = [(name, Any, None) for name in extra]
        cls = make_dataclass(CausalLMOutputForPPO.__name__, declared, bases=(CausalLMOutputForPPO,))
        cls.__module__, cls.__doc__ = CausalLMOutputForPPO.__module__, CausalLMOutputForPPO.__doc__
        _classes[extra] = cls
    return cls


def _rebuild(extra: tuple[str, ...], values: dict[str, Any]) -> CausalLMOutputForPPO:
    return _with_fields(extra)(**values)


def scored_output(
    family: Any,
    log_probs: Tensor | None,
    entropy: Tensor | None,
    loss: Tensor | None = None,
    values: Tensor | None = None,
    stats: dict[str, Tensor] | None = None,
) -> CausalLMOutputForPPO:
    """The family's output with scores, or values, in place of its logits."""
    if not isinstance(family, generic.ModelOutput):
        raise UnsupportedError(f"the model returned a {type(family).__qualname__}, expected a ModelOutput")
    kept = {name: value for name, value in family.items() if name not in ("loss", "logits")}
    cls = _with_fields(_extra(family))
    return cls(**kept, log_probs=log_probs, entropy=entropy, loss=loss, values=values, stats=stats)


class _CalledValues(Tensor):
    """Values that may also be called, as a dict's `values`; what is computed of them is a plain tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    of: dict[str, Any]

    def __call__(self) -> Any:
        return self.of.values()


def _values_for_ddp(output: Any) -> Any:
    values = output.__dict__["values"]
    if values is None:
        return functools.partial(OrderedDict.values, output)
    called = values.as_subclass(_CalledValues)
    called.of = dict(output.items())
    return called


@functools.cache
def _in_ddp(cls: type[CausalLMOutputForPPO]) -> type[CausalLMOutputForPPO]:
    """Of outputs on their way through DDP: `values` is a dict's method too."""
    values = property(_values_for_ddp, lambda output, values: output.__dict__.update(values=values))
    return type(cls.__name__, (cls,), {"values": values, "_rebuilt_as": cls})


def for_ddp(output: CausalLMOutputForPPO) -> CausalLMOutputForPPO:
    """Let DDP look through an output, where this forward is run by one that looks for unused parameters.

    It then calls `values()` of each dict that it is given, which the field of that name hides, and hands its caller
    a copy rebuilt from the leaves, which is as `output` was.
    """
    ddp = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if ddp is None or not ddp.find_unused_parameters or ddp.static_graph:
        return output
    if ddp._use_python_reducer or ddp._delay_all_reduce_all_params:  # it then returns what it got
        return output
    output.__class__ = _in_ddp(type(output))
    return output


def unrounded(output: Any, scores: CausalLMOutputForPPO | None) -> Any:
    """What a call returned, with the scores as its forward made them.

    FSDP2's mixed precision casts a forward's results (`output_dtype`, which accelerate sets to bfloat16): a ratio of
    probabilities would be off by a tenth.
    """
    if isinstance(output, CausalLMOutputForPPO):
        for name in ("log_probs", "entropy", "loss"):
            setattr(output, name, _exact(getattr(output, name), getattr(scores, name, None)))
        made = getattr(scores, "stats", None) or {}
        if output.stats is not None:
            output.stats = {name: _exact(x, made.get(name)) for name, x in output.stats.items()}
    return output


def _exact(rounded: Any, made: Any) -> Any:
    """The second where it is the first in another dtype."""
    both = isinstance(rounded, Tensor) and isinstance(made, Tensor)
    return made if both and rounded.dtype != made.dtype else rounded
