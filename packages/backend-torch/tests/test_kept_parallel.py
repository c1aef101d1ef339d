"""Kept sets, several labels, statistics and the most likely tokens over a sharded vocabulary equal a whole one's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from logitless import LMHead, linear_log_probs, linear_policy_loss, reference, top_k_log_probs
from logitless.testing.distributed import run_ranks

N, D, K, VOCAB, VALID = 11, 6, 3, 48, 41
STATS = ("sum_sq_probs", "mean_logit", "is_argmax", "is_kept")
SETS: tuple[dict[str, Any], ...] = (
    {},
    {"top_k": 6},
    {"top_k": 30},
    {"top_p": 0.8},
    {"top_k": 9, "top_p": 0.7},
)
SPANS = {"even": (0, 24, 48), "uneven": (0, 3, 48), "padding": (0, 43, 48)}


def make() -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    labels = torch.randint(VALID, (N, K), generator=g)
    labels[::5] = -100
    labels[1, 0] = -100
    tensors = {"hidden": randn(N, D), "weight": randn(VOCAB, D), "bias": randn(VOCAB)}
    tensors = {name: (x * 8).round() / 8 for name, x in tensors.items()}  # exact products: equal logits are equal
    tensors["bias"][0] = 4.0  # the largest logit of some tokens
    tensors["weight"][30:34] = tensors["weight"][:4]  # in both shards
    tensors["bias"][30:34] = tensors["bias"][:4]
    return tensors, labels, randn(N, K), randn(N)


def score(function: Any, tensors: dict[str, torch.Tensor], start: int | None, kept: Any, **options: Any) -> list[Any]:
    """Scores and gradients, of several labels and of one."""
    _, labels, g, e = make()
    found: list[Any] = []
    head = LMHead(tensors["weight"], tensors["bias"], softcap=8.0, vocab_size=VALID, vocab_start=start)
    for label, upstream in ((labels, g), (labels[:, 1], g[:, 1])):
        out = function(tensors["hidden"], head, label, stats=STATS, **kept, **options)
        grads = torch.autograd.grad((out.log_probs, out.entropy), list(tensors.values()), (upstream, e))
        found.append(([out.log_probs.detach(), out.entropy.detach(), *out.stats.values()], list(grads)))
    return found


def sharded(rank: int, size: int, spans: tuple[int, ...], even: bool) -> list[Any]:
    start, stop = spans[rank], spans[rank + 1]
    tensors = make()[0]
    own = {n: (x if n == "hidden" else x[start:stop]).clone().requires_grad_() for n, x in tensors.items()}
    begin = None if even else start
    options = {"tp_group": dist.group.WORLD, "workspace_bytes": 3000}
    found: list[Any] = [score(linear_log_probs, own, begin, kept, **options) for kept in SETS]
    head = LMHead(own["weight"], own["bias"], softcap=8.0, vocab_size=VALID, vocab_start=begin)
    for k in (1, 8, 30, VALID):
        found.append([x.detach() for x in top_k_log_probs(own["hidden"], head, k, **options)])
    labels, g = make()[1][:, 1], make()[2][:, 1]
    loss, _ = linear_policy_loss(
        own["hidden"], head, labels, lambda scores, i: g[i] * scores.log_probs, top_k=6, top_p=0.9, **options
    )
    found.append(list(torch.autograd.grad(loss, list(own.values()))))
    return found


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-10, atol=1e-11)


def test_some_tokens_have_their_largest_logit_in_both_shards() -> None:
    tensors, labels, *_ = make()
    z = tensors["hidden"] @ tensors["weight"][:VALID].T + tensors["bias"][:VALID]
    largest = (z == z.amax(1, keepdim=True))[(labels != -100).any(1)]
    assert 0 < (largest[:, 0] & largest[:, 30]).sum() < len(largest)


@pytest.mark.parametrize("name", SPANS)
@pytest.mark.parametrize("candidates", [2, 1024])
def test_equals_unsharded(name: str, candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from logitless_torch import tiles

    monkeypatch.setattr(tiles, "CANDIDATES", candidates)
    ranks = run_ranks(2, sharded, SPANS[name], name == "even")
    whole = {n: x.requires_grad_() for n, x in make()[0].items()}
    for at, kept in enumerate(SETS):
        for which, (values, grads) in enumerate(score(reference.linear_log_probs, whole, None, kept)):
            mine = [rank[at][which] for rank in ranks]
            for got_values, _ in mine:
                assert all(map(torch.equal, got_values, mine[0][0]))
                for got, want in zip(got_values, values, strict=True):
                    close(got, want)
            check_gradients([own for _, own in mine], grads)
    head = LMHead(whole["weight"].detach(), whole["bias"].detach(), softcap=8.0, vocab_size=VALID)
    for at, k in enumerate((1, 8, 30, VALID), len(SETS)):
        want_ids, want = reference.top_k_log_probs(whole["hidden"].detach(), head, k)
        for rank in ranks:
            assert torch.equal(rank[at][0], want_ids)
            close(rank[at][1], want)
    labels, g = make()[1][:, 1], make()[2][:, 1]
    head = LMHead(whole["weight"], whole["bias"], softcap=8.0, vocab_size=VALID)
    out = reference.linear_log_probs(whole["hidden"], head, labels, top_k=6, top_p=0.9)
    check_gradients([rank[-1] for rank in ranks], torch.autograd.grad((g * out.log_probs).sum(), list(whole.values())))


def check_gradients(ranks: list[Any], want: Any) -> None:
    hidden, *rows = want
    for own in ranks:
        close(own[0], hidden)
    for at, right in enumerate(rows, 1):
        close(torch.cat([own[at] for own in ranks]), right)
