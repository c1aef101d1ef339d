"""Conformance checks of what holds whatever the inputs: hypothesis draws them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from logitless.testing._conformance import ConformanceChecks, bias_of, entropy_of
from logitless.testing._kit import expect, forall, same
from logitless.testing.example import Example, Results
from logitless.testing.strategies import examples
from logitless.testing.tolerance import check_gradients, check_results, check_scores
from logitless.types import TokenLogProbs

__all__ = ["PropertyChecks"]

PLAIN: dict[str, Any] = {"bias": False, "softcap": None, "lora": ()}
SEEDS = st.integers(0, 2**16)


class PropertyChecks(ConformanceChecks, kit=True):
    """What any call holds to."""

    def _forall(self, check: Callable[[Any], None], dtype: torch.dtype, *more: Any, **options: Any) -> None:
        """Run a check on random calls of what this backend serves, or on tuples of a call and more."""
        calls = examples(dtype=dtype, device=self.device, refuses=self.refuses, **{"std": 2.0, **options})
        forall(check, st.tuples(calls, *more) if more else calls, examples=self.drawn)

    def test_any_call(self, dtype: torch.dtype) -> None:
        """Right scores and gradients; log_prob ≤ 0 and 0 ≤ entropy ≤ log V."""

        def check(example: Example) -> None:
            out = self.check(example).scores
            size = example.head.vocab_size or len(example.head.weight)
            top = torch.tensor(float(size), dtype=torch.float64).log().to(out.log_probs.dtype)
            entropy = entropy_of(out).cpu()
            expect(bool((out.log_probs <= 0).all()), "a log_prob is above 0")
            expect(bool(((entropy >= 0) & (entropy <= top)).all()), f"an entropy is outside of [0, log {size}]")

        self._forall(check, dtype)

    def test_shift(self, dtype: torch.dtype) -> None:
        """Whatever is added to all logits of a token, its scores are the same."""
        self.needs("bias")

        def check(drawn: tuple[Example, float]) -> None:
            example, shift = drawn
            moved = example.with_head(bias=torch.full_like(bias_of(example), shift))
            still = moved.with_head(bias=torch.zeros_like(bias_of(example)))
            check_scores(self.run(moved).scores, moved, still.truth().scores)

        self._forall(check, dtype, st.sampled_from([-1024.0, -1.0, 64.0, 512.0]), **{**PLAIN, "bias": True})

    def test_vocabulary_in_another_order(self, dtype: torch.dtype) -> None:
        """Rows of the head and labels reordered alike: the same scores, and d_weight's rows go along."""

        def check(drawn: tuple[Example, int]) -> None:
            example, seed = drawn
            count = len(example.head.weight)
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).to(self.device)
            place = torch.argsort(order)
            rows = {
                name: leaf[order] if name in ("weight", "bias") or name.startswith("lora_b") else leaf
                for name, leaf in example.leaves().items()
            }
            labels = torch.where(example.live, place[example.labels.clamp(min=0)], example.labels)
            moved = replace(example.with_leaves(rows), labels=labels)
            truth, got = example.truth(), self.run(moved)
            grads = {
                name: grad if rows[name] is example.leaves()[name] or grad is None else grad[place]
                for name, grad in got.gradients.items()
            }
            check_results(Results(got.scores, grads), example, truth=truth)

        self._forall(check, dtype, SEEDS, vocab_size=None)

    def test_tokens_in_another_order(self, dtype: torch.dtype) -> None:
        """Tokens reordered: their scores and d_hidden go along, the head's gradients are the same."""

        def check(drawn: tuple[Example, int]) -> None:
            example, seed = drawn
            order = torch.randperm(len(example.labels), generator=torch.Generator().manual_seed(seed)).to(self.device)
            got, place = self.run(_of_tokens(example, order)), torch.argsort(order)
            grads = {
                name: grad[place] if name[:6] in ("hidden", "lora_u") and grad is not None else grad
                for name, grad in got.gradients.items()
            }
            scores = TokenLogProbs(got.scores.log_probs[place], entropy_of(got.scores)[place])
            check_results(Results(scores, grads), example)

        self._forall(check, dtype, SEEDS)

    def test_tokens_in_two_parts(self, dtype: torch.dtype) -> None:
        """A call split over tokens: scores and d_hidden concatenate, the head's gradients add up."""

        def check(drawn: tuple[Example, float]) -> None:
            example, share = drawn
            index = torch.arange(len(example.labels), device=self.device)
            parts = [self.run(_of_tokens(example, x)) for x in torch.split(index, max(1, int(share * len(index))))]
            scores = TokenLogProbs(
                torch.cat([part.scores.log_probs for part in parts]),
                torch.cat([entropy_of(part.scores) for part in parts]),
            )
            check_scores(scores, example)
            of_tokens = {name for name in example.leaves() if name[:6] in ("hidden", "lora_u")}
            grads: dict[str, Tensor | None] = dict.fromkeys(example.leaves())
            for name in of_tokens:
                grads[name] = torch.cat([_of(part, name) for part in parts])
            check_gradients(grads, example)
            for name in example.leaves().keys() - of_tokens:  # the sum of rounded parts
                whole, added = _of(self.run(example), name), sum(_of(part, name).double() for part in parts)
                sizes = sum(float(_of(part, name).double().norm()) for part in parts)
                allowed = 4 * torch.finfo(dtype).eps * sizes + 1e-6 * sizes * (dtype != torch.float64)
                error = float((added - whole.double()).norm())
                expect(error <= allowed, f"d_{name} of the parts: L2 error {error:.3g}, allowed {allowed:.3g}")

        self._forall(check, dtype, st.floats(0.1, 1.0), min_tokens=1)

    def test_temperature_is_a_smaller_weight(self, dtype: torch.dtype) -> None:
        """Temperature t gives the scores of weight / t."""

        def check(drawn: tuple[Example, float]) -> None:
            example, t = drawn
            cooled = example.with_head(weight=example.head.weight / t)  # a power of two: exact in any dtype
            check_scores(self.run(replace(example, temperature=t)).scores, cooled)

        fixed = {**PLAIN, "temperature": 1.0, "per_token_temperature": False}
        self._forall(check, dtype, st.sampled_from([0.25, 0.5, 2.0, 8.0]), **fixed)

    def test_probabilities_sum_to_one(self, dtype: torch.dtype) -> None:
        """Σ exp(log_prob) over all labels of a token is 1."""

        def check(example: Example) -> None:
            size = example.head.vocab_size or len(example.head.weight)
            every = example.hidden[:1].expand(size, -1)
            labels = torch.arange(size, device=self.device)
            zeros = torch.zeros(size, dtype=example.grad_log_probs.dtype, device=self.device)
            scored = self.run(replace(example, hidden=every, labels=labels, grad_log_probs=zeros, grad_entropy=zeros))
            total = float(scored.scores.log_probs.detach().double().exp().sum())
            allowed = 1e-9 if dtype == torch.float64 else 2e-5
            expect(abs(total - 1.0) <= allowed, f"the probabilities sum to {total}, {allowed} off 1 is allowed")

        self._forall(check, dtype, min_tokens=1, lora=(), per_token_temperature=False)

    def test_logit_gradients_sum_to_zero(self, dtype: torch.dtype) -> None:
        """d_bias, which is dz summed over tokens, sums to 0 over the vocabulary for each token alone."""
        self.needs("bias")

        def check(example: Example) -> None:
            grad = _of(self.run(_of_tokens(example, torch.zeros(1, dtype=torch.int64, device=self.device))), "bias")
            total, size = float(grad.double().sum()), float(grad.double().abs().sum())
            allowed = 2 * max(torch.finfo(dtype).eps, 1e-6 * (dtype != torch.float64)) * size + 1e-12
            expect(abs(total) <= allowed, f"dz sums to {total:.3g}, allowed {allowed:.3g}")

        self._forall(check, dtype, min_tokens=1, bias=True, softcap=None, ignored=False)

    def test_memory_changes_nothing(self, dtype: torch.dtype) -> None:
        """Any keep_bytes: the same log_prob bits. Any workspace_bytes and keep_bytes: right scores and gradients."""

        def check(drawn: tuple[Example, int, int]) -> None:
            example, keep_bytes, workspace_bytes = drawn
            kept = self.check(example, keep_bytes=keep_bytes, workspace_bytes=workspace_bytes)
            bare = self.run(example, workspace_bytes=workspace_bytes)
            expect(same(kept.scores.log_probs, bare.scores.log_probs), "keep_bytes changed log_prob's bits")
            expect(same(kept.scores.entropy, bare.scores.entropy), "keep_bytes changed the entropy's bits")

        self._forall(check, dtype, st.integers(0, 10_000), st.integers(1, 20_000))

    def needs(self, option: str) -> None:
        """Skip a check that cannot be stated without an option which this backend refuses."""
        if option in self.refuses:
            pytest.skip(f"refuses {option}")


def _of_tokens(example: Example, index: Tensor) -> Example:
    """Some of the tokens [N]."""
    leaves = {
        name: leaf[index] if name[:6] in ("hidden", "lora_u") else leaf for name, leaf in example.leaves().items()
    }
    temperature = example.temperature
    return replace(
        example.with_leaves(leaves),
        labels=example.labels[index],
        grad_log_probs=example.grad_log_probs[index],
        grad_entropy=example.grad_entropy[index],
        temperature=temperature[index] if isinstance(temperature, Tensor) else temperature,
    )


def _of(results: Results, name: str) -> Tensor:
    grad = results.gradients[name]
    if grad is None:
        pytest.fail(f"d_{name} is None")
    return grad
