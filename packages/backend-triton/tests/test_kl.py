"""Divergences of two heads: the contract, on the GPU if there is one, else in the interpreter; sharded vocabularies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitless import linear_kl
from logitless.errors import UnsupportedError
from logitless.testing import AllocationGuard
from logitless.testing.divergence import DIRECTIONS, DivergenceConformance, Found, check_divergence, random_divergence
from logitless.testing.memory import poisoned
from logitless.types import Request
from logitless_triton import layout

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says aloud what a GPU does silently


class TestTritonDivergence(DivergenceConformance):
    backend = "triton"
    device = DEVICE
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if HAS_GPU else (torch.float32, torch.float16)


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_jensen_shannon_next_to_its_reference_is_not_too_large(beta: float) -> None:
    """About 1e-8 nats, where each of its two parts is off by a rounding of 1: clamped at 0, they no longer cancel."""
    case = random_divergence(100, direction="jsd", beta=beta, dtype=torch.float32, vocab=300, std=2.0, device=DEVICE)
    weight = case.student.head.weight.detach()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    case = replace(case, teacher=case.student.with_head(weight=weight + 1e-4 * noise))
    value, (want, _) = case.value(backend="triton"), case.truth()
    assert abs(float((value.double() - want).mean().detach())) < 4e-9


@pytest.mark.skipif(HAS_GPU, reason="what the kernels' launchers allocate is seen on the CPU")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_of_tokens_by_vocabulary_is_held(direction: str) -> None:
    """Both heads' logits are 12 times the workspace; in the backward the largest is d_weight, a sixth of them."""
    tokens, vocab, workspace = 48, 2048, 1 << 16
    case = random_divergence(tokens, direction=direction, vocab=vocab, hidden_size=16, dtype=torch.float32)
    fresh = replace(case, student=case.student.fresh())
    gradient = vocab * 16 * 4
    with AllocationGuard(workspace):
        value = fresh.value(backend="triton", workspace_bytes=workspace)
    with AllocationGuard(max(workspace, gradient)):
        grads = torch.autograd.grad(value, list(fresh.student.leaves().values()), case.student.grad_log_probs)
    check_divergence((value, dict(zip(case.student.leaves(), grads, strict=True))), case)


