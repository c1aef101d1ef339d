"""Divergences of two heads: the contract, finite differences, properties, memory and work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logitless import linear_kl
from logitless.testing import AllocationGuard, MemoryTracker, ProductCounter
from logitless.testing.divergence import DIRECTIONS, Divergence, DivergenceConformance, random_divergence

each_direction = pytest.mark.parametrize("direction", DIRECTIONS)


class TestTorchDivergence(DivergenceConformance):
    backend = "torch"
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jensen_shannon_next_to_its_reference_keeps_its_digits(beta: float) -> None:
    """About 1e-8 nats, where each of its two parts is off by a rounding of 1: more than the whole."""
    case = random_divergence(100, direction="jsd", beta=beta, dtype=torch.float32, vocab=300, std=2.0)
    weight = case.student.head.weight
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    case = replace(case, teacher=case.student.with_head(weight=weight.detach() + 1e-4 * noise))
    value, (want, _) = case.value(backend="torch"), case.truth()
    torch.testing.assert_close(value.double(), want, rtol=0.1, atol=1e-9)


@each_direction
@pytest.mark.parametrize("capped", [False, True])
def test_gradcheck(direction: str, capped: bool) -> None:
    options = {"softcap": 3.0, "scale": 0.7, "per_token_temperature": True} if capped else {}
    case = random_divergence(
        5,
        direction=direction,
        beta=0.3,
        vocab=13,
        hidden_size=4,
        std=1.0,
        bias=True,
        lora=(2,),
        vocab_size=11,
        **options,
    )
    student = case.student.fresh()

    def call(*leaves: torch.Tensor) -> torch.Tensor:
        named = student.with_leaves(dict(zip(student.leaves(), leaves, strict=True)))
        return replace(case, student=named).value(backend="torch", workspace_bytes=3000)

    assert torch.autograd.gradcheck(call, tuple(student.leaves().values()))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    std=st.sampled_from([1e-4, 0.1, 1.0, 8.0, 50.0]),
    vocab=st.integers(1, 40),
    beta=st.floats(0.01, 0.99),
    offset=st.floats(-1e3, 1e3),
)
def test_properties(seed: int, std: float, vocab: int, beta: float, offset: float) -> None:
    """Never negative; 0 between equals; jsd at most its mixture's entropy and turned over with 1 − beta; shifts."""
    noise = torch.Generator().manual_seed(seed)
    z, y = (torch.randn(3, vocab, generator=noise, dtype=torch.float64) * std for _ in range(2))
    eye, largest = torch.eye(vocab, dtype=torch.float64), -(beta * torch.log(torch.tensor(beta)))
    largest = largest - (1 - beta) * torch.log1p(torch.tensor(-beta))
    for direction in DIRECTIONS:
        value = linear_kl(z, eye, y, eye, direction=direction, beta=beta, backend="torch")
        assert (value >= 0).all()
        assert not linear_kl(z, eye, z, eye, direction=direction, beta=beta, backend="torch").gt(1e-12).any()
        moved = linear_kl(z + offset, eye, y - offset, eye, direction=direction, beta=beta, backend="torch")
        torch.testing.assert_close(moved, value, rtol=1e-9, atol=1e-9)
    assert (value <= float(largest) + 1e-6).all()
    turned = linear_kl(y, eye, z, eye, direction="jsd", beta=1 - beta, backend="torch")
    torch.testing.assert_close(turned, value, rtol=1e-9, atol=1e-12)


TOKENS, VOCAB, HIDDEN, OTHER, TIGHT = 200, 2048, 128, 192, 1 << 19


def sized(direction: str, dtype: torch.dtype) -> Divergence:
    return random_divergence(
        TOKENS,
        direction=direction,
        vocab=VOCAB,
        hidden_size=HIDDEN,
        ref_hidden_size=OTHER,
        dtype=dtype,
        ignored=False,
        ref={"ignored": False},
    )


