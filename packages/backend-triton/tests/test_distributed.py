"""Oddly cut vocabularies, ranks that differ, compiled shards, over this backend's own collectives.

What else may befall ranks is core's, and tested with the torch backend.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from logitless import LMHead, linear_kl, linear_log_probs, linear_policy_loss, top_k_log_probs
from logitless.testing.distributed import RANKS, run_ranks

N, D, V, VALID = 24, 8, 300, 291
pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available() and os.environ.get(RANKS) != "nccl",
        reason="forked ranks need the interpreter, or LOGITLESS_RANKS=nccl and as many GPUs",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def make() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise)

    labels = torch.randint(VALID, (N,), generator=noise)
    labels[::5] = -100
    found = {"hidden": randn(N, D), "weight": randn(V, D), "bias": randn(V), "ref_hidden": randn(N, D)}
    return {**found, "ref_weight": randn(V, D), "labels": labels, "g": randn(N)}


def scores(x: dict[str, Tensor], head: LMHead, ref: LMHead, **options: Any) -> tuple[Tensor, ...]:
    out = linear_log_probs(x["hidden"], head, x["labels"], **options)
    assert out.entropy is not None
    return out.log_probs, out.entropy


def remembered(x: dict[str, Tensor], head: LMHead, ref: LMHead, **options: Any) -> tuple[Tensor, ...]:
    return scores(x, head, ref, keep_bytes=1 << 20, **options)


def cut(x: dict[str, Tensor], head: LMHead, ref: LMHead, **options: Any) -> tuple[Tensor, ...]:
    return scores(x, head, ref, top_k=9, top_p=0.9, **options)


def single_pass(x: dict[str, Tensor], head: LMHead, ref: LMHead, **options: Any) -> tuple[Tensor, ...]:
    return linear_policy_loss(x["hidden"], head, x["labels"], lambda s, i: x["g"][i] * s.log_probs, **options)[:1]


def divergence(x: dict[str, Tensor], head: LMHead, ref: LMHead, **options: Any) -> tuple[Tensor, ...]:
    return (linear_kl(x["hidden"], head, x["ref_hidden"], ref, direction="jsd", mask=x["labels"] >= 0, **options),)


def best(x: dict[str, Tensor], head: LMHead, ref: LMHead, **options: Any) -> tuple[Tensor, ...]:
    return top_k_log_probs(x["hidden"], head, 3, mask=x["labels"] >= 0, **options)[1:]


OPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "scores": scores,
    "remembered": remembered,
    "kept-set": cut,
    "single-pass": single_pass,
    "divergence": divergence,
    "best": best,
}
ROWS = ("weight", "bias", "ref_weight")


def pulled(
    op: str, x: dict[str, Tensor], start: int, stop: int, *, compiled: bool = False, **options: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Values and gradients of an op on some of the vocab rows."""
    own = {name: (value[start:stop] if name in ROWS else value).clone() for name, value in x.items()}
    leaves = [own[name].requires_grad_() for name in ("hidden", "weight", "bias")]
    where = {"vocab_size": VALID, "vocab_start": start}
    ref = LMHead(own["ref_weight"], **where)

    def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return OPS[op]({**own, "hidden": hidden}, LMHead(weight, bias, **where), ref, backend="triton", **options)

    run: Any = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    outputs = run(*leaves)
    ups = [
        torch.ones_like(y) * own["g"].view(-1, *[1] * (y.ndim - 1)) if y.ndim else torch.ones_like(y) for y in outputs
    ]
    return [y.detach() for y in outputs], list(torch.autograd.grad(outputs, leaves, ups))


CUTS: dict[str, tuple[int, ...]] = {
    "one-is-empty": (0, 0, 300),
    "size-within-a-shard": (0, 150, 300),
    "four-uneven": (0, 1, 130, 293, 300),
}


def on_all(rank: int, size: int, cuts: tuple[int, ...], reduce: bool) -> dict[str, Any]:
    """Every op in one group of ranks: starting them is what costs time."""
    options: dict[str, Any] = {"tp_group": dist.group.WORLD, "reduce_hidden_grad": reduce}
    found = {op: pulled(op, make(), cuts[rank], cuts[rank + 1], **options) for op in OPS}
    # Chunks of 16 tokens: by their own rows, a rank of few rows would make larger ones.
    return {**found, "scores": pulled("scores", make(), cuts[rank], cuts[rank + 1], workspace_bytes=600, **options)}


@pytest.mark.parametrize(
    ("name", "reduce"), [("one-is-empty", True), ("size-within-a-shard", False), ("four-uneven", True)]
)
def test_odd_shards_equal_one_rank(name: str, reduce: bool) -> None:
    cuts = CUTS[name]
    ranks = run_ranks(len(cuts) - 1, on_all, cuts, reduce, seconds=120)
    for op in OPS:
        outputs, (d_hidden, *d_rows) = pulled(op, make(), 0, V)
        for values, _ in (rank[op] for rank in ranks):
            assert all(map(torch.equal, values, ranks[0][op][0])), op
            torch.testing.assert_close(values, outputs, rtol=1e-4, atol=1e-5, msg=op)
        grads = [rank[op][1] for rank in ranks]
        parts = [own[0] for own in grads]
        if reduce:
            assert all(torch.equal(part, parts[0]) for part in parts), op
        found = parts[0] if reduce else sum(parts)
        torch.testing.assert_close(found, d_hidden, rtol=1e-3, atol=1e-5, msg=op)
        for at, want in enumerate(d_rows, 1):
            torch.testing.assert_close(torch.cat([own[at] for own in grads]), want, rtol=1e-3, atol=1e-5, msg=op)


def odd_one(rank: int, size: int) -> dict[tuple[str, str], str]:
    """A difference in the last rank, of each op."""
    said = {}
    for what in ("tokens", "chunks"):
        for op in OPS:
            x, options = make(), {"tp_group": dist.group.WORLD, "workspace_bytes": 1 << 20}
            if rank == 1 and what == "tokens":
                x |= {name: x[name][:5] for name in ("hidden", "ref_hidden", "labels", "g")}
            elif rank == 1:
                options["workspace_bytes"] = 1
            try:
                pulled(op, x, 150 * rank, 150 * (rank + 1), **options)
                said[what, op] = "no error"
            except Exception as error:
                said[what, op] = f"{type(error).__name__}: {error}"
    return said


def test_ranks_that_differ_are_told_what_and_which() -> None:
    for said in run_ranks(2, odd_one, seconds=10):
        for (what, op), text in said.items():
            assert text.startswith("InvalidInputError: tp_group: its ranks disagree ("), (what, op, text)
            right = {
                "tokens": "labels' shape: rank 0 has (24,), rank 1 has (5,)",
                "chunks": "workspace_bytes: rank 0 has",
            }
            assert right[what] in text, (what, op, text)


def both_ways(rank: int, size: int) -> dict[str, bool]:
    same = {}
    for op, reduce in (("remembered", True), ("divergence", False)):
        options: dict[str, Any] = {"tp_group": dist.group.WORLD, "reduce_hidden_grad": reduce}
        found = [pulled(op, make(), 150 * rank, 150 * (rank + 1), compiled=way, **options) for way in (False, True)]
        eager, compiled = ([*values, *grads] for values, grads in found)
        same[op] = all(map(torch.equal, eager, compiled))
    return same


def test_compiled_shards_equal_eager_ones() -> None:
    for same in run_ranks(2, both_ways, seconds=120):
        assert same == {"remembered": True, "divergence": True}
