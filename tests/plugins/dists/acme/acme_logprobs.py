"""What a third party would write: a backend for plain heads, an adapter for its own model, a command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from logitless.types import Forwarded, ForwardFn, Gradients, Needs, Problem, Request


class AcmeBackend:
    """All logits at once, in one process: the least that a backend must do."""

    name = "acme"
    priority = -10
    protocol = 1

    def supports(self, request: Request) -> str | None:
        if request.bias or request.softcap or request.lora_rank or request.grad_buffer or request.group_size > 1:
            return "acme computes plain heads in one process only"
        return None if request.validate else "acme needs validate=True"

    def kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        return (0,)

    def forward(self, problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]) -> Forwarded:
        log_p_nV, label_n, _ = _solve(problem)
        log_prob_n = log_p_nV.gather(1, label_n[:, None])[:, 0]
        return Forwarded(
            log_probs=log_prob_n,
            entropy=_entropy(log_p_nV) if entropy else None,
            stats=log_prob_n.new_zeros(4, len(log_prob_n)),
            kept=torch.empty(kept_shape, dtype=torch.uint8, device=log_prob_n.device),
        )

    def backward(
        self,
        problem: Problem,
        stats: Tensor,
        kept: Tensor,
        grad_log_probs: Tensor,
        grad_entropy: Tensor | None,
        needs: Needs,
        grad_buffer: Tensor | None,
    ) -> Gradients:
        log_p_nV, label_n, rows = _solve(problem)
        p_nV = log_p_nV.exp()
        dz_nV = -grad_log_probs[:, None] * p_nV
        dz_nV.scatter_add_(1, label_n[:, None], grad_log_probs[:, None])
        if grad_entropy is not None:
            dz_nV -= grad_entropy[:, None] * p_nV * (log_p_nV + _entropy(log_p_nV)[:, None])
        dz_nV *= problem.scale / _temperature(problem, rows)
        hidden, weight = None, None
        if needs.hidden:
            hidden = torch.zeros_like(problem.hidden)
            hidden[rows] = (dz_nV @ problem.weight[: problem.vocab_valid].to(dz_nV.dtype)).to(hidden.dtype)
        if needs.weight:
            weight = torch.zeros_like(problem.weight)
            weight[: problem.vocab_valid] = (dz_nV.T @ problem.hidden[rows].to(dz_nV.dtype)).to(weight.dtype)
        return Gradients(hidden=hidden, weight=weight)


def _solve(problem: Problem) -> tuple[Tensor, Tensor, Tensor | slice]:
    rows = slice(None) if problem.live is None else problem.live
    dtype = torch.float64 if problem.hidden.dtype == torch.float64 else torch.float32
    weight_VD = problem.weight[: problem.vocab_valid].to(dtype)
    z_nV = problem.hidden[rows].to(dtype) @ weight_VD.T * (problem.scale / _temperature(problem, rows))
    return z_nV.log_softmax(-1), problem.labels[rows], rows


def _temperature(problem: Problem, rows: Tensor | slice) -> Tensor | float:
    t = problem.temperature
    return t[rows, None] if isinstance(t, Tensor) else t


def _entropy(log_p_nV: Tensor) -> Tensor:
    return -(log_p_nV.exp() * log_p_nV).sum(-1)


class AcmeModel(torch.nn.Module):
    """The model that the adapter knows."""


class AcmeAdapter:
    """Binds `AcmeModel`, to something that only says with what it was called."""

    name = "acme"
    protocol = 1

    def supports(self, model: Any) -> str | None:
        return None if isinstance(model, AcmeModel) else "acme binds AcmeModel only"

    def make_forward(self, model: Any, layout: str, backend: str | None) -> ForwardFn:
        def forward(batch: Any, **options: Any) -> Any:
            return (batch, layout, backend, options)

        return forward

    def inspect(self, path: str) -> Mapping[str, Any]:
        return {}


def greet(name: Annotated[str, typer.Argument(help="Whom to greet.")]) -> None:
    """Greets."""
    print(f"acme greets {name}")
