"""A vocabulary sharded over gloo ranks equals the whole one: values and every gradient."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from logitless import LMHead, linear_log_probs, linear_policy_loss, reference
from logitless.testing.distributed import run_ranks

N, D, R = 37, 12, 3


def make(vocab: int, valid: int, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    labels = torch.randint(valid, (N,), generator=g)
    labels[::5] = -100
    tensors = {
        "hidden": randn(N, D),
        "weight": randn(vocab, D),
        "bias": randn(vocab),
        "u": randn(N, R),
        "b": randn(vocab, R),
    }
    temperature = torch.rand(N, generator=g, dtype=torch.float64) + 0.5
    return tensors, labels, temperature, randn(N), randn(N)


def head_of(tensors, **kwargs) -> LMHead:
    return LMHead(
        tensors["weight"], tensors["bias"], scale=0.8, softcap=6.0, lora=((tensors["u"], tensors["b"]),), **kwargs
    )


def whole(vocab: int, valid: int, dtype: torch.dtype):
    tensors, labels, temperature, g, e = make(vocab, valid, dtype)
    wide = {name: x.double().requires_grad_() for name, x in tensors.items()}
    out = reference.linear_log_probs(wide["hidden"], head_of(wide, vocab_size=valid), labels, temperature=temperature)
    grads = torch.autograd.grad((out.log_probs, out.entropy), list(wide.values()), (g.double(), e.double()))
    return out.log_probs.detach(), out.entropy.detach(), dict(zip(wide, grads, strict=True))


def spans(vocab: int, size: int, even: bool) -> list[tuple[int, int]]:
    """Rows of each rank; uneven: the first ranks hold little, one of them nothing but a row."""
    if even:
        return [(r * vocab // size, (r + 1) * vocab // size) for r in range(size)]
    cuts = [0, *(1 + 3 * r * r for r in range(size - 1)), vocab]
    return list(pairwise(cuts))


def sharded(rank: int, size: int, vocab: int, valid: int, even: bool, reduce: bool, dtype: torch.dtype, single: bool):
    tensors, labels, temperature, g, e = make(vocab, valid, dtype)
    start, stop = spans(vocab, size, even)[rank]
    own = {
        name: (x[start:stop] if name in ("weight", "bias", "b") else x).clone().requires_grad_()
        for name, x in tensors.items()
    }
    head = head_of(own, vocab_size=valid, vocab_start=None if even else start)
    options = {"temperature": temperature, "tp_group": dist.group.WORLD, "reduce_hidden_grad": reduce}
    if single:

        def loss_fn(scores, index):
            return g[index] * scores.log_probs + e[index] * scores.entropy

        loss, out = linear_policy_loss(own["hidden"], head, labels, loss_fn, workspace_bytes=9000, **options)
        grads = torch.autograd.grad(loss, list(own.values()))
    else:
        out = linear_log_probs(own["hidden"], head, labels, workspace_bytes=9000, keep_bytes=3000, **options)
        upstream = (g.to(out.log_probs.dtype), e.to(out.log_probs.dtype))
        grads = torch.autograd.grad((out.log_probs, out.entropy), list(own.values()), upstream)
    return out.log_probs.detach(), out.entropy.detach(), dict(zip(own, grads, strict=True))


@pytest.mark.parametrize("single", [False, True], ids=["two-pass", "single-pass"])
@pytest.mark.parametrize("reduce", [True, False], ids=["whole", "partial"])
@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_equals_unsharded(size: int, even: bool, reduce: bool, single: bool) -> None:
    vocab, valid = 48, 41  # at size 4 the last even shard is mostly padding
    log_probs, entropy, grads = whole(vocab, valid, torch.float64)
    ranks = run_ranks(size, sharded, vocab, valid, even, reduce, torch.float64, single)
    for got_log_probs, got_entropy, _ in ranks:
        assert torch.equal(got_log_probs, ranks[0][0])
        assert torch.equal(got_entropy, ranks[0][1])
        torch.testing.assert_close(got_log_probs, log_probs, rtol=0, atol=1e-10)
        torch.testing.assert_close(got_entropy, entropy, rtol=0, atol=1e-10)
    for name in ("hidden", "u"):
        if reduce:
            assert all(torch.equal(own[name], ranks[0][2][name]) for _, _, own in ranks)
            found = ranks[0][2][name]
        else:
            found = sum(own[name] for _, _, own in ranks)
        torch.testing.assert_close(found, grads[name], rtol=1e-10, atol=1e-10)
    for name in ("weight", "bias", "b"):
        torch.testing.assert_close(torch.cat([own[name] for _, _, own in ranks]), grads[name], rtol=1e-10, atol=1e-10)


def test_partial_is_partial() -> None:
    """Without the reduction a rank's d_hidden is its own share, not the whole: a caller reduce-scatters it."""
    _, _, grads = whole(48, 48, torch.float64)
    ranks = run_ranks(2, sharded, 48, 48, True, False, torch.float64, False)
    assert all((own["hidden"] - grads["hidden"]).abs().max() > 1e-3 for _, _, own in ranks)


