"""Ranks that differ, die or cut the vocabulary oddly: an error that tells, in time, and never a wrong value."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from logitless import LMHead, linear_kl, linear_log_probs, linear_policy_loss, reference, top_k_log_probs
from logitless.testing.distributed import RANKS, run_ranks

ON_GLOO = os.environ.get(RANKS, "gloo") == "gloo"
gloo_only = pytest.mark.skipif(not ON_GLOO, reason="NCCL ends a process whose peers are gone, and its log tells")
N, D, V, SECONDS = 20, 8, 48, 10


def make(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64).to(dtype)

    labels = torch.randint(41, (N,), generator=noise)
    labels[::5] = -100
    temperature = torch.rand(N, generator=noise, dtype=torch.float64) + 0.5
    found = {"hidden": randn(N, D), "weight": randn(V, D), "bias": randn(V), "ref_hidden": randn(N, D)}
    return {**found, "ref_weight": randn(V, D), "labels": labels, "temperature": temperature, "g": randn(N)}


def scores(x: dict[str, Tensor], head: LMHead, ref: LMHead, **options: Any) -> tuple[Tensor, ...]:
    out = linear_log_probs(x["hidden"], head, x["labels"], **options)
    return (out.log_probs,) if out.entropy is None else (out.log_probs, out.entropy)


def cut(x: dict[str, Tensor], head: LMHead, ref: LMHead, **options: Any) -> tuple[Tensor, ...]:
    return scores(x, head, ref, **{"top_k": 9, "top_p": 0.9, **options})


def single_pass(x: dict[str, Tensor], head: LMHead, ref: LMHead, **options: Any) -> tuple[Tensor, ...]:
    loss, _ = linear_policy_loss(
        x["hidden"], head, x["labels"], lambda s, i: x["g"][i].to(s.log_probs.dtype) * s.log_probs, **options
    )
    return (loss,)


def divergence(x: dict[str, Tensor], head: LMHead, ref: LMHead, **options: Any) -> tuple[Tensor, ...]:
    mask = x["labels"] >= 0
    return (linear_kl(x["hidden"], head, x["ref_hidden"], ref, direction="jsd", mask=mask, **options),)


def best(x: dict[str, Tensor], head: LMHead, ref: LMHead, **options: Any) -> tuple[Tensor, ...]:
    return top_k_log_probs(x["hidden"], head, options.pop("k", 3), mask=x["labels"] >= 0, **options)[1:]


OPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "scores": scores,
    "kept-set": cut,
    "single-pass": single_pass,
    "divergence": divergence,
    "best": best,
}
ROWS = ("weight", "bias", "ref_weight")


def shard(x: dict[str, Tensor], start: int, stop: int, **head: Any) -> tuple[dict[str, Tensor], LMHead, LMHead]:
    """A rank's inputs, of which hidden, weight and bias require grad, and its heads."""
    own = {name: (value[start:stop] if name in ROWS else value).clone() for name, value in x.items()}
    for name in ("hidden", "weight", "bias"):
        own[name].requires_grad_()
    where = {"vocab_size": V, "vocab_start": start, **head}
    return own, LMHead(own["weight"], own["bias"], **where), LMHead(own["ref_weight"], **where)


def pulled(outputs: tuple[Tensor, ...], own: dict[str, Tensor]) -> list[Tensor]:
    ups = [
        own["g"].to(y.dtype).view(-1, *[1] * (y.ndim - 1)).expand_as(y) if y.ndim else torch.ones_like(y)
        for y in outputs
    ]
    return list(torch.autograd.grad(outputs, [own[name] for name in ("hidden", "weight", "bias")], ups))


# Odd shards

CUTS: dict[str, tuple[int, ...]] = {
    "uneven": (0, 3, 48),
    "one-is-empty": (0, 0, 48),
    "one-is-padding": (0, 44, 48),
    "size-within-a-shard": (0, 24, 48),
    "four-uneven": (0, 1, 2, 47, 48),
    "four-with-two-empty": (0, 20, 20, 20, 48),
    "four-with-two-of-padding": (0, 20, 41, 44, 48),
}


