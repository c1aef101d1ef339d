"""What may stand around a call of this backend: checkpoints, hooks, batches of backwards, writers, streams, threads.

That torch's transforms are refused or served is core's, and tested with the torch backend; here is what depends on the
kernels: what was kept is overwritten by the last backward, and nothing else may be.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from logitless import LMHead, linear_kl, linear_log_probs, linear_policy_loss
from logitless.errors import UnsupportedError

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
N, D, V = 9, 6, 43
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says aloud what a GPU does silently
gpu_only = pytest.mark.skipif(not HAS_GPU, reason="streams are a GPU's, and the interpreter runs one kernel at a time")


class Inputs:
    """Everything that a call takes."""

    def __init__(self, seed: int = 0) -> None:
        noise = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=noise).to(DEVICE)

        self.leaves = {"hidden": randn(N, D), "weight": randn(V, D), "bias": randn(V)}
        labels = torch.randint(V, (N,), generator=noise)
        labels[2] = -100
        self.labels, self.temperature = labels.to(DEVICE), randn(N).abs() + 0.5
        self.ref_hidden, self.ref_weight, self.advantage = randn(N, D), randn(V, D), randn(N)

    @property
    def held(self) -> dict[str, Tensor]:
        others = ("labels", "temperature", "ref_hidden", "ref_weight", "advantage")
        return {**self.leaves, **{name: getattr(self, name) for name in others}}

    def trained(self) -> list[Tensor]:
        return [leaf.clone().requires_grad_() for leaf in self.leaves.values()]


def scores(x: Inputs, hidden: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> tuple[Tensor, ...]:
    head = LMHead(weight, bias, softcap=6.0)
    out = linear_log_probs(hidden, head, x.labels, temperature=x.temperature, backend="triton", **options)
    assert out.entropy is not None
    return out.log_probs, out.entropy


def remembered(x: Inputs, *leaves: Tensor) -> tuple[Tensor, ...]:
    return scores(x, *leaves, keep_bytes=1 << 20)


def exponentials(x: Inputs, hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """The other kind of what is kept; a head without bias, and no gradient of the entropy."""
    options: dict[str, Any] = {"keep_bytes": 1 << 20, "entropy_grad": False, "backend": "triton"}
    return (linear_log_probs(hidden, weight * 1.0 + 0.0 * bias.sum(), x.labels, **options).log_probs,)


def cut(x: Inputs, *leaves: Tensor) -> tuple[Tensor, ...]:
    return scores(x, *leaves, top_k=9, top_p=0.9)


def divergence(x: Inputs, hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    options: dict[str, Any] = {"mask": x.labels >= 0, "temperature": x.temperature, "backend": "triton"}
    return (linear_kl(hidden, LMHead(weight, bias), x.ref_hidden, x.ref_weight, direction="jsd", **options),)


def single_pass(x: Inputs, hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    def loss_fn(s: Any, index: Tensor) -> Tensor:
        return x.advantage[index] * s.log_probs - 0.1 * s.entropy

    head = LMHead(weight, bias)
    return (linear_policy_loss(hidden, head, x.labels, loss_fn, temperature=x.temperature, backend="triton")[0],)


OPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "scores": scores,
    "remembered": remembered,
    "exponentials": exponentials,
    "kept-set": cut,
    "divergence": divergence,
    "single-pass": single_pass,
}
each_op = pytest.mark.parametrize("op", OPS)
TWO_PASS = [name for name in OPS if name != "single-pass"]


def upstream(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    noise = torch.Generator().manual_seed(7)
    return [torch.randn(y.shape, generator=noise).to(DEVICE) if y.ndim else torch.ones_like(y) for y in outputs]


def pulled(function: Callable[..., tuple[Tensor, ...]], x: Inputs) -> list[Tensor]:
    """Outputs and gradients of every leaf."""
    leaves = x.trained()
    outputs = function(x, *leaves)
    values = [y.detach().clone() for y in outputs]
    torch.autograd.backward(outputs, upstream(outputs))
    return [*values, *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


@each_op
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_activation_checkpointing(op: str, use_reentrant: bool) -> None:
    def checkpointed(x: Inputs, *leaves: Tensor) -> Any:
        return checkpoint(lambda *given: OPS[op](x, *given), *leaves, use_reentrant=use_reentrant)

    assert equal(pulled(checkpointed, Inputs()), pulled(OPS[op], Inputs()))


@each_op
def test_saved_tensors_may_travel(op: str) -> None:
    """Through hooks that copy: nothing that the backward reads goes round them."""

    def hooked(x: Inputs, *leaves: Tensor) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach().clone(), lambda packed: packed):
            outputs = OPS[op](x, *leaves)
        with torch.no_grad():
            for leaf in leaves:
                leaf.zero_()
        return outputs

    assert equal(pulled(hooked, Inputs()), pulled(OPS[op], Inputs()))


@pytest.mark.parametrize("op", TWO_PASS)
def test_a_batch_of_backwards_is_a_loop(op: str) -> None:
    """None of them is the last, which may overwrite what was kept."""
    x = Inputs()
    leaves = x.trained()
    output = OPS[op](x, *leaves)[0]
    batch = torch.randn(3, *output.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got = torch.autograd.grad(output, leaves, batch, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(output, leaves, one, retain_graph=True) for one in batch]
    assert equal(list(got), [torch.stack(parts) for parts in zip(*want, strict=True)])


@pytest.mark.parametrize("op", ["remembered", "exponentials", "divergence"])
def test_a_last_backward_that_failed_may_be_run_again(op: str) -> None:
    """As after an OutOfMemoryError: what it has overwritten is not read again."""
    want = pulled(OPS[op], Inputs())
    leaves = Inputs().trained()
    outputs, calls = OPS[op](Inputs(), *leaves), []

    def fails_once(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")

    node = outputs[0].grad_fn
    assert node is not None
    node.register_hook(fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        torch.autograd.backward(outputs, upstream(outputs))
    torch.autograd.backward(outputs, upstream(outputs))
    for leaf, grad in zip(leaves, want[len(outputs) :], strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-4, atol=1e-4)


@each_op
def test_second_derivatives_are_refused_by_name(op: str) -> None:
    leaves = Inputs().trained()
    outputs = OPS[op](Inputs(), *leaves)

    def twice() -> None:
        (grad, *_) = torch.autograd.grad(outputs, leaves, upstream(outputs), create_graph=True)
        torch.autograd.grad(grad.sum(), leaves[0])

    with pytest.raises(UnsupportedError, match="first derivatives only"):
        twice()


@pytest.mark.parametrize("op", ["remembered", "divergence"])
def test_compiled_autograd_traces_into_no_kernel(op: str) -> None:
    want = pulled(OPS[op], Inputs())
    leaves = Inputs().trained()
    outputs = OPS[op](Inputs(), *leaves)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        torch.autograd.backward(outputs, upstream(outputs))
    for leaf, grad in zip(leaves, want[len(outputs) :], strict=True):
        torch.testing.assert_close(leaf.grad, grad, rtol=1e-4, atol=1e-4)


@each_op
def test_inference_mode(op: str) -> None:
    x = Inputs()
    want = pulled(OPS[op], x)
    with torch.inference_mode():
        got = OPS[op](x, *(leaf * 1 for leaf in x.leaves.values()))
        assert all(y.is_inference() for y in got)
        assert equal(list(got), want[: len(got)])
    assert equal(pulled(OPS[op], x), want)


@each_op
def test_inputs_are_not_written_and_outputs_may_be(op: str) -> None:
    x = Inputs()
    x.labels.clamp_(min=0)  # with ignored tokens, core copies the outputs
    want = pulled(OPS[op], x)
    leaves = x.trained()
    held = {**x.held, **dict(zip(x.leaves, leaves, strict=True))}
    before = {name: (tensor.detach().clone(), tensor._version) for name, tensor in held.items()}
    outputs = OPS[op](x, *leaves)
    ups = upstream(outputs)
    kept = [(up.clone(), up._version) for up in ups]
    for y in outputs:
        y.data.fill_(7.0)
    grads = torch.autograd.grad(outputs, leaves, ups)
    assert equal(list(grads), want[len(outputs) :])
    for name, tensor in held.items():
        value, version = before[name]
        assert tensor._version == version, name
        assert torch.equal(tensor.detach(), value), name
    assert all(
        up._version == version and torch.equal(up, value) for up, (value, version) in zip(ups, kept, strict=True)
    )


@gpu_only
@each_op
def test_two_streams(op: str) -> None:
    """Two calls on two streams at once have the bits of one after the other."""
    inputs = [Inputs(seed) for seed in range(2)]
    want = [pulled(OPS[op], x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    for _ in range(5):
        got = []
        torch.cuda.synchronize()
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(pulled(OPS[op], x))
        torch.cuda.synchronize()
        assert all(map(equal, got, want))


@gpu_only
@each_op
def test_threads_give_the_bits_of_one(op: str) -> None:
    want = [pulled(OPS[op], Inputs(seed)) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda seed: pulled(OPS[op], Inputs(seed)), range(8)))
    assert all(map(equal, got, want))
