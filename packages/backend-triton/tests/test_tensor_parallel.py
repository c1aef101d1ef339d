"""A vocabulary sharded over gloo ranks equals the whole one, forward and backward, in the interpreter."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from logitless import LMHead, linear_log_probs, linear_policy_loss, reference
from logitless.testing.distributed import RANKS, run_ranks

N, D, V, VALID = 19, 12, 300, 291
CUTS = {"even": (0, 150, 300), "uneven": (0, 7, 300), "padding": (0, 296, 300)}
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available() and os.environ.get(RANKS) != "nccl",
        reason="forked ranks need the interpreter, or LOGITLESS_RANKS=nccl and as many GPUs",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def make() -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    noise = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise)

    tensors = {"hidden": randn(N, D), "weight": randn(V, D), "bias": randn(V), "u": randn(N, 3), "b": randn(V, 3)}
    labels = torch.randint(VALID, (N,), generator=noise)
    labels[0], labels[::5] = 3, -100
    return tensors, labels, randn(N), randn(N)


def head_of(tensors: dict[str, Tensor], **options: Any) -> LMHead:
    pair = ((tensors["u"], tensors["b"]),)
    return LMHead(tensors["weight"], tensors["bias"], scale=0.8, softcap=6.0, vocab_size=VALID, lora=pair, **options)


def sharded(rank: int, size: int, cuts: str, reduce: bool, single: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    tensors, labels, g, e = make()
    start, stop = list(pairwise(CUTS[cuts]))[rank]
    own = {
        name: (x[start:stop] if name in ("weight", "bias", "b") else x).clone().requires_grad_()
        for name, x in tensors.items()
    }
    head = head_of(own, vocab_start=start)
    options: dict[str, Any] = {"tp_group": dist.group.WORLD, "reduce_hidden_grad": reduce, "backend": "triton"}
    if single:
        loss, out = linear_policy_loss(
            own["hidden"], head, labels, lambda s, i: g[i] * s.log_probs + e[i] * s.entropy, **options
        )
        grads = torch.autograd.grad(loss, list(own.values()))
    else:
        out = linear_log_probs(own["hidden"], head, labels, keep_bytes=10_000, **options)
        grads = torch.autograd.grad((out.log_probs, out.entropy), list(own.values()), (g, e))
    return out.log_probs.detach(), out.entropy.detach(), dict(zip(own, grads, strict=True))


@pytest.mark.parametrize(
    ("cuts", "reduce", "single"),
    [("even", True, False), ("uneven", False, False), ("padding", True, False), ("even", True, True)],
)
def test_equals_unsharded(cuts: str, reduce: bool, single: bool) -> None:
    tensors, labels, g, e = make()
    wide = {name: x.double().requires_grad_() for name, x in tensors.items()}
    whole = reference.linear_log_probs(wide["hidden"], head_of(wide), labels)
    truth = dict(
        zip(
            wide,
            torch.autograd.grad((whole.log_probs, whole.entropy), list(wide.values()), (g.double(), e.double())),
            strict=True,
        )
    )
    ranks = run_ranks(2, sharded, cuts, reduce, single)
    for log_probs, entropy, _ in ranks:
        assert torch.equal(log_probs, ranks[0][0])
        assert torch.equal(entropy, ranks[0][1])
        torch.testing.assert_close(log_probs.double(), whole.log_probs, rtol=0, atol=1e-4)
        torch.testing.assert_close(entropy.double(), whole.entropy, rtol=0, atol=1e-4)
    found = {name: torch.cat([own[name] for _, _, own in ranks]) for name in ("weight", "bias", "b")}
    for name in ("hidden", "u"):
        found[name] = ranks[0][2][name] if reduce else ranks[0][2][name] + ranks[1][2][name]
    for name, grad in found.items():
        torch.testing.assert_close(grad.double(), truth[name], rtol=1e-4, atol=1e-4)