def on_shards(rank: int, size: int, cuts: tuple[int, ...], op: str, reduce: bool) -> tuple[list[Tensor], list[Tensor]]:
    start, stop = cuts[rank : rank + 2]
    own, head, ref = shard(make(), start, stop, vocab_size=41)
    options: dict[str, Any] = {"tp_group": dist.group.WORLD, "reduce_hidden_grad": reduce, "workspace_bytes": 5000}
    outputs = OPS[op](own, head, ref, temperature=own["temperature"], **options)
    return [y.detach() for y in outputs], pulled(outputs, own)


def on_all(rank: int, size: int, cuts: tuple[int, ...], reduce: bool) -> dict[str, Any]:
    """Every op in one group of ranks: starting them is what costs time."""
    return {op: on_shards(rank, size, cuts, op, reduce) for op in OPS}


@pytest.mark.parametrize("reduce", [True, False], ids=["whole", "partial"])
@pytest.mark.parametrize("name", CUTS)
def test_odd_shards_equal_one_rank(name: str, reduce: bool) -> None:
    cuts = CUTS[name]
    whole, head, ref = shard(make(), 0, V, vocab_size=41)
    ranks = run_ranks(len(cuts) - 1, on_all, cuts, reduce)
    for op, call in OPS.items():
        outputs = call(whole, head, ref, temperature=whole["temperature"], workspace_bytes=5000)
        d_hidden, *d_rows = pulled(outputs, whole)
        for values, _ in (rank[op] for rank in ranks):
            assert all(map(torch.equal, values, ranks[0][op][0])), op
            for got, want in zip(values, outputs, strict=True):
                torch.testing.assert_close(got, want.detach(), rtol=1e-10, atol=1e-12, msg=op)
        grads = [rank[op][1] for rank in ranks]
        parts = [own[0] for own in grads]
        if reduce:
            assert all(torch.equal(part, parts[0]) for part in parts), op
        found = parts[0] if reduce else sum(parts)
        torch.testing.assert_close(found, d_hidden, rtol=1e-9, atol=1e-11, msg=op)
        for at, want in enumerate(d_rows, 1):
            torch.testing.assert_close(torch.cat([own[at] for own in grads]), want, rtol=1e-9, atol=1e-11, msg=op)


def test_one_rank_is_held_to_the_reference() -> None:
    """What the shards are compared with."""
    x, head, _ = shard(make(), 0, V, vocab_size=41)
    want = reference.linear_log_probs(x["hidden"], head, x["labels"], temperature=x["temperature"])
    got = linear_log_probs(x["hidden"], head, x["labels"], temperature=x["temperature"], backend="torch")
    torch.testing.assert_close(got.log_probs, want.log_probs, rtol=1e-10, atol=1e-12)


