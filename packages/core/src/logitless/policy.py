"""The op and a policy's loss in a single pass: each chunk's logits are made once, and its gradients with them.

A loss that is known per token needs no second look at the logits: forward, loss and backward run chunk by chunk, for
6NDV operations in all where two passes with recomputed logits take 8NDV.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from logitless._arithmetic import plain_arithmetic
from logitless._call import FIRST_ONLY, Call, make_call, spread
from logitless._ops import batched
from logitless.errors import InputTypeError, InvalidInputError, LogitlessError, UnsupportedError
from logitless.head import LMHead
from logitless.types import Needs, PolicyResult, Problem, TokenLogProbs

__all__ = ["LossFn", "linear_policy_loss"]

LossFn = Callable[[TokenLogProbs, Tensor], Tensor]
"""Scores [m] of one chunk and the indices [m] of its tokens in `labels.flatten()`, to each token's contribution [m]."""


def _foreign_leaf(contributions: Tensor, leaves: list[Tensor]) -> bool:
    """Whether the contributions depend on a tensor that requires grad and is none of the leaves."""
    if contributions.grad_fn is None:  # a leaf itself, or a constant
        return contributions.requires_grad and not any(contributions is leaf for leaf in leaves)
    seen: set[Any] = set()
    stack: list[Any] = [contributions.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and not any(variable is leaf for leaf in leaves):
            return True
        stack.extend(parent for parent, _ in node.next_functions)
    return False


def _saving_hooks() -> Any:
    """The hooks, by whoever called, that see what is saved for a backward; None: there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _refuse_checkpoint() -> None:
    hooks = _saving_hooks()
    if hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint":
        raise UnsupportedError(
            "head.grad_buffer: got linear_policy_loss inside torch.utils.checkpoint(use_reentrant=False), whose second "
            "run would fill the buffer again; call it outside of the checkpoint, leave the buffer out, or take "
            "linear_log_probs"
        )


def _unhooked() -> AbstractContextManager[Any]:
    """Within it no hook sees what is saved: checkpoint's would run all of its region again for each chunk."""

    def give(saved: tuple[Tensor, int]) -> Tensor:
        tensor, version = saved
        if tensor._version != version:  # what autograd itself would notice
            raise InvalidInputError("loss_fn: changed in place a tensor that its gradient needs; make a new one there")
        return tensor

    if _saving_hooks() is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor, tensor._version), give)


@dataclass(slots=True)
class _Asked:
    """Of a call, what its backend's `Problem` does not tell."""

    loss_fn: LossFn
    entropy: bool
    entropy_grad: bool
    grad_buffer: Tensor | None
    with_grad: bool  # whether any gradient is to be made


