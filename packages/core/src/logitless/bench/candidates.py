"""What is timed: this op in its ways, the logits in full, and the matrix products alone.

A candidate runs on the current values of its `Inputs`, so that the gate can look at some tokens of the very call that
is timed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import logitless
from logitless.bench.inputs import Inputs
from logitless.head import LMHead
from logitless.types import TokenLogProbs

__all__ = ["WAYS", "Candidate", "Outcome", "Scorer", "full_logits", "ours", "products", "scored"]

Mode = Literal["forward", "backward"]
Scorer = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""hidden [N, D], weight [V, D], labels [N] to log-probs [N] (or their summed negative, a loss) and entropies [N]."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run computed; gradients are None after a forward alone."""

    log_probs: Tensor
    entropy: Tensor | None
    d_hidden: Tensor | None = None
    d_weight: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """One row of the results.

    Attributes:
        kind: "limit", "ours", "logits" or "peer".
        mode: "forward", without gradients, or "backward", which is both.
        limit: the products whose time the candidate is compared with: "2NDV", "6NDV" or "8NDV".
        outputs: "both"; "log-prob", where no entropy or no gradient of it is had; "loss", the summed negative alone.
        period, live: of every `period` labels the first `live` are not ignored.
        traceable: whether the peak of memory can be counted on a CPU, which takes a dispatch mode.
    """

    name: str
    kind: str
    mode: Mode
    limit: str
    run: Callable[[], Outcome]
    outputs: str = "both"
    period: int = 1
    live: int = 1
    traceable: bool = True


def forward_and_backward(inputs: Inputs, mode: Mode, scorer: Scorer, labels: Tensor | None = None) -> Outcome:
    """Scores and, in backward mode, the gradients for the inputs' upstream gradients (1 for a loss)."""
    inputs.hidden.grad = inputs.weight.grad = None
    with torch.set_grad_enabled(mode == "backward"):
        log_probs, entropy = scorer(inputs.hidden, inputs.weight, inputs.labels if labels is None else labels)
    if mode == "backward":
        outputs = [log_probs]
        upstream = [inputs.grad_log_probs.to(log_probs.dtype) if log_probs.ndim else torch.ones_like(log_probs)]
        if entropy is not None and entropy.requires_grad:
            outputs.append(entropy)
            upstream.append(inputs.grad_entropy.to(entropy.dtype))
        torch.autograd.backward(outputs, upstream)
    return Outcome(log_probs.detach(), entropy, inputs.hidden.grad, inputs.weight.grad)


