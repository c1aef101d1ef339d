"""A backend with full logits and closed-form gradients, and a way to install a backend for a while.

With it core's ops, autograd, compaction and compilation are tested without any plugin; it is also the shortest
example of the `Backend` protocol.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from logitless import _registry
from logitless.head import LMHead
from logitless.reference import head_logits, keep, linear_kl, linear_log_probs, top_k_log_probs
from logitless.types import (
    PROTOCOL,
    Adapter,
    Backend,
    Forwarded,
    Gradients,
    Needs,
    PolicyResult,
    Problem,
    Request,
    TokenLoss,
)

__all__ = ["ReferenceBackend", "installed"]


def _live(problem: Problem, tensor: Tensor) -> Tensor:
    """A token-shaped input at the live tokens, 0 at the dead ones."""
    if problem.live is not None:
        return tensor[problem.live]
    if problem.dead is not None and tensor.is_floating_point():
        return tensor.masked_fill(problem.dead.view(-1, *(1 for _ in tensor.shape[1:])), 0)
    return tensor


def _inputs(problem: Problem) -> tuple[Tensor, LMHead, Tensor, Tensor | float]:
    head = LMHead(
        problem.weight, problem.bias, scale=problem.scale, softcap=problem.softcap, vocab_size=problem.vocab_size
    )
    if problem.lora_u is not None and problem.lora_b is not None:
        head = replace(head, lora=((_live(problem, problem.lora_u), problem.lora_b),))
    temperature = problem.temperature
    if isinstance(temperature, Tensor) and problem.live is not None:
        temperature = temperature[problem.live]
    return _live(problem, problem.hidden), head, _live(problem, problem.labels), temperature


class ReferenceBackend:
    """`logitless.reference` behind the `Backend` protocol; holds the logits in full."""

    name = "reference"
    priority = -100  # never chosen where another can serve
    protocol = PROTOCOL
    features: frozenset[str] = frozenset({"kept_set", "several_labels", "stats", "top_k_log_probs"})

    def supports(self, request: Request) -> str | None:
        """A sharded vocabulary is not served."""
        return "it needs the whole vocabulary" if request.group_size > 1 else None

    def kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        """Nothing is kept."""
        return (0,)

    def forward(self, problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]) -> Forwarded:
        """Scores of the live tokens."""
        hidden, head, labels, temperature = _inputs(problem)
        asked: dict[str, Any] = {"top_k": problem.top_k, "top_p": problem.top_p, "stats": problem.stats}
        out = linear_log_probs(hidden, head, labels, temperature=temperature, ignore_index=-1, **asked)
        bounded = None
        if entropy and out.entropy is not None:
            bounded = out.entropy.clamp(0.0, math.log(problem.vocab_size))
        each = labels.unsqueeze(1) if labels.ndim == 1 else labels
        more = each.shape[1] if labels.ndim == 2 or problem.top_k is not None or problem.top_p is not None else 0
        stats = out.log_probs.new_zeros(4 + more, len(labels))
        extras = None
        if out.stats is not None:
            extras = torch.cat([out.stats[name].to(stats.dtype).reshape(len(labels), -1).T for name in problem.stats])
        return Forwarded(out.log_probs, bounded, stats, hidden.new_zeros(kept_shape, dtype=torch.uint8), extras)

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
        """dz = g·(onehot − p) − e·p·(log p + H), through 1/T, the softcap and the scale, and dz's products.

        p is 0 at tokens that are not kept; the first term of a label that is not is smaller by its share, were it kept.
        """
        hidden, head, labels, temperature = _inputs(problem)
        z = head_logits(hidden, head, temperature)
        kept_z = z.masked_fill(~keep(z, problem.top_k, problem.top_p), float("-inf"))
        log_p = kept_z.log_softmax(-1)
        p, log_p = log_p.exp(), log_p.masked_fill(kept_z.isinf(), 0.0)
        label_nK, g_nK = (x.unsqueeze(1) if x.ndim == 1 else x for x in (labels, grad_log_probs))
        own = z.gather(1, label_nK)
        added = torch.sigmoid(kept_z.logsumexp(1, keepdim=True) - own)
        g_nK = torch.where(kept_z.gather(1, label_nK) == own, g_nK, g_nK * added)
        dz = (-g_nK.sum(1, keepdim=True) * p).scatter_add(1, label_nK, g_nK)
        if grad_entropy is not None:
            entropy = -(p * log_p).sum(1, keepdim=True)
            dz = dz - grad_entropy.unsqueeze(1) * p * (log_p + entropy)
        return _products(problem, _raw(dz, z, head, temperature), hidden, head, needs, grad_buffer)

    def policy_loss(
        self, problem: Problem, *, entropy: bool, token_loss: TokenLoss, needs: Needs, grad_buffer: Tensor | None
    ) -> PolicyResult:
        """Forward and backward, one after the other, with all live tokens in one chunk."""
        out = self.forward(problem, entropy=entropy, entropy_grad=entropy, kept_shape=(0,))
        grads = token_loss(out.log_probs, out.entropy, range(len(out.log_probs)))
        gradients = Gradients()
        if grads is not None:
            gradients = self.backward(_widened(problem), out.stats, out.kept, *grads, needs, grad_buffer)
        return PolicyResult(out.log_probs, out.entropy, gradients)

    def top_k_log_probs(self, problem: Problem, k: int) -> tuple[Tensor, Tensor]:
        """Ids and log-probs [n, k], largest first."""
        hidden, head, _, temperature = _inputs(problem)
        return top_k_log_probs(hidden, head, k, temperature=temperature)

    def kl_kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        """Room for dz of all logits; nothing where that is too much."""
        wide = torch.float64 in (request.hidden_dtype, request.weight_dtype)
        size = request.n_tokens * request.vocab_rows * (8 if wide else 4)
        return (size if size <= keep_bytes else 0,)

    def kl_forward(
        self, student: Problem, teacher: Problem, *, direction: str, beta: float, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Divergences of the live tokens, and no statistics."""
        value = _kl(student, teacher, direction, beta).clamp(min=0.0)
        if kept is not None:
            dz = _kl_dz(student, teacher, direction, beta).flatten()
            kept.zero_().view(dz.dtype)[: len(dz)] = dz
        return value, value.new_zeros(5, len(value))

    def kl_backward(
        self,
        student: Problem,
        teacher: Problem,
        stats: Tensor,
        grad: Tensor,
        needs: Needs,
        *,
        direction: str,
        beta: float,
        kept: Tensor | None = None,
    ) -> Gradients:
        """Products of dz, made again or as it was kept."""
        hidden, head, _, _ = _inputs(student)
        if kept is None:
            dz = _kl_dz(student, teacher, direction, beta)
        else:
            shape = (len(grad), student.weight.shape[0])
            dz = kept.view(stats.dtype)[: math.prod(shape)].view(shape)
        return _products(student, grad.unsqueeze(1) * dz, hidden, head, needs, None)


