"""The contract of a backend's divergences: subclass `DivergenceConformance`, as `BackendConformance`. Needs pytest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import logitless
from logitless import reference
from logitless.testing._conformance import OPTIONS, bias_of
from logitless.testing._kit import Kit, expect, same
from logitless.testing.distributed import run_ranks
from logitless.testing.example import Example, random_example

__all__ = ["Divergence", "DivergenceConformance", "check_divergence", "random_divergence"]

DIRECTIONS = ("forward", "reverse", "jsd")
GRADIENT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

Found = tuple[Tensor, dict[str, Tensor | None]]
"""Divergences [...] and the gradient of each of the student's leaves by name."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Inputs of `linear_kl`; the student's labels say which tokens count, its `grad_log_probs` are upstream."""

    student: Example
    teacher: Example
    direction: str = "forward"
    beta: float = 0.5

    def to(self, dtype: torch.dtype) -> Divergence:
        """Leaves rounded to a dtype."""
        return replace(self, student=self.student.to(dtype), teacher=self.teacher.to(dtype))

    def with_one(self, name: str, example: Example) -> Divergence:
        """With another "student" or "teacher"."""
        both = {"student": self.student, "teacher": self.teacher, name: example}
        return replace(self, student=both["student"], teacher=both["teacher"])

    def value(self, function: Any = None, **options: Any) -> Tensor:
        """`logitless.linear_kl`, or another function, on the inputs as they are."""
        s, t = self.student, self.teacher
        chosen: dict[str, Any] = {
            "direction": self.direction,
            "beta": self.beta,
            "temperature": s.temperature,
            "mask": s.live,
        }
        out: Tensor = (function or logitless.linear_kl)(s.hidden, s.head, t.hidden, t.head, **chosen, **options)
        return out

    def run(self, function: Any = None, *, frozen: Collection[str] = (), **options: Any) -> Found:
        """Forward and backward on fresh leaves."""
        fresh = replace(self, student=self.student.fresh(frozen))
        value = fresh.value(function, **options)
        leaves = {name: leaf for name, leaf in fresh.student.leaves().items() if leaf.requires_grad}
        grads = torch.autograd.grad(value, list(leaves.values()), self.student.grad_log_probs)
        return value, {**dict.fromkeys(fresh.student.leaves()), **dict(zip(leaves, grads, strict=True))}

    def truth(self) -> Found:
        """The reference in float64, by autograd through full logits."""
        return self.to(torch.float64).run(reference.linear_kl)


def random_divergence(
    tokens: int | tuple[int, ...] = 13,
    *,
    direction: str = "forward",
    beta: float = 0.5,
    ref_hidden_size: int = 20,
    seed: int = 0,
    ref: Any = None,
    **options: Any,
) -> Divergence:
    """Two unrelated heads; `options` are `random_example`'s, `ref` replaces some of them for the teacher."""
    shared = {name: options[name] for name in ("vocab", "dtype", "device", "std", "vocab_size") if name in options}
    teacher = random_example(tokens, hidden_size=ref_hidden_size, seed=seed + 1000, **{**shared, **(ref or {})})
    return Divergence(random_example(tokens, seed=seed, **options), teacher, direction, beta)


def check_divergence(got: Found, divergence: Divergence, truth: Found | None = None) -> None:
    """Raises if a divergence is off by more than a few roundings of the logits, a gradient by more than one of dz."""
    student, (value, grads), (right, exact) = divergence.student, got, truth or divergence.truth()
    wide = torch.promote_types(student.dtype, torch.float32)
    expect(value.dtype == wide and value.shape == student.labels.shape, f"got {value.dtype} {tuple(value.shape)}")
    expect(not value[~student.live].count_nonzero(), "divergences of masked tokens are not exactly 0")
    expect(not (value < 0).any(), "a divergence is negative")
    top = max(1.0, *(float(_logits(x).abs().amax()) for x in (student, divergence.teacher) if x.labels.numel()))
    allowed = 16 * torch.finfo(wide).eps * (top + right.abs())
    wrong = ~((value.double() - right).abs() <= allowed) & (value.double() != right)
    if wrong.any():
        at = int(wrong.flatten().nonzero()[0, 0])
        pytest.fail(f"token {at}: got {value.flatten()[at]:.9g}, truth {right.flatten()[at]:.9g}")
    for name, leaf in student.leaves().items():
        grad, want = grads[name], exact[name]
        if grad is None or want is None:
            continue
        expect(grad.dtype == leaf.dtype and grad.shape == leaf.shape, f"d_{name}: got {grad.dtype} {tuple(grad.shape)}")
        error, size = float((grad.double() - want).norm()), float(want.norm())
        limits = torch.finfo(leaf.dtype)
        underflow = limits.tiny * limits.eps * math.sqrt(leaf.numel())
        # Where student and teacher nearly agree, dz is what rounding the logits leaves of p − q.
        least = 4 * torch.finfo(wide).eps * top * float(student.grad_log_probs.norm()) * float(_partner(student, name))
        allowed_error = max(GRADIENT[student.dtype], 8 * torch.finfo(wide).eps * top) * size + least + underflow
        expect(error <= allowed_error, f"d_{name}: L2 error {error:.3g}, allowed {allowed_error:.3g}, norm {size:.3g}")


