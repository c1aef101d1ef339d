"""The contract of a backend as tests, for the backend's author to subclass.

    import torch
    from logitless.testing.conformance import BackendConformance

    class TestAcme(BackendConformance):
        backend = "acme"
        device = "cpu"
        dtypes = (torch.float32, torch.bfloat16)
        refuses = {"lora", "grad_buffer"}

Every check compares with `logitless.reference` in float64, within the tolerances of `logitless.testing.tolerance`.
What a backend refuses is checked as well: such a call must raise UnsupportedError. A check that does not apply is
named in `skips` with the reason; redefining one is an error, since a weaker check would look like a pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from logitless.errors import UnsupportedError
from logitless.testing.cases import Case, cases
from logitless.testing.example import Example, Results, random_example
from logitless.testing.memory import ProductCounter
from logitless.testing.tolerance import check_gradients, check_results, check_scores
from logitless.types import TokenLogProbs

__all__ = ["FEATURES", "OPTIONS", "BackendConformance"]

FEATURES = {"bias", "softcap", "lora", "per_token_temperature", "grad_buffer", "unvalidated"}
"""What `BackendConformance.refuses` may name; "unvalidated" is validate=False."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.37},
    "negative-scale": {"scale": -1.5},
    "softcap": {"softcap": 3.0},
    "scale-softcap-temperature": {"scale": 1.7, "softcap": 4.0, "temperature": 0.7},
    "padded-vocab": {"vocab_size": 131},
    "lora": {"lora": (3,)},
    "two-loras": {"lora": (2, 5), "bias": True, "scale": 0.8},
    "temperature": {"temperature": 0.7},
    "per-token-temperature": {"per_token_temperature": True},
    "all": {
        "bias": True,
        "scale": 1.3,
        "softcap": 5.0,
        "vocab_size": 131,
        "lora": (4,),
        "per_token_temperature": True,
    },
}


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal bits, NaN included."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(a.detach().nan_to_num(nan=-7.25), b.detach().nan_to_num(nan=-7.25))


def _expect(condition: object, message: str) -> None:
    if not condition:
        pytest.fail(message)