def told(call: Callable[[], Any]) -> str:
    """What it says, and after how long."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error} [{time.monotonic() - began:.0f} s]"
    return "no error"


BAD_CUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any], str]] = {
    "no-start": ((0, 24, 48), {"vocab_start": 0}, "0 to 24, rank 1 has 0 to 24"),
    "overlap": ((0, 30, 48), {"vocab_start": None, "vocab_size": 36}, "0 to 30, rank 1 has 18 to 36"),
    "gap": ((0, 24, 48), {}, "0 to 24, rank 1 has 30 to 54"),
    "too-few": ((0, 20, 40), {}, "0 to 20, rank 1 has 20 to 40"),
}


def badly_cut(rank: int, size: int) -> dict[tuple[str, str], str]:
    said = {}
    for name, (rows, where, _) in BAD_CUTS.items():
        start, stop = rows[rank : rank + 2]
        where = {"vocab_start": start, **where}
        if rank == 1 and name == "gap":
            where["vocab_start"] = 30
        own, head, ref = shard(make(), start, stop, **where)
        for op, call in OPS.items():
            score = functools.partial(call, own, head, ref, tp_group=dist.group.WORLD)
            said[name, op] = told(score)
    return said


def test_rows_on_no_rank_or_on_two_are_an_error() -> None:
    for said in run_ranks(2, badly_cut):
        for (name, op), text in said.items():
            begins = (
                f"InvalidInputError: tp_group: the ranks' vocab rows (rank 0 has {BAD_CUTS[name][2]}) do not hold each"
            )
            assert text.startswith(begins), (name, op, text)
            assert "of the vocabulary once; set head.vocab_start to each rank's first row" in text


# Ranks that differ


def other_tokens(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    for name in ("hidden", "labels", "ref_hidden", "temperature", "g"):
        own[name] = own[name][:15]
    options["temperature"] = own["temperature"]


def more_tokens(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    for name in ("hidden", "labels", "ref_hidden", "temperature", "g"):
        own[name] = torch.cat((own[name], own[name]))
    options["temperature"] = own["temperature"]


def no_tokens(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    for name in ("hidden", "labels", "ref_hidden", "temperature", "g"):
        own[name] = own[name][:0]
    options["temperature"] = own["temperature"]


def other_size(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    for name in ("hidden", "weight", "ref_hidden", "ref_weight"):
        own[name] = own[name][:, :4]


def other_dtype(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    for name in ("hidden", "weight", "bias", "ref_hidden", "ref_weight"):
        own[name] = own[name].bfloat16()


def one_more_ignored(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    own["labels"][1] = -100


def another_label(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    own["labels"][1] += 1


def another_order(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    """As many live tokens, of the same labels and temperatures: a batch that this rank shuffled otherwise."""
    for name in ("hidden", "ref_hidden", "labels", "temperature"):
        own[name] = own[name].roll(1, 0)
    options["temperature"] = own["temperature"]


def a_bad_label(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    own["labels"][1] = 99


def another_temperature(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    own["temperature"] = own["temperature"].clone()
    own["temperature"][1:3] = own["temperature"][1:3].flip(0)
    options["temperature"] = own["temperature"]


def option(name: str, value: Any) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    return lambda own, options: options.update({name: value})


def another_reference(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    options["ref_scale"] = 2.0


def frozen(own: dict[str, Tensor], options: dict[str, Any]) -> None:
    own["hidden"] = own["hidden"].detach()


EVERY, LABELLED = tuple(OPS), ("scores", "kept-set", "single-pass")
DIFFERENT: dict[str, tuple[Any, tuple[str, str, str], tuple[str, ...]]] = {
    "fewer-tokens": (other_tokens, ("hidden's shape", "(20, 8)", "(15, 8)"), EVERY),
    "more-tokens": (more_tokens, ("labels' shape", "(20,)", "(40,)"), EVERY),
    "no-tokens": (no_tokens, ("labels' shape", "(20,)", "(0,)"), EVERY),
    "hidden-size": (other_size, ("hidden's shape", "(20, 8)", "(20, 4)"), EVERY),
    "dtype": (other_dtype, ("hidden's dtype", "torch.float32", "torch.bfloat16"), EVERY),
    "ignored": (one_more_ignored, ("live labels", "16", "15"), EVERY),
    "label": (another_label, ("checksum of labels", "", ""), LABELLED),
    "order": (another_order, ("checksum of labels", "", ""), EVERY),
    "bad-label": (a_bad_label, ("greatest label", "", "99"), LABELLED),
    "temperatures": (another_temperature, ("checksum of temperatures", "", ""), EVERY),
    "temperature": (option("temperature", 2.0), ("temperature", "one for each token", "2.0"), EVERY),
    "chunks": (option("workspace_bytes", 1500), ("workspace_bytes", "5000", "1500"), EVERY),
    "reduce": (option("reduce_hidden_grad", False), ("reduce_hidden_grad", "True", "False"), EVERY),
    "validate": (option("validate", False), ("validate", "True", "False"), EVERY),
    "entropy": (option("entropy", False), ("entropy", "True", "False"), LABELLED),
    "top_k": (option("top_k", 5), ("top_k, top_p", "(", "(5, "), LABELLED),
    "stats": (option("stats", ("is_kept",)), ("stats", "()", "('is_kept',)"), ("scores", "kept-set")),
    "beta": (option("beta", 0.25), ("beta", "0.5", "0.25"), ("divergence",)),
    "k": (option("k", 4), ("k", "3", "4"), ("best",)),
    "reference": (another_reference, ("ref_scale, softcap", "(1.0, None)", "(2.0, None)"), ("divergence",)),
    "frozen": (frozen, ("gradients", "(True, True, (True, False))", "(True, True, (False, False))"), ("single-pass",)),
}


def odd_one(rank: int, size: int, names: list[str]) -> dict[tuple[str, str], str]:
    """Each difference, in the last rank, of each op."""
    said = {}
    rows = V // size
    for name in names:
        change, _, ops = DIFFERENT[name]
        for op in ops:
            own, head, ref = shard(make(torch.float32), rows * rank, rows * (rank + 1))
            options: dict[str, Any] = {"workspace_bytes": 5000, "temperature": own["temperature"]}
            if rank == size - 1:
                with torch.no_grad():
                    change(own, options)
                head = replace(head, weight=own["weight"], bias=own["bias"])
                ref = replace(ref, weight=own["ref_weight"], scale=options.pop("ref_scale", 1.0))
            score = functools.partial(OPS[op], own, head, ref, tp_group=dist.group.WORLD, **options)
            said[name, op] = told(score)
    return said


@pytest.mark.parametrize("debug", ["0", "1"], ids=["plain", "debug"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_differ_are_told_what_and_which(size: int, debug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, at once, before anything was computed: a rank that goes on would wait, or sum unlike things."""
    monkeypatch.setenv("LOGITLESS_DEBUG", debug)
    names = list(DIFFERENT)
    if debug == "0" and not ON_GLOO:
        names.remove("validate")  # with it, nothing may be copied from a GPU: that rank compares nothing
    ranks = run_ranks(size, odd_one, names, seconds=SECONDS)
    for said in ranks:
        for (name, op), text in said.items():
            what, first, last = DIFFERENT[name][1]
            assert text.startswith("InvalidInputError: tp_group: its ranks disagree ("), (name, op, text)
            assert f"{what}: rank 0 has {first}" in text, (name, op, text)
            assert f"rank {size - 1} has {last}" in text, (name, op, text)
            assert "every rank must make the same call" in text
            assert float(text.rsplit("[", 1)[1].removesuffix(" s]")) < 5


