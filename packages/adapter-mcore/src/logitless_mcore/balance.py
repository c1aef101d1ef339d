"""How evenly a call's tokens went to the experts, as the number that transformers calls `aux_loss`.

Megatron adds the gradients of its balancing losses to those of the scores by itself, and logs them by layer, in a scale
of its own. Here its routers are only looked at, where they compute those losses.

Shape suffixes: n tokens of this rank, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from logitless.collectives import all_reduce
from logitless_mcore.capture import forward_as

__all__ = ["Balance", "balance_of"]

LOSS = "_apply_aux_loss"  # a router's; called wherever one computes any balancing loss, of whatever kind


class Balance:
    """What the routers of one call made of its tokens."""

    def __init__(self, whole: bool) -> None:
        self._whole, self._group, self._top_k = whole, None, 1
        self._sums: list[Tensor] = []  # [2, E] of each layer: tokens sent, and summed probabilities
        self._routers = 0

    def seen_by(self, router: Any) -> Callable[..., Any]:
        """The router's own function, which also tells what it is called with."""
        own = getattr(router, LOSS)
        self._routers += 1

        def apply(probs: Tensor, scores: Tensor, routing_map: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._group, self._top_k = router.tp_cp_group, router.topk
            self._sums.append(torch.stack([routing_map.sum(0).float(), scores.detach().float().sum(0)]))
            return own(probs, scores, routing_map, *args, **kwargs)

        return apply

    def loss(self) -> Tensor | None:
        """`E·Σ f·P` over all layers and tokens, as transformers' load_balancing_loss_func; detached, top_k at best.

        A collective over tensor- and context-parallel ranks. None where a router computed no loss (its layer's
        activations are made again, say), and on a stage of a pipeline, which sees only its own layers.
        """
        if not self._sums or len(self._sums) != self._routers or not self._whole:
            return None
        sent_E, probability_E = sums = torch.stack(self._sums).sum(0)
        if self._group is not None:
            all_reduce(sums, self._group)
        tokens = sent_E.sum() / self._top_k
        loss: Tensor = sent_E.numel() * (sent_E / tokens * (probability_E / tokens)).sum()
        return loss


@contextmanager
def balance_of(inner: Any) -> Iterator[Balance]:
    """Within the block, the routers of a language model are looked at; those of multi-token prediction are not."""
    found = Balance(bool(inner.pre_process and inner.post_process))
    with ExitStack() as stack:
        if getattr(inner.config, "num_moe_experts", None):
            for module in inner.decoder.modules():
                if hasattr(module, LOSS):
                    stack.enter_context(forward_as(module, found.seen_by(module), LOSS))
        yield found