def _kl_dz(student: Problem, teacher: Problem, direction: str, beta: float) -> Tensor:
    """p - q, or p·(G - Σ p·G) with G = log(p/q) or (1 - beta)·log(p/m), of raw logits."""
    (hidden, head, _, temperature), (ref_hidden, ref_head, _, _) = _inputs(student), _inputs(teacher)
    z = head_logits(hidden, head, temperature)
    log_p, log_q = (x.log_softmax(-1).clamp(min=-1e30) for x in (z, head_logits(ref_hidden, ref_head, temperature)))
    padding = z.shape[1] - log_q.shape[1]  # either may be padded further than the other
    log_q = torch.nn.functional.pad(log_q, (0, padding), value=-1e30)
    p, q = log_p.exp(), log_q.exp()
    if direction == "forward":
        return _raw(p - q, z, head, temperature)
    slope = log_p - log_q
    if direction == "jsd":
        slope = (1 - beta) * (log_p - (beta * q + (1 - beta) * p).log().clamp(min=-1e30))
    return _raw(p * (slope - (p * slope).sum(1, keepdim=True)), z, head, temperature)


def _kl(student: Problem, teacher: Problem, direction: str, beta: float) -> Tensor:
    hidden, head, _, temperature = _inputs(student)
    ref_hidden, ref_head, _, _ = _inputs(teacher)
    return linear_kl(hidden, head, ref_hidden, ref_head, direction=direction, beta=beta, temperature=temperature)