@each_direction
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_memory_stays_within_its_workspace(direction: str, dtype: torch.dtype) -> None:
    """The logits are three times (in float64 six times) the workspace; nothing of [tokens, vocab] is ever made."""
    case = sized(direction, dtype)
    fresh = replace(case, student=case.student.fresh())
    wide = torch.promote_types(dtype, torch.float32).itemsize
    few = TOKENS * 16 * 8
    with MemoryTracker() as tracker:
        value = fresh.value(backend="torch", workspace_bytes=TIGHT)
    assert tracker.peak_bytes <= TIGHT + few
    leaves = list(fresh.student.leaves().values())
    with MemoryTracker() as tracker, AllocationGuard(max(TIGHT, VOCAB * HIDDEN * wide)):
        torch.autograd.grad(value, leaves, case.student.grad_log_probs)
    gradients = sum(leaf.numel() * (leaf.itemsize + (wide if leaf.itemsize < wide else 0)) for leaf in leaves)
    assert tracker.peak_bytes <= gradients + TIGHT + few


@each_direction
@pytest.mark.parametrize(
    ("frozen", "products"), [((), 2), (("weight",), 1), (("hidden",), 1)], ids=["nothing", "weight", "hidden"]
)
def test_work(direction: str, frozen: tuple[str, ...], products: int) -> None:
    """Both heads' logits once a sweep; again, and the products of what is not frozen, in the backward."""
    case = sized(direction, torch.float32)
    fresh = replace(case, student=case.student.fresh(frozen))
    both, own = 2 * TOKENS * VOCAB * (HIDDEN + OTHER), 2 * TOKENS * VOCAB * HIDDEN
    with ProductCounter() as forward:
        value = fresh.value(backend="torch")
    assert forward.flops == (2 if direction == "jsd" else 1) * both
    with ProductCounter() as backward:
        value.sum().backward()
    assert backward.flops == both + products * own


@each_direction
def test_what_is_kept_is_made_once(direction: str) -> None:
    """All of it, or more: one sweep's products forward, none of logits in the backward. Half of it: half of them."""
    case = sized(direction, torch.float32)
    both, own, whole = 2 * TOKENS * VOCAB * (HIDDEN + OTHER), 2 * TOKENS * VOCAB * HIDDEN, 8 * TOKENS * VOCAB
    for share, made_again in ((3.0, 0.0), (1.0, 0.0), (0.5, 0.5)):
        fresh = replace(case, student=case.student.fresh())
        options = {"keep_bytes": int(whole * share), "workspace_bytes": 1 << 20}
        with ProductCounter() as forward, MemoryTracker() as tracker:
            value = fresh.value(backend="torch", **options)
        sweeps = 1 + (made_again if direction == "jsd" else 0)
        assert forward.flops == pytest.approx(sweeps * both, rel=0.05)
        allowed = min(options["keep_bytes"], whole) + TOKENS * 16 * 8
        assert tracker.live_bytes <= allowed
        assert tracker.peak_bytes <= allowed + options["workspace_bytes"]
        with ProductCounter() as backward:
            value.sum().backward()
        assert backward.flops == pytest.approx(made_again * both + 2 * own, rel=0.05)


def test_an_odd_number_of_logits_is_kept_to_the_last() -> None:
    tokens, vocab, hidden_size = 5, 7, 16
    sizes = {"vocab": vocab, "hidden_size": hidden_size, "dtype": torch.float32}
    case = random_divergence(tokens, **sizes, ignored=False, ref={"ignored": False})
    value = replace(case, student=case.student.fresh()).value(backend="torch", keep_bytes=2 * tokens * vocab * 4)
    with ProductCounter() as counter:
        value.sum().backward()
    assert counter.flops == 2 * 2 * tokens * hidden_size * vocab


def test_masked_tokens_cost_nothing() -> None:
    case = sized("forward", torch.float32)
    case.student.labels[TOKENS // 10 :] = -100
    with ProductCounter() as counter:
        case.value(backend="torch")
    assert counter.flops == 2 * (TOKENS // 10) * VOCAB * (HIDDEN + OTHER)


def test_teacher_and_student_of_other_dtypes() -> None:
    """A bf16 teacher beside an fp32 student: each in its own."""
    case = sized("reverse", torch.float32)
    mixed = replace(case, teacher=case.teacher.to(torch.bfloat16))
    wide = replace(mixed, teacher=mixed.teacher.to(torch.float32))
    torch.testing.assert_close(mixed.value(backend="torch"), wide.value(backend="torch"))
