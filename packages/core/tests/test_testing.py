"""The testing kit itself: each check goes red on a backend with the defect that it is for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.optests import OpCheckError

import logitless
from logitless.testing import (
    AllocationGuard,
    MemoryTracker,
    ProductCounter,
    ReferenceBackend,
    cases,
    check_gradients,
    check_results,
    check_scores,
    floor_gradients,
    installed,
    random_example,
)
from logitless.testing._conformance import OPTIONS
from logitless.testing._kit import same
from logitless.testing.conformance import BackendConformance
from logitless.testing.divergence import DivergenceConformance, check_divergence, random_divergence
from logitless.types import Forwarded, Gradients, PolicyResult, Problem, Request


class Broken(ReferenceBackend):
    """The reference with one defect."""

    name = "broken"
    kept = 0

    def kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        return (min(self.kept, keep_bytes),)


def forward(change: Callable[[Problem, Forwarded], Forwarded]) -> type[Broken]:
    """A backend whose forward's result is changed."""

    class Defect(Broken):
        kept = 8

        def forward(
            self, problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]
        ) -> Forwarded:
            return change(
                problem, super().forward(problem, entropy=entropy, entropy_grad=entropy_grad, kept_shape=kept_shape)
            )

    return Defect


def backward(change: Callable[[Problem, Gradients], Gradients]) -> type[Broken]:
    """A backend whose backward's result is changed."""

    class Defect(Broken):
        def backward(self, problem: Problem, *rest: Any) -> Gradients:
            return change(problem, super().backward(problem, *rest))

    return Defect


def reading(change: Callable[[Problem], Problem]) -> type[Broken]:
    """A backend that misreads its problem, forward and backward."""

    class Defect(Broken):
        def forward(self, problem: Problem, **keywords: Any) -> Forwarded:
            return super().forward(change(problem), **keywords)

        def backward(self, problem: Problem, *rest: Any) -> Gradients:
            return super().backward(change(problem), *rest)

    return Defect


def drift() -> type[Broken]:
    calls = []

    def change(problem: Problem, out: Forwarded) -> Forwarded:
        calls.append(None)
        return replace(out, log_probs=out.log_probs * (1 - 2e-7 * len(calls)))

    return forward(change)


class DropsEntropyGradient(Broken):
    def backward(
        self, problem: Problem, stats: Tensor, kept: Tensor, g: Tensor, e: Tensor | None, *rest: Any
    ) -> Gradients:
        return super().backward(problem, stats, kept, g, None, *rest)


class RemembersTheLastForward(Broken):
    def forward(self, problem: Problem, **keywords: Any) -> Forwarded:
        self.last = problem
        return super().forward(problem, **keywords)

    def backward(self, problem: Problem, *rest: Any) -> Gradients:
        return super().backward(self.last, *rest)


class MakesAllGradients(Broken):
    def backward(self, *arguments: Any) -> Gradients:
        *rest, needs, buffer = arguments
        return super().backward(*rest, replace(needs, hidden=True, weight=True, bias=needs.bias), buffer)


class OverwritesTheBuffer(Broken):
    def backward(self, *arguments: Any) -> Gradients:
        *rest, buffer = arguments
        if buffer is not None:
            buffer.zero_()
        return super().backward(*rest, buffer)


class UsesKeptUp(Broken):
    kept = 8

    def backward(self, problem: Problem, stats: Tensor, kept: Tensor, g: Tensor, *rest: Any) -> Gradients:
        g = g * (1 - 0.1 * kept.float().mean()) if kept.numel() else g
        kept.data.fill_(1)  # behind autograd's back
        return super().backward(problem, stats, kept, g, *rest)


class KeepsMoreThanItTold(Broken):
    kept = 8

    def forward(self, problem: Problem, **keywords: Any) -> Forwarded:
        out = super().forward(problem, **keywords)
        return replace(out, kept=torch.cat((out.kept, out.kept)))


class OtherBitsInASinglePass(Broken):
    def policy_loss(self, *arguments: Any, **keywords: Any) -> PolicyResult:
        out = super().policy_loss(*arguments, **keywords)
        return replace(out, log_probs=out.log_probs * (1 - 2e-7))


class RoundsBeforeTheUpstreamGradient(Broken):
    def policy_loss(self, *arguments: Any, **keywords: Any) -> PolicyResult:
        out = super().policy_loss(*arguments, **keywords)
        made = (out.gradients.hidden, out.gradients.weight)
        d_hidden, d_weight = (None if grad is None else grad.half() for grad in made)
        return replace(out, gradients=replace(out.gradients, hidden=d_hidden, weight=d_weight))