class _ChunkLoss:
    """The caller's `loss_fn` as a backend's `TokenLoss`: checks what it returns and sums the loss.

    Args:
        order: the tokens that the backend was told to score.
    """

    def __init__(self, call: Call, problem: Problem, order: Tensor, asked: _Asked) -> None:
        self.call, self.settle, self.order, self.loss_fn = call, problem.settle, order, asked.loss_fn
        self.entropy_grad, self.with_grad = asked.entropy_grad, asked.with_grad
        self.parts: list[Tensor] = []

    def total(self) -> Tensor:
        """The loss; the chunks' are added up once all is launched: until then the device may wait for the host."""
        total = torch.zeros((), dtype=self.call.accumulation_dtype, device=self.call.hidden.device)
        for part in self.parts:
            total += part
        return total

    def __call__(self, log_probs: Tensor, entropy: Tensor | None, tokens: range) -> tuple[Tensor, Tensor | None] | None:
        if self.settle is not None:  # here the host waits, no sooner than `loss_fn` has to run
            self.settle()
        index = self.order[tokens.start : tokens.stop]
        ignored = None
        if not self.call.validate:  # nothing was compacted: what the loss says of ignored tokens is dropped
            ignored = self.call.labels[tokens.start : tokens.stop] == self.call.ignore_index
            log_probs, entropy = self.call.unchecked(log_probs, entropy, index=index)  # type: ignore[assignment]
        # Copies, since a loss_fn may write into what it is given, and the call returns these scores.
        log_prob_leaf = log_probs.detach().clone().requires_grad_(self.with_grad)
        entropy_leaf = None
        if entropy is not None:
            entropy_leaf = entropy.detach().clone().requires_grad_(self.with_grad and self.entropy_grad)
        with _unhooked(), torch.set_grad_enabled(self.with_grad):
            contributions = self._contributions(TokenLogProbs(log_prob_leaf, entropy_leaf), index)
            self._check(contributions, len(tokens))
            if ignored is not None:
                contributions = contributions.masked_fill(ignored, 0.0)
        self.parts.append(contributions.detach().sum(dtype=self.call.accumulation_dtype))
        if not self.with_grad:
            return None
        leaves = [leaf for leaf in (log_prob_leaf, entropy_leaf) if leaf is not None and leaf.requires_grad]
        if _foreign_leaf(contributions, leaves):
            raise InvalidInputError(
                "loss_fn: its result depends on another tensor that requires grad, whose gradient would be lost; "
                "detach that tensor, or use linear_log_probs, whose outputs take part in any graph"
            )
        if not contributions.requires_grad:
            raise InvalidInputError(
                "loss_fn: its result does not depend on the scores, or was computed without gradient; nothing would "
                "be trained. Take out no_grad and detach, or call it all under torch.no_grad()"
            )
        with torch.autograd.set_multithreading_enabled(False):  # so small a graph needs no other thread
            grads = torch.autograd.grad(contributions, leaves, torch.ones_like(contributions), allow_unused=True)
        if ignored is not None:
            grads = tuple(None if grad is None else grad.masked_fill(ignored, 0.0) for grad in grads)
        return (
            torch.zeros_like(log_prob_leaf) if grads[0] is None else grads[0],
            grads[1] if len(grads) > 1 else None,
        )

    def _contributions(self, scores: TokenLogProbs, index: Tensor) -> Tensor:
        try:
            return self.loss_fn(scores, index)
        except (TypeError, AttributeError) as error:  # its own faults, but one that this call's options may explain
            if scores.entropy is not None or isinstance(error, LogitlessError) or "NoneType" not in str(error):
                raise
            raise InputTypeError(
                "loss_fn: scores.entropy is None, since entropy=False was asked for; leave that out if it is used. "
                f"Got {type(error).__name__}: {str(error).splitlines()[0]}"
            ) from error

    def _check(self, contributions: Any, count: int) -> None:
        if not isinstance(contributions, Tensor) or not contributions.is_floating_point():
            got = contributions.dtype if isinstance(contributions, Tensor) else type(contributions).__qualname__
            raise InputTypeError(f"loss_fn: returned {got}, expected a float tensor [{count}]")
        if tuple(contributions.shape) != (count,):
            raise InvalidInputError(
                f"loss_fn: returned shape {tuple(contributions.shape)}, expected ({count},), each token's own "
                f"contribution; the loss is their sum, so divide by the global token count inside"
            )


