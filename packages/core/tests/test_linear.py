"""What core does around a backend: ops, autograd, autocast, compilation. The backend here is the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from logitless import LMHead, TokenLogProbs, linear_log_probs
from logitless._ops import _backward_op, linear_log_probs_op
from logitless.errors import UnsupportedError
from logitless.testing import Example, ReferenceBackend, check_results, installed, random_example
from logitless.testing.conformance import BackendConformance
from logitless.types import Forwarded, Gradients, Problem, Request

pytestmark = pytest.mark.usefixtures("reference_backend")

FULL: dict[str, Any] = {
    "bias": True,
    "scale": 0.8,
    "softcap": 5.0,
    "vocab_size": 40,
    "lora": (2, 3),
    "per_token_temperature": True,
}
OPTIONS = {"plain": {}, "full": FULL}
each_option = pytest.mark.parametrize("option", OPTIONS)


class TestReferenceBackend(BackendConformance):
    backend = "reference"
    dtypes = (torch.float64, torch.float16)
    skips: ClassVar = dict.fromkeys(
        ("test_temporary_memory_is_bounded", "test_temporary_memory_of_top_k_log_probs_is_bounded"),
        "the reference holds the logits in full",
    )


class Keeps(ReferenceBackend):
    """Keeps bytes, and checks that they come back."""

    name = "keeps"

    def kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        return (min(keep_bytes, request.n_tokens),)

    def forward(self, problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]) -> Forwarded:
        out = super().forward(problem, entropy=entropy, entropy_grad=entropy_grad, kept_shape=kept_shape)
        return replace(out, kept=out.kept.fill_(7))

    def backward(self, problem: Problem, stats: torch.Tensor, kept: torch.Tensor, *rest: Any) -> Gradients:
        assert kept.tolist() == [7] * len(kept)
        return super().backward(problem, stats, kept, *rest)


def small(seed: int = 0, tokens: int = 9, dtype: torch.dtype = torch.float32, **options: Any) -> Example:
    return random_example(tokens, vocab=43, hidden_size=8, seed=seed, dtype=dtype, **options)


def scores(example: Example, **options: Any) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The call as a function of its tensors, as compilation wants it."""

    def call(labels: torch.Tensor, temperature: Any, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        named = replace(example, labels=labels, temperature=temperature).with_leaves(
            dict(zip(example.leaves(), leaves, strict=True))
        )
        out = named.score(**options)
        return (out.log_probs,) if out.entropy is None else (out.log_probs, out.entropy)

    return call


def run_both(
    eager: Callable[..., Any], compiled: Callable[..., Any], example: Example
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    found = []
    for function in (eager, compiled):
        fresh = example.fresh()
        leaves = list(fresh.leaves().values())
        outputs = function(fresh.labels, fresh.temperature, *leaves)
        upstream = [example.grad_log_probs, example.grad_entropy][: len(outputs)]
        found.append([*outputs, *torch.autograd.grad(outputs, leaves, upstream)])
    return found[0], found[1]


# Compilation


@each_option
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_equals_eager(option: str, dynamic: bool) -> None:
    eager = scores(small(**OPTIONS[option]))
    torch._dynamo.reset()
    compiled = torch.compile(eager, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (9, 14, 2) if dynamic else (9,):
        want, got = run_both(eager, compiled, small(tokens=tokens, seed=tokens, **OPTIONS[option]))
        assert all(map(torch.equal, want, got))


@pytest.mark.parametrize("choice", [{"entropy": False}, {"entropy_grad": False}, {"validate": False}], ids=str)
def test_compiled_equals_eager_with(choice: dict[str, bool]) -> None:
    example = small()
    if "entropy_grad" in choice:
        eager = scores(example, **choice)
        torch._dynamo.reset()
        want = eager(example.labels, 1.0, *example.leaves().values())
        compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
        got = compiled(example.labels, 1.0, *example.leaves().values())
    else:
        torch._dynamo.reset()
        eager = scores(example, **choice)
        want, got = run_both(eager, torch.compile(eager, fullgraph=True, backend="aot_eager"), example)
    assert len(want) == len(got)
    assert all(map(torch.equal, want, got))


def test_compiled_function_keeps_the_backend_of_its_tracing() -> None:
    example = small()
    torch._dynamo.reset()
    with installed(ReferenceBackend(), Keeps(), alone=True):
        compiled = torch.compile(scores(example, backend="keeps", keep_bytes=4), fullgraph=True, backend="aot_eager")
        want, got = run_both(scores(example, backend="keeps", keep_bytes=4), compiled, example)
    assert all(map(torch.equal, want, got))


# Custom ops


def op_arguments(example: Example, backend: str, keep_bytes: int) -> tuple[Any, ...]:
    head, (u, b) = example.head, (example.head.lora or [(None, None)])[0]
    temperature = example.temperature if isinstance(example.temperature, torch.Tensor) else None
    numbers = (1.0, head.scale, head.softcap, 0, head.vocab_size or len(head.weight), -100, 1 << 20, True)
    call = (
        example.hidden,
        head.weight,
        head.bias,
        u,
        b,
        example.labels,
        temperature,
        *numbers,
        backend,
        "",
        True,
        None,
        None,
    )
    return (*call, True, True, keep_bytes, [])


@each_option
@pytest.mark.parametrize("keep_bytes", [0, 5])
def test_opcheck(option: str, keep_bytes: int) -> None:
    options = {**OPTIONS[option], "lora": (2,)} if OPTIONS[option] else {}
    example = small(**options).fresh()
    with installed(Keeps(), alone=True):
        arguments = op_arguments(example, "keeps", keep_bytes)
        torch.library.opcheck(linear_log_probs_op, arguments)
        with torch.no_grad():
            _, _, *made, _ = linear_log_probs_op(*arguments)
        still = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments[:-4])
        needs = [leaf is not None for leaf in still[:5]]
        torch.library.opcheck(
            _backward_op, (*still, *made, example.grad_log_probs, example.grad_entropy, needs), test_utils=SOUND
        )
        torch.library.opcheck(
            _backward_op, (*still, *made, example.grad_log_probs, None, [True] + 4 * [False]), test_utils=SOUND
        )


SOUND = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


# Autograd


@pytest.mark.parametrize("buffered", [False, True], ids=["plain", "grad-buffer"])
def test_second_derivatives_are_refused(buffered: bool) -> None:
    example = small().fresh()
    if buffered:
        example = example.with_head(grad_buffer=torch.zeros_like(example.head.weight))
    out = example.score()

    def twice() -> None:
        (grad,) = torch.autograd.grad(out.log_probs.sum(), example.hidden, create_graph=True)
        grad.sum().backward()

    with pytest.raises(UnsupportedError, match="first derivatives only"):
        twice()


def test_third_party_of_the_graph_gets_its_gradient() -> None:
    example = small()
    base = example.hidden.clone().requires_grad_()
    out = replace(example, hidden=base.sin()).score()
    (got,) = torch.autograd.grad(out.log_probs, base, example.grad_log_probs)
    inner = replace(example, hidden=example.hidden.sin(), grad_entropy=torch.zeros_like(example.grad_entropy))
    want = inner.run().gradients["hidden"]
    assert want is not None
    torch.testing.assert_close(got, want * example.hidden.cos())


def test_activation_checkpointing_gives_the_same_bits() -> None:
    from torch.utils.checkpoint import checkpoint

    example = small(**FULL)
    eager = scores(example)

    def checkpointed(*arguments: Any) -> Any:
        return checkpoint(eager, *arguments, use_reentrant=False)

    want, got = run_both(eager, checkpointed, example)
    assert all(map(torch.equal, want, got))


def test_a_plain_weight_is_a_plain_head() -> None:
    example = small()
    of_tensor = linear_log_probs(example.hidden, example.head.weight, example.labels)
    of_head = linear_log_probs(example.hidden, LMHead(example.head.weight), example.labels)
    assert torch.equal(of_tensor.log_probs, of_head.log_probs)


# Dtypes


def test_autocast_equals_the_explicit_cast() -> None:
    example = small(dtype=torch.float32)
    fresh, cast = example.fresh(), example.fresh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = fresh.score()
    half = {"hidden": cast.hidden.bfloat16(), "weight": cast.head.weight.bfloat16()}
    want = cast.with_leaves(half).score()
    assert torch.equal(got.log_probs, want.log_probs)
    got_grads = fresh.pull(got)
    for name, grad in cast.pull(want).items():
        assert grad is not None
        assert grad.dtype == torch.float32
        assert torch.equal(grad, got_grads[name])  # type: ignore[arg-type]
    check_results_of_half = example.to(torch.bfloat16)
    assert check_results_of_half.run().scores.log_probs.equal(got.log_probs)


def test_autocast_leaves_float64_alone_as_torch_does() -> None:
    example = small(dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = example.run()
    check_results(got, example)


def test_backward_outside_of_autocast_is_the_forwards() -> None:
    example = small().fresh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = example.score()
        inside = example.pull(TokenLogProbs(*(x for x in (out.log_probs, out.entropy))))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = example.score()
    outside = example.pull(out)
    for name, grad in inside.items():
        assert torch.equal(grad, outside[name])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hidden", "weight"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str
)
def test_mixed_dtypes_are_computed_in_the_wider(hidden: torch.dtype, weight: torch.dtype) -> None:
    base = small()
    mixed = base.with_leaves({"hidden": base.hidden.to(hidden), "weight": base.head.weight.to(weight)})
    got = mixed.run()
    check_results(got, mixed)
    for name, leaf in mixed.leaves().items():
        grad = got.gradients[name]
        assert grad is not None
        assert grad.dtype == leaf.dtype


# What reaches a backend


def test_only_live_tokens_reach_the_backend() -> None:
    seen = []

    class Counts(ReferenceBackend):
        name = "counts"

        def forward(self, problem: Problem, **keywords: Any) -> Forwarded:
            seen.append(None if problem.live is None else problem.live.tolist())
            return super().forward(problem, **keywords)

    example = small(tokens=8)
    with installed(Counts(), alone=True):
        example.score()
        replace(example, labels=torch.zeros_like(example.labels)).score()
        example.score(validate=False)
    assert seen == [[0, 2, 3, 4, 6, 7], None, None]


def test_a_frozen_leaf_is_not_asked_for() -> None:
    seen = []

    class Counts(ReferenceBackend):
        name = "counts"

        def backward(self, *arguments: Any) -> Gradients:
            seen.append(arguments[5])
            return super().backward(*arguments)

    with installed(Counts(), alone=True):
        small(bias=True).run(frozen=("weight", "bias"))
    assert [seen[0].hidden, seen[0].weight, seen[0].bias, seen[0].lora_u, seen[0].lora_b] == [True, *[False] * 4]


def test_nothing_is_kept_where_nothing_is_differentiated() -> None:
    seen = []

    class Counts(Keeps):
        name = "counts"

        def forward(self, problem: Problem, **keywords: Any) -> Forwarded:
            seen.append(keywords["kept_shape"])
            return super().forward(problem, **keywords)

    example = small(tokens=9).fresh()
    with installed(Counts(), alone=True):
        example.score(keep_bytes=100)
        with torch.no_grad():
            example.score(keep_bytes=100)
    assert seen == [(9,), (0,)]


def test_the_backend_is_told_which_gradients_may_come() -> None:
    seen = []

    class Counts(ReferenceBackend):
        name = "counts"

        def forward(self, problem: Problem, **keywords: Any) -> Forwarded:
            seen.append((keywords["entropy"], keywords["entropy_grad"]))
            return super().forward(problem, **keywords)

    example = small().fresh()
    with installed(Counts(), alone=True):
        example.score()
        example.score(entropy_grad=False)
        example.score(entropy=False)
        with torch.no_grad():
            example.score()
    assert seen == [(True, True), (True, False), (False, False), (True, False)]


def test_the_forwards_backend_serves_its_backward() -> None:
    calls = []

    class Other(ReferenceBackend):
        name = "other"

        def backward(self, *arguments: Any) -> Gradients:
            calls.append("other")
            return super().backward(*arguments)

    import logitless

    with installed(ReferenceBackend(), Other(), alone=True):
        with logitless.use_backend("other"):
            example = small().fresh()
            out = example.score()
        with logitless.use_backend("reference"):
            example.pull(out)
    assert calls == ["other"]


def test_forward_mode_is_refused_and_not_taken_for_zero() -> None:
    example = small()
    tangent = torch.ones_like(example.hidden)

    def score(hidden: torch.Tensor) -> torch.Tensor:
        return linear_log_probs(hidden, example.head, example.labels).log_probs

    with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
        torch.func.jvp(score, (example.hidden.detach(),), (tangent,))


def test_compiled_calls_tell_the_backend_of_lora_too() -> None:
    """A backend that refuses it must get to say so; its rank may be symbolic, that there is one is not."""

    class Refuses(ReferenceBackend):
        def supports(self, request: Request) -> str | None:
            return "no LoRA here" if request.lora_rank else None

    example = small(lora=(2,))
    torch._dynamo.reset()
    with installed(Refuses(), alone=True):
        for score in (scores(example), torch.compile(scores(example), fullgraph=True, backend="aot_eager")):
            with pytest.raises(Exception, match="no LoRA here"):
                run_both(score, score, example)