def _widened(problem: Problem) -> Problem:
    """With float16 inputs as float32, so that their gradients come so, as the single pass hands them over."""

    def wide(x: Tensor | None) -> Any:
        return x.float() if x is not None and x.dtype == torch.float16 else x

    return replace(
        problem,
        hidden=wide(problem.hidden),
        weight=wide(problem.weight),
        bias=wide(problem.bias),
        lora_u=wide(problem.lora_u),
        lora_b=wide(problem.lora_b),
    )


def _raw(dz: Tensor, z: Tensor, head: LMHead, temperature: Tensor | float) -> Tensor:
    """The gradient of raw logits from that of tempered ones: through 1/T, the softcap and the scale."""
    per_token = temperature.unsqueeze(1) if isinstance(temperature, Tensor) else temperature
    if head.softcap is not None:
        dz = dz * (1.0 - (z.masked_fill(z.isinf(), 0.0) * per_token / head.softcap).square())
    return dz / per_token * head.scale


def _products(
    problem: Problem, dz: Tensor, hidden: Tensor, head: LMHead, needs: Needs, grad_buffer: Tensor | None
) -> Gradients:
    def spread(grad: Tensor, like: Tensor) -> Tensor:
        if problem.live is None:
            return grad.to(like.dtype)
        zeros = torch.zeros_like(like, memory_format=torch.contiguous_format)
        return zeros.index_copy_(0, problem.live, grad.to(like.dtype))

    found: dict[str, Tensor] = {}
    if needs.hidden:
        found["hidden"] = spread(dz @ head.weight.to(dz.dtype), problem.hidden)
    if needs.weight:
        d_weight = dz.T @ hidden.to(dz.dtype)
        if grad_buffer is None:
            found["weight"] = d_weight.to(head.weight.dtype)
        else:
            grad_buffer.add_(d_weight)
    if needs.bias and head.bias is not None:
        found["bias"] = dz.sum(0).to(head.bias.dtype)
    for u, b in head.lora:
        if needs.lora_u and problem.lora_u is not None:
            found["lora_u"] = spread(dz @ b.to(dz.dtype), problem.lora_u)
        if needs.lora_b:
            found["lora_b"] = (dz.T @ u.to(dz.dtype)).to(b.dtype)
    return Gradients(**found)


@dataclass(frozen=True)
class _Installed:
    """As much of an entry point as the registry reads."""

    name: str
    plugin: Any
    dist: None = None

    def load(self) -> Any:
        return self.plugin


def _group(plugin: Any) -> str:
    return _registry.ADAPTERS if hasattr(plugin, "make_forward") else _registry.BACKENDS


@contextmanager
def installed(*plugins: Backend | Adapter, alone: bool = False) -> Iterator[None]:
    """Within the block the registry also finds these backends and adapters, as if their distributions were installed.

    Args:
        plugins: objects, or classes that take no argument.
        alone: hide the backends and adapters that are really installed.
    """
    found = importlib.metadata.entry_points

    def entry_points(*, group: str) -> list[Any]:
        hidden = alone and group in (_registry.BACKENDS, _registry.ADAPTERS)
        given = [_Installed(plugin.name, plugin) for plugin in plugins if _group(plugin) == group]
        return [*(() if hidden else found(group=group)), *given]

    caches = (_registry._entries, _registry._attempt)
    try:
        with mock.patch.object(_registry, "entry_points", entry_points):
            for cache in caches:
                cache.cache_clear()
            yield
    finally:
        for cache in caches:
            cache.cache_clear()
