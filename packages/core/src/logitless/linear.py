"""The op: log-probabilities and entropies of labels, straight from hidden states and the head.

The logits `[tokens, vocab]` exist only in tiles, in the backend. The formulas and their gradients are derived in
docs/math.md; `logitless.reference` is the specification.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from logitless._call import make_call
from logitless._ops import scores
from logitless.head import LMHead
from logitless.types import TokenLogProbs

__all__ = ["linear_log_probs"]


def linear_log_probs(
    hidden: Tensor,
    head: LMHead | Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = True,
    entropy_grad: bool = True,
    ignore_index: int = -100,
    tp_group: Any = None,
    reduce_hidden_grad: bool = True,
    keep_bytes: int = 0,
    workspace_bytes: int = 512 << 20,
    validate: bool = True,
    backend: str | None = None,
) -> TokenLogProbs:
    """Log-probability and entropy of each label, [...] in nats, without the [..., V] logits.

    Equals, for a plain head: `log_p = (hidden @ weight.T / temperature).log_softmax(-1)`, then
    `log_p.gather(-1, labels[..., None])[..., 0]` and `-(log_p.exp() * log_p).sum(-1)`, in float32 from inputs of any
    float dtype (float64 from float64). Differentiable once, in hidden, weight, bias and the LoRA pairs.

    Args:
        hidden: [..., D], float16, bfloat16, float32 or float64.
        head: a weight [V, D] or an `LMHead`.
        labels: [...] integers, the token that each hidden state predicts: already shifted.
        temperature: a positive number, or a tensor of labels' shape.
        entropy: False leaves `out.entropy` None and does no work for it.
        entropy_grad: False gives the entropy detached, for logging, with a cheaper backward.
        ignore_index: tokens with this label cost nothing: outputs exactly 0.0, gradients exactly 0.
        tp_group: torch.distributed group over which the vocabulary is sharded.
        reduce_hidden_grad: with tp_group, whether every rank gets the whole d_hidden or its own partial sum.
        keep_bytes: memory that the forward may keep so that the backward recomputes less.
        workspace_bytes: bound on temporary memory.
        validate: check labels and temperatures, at the price of one device-to-host copy. False: no copy and no
            compaction of ignored tokens; labels out of range give NaN.
        backend: name of a backend; None takes `use_backend`, LOGITLESS_BACKEND, or the best that can serve.

    Raises:
        InputTypeError, InvalidInputError: an argument is wrong; the message names it.
        NotFoundError, UnsupportedError: no backend can serve; the message holds the reason.
    """
    call, needs_grad = make_call(
        hidden,
        head,
        labels,
        temperature=temperature,
        entropy=entropy,
        entropy_grad=entropy_grad,
        ignore_index=ignore_index,
        tp_group=tp_group,
        reduce_hidden_grad=reduce_hidden_grad,
        keep_bytes=keep_bytes,
        workspace_bytes=workspace_bytes,
        validate=validate,
        backend=backend,
    )
    grad_buffer = head.grad_buffer if isinstance(head, LMHead) else None
    entropy_grad = entropy and entropy_grad and needs_grad
    keep_bytes = keep_bytes if needs_grad else 0
    log_probs, entropies = scores(call, entropy, entropy_grad, keep_bytes, grad_buffer)
    if labels.ndim != 1:
        log_probs, entropies = log_probs.view(labels.shape), entropies.view(labels.shape) if entropy else entropies
    if not entropy:
        return TokenLogProbs(log_probs, None)
    return TokenLogProbs(log_probs, entropies if entropy_grad else entropies.detach())