class DependsOnTheEntropy(Broken):
    def forward(self, problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]) -> Forwarded:
        out = super().forward(problem, entropy=entropy, entropy_grad=entropy_grad, kept_shape=kept_shape)
        return out if entropy else replace(out, log_probs=out.log_probs * (1 - 2e-7))


def logits(problem: Problem) -> Tensor:
    hidden = problem.hidden if problem.live is None else problem.hidden[problem.live]
    z = (hidden @ problem.weight.T).float() * problem.scale
    return z if problem.bias is None else z + problem.bias


def labels(problem: Problem) -> Tensor:
    return problem.labels if problem.live is None else problem.labels[problem.live]


def unshifted(problem: Problem, out: Forwarded) -> Forwarded:
    z = logits(problem)
    return replace(out, log_probs=z.gather(1, labels(problem)[:, None])[:, 0] - z.exp().sum(1).log())


def label_of_another_sum(problem: Problem, out: Forwarded) -> Forwarded:
    """A label's logit that is one rounding away from the normaliser's: harmless, but for confident tokens."""
    z = logits(problem)
    return replace(out, log_probs=z.gather(1, labels(problem)[:, None])[:, 0] * (1 - 1e-6) - z.logsumexp(1))


def off(problem: Problem, out: Forwarded) -> Forwarded:
    return replace(out, log_probs=out.log_probs - 3e-4)


class ReadsItsStatistics(Broken):
    """Hands out a view of what its backward reads."""

    def forward(self, problem: Problem, **keywords: Any) -> Forwarded:
        out = super().forward(problem, **keywords)
        self.seen = out.log_probs
        return out

    def backward(self, problem: Problem, stats: Tensor, kept: Tensor, g: Tensor, *rest: Any) -> Gradients:
        return super().backward(problem, stats, kept, g * (1 + self.seen.max().clamp(min=0.0)), *rest)


def scaled(name: str, factor: float) -> Callable[[Problem, Gradients], Gradients]:
    def change(problem: Problem, grads: Gradients) -> Gradients:
        grad = getattr(grads, name)
        return grads if grad is None else replace(grads, **{name: grad * factor})

    return change


def leaky(problem: Problem, grads: Gradients) -> Gradients:
    return grads if grads.hidden is None else replace(grads, hidden=grads.hidden + 0.0 * grads.hidden.sum(0))


def nan_for_nothing(problem: Problem, grads: Gradients) -> Gradients:
    if problem.live is None or len(problem.live) or grads.weight is None:
        return grads
    return replace(grads, weight=grads.weight / 0.0)


def tight(problem: Problem, out: Forwarded) -> Forwarded:
    return off(problem, out) if problem.workspace_bytes < 1 << 14 else out


def finite(problem: Problem, out: Forwarded) -> Forwarded:
    return replace(out, log_probs=out.log_probs.clamp(min=-1e4))


def no_zero_times_infinity(problem: Problem, out: Forwarded) -> Forwarded:
    log_p = logits(problem).log_softmax(1)
    return replace(out, entropy=-(log_p.exp() * log_p).sum(1))


def below_zero(problem: Problem, out: Forwarded) -> Forwarded:
    return out if out.entropy is None else replace(out, entropy=out.entropy - 1e-6)


def kept_counts(problem: Problem, out: Forwarded) -> Forwarded:
    return replace(out, log_probs=out.log_probs * (1 - 2e-7)) if out.kept.numel() else out


def written(problem: Problem, grads: Gradients) -> Gradients:
    problem.hidden.detach().mul_(1.0)
    return grads


def by_column(problem: Problem) -> Problem:
    temperature = problem.temperature
    if not isinstance(temperature, Tensor) or len(temperature) != len(problem.weight):
        return problem
    weight = (problem.weight / temperature.unsqueeze(1)).to(problem.weight.dtype)
    return replace(problem, weight=weight, temperature=1.0)


def as_if_contiguous(problem: Problem) -> Problem:
    if problem.weight.is_contiguous():
        return problem
    flat = problem.weight.as_strided((problem.weight.numel(),), (1,))
    return replace(problem, weight=flat.view(problem.weight.shape))


def validated_only(problem: Problem, out: Forwarded) -> Forwarded:
    return out if problem.dead is None else off(problem, out)


