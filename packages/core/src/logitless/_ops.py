"""The opaque custom ops, one a direction, and the same two directions as plain autograd where nothing looks on.

Opaque, so that `torch.compile`, `opcheck`, tracing modes and tensor subclasses hold for every backend alike; backend
and group travel as strings. All that is saved is token-shaped (a function of N, not of how many tokens are live), but
for the one buffer whose shape `Backend.kept_shape` gives. Plain eager calls skip the dispatcher: it cost more than the
kernels of a few hundred tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from logitless._arithmetic import plain_arithmetic
from logitless._call import FIRST_ONLY, Call, spread
from logitless._live import Live
from logitless.errors import UnsupportedError
from logitless.types import STATS, Forwarded, Gradients, Needs, Problem

__all__ = [
    "LABELS",
    "SCHEMA",
    "SIZE",
    "TENSORS",
    "TYPES",
    "batched",
    "linear_log_probs_op",
    "live_order",
    "looked_on",
    "no_double_backward",
    "scores",
]

TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "float": "float",
    "float | None": "float?",
    "int": "SymInt",
    "int | None": "int?",
    "bool": "bool",
    "str": "str",
}
# Of a call: its fields as ops take them; how many they are, and of these tensors, which come first, the five that are
# differentiable before labels.
SCHEMA = ", ".join(f"{TYPES[str(field.type)]} {field.name}" for field in fields(Call))
SIZE, TENSORS, LABELS = len(fields(Call)), 7, 5


def _asked(call: Call, entropy: bool, entropy_grad: bool, wanted: Sequence[str]) -> Live:
    """Which tokens are live, asked of the device and not yet read."""
    return call.live("linear_log_probs", entropy=entropy, entropy_grad=entropy_grad, stats=tuple(wanted))


def _forward(call: Call, problem: Problem, entropy: bool, entropy_grad: bool, keep_bytes: int) -> Forwarded:
    """Scores of all N tokens, and the statistics that are wanted."""
    kept_shape = call.kept_shape(entropy, entropy_grad, keep_bytes, problem.stats)
    with plain_arithmetic(call.hidden.device):
        out = call.plugin.forward(problem, entropy=entropy, entropy_grad=entropy_grad, kept_shape=kept_shape)
    n_tokens, index = call.labels.shape[0], problem.live
    log_probs, stats = spread(out.log_probs, index, n_tokens, 0), spread(out.stats, index, n_tokens)
    entropies = log_probs.new_empty(0) if out.entropy is None else spread(out.entropy, index, n_tokens)
    extras = None if out.extras is None else spread(out.extras, index, n_tokens)
    if not call.validate:
        log_probs, entropies = call.unchecked(log_probs, entropies)  # type: ignore[assignment]
    elif log_probs.ndim == 2:
        log_probs = log_probs.masked_fill_(call.labels == call.ignore_index, 0.0)
    return Forwarded(log_probs, entropies, stats, out.kept, extras)


@torch.library.custom_op(
    "logitless::linear_log_probs",
    mutates_args=(),
    schema=f"({SCHEMA}, bool entropy, bool entropy_grad, SymInt keep_bytes, str[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_log_probs_op(*args: Any) -> tuple[Tensor, ...]:
    """(log_probs, entropy [N] or [0], stats [rows, N], order [N], live_count [] on the host, kept, extras).

    `order` begins with the live tokens' indices; log_probs are in labels' shape; extras are the wanted statistics,
    [rows, N].
    """
    call, (entropy, entropy_grad, keep_bytes, wanted) = Call(*args[:SIZE]), args[SIZE:]
    live = _asked(call, entropy, entropy_grad, wanted)

    def solve(problem: Problem) -> Forwarded:
        return _forward(call, problem, entropy, entropy_grad, keep_bytes)

    out = call.solved(live, solve, tuple(wanted))
    extras = out.log_probs.new_empty(0, call.labels.shape[0]) if out.extras is None else out.extras
    assert out.entropy is not None
    return out.log_probs, out.entropy, out.stats, *live_order(call, live.indices), out.kept, extras


def live_order(call: Call, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """[N] that begins with the live tokens' indices, and [] on the host, how many they are."""
    order, count = call.labels.new_zeros(call.labels.shape[0]), call.labels.shape[0]
    if live is not None:
        count = live.shape[0]
        order[:count] = live
    return order, torch.tensor(count)


