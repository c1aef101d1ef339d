"""Conformance checks of values and gradients, and of which of them are made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from logitless.linear import linear_log_probs
from logitless.policy import linear_policy_loss
from logitless.testing._conformance import OPTIONS, ConformanceChecks, entropy_of
from logitless.testing._kit import expect, same
from logitless.testing.cases import Case
from logitless.testing.example import Example, Results
from logitless.testing.memory import ProductCounter
from logitless.testing.tolerance import check_gradients, check_results, check_scores
from logitless.types import TokenLogProbs

__all__ = ["ValueChecks"]


class ValueChecks(ConformanceChecks, kit=True):
    """What is computed."""

    def test_cases(self, dtype: torch.dtype, case: Case) -> None:
        """The cases with right values."""
        example = case.build(dtype, self.device)
        got = self.check(example)
        if dtype == torch.float64:
            expected = case.expected
            on_cpu = TokenLogProbs(got.scores.log_probs.cpu(), None)
            check_scores(on_cpu, case.build(dtype), TokenLogProbs(expected.scores.log_probs, None))
            grads = {name: None if grad is None else grad.cpu() for name, grad in got.gradients.items()}
            check_gradients(grads, case.build(dtype), truth=expected)

    @pytest.mark.parametrize("tokens", [0, 1, 13, 50])
    def test_options(self, dtype: torch.dtype, option: str, tokens: int) -> None:
        """Each part of the head, and all together, on sizes that no tile divides."""
        self.check(self.example(dtype, tokens, **OPTIONS[option]))

    def test_leading_shapes(self, dtype: torch.dtype) -> None:
        """A scalar label, and three leading dimensions."""
        self.check(self.example(dtype, (), ignored=False))
        self.check(self.example(dtype, (2, 3, 2)))

    def test_ordinary_sizes(self, dtype: torch.dtype) -> None:
        """Several tiles in each direction, against the same tolerances."""
        self.check(self.example(dtype, 70, vocab=2300, hidden_size=40), workspace_bytes=1 << 18)

    def test_temperatures(self, dtype: torch.dtype) -> None:
        """An int, a float and a 0-dim tensor of either kind mean the same."""
        example = self.example(dtype)
        for value in (2, 2.0):
            self.check(replace(example, temperature=value))
        self.check(replace(example, temperature=0.7))
        for tensor in (torch.tensor(2, device=self.device), torch.tensor(2.0, device=self.device)):
            if "per_token_temperature" not in self.refuses:
                got = replace(example, temperature=tensor).score(backend=self.backend)
                check_scores(got, replace(example, temperature=2.0))

    def test_per_token_temperature_with_as_many_tokens_as_vocab_rows(self, dtype: torch.dtype) -> None:
        """N = V: dividing the columns in place of the rows would not fail, only be wrong."""
        self.check(self.example(dtype, self.sizes[1], per_token_temperature=True))

    def test_label_types(self, dtype: torch.dtype) -> None:
        """int32 and uint8 labels are token ids as int64 ones are."""
        example = self.example(dtype, ignored=False)
        want = self.run(example)
        for kind in (torch.int32, torch.uint8):
            got = self.run(replace(example, labels=example.labels.to(kind)))
            expect(same(got.scores.log_probs, want.scores.log_probs), f"{kind} labels give other log_probs")

    def test_entropy_is_optional(self, dtype: torch.dtype) -> None:
        """entropy=False gives None, the same log_prob bits, and the gradients of log_probs alone."""
        example = self.example(dtype)
        whole, bare = self.run(example), self.run(example, entropy=False)
        expect(bare.scores.entropy is None, "entropy=False returned an entropy")
        expect(same(bare.scores.log_probs, whole.scores.log_probs), "entropy=False changed log_prob's bits")
        self._check_withoutentropy_of(bare, example)

    def test_entropy_grad_is_optional(self, dtype: torch.dtype) -> None:
        """entropy_grad=False gives the same entropy and log_prob bits, the entropy detached."""
        example = self.example(dtype)
        whole, bare = self.run(example), self.run(example, entropy_grad=False)
        entropy = bare.scores.entropy
        expect(entropy is not None and not entropy.requires_grad, "entropy_grad=False: the entropy requires grad")
        expect(same(entropy, whole.scores.entropy), "entropy_grad=False changed the entropy's bits")
        expect(same(bare.scores.log_probs, whole.scores.log_probs), "entropy_grad=False changed log_prob's bits")
        self._check_withoutentropy_of(bare, example)

    def _check_withoutentropy_of(self, got: Results, example: Example) -> None:
        bare = replace(example, grad_entropy=torch.zeros_like(example.grad_entropy))
        check_gradients(got.gradients, bare, factors={"weight": self.weight_factor})

    @pytest.mark.parametrize("output", ["log_probs", "entropy"])
    def test_one_upstream_gradient(self, dtype: torch.dtype, output: str) -> None:
        """A loss of one output only."""
        example = self.example(dtype, bias=True) if "bias" not in self.refuses else self.example(dtype)
        fresh = example.fresh()
        value = getattr(fresh.score(backend=self.backend), output)
        leaves = fresh.leaves()
        zeros = torch.zeros_like(example.grad_log_probs)
        if output == "log_probs":
            upstream, example = example.grad_log_probs, replace(example, grad_entropy=zeros)
        else:
            upstream, example = example.grad_entropy, replace(example, grad_log_probs=zeros)
        grads = torch.autograd.grad(value, list(leaves.values()), upstream)
        check_gradients(dict(zip(leaves, grads, strict=True)), example)

    def test_expanded_upstream_gradient(self, dtype: torch.dtype) -> None:
        """`sum().backward()` hands over an expanded gradient, with strides of 0."""
        example = self.example(dtype)
        fresh = example.fresh()
        out = fresh.score(backend=self.backend)
        loss = out.log_probs.sum() + 0.5 * entropy_of(out).sum()
        torch.autograd.backward(loss)
        ones = torch.ones_like(example.grad_log_probs)
        grads = {name: leaf.grad for name, leaf in fresh.leaves().items()}
        check_gradients(grads, replace(example, grad_log_probs=ones, grad_entropy=0.5 * ones))

    def test_accumulates_over_backwards(self, dtype: torch.dtype) -> None:
        """Two micro-batches into one `.grad`, the second forward before the first backward."""
        first, second = self.example(dtype), self.example(dtype, seed=1)
        second = second.with_head(weight=first.head.weight)
        alone = [self.run(example).gradients["weight"] for example in (first, second)]
        weight = first.head.weight.clone().requires_grad_()
        outs = [example.with_head(weight=weight).score(backend=self.backend) for example in (first, second)]
        for example, out in zip((first, second), outs, strict=True):
            torch.autograd.backward([out.log_probs, entropy_of(out)], [example.grad_log_probs, example.grad_entropy])
        expect(same(weight.grad, alone[0] + alone[1]), "two backwards do not add up")  # type: ignore[operator]

    @pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("hidden", "weight")], ids="-".join)
    def test_frozen_inputs_get_none(self, dtype: torch.dtype, frozen: tuple[str, ...]) -> None:
        """No gradient, and no product for it, where an input does not require grad."""
        example = self.example(dtype, bias="bias" not in self.refuses)
        with ProductCounter() as whole:
            self.run(example)
        with ProductCounter() as part:
            got = self.run(example, frozen=frozen)
        check_results(got, example)
        for name, grad in got.gradients.items():
            expect((grad is None) == (name in frozen), f"d_{name} is {'None' if grad is None else 'not None'}")
        expect(part.flops < whole.flops or not whole.flops, f"frozen {frozen}: {part.flops} FLOP as with gradients")

    def test_nothing_to_differentiate(self, dtype: torch.dtype) -> None:
        """no_grad, or no input that requires grad: the same bits, and no graph."""
        example = self.example(dtype)
        want = self.run(example).scores
        with torch.no_grad():
            silent = example.fresh().score(backend=self.backend)
        for got in (silent, example.score(backend=self.backend)):
            expect(same(got.log_probs, want.log_probs), "log_prob's bits depend on whether gradients are wanted")
            expect(same(got.entropy, want.entropy), "the entropy's bits depend on whether gradients are wanted")
            expect(not got.log_probs.requires_grad, "log_probs require grad")

    @pytest.mark.parametrize("workspace_bytes", [1 << 14, 512 << 20])
    def test_policy_loss(self, dtype: torch.dtype, option: str, workspace_bytes: int) -> None:
        """The single pass: the op's log_prob bits, the sum of the token losses, and right gradients."""
        example = self.example(dtype, 50, **OPTIONS[option])
        loss, got = self.run_policy_loss(example, workspace_bytes=workspace_bytes)
        check_results(got, example)
        two_passes = example.run(backend=self.backend, workspace_bytes=workspace_bytes)
        expect(same(got.scores.log_probs, two_passes.scores.log_probs), "log_prob's bits are not the op's")
        expect(not got.scores.log_probs.requires_grad, "the scores are not detached")
        exact = example.truth().scores
        parts = example.grad_log_probs * exact.log_probs + example.grad_entropy * entropy_of(exact)
        bound = 1e-9 if dtype == torch.float64 else 1e-3
        expect(
            abs(float(loss.detach()) - float(parts.detach().sum())) <= bound * (1 + float(parts.detach().abs().sum())),
            "the loss is off",
        )

    def test_policy_loss_over_many_chunks(self, dtype: torch.dtype) -> None:
        """d_weight is summed in float32 (float64) over the chunks, and rounded once."""
        example = self.example(dtype, 600, vocab=60, hidden_size=16, ignored=False)
        _, got = self.run_policy_loss(example, workspace_bytes=1 << 12)
        check_results(got, example)
        two_passes = example.run(backend=self.backend, workspace_bytes=1 << 12)
        expect(same(got.scores.log_probs, two_passes.scores.log_probs), "log_prob's bits are not the op's")

    def test_policy_loss_scaled_afterwards(self, dtype: torch.dtype) -> None:
        """Small float16 gradients survive until a GradScaler's factor lifts them: they are rounded after it."""
        if "policy_loss" in self.refuses:
            pytest.skip("the backend has no single pass")
        example, small = self.example(dtype, 50).fresh(), 2.0**-22
        weight, g = example.head.weight, example.grad_log_probs.flatten()
        leaves = (example.hidden, weight)
        loss, _ = linear_policy_loss(
            *leaves, example.labels, lambda scores, i: small * g[i] * scores.log_probs, backend=self.backend
        )
        got = torch.autograd.grad(loss / small, leaves)
        out = linear_log_probs(*leaves, example.labels, backend=self.backend)
        want = torch.autograd.grad((example.grad_log_probs * out.log_probs).sum(), leaves)
        for name, a, b in zip(("hidden", "weight"), got, want, strict=True):
            expect(a.dtype == b.dtype, f"d_{name} has dtype {a.dtype}, expected {b.dtype}")
            off = float((a.double() - b.double()).norm() / b.double().norm())
            expect(off < (1e-2 if dtype == torch.bfloat16 else 2e-3), f"d_{name} is off by {off:.2e} when scaled up")
