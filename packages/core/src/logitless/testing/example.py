"""A call of the op with everything that it takes, and its results: what the checks of this kit are made of."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import logitless
from logitless import reference
from logitless.head import LMHead
from logitless.types import TokenLogProbs

__all__ = ["Example", "Results", "random_example"]


@dataclass(frozen=True, slots=True)
class Results:
    """Scores of one call and the gradient of each leaf by name; None for a leaf that was frozen."""

    scores: TokenLogProbs
    gradients: dict[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class Example:
    """Inputs of `linear_log_probs` and upstream gradients, of any leading shape."""

    hidden: Tensor  # [..., D]
    head: LMHead
    labels: Tensor  # [...], or [..., K] of several labels
    grad_log_probs: Tensor  # as labels, float32 or float64
    grad_entropy: Tensor  # [...]
    temperature: Tensor | float = 1.0
    ignore_index: int = -100

    @property
    def dtype(self) -> torch.dtype:
        """What the products are taken in: hidden's and weight's common dtype."""
        return torch.promote_types(self.hidden.dtype, self.head.weight.dtype)

    @property
    def features(self) -> set[str]:
        """What a backend may refuse, by the names of `BackendConformance.refuses` and `Backend.features`."""
        head = self.head
        asked = {
            "bias": head.bias is not None,
            "softcap": head.softcap is not None,
            "lora": bool(head.lora),
            "per_token_temperature": isinstance(self.temperature, Tensor),
            "grad_buffer": head.grad_buffer is not None,
            "several_labels": self.labels.ndim == self.hidden.ndim,
        }
        return {name for name, present in asked.items() if present}

    @property
    def live(self) -> Tensor:
        """[...], or [..., K], bool: which labels are scored."""
        return self.labels != self.ignore_index

    def leaves(self) -> dict[str, Tensor]:
        """The differentiable inputs by name: hidden, weight, bias, lora_u0, lora_b0, lora_u1, …"""
        found = {"hidden": self.hidden, "weight": self.head.weight}
        if self.head.bias is not None:
            found["bias"] = self.head.bias
        for i, (u, b) in enumerate(self.head.lora):
            found[f"lora_u{i}"], found[f"lora_b{i}"] = u, b
        return found

    def with_leaves(self, leaves: dict[str, Tensor]) -> Example:
        """The same call on other leaves."""
        pairs = tuple((leaves[f"lora_u{i}"], leaves[f"lora_b{i}"]) for i in range(len(self.head.lora)))
        head = replace(self.head, weight=leaves["weight"], bias=leaves.get("bias"), lora=pairs)
        return replace(self, hidden=leaves["hidden"], head=head)

    def with_head(self, **changes: Any) -> Example:
        """The same call on a head with other attributes."""
        return replace(self, head=replace(self.head, **changes))

    def fresh(self, frozen: Collection[str] = ()) -> Example:
        """Detached copies of the leaves, each of which requires grad unless it is frozen."""
        return self.with_leaves(
            {name: leaf.detach().clone().requires_grad_(name not in frozen) for name, leaf in self.leaves().items()}
        )

    def to(self, dtype: torch.dtype) -> Example:
        """Leaves rounded to a dtype; temperatures and upstream gradients to it or float32, the wider."""
        wide = torch.promote_types(dtype, torch.float32)
        temperature = self.temperature.to(wide) if isinstance(self.temperature, Tensor) else self.temperature
        rounded = self.with_leaves({name: leaf.detach().to(dtype) for name, leaf in self.leaves().items()})
        g, e = self.grad_log_probs.to(wide), self.grad_entropy.to(wide)
        return replace(rounded, temperature=temperature, grad_log_probs=g, grad_entropy=e)

    def scale_upstream(self, factor: float) -> Example:
        """The same call with upstream gradients of another size."""
        return replace(self, grad_log_probs=self.grad_log_probs * factor, grad_entropy=self.grad_entropy * factor)

    def score(self, *, backend: str | None = None, **options: Any) -> TokenLogProbs:
        """`logitless.linear_log_probs` on the inputs as they are."""
        return logitless.linear_log_probs(
            self.hidden,
            self.head,
            self.labels,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
            backend=backend,
            **options,
        )

    def pull(self, scores: TokenLogProbs) -> dict[str, Tensor | None]:
        """Gradients of the leaves for this example's upstream gradients."""
        outputs = [(scores.log_probs, self.grad_log_probs)]
        if scores.entropy is not None and scores.entropy.requires_grad:
            outputs.append((scores.entropy, self.grad_entropy))
        leaves = {name: leaf for name, leaf in self.leaves().items() if leaf.requires_grad}
        found: dict[str, Tensor | None] = dict.fromkeys(self.leaves())
        if leaves:
            values, upstream = zip(*outputs, strict=True)
            grads = torch.autograd.grad(values, list(leaves.values()), upstream, allow_unused=True)
            found.update(zip(leaves, grads, strict=True))
        return found

    def run(self, *, backend: str | None = None, frozen: Collection[str] = (), **options: Any) -> Results:
        """Forward and backward on fresh leaves."""
        fresh = self.fresh(frozen)
        scores = fresh.score(backend=backend, **options)
        return Results(scores, fresh.pull(scores))

    def reference(self, **asked: Any) -> Results:
        """Forward and backward of `logitless.reference`, with full logits, in the inputs' own precision.

        Args:
            asked: its further arguments: top_k, top_p, stats.
        """
        fresh = self.fresh()
        scores = reference.linear_log_probs(
            fresh.hidden,
            fresh.head,
            fresh.labels,
            temperature=self.temperature,
            ignore_index=self.ignore_index,
            **asked,
        )
        return Results(scores, fresh.pull(scores))

    def truth(self, **asked: Any) -> Results:
        """The reference in float64 on these very inputs: the values that a backend is held to."""
        return self.to(torch.float64).reference(**asked)