class BackendConformance:
    """Subclass it, name the backend, and pytest runs the checks."""

    backend: ClassVar[str]
    """Name under which the backend is installed."""
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    """Input dtypes that it serves; the checks run in each."""
    refuses: ClassVar[Collection[str]] = ()
    """Those of `FEATURES` that its `supports` refuses."""
    skips: ClassVar[Mapping[str, str]] = {}
    """Checks that do not apply, by name, and why."""
    sizes: ClassVar[tuple[int, int, int]] = (13, 157, 24)
    """Tokens, vocab rows and hidden size of random inputs."""
    weight_factor: ClassVar[float] = 1.3
    """Floors that d_weight may take where the entropy has no gradient; 1.1 everywhere else."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        checks = {name for name in vars(BackendConformance) if name.startswith("test_")}
        redefined = sorted(checks & vars(cls).keys())
        if redefined:
            raise TypeError(f"{cls.__qualname__} redefines {', '.join(redefined)}: name it otherwise, or use `skips`")
        if set(cls.skips) - checks:
            raise TypeError(f"{cls.__qualname__}.skips names no check: {', '.join(sorted(set(cls.skips) - checks))}")
        if set(cls.refuses) - FEATURES:
            raise TypeError(f"{cls.__qualname__}.refuses: got {sorted(cls.refuses)}, expected some of {FEATURES}")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each check runs in each dtype, and with each case or option where it asks for one."""
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self.dtypes, ids=lambda dtype: str(dtype).removeprefix("torch."))
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", cases(), ids=lambda case: case.id)
        if "option" in metafunc.fixturenames:
            metafunc.parametrize("option", OPTIONS)

    @pytest.fixture(autouse=True)
    def _skip(self, request: pytest.FixtureRequest) -> None:
        reason = self.skips.get(getattr(request.node, "originalname", ""))
        if reason:
            pytest.skip(reason)

    # Helpers

    def example(self, dtype: torch.dtype, tokens: int | tuple[int, ...] | None = None, **options: Any) -> Example:
        """Random inputs of this backend's sizes on its device."""
        count, vocab, hidden_size = self.sizes
        options = {"vocab": vocab, "hidden_size": hidden_size, "dtype": dtype, "device": self.device, **options}
        return random_example(count if tokens is None else tokens, **options)

    def run(self, example: Example, **options: Any) -> Results:
        """Forward and backward on the backend; where it refuses the call, checks that and skips."""
        refused = example.features | ({"unvalidated"} if not options.get("validate", True) else set())
        refused &= set(self.refuses)
        if refused:
            with pytest.raises(UnsupportedError):
                example.score(backend=self.backend, **options)
            pytest.skip(f"refuses {', '.join(sorted(refused))}, and says so")
        return example.run(backend=self.backend, **options)

    def check(self, example: Example, **options: Any) -> Results:
        """`run`, held to the truth."""
        got = self.run(example, **options)
        check_results(got, example)
        return got

    # Values and gradients

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
            _expect(_same(got.scores.log_probs, want.scores.log_probs), f"{kind} labels give other log_probs")

    # Which outputs and gradients

    def test_entropy_is_optional(self, dtype: torch.dtype) -> None:
        """entropy=False gives None, the same log_prob bits, and the gradients of log_probs alone."""
        example = self.example(dtype)
        whole, bare = self.run(example), self.run(example, entropy=False)
        _expect(bare.scores.entropy is None, "entropy=False returned an entropy")
        _expect(_same(bare.scores.log_probs, whole.scores.log_probs), "entropy=False changed log_prob's bits")
        self._check_without_entropy(bare, example)

    def test_entropy_grad_is_optional(self, dtype: torch.dtype) -> None:
        """entropy_grad=False gives the same entropy and log_prob bits, the entropy detached."""
        example = self.example(dtype)
        whole, bare = self.run(example), self.run(example, entropy_grad=False)
        entropy = bare.scores.entropy
        _expect(entropy is not None and not entropy.requires_grad, "entropy_grad=False: the entropy requires grad")
        _expect(_same(entropy, whole.scores.entropy), "entropy_grad=False changed the entropy's bits")
        _expect(_same(bare.scores.log_probs, whole.scores.log_probs), "entropy_grad=False changed log_prob's bits")
        self._check_without_entropy(bare, example)

    def _check_without_entropy(self, got: Results, example: Example) -> None:
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
        loss = out.log_probs.sum() + 0.5 * _entropy(out).sum()
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
            torch.autograd.backward([out.log_probs, _entropy(out)], [example.grad_log_probs, example.grad_entropy])
        _expect(_same(weight.grad, alone[0] + alone[1]), "two backwards do not add up")  # type: ignore[operator]

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
            _expect((grad is None) == (name in frozen), f"d_{name} is {'None' if grad is None else 'not None'}")
        _expect(part.flops < whole.flops or not whole.flops, f"frozen {frozen}: {part.flops} FLOP as with gradients")

    def test_nothing_to_differentiate(self, dtype: torch.dtype) -> None:
        """no_grad, or no input that requires grad: the same bits, and no graph."""
        example = self.example(dtype)
        want = self.run(example).scores
        with torch.no_grad():
            silent = example.fresh().score(backend=self.backend)
        for got in (silent, example.score(backend=self.backend)):
            _expect(_same(got.log_probs, want.log_probs), "log_prob's bits depend on whether gradients are wanted")
            _expect(_same(got.entropy, want.entropy), "the entropy's bits depend on whether gradients are wanted")
            _expect(not got.log_probs.requires_grad, "log_probs require grad")

    # Determinism and memory

    def test_repeats_bit_for_bit(self, dtype: torch.dtype) -> None:
        """The same call twice: scores and gradients have the same bits."""
        example = self.example(dtype, 50, per_token_temperature="per_token_temperature" not in self.refuses)
        first, again = self.run(example), self.run(example)
        _expect(_same(first.scores.log_probs, again.scores.log_probs), "log_probs differ")
        _expect(_same(first.scores.entropy, again.scores.entropy), "entropies differ")
        for name, grad in first.gradients.items():
            _expect(_same(grad, again.gradients[name]), f"d_{name} differs")

    @pytest.mark.parametrize("share", [0.3, 2.0])
    def test_keep_bytes(self, dtype: torch.dtype, share: float) -> None:
        """Whatever is kept for the backward, log_probs have the same bits and gradients are right."""
        count, vocab, _ = self.sizes
        example = self.example(dtype)
        want = self.run(example)
        got = self.check(example, keep_bytes=int(count * vocab * 4 * share), workspace_bytes=1 << 14)
        again = self.run(example, workspace_bytes=1 << 14)
        _expect(_same(got.scores.log_probs, again.scores.log_probs), "keep_bytes changed log_prob's bits")
        whole = self.check(example, keep_bytes=int(count * vocab * 8 * share))
        _expect(_same(whole.scores.log_probs, want.scores.log_probs), "keep_bytes changed log_prob's bits")

    def test_kept_memory_survives_a_second_backward(self, dtype: torch.dtype) -> None:
        """retain_graph=True: what is kept is not used up."""
        example = self.example(dtype).fresh()
        out = example.score(backend=self.backend, keep_bytes=1 << 20)
        leaves = list(example.leaves().values())
        first, second = (
            torch.autograd.grad(out.log_probs, leaves, example.grad_log_probs, retain_graph=True) for _ in range(2)
        )
        _expect(all(map(_same, first, second)), "the second backward of one graph gives other gradients")

    @pytest.mark.parametrize("workspace_bytes", [1, 5000, 1 << 16])
    def test_workspace_bytes(self, dtype: torch.dtype, workspace_bytes: int) -> None:
        """Little temporary memory costs time, not precision."""
        self.check(self.example(dtype, 7), workspace_bytes=workspace_bytes)

    # Ignored tokens, and labels that are none

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
                _expect(grad is not None and not grad[dead].count_nonzero(), f"d_{name} of ignored tokens is not 0")

    def test_all_ignored(self, dtype: torch.dtype) -> None:
        """Zeros and zero gradients, not NaN."""
        example = self.example(dtype)
        example = replace(example, labels=torch.full_like(example.labels, -100))
        for validate in (True, False) if "unvalidated" not in self.refuses else (True,):
            for name, grad in self.check(example, validate=validate).gradients.items():
                _expect(grad is not None and not grad.count_nonzero(), f"d_{name} is not 0")

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
        for score, right in ((got.scores.log_probs, truth.scores.log_probs), (_entropy(got.scores), None)):
            _expect(bool(score[at].isnan().all()), f"got {score[at].tolist()}, expected NaN")
            _expect(not score[~at].isnan().any(), "NaN in another token's score")
            if right is not None:
                check_scores(TokenLogProbs(torch.where(at, right.to(score.dtype), score), None), clean, truth.scores)
        grad = got.gradients["hidden"]
        _expect(grad is not None, "no d_hidden")
        if grad is not None:
            rows = grad.isnan().any(-1)
            _expect(torch.equal(rows, at), f"d_hidden is NaN in tokens {rows.nonzero().flatten().tolist()}")
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

    # Range

    def test_scores_are_in_range(self, dtype: torch.dtype) -> None:
        """log_prob ≤ 0 and 0 ≤ entropy ≤ log V, for logits from flat to peaked."""
        for std in (0.0, 1e-3, 1.0, 30.0):
            example = self.example(dtype, 50, std=std, ignored=False)
            out = self.run(example).scores
            top = torch.tensor(float(self.sizes[1]), dtype=torch.float64).log().to(out.log_probs.dtype)
            _expect(bool((out.log_probs <= 0).all()), f"log_prob above 0 at std {std}")
            entropy = _entropy(out).cpu()
            _expect(bool(((entropy >= 0) & (entropy <= top)).all()), f"entropy outside of [0, log V] at std {std}")

    @pytest.mark.parametrize("offset", [1e4, -1e4, -30.0])
    def test_common_offset(self, dtype: torch.dtype, offset: float) -> None:
        """Logits that share an offset: within 2 ulp of it."""
        example = self.example(dtype, bias=True)
        bias = torch.full_like(_bias(example), offset)
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
        bias = _bias(example).masked_fill(columns, float("-inf"))
        labels = torch.tensor([2101, -100, 2299, 2200, 2298], device=self.device)
        example = replace(example.with_head(bias=bias.index_fill(0, labels[labels >= 0], 0.5)), labels=labels)
        got = self.check(example, workspace_bytes=1 << 16)
        self.check(example)
        grad = got.gradients["bias"]
        gone = _bias(example).isinf()
        _expect(grad is not None and not grad[gone].count_nonzero(), "a column at −inf has a gradient")

    def test_label_at_minus_infinity(self, dtype: torch.dtype) -> None:
        """A token that cannot come has log_prob −inf, and the other scores stay right."""
        example = self.example(dtype, bias=True)
        bias = _bias(example).index_fill(0, example.labels[:1], float("-inf"))
        fresh = example.with_head(bias=bias)
        fresh = replace(fresh, labels=torch.where(example.labels == example.labels[0], -100, example.labels))
        fresh.labels[0] = example.labels[0]
        if "bias" in self.refuses:
            pytest.skip("refuses bias")
        out = fresh.score(backend=self.backend)
        check_scores(out, fresh)
        _expect(float(out.log_probs[0]) == float("-inf"), f"got {float(out.log_probs[0])}, expected −inf")

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
            entropy = _entropy(got.scores)
            _expect(not got.scores.log_probs.count_nonzero() and not entropy.count_nonzero(), "scores are not 0")
            for name, grad in got.gradients.items():
                _expect(grad is not None and not grad.count_nonzero(), f"d_{name} is not 0")

    def test_confident_tokens_keep_their_digits(self, dtype: torch.dtype) -> None:
        """p(label) > 1/2, down to 1 − p = 3e-5: log_prob is right relatively, as PPO's ratios need it."""
        tokens, vocab, hidden_size = 400, 1000, 64
        example = self.example(dtype, tokens, vocab=vocab, hidden_size=hidden_size, std=1.0, ignored=False, seed=3)
        rows = example.head.weight[example.labels].double()
        height = torch.linspace(6.0, 17.0, tokens, dtype=torch.float64, device=self.device).unsqueeze(1)
        hidden = (height * rows / rows.square().sum(1, keepdim=True)).to(dtype)
        example = replace(example, hidden=hidden)
        truth = example.truth().scores.log_probs.detach()
        rest = -torch.expm1(truth)
        chosen = (rest < 0.5) & (rest >= 3e-5)
        _expect(int(chosen.sum()) > tokens // 3, "the inputs of this check have too few confident tokens")
        got = self.run(example).scores.log_probs.detach().double()
        error = ((got - truth) / truth).abs()[chosen]
        median, tail = float(error.median()), float(error.quantile(0.99))
        _expect(median <= 1e-3 and tail <= 0.05, f"relative error of log_prob: median {median:.2g}, p99 {tail:.2g}")

    # What is read, written and shared

    def test_strided_hidden(self, dtype: torch.dtype) -> None:
        """[B, S, D] seen through a transpose: the gradient reaches the tensor beneath."""
        example = self.example(dtype, (3, 4))
        beneath = example.hidden.transpose(0, 1).contiguous().requires_grad_()
        seen = replace(example, hidden=beneath.transpose(0, 1))
        out = seen.score(backend=self.backend)
        torch.autograd.backward([out.log_probs, _entropy(out)], [example.grad_log_probs, example.grad_entropy])
        _expect(beneath.grad is not None, "a transposed hidden got no gradient")
        if beneath.grad is not None:
            grads = {**dict.fromkeys(example.leaves()), "hidden": beneath.grad.transpose(0, 1)}
            check_gradients(grads, example)

    def test_strided_weight(self, dtype: torch.dtype) -> None:
        """A weight that is the transpose of a [D, V] tensor."""
        example = self.example(dtype)
        beneath = example.head.weight.T.contiguous().requires_grad_()
        out = example.with_head(weight=beneath.T).score(backend=self.backend)
        check_scores(out, example)
        torch.autograd.backward([out.log_probs, _entropy(out)], [example.grad_log_probs, example.grad_entropy])
        _expect(beneath.grad is not None, "a transposed weight got no gradient")
        if beneath.grad is not None:
            check_gradients({**dict.fromkeys(example.leaves()), "weight": beneath.grad.T}, example)

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
            _expect(tensor._version == version and torch.equal(tensor.detach(), value), f"{name} was written")

    def test_outputs_are_the_callers(self, dtype: torch.dtype) -> None:
        """Outputs share no memory with what the backward reads: writing into them spoils nothing."""
        example = self.example(dtype)
        want = self.run(example, keep_bytes=1 << 20)
        fresh = example.fresh()
        out = fresh.score(backend=self.backend, keep_bytes=1 << 20)
        with torch.no_grad():
            out.log_probs.detach().fill_(7.0)
            _entropy(out).detach().fill_(7.0)
        got = fresh.pull(out)
        for name, grad in want.gradients.items():
            _expect(_same(grad, got[name]), f"d_{name} depends on what was written into an output")

    # Gradient buffer

    def test_grad_buffer(self, dtype: torch.dtype) -> None:
        """d_weight is added into the buffer, once for each backward, and the weight's own gradient is None."""
        if dtype == torch.float64:
            pytest.skip("the buffer is float32")
        example = self.example(dtype)
        buffer = torch.zeros_like(example.head.weight, dtype=torch.float32)
        got = self.run(example.with_head(grad_buffer=buffer))
        _expect(got.gradients["weight"] is None, "the weight got a gradient besides the buffer")
        check_gradients({**got.gradients, "weight": buffer}, example, dtypes={"weight": torch.float32})
        once = buffer.clone()
        self.run(example.with_head(grad_buffer=buffer))
        torch.testing.assert_close(buffer, 2 * once, rtol=1e-5, atol=1e-6)


def _entropy(out: TokenLogProbs) -> Tensor:
    if out.entropy is None:
        pytest.fail("out.entropy is None")
    return out.entropy


def _bias(example: Example) -> Tensor:
    if example.head.bias is None:
        pytest.fail("the example has no bias")
    return example.head.bias
