"""Conformance checks of determinism, memory, and of what is read, written and shared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from logitless._call import make_call
from logitless._ops import linear_log_probs_op
from logitless.testing._conformance import OPTIONS, ConformanceChecks, entropy_of
from logitless.testing._kit import expect, same
from logitless.testing.memory import MemoryTracker
from logitless.testing.tolerance import check_gradients, check_scores

__all__ = ["MemoryChecks"]


class MemoryChecks(ConformanceChecks, kit=True):
    """What is kept and touched."""

    def test_repeats_bit_for_bit(self, dtype: torch.dtype) -> None:
        """The same call twice: scores and gradients have the same bits."""
        example = self.example(dtype, 50, per_token_temperature="per_token_temperature" not in self.refuses)
        first, again = self.run(example), self.run(example)
        expect(same(first.scores.log_probs, again.scores.log_probs), "log_probs differ")
        expect(same(first.scores.entropy, again.scores.entropy), "entropies differ")
        for name, grad in first.gradients.items():
            expect(same(grad, again.gradients[name]), f"d_{name} differs")

    @pytest.mark.parametrize("share", [0.3, 2.0])
    def test_keep_bytes(self, dtype: torch.dtype, share: float) -> None:
        """Whatever is kept for the backward, log_probs have the same bits and gradients are right."""
        count, vocab, _ = self.sizes
        example = self.example(dtype)
        want = self.run(example)
        got = self.check(example, keep_bytes=int(count * vocab * 4 * share), workspace_bytes=1 << 14)
        again = self.run(example, workspace_bytes=1 << 14)
        expect(same(got.scores.log_probs, again.scores.log_probs), "keep_bytes changed log_prob's bits")
        whole = self.check(example, keep_bytes=int(count * vocab * 8 * share))
        expect(same(whole.scores.log_probs, want.scores.log_probs), "keep_bytes changed log_prob's bits")

    def test_kept_memory_survives_a_second_backward(self, dtype: torch.dtype) -> None:
        """retain_graph=True: what is kept is not used up."""
        example = self.example(dtype).fresh()
        out = example.score(backend=self.backend, keep_bytes=1 << 20)
        leaves = list(example.leaves().values())
        first, second = (
            torch.autograd.grad(out.log_probs, leaves, example.grad_log_probs, retain_graph=True) for _ in range(2)
        )
        expect(all(map(same, first, second)), "the second backward of one graph gives other gradients")

    @pytest.mark.parametrize("workspace_bytes", [1, 5000, 1 << 16])
    def test_workspace_bytes(self, dtype: torch.dtype, workspace_bytes: int) -> None:
        """Little temporary memory costs time, not precision."""
        self.check(self.example(dtype, 7), workspace_bytes=workspace_bytes)

    @pytest.mark.parametrize("keep_bytes", [0, 4000])
    def test_compiled_equals_eager(self, dtype: torch.dtype, keep_bytes: int) -> None:
        """`torch.compile(fullgraph=True)` gives the same bits; what is kept has the shape that was told beforehand."""
        example = self.example(dtype)

        def score(*leaves: Tensor) -> tuple[Tensor, Tensor]:
            named = example.with_leaves(dict(zip(example.leaves(), leaves, strict=True)))
            out = named.score(backend=self.backend, keep_bytes=keep_bytes)
            return out.log_probs, entropy_of(out)

        torch._dynamo.reset()
        found = []
        for function in (score, torch.compile(score, fullgraph=True, backend="aot_eager")):
            leaves = [leaf.clone().requires_grad_() for leaf in example.leaves().values()]
            out = function(*leaves)
            found.append([*out, *torch.autograd.grad(out, leaves, [example.grad_log_probs, example.grad_entropy])])
        expect(all(map(same, *found)), "compiled and eager calls differ")

    @pytest.mark.parametrize("keep_bytes", [0, 4000])
    def test_opcheck(self, dtype: torch.dtype, keep_bytes: int) -> None:
        """`torch.library.opcheck`: the op's shapes, and what is kept, are those that were told beforehand."""
        fresh = self.example(dtype).fresh()
        call, _ = make_call(
            fresh.hidden,
            fresh.head,
            fresh.labels,
            temperature=fresh.temperature,
            entropy=True,
            entropy_grad=True,
            ignore_index=fresh.ignore_index,
            tp_group=None,
            reduce_hidden_grad=True,
            keep_bytes=keep_bytes,
            workspace_bytes=1 << 20,
            validate=True,
            backend=self.backend,
        )
        torch.library.opcheck(linear_log_probs_op, (*call.args, True, True, keep_bytes, []))

    def test_temporary_memory_is_bounded(self, dtype: torch.dtype) -> None:
        """Besides results, one accumulator for each gradient, and a few numbers of each token: `workspace_bytes`."""
        tokens, workspace_bytes = 60, 1 << 16
        example = self.example(dtype, tokens, vocab=2048, hidden_size=16).fresh()
        few = tokens * 8 * 32
        with torch.no_grad(), MemoryTracker() as scoring:
            example.score(backend=self.backend, workspace_bytes=workspace_bytes)
        allowed = workspace_bytes + few
        expect(scoring.peak_bytes <= allowed, f"the forward held {scoring.peak_bytes} bytes, allowed {allowed}")
        wide = torch.promote_types(dtype, torch.float32).itemsize
        allowed += sum(leaf.numel() * (dtype.itemsize + wide) for leaf in example.leaves().values())
        with MemoryTracker() as training:
            example.pull(example.score(backend=self.backend, workspace_bytes=workspace_bytes))
        expect(training.peak_bytes <= allowed, f"with its backward {training.peak_bytes} bytes, allowed {allowed}")

    def test_strided_hidden(self, dtype: torch.dtype) -> None:
        """[B, S, D] seen through a transpose: the gradient reaches the tensor beneath."""
        example = self.example(dtype, (3, 4))
        beneath = example.hidden.transpose(0, 1).contiguous().requires_grad_()
        seen = replace(example, hidden=beneath.transpose(0, 1))
        out = seen.score(backend=self.backend)
        torch.autograd.backward([out.log_probs, entropy_of(out)], [example.grad_log_probs, example.grad_entropy])
        expect(beneath.grad is not None, "a transposed hidden got no gradient")
        if beneath.grad is not None:
            grads = {**dict.fromkeys(example.leaves()), "hidden": beneath.grad.transpose(0, 1)}
            check_gradients(grads, example)

    def test_strided_weight(self, dtype: torch.dtype) -> None:
        """A weight that is the transpose of a [D, V] tensor."""
        example = self.example(dtype)
        beneath = example.head.weight.T.contiguous().requires_grad_()
        out = example.with_head(weight=beneath.T).score(backend=self.backend)
        check_scores(out, example)
        torch.autograd.backward([out.log_probs, entropy_of(out)], [example.grad_log_probs, example.grad_entropy])
        expect(beneath.grad is not None, "a transposed weight got no gradient")
        if beneath.grad is not None:
            check_gradients({**dict.fromkeys(example.leaves()), "weight": beneath.grad.T}, example)

    def test_strided_bias(self, dtype: torch.dtype) -> None:
        """A bias that is every other number of something."""
        if "bias" in self.refuses:
            pytest.skip("refused")
        example = self.example(dtype, bias=True)
        assert example.head.bias is not None
        beneath = torch.stack((example.head.bias, torch.full_like(example.head.bias, 9.0)), 1).requires_grad_()
        out = example.with_head(bias=beneath[:, 0]).score(backend=self.backend)
        check_scores(out, example)
        torch.autograd.backward([out.log_probs, entropy_of(out)], [example.grad_log_probs, example.grad_entropy])
        expect(beneath.grad is not None, "a strided bias got no gradient")
        if beneath.grad is not None:
            check_gradients({**dict.fromkeys(example.leaves()), "bias": beneath.grad[:, 0]}, example)

    def test_inputs_are_not_written(self, dtype: torch.dtype, option: str) -> None:
        """Forward and backward leave every input as it was, by value and by version."""
        example = self.example(dtype, **OPTIONS[option])
        fresh = example.fresh()
        if fresh.features & set(self.refuses):
            pytest.skip("refused")
        held = {**fresh.leaves(), "labels": fresh.labels, "g": fresh.grad_log_probs, "e": fresh.grad_entropy}
        if isinstance(fresh.temperature, Tensor):
            held["temperature"] = fresh.temperature
        before = {name: (tensor.detach().clone(), tensor._version) for name, tensor in held.items()}
        fresh.pull(fresh.score(backend=self.backend, keep_bytes=1 << 12))
        for name, tensor in held.items():
            value, version = before[name]
            expect(tensor._version == version and torch.equal(tensor.detach(), value), f"{name} was written")

    def test_outputs_are_the_callers(self, dtype: torch.dtype) -> None:
        """Outputs share no memory with what the backward reads: writing into them spoils nothing."""
        example = self.example(dtype, ignored=False)  # with ignored tokens, core copies the outputs
        want = self.run(example, keep_bytes=1 << 20)
        fresh = example.fresh()
        out = fresh.score(backend=self.backend, keep_bytes=1 << 20)
        with torch.no_grad():
            out.log_probs.detach().fill_(7.0)
            entropy_of(out).detach().fill_(7.0)
        got = fresh.pull(out)
        for name, grad in want.gradients.items():
            expect(same(grad, got[name]), f"d_{name} depends on what was written into an output")

    def test_grad_buffer(self, dtype: torch.dtype) -> None:
        """d_weight is added into the buffer, once for each backward, and the weight's own gradient is None."""
        if dtype == torch.float64:
            pytest.skip("the buffer is float32")
        example = self.example(dtype)
        buffer = torch.zeros_like(example.head.weight, dtype=torch.float32)
        got = self.run(example.with_head(grad_buffer=buffer))
        expect(got.gradients["weight"] is None, "the weight got a gradient besides the buffer")
        check_gradients({**got.gradients, "weight": buffer}, example, dtypes={"weight": torch.float32})
        once = buffer.clone()
        self.run(example.with_head(grad_buffer=buffer))
        torch.testing.assert_close(buffer, 2 * once, rtol=1e-5, atol=1e-6)
