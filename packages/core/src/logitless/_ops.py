"""The opaque custom ops, one a direction, through which every backend runs.

Opaque, so that `torch.compile`, `opcheck`, autograd and activation checkpointing hold for every backend alike; backend
and group travel as strings. All that is saved is token-shaped (a function of N, not of how many tokens are live), but
for the one buffer whose shape `Backend.kept_shape` gives.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from logitless._call import FIRST_ONLY, Call, plain_arithmetic, spread
from logitless.errors import UnsupportedError
from logitless.types import Gradients, Needs

__all__ = ["linear_log_probs_op"]

_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float": "float",
    "float | None": "float?",
    "int": "SymInt",
    "bool": "bool",
    "str": "str",
}
_CALL = ", ".join(f"{_TYPES[str(field.type)]} {field.name}" for field in fields(Call))
_SIZE = len(fields(Call))


@torch.library.custom_op(
    "logitless::linear_log_probs",
    mutates_args=(),
    schema=f"({_CALL}, bool entropy, bool entropy_grad, SymInt keep_bytes, Tensor? grad_buffer)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_log_probs_op(*args: Any) -> tuple[Tensor, ...]:
    """(log_probs [N], entropy [N] or [0], stats [4, N], order [N], live_count [] on the host, kept)."""
    call, (entropy, entropy_grad, keep_bytes, _) = Call(*args[:_SIZE]), args[_SIZE:]
    order, live_count = call.find_live()
    problem = call.problem(order, live_count)
    call.agree(live_count, entropy)
    with plain_arithmetic(call.hidden.device):
        kept_shape = call.kept_shape(entropy, entropy_grad, keep_bytes)
        out = call.plugin.forward(problem, entropy=entropy, entropy_grad=entropy_grad, kept_shape=kept_shape)
    log_probs, stats = spread(out.log_probs, order), spread(out.stats, order)
    entropies = log_probs.new_empty(0) if out.entropy is None else spread(out.entropy, order)
    if not call.validate:
        log_probs, entropies = call.unchecked(log_probs), call.unchecked(entropies) if entropy else entropies
    return log_probs, entropies, stats, order, torch.tensor(live_count), out.kept


@linear_log_probs_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    call, (entropy, entropy_grad, keep_bytes, _) = Call(*args[:_SIZE]), args[_SIZE:]
    n_tokens = call.labels.shape[0]
    log_probs = call.hidden.new_empty(n_tokens, dtype=call.accumulation_dtype)
    return (
        log_probs,
        log_probs.new_empty(n_tokens if entropy else 0),
        log_probs.new_empty(4, n_tokens),
        call.labels.new_empty(n_tokens),
        torch.empty((), dtype=torch.int64, device="cpu"),
        call.hidden.new_empty(call.kept_shape(entropy, entropy_grad, keep_bytes), dtype=torch.uint8),
    )


@dataclass(frozen=True, slots=True)
class Made:
    """What the forward made for the backward."""

    stats: Tensor  # [4, N]
    order: Tensor  # [N], the live tokens' indices first
    live_count: Tensor  # [] on the host
    kept: Tensor


def _gradients(
    call: Call,
    made: Made,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    needs: list[bool],
    grad_buffer: Tensor | None,
) -> Gradients:
    problem = call.problem(made.order, int(made.live_count))
    upstream, stats = [grad_log_probs, grad_entropy], made.stats
    if not call.validate:
        upstream = [None if grad is None else call.unchecked(grad) for grad in upstream]
    if problem.live is not None:
        upstream = [None if grad is None else grad[problem.live] for grad in upstream]
        stats = stats[:, problem.live]
    grad_log_prob_n, grad_entropy_n = upstream
    assert grad_log_prob_n is not None
    with plain_arithmetic(call.hidden.device):
        return call.plugin.backward(
            problem, stats, made.kept, grad_log_prob_n, grad_entropy_n, Needs(*needs), grad_buffer
        )


@torch.library.custom_op(
    "logitless::linear_log_probs_backward",
    mutates_args=(),
    schema=f"({_CALL}, Tensor stats, Tensor order, Tensor live_count, Tensor kept, Tensor grad_log_probs,"
    " Tensor? grad_entropy, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(*args: Any) -> tuple[Tensor, ...]:
    """Gradients of `Call.differentiable`; an empty tensor for each that is not needed, since ops return tensors."""
    call, made, rest = Call(*args[:_SIZE]), Made(*args[_SIZE : _SIZE + 4]), args[_SIZE + 4 :]
    grad_log_probs, grad_entropy, needs = rest
    found = _gradients(call, made, grad_log_probs, grad_entropy, needs, None)
    grads = (found.hidden, found.weight, found.bias, found.lora_u, found.lora_b)
    return tuple(call.hidden.new_empty(0) if grad is None else grad for grad in grads)


@_backward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    call, needs = Call(*args[:_SIZE]), args[-1]
    return tuple(
        call.hidden.new_empty(0) if tensor is None or not needed else tensor.new_empty(tensor.shape)
        for tensor, needed in zip(call.differentiable, needs, strict=True)
    )


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise UnsupportedError(FIRST_ONLY)


_backward_op.register_autograd(_no_double_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, grad_buffer = Call(*inputs[:_SIZE]), inputs[-1]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call.differentiable, call.labels, call.temperature, *output[2:])
    ctx.numbers = inputs[7:_SIZE]
    ctx.grad_buffer = grad_buffer  # not saved: one micro-batch's backward may write it before another's has run


def _backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes at the first look, and forbids a second
    inputs, made = saved[:7], saved[7:]
    unfound = (None,) * (_SIZE + 4 - 5)
    if grad_log_probs is None and grad_entropy is None:
        return (None,) * 5 + unfound
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(made[0][0])
    needs = list(ctx.needs_input_grad[:5])
    if ctx.grad_buffer is not None:
        if torch.is_grad_enabled():  # a graph of this backward is being made, and the buffer cannot take part
            _no_double_backward(ctx)
        needs[1] = True
        call = Call(*inputs, *ctx.numbers)
        found = _gradients(call, Made(*made), grad_log_probs, grad_entropy, needs, ctx.grad_buffer)
        return (found.hidden, None, found.bias, found.lora_u, found.lora_b, *unfound)
    grads = _backward_op(*inputs, *ctx.numbers, *made, grad_log_probs, grad_entropy, needs)
    return (*(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), *unfound)


linear_log_probs_op.register_autograd(_backward, setup_context=_save)