grads_off = backward(scaled("hidden", 1.01))
weight_off = backward(scaled("weight", 1.01))
# check: the defect that it must catch, and its arguments
DEFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "test_cases": (forward(off), {"case": cases()[0]}),
    "test_options": (reading(lambda p: replace(p, softcap=None)), {"option": "softcap", "tokens": 13}),
    "test_leading_shapes": (grads_off, {}),
    "test_ordinary_sizes": (weight_off, {}),
    "test_temperatures": (reading(lambda p: replace(p, temperature=1.0)), {}),
    "test_per_token_temperature_with_as_many_tokens_as_vocab_rows": (reading(by_column), {}),
    "test_label_types": (drift(), {}),
    "test_entropy_is_optional": (DependsOnTheEntropy, {}),
    "test_entropy_grad_is_optional": (drift(), {}),
    "test_one_upstream_gradient": (DropsEntropyGradient, {"output": "entropy"}),
    "test_expanded_upstream_gradient": (DropsEntropyGradient, {}),
    "test_accumulates_over_backwards": (RemembersTheLastForward, {}),
    "test_frozen_inputs_get_none": (MakesAllGradients, {"frozen": ("weight",)}),
    "test_nothing_to_differentiate": (drift(), {}),
    "test_policy_loss": (OtherBitsInASinglePass, {"option": "plain", "workspace_bytes": 1 << 20}),
    "test_policy_loss_over_many_chunks": (OtherBitsInASinglePass, {}),
    "test_policy_loss_scaled_afterwards": (RoundsBeforeTheUpstreamGradient, {"dtype": torch.float16}),
    "test_repeats_bit_for_bit": (drift(), {}),
    "test_keep_bytes": (forward(kept_counts), {"share": 2.0}),
    "test_kept_memory_survives_a_second_backward": (UsesKeptUp, {}),
    "test_workspace_bytes": (forward(tight), {"workspace_bytes": 5000}),
    "test_compiled_equals_eager": (drift(), {"keep_bytes": 0}),
    "test_opcheck": (KeepsMoreThanItTold, {"keep_bytes": 4000}),
    "test_strided_hidden": (grads_off, {}),
    "test_strided_weight": (reading(as_if_contiguous), {}),
    "test_inputs_are_not_written": (backward(written), {"option": "plain"}),
    "test_outputs_are_the_callers": (ReadsItsStatistics, {}),
    "test_grad_buffer": (OverwritesTheBuffer, {}),
    "test_ignored_tokens_are_exactly_zero": (
        reading(lambda p: replace(p, dead=None)),
        {"garbage": float("nan"), "validate": False},
    ),
    "test_all_ignored": (backward(nan_for_nothing), {}),
    "test_unvalidated_equals_validated": (forward(validated_only), {"option": "plain"}),
    "test_unvalidated_bad_labels_give_nan_in_their_own_token": (backward(leaky), {}),
    "test_nan_stays_in_its_own_token": (backward(leaky), {"validate": True}),
    "test_scores_are_in_range": (forward(below_zero), {}),
    "test_common_offset": (forward(unshifted), {"offset": 1e4}),
    "test_minus_infinity": (forward(no_zero_times_infinity), {"cut": "some"}),
    "test_label_at_minus_infinity": (forward(finite), {}),
    "test_peaked": (forward(unshifted), {}),
    "test_vocabulary_of_one": (forward(off), {}),
    "test_confident_tokens_keep_their_digits": (forward(label_of_another_sum), {}),
}
CHECKS = [name for name, _ in inspect.getmembers(BackendConformance, inspect.isfunction) if name.startswith("test_")]


def run_check(name: str, backend_class: type[ReferenceBackend], arguments: dict[str, Any]) -> None:
    class Conformance(BackendConformance):
        backend = backend_class.name

    with installed(backend_class(), alone=True):
        getattr(Conformance(), name)(**{"dtype": torch.float32, **arguments})