@linear_log_probs_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    call, (entropy, entropy_grad, keep_bytes, wanted) = Call(*args[:SIZE]), args[SIZE:]
    n_tokens = call.labels.shape[0]
    log_probs = call.hidden.new_empty(call.labels.shape, dtype=call.accumulation_dtype)
    return (
        log_probs,
        log_probs.new_empty(n_tokens if entropy else 0),
        log_probs.new_empty(call.stats_rows, n_tokens),
        call.labels.new_empty(n_tokens),
        torch.empty((), dtype=torch.int64, device="cpu"),
        call.hidden.new_empty(call.kept_shape(entropy, entropy_grad, keep_bytes, wanted), dtype=torch.uint8),
        log_probs.new_empty(sum(_rows(call, name) for name in wanted), n_tokens),
    )


def _rows(call: Call, name: str) -> int:
    """Of a statistic, how many numbers each token has."""
    return call.labels.shape[1] if STATS[name] and call.labels.ndim == 2 else 1


@dataclass(slots=True)
class Made:
    """What the forward made for the backward."""

    stats: Tensor  # [rows, N]
    live: Tensor | None  # [n]
    kept: Tensor


def _gradients(
    call: Call,
    made: Made,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    needs: list[bool],
    grad_buffer: Tensor | None,
    last: bool = False,
) -> Gradients:
    problem = call.problem(made.live, last=last)
    upstream, stats = [grad_log_probs, grad_entropy], made.stats
    if not call.validate:
        upstream = call.unchecked(*upstream)
    elif call.labels.ndim == 2:
        upstream[0] = grad_log_probs.masked_fill(call.labels == call.ignore_index, 0.0)
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
    schema=f"({SCHEMA}, Tensor stats, Tensor order, Tensor live_count, Tensor kept, Tensor grad_log_probs,"
    " Tensor? grad_entropy, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(*args: Any) -> tuple[Tensor, ...]:
    """Gradients of `Call.differentiable`; an empty tensor for each that is not needed, since ops return tensors."""
    call, (stats, order, live_count, kept, grad_log_probs, grad_entropy, needs) = Call(*args[:SIZE]), args[SIZE:]
    count = int(live_count)
    made = Made(stats, None if count == call.labels.shape[0] else order[:count], kept)
    found = _gradients(call, made, grad_log_probs, grad_entropy, needs, None)
    grads = (found.hidden, found.weight, found.bias, found.lora_u, found.lora_b)
    return tuple(call.hidden.new_empty(0) if grad is None else grad for grad in grads)


@_backward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    call, needs = Call(*args[:SIZE]), args[-1]
    return tuple(
        call.hidden.new_empty(0) if tensor is None or not needed else tensor.new_empty(tensor.shape)
        for tensor, needed in zip(call.differentiable, needs, strict=True)
    )


def no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise UnsupportedError(FIRST_ONLY)


_backward_op.register_autograd(no_double_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *output[2:6])
    ctx.numbers = inputs[TENSORS:SIZE]


def _backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes at the first look, and forbids a second
    unfound = (None,) * (SIZE + 4 - 5)
    if grad_log_probs is None and grad_entropy is None:
        return (None,) * 5 + unfound
    if grad_log_probs is None:
        grad_log_probs = saved[TENSORS].new_zeros(saved[LABELS].shape)
    needs = list(ctx.needs_input_grad[:5])
    inputs, made = saved[:TENSORS], saved[TENSORS:]
    grads = _backward_op(*inputs, *ctx.numbers, *made, grad_log_probs, grad_entropy, needs)
    return (*(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), *unfound)


linear_log_probs_op.register_autograd(_backward, setup_context=_save)


