"""The opaque custom ops, one a direction, through which every backend runs.

Opaque, so that `torch.compile`, `opcheck`, autograd and activation checkpointing hold for every backend alike; the
backend travels as a string. All that is saved is token-shaped (a function of N, not of how many tokens are live),
but for the one buffer whose shape `Backend.kept_shape` gives.

Shape suffixes: N tokens, n live tokens, D hidden size, V vocab rows of this rank, r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from logitless._registry import BACKENDS, load
from logitless._validate import check_values
from logitless.errors import UnsupportedError
from logitless.types import Backend, Gradients, Needs, Problem, Request

__all__ = ["Call", "linear_log_probs_op"]


@dataclass(frozen=True, slots=True)
class Call:
    """What both ops take, in the order of their schemas."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    lora_u: Tensor | None  # [N, r]
    lora_b: Tensor | None  # [V, r]
    labels: Tensor  # [N] int64
    temperature: Tensor | None  # [N]; None: temperature_value
    temperature_value: float
    scale: float
    softcap: float | None
    vocab_start: int
    vocab_size: int
    ignore_index: int
    workspace_bytes: int
    validate: bool
    backend: str

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        return (self.hidden, self.weight, self.bias, self.lora_u, self.lora_b)

    @property
    def plugin(self) -> Backend:
        backend: Backend = load(BACKENDS, self.backend)
        return backend

    @property
    def accumulation_dtype(self) -> torch.dtype:
        return torch.promote_types(torch.promote_types(self.hidden.dtype, self.weight.dtype), torch.float32)

    def request(self, entropy: bool) -> Request:
        return Request(
            device=self.hidden.device,
            hidden_dtype=self.hidden.dtype,
            weight_dtype=self.weight.dtype,
            n_tokens=self.hidden.shape[0],
            hidden_size=self.hidden.shape[1],
            vocab_rows=self.weight.shape[0],
            bias=self.bias is not None,
            softcap=self.softcap is not None,
            lora_rank=0 if self.lora_b is None else self.lora_b.shape[1],
            per_token_temperature=self.temperature is not None,
            entropy=entropy,
            workspace_bytes=self.workspace_bytes,
            validate=self.validate,
        )

    def kept_shape(self, entropy: bool, keep_bytes: int) -> tuple[int, ...]:
        return self.plugin.kept_shape(self.request(entropy), keep_bytes) if keep_bytes else (0,)

    def problem(self, order: Tensor, live_count: int) -> Problem:
        return Problem(
            hidden=self.hidden,
            weight=self.weight,
            bias=self.bias,
            lora_u=self.lora_u,
            lora_b=self.lora_b,
            labels=self.labels if self.validate else self.labels.clamp(0, self.vocab_size - 1),
            temperature=self.temperature_value if self.temperature is None else self.temperature,
            scale=self.scale,
            softcap=self.softcap,
            vocab_start=self.vocab_start,
            vocab_valid=max(0, min(self.weight.shape[0], self.vocab_size - self.vocab_start)),
            vocab_size=self.vocab_size,
            live=order[:live_count] if live_count < self.labels.shape[0] else None,
            dead=None if self.validate else self.labels == self.ignore_index,
            workspace_bytes=self.workspace_bytes,
        )

    def unchecked(self, values: Tensor) -> Tensor:
        """What `validate=False` promises: exactly 0 where ignored, NaN where the label is no token."""
        bad = (self.labels < 0) | (self.labels >= self.vocab_size)
        return values.masked_fill(bad, float("nan")).masked_fill(self.labels == self.ignore_index, 0.0)


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


