"""The head of a Megatron model: its output layer, or the tied embedding, as an `LMHead` over its tensor-parallel group.

Shape suffixes: s tokens of a row, b rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from torch import Tensor

from logitless import LMHead, TokenLogProbs, linear_log_probs, linear_policy_loss, top_k_log_probs
from logitless.errors import InvalidInputError, UnsupportedError
from logitless_mcore.capture import language_model

__all__ = ["Asked", "Scored", "Transform", "likeliest", "score", "set_vocab_size", "vocab_size_of", "why_not"]

VOCAB_SIZE = "logitless_vocab_size"


@dataclass(frozen=True, slots=True)
class Transform:
    """What follows the product with the weight: `z -> s·z`, or `z -> c·tanh(s·z/c)` with a softcap c."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """One call's arguments to the op."""

    labels: Tensor  # [s, b] or [s, b, K]
    temperature: Tensor | float = 1.0  # or [s, b]
    entropy: bool = True
    entropy_grad: bool = True
    loss_fn: Callable[[TokenLogProbs, Tensor], Tensor] | None = None
    keep_bytes: int = 0
    backend: str | None = None
    top_k: int | None = None
    top_p: float | None = None
    stats: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Scored:
    """What came of it: [s, b] each, or [s, b, K] where it is of a label."""

    log_probs: Tensor
    entropy: Tensor | None
    loss: Tensor | None = None
    stats: Mapping[str, Tensor] | None = None


def set_vocab_size(model: Any, vocab_size: int) -> None:
    """Tell how many of the model's vocab rows are real; those beyond it are padding, and left out of the softmax.

    Megatron pads the vocabulary and keeps no record of its size. `load_hf_weights` calls this.

    Args:
        model: a Megatron model, wrapped or not, any pipeline stage.
        vocab_size: rows of the unpadded vocabulary, over all ranks.
    """
    inner = language_model(model)
    padded = getattr(inner, "vocab_size", None)
    if not isinstance(vocab_size, int) or vocab_size < 1 or (padded is not None and vocab_size > padded):
        raise InvalidInputError(
            f"vocab_size: got {vocab_size!r}, expected 1 to {padded}, the model's padded vocabulary"
        )
    setattr(inner, VOCAB_SIZE, vocab_size)


def vocab_size_of(model: Any) -> int | None:
    """What `set_vocab_size` told, or None: all rows are real."""
    found: int | None = getattr(language_model(model), VOCAB_SIZE, None)
    return found


def why_not(output_layer: Any) -> str | None:
    """None for an output layer that is a vocabulary's head, else why it is not understood."""
    name = type(output_layer).__qualname__
    if not isinstance(output_layer, ColumnParallelLinear):
        return f"its output layer is a {name}, expected Megatron's ColumnParallelLinear or a subclass of it"
    if getattr(output_layer, "gtp_remat_size", 1) > 1:
        return "its output layer's weight is sharded for rematerialization (gtp_weight_remat_size > 1)"
    return None


def _head(output_layer: Any, weight: Tensor | None, transform: Transform, vocab_size: int | None) -> LMHead:
    return LMHead(
        output_layer.weight if weight is None else weight,
        None if output_layer.skip_bias_add else output_layer.bias,  # then the model drops it
        transform.scale,
        transform.softcap,
        vocab_size,
    )


def _product(
    hidden: Tensor, output_layer: Any, weight: Tensor | None, transform: Transform, vocab_size: int | None
) -> dict[str, Any]:
    """What every op takes of a head and the hidden states that reached it, those of all tokens."""
    reason = why_not(output_layer)
    if reason is not None:
        raise UnsupportedError(reason)
    group, sequence_parallel = output_layer.tp_group, output_layer.sequence_parallel
    if sequence_parallel:  # whose backward sums over the ranks and scatters, so each leaves its own part of d_hidden
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    return {
        "hidden": hidden,
        "head": _head(output_layer, weight, transform, vocab_size),
        "tp_group": group if group.size() > 1 else None,
        "reduce_hidden_grad": not sequence_parallel,
    }


def likeliest(
    hidden: Tensor,
    output_layer: Any,
    weight: Tensor | None,
    transform: Transform,
    vocab_size: int | None,
    backend: str | None,
) -> Tensor:
    """[s, b] the most likely token of each row; arguments as for `score`."""
    with torch.no_grad():
        arguments = _product(hidden, output_layer, weight, transform, vocab_size)
        return top_k_log_probs(**arguments, k=1, backend=backend)[0][..., 0]


def score(
    hidden: Tensor, output_layer: Any, weight: Tensor | None, transform: Transform, vocab_size: int | None, asked: Asked
) -> Scored:
    """Scores [s, b] of hidden states [s, b, D], or under sequence parallelism of this rank's part of them.

    Args:
        hidden: what reached the output layer.
        output_layer: understood, see `why_not`.
        weight: the tied embedding's weight, or None.
        transform: what the model does to its logits.
        vocab_size: real rows over all ranks, or None.
        asked: what of.
    """
    arguments = _product(hidden, output_layer, weight, transform, vocab_size)
    expected = arguments["hidden"].shape[:-1]
    if asked.labels.shape[:2] != expected or asked.labels.ndim > 3:
        raise InvalidInputError(
            f"labels: got shape {tuple(asked.labels.shape)}, expected {tuple(expected)}, one for each token, or K of "
            "each in a last dimension"
        )
    if asked.stats and asked.loss_fn is not None:
        raise InvalidInputError("stats: got some with a loss_fn, expected none: its single pass makes no statistics")
    arguments |= {
        "labels": asked.labels,
        "temperature": asked.temperature,
        "entropy": asked.entropy,
        "entropy_grad": asked.entropy_grad,
        "backend": asked.backend,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
    }
    if asked.loss_fn is None:
        scores = linear_log_probs(**arguments, keep_bytes=asked.keep_bytes, stats=asked.stats)
        return Scored(scores.log_probs, scores.entropy, stats=scores.stats)
    loss, scores = linear_policy_loss(**arguments, loss_fn=asked.loss_fn)
    return Scored(scores.log_probs, scores.entropy, loss)
