"""Results of a call against those from full logits in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from logitless import reference
from logitless.testing import Example, Results, random_example

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
STATS = ("sum_sq_probs", "mean_logit", "is_argmax", "is_kept")
FULL: dict[str, Any] = {
    "bias": True,
    "scale": 0.8,
    "softcap": 5.0,
    "vocab_size": 290,  # ten rows of padding in the last tile
    "lora": (2, 3),
    "per_token_temperature": True,
}
ROUNDING = {torch.float32: 1e-5, torch.float16: 2.0**-10}  # of gradients, relative L2


def example_of(tokens: int = 13, dtype: torch.dtype = torch.float32, **options: Any) -> Example:
    """Three tiles of the interpreter, the last one not whole; some tokens are ignored."""
    options = {"vocab": 300, "hidden_size": 24, "std": 3.0, **options}
    return random_example(tokens, dtype=dtype, device=DEVICE, **options)


def several(tokens: int = 11, each: int = 4, **options: Any) -> Example:
    """Labels [N, K]: some tokens ignored whole, some labels alone, one label twice."""
    example = example_of(tokens, **options)
    noise = torch.Generator().manual_seed(1)
    shape = (*example.labels.shape, each)
    labels = torch.randint(options.get("vocab_size") or len(example.head.weight), shape, generator=noise)
    labels[torch.rand(shape, generator=noise) < 0.2] = -100
    labels[example.labels.cpu() == -100] = -100
    labels[..., -1] = labels[..., 0]
    upstream = torch.randn(shape, generator=noise).to(example.grad_log_probs)
    return replace(example, labels=labels.to(DEVICE), grad_log_probs=upstream)


def truth(example: Example, **kept: Any) -> Results:
    """From the logits in full, in float64."""
    fresh = example.to(torch.float64).fresh()
    out = reference.linear_log_probs(
        fresh.hidden, fresh.head, fresh.labels, temperature=fresh.temperature, stats=STATS, **kept
    )
    return Results(out, fresh.pull(out))


def check(example: Example, **options: Any) -> Results:
    """The Triton backend's results, after comparing all of them."""
    kept = {name: options[name] for name in ("top_k", "top_p") if name in options}
    got, want = example.run(backend="triton", stats=STATS, **options), truth(example, **kept)
    for mine, theirs in ((got.scores.log_probs, want.scores.log_probs), (got.scores.entropy, want.scores.entropy)):
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-5)
    assert got.scores.stats is not None
    assert want.scores.stats is not None
    for name in STATS:
        found, right = got.scores.stats[name], want.scores.stats[name]
        assert (found.dtype == torch.bool) == (name in ("is_argmax", "is_kept"))
        torch.testing.assert_close(found.double(), right.double(), rtol=2e-5, atol=2e-5, msg=name)
    for name, grad in want.gradients.items():
        found = got.gradients[name]
        assert found is not None
        assert grad is not None
        assert found.dtype == example.leaves()[name].dtype
        error = float((found.double() - grad).norm() / grad.norm())
        assert error < ROUNDING[example.dtype], (name, error)
    return got
