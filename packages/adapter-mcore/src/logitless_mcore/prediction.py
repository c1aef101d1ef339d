"""Multi-token prediction: the loss of the heads that look further ahead, without their logits.

Megatron puts each such head's hidden states through the output layer, rolls labels and mask on by one, takes
`compute_language_model_loss`, and adds the gradient of the losses to that of the model's own hidden states. All of that
runs as it is. Only the output layer gives a stand-in in place of logits, and the loss is the op's.

Where it was not asked for, the heads do not run: without labels Megatron-Core 0.16 fails on them, and 0.19 would train
them on `input_ids`.

Shape suffixes: s tokens of a row, b rows, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from logitless_mcore.capture import forward_as
from logitless_mcore.head import Asked, Transform, likeliest, score

__all__ = ["Ahead", "depth_of", "own_logits", "without_prediction"]

LOSS = "compute_language_model_loss"


def depth_of(inner: Any) -> int:
    """How many tokens beyond the next one a language model predicts."""
    return getattr(getattr(inner, "config", None), "mtp_num_layers", None) or 0


@contextmanager
def without_prediction(inner: Any) -> Iterator[None]:
    """Within the block, a model that predicts further tokens runs as if it did not."""
    if not depth_of(inner) or getattr(inner, "mtp", None) is None or not inner.post_process:
        yield
        return
    config = copy.copy(inner.config)
    config.mtp_num_layers = None  # else the hidden states would be taken for those of all heads, and cut
    with forward_as(inner, config, "config"), forward_as(inner.mtp, lambda *, hidden_states, **_: hidden_states):
        yield


@contextmanager
def own_logits(inner: Any) -> Iterator[None]:
    """Within the block, a model that is given labels for its further heads still returns its logits, not their loss."""
    own, seen = getattr(inner, LOSS, None), []

    def loss(labels: Tensor, logits: Tensor) -> Any:
        seen.append(labels)
        if len(seen) <= depth_of(inner):
            assert own is not None  # every language model of Megatron's has it
            return own(labels, logits)
        return logits.transpose(0, 1).contiguous()

    with forward_as(inner, loss, LOSS):
        yield


class _Rows(Tensor):
    """Logits [s, b, 0] that find the likeliest token of each row when they are asked for it.

    Megatron counts how often a head is right. Where the vocabulary is sharded it takes the best of each rank's best,
    as rank · columns + column: with no columns that is the column, and every rank names the same token.
    """

    best: Callable[[], Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.argmax, Tensor.argmax):
            return args[0].best()
        if func in (torch.max, Tensor.max):
            ids = args[0].best()
            return torch.zeros(ids.shape, device=ids.device), ids
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, _Rows):  # scaled
            result.best = next(x.best for x in args if isinstance(x, _Rows))
        return result


class Ahead:
    """One call's further heads, in the order in which Megatron scores them.

    Attributes:
        losses: [b, s] nats of each, as Megatron got them: the mask is not yet applied, and ignored labels are 0.
    """

    def __init__(self, inner: Any, transform: Transform, vocab_size: int | None, backend: str | None) -> None:
        self.losses: list[Tensor] = []
        self._inner, self._score = inner, (transform, vocab_size, backend)
        self._taken: list[tuple[Tensor, Any, Tensor | None]] = []

    @property
    def awaited(self) -> bool:
        """Whether the output layer's next call is one of these heads'."""
        return len(self._taken) < depth_of(self._inner)

    def take(self, hidden: Tensor, output_layer: Any, weight: Tensor | None) -> Tensor:
        """A stand-in for the logits of hidden states [s, b, D]."""
        taken = (hidden, output_layer, weight)
        self._taken.append(taken)
        rows = hidden.new_zeros(*hidden.shape[:-1], 0).as_subclass(_Rows)
        rows.best = lambda: likeliest(*taken, *self._score)
        return rows

    @contextmanager
    def scored(self) -> Iterator[None]:
        """Within the block, the model's losses are those of what was taken; of its own tokens it gets none."""
        with forward_as(self._inner, self._loss, LOSS):
            yield

    def _loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        if len(self.losses) == depth_of(self._inner):
            return labels  # what the model returns, which nobody looks at
        transform, vocab_size, backend = self._score
        asked = Asked(labels.t(), entropy=False, backend=backend)
        found = score(*self._taken[len(self.losses)], transform, vocab_size, asked)
        self.losses.append(-found.log_probs.t())
        return self.losses[-1]
