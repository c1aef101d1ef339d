"""Context-parallel shards that are contiguous, run as the zig-zag ones that Megatron's positions and attention take.

Ids, labels and scores are exchanged, a few numbers for each token; hidden states stay where they are.

Shape suffixes: P tokens of a rank's shard, T of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from logitless import PackedBatch
from logitless_mcore.outputs import CausalLMOutputForPPO

__all__ = ["Exchange"]


def _cut(whole: Tensor, shard: PackedBatch) -> Tensor:
    """[T, ...] of the whole batch to a shard's [P, ...]."""
    assert shard.shard_of is not None
    place = torch.arange(whole.shape[0], device=whole.device)
    uncut = replace(shard, input_ids=place, labels=place, position_ids=place, shard_of=None)
    return whole.index_select(0, uncut.shard(*shard.shard_of).input_ids)


class _Moved(Function):
    """[P, ...] of one shard's tokens to those of the other; the gradient goes back to the rank that has the token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: PackedBatch, target: PackedBatch, group: Any) -> Tensor:
        ctx.way = (target, source, group)
        return _cut(source.gather(x, group), target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        source, target, group = ctx.way
        return _cut(source.gather(grads[0].contiguous(), group), target), None, None, None


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

    def inward(self, x: Any) -> Any:
        """[P, ...] of what was given, without gradient; a number is the same for all."""
        return _cut(self.given.gather(x.detach(), self.group), self.run) if isinstance(x, Tensor) and x.ndim else x

    def outward(self, out: CausalLMOutputForPPO) -> CausalLMOutputForPPO:
        """What was computed of the tokens that ran, for those that were given."""

        def moved(x: Tensor) -> Tensor:
            found: Tensor = _Moved.apply(x, self.run, self.given, self.group)  # type: ignore[no-untyped-call]
            return found

        of_tokens = {name: getattr(out, name) for name in ("log_probs", "entropy", "values")}
        stats = None if out.stats is None else {name: moved(x) for name, x in out.stats.items()}
        return replace(out, stats=stats, **{name: moved(x) for name, x in of_tokens.items() if x is not None})