def _logits(example: Example) -> Tensor:
    exact = example.to(torch.float64)
    z = reference.head_logits(exact.hidden.detach(), exact.head, exact.temperature)[example.live].detach()
    return z.masked_fill(z.isinf(), 0.0) if z.numel() else z.new_zeros(1)


def _partner(example: Example, name: str) -> Tensor:
    """The longest row of what a leaf is multiplied with."""
    leaves = {key: leaf.detach().double() for key, leaf in example.leaves().items()}
    other = {"hidden": "weight", "weight": "hidden", "bias": None}.get(
        name, name.replace("_u", "_B").replace("_b", "_u")
    )
    if other is None or not example.labels.numel():
        return torch.ones(())
    longest: Tensor = leaves[other.replace("_B", "_b")].nan_to_num(0.0).norm(dim=-1).max()
    return longest


def _sharded(
    rank: int, size: int, case: Divergence, cuts: tuple[int, ...], backend: str, reduce: bool, keeps: tuple[int, ...]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """One rank's share of a case."""
    start, stop = cuts[rank : rank + 2]

    def own(example: Example) -> Example:
        rows = {
            name: leaf[start:stop] if name in ("weight", "bias") or name.startswith("lora_b") else leaf
            for name, leaf in example.leaves().items()
        }
        return example.with_leaves(rows).with_head(vocab_start=start)

    share = replace(case, student=own(case.student), teacher=own(case.teacher))
    group: dict[str, Any] = {"tp_group": dist.group.WORLD, "reduce_hidden_grad": reduce}
    value, grads = share.run(backend=backend, workspace_bytes=1 << 16, keep_bytes=keeps[rank], **group)
    return value.detach(), grads


class DivergenceConformance(Kit, kit=True):
    """`linear_kl` of one backend against the reference in float64: values, gradients, edges, what is written."""

    backend: ClassVar[str]
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)
    device: ClassVar[str] = "cpu"
    sharded: ClassVar[bool] = True  # whether vocabularies may be sharded

    def parameters(self) -> Mapping[str, tuple[Any, Any]]:
        """Directions and dtypes of every check."""
        return {"direction": (DIRECTIONS, None), "dtype": (self.dtypes, str), "option": (tuple(OPTIONS), None)}

    def make(self, dtype: torch.dtype, direction: str, tokens: Any = 13, **options: Any) -> Divergence:
        """A random case on this class's device."""
        return random_divergence(tokens, direction=direction, dtype=dtype, device=self.device, **options)

    def check(self, divergence: Divergence, truth: Found | None = None, **options: Any) -> Found:
        """Run it on the backend, and hold it to the truth."""
        got = divergence.run(backend=self.backend, **options)
        check_divergence(got, divergence, truth)
        return got

    def test_options(self, dtype: torch.dtype, direction: str, option: str) -> None:
        """Every kind of student, with another kind of teacher."""
        names = list(OPTIONS)
        other = dict(OPTIONS[names[(names.index(option) + 5) % len(names)]])
        for shared in ("per_token_temperature", "temperature"):
            other.pop(shared, None)
        student = {"vocab_size": 131, **OPTIONS[option]}
        other = {"vocab": 140, "vocab_size": 131, **other}  # padded otherwise
        case = self.make(dtype, direction, ref=other, **student)
        case = replace(case, teacher=replace(case.teacher, temperature=case.student.temperature))
        truth = case.truth()
        self.check(case, truth)
        self.check(case, truth, validate=False)

    @pytest.mark.parametrize("beta", [0.01, 0.3, 0.9])
    def test_beta(self, dtype: torch.dtype, beta: float) -> None:
        """Mixtures that are not even."""
        case = self.make(dtype, "jsd", beta=beta)
        got, again = self.check(case), case.run(backend=self.backend)
        expect(same(got[0], again[0]) and same(got[1]["weight"], again[1]["weight"]), "a second call has other bits")

    @pytest.mark.parametrize(("workspace_bytes", "vocab"), [(1, 11), (1 << 15, 300), (1 << 17, 700)])
    def test_many_tiles(self, dtype: torch.dtype, direction: str, workspace_bytes: int, vocab: int) -> None:
        """Little temporary memory, leading dimensions, and a vocabulary of several tiles."""
        case = self.make(dtype, direction, (3, 4), vocab=vocab, bias=True)
        self.check(case, workspace_bytes=workspace_bytes)

    @pytest.mark.parametrize(
        ("share", "upstream", "options"),
        [(1, 1e-4, {"workspace_bytes": 1 << 15}), (3, 1.0, {"validate": False}), (16, 1e3, {})],
        ids=["little", "more", "all"],
    )
    def test_keep_bytes(
        self, dtype: torch.dtype, direction: str, share: int, upstream: float, options: Mapping[str, Any]
    ) -> None:
        """Whatever is kept: the same bits, right gradients, no more memory than that; and it is not used up."""
        head = {"bias": True, "softcap": 8.0, "lora": (3,), "per_token_temperature": True, "vocab_size": 507}
        case = self.make(dtype, direction, 20, vocab=512, std=4.0, **head)
        teacher = replace(case.teacher, temperature=case.student.temperature)
        case = replace(case, student=case.student.scale_upstream(upstream), teacher=teacher)
        fresh, kept = replace(case, student=case.student.fresh()), 0

        def counted(x: Tensor) -> Tensor:
            nonlocal kept
            kept += x.nbytes if x.dtype == torch.uint8 else 0
            return x

        with torch.autograd.graph.saved_tensors_hooks(counted, lambda x: x):
            value = fresh.value(backend=self.backend, keep_bytes=20 * 512 * share, **options)
        expect(same(value, case.value(backend=self.backend, **options)), "keep_bytes changed the divergence's bits")
        expect(kept <= 20 * 512 * share, f"keeps {kept} bytes, allowed {20 * 512 * share}")
        leaves, up = list(fresh.student.leaves().values()), case.student.grad_log_probs
        first, again = (torch.autograd.grad(value, leaves, up, retain_graph=True) for _ in range(2))
        expect(all(map(same, first, again)), "the second backward of one graph gives other gradients")
        check_divergence((value, dict(zip(fresh.student.leaves(), first, strict=True))), case)

    @pytest.mark.parametrize("std", [1e-3, 10.0, 60.0])
    def test_flat_and_peaked(self, dtype: torch.dtype, direction: str, std: float) -> None:
        """From equal to almost one-hot distributions: KL of hundreds of nats."""
        case = self.make(dtype, direction, 20, std=std)
        truth = case.truth()
        self.check(case, truth)
        self.check(case, truth, keep_bytes=1 << 20)

    @pytest.mark.parametrize("offset", [1e4, -1e4])
    def test_common_offset(self, dtype: torch.dtype, direction: str, offset: float) -> None:
        """Logits that share an offset, and the teacher's another."""
        case = self.make(dtype, direction, vocab=500, bias=True, ref={"bias": True})
        bias = torch.full_like(bias_of(case.student), offset)
        case = replace(case, student=case.student.with_head(bias=bias), teacher=case.teacher.with_head(bias=-bias / 2))
        self.check(case, workspace_bytes=1 << 16)

    @pytest.mark.parametrize("gone", ["both", "student", "teacher"])
    def test_minus_infinity(self, dtype: torch.dtype, direction: str, gone: str) -> None:
        """0·log(0/b) = 0, also in whole tiles; a·log(a/0) is infinite, with the finite gradient of the forward KL."""
        case = self.make(dtype, direction, 5, vocab=600, bias=True, ref={"bias": True})
        columns = torch.zeros(600, dtype=torch.bool, device=self.device)
        columns[3::7] = True
        columns[:500] = True
        for name in ("student", "teacher") if gone == "both" else (gone,):
            example: Example = getattr(case, name)
            bias = bias_of(example).masked_fill(columns, float("-inf"))
            case = case.with_one(name, example.with_head(bias=bias))
        infinite = gone == {"forward": "student", "reverse": "teacher"}.get(direction)
        if not (infinite and direction == "reverse"):
            value, _ = self.check(case, workspace_bytes=1 << 15)
        else:
            value, _ = case.run(backend=self.backend)
        expect(bool((value[case.student.live] == math.inf).all()) == infinite, f"got {value.tolist()}")

    def test_weightless_columns(self, dtype: torch.dtype, direction: str) -> None:
        """Columns at −inf for one head, and for the other so unlikely that their weight is 0: they count nothing."""
        case = self.make(dtype, direction, 5, vocab=600, bias=True, ref={"bias": True})
        gone, faint = ("teacher", "student") if direction == "reverse" else ("student", "teacher")
        for name, low in ((gone, -math.inf), (faint, -2000.0)):
            bias = bias_of(getattr(case, name)).clone()
            bias[:500] = low
            case = case.with_one(name, getattr(case, name).with_head(bias=bias))
        value, _ = self.check(case, workspace_bytes=1 << 15)
        expect(bool(value.isfinite().all()), f"got {value.tolist()}")

    @pytest.mark.parametrize("validate", [True, False], ids=["validated", "unvalidated"])
    def test_masked_tokens_are_exactly_zero(self, dtype: torch.dtype, direction: str, validate: bool) -> None:
        """Outputs and gradients are 0, and garbage in either's hidden states reaches nothing."""
        clean = self.make(dtype, direction, per_token_temperature=True)
        dead = ~clean.student.live
        dirty = replace(
            clean,
            student=replace(
                clean.student,
                hidden=clean.student.hidden.masked_fill(dead.unsqueeze(-1), float("nan")),
                grad_log_probs=clean.student.grad_log_probs.masked_fill(dead, float("nan")),
                temperature=torch.as_tensor(clean.student.temperature).masked_fill(dead, 0.0),
            ),
            teacher=replace(clean.teacher, hidden=clean.teacher.hidden.masked_fill(dead.unsqueeze(-1), float("inf"))),
        )
        got = dirty.run(backend=self.backend, validate=validate)
        check_divergence(got, clean)
        grad = got[1]["hidden"]
        expect(grad is not None and not grad[dead].count_nonzero(), "d_hidden of masked tokens is not 0")

    @pytest.mark.parametrize("tokens", [0, 6])
    def test_no_token_counts(self, dtype: torch.dtype, direction: str, tokens: int) -> None:
        """Zeros, not NaN, from no tokens and from masked ones."""
        case = self.make(dtype, direction, tokens)
        case = replace(case, student=replace(case.student, labels=torch.full_like(case.student.labels, -100)))
        for name, grad in case.run(backend=self.backend)[1].items():
            expect(grad is not None and not grad.count_nonzero(), f"d_{name} is not 0")

    @pytest.mark.parametrize("spoilt", ["student", "teacher"])
    def test_nan_stays_in_its_own_token(self, dtype: torch.dtype, direction: str, spoilt: str) -> None:
        """A NaN hidden state spoils its own divergence and gradient only."""
        case = self.make(dtype, direction)
        example: Example = getattr(case, spoilt)
        hidden = example.hidden.index_fill(0, torch.tensor([4], device=self.device), float("nan"))
        value, grads = case.with_one(spoilt, replace(example, hidden=hidden)).run(backend=self.backend)
        rows = grads["hidden"]
        expect(rows is not None and rows.isnan().any(-1).nonzero().tolist() == [[4]], "d_hidden is NaN elsewhere")
        expect(value.isnan().nonzero().tolist() == [[4]], f"got {value.tolist()}")

    def test_absent_gradients_are_none(self, dtype: torch.dtype, direction: str) -> None:
        """What is frozen gets none, and the others are still right."""
        case = self.make(dtype, direction, bias=True, lora=(3,))
        truth = case.truth()
        for kept in case.student.leaves():
            got = case.run(frozen=set(case.student.leaves()) - {kept}, backend=self.backend)
            expect([name for name, grad in got[1].items() if grad is not None] == [kept], f"not d_{kept} alone")
            check_divergence(got, case, truth)

    def test_equal_heads(self, dtype: torch.dtype, direction: str) -> None:
        """A student that is its teacher: 0, and no gradient to speak of; almost its teacher: never below 0."""
        case = self.make(dtype, direction, 40, vocab=500, bias=True)
        near = case.student.with_head(bias=bias_of(case.student) * (1.0 + 2.0**-12))
        self.check(replace(case, teacher=near))
        value, _ = self.check(replace(case, teacher=case.student, beta=0.3))
        expect(float(value.detach().abs().max()) <= 1e-6, f"got {value.tolist()}")
        expect(direction == "jsd" or not value.count_nonzero(), f"got {value.tolist()}")

    def test_properties(self, dtype: torch.dtype, direction: str) -> None:
        """Whatever is added to all logits of a token, and in whatever order the vocabulary comes; jsd's two sides."""
        case = self.make(dtype, direction, vocab=500, bias=True, ref={"bias": True})
        value = case.value(backend=self.backend)
        atol = 128 * torch.finfo(value.dtype).eps * (1.0 + float(value.detach().max()))
        order = torch.randperm(500, generator=torch.Generator().manual_seed(0)).to(self.device)
        moved = case
        for name in ("student", "teacher"):
            example: Example = getattr(case, name)
            bias = bias_of(example)[order] + (8.0 if name == "student" else 0.0)
            moved = moved.with_one(name, example.with_head(weight=example.head.weight[order], bias=bias))
        if dtype in (torch.float32, torch.float64):  # else the moved bias is another one
            torch.testing.assert_close(moved.value(backend=self.backend), value, rtol=0.0, atol=atol)
        if direction == "jsd":
            expect(bool((value <= math.log(2.0)).all()), f"got {value.tolist()}, expected at most log 2")
            teacher = replace(case.teacher, labels=case.student.labels)
            turned = replace(case, student=teacher, teacher=case.student)
            torch.testing.assert_close(turned.value(backend=self.backend), value, rtol=0.0, atol=atol)

    @pytest.mark.parametrize(
        ("reduce", "keep_bytes"),
        [(True, (0, 0)), (False, (1 << 15, 1 << 15)), (True, (1 << 20, 0))],
        ids=["whole", "partial", "one-keeps"],
    )
    @pytest.mark.parametrize("cuts", [(0, 150, 300), (0, 7, 300), (0, 296, 300)], ids=str)
    def test_sharded(
        self, dtype: torch.dtype, direction: str, cuts: tuple[int, ...], reduce: bool, keep_bytes: tuple[int, int]
    ) -> None:
        """Vocabularies over two ranks, evenly, unevenly and one of them all padding, whatever each keeps."""
        if not self.sharded or self.device != "cpu":
            pytest.skip("several ranks need several GPUs, or a CPU")
        case = self.make(
            dtype, direction, 33, vocab=300, vocab_size=291, bias=True, softcap=6.0, lora=(3,), ref={"scale": 0.8}
        )
        ranks = run_ranks(2, _sharded, case, cuts, self.backend, reduce, keep_bytes)
        expect(torch.equal(ranks[0][0], ranks[1][0]), "the ranks' divergences differ")
        grads = {}
        for name in case.student.leaves():
            parts = [own[name] for _, own in ranks]
            if name in ("hidden", "lora_u0"):
                grads[name] = parts[0] if reduce else parts[0] + parts[1]
            else:
                grads[name] = torch.cat(parts)
        check_divergence((ranks[0][0], grads), case)

    @pytest.mark.parametrize("keep_bytes", [0, 1 << 13])
    def test_compiled_equals_eager(self, dtype: torch.dtype, direction: str, keep_bytes: int) -> None:
        """`torch.compile(fullgraph=True)` gives the same bits."""
        case = self.make(dtype, direction, bias=True, lora=(2,))

        def function(*leaves: Tensor) -> Tensor:
            student = case.student.with_leaves(dict(zip(case.student.leaves(), leaves, strict=True)))
            return replace(case, student=student).value(backend=self.backend, keep_bytes=keep_bytes)

        torch._dynamo.reset()
        found = []
        for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
            leaves = [leaf.clone().requires_grad_() for leaf in case.student.leaves().values()]
            value = run(*leaves)
            found.append([value, *torch.autograd.grad(value, leaves, case.student.grad_log_probs)])
        expect(all(map(same, *found)), "compiled and eager differ")
