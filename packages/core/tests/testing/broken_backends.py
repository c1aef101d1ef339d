"""Backends with one defect each, by the check of the kit that must catch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless.testing import ReferenceBackend, cases
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


def never_nan(problem: Problem, out: Forwarded) -> Forwarded:
    return replace(out, log_probs=out.log_probs.nan_to_num(nan=0.0))


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
    def flat(x: Tensor) -> Tensor:
        return x if x.is_contiguous() else x.as_strided((x.numel(),), (1,)).view(x.shape)

    return replace(problem, weight=flat(problem.weight), bias=None if problem.bias is None else flat(problem.bias))


def validated_only(problem: Problem, out: Forwarded) -> Forwarded:
    return out if problem.dead is None else off(problem, out)


class Misspelt(Broken):
    features = frozenset({"kept_sets"})


class ForgetsTheSetInASinglePass(Broken):
    def policy_loss(self, problem: Problem, **keywords: Any) -> PolicyResult:
        return super().policy_loss(replace(problem, top_k=None, top_p=None), **keywords)


class HighestIdFirst(Broken):
    def top_k_log_probs(self, problem: Problem, k: int) -> tuple[Tensor, Tensor]:
        turned = replace(problem, weight=problem.weight.flip(0))
        ids, log_probs = super().top_k_log_probs(turned, k)
        return len(problem.weight) - 1 - ids, log_probs


class ReadsWhatItDidNotWrite(Broken):
    """Right wherever what lay there is a finite number."""

    def forward(self, problem: Problem, **keywords: Any) -> Forwarded:
        out = super().forward(problem, **keywords)
        return replace(out, log_probs=out.log_probs + 0.0 * torch.empty_like(out.log_probs))


class InChunks(ReferenceBackend):
    """The reference for one token at a time, without the logits of others."""

    def _each(self, problem: Problem) -> list[Problem]:
        live = torch.arange(len(problem.labels)) if problem.live is None else problem.live
        return [replace(problem, live=token) for token in live.split(1)]

    def forward(self, problem: Problem, **keywords: Any) -> Forwarded:
        outs = [super(InChunks, self).forward(token, **keywords) for token in self._each(problem)]
        return Forwarded(
            torch.cat([out.log_probs for out in outs]),
            torch.cat([out.entropy for out in outs if out.entropy is not None]) if keywords["entropy"] else None,
            torch.cat([out.stats for out in outs], 1),
            outs[0].kept,
        )

    def backward(self, problem: Problem, *rest: Any) -> Gradients:
        stats, kept, g, e, *others = rest
        total: dict[str, Tensor] = {}
        for i, token in enumerate(self._each(problem)):
            upstream = (g[i : i + 1], None if e is None else e[i : i + 1])
            found = super().backward(token, stats[:, i : i + 1], kept, *upstream, *others)
            for name in ("hidden", "weight"):
                grad = getattr(found, name)
                total[name] = total[name].add_(grad) if name in total else grad
            del found, grad
        return Gradients(**total)

    def top_k_log_probs(self, problem: Problem, k: int) -> tuple[Tensor, Tensor]:
        tokens = self._each(problem)
        n, like = len(tokens), problem.hidden
        ids = torch.empty(n, k, dtype=torch.int64, device=like.device)
        log_probs = torch.empty(n, k, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        for i, token in enumerate(tokens):
            ids[i], log_probs[i] = (x[0] for x in super().top_k_log_probs(token, k))
        return ids, log_probs


class RanksAllTokensAtOnce(InChunks):
    """Within bounds where k is small."""

    name = "broken"

    def top_k_log_probs(self, problem: Problem, k: int) -> tuple[Tensor, Tensor]:
        ids, log_probs = super().top_k_log_probs(problem, k)
        log_probs, order = log_probs.sort(dim=1, descending=True, stable=True)
        return ids.gather(1, order), log_probs


def breaks_ties(problem: Problem) -> Problem:
    steps = 1e-6 * torch.arange(len(problem.weight), device=problem.weight.device)
    return replace(problem, weight=problem.weight + steps.to(problem.weight.dtype).unsqueeze(1))


def first_label_of_all(problem: Problem, out: Forwarded) -> Forwarded:
    return replace(out, log_probs=out.log_probs[:, :1].expand_as(out.log_probs).contiguous())


def stats_in_another_order(problem: Problem, out: Forwarded) -> Forwarded:
    return out if out.extras is None else replace(out, extras=out.extras.flip(0))


def overflows(problem: Problem, out: Forwarded) -> Forwarded:
    return out if problem.bias is None else replace(out, log_probs=out.log_probs + 0.0 * problem.bias.exp().max())


def loud_last_row(problem: Problem) -> Problem:
    loud = torch.ones(len(problem.weight), 1)
    loud[-1] = 1.5
    return replace(problem, weight=problem.weight * loud)


def by_place(problem: Problem, out: Forwarded) -> Forwarded:
    return replace(out, log_probs=out.log_probs - 1e-3 * torch.arange(len(out.log_probs)))


def off_when_few(problem: Problem, out: Forwarded) -> Forwarded:
    return off(problem, out) if len(out.log_probs) < 4 else out


def lifted_bias(problem: Problem, grads: Gradients) -> Gradients:
    return grads if grads.bias is None else replace(grads, bias=grads.bias + 0.01)


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
    "test_strided_bias": (reading(as_if_contiguous), {}),
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
    "test_nothing_but_minus_infinity_is_nan": (forward(never_nan), {}),
    "test_peaked": (forward(unshifted), {}),
    "test_vocabulary_of_one": (forward(off), {}),
    "test_confident_tokens_keep_their_digits": (forward(label_of_another_sum), {}),
    "test_temporary_memory_is_bounded": (Broken, {}),
    "test_features_are_known": (Misspelt, {"dtype": None}),
    "test_kept_set": (reading(lambda p: replace(p, top_k=None, top_p=None)), {"head": "plain", "kind": "k"}),
    "test_ties_are_kept_together": (reading(breaks_ties), {"kept": {"top_k": 2}}),
    "test_kept_set_in_a_single_pass": (ForgetsTheSetInASinglePass, {}),
    "test_several_labels": (forward(first_label_of_all), {"head": "plain", "kept": {}}),
    "test_stats": (forward(stats_in_another_order), {}),
    "test_top_k_log_probs": (HighestIdFirst, {}),
    "test_temporary_memory_of_top_k_log_probs_is_bounded": (RanksAllTokensAtOnce, {"k": 300}),
    "test_scores_of_nothing": (backward(nan_for_nothing), {}),
    "test_any_call": (forward(below_zero), {}),
    "test_shift": (forward(overflows), {}),
    "test_vocabulary_in_another_order": (reading(loud_last_row), {}),
    "test_tokens_in_another_order": (forward(by_place), {}),
    "test_tokens_in_two_parts": (forward(off_when_few), {}),
    "test_temperature_is_a_smaller_weight": (reading(lambda p: replace(p, temperature=1.0)), {}),
    "test_probabilities_sum_to_one": (forward(off), {}),
    "test_logit_gradients_sum_to_zero": (backward(lifted_bias), {}),
    "test_memory_changes_nothing": (forward(kept_counts), {}),
}
GOOD: dict[str, type[ReferenceBackend]] = {
    "test_temporary_memory_is_bounded": InChunks,
    "test_temporary_memory_of_top_k_log_probs_is_bounded": InChunks,
}
"""What passes a check that the reference itself does not."""
