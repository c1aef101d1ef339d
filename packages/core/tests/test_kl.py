"""What core does around a backend's divergences. The backend here is the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import logitless
from logitless import LMHead, linear_kl, reference
from logitless.errors import InputTypeError, InvalidInputError, UnsupportedError
from logitless.kl import _backward_op, linear_kl_op
from logitless.testing import ReferenceBackend, installed
from logitless.testing.divergence import DivergenceConformance, check_divergence, random_divergence
from logitless.types import Gradients, Problem, Request

pytestmark = pytest.mark.usefixtures("reference_backend")


class TestReferenceDivergence(DivergenceConformance):
    backend = "reference"
    dtypes = (torch.float64, torch.float16)
    sharded = False


def test_equals_its_docstring() -> None:
    torch.manual_seed(0)
    hidden, weight, ref_hidden, ref_weight = (torch.randn(*shape) for shape in ((5, 4), (7, 4), (5, 3), (7, 3)))
    log_p = (hidden @ weight.T / 0.7).log_softmax(-1)
    log_q = (ref_hidden @ ref_weight.T / 0.7).log_softmax(-1)
    got = linear_kl(hidden, weight, ref_hidden, ref_weight, temperature=0.7)
    torch.testing.assert_close(got, (log_q.exp() * (log_q - log_p)).sum(-1))
    got = linear_kl(hidden, weight, ref_hidden, ref_weight, temperature=0.7, direction="reverse")
    torch.testing.assert_close(got, (log_p.exp() * (log_p - log_q)).sum(-1))
    mixture = 0.2 * log_q.exp() + 0.8 * log_p.exp()
    want = sum(share * (log.exp() * (log - mixture.log())).sum(-1) for share, log in ((0.2, log_q), (0.8, log_p)))
    got = linear_kl(hidden, weight, ref_hidden, ref_weight, temperature=0.7, direction="jsd", beta=0.2)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("direction", "keep_bytes"), [("forward", 1 << 12), ("jsd", 0)])
def test_opcheck(direction: str, keep_bytes: int) -> None:
    case = random_divergence(9, direction=direction, dtype=torch.float32, bias=True, lora=(2,), vocab=43)
    fresh = case.student.fresh()
    found: list[Any] = []

    class Recording(ReferenceBackend):
        name = "recording"

    with installed(Recording(), alone=True):
        original, logitless.kl._Plain.apply = (
            logitless.kl._Plain.apply,
            lambda *args: found.extend(args) or args[0].sum(),
        )
        try:
            with pytest.raises(RuntimeError):
                replace(case, student=fresh).value(keep_bytes=keep_bytes)
        finally:
            logitless.kl._Plain.apply = original
        torch.library.opcheck(linear_kl_op, tuple(found))
        with torch.no_grad():
            _, *made = linear_kl_op(*found)
        assert bool(made[1].numel()) == bool(keep_bytes)
        still = tuple(x.detach() if isinstance(x, Tensor) else x for x in found)
        grad = case.student.grad_log_probs
        sound = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        for needs in ([True] * 5, [True] + 4 * [False]):
            torch.library.opcheck(_backward_op, (*still, *made, grad, needs), test_utils=sound)


def test_second_derivatives_are_refused() -> None:
    case = random_divergence(5)
    fresh = replace(case, student=case.student.fresh())

    def twice() -> None:
        (grad,) = torch.autograd.grad(fresh.value().sum(), fresh.student.hidden, create_graph=True)
        grad.sum().backward()

    with pytest.raises(UnsupportedError, match="first derivatives only"):
        twice()


def test_activation_checkpointing_gives_the_same_bits() -> None:
    from torch.utils.checkpoint import checkpoint

    case = random_divergence(5, dtype=torch.float32)
    want = case.run()
    fresh = replace(case, student=case.student.fresh())

    def call(hidden: Tensor) -> Tensor:
        return replace(fresh, student=replace(fresh.student, hidden=hidden)).value()

    value = checkpoint(call, fresh.student.hidden, use_reentrant=False)
    leaves = list(fresh.student.leaves().values())
    got = torch.autograd.grad(value, leaves, case.student.grad_log_probs)
    assert all(torch.equal(a, b) for a, b in zip(got, want[1].values(), strict=True) if b is not None)


@pytest.mark.parametrize("leaf", ["hidden", "weight", "bias", "lora_u0", "lora_b0"])
def test_a_reference_that_requires_grad_is_refused(leaf: str) -> None:
    case = random_divergence(5, ref={"bias": True, "lora": (2,)})
    frozen = set(case.teacher.leaves()) - {leaf}
    wants = replace(case, teacher=case.teacher.fresh(frozen))
    with pytest.raises(InvalidInputError, match=r"requires grad, but the reference gets no gradient; .*detach"):
        wants.value()
    with torch.no_grad():  # nothing is wanted
        assert torch.equal(wants.value(), case.value())


def test_a_reference_from_inference_mode_is_told_by_name() -> None:
    """torch's own words, that it cannot be saved, leave open what."""
    case = random_divergence(5)
    case = replace(case, student=case.student.fresh(()))
    with torch.inference_mode():
        made = replace(case, teacher=replace(case.teacher, hidden=case.teacher.hidden.clone()))
    with pytest.raises(InvalidInputError, match=r"ref_hidden, ref_head: .* under torch.inference_mode.*clone"):
        made.value()
    with torch.no_grad():  # nothing is saved
        assert torch.equal(made.value(), case.value())


