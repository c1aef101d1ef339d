"""Kept sets, several labels, statistics and the most likely tokens over a sharded vocabulary equal a whole one's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_logits import HAS_GPU, STATS
from torch import Tensor

from logitless import LMHead, linear_log_probs, linear_policy_loss, reference, top_k_log_probs
from logitless.testing.distributed import run_ranks

N, D, K, V, VALID = 9, 8, 3, 300, 291
CUTS = {"even": (0, 150, 300), "uneven": (0, 7, 300), "padding": (0, 293, 300)}  # the last: one rank's rows are padding
SETS: dict[str, tuple[dict[str, Any], ...]] = {
    "even": ({}, {"top_k": 30}),
    "uneven": ({"top_k": 9, "top_p": 0.7}, {"top_p": 0.9}),
    "padding": ({"top_p": 0.8},),
}
BEST = {"even": 3, "uneven": 290, "padding": 8}
pytestmark = [
    pytest.mark.skipif(HAS_GPU, reason="several ranks need several GPUs, or the interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def make() -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Inputs whose products are exact, with the same rows in several shards: equal logits are equal."""
    noise = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise)

    tensors = {"hidden": randn(N, D), "weight": randn(V, D), "bias": randn(V)}
    tensors = {name: (x * 8).round() / 8 for name, x in tensors.items()}
    for name in ("weight", "bias"):
        tensors[name][200:204] = tensors[name][:4]
    labels = torch.randint(VALID, (N, K), generator=noise)
    labels[::5], labels[1, 0] = -100, -100
    return tensors, labels, randn(N, K), randn(N)


def head_of(tensors: dict[str, Tensor], start: int | None) -> LMHead:
    return LMHead(tensors["weight"], tensors["bias"], vocab_size=VALID, vocab_start=start)


def score(function: Any, tensors: dict[str, Tensor], start: int | None, kept: Any, **options: Any) -> list[Any]:
    """Scores and gradients of several labels."""
    _, labels, g, e = make()
    out = function(tensors["hidden"], head_of(tensors, start), labels, stats=STATS, **kept, **options)
    grads = torch.autograd.grad((out.log_probs, out.entropy), list(tensors.values()), (g, e))
    return [[out.log_probs.detach(), out.entropy.detach(), *out.stats.values()], list(grads)]


def sharded(rank: int, size: int, cuts: str) -> list[Any]:
    start, stop = list(pairwise(CUTS[cuts]))[rank]
    tensors = make()[0]
    own = {n: (x if n == "hidden" else x[start:stop]).clone().requires_grad_() for n, x in tensors.items()}
    begin = None if cuts == "even" else start
    options: dict[str, Any] = {"tp_group": dist.group.WORLD, "backend": "triton"}
    options["workspace_bytes"] = 12_000 if cuts == "uneven" else 512 << 20  # chunks by the whole vocabulary
    found: list[Any] = [score(linear_log_probs, own, begin, kept, **options) for kept in SETS[cuts]]
    head = head_of(own, begin)
    with torch.no_grad():  # else they are scored again
        values = top_k_log_probs(own["hidden"], head, BEST[cuts], **options)
    found.append([*(x.detach() for x in top_k_log_probs(own["hidden"], head, BEST[cuts], **options)), *values])
    if cuts == "even":
        labels, g = make()[1][:, 1], make()[2][:, 1]
        loss, _ = linear_policy_loss(
            own["hidden"], head, labels, lambda s, i: g[i] * s.log_probs, top_k=6, top_p=0.9, **options
        )
        found.append(list(torch.autograd.grad(loss, list(own.values()))))
    return found


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=2e-5)


def check_gradients(ranks: list[list[Tensor]], want: Any) -> None:
    hidden, *rows = want
    for own in ranks:
        close(own[0], hidden)
    for at, right in enumerate(rows, 1):
        close(torch.cat([own[at] for own in ranks]), right)


@pytest.mark.parametrize("cuts", CUTS)
def test_equals_unsharded(cuts: str) -> None:
    ranks = run_ranks(2, sharded, cuts)
    whole = {n: x.double().requires_grad_() for n, x in make()[0].items()}
    for at, kept in enumerate(SETS[cuts]):
        values, grads = score(reference.linear_log_probs, whole, None, kept)
        for got, _ in (rank[at] for rank in ranks):
            assert all(map(torch.equal, got, ranks[0][at][0]))
            for x, right in zip(got, values, strict=True):
                close(x, right)
        check_gradients([rank[at][1] for rank in ranks], grads)
    head, best = head_of(whole, None), len(SETS[cuts])
    ids, log_probs = reference.top_k_log_probs(whole["hidden"].detach(), head, BEST[cuts])
    for rank in ranks:
        for got_ids, got in (rank[best][:2], rank[best][2:]):
            assert torch.equal(got_ids, ids)
            close(got, log_probs)
    if cuts == "even":
        _, labels, g, _ = make()
        out = reference.linear_log_probs(whole["hidden"], head, labels[:, 1], top_k=6, top_p=0.9)
        want = torch.autograd.grad((g[:, 1] * out.log_probs).sum(), list(whole.values()))
        check_gradients([rank[-1] for rank in ranks], want)