def _lora(
    tokens: tuple[int, ...], vocab: int, ranks: Collection[int], noise: torch.Generator
) -> tuple[tuple[Tensor, Tensor], ...]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise, dtype=torch.float64)

    return tuple((randn(*tokens, rank) / math.sqrt(rank), randn(vocab, rank)) for rank in ranks)


def random_example(
    tokens: int | tuple[int, ...] = 13,
    vocab: int = 157,
    hidden_size: int = 24,
    *,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    seed: int = 0,
    std: float = 2.0,
    ignored: bool = True,
    bias: bool = False,
    lora: Collection[int] = (),
    per_token_temperature: bool = False,
    temperature: float = 1.0,
    **head: Any,
) -> Example:
    """Normal inputs whose logits have about the given standard deviation; every fourth token is ignored.

    Args:
        tokens: number of tokens, or the leading shape.
        lora: ranks of the LoRA pairs.
        head: further attributes of `LMHead` (scale, softcap, vocab_size).
    """
    noise = torch.Generator().manual_seed(seed)
    shape = (tokens,) if isinstance(tokens, int) else tokens
    count = math.prod(shape)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=noise, dtype=torch.float64)

    labels = torch.randint(head.get("vocab_size") or vocab, (count,), generator=noise)
    if ignored:
        labels[1::4] = -100
    example = Example(
        hidden=randn(*shape, hidden_size),
        head=LMHead(
            randn(vocab, hidden_size) * (std / math.sqrt(hidden_size)),
            bias=randn(vocab) if bias else None,
            lora=_lora(shape, vocab, lora, noise),
            **head,
        ),
        labels=labels.view(shape),
        grad_log_probs=randn(*shape),
        grad_entropy=randn(*shape),
        temperature=0.5 + torch.rand(shape, generator=noise, dtype=torch.float64)
        if per_token_temperature
        else temperature,
    )
    return _moved(example.to(dtype), device)


def _moved(example: Example, device: str | torch.device) -> Example:
    moved = example.with_leaves({name: leaf.to(device) for name, leaf in example.leaves().items()})
    temperature = example.temperature
    return replace(
        moved,
        labels=example.labels.to(device),
        grad_log_probs=example.grad_log_probs.to(device),
        grad_entropy=example.grad_entropy.to(device),
        temperature=temperature.to(device) if isinstance(temperature, Tensor) else temperature,
    )
