"""Conformance checks of ignored tokens, labels that are none, NaN, and the range of logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from logitless.testing._conformance import OPTIONS, ConformanceChecks, bias_of, entropy_of
from logitless.testing._kit import expect
from logitless.testing.example import Example, Results
from logitless.testing.tolerance import check_gradients, check_results, check_scores
from logitless.types import TokenLogProbs

__all__ = ["EdgeChecks"]


class EdgeChecks(ConformanceChecks, kit=True):
    """What happens at the edges."""

    @pytest.mark.parametrize("validate", [True, False], ids=["validated", "unvalidated"])
    @pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
    def test_ignored_tokens_are_exactly_zero(self, dtype: torch.dtype, garbage: float, validate: bool) -> None:
        """Outputs and gradients of ignored tokens are 0, and garbage in them reaches nothing."""
        for lora in ((), (3,)) if "lora" not in self.refuses else ((),):
            per_token = "per_token_temperature" not in self.refuses
            clean = self.example(dtype, lora=lora, per_token_temperature=per_token)
            dead = ~clean.live
            leaves = {
                name: leaf.masked_fill(dead.unsqueeze(-1), garbage) if name[:6] in ("hidden", "lora_u") else leaf
                for name, leaf in clean.leaves().items()
            }
            dirty = replace(
                clean.with_leaves(leaves),
                grad_log_probs=clean.grad_log_probs.masked_fill(dead, garbage),
                grad_entropy=clean.grad_entropy.masked_fill(dead, garbage),
            )
            if isinstance(clean.temperature, Tensor):
                dirty = replace(dirty, temperature=clean.temperature.masked_fill(dead, 0.0))
            got = self.run(dirty, validate=validate)
            check_results(got, clean)
            for name in ("hidden", *(["lora_u0"] if lora else [])):
                grad = got.gradients[name]
                expect(grad is not None and not grad[dead].count_nonzero(), f"d_{name} of ignored tokens is not 0")

    def test_all_ignored(self, dtype: torch.dtype) -> None:
        """Zeros and zero gradients, not NaN."""
        example = self.example(dtype)
        example = replace(example, labels=torch.full_like(example.labels, -100))
        for validate in (True, False) if "unvalidated" not in self.refuses else (True,):
            for name, grad in self.check(example, validate=validate).gradients.items():
                expect(grad is not None and not grad.count_nonzero(), f"d_{name} is not 0")

    def test_unvalidated_equals_validated(self, dtype: torch.dtype, option: str) -> None:
        """validate=False computes the same where labels are good."""
        self.check(self.example(dtype, **OPTIONS[option]), validate=False)

    def test_unvalidated_bad_labels_give_nan_in_their_own_token(self, dtype: torch.dtype) -> None:
        """Labels beyond the vocabulary or negative: NaN there, and nothing elsewhere."""
        example = self.example(dtype, vocab_size=131)
        labels = example.labels.clone()
        bad = torch.zeros_like(labels, dtype=torch.bool)
        for at, label in ((0, -1), (2, 131), (4, self.sizes[1]), (6, 10**9)):
            labels[at], bad[at] = label, True
        got = self.run(replace(example, labels=labels), validate=False)
        self._check_nan_only_at(bad, got, example)

    def _check_nan_only_at(self, at: Tensor, got: Results, clean: Example) -> None:
        """NaN in those tokens' scores and d_hidden; all else as in the clean example."""
        truth = clean.truth()
        for score, right in ((got.scores.log_probs, truth.scores.log_probs), (entropy_of(got.scores), None)):
            expect(bool(score[at].isnan().all()), f"got {score[at].tolist()}, expected NaN")
            expect(not score[~at].isnan().any(), "NaN in another token's score")
            if right is not None:
                check_scores(TokenLogProbs(torch.where(at, right.to(score.dtype), score), None), clean, truth.scores)
        grad = got.gradients["hidden"]
        expect(grad is not None, "no d_hidden")
        if grad is not None:
            rows = grad.isnan().any(-1)
            expect(torch.equal(rows, at), f"d_hidden is NaN in tokens {rows.nonzero().flatten().tolist()}")
            clean_grad = truth.gradients["hidden"]
            if clean_grad is not None:
                mended = torch.where(at.unsqueeze(-1), clean_grad.to(grad.dtype), grad)
                check_gradients({**dict.fromkeys(clean.leaves()), "hidden": mended}, clean, truth=truth)

    @pytest.mark.parametrize("validate", [True, False], ids=["validated", "unvalidated"])
    def test_nan_stays_in_its_own_token(self, dtype: torch.dtype, validate: bool) -> None:
        """A NaN hidden state spoils its own scores and gradient only (d_weight may be NaN)."""
        clean = self.example(dtype)
        at = torch.zeros_like(clean.labels, dtype=torch.bool)
        at[4] = True
        dirty = replace(clean, hidden=clean.hidden.masked_fill(at.unsqueeze(-1), float("nan")))
        self._check_nan_only_at(at, self.run(dirty, validate=validate), clean)

    def test_scores_are_in_range(self, dtype: torch.dtype) -> None:
        """log_prob ≤ 0 and 0 ≤ entropy ≤ log V, for logits from flat to peaked."""
        for std in (0.0, 1e-4, 1e-3, 1.0, 30.0):  # almost flat, rounding takes an unbounded entropy above log V
            example = self.example(dtype, 50, std=std, ignored=False)
            out = self.run(example).scores
            top = torch.tensor(float(self.sizes[1]), dtype=torch.float64).log().to(out.log_probs.dtype)
            expect(bool((out.log_probs <= 0).all()), f"log_prob: got {out.log_probs.max()} at std {std}, expected <= 0")
            entropy = entropy_of(out).cpu()
            told = f"entropy: got {entropy.min()} to {entropy.max()} at std {std}, expected 0 to log V, {top}"
            expect(bool(((entropy >= 0) & (entropy <= top)).all()), f"{told}; clamp it")

    @pytest.mark.parametrize("offset", [1e4, -1e4, -30.0])
    def test_common_offset(self, dtype: torch.dtype, offset: float) -> None:
        """Logits that share an offset: within 2 ulp of it."""
        example = self.example(dtype, bias=True)
        bias = torch.full_like(bias_of(example), offset)
        self.check(example.with_head(bias=bias), workspace_bytes=1 << 14)
        self.check(example.with_head(bias=bias))

    @pytest.mark.parametrize("cut", ["some", "whole-tile"])
    def test_minus_infinity(self, dtype: torch.dtype, cut: str) -> None:
        """Columns at −inf take no part; also where they fill whole tiles, and the first ones."""
        example = self.example(dtype, 5, vocab=2300, bias=True)
        columns = torch.zeros(2300, dtype=torch.bool, device=self.device)
        columns[3::7] = True
        if cut == "whole-tile":
            columns[:2100] = True
        bias = bias_of(example).masked_fill(columns, float("-inf"))
        labels = torch.tensor([2101, -100, 2299, 2200, 2298], device=self.device)
        example = replace(example.with_head(bias=bias.index_fill(0, labels[labels >= 0], 0.5)), labels=labels)
        got = self.check(example, workspace_bytes=1 << 16)
        self.check(example)
        grad = got.gradients["bias"]
        gone = bias_of(example).isinf()
        expect(grad is not None and not grad[gone].count_nonzero(), "a column at −inf has a gradient")

    def test_label_at_minus_infinity(self, dtype: torch.dtype) -> None:
        """A token that cannot come has log_prob −inf, and the other scores stay right."""
        example = self.example(dtype, bias=True)
        bias = bias_of(example).index_fill(0, example.labels[:1], float("-inf"))
        fresh = example.with_head(bias=bias)
        fresh = replace(fresh, labels=torch.where(example.labels == example.labels[0], -100, example.labels))
        fresh.labels[0] = example.labels[0]
        if "bias" in self.refuses:
            pytest.skip("refuses bias")
        out = fresh.score(backend=self.backend)
        check_scores(out, fresh)
        expect(float(out.log_probs[0]) == float("-inf"), f"got {float(out.log_probs[0])}, expected −inf")

    def test_nothing_but_minus_infinity_is_nan(self, dtype: torch.dtype) -> None:
        """A token that can be none of the vocabulary has no scores: torch's log_softmax is NaN too."""
        example = self.example(dtype, bias=True)
        if "bias" in self.refuses:
            pytest.skip("refuses bias")
        nothing = torch.full_like(bias_of(example), float("-inf"))
        out = example.with_head(bias=nothing).score(backend=self.backend)
        for name, scores in (("log_probs", out.log_probs), ("entropy", out.entropy)):
            expect(scores is not None and bool(scores[example.live].isnan().all()), f"{name}: got {scores}, want NaN")

    def test_peaked(self, dtype: torch.dtype) -> None:
        """Almost one-hot distributions, with labels at the peak and far from it."""
        example = self.example(dtype, 20, std=60.0, ignored=False)
        peak = (example.hidden.double() @ example.head.weight.double().T).argmax(-1)
        self.check(replace(example, labels=peak))
        self.check(example)

    def test_vocabulary_of_one(self, dtype: torch.dtype) -> None:
        """V = 1, with and without padding rows: 0, 0 and zero gradients."""
        for vocab, size in ((1, None), (5, 1)):
            example = self.example(dtype, 5, vocab=vocab, vocab_size=size)
            got = self.check(example)
            entropy = entropy_of(got.scores)
            expect(not got.scores.log_probs.count_nonzero() and not entropy.count_nonzero(), "scores are not 0")
            for name, grad in got.gradients.items():
                expect(grad is not None and not grad.count_nonzero(), f"d_{name} is not 0")

    def test_confident_tokens_keep_their_digits(self, dtype: torch.dtype) -> None:
        """p(label) > 1/2, down to 1 − p = 3e-5: log_prob is right relatively, as PPO's ratios need it."""
        tokens, vocab, hidden_size = 400, 1000, 64
        example = self.example(dtype, tokens, vocab=vocab, hidden_size=hidden_size, std=1.0, ignored=False, seed=3)
        rows = example.head.weight[example.labels].double()
        height = torch.linspace(6.0, 20.0, tokens, dtype=torch.float64, device=self.device).unsqueeze(1)
        hidden = (height * rows / rows.square().sum(1, keepdim=True)).to(dtype)
        example = replace(example, hidden=hidden)
        truth = example.truth().scores.log_probs.detach()
        rest = -torch.expm1(truth)
        chosen = (rest < 0.5) & (rest >= 3e-5)
        expect(int(chosen.sum()) > tokens // 3, "the inputs of this check have too few confident tokens")
        got = self.run(example).scores.log_probs.detach().double()
        error = ((got - truth) / truth).abs()[chosen]
        median, tail = float(error.median()), float(error.quantile(0.99))
        expect(median <= 1e-3 and tail <= 0.05, f"relative error of log_prob: median {median:.2g}, p99 {tail:.2g}")