def test_every_check_has_a_defect() -> None:
    assert sorted(DEFECTS) == sorted(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_check_is_green_on_the_reference(name: str) -> None:
    run_check(name, ReferenceBackend, DEFECTS[name][1])


@pytest.mark.parametrize("name", CHECKS)
def test_check_is_red_on_its_defect(name: str) -> None:
    defect, arguments = DEFECTS[name]
    with pytest.raises((AssertionError, pytest.fail.Exception, OpCheckError)):
        run_check(name, defect, arguments)


@pytest.mark.parametrize("field", ["log_probs", "d_hidden", "d_weight"])
def test_the_cases_own_values_count(field: str) -> None:
    case = cases()[0]
    wrong = replace(case, data={**case.data, field: (1.01 * torch.tensor(case.data[field])).tolist()})
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_check("test_cases", ReferenceBackend, {"dtype": torch.float64, "case": wrong})


@pytest.mark.parametrize("kit", [BackendConformance, DivergenceConformance])
def test_no_parameter_of_a_check_is_given_twice(kit: type) -> None:
    for name, check in inspect.getmembers(kit, inspect.isfunction):
        for mark in getattr(check, "pytestmark", ()):
            values = [repr(value) for value in mark.args[1]]
            assert len(set(values)) == len(values), name


def test_all_options_together_are_those_of_each() -> None:
    of_each = {key for name, option in OPTIONS.items() if name != "all" for key in option}
    assert {key for key, value in OPTIONS["all"].items() if value} == of_each - {"temperature"}


def test_upstream_gradients_are_scaled() -> None:
    example = random_example(5)
    scaled_up = example.scale_upstream(3.0)
    torch.testing.assert_close(scaled_up.grad_log_probs, 3.0 * example.grad_log_probs)
    torch.testing.assert_close(scaled_up.grad_entropy, 3.0 * example.grad_entropy)


def test_equal_bits_hold_nan_equal() -> None:
    x = torch.tensor([1.0, float("nan")])
    assert same(x, x.clone())
    assert not same(x, torch.tensor([1.0, 2.0]))
    assert not same(x, x.double())


# The subclass


def test_a_check_cannot_be_redefined() -> None:
    with pytest.raises(TypeError, match="redefines test_peaked: name it otherwise, or use `skips`"):
        type("Sly", (BackendConformance,), {"backend": "x", "test_peaked": lambda self, dtype: None})
    with pytest.raises(TypeError, match="redefines check"):
        type("Sly", (BackendConformance,), {"backend": "x", "check": lambda self, *rest: None})


def test_own_checks_can_be_added() -> None:
    type("Fine", (BackendConformance,), {"backend": "x", "test_mine": lambda self: None, "sizes": (3, 5, 2)})


@pytest.mark.parametrize("setting", [{"skips": {"test_peeked": "?"}}, {"refuses": {"softcaps"}}], ids=str)
def test_a_misspelt_setting_is_an_error(setting: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="test_peeked|softcaps"):
        type("Typo", (BackendConformance,), {"backend": "x", **setting})


def test_what_is_refused_must_be_refused() -> None:
    class Refuses(Broken):
        def supports(self, request: Request) -> str | None:
            return "no bias" if request.bias else None

    class Conformance(BackendConformance):
        backend = "broken"
        refuses = ("bias",)

    arguments: dict[str, Any] = {"dtype": torch.float32, "option": "bias", "tokens": 5}
    with installed(Refuses(), alone=True), pytest.raises(pytest.skip.Exception):
        Conformance().test_options(**arguments)
    with installed(Broken(), alone=True), pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        Conformance().test_options(**arguments)


# Tolerances


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_floor_is_what_one_rounding_costs(dtype: torch.dtype) -> None:
    example = random_example(60, vocab=200, dtype=dtype, lora=(3,), bias=True)
    truth, unit = example.truth(), torch.finfo(dtype).eps
    for name, grad in floor_gradients(example).items():
        exact = truth.gradients[name]
        assert exact is not None
        error = float((grad - exact).norm() / exact.norm())
        assert unit / 16 < error < unit, name
    rounded = {name: grad.to(dtype) for name, grad in floor_gradients(example).items()}
    check_gradients(rounded, example, truth=truth)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("leaf", ["hidden", "weight", "bias", "lora_u0", "lora_b0"])
def test_a_gradient_that_is_off_is_seen(dtype: torch.dtype, leaf: str) -> None:
    example = random_example(60, vocab=200, dtype=dtype, lora=(3,), bias=True)
    got = example.reference()
    check_results(got, example)
    grad = got.gradients[leaf]
    assert grad is not None
    size = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-9}[dtype]
    with pytest.raises(AssertionError, match=f"d_{leaf}: L2 error"):
        check_gradients({**got.gradients, leaf: (grad.double() * (1 + size)).to(dtype)}, example)
    with pytest.raises(AssertionError, match=f"d_{leaf}: got torch"):
        check_gradients({**got.gradients, leaf: grad.to(torch.complex64)}, example)