@contextmanager
def _plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Products as the backend wrote them: no autocast of its fp32 sums, no TF32 or bf16 in its fp32 products."""
    precision = torch.get_float32_matmul_precision()
    with torch.autocast(device.type, enabled=False):
        if precision == "highest":
            yield
            return
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)


def _spread(values: Tensor, order: Tensor) -> Tensor:
    """[..., n] of live tokens to [..., N], 0 elsewhere."""
    n, total = values.shape[-1], order.shape[0]
    if n == total:
        return values
    return values.new_zeros(*values.shape[:-1], total).index_copy_(-1, order[:n], values)


@torch.library.custom_op(
    "logitless::linear_log_probs",
    mutates_args=(),
    schema=f"({_CALL}, bool entropy, SymInt keep_bytes, Tensor? grad_buffer)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_log_probs_op(*args: Any) -> tuple[Tensor, ...]:
    """(log_probs [N], entropy [N] or [0], stats [3, N], order [N], live_count [] on the host, kept)."""
    call, (entropy, keep_bytes, _) = Call(*args[:_SIZE]), args[_SIZE:]
    n_tokens = call.labels.shape[0]
    live_count = n_tokens
    if call.validate:
        live_count = check_values(call.labels, call.temperature, call.ignore_index, call.vocab_size)
    if live_count < n_tokens:
        order = torch.nonzero_static(call.labels != call.ignore_index, size=n_tokens, fill_value=0).squeeze(1)
    else:
        order = torch.arange(n_tokens, device=call.labels.device)
    problem = call.problem(order, live_count)
    with _plain_arithmetic(call.hidden.device):
        out = call.plugin.forward(problem, entropy=entropy, kept_shape=call.kept_shape(entropy, keep_bytes))
    log_probs, stats = _spread(out.log_probs, order), _spread(out.stats, order)
    entropies = log_probs.new_empty(0) if out.entropy is None else _spread(out.entropy, order)
    if not call.validate:
        log_probs, entropies = call.unchecked(log_probs), call.unchecked(entropies) if entropy else entropies
    return log_probs, entropies, stats, order, torch.tensor(live_count), out.kept


@linear_log_probs_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    call, (entropy, keep_bytes, _) = Call(*args[:_SIZE]), args[_SIZE:]
    n_tokens = call.labels.shape[0]
    log_probs = call.hidden.new_empty(n_tokens, dtype=call.accumulation_dtype)
    return (
        log_probs,
        log_probs.new_empty(n_tokens if entropy else 0),
        log_probs.new_empty(3, n_tokens),
        call.labels.new_empty(n_tokens),
        torch.empty((), dtype=torch.int64, device="cpu"),
        call.hidden.new_empty(call.kept_shape(entropy, keep_bytes), dtype=torch.uint8),
    )


@dataclass(frozen=True, slots=True)
class Made:
    """What the forward made for the backward."""

    stats: Tensor  # [3, N]
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
    with _plain_arithmetic(call.hidden.device):
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
    raise UnsupportedError(
        "logitless gives first derivatives only: got a backward through the backward (create_graph=True), expected "
        "one pass; take second derivatives from logitless.reference"
    )


_backward_op.register_autograd(_no_double_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, (_, _, grad_buffer) = Call(*inputs[:_SIZE]), inputs[_SIZE:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call.differentiable, call.labels, call.temperature, *output[2:])
    ctx.numbers = inputs[7:_SIZE]
    ctx.grad_buffer = grad_buffer  # not saved: one micro-batch's backward may write it before another's has run


def _backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    inputs, made = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
    unfound = (None,) * (_SIZE + 3 - 5)
    if grad_log_probs is None and grad_entropy is None:
        return (None,) * 5 + unfound
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(made[0][0])
    needs = list(ctx.needs_input_grad[:5])
    if ctx.grad_buffer is not None:
        needs[1] = True
        call = Call(*inputs, *ctx.numbers)
        found = _gradients(call, Made(*made), grad_log_probs, grad_entropy, needs, ctx.grad_buffer)
        return (found.hidden, None, found.bias, found.lora_u, found.lora_b, *unfound)
    grads = _backward_op(*inputs, *ctx.numbers, *made, grad_log_probs, grad_entropy, needs)
    return (*(grad if needed else None for grad, needed in zip(grads, needs, strict=True)), *unfound)


linear_log_probs_op.register_autograd(_backward, setup_context=_save)
