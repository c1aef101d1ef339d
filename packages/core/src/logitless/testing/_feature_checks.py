"""Conformance checks of what a backend may leave out: kept sets, several labels, statistics, the most likely tokens.

What its `features` do not name must be refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import logitless
from logitless import _registry, reference
from logitless.testing._conformance import OPTIONS, ConformanceChecks, entropy_of
from logitless.testing._kit import expect, same
from logitless.testing.example import Example
from logitless.testing.memory import MemoryTracker
from logitless.testing.tolerance import check_results, check_scores
from logitless.types import STATS, TokenLogProbs

__all__ = ["FeatureChecks"]

SETS: dict[str, dict[str, Any]] = {
    "k": {"top_k": 7},
    "k1": {"top_k": 1},
    "p": {"top_p": 0.8},
    "k-p": {"top_k": 20, "top_p": 0.6},
}


class FeatureChecks(ConformanceChecks, kit=True):
    """What is computed besides, compared with the logits in full."""

    def test_features_are_known(self) -> None:
        """`features` names what core knows: a misspelt one would never be asked for."""
        plugin = _registry.load(_registry.BACKENDS, self.backend)
        unknown = set(getattr(plugin, "features", ())) - _registry.FEATURES.keys()
        expect(not unknown, f"features: got {sorted(unknown)}, expected some of {sorted(_registry.FEATURES)}")

    def _likely(self, example: Example) -> Example:
        """With labels that a sampler would keep in every other token."""
        best = reference.head_logits(example.hidden, example.head, example.temperature).argmax(-1)
        odd = torch.arange(best.numel(), device=best.device).view(best.shape) % 2 == 1
        return replace(example, labels=torch.where(odd & example.live, best, example.labels))

    @pytest.mark.parametrize(("head", "kind"), [("plain", "k"), ("plain", "k-p"), ("all", "k1"), ("all", "p")])
    def test_kept_set(self, dtype: torch.dtype, head: str, kind: str) -> None:
        """top_k and top_p: scores over what a sampler keeps, labels inside and outside, and gradients."""
        kept = SETS[kind]
        example = self._likely(self.example(dtype, **self.supported(OPTIONS[head])))
        truth = example.truth(**kept)
        got, chunked = self.run(example, **kept), self.run(example, workspace_bytes=1 << 14, **kept)
        check_results(got, example, truth=truth, **kept)
        check_results(chunked, example, truth=truth, **kept)
        bare = self.run(example, entropy=False, **kept)
        expect(same(bare.scores.log_probs, got.scores.log_probs), "entropy=False changed log_prob's bits")

    @pytest.mark.parametrize("kept", [{"top_k": 2}, {"top_p": 0.6}], ids=str)
    def test_ties_are_kept_together(self, dtype: torch.dtype, kept: dict[str, Any]) -> None:
        """Tokens of equal logit at the border are all kept, or none."""
        example = self.example(dtype, 5, vocab=5, hidden_size=1, ignored=False)
        weight = torch.tensor([[2.0], [1.0], [1.0], [1.0], [0.0]], dtype=dtype, device=self.device)
        example = replace(example, hidden=torch.ones_like(example.hidden), labels=torch.arange(5, device=self.device))
        example = example.with_head(weight=weight)
        got = self.run(example, stats=("is_kept",), **kept)
        check_results(got, example, **kept)
        want = reference.keep(weight[:, 0], **kept)
        self._check_stats(got.scores, TokenLogProbs(got.scores.log_probs, None, {"is_kept": want}), example)

    def test_kept_set_in_a_single_pass(self, dtype: torch.dtype) -> None:
        """The policy's loss over a kept set."""
        example, kept = self._likely(self.example(dtype)), SETS["k-p"]
        _, got = self.run_policy_loss(example, workspace_bytes=1 << 14, **kept)
        check_results(got, example, **kept)

    def _several(self, example: Example, each: int = 4) -> Example:
        """Labels [..., K]: some tokens ignored whole, some labels alone, one label twice."""
        noise = torch.Generator().manual_seed(0)
        shape = (*example.labels.shape, each)
        labels = torch.randint(example.head.vocab_size or len(example.head.weight), shape, generator=noise)
        labels[torch.rand(shape, generator=noise) < 0.2] = example.ignore_index
        labels[~example.live.cpu()] = example.ignore_index
        labels[..., -1] = labels[..., 0]
        upstream = torch.randn(shape, generator=noise, dtype=torch.float64).to(example.grad_log_probs)
        return replace(example, labels=labels.to(self.device), grad_log_probs=upstream)

    @pytest.mark.parametrize(("head", "kept"), [("plain", {}), ("all", {"top_k": 9})], ids=["plain", "all-k"])
    def test_several_labels(self, dtype: torch.dtype, head: str, kept: dict[str, Any]) -> None:
        """labels [..., K]: each as if alone, one entropy, and gradients."""
        example = self._several(self.example(dtype, (3, 5), **self.supported(OPTIONS[head])))
        truth = example.truth(**kept)
        for options in ({}, {"workspace_bytes": 5000, "keep_bytes": 7000}):
            check_results(self.run(example, **options, **kept), example, truth=truth, **kept)

    def _check_stats(self, got: TokenLogProbs, want: TokenLogProbs, example: Example) -> None:
        mine, right = got.stats or {}, want.stats or {}
        expect(mine.keys() == right.keys(), f"stats: got {sorted(mine)}, expected {sorted(right)}")
        for name, value in right.items():
            found = mine[name]
            if STATS[name]:
                expect(found.dtype == torch.bool and torch.equal(found, value), f"{name}: {found} is not {value}")
            else:
                bare = replace(example, labels=example.labels[..., 0]) if example.labels.ndim > value.ndim else example
                check_scores(TokenLogProbs(found, None), bare, TokenLogProbs(value, None))
            expect(not found.requires_grad, f"{name} requires grad")

    def test_stats(self, dtype: torch.dtype) -> None:
        """Σp², the mean logit, whether the label is the argmax and is kept, in any order; no score changes."""
        example, names = self._likely(self.example(dtype, 21)), tuple(reversed(STATS))
        got, plain = self.run(example, stats=names), self.run(example)
        self._check_stats(got.scores, example.truth(stats=names).scores, example)
        expect(same(got.scores.log_probs, plain.scores.log_probs), "stats change log_prob's bits")
        expect(same(got.scores.entropy, plain.scores.entropy), "stats change the entropy's bits")

    def test_top_k_log_probs(self, dtype: torch.dtype) -> None:
        """Ids and log-probs, largest first; -100 and 0 where masked; of equal logits the lowest ids."""
        example = self.example(dtype)
        tied = example.with_head(weight=example.head.weight.round())
        tied = replace(tied, hidden=example.hidden.round())
        for case, k, workspace_bytes in ((example, 1, 5000), (example, 7, 1 << 20), (tied, 7, 5000)):
            exact = case.to(torch.float64)
            want_ids, want = reference.top_k_log_probs(exact.hidden, exact.head, k)
            ids, log_probs = self._best(case, k, workspace_bytes)
            dead = ~case.live.unsqueeze(1)
            expect(torch.equal(ids, want_ids.masked_fill(dead, -100)), f"got ids {ids}, expected {want_ids}")
            for i in range(k):
                right = want[:, i].masked_fill(dead[:, 0], 0.0)
                check_scores(TokenLogProbs(log_probs[:, i], None), case, TokenLogProbs(right, None))

    @pytest.mark.parametrize("k", [5, 300])
    def test_temporary_memory_of_top_k_log_probs_is_bounded(self, dtype: torch.dtype, k: int) -> None:
        """Besides ids, log-probs and a few numbers of each token: `workspace_bytes`, whatever k is."""
        tokens, workspace_bytes = 60, 1 << 18
        example = self.example(dtype, tokens, vocab=512, hidden_size=16, ignored=False)
        with torch.no_grad(), MemoryTracker() as memory:
            ids, log_probs = self._best(example, k, workspace_bytes)
        allowed = workspace_bytes + tokens * 8 * 32 + ids.nbytes + log_probs.nbytes
        expect(memory.peak_bytes <= allowed, f"k={k} held {memory.peak_bytes} bytes, allowed {allowed}")

    def _best(self, example: Example, k: int, workspace_bytes: int) -> tuple[Tensor, Tensor]:
        return self.attempt(
            {"top_k_log_probs"},
            lambda: logitless.top_k_log_probs(
                example.hidden,
                example.head,
                k,
                mask=example.live,
                workspace_bytes=workspace_bytes,
                backend=self.backend,
            ),
        )

    def test_scores_of_nothing(self, dtype: torch.dtype) -> None:
        """No tokens, and tokens all ignored, of a kept set and of several labels: zeros and zero gradients."""
        for tokens in (0, 6):
            example = self._several(self.example(dtype, tokens))
            example = replace(example, labels=torch.full_like(example.labels, example.ignore_index))
            got = self.run(example, top_k=3, top_p=0.9)
            entropy = entropy_of(got.scores)
            expect(not got.scores.log_probs.count_nonzero() and not entropy.count_nonzero(), "scores are not 0")
            for name, grad in got.gradients.items():
                expect(grad is not None and not grad.count_nonzero(), f"d_{name} is not 0")