def _call(inputs: Inputs, backend: str, mode: Mode, labels: Tensor | None = None, **options: Any) -> Outcome:
    def scorer(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        out = logitless.linear_log_probs(hidden, weight, target, backend=backend, **options)
        return out.log_probs, out.entropy

    return forward_and_backward(inputs, mode, scorer, labels)


def _single_pass(inputs: Inputs, backend: str, buffer: Tensor | None = None, **options: Any) -> Outcome:
    """A loss with the inputs' upstream gradients, made chunk by chunk; with a buffer, d_weight goes there."""
    inputs.hidden.grad = inputs.weight.grad = None

    def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
        assert scores.entropy is not None
        return inputs.grad_log_probs[index] * scores.log_probs + inputs.grad_entropy[index] * scores.entropy

    head = LMHead(inputs.weight, grad_buffer=buffer)
    loss, out = logitless.linear_policy_loss(inputs.hidden, head, inputs.labels, loss_fn, backend=backend, **options)
    torch.autograd.backward(loss)
    d_weight = inputs.weight.grad if buffer is None else buffer
    return Outcome(out.log_probs, out.entropy, inputs.hidden.grad, d_weight)


WAYS = {
    "forward": "scores alone, under no_grad",
    "recompute": "nothing kept: the backward makes the logits again",
    "kept": "keep_bytes for all logits",
    "kept-log-probs": "the same with entropy_grad=False",
    "single-pass": "linear_policy_loss",
    "wide": "linear_policy_loss with 2.5 GiB of workspace",
    "buffer": "linear_policy_loss with an fp32 grad_buffer",
    "half-kept": "keep_bytes for half of the logits",
    "unvalidated": "forward and recompute with validate=False",
    "ignored": "recompute with half, and nine tenths, of the labels ignored",
}
WIDE = 5 << 29


def _recomputed(inputs: Inputs, backend: str) -> Iterator[tuple[str, Candidate]]:
    """Ways that keep no logits, each with the name of its way."""

    def row(way: str, what: str, mode: Mode, period: int = 1, live: int = 1, **options: Any) -> tuple[str, Candidate]:
        labels = inputs.ignored(period, live) if period > 1 else None
        return way, Candidate(
            f"{backend}: {what}",
            "ours",
            mode,
            "2NDV" if mode == "forward" else "8NDV",
            lambda: _call(inputs, backend, mode, labels, **options),
            period=period,
            live=live,
        )

    yield row("forward", "forward", "forward")
    yield row("unvalidated", "forward, unvalidated", "forward", validate=False)
    yield row("recompute", "recompute", "backward")
    yield row("unvalidated", "recompute, unvalidated", "backward", validate=False)
    yield row("ignored", "recompute, half ignored", "backward", 2, 1)
    yield row("ignored", "recompute, nine tenths ignored", "backward", 10, 1)


def _made_once(inputs: Inputs, backend: str, ways: Collection[str]) -> Iterator[tuple[str, Candidate]]:
    """Ways that make the logits once, as `_recomputed`."""
    logits = inputs.shape.tokens * inputs.shape.vocab

    def row(way: str, what: str, run: Callable[[], Outcome], outputs: str = "both") -> tuple[str, Candidate]:
        return way, Candidate(f"{backend}: {what}", "ours", "backward", "6NDV", run, outputs)

    def kept(keep_bytes: int, **options: Any) -> Callable[[], Outcome]:
        return lambda: _call(inputs, backend, "backward", keep_bytes=keep_bytes, **options)

    def single(**options: Any) -> Callable[[], Outcome]:
        return lambda: _single_pass(inputs, backend, **options)

    yield row("kept", "kept", kept(8 * logits))
    yield row("half-kept", "kept, half", kept(inputs.weight.element_size() * logits // 2))
    yield row("kept-log-probs", "kept, entropy_grad=False", kept(8 * logits, entropy_grad=False), "log-prob")
    yield row("single-pass", "single pass", single())
    yield row("wide", "single pass, 2.5 GiB", single(workspace_bytes=WIDE))
    if "buffer" in ways:
        buffer = torch.zeros_like(inputs.weight, dtype=torch.float32)
        yield row("buffer", "single pass, grad_buffer", single(buffer=buffer))


def ours(inputs: Inputs, backend: str, ways: Collection[str]) -> list[Candidate]:
    """This op on one backend, in some of `WAYS`."""
    every = (*_recomputed(inputs, backend), *_made_once(inputs, backend, ways))
    return [candidate for way, candidate in every if way in ways]


def full_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What this op replaces: logits in the inputs' dtype, then log_softmax and entropy in float32."""
    z = hidden @ weight.T
    log_p = z.to(torch.promote_types(z.dtype, torch.float32)).log_softmax(-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def scored(
    inputs: Inputs, name: str, kind: str, scorer: Scorer, limit: str, outputs: str = "both", traceable: bool = True
) -> list[Candidate]:
    """Another function, forward alone and with its backward."""

    def run(mode: Mode) -> Callable[[], Outcome]:
        return lambda: forward_and_backward(inputs, mode, scorer)

    return [
        Candidate(name, kind, "forward", "2NDV", run("forward"), outputs, traceable=traceable),
        Candidate(name, kind, "backward", limit, run("backward"), outputs, traceable=traceable),
    ]


def products(inputs: Inputs) -> list[Candidate]:
    """The matrix products that each way cannot do without, through torch: cuBLAS on an NVIDIA GPU."""
    buffer: list[Tensor] = []

    def run(logits: int, gradients: bool) -> Callable[[], Outcome]:
        def multiply() -> Outcome:
            h, w = inputs.hidden.detach(), inputs.weight.detach()
            if not buffer:
                buffer.append(torch.randn(h.shape[0], w.shape[0], device=h.device, dtype=h.dtype))
            for _ in range(logits):
                torch.mm(h, w.T, out=buffer[0])
            gradient = (torch.mm(buffer[0], w), torch.mm(buffer[0].T, h)) if gradients else (None, None)
            return Outcome(buffer[0], None, *gradient)

        return multiply

    return [
        Candidate("products, 2NDV", "limit", "forward", "2NDV", run(1, False)),
        Candidate("products, 6NDV", "limit", "backward", "6NDV", run(1, True)),
        Candidate("products, 8NDV", "limit", "backward", "8NDV", run(2, True)),
    ]