def test_autocast_equals_the_explicit_cast() -> None:
    case = random_divergence(9, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = case.run()
    want = case.to(torch.bfloat16).run()
    assert torch.equal(got[0], want[0])
    for name, grad in got[1].items():
        assert grad is not None
        assert grad.dtype == torch.float32
        assert torch.equal(grad.bfloat16(), want[1][name])  # type: ignore[arg-type]


class Without(ReferenceBackend):
    """As backends were before there were divergences."""

    name = "without"
    priority = 100
    kl_forward = property()  # type: ignore[assignment]  # hasattr says no


def test_a_backend_without_divergences_is_refused_by_name_and_passed_over() -> None:
    case = random_divergence(5)
    with installed(Without(), ReferenceBackend(), alone=True):
        assert torch.equal(case.value(), case.value(backend="reference"))
        with pytest.raises(UnsupportedError, match=r"'without' cannot serve this call: it computes no divergences"):
            case.value(backend="without")
    with installed(Without(), alone=True), pytest.raises(UnsupportedError, match="linear_kl"):
        case.value()


class Forgetful:
    """A backend of divergences that was written before anything of them was kept."""

    name, priority, protocol = "forgetful", 100, 1

    def supports(self, request: Request) -> str | None:
        return None

    def kl_forward(self, student: Problem, teacher: Problem, *, direction: str, beta: float) -> tuple[Tensor, Tensor]:
        return ReferenceBackend().kl_forward(student, teacher, direction=direction, beta=beta)

    def kl_backward(self, *args: Any, direction: str, beta: float) -> Gradients:
        return ReferenceBackend().kl_backward(*args, direction=direction, beta=beta)


def test_a_backend_that_keeps_nothing_serves_whatever_keep_bytes_is() -> None:
    case = random_divergence(5)
    with installed(Forgetful(), alone=True):
        check_divergence(case.run(keep_bytes=1 << 20), case)


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    asked = []

    class Asked(ReferenceBackend):
        name = "asked"

        def kl_kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
            asked.append((request.ref_dtypes, keep_bytes))
            return super().kl_kept_shape(request, keep_bytes)

    case = random_divergence(5, dtype=torch.float32)
    with installed(Asked(), alone=True):
        case.value(keep_bytes=1 << 20)
        assert not asked
        case.run(keep_bytes=1 << 20)
    assert asked == [((torch.float32, torch.float32), 1 << 20)]


def test_what_is_kept_is_read() -> None:
    """Its own gradients, not those of the inputs as they have become since."""
    case = random_divergence(5, ignored=False)
    fresh = replace(case, student=case.student.fresh())
    kept = replace(fresh, teacher=replace(fresh.teacher, hidden=fresh.teacher.hidden.clone()))
    value = kept.value(keep_bytes=1 << 20)
    kept.teacher.hidden.data.zero_()
    grads = torch.autograd.grad(value, list(fresh.student.leaves().values()), case.student.grad_log_probs)
    check_divergence((value, dict(zip(fresh.student.leaves(), grads, strict=True))), case)


ONE = torch.randn(5, 4)
HEAD = torch.randn(7, 4)
WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no tensor": (InputTypeError, "ref_hidden: got list", {"ref_hidden": [1.0]}),
    "other tokens": (InvalidInputError, r"ref_hidden: got shape \(6, 4\)", {"ref_hidden": torch.randn(6, 4)}),
    "ref width": (InvalidInputError, r"ref_head.weight: got shape \(7, 3\)", {"ref_head": torch.randn(7, 3)}),
    "width": (InvalidInputError, r"^head.weight: got shape \(7, 3\)", {"head": torch.randn(7, 3)}),
    "workspace": (InvalidInputError, "^workspace_bytes: got 0, expected", {"workspace_bytes": 0}),
    "memory to keep": (InvalidInputError, "^keep_bytes: got -1, expected", {"keep_bytes": -1}),
    "ref head": (InputTypeError, "ref_head: got str", {"ref_head": "head"}),
    "vocabularies": (
        InvalidInputError,
        r"ref_head: has 9 vocab rows.*head has 7.*set vocab_size",
        {"ref_head": torch.randn(9, 4)},
    ),
    "direction": (InvalidInputError, "direction: got 'sideways'", {"direction": "sideways"}),
    "beta": (InvalidInputError, "beta: got 1.0", {"beta": 1.0}),
    "beta's type": (InputTypeError, "beta: got str", {"beta": "half"}),
    "mask's dtype": (InputTypeError, r"mask: got torch.int64", {"mask": torch.ones(5, dtype=torch.int64)}),
    "mask's shape": (InvalidInputError, r"mask: got shape \(4,\)", {"mask": torch.ones(4, dtype=torch.bool)}),
    "grad_buffer": (InvalidInputError, "head.grad_buffer", {"head": LMHead(HEAD, grad_buffer=torch.zeros(7, 4))}),
    "dtypes": (InvalidInputError, "computed in torch.float64", {"ref_hidden": ONE.double(), "ref_head": HEAD.double()}),
    "temperature": (InvalidInputError, "temperature: got 0.0", {"temperature": 0.0}),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what: str) -> None:
    kind, message, changed = WRONG[what]
    arguments = {"hidden": ONE, "head": HEAD, "ref_hidden": ONE, "ref_head": HEAD, **changed}
    with pytest.raises(kind, match=message):
        linear_kl(**arguments)


def test_padding_may_differ() -> None:
    student, teacher = LMHead(torch.randn(9, 4), vocab_size=7), LMHead(torch.randn(12, 4), vocab_size=7)
    torch.testing.assert_close(
        linear_kl(ONE, student, ONE, teacher),
        reference.linear_kl(ONE, LMHead(student.weight[:7]), ONE, LMHead(teacher.weight[:7])),
    )
