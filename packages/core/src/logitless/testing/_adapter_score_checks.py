"""Conformance checks of an adapter's scores: against the logits in full, and of what a call may ask for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from logitless.packing import IGNORE_INDEX, PackedBatch
from logitless.testing._adapter import FIRST_ID, AdapterChecks, entropy_of, scores_in
from logitless.testing._kit import expect, forall, same
from logitless.testing.strategies import packed_batches
from logitless.types import TokenLogProbs

__all__ = ["ScoreChecks"]


class ScoreChecks(AdapterChecks, kit=True):
    """What a bound model computes."""

    def _check_all(self, dtype: torch.dtype, layout: str, batch: PackedBatch, temperature: Tensor | float) -> None:
        """Log_probs, entropy and every gradient, against the logits in full of a model that was never bound."""
        own, model = self.model(dtype), self.model(dtype)
        want, top = self.truth(own, batch, temperature)
        out = self.run(self.bind(model, layout), batch, temperature=temperature)
        self.check_scores("log_probs", out.log_probs, want.log_probs, batch, top)
        self.check_scores("entropy", out.entropy, want.entropy, batch, top)
        upstream = self.upstream(batch, want.log_probs)
        got_grads = self.gradients(model, (scores_in(out), entropy_of(out)), upstream)
        assert want.entropy is not None
        self.check_gradients(got_grads, self.gradients(own, (want.log_probs, want.entropy), upstream), dtype)

    def test_equals_full_logits(self, dtype: torch.dtype, layout: str) -> None:
        """Sequences of many lengths, padded, some tokens not scored: what each scores alone, and every gradient."""
        self._check_all(dtype, layout, self.masked(layout, self.sequences(self.vocab_size(self.model(dtype)))), 1.0)

    @pytest.mark.parametrize("kind", ["number", "per-token"])
    def test_temperature(self, dtype: torch.dtype, layout: str, kind: str) -> None:
        """One for all tokens, or one for each in batch order."""
        batch = self.masked(layout, self.sequences(self.vocab_size(self.model(dtype))))
        temperature: Tensor | float = 0.7
        if kind == "per-token":
            noise = torch.Generator().manual_seed(3)
            temperature = 0.5 + torch.rand(batch.input_ids.shape[0], generator=noise).to(self.device)
        self._check_all(dtype, layout, batch, temperature)

    def test_any_batch(self, layout: str) -> None:
        """Batches of any origin, padded left, right or with holes, nested, listed, with empty sequences."""
        own, model = self.model(), self.model()
        forward = self.bind(model, layout)

        def right(batch: PackedBatch) -> None:
            with torch.no_grad():
                want, top = self.truth(own, batch)
                out = self.run(forward, batch)
            self.check_scores("log_probs", out.log_probs, want.log_probs, batch, top)

        vocab_size = self.vocab_size(own)
        batches = packed_batches(vocab_size, first_id=FIRST_ID, min_sequences=1, device=self.device)
        forall(right, batches, examples=6)

    def test_each_sequence_alone(self, layout: str) -> None:
        """What a sequence scores does not depend on what it is packed with."""
        model = self.model()
        parts = self.sequences(self.vocab_size(model))
        forward = self.bind(model, layout)
        together = self.batch(layout, parts)
        with torch.no_grad():
            alone = [self.run(forward, self.batch(layout, [part])) for part in parts]
            out = self.run(forward, together)
        for name in ("log_probs", "entropy"):
            self.check_scores(name, getattr(out, name), torch.cat([getattr(x, name) for x in alone]), together)

    def test_entropy_is_optional(self, layout: str) -> None:
        """entropy=False gives None, the same log_prob bits, and the gradients of log_probs alone."""
        self._check_without_entropy(layout, entropy=False)

    def test_entropy_grad_is_optional(self, layout: str) -> None:
        """entropy_grad=False gives the same bits, the entropy detached."""
        self._check_without_entropy(layout, entropy_grad=False)

    def _check_without_entropy(self, layout: str, **options: bool) -> None:
        model = self.model()
        batch = self.masked(layout, self.sequences(self.vocab_size(model)))
        forward = self.bind(model, layout)
        whole, bare = self.run(forward, batch), self.run(forward, batch, **options)
        expect(same(whole.log_probs, bare.log_probs), f"{options} changed log_prob's bits")
        if "entropy" in options:
            expect(bare.entropy is None, "entropy=False returned an entropy")
        else:
            expect(same(bare.entropy, whole.entropy), "entropy_grad=False changed the entropy's bits")
            expect(not entropy_of(bare).requires_grad, "entropy_grad=False: the entropy requires grad")
        g, _ = self.upstream(batch, scores_in(whole))
        got, want = (self.gradients(model, (scores_in(out),), (g,)) for out in (bare, whole))
        self.check_gradients(got, want)

    def test_loss_fn(self, layout: str) -> None:
        """The single pass: the same log_prob bits, the loss summed over scored tokens, and its gradients."""
        model = self.model()
        batch = self.masked(layout, self.sequences(self.vocab_size(model)))
        forward = self.bind(model, layout)
        whole = self.run(forward, batch)
        g, e = self.upstream(batch, scores_in(whole))
        seen: list[int] = []

        def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
            seen.extend(index.tolist())
            assert scores.entropy is not None
            return g[index] * scores.log_probs + e[index] * scores.entropy

        single = self.run(forward, batch, loss_fn=loss_fn)
        live = (batch.labels != IGNORE_INDEX).nonzero().flatten().tolist()
        expect(sorted(seen) == live, f"loss_fn saw tokens {sorted(seen)}, expected those that are scored, {live}")
        expect(same(single.log_probs, whole.log_probs), "log_prob's bits depend on loss_fn")
        if single.loss is None:
            pytest.fail("out.loss is None")
        expect(not scores_in(single).requires_grad, "with loss_fn, log_probs are not detached")
        want = (g * scores_in(whole) + e * entropy_of(whole))[batch.labels != IGNORE_INDEX].sum()
        allowed = 100 * self.tolerances[self.dtypes[0]] * max(1.0, float(want.detach().abs()))
        off = abs(float(single.loss.detach()) - float(want.detach()))
        expect(off <= allowed, f"the loss is {off:.3g} off, allowed {allowed:.3g}")
        self.check_gradients(self.gradients(model, (single.loss,), (None,)), self.gradients(model, (want,), (None,)))

    def test_keep_bytes(self, layout: str) -> None:
        """What is kept for the backward changes no bit of log_probs, and gradients stay right."""
        model = self.model()
        batch = self.masked(layout, self.sequences(self.vocab_size(model)))
        forward = self.bind(model, layout)
        outs = [self.run(forward, batch, keep_bytes=keep_bytes) for keep_bytes in (1 << 20, 0)]
        expect(same(outs[0].log_probs, outs[1].log_probs), "keep_bytes changed log_prob's bits")
        upstream = self.upstream(batch, scores_in(outs[0]))
        kept, plain = (self.gradients(model, (scores_in(out), entropy_of(out)), upstream) for out in outs)
        self.check_gradients(kept, plain)

    def test_the_first_ratio_is_one(self, layout: str) -> None:
        """In train mode: without gradient, without entropy, and again, log_prob has the same bits."""
        model = self.model().train()
        batch = self.masked(layout, self.sequences(self.vocab_size(model)))
        forward = self.bind(model, layout)
        with torch.no_grad():
            old = self.run(forward, batch, entropy=False)
        for out in (self.run(forward, batch), self.run(forward, batch)):
            expect(same(out.log_probs, old.log_probs), "the first ratio is not exactly 1")

    def test_ignored_tokens_are_exactly_zero(self, layout: str) -> None:
        """Outputs are 0, and a NaN in their upstream gradients reaches no parameter; also where all are ignored."""
        model = self.model()
        sequences = self.sequences(self.vocab_size(model))
        forward = self.bind(model, layout)
        batch = self.masked(layout, sequences)
        out = self.run(forward, batch)
        dead = batch.labels == IGNORE_INDEX
        upstream = self.upstream(batch, scores_in(out))
        want = self.gradients(model, (scores_in(out), entropy_of(out)), upstream)
        out = self.run(forward, batch)
        garbage = [x.masked_fill(dead, float("nan")) for x in upstream]
        got = self.gradients(model, (scores_in(out), entropy_of(out)), garbage)
        self.check_gradients(got, want)
        masks = [torch.zeros_like(x) for x in sequences]
        nothing = PackedBatch.from_sequences(sequences, loss_mask=masks)
        out = self.run(forward, nothing)
        for name, scores in (("log_probs", scores_in(out)), ("entropy", entropy_of(out))):
            expect(scores.shape == nothing.labels.shape and not scores.count_nonzero(), f"{name} of nothing are not 0")

    def test_values(self, layout: str) -> None:
        """A value model gives the values of every token, and their gradients; no scores."""
        own, model = self.value_model(), self.value_model()
        batch = self.batch(layout, self.sequences(self.vocab_size(self.model())), align=4)
        ids = torch.split(batch.input_ids.index_select(0, batch.place_M), list(batch.lengths))
        want = torch.cat([self.values(own, part) for part in ids])
        out = self.run(self.bind(model, layout), batch)
        if out.values is None:
            pytest.fail("out.values is None")
        expect(out.log_probs is None and out.entropy is None, "a value model returned scores")
        expect(out.values.shape == batch.labels.shape, f"values: got shape {tuple(out.values.shape)}, expected labels'")
        got = out.values.index_select(0, batch.place_M)
        off = float((got - want).detach().abs().max())
        allowed = self.tolerances[self.dtypes[0]] * max(1.0, float(want.detach().abs().max()))
        expect(off <= allowed, f"values are {off:.3g} off, allowed {allowed:.3g}")
        g, _ = self.upstream(batch, want)
        g = g.index_select(0, batch.place_M)
        self.check_gradients(self.gradients(model, (got,), (g,)), self.gradients(own, (want,), (g,)))