class _Plain(Function):
    """The ops' two directions without the dispatcher; its inputs are what is differentiated, of a call."""

    @staticmethod
    def forward(ctx: Any, call: Call, options: tuple[Any, ...], *_: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        problem, grad_buffer, *asked = options
        out, args = _forward(call, problem, *asked), call.args
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args[:TENSORS], out.stats, problem.live, out.kept)
        # grad_buffer isn't saved: one backward may write it before another's has run
        ctx.numbers, ctx.grad_buffer, ctx.spent = args[TENSORS:], grad_buffer, False
        return out.log_probs, out.entropy, out.extras  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, _: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once, as above
        if grad_log_probs is None and grad_entropy is None:
            return (None,) * 7
        call, made = Call(*saved[:TENSORS], *ctx.numbers), Made(*saved[TENSORS:])
        if ctx.spent:  # a last backward failed, memory was short perhaps, once it had overwritten what was kept
            made = replace(made, kept=made.kept[:0])
        if grad_log_probs is None:
            grad_log_probs = made.stats.new_zeros(call.labels.shape)
        needs = list(ctx.needs_input_grad[2:])
        if ctx.grad_buffer is not None:
            if torch.is_grad_enabled():  # a graph of this backward is being made, and the buffer cannot take part
                no_double_backward(ctx)
            if batched(grad_log_probs, grad_entropy):
                raise UnsupportedError(
                    "head.grad_buffer: got a batch of backwards at once (is_grads_batched, vectorize), expected one "
                    "backward at a time; leave the buffer out"
                )
            needs[1] = True
        # Through the op, which knows how to refuse a second derivative, takes batches of gradients apart, and which
        # compiled autograd does not trace into.
        traced = torch.compiler.is_compiling() and ctx.grad_buffer is None
        if traced or torch.is_grad_enabled() or batched(grad_log_probs, grad_entropy):
            made_op = (made.stats, *live_order(call, made.live), made.kept)
            grads = _backward_op(*call.args, *made_op, grad_log_probs, grad_entropy, needs)
            found = Gradients(*(grad if needed else None for grad, needed in zip(grads, needs, strict=True)))
        else:
            last = ctx.spent = not torch._C._autograd._get_current_graph_task_keep_graph()
            found = _gradients(call, made, grad_log_probs, grad_entropy, needs, ctx.grad_buffer, last)
        weight = None if ctx.grad_buffer is not None else found.weight
        return None, None, found.hidden, weight, found.bias, found.lora_u, found.lora_b


def batched(*grads: Tensor | None) -> bool:
    """Whether autograd runs many backwards at once, one for each of a batch of upstream gradients."""
    return any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads)


def looked_on(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether something sees calls of ops, and must: a compiler, a mode, torch.func, a tensor of another class."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(tensor is not None and type(tensor) not in (Tensor, Parameter) for tensor in tensors)
    )


def scores(
    call: Call, entropy: bool, entropy_grad: bool, keep_bytes: int, grad_buffer: Tensor | None, wanted: tuple[str, ...]
) -> tuple[Tensor, Tensor, dict[str, Tensor] | None]:
    """log_probs [N] or [N, K], and entropy [N] (or [0]), of a call, differentiable; the wanted statistics by name."""
    options = (entropy, entropy_grad, keep_bytes)
    if grad_buffer is None and looked_on(call.differentiable):
        log_probs, entropies, *_, extras = linear_log_probs_op(*call.args, *options, list(wanted))
    else:
        live = _asked(call, entropy, entropy_grad, wanted)

        def solve(problem: Problem) -> Any:
            asked = (problem, grad_buffer, *options)
            return _Plain.apply(call, asked, *call.differentiable)  # type: ignore[no-untyped-call]

        log_probs, entropies, extras = call.solved(live, solve, wanted)
    return log_probs, entropies, _named(call, extras, wanted) if wanted else None


def _named(call: Call, extras: Tensor, wanted: tuple[str, ...]) -> dict[str, Tensor]:
    """Rows of statistics by name, [N] or labels' shape; 0 or False where ignored."""
    parts = torch.split(extras.detach(), [_rows(call, name) for name in wanted])
    found, ignored = {}, call.labels == call.ignore_index
    for name, part in zip(wanted, parts, strict=True):
        if STATS[name]:
            found[name] = (part.T if call.labels.ndim == 2 else part.squeeze(0)).bool() & ~ignored
        else:
            found[name] = part.squeeze(0).masked_fill(ignored if ignored.ndim == 1 else ignored.all(1), 0.0)
    return found