def test_logits_rounded_to_bf16_are_seen() -> None:
    example = random_example(60, vocab=200, dtype=torch.bfloat16, std=5.0)
    z = (example.hidden @ example.head.weight.T).float()
    log_p = z.log_softmax(-1).gather(-1, example.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    got = logitless.TokenLogProbs(log_p.masked_fill(~example.live, 0.0), None)
    with pytest.raises(AssertionError, match="log_probs: .* tokens are off"):
        check_scores(got, example)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.1])
def test_a_score_that_is_off_is_seen(value: float) -> None:
    example = random_example(5, dtype=torch.float32)
    got = example.reference().scores
    with pytest.raises(AssertionError, match="log_probs: 1 tokens are off; the first, 2"):
        check_scores(replace(got, log_probs=got.log_probs.detach().index_fill(0, torch.tensor(2), value)), example)
    with pytest.raises(AssertionError, match="for ignored tokens, expected exactly 0"):
        check_scores(replace(got, log_probs=got.log_probs.detach().index_fill(0, torch.tensor(1), value)), example)


def test_a_divergence_below_zero_is_seen() -> None:
    case = random_divergence(9, dtype=torch.float64)
    case = replace(case, teacher=case.student)
    value, grads = case.truth()
    check_divergence((value, grads), case)
    with pytest.raises(pytest.fail.Exception, match="a divergence is negative"):
        check_divergence((value - 1e-16 * case.student.live, grads), case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_divergences_gradient_that_is_off_is_seen(dtype: torch.dtype) -> None:
    case = random_divergence(30, dtype=dtype)
    value, grads = case.truth()
    got = value.to(torch.promote_types(dtype, torch.float32))
    rounded = {name: None if grad is None else grad.to(dtype) for name, grad in grads.items()}
    check_divergence((got, rounded), case)
    size = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-9}[dtype]
    off = {name: None if grad is None else (grad * (1 + size)).to(dtype) for name, grad in grads.items()}
    with pytest.raises(pytest.fail.Exception, match="L2 error"):
        check_divergence((got, off), case)


# Memory


def test_memory_is_counted_until_it_is_freed() -> None:
    with MemoryTracker() as tracker:
        kept = torch.zeros(1000)
        view = kept.view(10, 100)
        assert tracker.live_bytes == 4000
        gone = torch.zeros(500) + 1
        assert (tracker.live_bytes, tracker.peak_bytes) == (6000, 8000)
        del gone
        assert tracker.live_bytes == 4000
        del kept
        assert tracker.live_bytes == 4000
        del view
        assert tracker.live_bytes == 0
        torch.zeros(10).add_(1)
    assert (tracker.peak_bytes, tracker.largest_bytes) == (8000, 4000)


def test_what_was_there_before_is_not_counted() -> None:
    before = torch.zeros(1000)
    with MemoryTracker() as tracker:
        before.add_(1).view(10, 100)[0].mul_(2)
    assert tracker.peak_bytes == 0


def test_memory_is_seen_inside_of_the_ops() -> None:
    example = random_example(40, vocab=300, dtype=torch.float32)
    with installed(ReferenceBackend(), alone=True):
        with MemoryTracker() as tracker:
            example.run()
        assert tracker.peak_bytes > 2 * 30 * 300 * 4
        with AllocationGuard(40 * 300 * 4), torch.no_grad():
            example.score()
        with pytest.raises(AssertionError, match=r"\(40, 300\) torch.float32: 48000 bytes, allowed 47999"):
            guarded(example, 47999)


def guarded(example: Any, limit: int) -> None:
    with AllocationGuard(limit), torch.no_grad():
        replace(example, labels=example.labels.clamp(min=0)).score()


def test_products_are_counted() -> None:
    a, b, c = torch.ones(3, 4), torch.ones(4, 5), torch.ones(2, 3, 4)
    with ProductCounter() as counter:
        a @ b
        torch.addmm(torch.ones(3, 5), a, b)
        torch.nn.functional.linear(a, b.T)
        assert (counter.calls, counter.flops) == (3, 3 * 2 * 60)
        c @ b
        a @ b[:, 0]
        a.mul(2).sum()
    assert (counter.calls, counter.flops) == (5, 3 * 120 + 240 + 24)


# Installing


def test_installed_backends_go_again() -> None:
    before = logitless.backends()
    with installed(ReferenceBackend(), alone=True):
        assert [line.name for line in logitless.backends()] == ["reference"]
    with pytest.raises(KeyError), installed(ReferenceBackend()):
        raise KeyError
    assert logitless.backends() == before
    with installed(ReferenceBackend()):
        assert [line.name for line in logitless.backends()] == sorted(["reference", *(line.name for line in before)])
