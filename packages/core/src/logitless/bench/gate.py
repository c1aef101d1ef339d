"""Every candidate is held to the reference in float64 before it is timed: some tokens of the very call that is timed.

The upstream gradients of all other tokens are zero (for a candidate without per-token outputs, their labels are
ignored), so d_weight too is the reference's on the few. This op must be within its contract; another function is only
asked whether it computes the same thing, and its errors are part of the results.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from logitless.bench.candidates import Candidate, Outcome
from logitless.bench.inputs import Inputs
from logitless.errors import LogitlessError
from logitless.head import LMHead
from logitless.testing.example import Example, Results
from logitless.testing.tolerance import check_scores
from logitless.types import TokenLogProbs

__all__ = ["Gate", "WrongResultError"]

TOKENS = 128
# Relative L2 error of a gradient of this op. In half precision the floor (dz rounded once, the result rounded once) is
# about 0.3 eps, and 0.4 for d_weight where entropy_grad=False takes the cheaper way.
GRADIENT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5, torch.float64: 1e-10}
OTHERS = {"log_probs": 0.25, "entropy": 0.25, "d_hidden": 0.05, "d_weight": 0.05}  # nats; relative


class WrongResultError(LogitlessError):
    """A backend of this op computes something else, so nothing is timed."""


class Gate:
    """The truth of one size's first tokens, made once for every kind of call."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.tokens = min(TOKENS, inputs.shape.tokens)
        self._made: tuple[object, Example, Results] | None = None

    def _truth(self, candidate: Candidate) -> tuple[Example, Results]:
        """The first tokens as an example, and its reference; the last one is kept."""
        key = (candidate.period, candidate.live, candidate.outputs)
        if self._made is None or self._made[0] != key:
            self._made = None
            example = self._example(candidate)
            self._made = (key, example, example.truth())
        return self._made[1:]

    def _example(self, candidate: Candidate) -> Example:
        inputs, first = self.inputs, slice(self.tokens)
        g, e = inputs.grad_log_probs[first], inputs.grad_entropy[first]
        example = Example(
            hidden=inputs.hidden.detach()[first],
            head=LMHead(inputs.weight.detach()),
            labels=inputs.ignored(candidate.period, candidate.live)[first],
            grad_log_probs=torch.full_like(g, -1.0) if candidate.outputs == "loss" else g,
            grad_entropy=e if candidate.outputs == "both" else torch.zeros_like(e),
        )
        device = example.hidden.device
        needed = 5 * 8 * inputs.weight.numel()  # the weight, its gradient and what they are made through, in float64
        if device.type == "cuda" and needed > torch.cuda.mem_get_info(device)[0]:
            leaves = {name: leaf.cpu() for name, leaf in example.leaves().items()}
            upstream = {name: getattr(example, name).cpu() for name in ("labels", "grad_log_probs", "grad_entropy")}
            example = replace(example.with_leaves(leaves), **upstream)
        return example

    def check(self, candidate: Candidate) -> dict[str, float]:
        """Run a candidate; its largest errors in nats, and its gradients' relative L2 errors.

        Raises:
            WrongResultError: the candidate is this op, and outside of its contract.
            ValueError: it is another function, and does not compute the same.
        """
        with self.inputs.only_first(self.tokens, labels=candidate.outputs == "loss"):
            found = candidate.run()
        if candidate.kind == "limit":
            return {}
        example, truth = self._truth(candidate)
        errors = self._errors(found, example, truth, candidate)
        if candidate.kind == "ours":
            self._hold(candidate, found, example, truth, errors)
        for name, error in errors.items():
            if not error <= OTHERS[name]:
                raise ValueError(f"its {name} is off by {error:.3g}, so it was not timed")
        return errors

    def _errors(self, found: Outcome, example: Example, truth: Results, candidate: Candidate) -> dict[str, float]:
        expected = truth.scores
        errors = {}
        if candidate.outputs == "loss":
            loss = -float(expected.log_probs.detach().sum())
            errors["log_probs"] = abs(float(found.log_probs) - loss) / self.tokens
        else:
            errors["log_probs"] = _largest(found.log_probs[: self.tokens], expected.log_probs)
        if found.entropy is not None and expected.entropy is not None:
            errors["entropy"] = _largest(found.entropy[: self.tokens], expected.entropy)
        for name, got in (("hidden", found.d_hidden), ("weight", found.d_weight)):
            exact = truth.gradients[name]
            if got is not None and exact is not None:
                errors[f"d_{name}"] = _relative(got[: len(exact)], exact)
        return errors

    def _hold(
        self, candidate: Candidate, found: Outcome, example: Example, truth: Results, errors: dict[str, float]
    ) -> None:
        """This op's contract, on scores and gradients."""
        place = example.hidden.device
        first = [None if x is None else x.detach()[: self.tokens].to(place) for x in (found.log_probs, found.entropy)]
        assert first[0] is not None
        try:
            check_scores(TokenLogProbs(first[0], first[1]), example, truth.scores)
        except AssertionError as wrong:
            raise WrongResultError(f"{candidate.name}: {wrong}; nothing is timed") from wrong
        for name, got in (("d_hidden", found.d_hidden), ("d_weight", found.d_weight)):
            if got is None:
                continue
            bound = max(GRADIENT[example.dtype], torch.finfo(got.dtype).eps / 2)  # a grad_buffer is float32 always
            error = errors[name]
            if not error <= bound:
                raise WrongResultError(
                    f"{candidate.name}: {name} is off by {error:.3g} relative to float64, allowed {bound:.3g}; "
                    "nothing is timed"
                )


def _largest(got: Tensor, exact: Tensor) -> float:
    return float((got.detach().to(exact.device).double() - exact.detach()).abs().max())


def _relative(got: Tensor, exact: Tensor) -> float:
    """L2 error over L2 norm, by blocks of rows, so that no third matrix of this size is needed."""
    error = norm = 0.0
    for a, b in zip(torch.split(got, 4096), torch.split(exact, 4096), strict=True):
        error += float((a.to(b.device).double() - b).square().sum())
        norm += float(b.square().sum())
    return math.sqrt(error / norm if norm else error)