@pytest.mark.parametrize("head", [{}, {"bias": True, "per_token_temperature": True}], ids=["plain", "full"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_part_of_a_blocks_tokens(direction: str, head: dict[str, bool]) -> None:
    """The backward makes the logits of at most 128 of these again at a time, and of some columns only."""
    case = random_divergence(300, direction=direction, dtype=torch.float32, vocab=1500, device=DEVICE, **head)
    check_divergence(case.run(backend="triton", workspace_bytes=5 << 19), case)


@pytest.mark.parametrize(
    ("direction", "keep_bytes", "heads"),
    [("forward", 0, 1), ("reverse", 0, 1), ("reverse", 1 << 20, 2), ("jsd", 0, 2)],
)
def test_the_student_is_held_only_to_be_looked_at_again(
    direction: str, keep_bytes: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the teacher has the workspace, but for the tiles' partial statistics, and chunks are twice as long."""
    from logitless_triton import kl  # with Triton, when its interpreter has been chosen

    shares, original = [], kl.Held
    monkeypatch.setattr(kl, "Held", lambda work: shares.append(work.problem.workspace_bytes) or original(work))
    case = random_divergence(20, direction=direction, dtype=torch.float32, device=DEVICE, vocab=500, ignored=False)
    case.run(backend="triton", workspace_bytes=32_000, keep_bytes=keep_bytes)
    assert shares == {1: [31_000], 2: [16_000, 16_000]}[heads]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bits_do_not_depend_on_the_number_of_tokens(direction: str) -> None:
    """Nor on what else is made of them."""
    case = random_divergence(70, direction=direction, dtype=torch.float32, device=DEVICE, vocab=300, ignored=False)
    whole, s, t = case.value(backend="triton"), case.student, case.teacher
    assert torch.equal(case.run(backend="triton", workspace_bytes=1 << 16, keep_bytes=1 << 15)[0], whole)
    for count in (1, 17):
        few = linear_kl(s.hidden[:count], s.head, t.hidden[:count], t.head, direction=direction, backend="triton")
        assert torch.equal(few, whole[:count])


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("far", [1e2, 1e5])
def test_tiles_that_differ_by_more_than_exponents_hold(direction: str, far: float) -> None:
    """The teacher's weight lies in one tile and the student's in another, or in all: KL of up to 1e5 nats."""
    case = random_divergence(
        9, direction=direction, dtype=torch.float32, device=DEVICE, vocab=300, bias=True, ref={"bias": True}
    )
    for name, first in (("student", 0), ("teacher", 200)):
        example = getattr(case, name)
        bias = torch.full_like(example.head.bias, -far)
        bias[first : first + 90] = 0.0
        case = case.with_one(name, example.with_head(bias=bias))
        value, grads = case.run(backend="triton")
        check_divergence((value, grads), case)
    assert float(value.detach().max()) > far / 2


each_kept = pytest.mark.parametrize("kept_in", [torch.float32, torch.float16], ids=["float32", "float16"])


def kept_as(monkeypatch: pytest.MonkeyPatch, kept_in: torch.dtype) -> None:
    """Float32's dz in another dtype: bfloat16's is in float16, and the interpreter has no bfloat16 products."""
    monkeypatch.setitem(layout.DZ, torch.float32, kept_in)


def off(got: Found, want: Found) -> dict[str, float]:
    """Relative L2 errors of gradients."""
    assert torch.equal(got[0], want[0])
    pairs = {name: (grad.double(), want[1][name].double()) for name, grad in got[1].items()}
    return {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


@each_kept
@pytest.mark.parametrize(("std", "upstream"), [(0.5, 1e-20), (3.0, 1.0), (60.0, 1e20)], ids=["flat", "some", "peaked"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kept_dz(
    direction: str, std: float, upstream: float, kept_in: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off by one rounding to what it is kept in: of almost equal and of disjoint distributions, for any gradient."""
    kept_as(monkeypatch, kept_in)
    case = random_divergence(
        21, direction=direction, beta=0.3, vocab=400, vocab_size=390, std=std, dtype=torch.float32, device=DEVICE,
        bias=True, softcap=50.0, scale=-0.7, lora=(3,),
    )  # fmt: skip
    case = replace(case, student=case.student.scale_upstream(upstream))
    want = case.run(backend="triton")
    if std == 60.0:
        assert direction == "jsd" or float(want[0].detach().max()) > 20
    # A GPU's logits may be made again in other code, an ulp of 50 away.
    item, allowed = kept_in.itemsize, {torch.float16: 2.0**-11, torch.float32: 5e-5 if HAS_GPU else 1e-6}[kept_in]
    for columns in (128, 256, 512):
        got = case.run(backend="triton", keep_bytes=21 * columns * item + 100)
        assert max(off(got, want).values()) < allowed
        if columns == 512 and not HAS_GPU:
            assert (max(off(got, want).values()) > 1e-5) == (kept_in == torch.float16)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_kept_columns_are_not_made_again(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing from logits where all are kept; more columns fit of fewer tokens; where none fits, none is kept."""
    from logitless_triton import kl  # with Triton, when its interpreter has been chosen

    firsts, original = [], kl._from_logits
    monkeypatch.setattr(kl, "_from_logits", lambda *args: firsts.append(args[6]) or original(*args))
    case = random_divergence(24, direction=direction, vocab=500, dtype=torch.float32, device=DEVICE, ignored=False)
    case.run(backend="triton", keep_bytes=24 * 512 * 4)
    assert not firsts
    case.run(backend="triton", keep_bytes=24 * 512 * 4 - 1)
    case.run(backend="triton", keep_bytes=24 * 128 * 4 - 1)
    assert firsts == [384, 0]
    few = replace(case, student=replace(case.student, labels=case.student.labels.clone()))
    few.student.labels[::2] = -100
    check_divergence(few.run(backend="triton", keep_bytes=24 * 128 * 4), few)
    assert firsts == [384, 0, 256]
    few.run(backend="triton", keep_bytes=24 * 256 * 4)
    assert len(firsts) == 3


@each_kept
@pytest.mark.parametrize("live", [0, 5, 13])
def test_all_that_is_kept_is_written(live: int, kept_in: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that reads as NaN until it is written: none of it is handed over."""
    kept_as(monkeypatch, kept_in)
    case = random_divergence(13, vocab=411, vocab_size=400, dtype=torch.float32, device=DEVICE, ignored=False)
    case.student.labels[live:] = -100
    item, saved = kept_in.itemsize, []
    for keep_bytes in (13 * 200 * item, 13 * 512 * item):
        fresh = replace(case, student=case.student.fresh())
        with poisoned(), torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            value = fresh.value(backend="triton", keep_bytes=keep_bytes)
        (kept,) = (x for x in saved if x.dtype == torch.uint8)
        assert keep_bytes // 2 < kept.nbytes <= keep_bytes
        assert kept.view(kept_in).isfinite().all()
        with poisoned():
            grads = torch.autograd.grad(value, list(fresh.student.leaves().values()), case.student.grad_log_probs)
        if live:
            tolerance = {torch.float16: {"rtol": 1e-2, "atol": 1e-4}}.get(kept_in, {"rtol": 1e-4, "atol": 1e-6})
            for grad, want in zip(grads, case.run(backend="triton")[1].values(), strict=True):
                torch.testing.assert_close(grad, want, **tolerance)
        saved.clear()


@given(n=st.integers(0, 70), vocab=st.integers(1, 2000), keep_bytes=st.integers(0, 1 << 20), some=st.floats(0.0, 1.0))
def test_room_for_dz(n: int, vocab: int, keep_bytes: int, some: float) -> None:
    """Within what is allowed, and within 128 columns of it; of fewer tokens, no fewer columns."""
    for dtype, item in ((torch.bfloat16, 2), (torch.float16, 4), (torch.float32, 4)):
        request = Request(torch.device("cpu"), dtype, dtype, n_tokens=n, hidden_size=8, vocab_rows=vocab)
        length = layout.divergence_length(request, keep_bytes)
        columns = layout.divergence_columns(length, n, vocab, dtype)
        assert length == n * columns * item <= keep_bytes
        assert not n or columns >= vocab or (columns + 128) * n * item > keep_bytes
        fewer = layout.divergence_columns(length, int(n * some), vocab, dtype)
        assert fewer * int(n * some) * item <= length
        assert fewer >= columns or not int(n * some)


@pytest.mark.parametrize("upstream", [1e-4, 1.0])
def test_float16_has_room_for_large_divergences(upstream: float) -> None:
    """p = (½, ½) against q = (1, e^-1200): dz = ±300 times a scale of 2^8 for the largest g alone would be infinite."""
    hidden, weight = torch.ones(1, 1, dtype=torch.float16, device=DEVICE), torch.zeros(2, 1, device=DEVICE).half()
    weight.requires_grad_()
    ref = torch.tensor([[0.0], [-1200.0]], dtype=torch.float16, device=DEVICE)
    value = linear_kl(hidden, weight, hidden, ref, direction="reverse", backend="triton")
    (grad,) = torch.autograd.grad(value, weight, torch.full_like(value, upstream))
    torch.testing.assert_close(
        grad.flatten().float().cpu(), torch.tensor([-300.0, 300.0]) * upstream, rtol=2e-3, atol=0
    )


def test_dtypes_of_the_reference_are_asked_about() -> None:
    """A reference in float64 is not served, whatever the student is; by hand so, and by the choice of another."""
    case = random_divergence(5, dtype=torch.float32, device=DEVICE)
    wide = replace(case, teacher=case.teacher.to(torch.float64))
    with pytest.raises(UnsupportedError, match="torch.float64, and it serves"):
        wide.value(backend="triton")