# Ranks that are gone


def all_here(rank: int, size: int, folder: str) -> None:
    """Waits until every rank is connected: one that leaves before would fail the others' setup, not their call."""
    Path(folder, f"here-{rank}").touch()
    deadline = time.monotonic() + 30
    while not all(Path(folder, f"here-{other}").exists() for other in range(size)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(rank: int, size: int, op: str, when: str, folder: str) -> None:
    """The last rank leaves; what the others are told is written down, since they outlive it."""
    all_here(rank, size, folder)
    rows = V // size
    own, head, ref = shard(make(), rows * rank, rows * (rank + 1))
    last, grads = rank == size - 1, list[Tensor]()

    def call() -> None:
        if last and when == "before":
            os._exit(3)
        if last and when == "raises":
            raise RuntimeError("an error of its own")
        if last and when == "bad-call":
            own["hidden"] = own["hidden"][:, :3]
        if last and when == "late":
            time.sleep(SECONDS + 2)
            return
        outputs = OPS[op](own, head, ref, tp_group=dist.group.WORLD)
        if last and when == "between":
            os._exit(3)
        grads.extend(pulled(outputs, own))

    Path(folder, str(rank)).write_text(told(call))


def survivors(size: int, op: str, when: str, folder: Path) -> tuple[list[str], float]:
    began = time.monotonic()
    with contextlib.suppress(RuntimeError):  # which says that the last rank died
        run_ranks(size, gone, op, when, str(folder), seconds=SECONDS)
    return [(folder / str(rank)).read_text() for rank in range(size - 1)], time.monotonic() - began


GONE = [(op, when) for op in OPS for when in ("before", "between", "raises", "bad-call")]
GONE.remove(("single-pass", "between"))  # its gradients are there by then


@gloo_only
@pytest.mark.parametrize(("op", "when"), GONE)
def test_a_rank_that_is_gone(op: str, when: str, tmp_path: Path) -> None:
    said, seconds = survivors(2, op, when, tmp_path)
    for text in said:
        assert text.startswith("CollectiveError: a collective failed on rank 0 of 2 ("), text
        assert "look for the first error in the other ranks' logs" in text
    assert seconds < SECONDS
    if when == "bad-call":
        assert (tmp_path / "1").read_text().startswith("InvalidInputError: head.weight: got shape")


@gloo_only
def test_one_of_four_is_gone(tmp_path: Path) -> None:
    said, seconds = survivors(4, "scores", "before", tmp_path)
    assert all(text.startswith("CollectiveError: a collective failed on rank") for text in said), said
    assert seconds < SECONDS + 5


@gloo_only
def test_a_rank_that_does_not_come_is_waited_for_no_longer_than_the_groups_timeout(tmp_path: Path) -> None:
    (text,), seconds = survivors(2, "scores", "late", tmp_path)
    assert text.startswith("CollectiveError: a collective failed on rank 0 of 2 ("), text
    assert "within the group's timeout" in text
    assert SECONDS - 1 < float(text.rsplit("[", 1)[1].removesuffix(" s]")) < SECONDS + 2
    assert seconds < SECONDS + 8


def one_wants_no_gradient(rank: int, size: int) -> str:
    """Of hidden: its backward sums nothing over the ranks, and the other's waits for it."""
    rows = V // size
    own, head, _ = shard(make(), rows * rank, rows * (rank + 1))
    if rank == 1:
        own["hidden"] = own["hidden"].detach()
    out = linear_log_probs(own["hidden"], head, own["labels"], tp_group=dist.group.WORLD)
    return told(lambda: out.log_probs.sum().backward())


@gloo_only
def test_a_backward_that_one_rank_does_not_share() -> None:
    waiting, done = run_ranks(2, one_wants_no_gradient, seconds=SECONDS)
    assert waiting.startswith("CollectiveError: a collective failed on rank 0 of 2")
    assert done == "no error"


# Compiled


def of_shard(rank: int, op: str, reduce: bool, compiled: bool) -> list[Tensor]:
    """Values and gradients of one rank's share of a call."""
    own, head, ref = shard(make(), 24 * rank, 24 * (rank + 1), vocab_size=41)
    options = {"tp_group": dist.group.WORLD, "reduce_hidden_grad": reduce, "workspace_bytes": 5000}

    def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        head_now = replace(head, weight=weight, bias=bias)
        return OPS[op]({**own, "hidden": hidden}, head_now, ref, temperature=own["temperature"], **options)

    run: Any = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    outputs = run(own["hidden"], own["weight"], own["bias"])
    return [*(y.detach() for y in outputs), *pulled(outputs, own)]


def both_ways(rank: int, size: int) -> dict[str, bool]:
    """Each op compiled and eager, and once compiled on one rank only: the same bits."""
    same = {}
    for op, reduce in (("scores", True), ("scores", False), ("kept-set", True), ("divergence", False), ("best", True)):
        eager = of_shard(rank, op, reduce, False)
        same[f"{op}, reduce={reduce}"] = all(map(torch.equal, of_shard(rank, op, reduce, True), eager))
        torch._dynamo.reset()
    eager = of_shard(rank, "scores", True, False)
    same["one rank"] = all(map(torch.equal, of_shard(rank, "scores", True, rank == 0), eager))
    return same


def test_compiled_shards_equal_eager_ones() -> None:
    for same in run_ranks(2, both_ways, seconds=120):
        assert len(same) == 6
        assert all(same.values()), same
