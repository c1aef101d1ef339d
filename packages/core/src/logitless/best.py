"""The most likely tokens of each hidden state and their log-probs, without the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from logitless._arithmetic import plain_arithmetic
from logitless._call import Call, make_call, spread
from logitless._ops import LABELS, SCHEMA, SIZE, looked_on
from logitless._validate import mask_labels
from logitless.errors import InputTypeError, InvalidInputError
from logitless.head import LMHead
from logitless.linear import linear_log_probs

__all__ = ["top_k_log_probs", "top_k_log_probs_op"]

IGNORED = -100


@torch.library.custom_op(
    "logitless::top_k_log_probs", mutates_args=(), schema=f"({SCHEMA}, SymInt k) -> (Tensor, Tensor)"
)
def top_k_log_probs_op(*args: Any) -> tuple[Tensor, Tensor]:
    """Ids [N, k] and log-probs [N, k]; -100 and 0 where ignored."""
    return _best(Call(*args[:SIZE]), args[SIZE])


@top_k_log_probs_op.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    call, shape = Call(*args[:SIZE]), (args[LABELS].shape[0], args[SIZE])
    return call.labels.new_empty(shape), call.hidden.new_empty(shape, dtype=call.accumulation_dtype)


def _best(call: Call, k: int) -> tuple[Tensor, Tensor]:
    live = call.live("top_k_log_probs", k=k)
    plugin: Any = call.plugin
    with plain_arithmetic(call.hidden.device):
        ids, log_probs = plugin.top_k_log_probs(call.problem(live.indices), k)
    n_tokens = call.labels.shape[0]
    ids, log_probs = (spread(x, live.indices, n_tokens, 0) for x in (ids, log_probs))
    ignored_N1 = (call.labels == call.ignore_index).unsqueeze(1)
    return ids.masked_fill_(ignored_N1, IGNORED), log_probs.masked_fill_(ignored_N1, 0.0)


def top_k_log_probs(
    hidden: Tensor,
    head: LMHead | Tensor,
    k: int,
    *,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    tp_group: Any = None,
    reduce_hidden_grad: bool = True,
    workspace_bytes: int = 512 << 20,
    validate: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Ids and log-probs [..., k] of the k most likely tokens, in nats, without the [..., V] logits.

    Equals, for a plain head, `(hidden @ weight.T / temperature).log_softmax(-1)` sorted stably, largest first: of
    tokens of equal logit the one of the lowest id comes first. Where a gradient is wanted, the log-probs are
    differentiable, with the ids as constants: they are then scored by `linear_log_probs`, in a second pass over the
    products.

    Args:
        hidden: [..., D], float16, bfloat16, float32 or float64.
        head: a weight [V, D] or an `LMHead`.
        k: how many, from 1 to the vocabulary's size.
        temperature: a positive number, or a tensor of the tokens' shape.
        mask: [...] bool; tokens where it is False cost nothing: ids -100, which `linear_log_probs` ignores as labels,
            and log-probs exactly 0.0. None: all.
        tp_group, reduce_hidden_grad, workspace_bytes, validate, backend: as in `linear_log_probs`.

    Raises:
        InputTypeError, InvalidInputError: an argument is wrong; the message names it.
        NotFoundError, UnsupportedError: no backend can serve; the message holds the reason.
        CollectiveError: another rank of tp_group died, raised, or made no such call within the group's timeout.
    """
    labels = mask_labels(hidden, mask, IGNORED)
    options: dict[str, Any] = {
        "temperature": temperature,
        "tp_group": tp_group,
        "reduce_hidden_grad": reduce_hidden_grad,
        "workspace_bytes": workspace_bytes,
        "validate": validate,
        "backend": backend,
    }
    call, needs_grad = make_call(
        hidden,
        head,
        labels,
        entropy=False,
        entropy_grad=False,
        ignore_index=IGNORED,
        keep_bytes=0,
        best=True,
        **options,
    )
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)):
        raise InputTypeError(f"k: got {type(k).__qualname__}, expected an int")
    if not 1 <= k <= call.vocab_size:
        raise InvalidInputError(f"k: got {k}, expected 1 to the vocabulary's size, {call.vocab_size}")
    with torch.no_grad():
        found = (top_k_log_probs_op if looked_on(call.differentiable) else _through)(*call.args, k)
    ids, log_probs = (x.view(*hidden.shape[:-1], k) for x in found)
    if needs_grad:
        log_probs = linear_log_probs(hidden, head, ids, entropy=False, ignore_index=IGNORED, **options).log_probs
    return ids, log_probs


def _through(*args: Any) -> tuple[Tensor, Tensor]:
    return _best(Call(*args[:SIZE]), args[SIZE])