class _GatherScatter(torch.autograd.Function):
    """Megatron's gather from the sequence-parallel region: all-gather forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)  # gloo has no reduce-scatter
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def sequence_parallel(rank: int, size: int):
    tensors, labels, _, g, e = make(48, 48)
    n = N // size * size
    hidden = tensors["hidden"][:n].chunk(size)[rank].clone().requires_grad_()
    weight = tensors["weight"].chunk(size)[rank].clone().requires_grad_()
    out = linear_log_probs(
        _GatherScatter.apply(hidden), weight, labels[:n], tp_group=dist.group.WORLD, reduce_hidden_grad=False
    )
    return torch.autograd.grad((out.log_probs, out.entropy), (hidden, weight), (g[:n], e[:n]))


def test_sequence_parallel_equals_one_rank() -> None:
    tensors, labels, _, g, e = make(48, 48)
    n = N // 2 * 2
    hidden, weight = tensors["hidden"][:n].requires_grad_(), tensors["weight"].requires_grad_()
    out = linear_log_probs(hidden, weight, labels[:n])
    d_hidden, d_weight = torch.autograd.grad((out.log_probs, out.entropy), (hidden, weight), (g[:n], e[:n]))
    ranks = run_ranks(2, sequence_parallel)
    torch.testing.assert_close(torch.cat([own[0] for own in ranks]), d_hidden, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([own[1] for own in ranks]), d_weight, rtol=1e-10, atol=1e-10)


def disagreeing(rank: int, size: int) -> str:
    tensors, labels, *_ = make(48, 48)
    n = N - rank
    try:
        linear_log_probs(tensors["hidden"][:n], tensors["weight"][:24], labels[:n], tp_group=dist.group.WORLD)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_debug_names_what_the_ranks_disagree_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGITLESS_DEBUG", "1")
    for said in run_ranks(2, disagreeing):
        assert said.startswith("InvalidInputError")
        assert "labels' shape: rank 0 has (37,), rank 1 has (36,)" in said


def test_disagreeing_ranks_fail_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGITLESS_DEBUG", raising=False)
    started = time.monotonic()
    try:
        said = run_ranks(2, disagreeing, seconds=10)
    except RuntimeError as error:
        said = [str(error)]
    assert time.monotonic() - started < 40
    assert any(text != "no error" for text in said)


def bad_groups(rank: int, size: int) -> list[str]:
    tensors, labels, *_ = make(48, 48)
    said = []
    alone = dist.new_group([0])
    for group, head in (
        ("not a group", tensors["weight"]),
        (alone, tensors["weight"]),
        (dist.group.WORLD, LMHead(tensors["weight"][:24], vocab_start=24 * rank)),
        (None, LMHead(tensors["weight"][:24], vocab_start=24)),
    ):
        try:
            linear_log_probs(tensors["hidden"], head, labels, tp_group=group)
            said.append("no error")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_bad_groups() -> None:
    said = run_ranks(2, bad_groups)[1]
    assert said[0] == "InputTypeError: tp_group: got str, expected a torch.distributed ProcessGroup"
    assert "this process is not one of its ranks" in said[1]
    assert said[2].startswith("InvalidInputError: head.vocab_size: got None with vocab_start")
    assert said[3].startswith("InvalidInputError: head.vocab_start: got 24 without a tp_group")


def one_rank_compiled(rank: int, size: int) -> list[bool]:
    from logitless._ops import linear_log_probs_op

    tensors, labels, _, g, e = make(48, 48, torch.float32)
    hidden, weight = tensors["hidden"].requires_grad_(), tensors["weight"].requires_grad_()
    same = []
    for keep_bytes in (0, 1 << 12):

        def score(hidden, weight, keep_bytes=keep_bytes):
            out = linear_log_probs(hidden, weight, labels, tp_group=dist.group.WORLD, keep_bytes=keep_bytes)
            return out.log_probs, out.entropy

        compiled = torch.compile(score, fullgraph=True, backend="aot_eager")
        one, other = score(hidden, weight), compiled(hidden, weight)
        one += torch.autograd.grad(one, (hidden, weight), (g, e))
        other += torch.autograd.grad(other, (hidden, weight), (g, e))
        same += [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
        numbers = (1.0, 1.0, None, 0, 48, -100, 1 << 20, True, "torch", dist.group.WORLD.group_name, True, None, None)
        args = (hidden, weight, None, None, None, labels, None, *numbers, True, True, keep_bytes, [])
        same += [told == "SUCCESS" for told in torch.library.opcheck(linear_log_probs_op, args).values()]
    return same


def test_one_rank_group_compiles_and_passes_opcheck() -> None:
    same = run_ranks(1, one_rank_compiled, seconds=120)[0]
    assert len(same) == 16
    assert all(same)
