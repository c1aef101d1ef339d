"""Divergence of two heads over the whole vocabulary: of a policy from its reference, of a student from its teacher.

Neither head's logits `[tokens, vocab]` exist but in tiles, in the backend. The formulas and their gradients are
derived in docs/math.md; `logitless.reference.linear_kl` is the specification. As in `logitless._ops`: one opaque custom
op a direction, and plain autograd where nothing looks on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from logitless._arithmetic import plain_arithmetic
from logitless._call import Call, make_call, spread
from logitless._ops import SIZE, TENSORS, TYPES, batched, live_order, looked_on, no_double_backward
from logitless._validate import mask_labels
from logitless.errors import InputTypeError, InvalidInputError
from logitless.head import LMHead
from logitless.types import Gradients, Needs, Problem

__all__ = ["linear_kl", "linear_kl_op"]

DIRECTIONS = ("forward", "reverse", "jsd")
STATISTICS = 5  # numbers that a backend's forward leaves for its backward, each of a token


@dataclass(frozen=True, slots=True)
class Pair:
    """The two calls, which share tokens and vocabulary, and what to compute."""

    student: Call
    teacher: Call  # its backend is the student's
    direction: str
    beta: float
    keep_bytes: int

    @classmethod
    def of(cls, args: Any) -> Pair:
        """From what the ops take."""
        return cls(Call(*args[:SIZE]), Call(*args[SIZE : 2 * SIZE]), *args[2 * SIZE : ARGUMENTS])

    @property
    def args(self) -> list[Any]:
        return [*self.student.args, *self.teacher.args, self.direction, self.beta, self.keep_bytes]

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Of the buffer that the forward fills for the backward; a backend that knows of none keeps nothing."""
        shape = getattr(self._plugin, "kl_kept_shape", None)
        if shape is None or not self.keep_bytes:
            return (0,)
        dtypes = (self.teacher.hidden.dtype, self.teacher.weight.dtype)
        found: tuple[int, ...] = shape(replace(self.student.request(False, False), ref_dtypes=dtypes), self.keep_bytes)
        return found

    def forward(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Divergences [N] and statistics [5, N] of all tokens, what is kept, and the live ones' indices."""
        of_teacher = {f"ref_{name}": fact for name, fact in self.teacher.facts.items()}
        live = self.student.live("linear_kl", direction=self.direction, beta=self.beta, **of_teacher)

        def solve(student: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
            index, n_tokens = student.live, self.student.labels.shape[0]
            teacher = self.teacher.problem(index, None if student.live_count is None else live)
            kept = self.student.hidden.new_empty(self.kept_shape, dtype=torch.uint8)
            options = {"direction": self.direction, "beta": self.beta, **_given(kept)}
            with plain_arithmetic(self.student.hidden.device):
                value, stats = self._plugin.kl_forward(student, teacher, **options)
            value, stats = spread(value, index, n_tokens), spread(stats, index, n_tokens)
            return self._unchecked(value), stats, kept, index

        return self.student.solved(live, solve)

    def backward(self, stats: Tensor, kept: Tensor, index: Tensor | None, grad: Tensor, needs: list[bool]) -> Gradients:
        """The student's gradients for upstream ones [N]."""
        grad = self._unchecked(grad)
        if index is not None:
            stats, grad = stats[:, index], grad[index]
        with plain_arithmetic(self.student.hidden.device):
            problems = (self.student.problem(index), self.teacher.problem(index))
            found: Gradients = self._plugin.kl_backward(
                *problems, stats, grad, Needs(*needs), direction=self.direction, beta=self.beta, **_given(kept)
            )
        return found

    @property
    def _plugin(self) -> Any:
        return self.student.plugin

    def _unchecked(self, x: Tensor) -> Tensor:
        return x if self.student.validate else x.masked_fill(self.student.labels == self.student.ignore_index, 0.0)


def _given(kept: Tensor) -> dict[str, Tensor]:
    """A backend that keeps nothing has no parameter for it."""
    return {"kept": kept} if kept.numel() else {}


ARGUMENTS = 2 * SIZE + 3  # of the forward op
_SCHEMA = ", ".join(
    [f"{TYPES[str(field.type)]} {prefix}{field.name}" for prefix in ("", "ref_") for field in fields(Call)]
    + ["str direction", "float beta", "SymInt keep_bytes"]
)


@torch.library.custom_op(
    "logitless::linear_kl", mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def linear_kl_op(*args: Any) -> tuple[Tensor, ...]:
    """(divergence [N], stats [5, N], kept, order [N], live_count [] on the host), as `linear_log_probs_op`'s."""
    pair = Pair.of(args)
    value, stats, kept, index = pair.forward()
    return value, stats, kept, *live_order(pair.student, index)


@linear_kl_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    pair = Pair.of(args)
    call, n_tokens = pair.student, pair.student.labels.shape[0]
    value = call.hidden.new_empty(n_tokens, dtype=call.accumulation_dtype)
    kept = call.hidden.new_empty(pair.kept_shape, dtype=torch.uint8)
    order, count = call.labels.new_empty(n_tokens), torch.empty((), dtype=torch.int64, device="cpu")
    return value, value.new_empty(STATISTICS, n_tokens), kept, order, count


@torch.library.custom_op(
    "logitless::linear_kl_backward",
    mutates_args=(),
    schema=f"({_SCHEMA}, Tensor stats, Tensor kept, Tensor order, Tensor live_count, Tensor grad, bool[] needs)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward_op(*args: Any) -> tuple[Tensor, ...]:
    """Gradients of the student's `Call.differentiable`; an empty tensor for each that is not needed."""
    pair, (stats, kept, order, live_count, grad, needs) = Pair.of(args), args[ARGUMENTS:]
    count = int(live_count)
    found = pair.backward(stats, kept, None if count == grad.shape[0] else order[:count], grad, needs)
    grads = (found.hidden, found.weight, found.bias, found.lora_u, found.lora_b)
    return tuple(stats.new_empty(0, dtype=pair.student.hidden.dtype) if grad is None else grad for grad in grads)


@_backward_op.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    call, needs = Pair.of(args).student, args[-1]
    return tuple(
        call.hidden.new_empty(0) if tensor is None or not needed else tensor.new_empty(tensor.shape)
        for tensor, needed in zip(call.differentiable, needs, strict=True)
    )


_backward_op.register_autograd(no_double_backward)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    tensors = [at for at in range(2 * SIZE) if at % SIZE < TENSORS]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(inputs[at] for at in tensors), *output[1:])
    ctx.rest = [None if at in tensors else value for at, value in enumerate(inputs)]


def _restored(ctx: Any) -> tuple[list[Any], Any]:
    """What `_save` was given, and the outputs that it kept."""
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes at the first look, and forbids a second
    args = list(ctx.rest)
    for call in range(2):
        args[call * SIZE : call * SIZE + TENSORS] = saved[call * TENSORS : (call + 1) * TENSORS]
    return args, saved[2 * TENSORS :]


def _backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * ARGUMENTS
    args, made = _restored(ctx)
    return _through_op(args, made, grad, list(ctx.needs_input_grad[:5]))


def _through_op(args: list[Any], made: Any, grad: Tensor, needs: list[bool]) -> tuple[Any, ...]:
    grads = _backward_op(*args, *made, grad, needs)
    found = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return (*found, *(None,) * (ARGUMENTS - 5))


linear_kl_op.register_autograd(_backward, setup_context=_save)


class _Plain(Function):
    """The ops' two directions without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        made = Pair.of(args).forward()
        _save(ctx, args, made)
        return made[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (grad,) = grads
        if grad is None:
            return (None,) * ARGUMENTS
        (args, (stats, kept, index)), needs = _restored(ctx), list(ctx.needs_input_grad[:5])
        pair = Pair.of(args)
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or batched(grad):  # as in `logitless._ops`
            return _through_op(args, (stats, kept, *live_order(pair.student, index)), grad, needs)
        found = pair.backward(stats, kept, index, grad, needs)
        gradients = (found.hidden, found.weight, found.bias, found.lora_u, found.lora_b)
        return (*gradients, *(None,) * (ARGUMENTS - 5))


def linear_kl(
    hidden: Tensor,
    head: LMHead | Tensor,
    ref_hidden: Tensor,
    ref_head: LMHead | Tensor,
    *,
    direction: str = "forward",
    beta: float = 0.5,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    tp_group: Any = None,
    reduce_hidden_grad: bool = True,
    keep_bytes: int = 0,
    workspace_bytes: int = 512 << 20,
    validate: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Divergence of each token's two distributions over the vocabulary, [...] in nats, without [..., V] logits.

    Equals, for plain heads and with `log_p = (hidden @ weight.T / temperature).log_softmax(-1)`, `log_q` the same of
    the reference: `(log_q.exp() * (log_q - log_p)).sum(-1)`, in float32 from inputs of any float dtype (float64 from
    float64). Differentiable once, in the student's hidden, weight, bias and LoRA pairs; the reference gets no gradient.

    Args:
        hidden: [..., D], of the student or policy.
        head: its weight [V, D] or its `LMHead`.
        ref_hidden: [..., E], of the teacher or reference; E may be another size than D.
        ref_head: its weight [V, E] or its `LMHead`; `vocab_size` and the shards as the student's.
        direction: "forward", KL(reference‖student); "reverse", KL(student‖reference); "jsd", Jensen-Shannon,
            `beta·KL(reference‖m) + (1 - beta)·KL(student‖m)` with `m = beta·reference + (1 - beta)·student`.
        beta: between 0 and 1, both excluded; "jsd" alone reads it.
        temperature: a number, or a tensor of the tokens' shape; of both distributions.
        mask: [...] bool; tokens where it is False cost nothing: result exactly 0.0, gradients exactly 0. None: all.
        tp_group: torch.distributed group over which both vocabularies are sharded, alike.
        reduce_hidden_grad: with tp_group, whether every rank gets the whole d_hidden or its own partial sum.
        keep_bytes: memory that the forward may keep so that the backward makes fewer logits again: none, where it holds
            all. For each token and vocab row (rounded up to 128) the triton backend takes 2 bytes in bfloat16, else 4,
            and keeps the logits' gradients; the torch backend 8, 16 in float64, and keeps both heads' logits.
        workspace_bytes: bound on temporary memory.
        validate: check temperatures and leave out masked tokens, at the price of one device-to-host copy.
        backend: name of a backend; None takes `use_backend`, LOGITLESS_BACKEND, or the best that can serve.

    Raises:
        InputTypeError, InvalidInputError: an argument is wrong, or the reference requires grad; the message names it.
        NotFoundError, UnsupportedError: no backend can serve; the message holds the reason.
        CollectiveError: another rank of tp_group died, raised, or made no such call within the group's timeout.
    """
    heads = [LMHead(x) if isinstance(x, Tensor) else x for x in (head, ref_head)]
    labels = _labels(hidden, ref_hidden, mask)
    _check(heads, direction, beta)
    options: dict[str, Any] = {
        "temperature": temperature,
        "entropy": False,
        "entropy_grad": False,
        "ignore_index": -1,
        "tp_group": tp_group,
        "reduce_hidden_grad": reduce_hidden_grad,
        "keep_bytes": keep_bytes,
        "workspace_bytes": workspace_bytes,
        "validate": validate,
        "backend": backend,
    }
    try:
        teacher, trained = make_call(ref_hidden, heads[1], labels, **options)
    except (InputTypeError, InvalidInputError) as error:  # it names the student's hidden and head
        raise type(error)(f"{'ref_' * str(error).startswith(('hidden', 'head'))}{error}") from None
    if trained:
        raise InvalidInputError(
            "ref_hidden, ref_head: one of them requires grad, but the reference gets no gradient; pass hidden states "
            "made under torch.no_grad() and ref_head.weight.detach(), and the like for its bias and LoRA pairs"
        )
    ref_dtypes = (teacher.hidden.dtype, teacher.weight.dtype)
    student, needs_grad = make_call(hidden, heads[0], labels, **options, ref_dtypes=ref_dtypes)
    tensors = () if not needs_grad or torch.compiler.is_compiling() else teacher.differentiable
    if any(tensor is not None and tensor.is_inference() for tensor in tensors):
        raise InvalidInputError(
            "ref_hidden, ref_head: one of them was made under torch.inference_mode(), and is to be saved for the "
            "student's backward; make it under torch.no_grad() instead, or pass its clone()"
        )
    _check_alike(student, teacher)
    pair = Pair(student, teacher, direction, float(beta), keep_bytes if needs_grad else 0)
    if looked_on((*student.differentiable, *teacher.differentiable)):
        value: Tensor = linear_kl_op(*pair.args)[0]
    else:
        value = _Plain.apply(*pair.args)  # type: ignore[no-untyped-call]
    return value.view(labels.shape)


def _labels(hidden: Tensor, ref_hidden: Tensor, mask: Tensor | None) -> Tensor:
    """[...] 0 where a token is live, -1 elsewhere: what calls know tokens by."""
    labels = mask_labels(hidden, mask, -1)
    if not isinstance(ref_hidden, Tensor):
        raise InputTypeError(f"ref_hidden: got {type(ref_hidden).__qualname__}, expected a tensor [..., E]")
    shape = hidden.shape[:-1]
    if ref_hidden.shape[:-1] != shape or ref_hidden.device != hidden.device:
        raise InvalidInputError(
            f"ref_hidden: got shape {tuple(ref_hidden.shape)} on {ref_hidden.device}, expected {tuple(shape)} and a "
            f"last dimension of its own, on {hidden.device}: the same tokens as hidden's {tuple(hidden.shape)}"
        )
    return labels


def _check(heads: list[Any], direction: object, beta: object) -> None:
    if direction not in DIRECTIONS:
        raise InvalidInputError(f"direction: got {direction!r}, expected {', '.join(map(repr, DIRECTIONS))}")
    if isinstance(beta, bool) or not isinstance(beta, (int, float)):
        raise InputTypeError(f"beta: got {type(beta).__qualname__}, expected a number")
    if not 0.0 < beta < 1.0:
        raise InvalidInputError(
            f"beta: got {beta}, expected more than 0 and less than 1; its limits are direction='forward' and 'reverse'"
        )
    for name, head in zip(("head", "ref_head"), heads, strict=True):
        if isinstance(head, LMHead) and head.grad_buffer is not None:
            raise InvalidInputError(
                f"{name}.grad_buffer: linear_kl fills none; leave it out, and add weight.grad to it"
            )


def _check_alike(student: Call, teacher: Call) -> None:
    """The two heads must cut one vocabulary alike, and be computed in one dtype."""
    mine, other = (
        (c.vocab_size, c.vocab_start, min(c.vocab_start + c.weight.shape[0], c.vocab_size)) for c in (student, teacher)
    )
    if mine != other:
        raise InvalidInputError(
            f"ref_head: has {other[0]} vocab rows, {other[1]} to {other[2]} on this rank, and head has {mine[0]}, "
            f"{mine[1]} to {mine[2]}; a divergence is of one vocabulary: set vocab_size of both heads to its real "
            "size, where their padding differs, and shard both alike"
        )
    if student.accumulation_dtype != teacher.accumulation_dtype:
        raise InvalidInputError(
            f"ref_hidden: the reference is computed in {teacher.accumulation_dtype} and the student in "
            f"{student.accumulation_dtype}; cast one of them"
        )
