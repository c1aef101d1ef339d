"""The op: log-probabilities and entropies of labels, straight from hidden states and the head.

The logits `[tokens, vocab]` exist only in tiles, in the backend. The formulas and their gradients are derived in
docs/math.md; `logitless.reference` is the specification.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from logitless._ops import linear_log_probs_op
from logitless._registry import choose_backend, requested_backend
from logitless._validate import check_call
from logitless.errors import InputTypeError, UnsupportedError
from logitless.head import LMHead
from logitless.types import Request, TokenLogProbs

__all__ = ["linear_log_probs"]


def _resolve(backend: str | None, sizes: tuple[int, int, int], **asked: Any) -> str:
    n_tokens, vocab_rows, hidden_size = sizes
    request = Request(n_tokens=n_tokens, vocab_rows=vocab_rows, hidden_size=hidden_size, **asked)
    requested = requested_backend(backend)
    chosen = choose_backend(request, requested)
    return requested or chosen.name


# A ContextVar, the environment and entry points cannot be traced; while compiling, the choice is made once. This is
# all that torch.compiler.assume_constant_result does, but for importing torch._dynamo, and with it triton, right here.
_resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _single_pair(head: LMHead, n_tokens: int) -> tuple[Tensor | None, Tensor | None]:
    """LoRA pairs as one: `Σ u·Bᵀ` is the product of the concatenated ranks."""
    if not head.lora:
        return None, None
    us = [u.reshape(n_tokens, u.shape[-1]) for u, _ in head.lora]
    bs = [b for _, b in head.lora]
    return (us[0], bs[0]) if len(us) == 1 else (torch.cat(us, dim=-1), torch.cat(bs, dim=-1))


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
    if isinstance(head, Tensor):
        head = LMHead(head)
    if not isinstance(head, LMHead):
        raise InputTypeError(f"head: got {type(head).__qualname__}, expected a [V, D] tensor or a logitless.LMHead")
    check_call(hidden, head, labels, temperature, ignore_index, keep_bytes, workspace_bytes)
    if tp_group is not None:
        raise UnsupportedError("tp_group: sharded vocabularies are not served yet; pass the whole weight")
    weight, device_type = head.weight, hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    n_tokens = math.prod(labels.shape)
    lora_u, lora_b = _single_pair(head, n_tokens)
    trained = (hidden, weight, head.bias, lora_u, lora_b)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained)
    entropy_grad = entropy and entropy_grad and needs_grad
    tracing = torch.compiler.is_compiling()
    name = _resolve(
        backend,
        (0, 0, 0) if tracing else (n_tokens, weight.shape[0], weight.shape[1]),
        device=hidden.device,
        hidden_dtype=hidden.dtype,
        weight_dtype=weight.dtype,
        bias=head.bias is not None,
        softcap=head.softcap is not None,
        lora_rank=0 if lora_b is None else lora_b.shape[1],
        per_token_temperature=isinstance(temperature, Tensor),
        entropy=entropy,
        entropy_grad=entropy_grad,
        needs_grad=needs_grad,
        grad_buffer=head.grad_buffer is not None,
        workspace_bytes=workspace_bytes,
        validate=validate,
    )
    temperature_N = None
    if isinstance(temperature, Tensor):
        temperature_N = (
            temperature.to(torch.promote_types(hidden.dtype, torch.float32)).expand(labels.shape).reshape(-1)
        )
    log_probs, entropies, *_ = linear_log_probs_op(
        hidden.reshape(n_tokens, hidden.shape[-1]),
        weight,
        head.bias,
        lora_u,
        lora_b,
        labels.reshape(-1).long(),
        temperature_N,
        1.0 if isinstance(temperature, Tensor) else float(temperature),
        float(head.scale),
        None if head.softcap is None else float(head.softcap),
        head.vocab_start or 0,
        weight.shape[0] if head.vocab_size is None else head.vocab_size,
        ignore_index,
        workspace_bytes,
        validate,
        name,
        entropy,
        keep_bytes if needs_grad else 0,
        head.grad_buffer,
    )
    log_probs = log_probs.view(labels.shape)
    if not entropy:
        return TokenLogProbs(log_probs, None)
    entropies = entropies.view(labels.shape)
    return TokenLogProbs(log_probs, entropies if entropy_grad else entropies.detach())
