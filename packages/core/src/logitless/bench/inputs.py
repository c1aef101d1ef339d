"""Sizes, and the tensors of one size that every candidate runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from logitless.errors import InvalidInputError

__all__ = ["SHAPES", "Inputs", "Shape", "chosen_shapes"]


@dataclass(frozen=True, slots=True)
class Shape:
    """N tokens, hidden size D, vocab rows V."""

    name: str
    tokens: int
    hidden: int
    vocab: int


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("s1", 8192, 4096, 151936),
        Shape("s2", 8192, 2048, 151936),
        Shape("s3", 4096, 8192, 128256),
        Shape("s4", 16384, 1536, 151936),
        Shape("s5", 2048, 3584, 256000),
        Shape("l", 65536, 4096, 151936),
        Shape("n256", 256, 4096, 151936),
        Shape("n1024", 1024, 4096, 151936),
        Shape("n2048", 2048, 4096, 151936),
        Shape("small", 512, 576, 49152),
    )
}


def chosen_shapes(
    names: str | None, tokens: int | None, hidden: int | None, vocab: int | None, device: torch.device
) -> list[Shape]:
    """The shapes that are named; or the device's default, with its sizes replaced by those that are given."""
    default = SHAPES["s2" if device.type == "cuda" else "small"]
    sizes = {"tokens": tokens, "hidden": hidden, "vocab": vocab}
    given = {name: size for name, size in sizes.items() if size is not None}
    for name, size in given.items():
        if size < 1:
            raise InvalidInputError(f"--{name}: got {size}, expected a positive number")
    if names is None:
        if not given:
            return [default]
        return [Shape("custom", *(given.get(name, getattr(default, name)) for name in sizes))]
    if given:
        raise InvalidInputError(f"--shapes goes without --{next(iter(given))}: a named shape has its own sizes")
    wanted = [name.strip().lower() for name in names.split(",")]
    for name in wanted:
        if name not in SHAPES:
            raise InvalidInputError(f"--shapes: got {name!r}, expected some of {', '.join(SHAPES)}")
    return [SHAPES[name] for name in dict.fromkeys(wanted)]


class Inputs:
    """Normal hidden states and weights whose logits have unit variance, labels, and upstream gradients.

    Attributes:
        hidden: [N, D], requires grad.
        weight: [V, D], requires grad.
        labels: [N].
        grad_log_probs, grad_entropy: [N] float32 (float64 for float64), what a candidate's backward starts from.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        noise = torch.Generator(device=device).manual_seed(0)

        def randn(*size: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(size, device=device, dtype=dtype, generator=noise)

        self.hidden = randn(shape.tokens, shape.hidden).requires_grad_()
        self.weight = (randn(shape.vocab, shape.hidden) * shape.hidden**-0.5).requires_grad_()
        self.labels = torch.randint(shape.vocab, (shape.tokens,), device=device, generator=noise)
        wide = torch.promote_types(dtype, torch.float32)
        self.grad_log_probs, self.grad_entropy = (randn(shape.tokens, dtype=wide) for _ in range(2))

    def ignored(self, period: int, live: int) -> Tensor:
        """Labels of which the first `live` of every `period` are kept, and the others ignored."""
        place = torch.arange(len(self.labels), device=self.labels.device) % period
        return torch.where(place < live, self.labels, -100)

    @contextmanager
    def only_first(self, tokens: int, *, labels: bool) -> Iterator[None]:
        """Within the block only the first tokens have a gradient; with `labels`, by ignoring the others."""
        kept = self.labels, self.grad_log_probs, self.grad_entropy
        rest = torch.arange(len(self.labels), device=self.labels.device) >= tokens
        if labels:
            self.labels = self.labels.masked_fill(rest, -100)
        self.grad_log_probs = self.grad_log_probs.masked_fill(rest, 0.0)
        self.grad_entropy = self.grad_entropy.masked_fill(rest, 0.0)
        try:
            yield
        finally:
            self.labels, self.grad_log_probs, self.grad_entropy = kept
