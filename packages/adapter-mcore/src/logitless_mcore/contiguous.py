"""Context-parallel shards that are contiguous, run as the zig-zag ones that Megatron's positions and attention take.

Ids, labels and scores are exchanged, a few numbers for each token; hidden states stay where they are.

Shape suffixes: P tokens of a rank's shard, T of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from logitless import PackedBatch
from logitless.errors import InvalidInputError
from logitless_mcore.outputs import CausalLMOutputForPPO

__all__ = ["Exchange", "cut"]


def cut(whole: Tensor, shard: PackedBatch) -> Tensor:
    """[T, ...] of the whole batch to a shard's [P, ...]."""
    assert shard.shard_of is not None
    place = torch.arange(whole.shape[0], device=whole.device)
    uncut = replace(shard, input_ids=place, labels=place, position_ids=place, shard_of=None)
    return whole.index_select(0, uncut.shard(*shard.shard_of).input_ids)


def _moved(parts: Sequence[Tensor], source: PackedBatch, target: PackedBatch, group: Any) -> list[Tensor]:
    """[P, ...] each of one shard's tokens to those of the other, in one collective."""
    columns = [x.unsqueeze(-1).flatten(1) for x in parts]
    moved = cut(source.gather(torch.cat(columns, 1), group), target)
    split = torch.split(moved, [x.shape[1] for x in columns], 1)
    return [y.clone().view(x.shape).to(x.dtype) for x, y in zip(parts, split, strict=True)]


class _Moved(Function):
    """`_moved`; the gradient goes back to the rank that has the token.

    Of all parts at once: a rank whose loss leaves one out would not come to a collective of that one's own.
    """

    @staticmethod
    def forward(ctx: Any, source: PackedBatch, target: PackedBatch, group: Any, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.way = (target, source, group)
        found = _moved(parts, source, target, group)
        needs = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(*(y for y, needed in zip(found, needs, strict=True) if not needed))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *_moved(grads, *ctx.way)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Between a contiguous shard, `given`, and the zig-zag one that runs in its place, `run`."""

    given: PackedBatch
    run: PackedBatch
    group: Any

    @classmethod
    def of(cls, given: PackedBatch, group: Any) -> Exchange:
        """A collective over the context-parallel ranks."""
        axes = given.position_ids if given.position_ids.ndim > 1 else given.position_ids[None]
        rows = torch.cat([given.input_ids[None].long(), given.labels[None], axes.long()])
        ids, labels, *positions = given.gather(rows.t(), group).unbind(1)
        whole = replace(
            given,
            input_ids=ids.to(given.input_ids.dtype),
            labels=labels,
            position_ids=torch.stack(positions) if given.position_ids.ndim > 1 else positions[0],
            shard_of=None,
        )
        return cls(given, whole.shard(group.rank(), group.size()), group)

    def inward(self, name: str, x: Any) -> Any:
        """[P, ...] of what was given, without gradient; a number is the same for all."""
        if not isinstance(x, Tensor) or not x.ndim:
            return x
        try:
            return cut(self.given.gather(x.detach(), self.group), self.run)
        except InvalidInputError as error:  # on all ranks; one that checked ahead would leave the others waiting
            raise InvalidInputError(f"{name}: {str(error).removeprefix('x: ')}") from error

    def outward(self, out: CausalLMOutputForPPO) -> CausalLMOutputForPPO:
        """What was computed of the tokens that ran, for those that were given."""
        scores = {name: getattr(out, name) for name in ("log_probs", "entropy", "values")}
        scores = {name: x for name, x in scores.items() if x is not None}
        stats = dict(out.stats or {})
        moved = _Moved.apply(self.run, self.given, self.group, *scores.values(), *stats.values())  # type: ignore[no-untyped-call]
        found = dict(zip((*scores, *stats), moved, strict=True))
        own = None if out.stats is None else {name: found[name] for name in stats}
        return replace(out, stats=own, **{name: found[name] for name in scores})