class _PolicyLoss(Function):
    @staticmethod
    def forward(ctx: Any, call: Call, asked: _Asked, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        entropy, grad_buffer, with_grad = asked.entropy, asked.grad_buffer, asked.with_grad
        needs = list(ctx.needs_input_grad[2:]) if with_grad else [False] * 5
        needs[1] = needs[1] or (with_grad and grad_buffer is not None)
        gradients = (with_grad, asked.entropy_grad, call.reduce_hidden_grad and (needs[0], needs[3]))
        live, n_tokens = call.live("linear_policy_loss", entropy=entropy, gradients=gradients), call.labels.shape[0]

        def solve(problem: Problem) -> tuple[PolicyResult, Tensor]:
            order = torch.arange(n_tokens, device=call.labels.device) if problem.live is None else problem.live
            token_loss = _ChunkLoss(call, problem, order, asked)
            with plain_arithmetic(call.hidden.device):
                out = call.plugin.policy_loss(
                    problem, entropy=entropy, token_loss=token_loss, needs=Needs(*needs), grad_buffer=grad_buffer
                )
                return out, token_loss.total()

        (out, total), index = call.solved(live, solve), live.indices
        log_probs = spread(out.log_probs, index, n_tokens)
        entropies = log_probs.new_empty(0) if out.entropy is None else spread(out.entropy, index, n_tokens)
        if not call.validate:
            log_probs, entropies = call.unchecked(log_probs, entropies)  # type: ignore[assignment]
        made = out.gradients
        ctx.gradients = [made.hidden, made.weight, made.bias, made.lora_u, made.lora_b]
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in call.differentiable]
        ctx.buffered = grad_buffer is not None
        ctx.multiply_ = getattr(call.plugin, "multiply_", Tensor.mul_)
        ctx.mark_non_differentiable(log_probs, entropies)
        return total, log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(FIRST_ONLY)
        if batched(*grads):
            raise UnsupportedError(
                "linear_policy_loss: got a batch of backwards at once (is_grads_batched, vectorize), expected one; "
                "take linear_log_probs"
            )
        if ctx.gradients is None:
            raise UnsupportedError(
                "linear_policy_loss: got a second backward, expected one; its gradients are made in the forward and "
                "handed over once; call it again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        upstream = grads[0]
        if ctx.buffered and float(upstream) != 1.0:
            raise InvalidInputError(
                f"linear_policy_loss: got an upstream gradient of {float(upstream)} with grad_buffer, expected 1; the "
                f"buffer was filled in the forward, so scale inside loss_fn"
            )
        if upstream.device.type != "cpu" or float(upstream) != 1.0:  # on a GPU, looking would cost a synchronisation
            for gradient in gradients:
                if gradient is not None:
                    ctx.multiply_(gradient, upstream)
        rounded = (
            None if gradient is None else gradient.to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return (None, None, *rounded)


def linear_policy_loss(
    hidden: Tensor,
    head: LMHead | Tensor,
    labels: Tensor,
    loss_fn: LossFn,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = True,
    entropy_grad: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    ignore_index: int = -100,
    tp_group: Any = None,
    reduce_hidden_grad: bool = True,
    workspace_bytes: int = 512 << 20,
    validate: bool = True,
    backend: str | None = None,
) -> tuple[Tensor, TokenLogProbs]:
    """A policy's loss and its scores in a single pass: the gradients are made in the forward.

    Equals `out = linear_log_probs(...)`, then `loss_fn(out at live tokens, their indices).sum()`, with the same bits
    of log_probs. Breaks a `torch.compile` graph. The backward can run once.

    Args:
        hidden, head, labels and all keywords: as in `linear_log_probs`; one label for each hidden state. With
            `head.grad_buffer` the buffer is filled in the forward, so the loss must be the one that is differentiated:
            an upstream gradient other than 1 raises, and so does a call inside of `checkpoint(use_reentrant=False)`.
            What a call that raises had added to the buffer stays there.
        loss_fn: `loss_fn(scores, token_index) -> [m]`, called for one chunk of tokens at a time. `scores` are the
            chunk's `TokenLogProbs` [m], `token_index` [m] its tokens' places in `labels.flatten()`, with which it
            takes its slice of advantages or old log-probs. It returns each token's contribution, already weighted
            (divided by the global token count, say); the loss is their sum. It must be deterministic, local to a
            token, and without collectives. It never sees an ignored token, except under `validate=False`, which
            cannot compact: there it sees them as 0.0, and what it returns for them is dropped.

    Returns:
        The loss, a scalar in float32 (float64 for float64 inputs), and the scores, detached, shaped as labels.

    Raises:
        InvalidInputError: also when what loss_fn returns depends on another tensor that requires grad, or has another
            shape than [m].
        InputTypeError: also when loss_fn stumbles over None while entropy=False leaves it no entropy; `__cause__` is
            its own error.
        NotFoundError, UnsupportedError, CollectiveError: as in `linear_log_probs`.
    """
    if not callable(loss_fn):
        raise InputTypeError(f"loss_fn: got {type(loss_fn).__qualname__}, expected a function of (scores, token_index)")
    run = _single_pass
    if "torch._dynamo" in sys.modules:  # else nothing is being compiled, and importing it takes seconds
        run = torch.compiler.disable(_single_pass)  # type: ignore[no-untyped-call]
    return run(
        hidden,
        head,
        labels,
        loss_fn,
        temperature=temperature,
        entropy=entropy,
        entropy_grad=entropy_grad,
        top_k=top_k,
        top_p=top_p,
        ignore_index=ignore_index,
        tp_group=tp_group,
        reduce_hidden_grad=reduce_hidden_grad,
        workspace_bytes=workspace_bytes,
        validate=validate,
        backend=backend,
    )


def _single_pass(
    hidden: Tensor,
    head: LMHead | Tensor,
    labels: Tensor,
    loss_fn: LossFn,
    *,
    entropy: bool,
    entropy_grad: bool,
    **of_call: Any,
) -> tuple[Tensor, TokenLogProbs]:
    call, needs_grad = make_call(
        hidden,
        head,
        labels,
        entropy=entropy,
        entropy_grad=entropy_grad,
        keep_bytes=0,
        policy_loss=True,
        **of_call,
    )
    if labels.ndim == hidden.ndim:
        raise InvalidInputError(
            f"labels: got shape {tuple(labels.shape)} with hidden's {tuple(hidden.shape)}, expected one label for each "
            "hidden state; linear_log_probs scores several"
        )
    grad_buffer = head.grad_buffer if isinstance(head, LMHead) else None
    if needs_grad and grad_buffer is not None:
        _refuse_checkpoint()
    asked = _Asked(loss_fn, entropy, entropy_grad, grad_buffer, with_grad=needs_grad)
    loss, log_probs, entropies = _PolicyLoss.apply(call, asked, *call.differentiable)  # type: ignore[no-untyped-call]
    return loss, TokenLogProbs(log_probs.view(labels.shape), entropies.view(labels.shape) if entropy else None)
