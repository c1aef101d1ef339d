"""What may stand around a call: torch.func, inference, checkpoints, hooks, other writers, threads and streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from logitless import LMHead, linear_kl, linear_log_probs, linear_policy_loss, top_k_log_probs
from logitless.errors import UnsupportedError
from logitless.testing import ReferenceBackend, installed, random_example
from logitless.types import Forwarded

N, D, V, R = 9, 6, 43, 2


class Inputs:
    """Everything that a call takes, float64."""

    def __init__(self, seed: int = 0) -> None:
        noise = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=noise, dtype=torch.float64)

        self.leaves = {
            "hidden": randn(N, D),
            "weight": randn(V, D),
            "bias": randn(V),
            "u": randn(N, R),
            "b": randn(V, R),
        }
        self.labels = torch.randint(V, (N,), generator=noise)
        self.labels[2] = -100
        self.temperature = torch.rand(N, generator=noise, dtype=torch.float64) + 0.5
        self.ref_hidden, self.ref_weight, self.advantage = randn(N, D), randn(V, D), randn(N)

    @property
    def held(self) -> dict[str, Tensor]:
        others = ("labels", "temperature", "ref_hidden", "ref_weight", "advantage")
        return {**self.leaves, **{name: getattr(self, name) for name in others}}

    def trained(self) -> list[Tensor]:
        return [leaf.clone().requires_grad_() for leaf in self.leaves.values()]


def head_of(weight: Tensor, bias: Tensor, u: Tensor, b: Tensor) -> LMHead:
    return LMHead(weight, bias, scale=0.8, softcap=6.0, lora=((u, b),))


def scores(x: Inputs, hidden: Tensor, *rest: Tensor, **options: Any) -> tuple[Tensor, ...]:
    out = linear_log_probs(hidden, head_of(*rest), x.labels, temperature=x.temperature, backend="torch", **options)
    return (out.log_probs,) if out.entropy is None else (out.log_probs, out.entropy)


def remembered(x: Inputs, *leaves: Tensor) -> tuple[Tensor, ...]:
    return scores(x, *leaves, keep_bytes=4000)


def cut(x: Inputs, *leaves: Tensor) -> tuple[Tensor, ...]:
    return scores(x, *leaves, top_k=9, top_p=0.9)


def best(x: Inputs, hidden: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    return (top_k_log_probs(hidden, head_of(*rest), 3, mask=x.labels >= 0, backend="torch")[1],)


def divergence(x: Inputs, hidden: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    options: dict[str, Any] = {"mask": x.labels >= 0, "temperature": x.temperature, "backend": "torch"}
    return (linear_kl(hidden, head_of(*rest), x.ref_hidden, x.ref_weight, direction="jsd", **options),)


def single_pass(x: Inputs, hidden: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    def loss_fn(s: Any, index: Tensor) -> Tensor:
        return x.advantage[index] * s.log_probs - 0.1 * s.entropy

    options: dict[str, Any] = {"temperature": x.temperature, "backend": "torch"}
    return (linear_policy_loss(hidden, head_of(*rest), x.labels, loss_fn, **options)[0],)


OPS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "scores": scores,
    "remembered": remembered,
    "kept-set": cut,
    "best": best,
    "divergence": divergence,
    "single-pass": single_pass,
}
each_op = pytest.mark.parametrize("op", OPS)
TWO_PASS = [name for name in OPS if name != "single-pass"]


def upstream(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    noise = torch.Generator().manual_seed(7)
    return [torch.randn(x.shape, generator=noise, dtype=x.dtype) if x.ndim else torch.ones_like(x) for x in outputs]


def pulled(function: Callable[..., tuple[Tensor, ...]], x: Inputs) -> list[Tensor]:
    """Outputs and gradients of every leaf."""
    leaves = x.trained()
    outputs = function(x, *leaves)
    values = [y.detach().clone() for y in outputs]
    torch.autograd.backward(outputs, upstream(outputs))
    return [*values, *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


# torch.func


class Model(torch.nn.Module):
    """A head whose scores are its output."""

    def __init__(self, op: str, x: Inputs) -> None:
        super().__init__()
        self.op, self.x = op, x
        self.weight = torch.nn.Parameter(x.leaves["weight"].clone())

    def forward(self, hidden: Tensor) -> Tensor:
        leaves = self.x.leaves
        return OPS[self.op](self.x, hidden, self.weight, leaves["bias"], leaves["u"], leaves["b"])[0].sum()


def of_hidden(op: str, x: Inputs) -> Callable[[Tensor], Tensor]:
    rest = list(x.leaves.values())[1:]
    return lambda hidden: OPS[op](x, hidden, *rest)[0].sum()


@each_op
@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "hessian", "functional_call", "vmap-of-grad"])
def test_torch_funcs_gradients_are_refused_by_name(op: str, transform: str) -> None:
    x = Inputs()
    function, hidden = of_hidden(op, x), x.leaves["hidden"]
    model = Model(op, x)
    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(function)(hidden),
        "vjp": lambda: torch.func.vjp(function, hidden),
        "jacrev": lambda: torch.func.jacrev(function)(hidden),
        "hessian": lambda: torch.func.jacrev(torch.func.jacrev(function))(hidden),
        "functional_call": lambda: torch.func.grad(lambda p: torch.func.functional_call(model, p, (hidden,)))(
            dict(model.named_parameters())
        ),
        "vmap-of-grad": lambda: torch.func.vmap(torch.func.grad(function))(torch.stack((hidden, hidden))),
    }
    with pytest.raises(UnsupportedError, match=r"torch.func's transforms .* not served; use loss.backward\(\)"):
        calls[transform]()


@each_op
@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "dual"])
def test_forward_mode_is_refused_by_name(op: str, transform: str) -> None:
    x = Inputs()
    function, hidden = of_hidden(op, x), x.leaves["hidden"]

    def dual() -> None:
        with forward_ad.dual_level():
            function(forward_ad.make_dual(hidden, hidden))

    calls: dict[str, Callable[[], Any]] = {
        "jvp": lambda: torch.func.jvp(function, (hidden,), (hidden,)),
        "jacfwd": lambda: torch.func.jacfwd(function)(hidden),
        "dual": dual,
    }
    with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
        calls[transform]()


@each_op
def test_functional_call_is_differentiated_by_autograd(op: str) -> None:
    x = Inputs()
    model, weight = Model(op, x), (2 * x.leaves["weight"]).requires_grad_()
    (got,) = torch.autograd.grad(torch.func.functional_call(model, {"weight": weight}, (x.leaves["hidden"],)), weight)
    with torch.no_grad():
        model.weight.copy_(weight)
    (want,) = torch.autograd.grad(model(x.leaves["hidden"]), model.weight)
    assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("op", TWO_PASS)
@pytest.mark.parametrize("which", ["hidden", "weight", "both"])
def test_vmap_is_a_loop(op: str, which: str) -> None:
    """And its gradients are, where autograd stands around it."""
    x = Inputs()
    first, *rest = x.trained()
    weight, *others = rest
    hiddens = torch.stack((first, 2 * first, -first)) if which != "weight" else first.expand(3, N, D)
    weights = torch.stack((weight, 0.5 * weight, -weight)) if which != "hidden" else weight.expand(3, V, D)

    def call(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return OPS[op](x, hidden, weight, *others)

    dims = (0 if which != "weight" else None, 0 if which != "hidden" else None)
    given = (hiddens if dims[0] == 0 else first, weights if dims[1] == 0 else weight)
    got = torch.func.vmap(call, in_dims=dims)(*given)
    want = tuple(torch.stack(parts) for parts in zip(*map(call, hiddens, weights), strict=True))
    assert equal(list(got), list(want))
    leaves = [first, weight, *others]
    grads = (torch.autograd.grad(out, leaves, upstream(want), retain_graph=True) for out in (got, want))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_vmap_of_a_single_pass_is_refused_by_name() -> None:
    x = Inputs()
    hidden = x.leaves["hidden"]
    with pytest.raises(UnsupportedError, match="for linear_policy_loss vmap too"):
        torch.func.vmap(of_hidden("single-pass", x))(torch.stack((hidden, hidden)))


@pytest.mark.parametrize("op", TWO_PASS)
def test_a_batch_of_backwards_is_a_loop(op: str) -> None:
    """`is_grads_batched`, on which `torch.autograd.functional.jacobian(vectorize=True)` stands."""
    x = Inputs()
    leaves = x.trained()
    output = OPS[op](x, *leaves)[0]
    batch = torch.randn(3, *output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    got = torch.autograd.grad(output, leaves, batch, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(output, leaves, one, retain_graph=True) for one in batch]
    assert equal(list(got), [torch.stack(parts) for parts in zip(*want, strict=True)])


def test_a_batch_of_backwards_into_a_grad_buffer_is_refused_by_name() -> None:
    example = random_example(5, dtype=torch.float32, ignored=False).fresh()
    example = example.with_head(grad_buffer=torch.zeros_like(example.head.weight))
    out = example.score(backend="torch")
    with pytest.raises(UnsupportedError, match=r"head.grad_buffer: got a batch of backwards .* leave the buffer out"):
        torch.autograd.grad(out.log_probs, example.hidden, torch.eye(5), is_grads_batched=True)


@each_op
def test_second_derivatives_are_refused_by_name(op: str) -> None:
    """By way of an input, and of the upstream gradient."""
    x = Inputs()
    leaves = x.trained()
    outputs = OPS[op](x, *leaves)
    ups = [up.requires_grad_() for up in upstream(outputs)]

    def twice(into: Any) -> None:
        (grad, *_) = torch.autograd.grad(outputs, leaves, ups, create_graph=True, retain_graph=True)
        torch.autograd.grad(grad.sum(), into)

    for into in (leaves[0], ups[0]):
        with pytest.raises(UnsupportedError, match="first derivatives only.*logitless.reference"):
            twice(into)


# Modes


@each_op
def test_inference_mode(op: str) -> None:
    """The same bits, of inference tensors too, and no harm to the training that follows."""
    x = Inputs()
    want = pulled(OPS[op], x)
    with torch.inference_mode():
        for leaves in (list(x.leaves.values()), [leaf * 1 for leaf in x.leaves.values()]):
            got = OPS[op](x, *leaves)
            assert all(y.is_inference() and not y.requires_grad for y in got)
            assert equal(list(got), want[: len(got)])
    assert equal(pulled(OPS[op], x), want)


@each_op
def test_anomaly_detection_changes_nothing(op: str) -> None:
    want = pulled(OPS[op], Inputs())
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        assert equal(pulled(OPS[op], Inputs()), want)


@each_op
def test_backwards_accumulate(op: str) -> None:
    """Into `.grad`: micro-batches on the same leaves give the sum of their gradients."""
    x = Inputs()
    leaves = x.trained()
    total: list[Any] = [0.0] * len(leaves)
    for seed in range(3):
        x.labels = Inputs(seed).labels
        alone = x.trained()
        for given in (leaves, alone):
            outputs = OPS[op](x, *given)
            torch.autograd.backward(outputs, upstream(outputs))
        total = [before + leaf.grad for before, leaf in zip(total, alone, strict=True)]
    assert equal([leaf.grad for leaf in leaves], total)  # type: ignore[misc]


# Checkpoints and hooks


@each_op
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_activation_checkpointing(op: str, use_reentrant: bool) -> None:
    def checkpointed(x: Inputs, *leaves: Tensor) -> Any:
        return checkpoint(lambda *given: OPS[op](x, *given), *leaves, use_reentrant=use_reentrant)

    assert equal(pulled(checkpointed, Inputs()), pulled(OPS[op], Inputs()))


@each_op
def test_saved_tensors_may_travel(op: str) -> None:
    """Through hooks that copy (as offloading does): nothing that the backward reads goes round them, or is large."""
    seen: list[Tensor] = []

    def pack(tensor: Tensor) -> Any:
        seen.append(tensor)
        return tensor.detach().clone(), tensor.shape

    def unpack(packed: Any) -> Tensor:
        tensor, shape = packed
        assert tensor.shape == shape
        # What comes back empty from numpy or a file has such strides.
        return tensor if tensor.numel() else tensor.as_strided(shape, [0] * len(shape))

    def hooked(x: Inputs, *leaves: Tensor) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            outputs = OPS[op](x, *leaves)
        with torch.no_grad():  # the copies are what is read: what was saved may go
            for leaf in leaves:
                leaf.zero_()
        return outputs

    assert equal(pulled(hooked, Inputs()), pulled(OPS[op], Inputs()))
    largest = 4000 if op == "remembered" else V * D
    assert all(tensor.numel() <= largest for tensor in seen)
    assert bool(seen) == (op != "single-pass")  # which makes its gradients at once


# What is written


@each_op
def test_inputs_are_not_written(op: str) -> None:
    """Of any kind, by value and by version; upstream gradients included."""
    x = Inputs()
    leaves = dict(zip(x.leaves, x.trained(), strict=True))
    held = {**x.held, **leaves}
    before = {name: (tensor.detach().clone(), tensor._version) for name, tensor in held.items()}
    outputs = OPS[op](x, *leaves.values())
    ups = upstream(outputs)
    up_before = [(up.clone(), up._version) for up in ups]
    torch.autograd.grad(outputs, list(leaves.values()), ups)
    for name, tensor in held.items():
        value, version = before[name]
        assert tensor._version == version, name
        assert torch.equal(tensor.detach(), value), name
    for up, (value, version) in zip(ups, up_before, strict=True):
        assert up._version == version
        assert torch.equal(up, value)


@each_op
def test_outputs_may_be_written_between_forward_and_backward(op: str) -> None:
    """Behind autograd's back and before its eyes: gradients are those of what was computed."""
    x = Inputs()
    x.labels.clamp_(min=0)  # with ignored tokens, core copies the outputs
    want = pulled(OPS[op], x)

    def behind(x: Inputs, *leaves: Tensor) -> tuple[Tensor, ...]:
        outputs = OPS[op](x, *leaves)
        for y in outputs:
            y.data.fill_(7.0)
        return outputs

    def before(x: Inputs, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.mul_(1.0) for y in OPS[op](x, *leaves))

    count = 2 if op in ("scores", "remembered", "kept-set") else 1
    assert equal(pulled(behind, x)[count:], want[count:])
    assert equal(pulled(before, x), want)


@pytest.mark.parametrize("op", TWO_PASS)
@pytest.mark.parametrize("leaf", range(5), ids=["hidden", "weight", "bias", "lora_u", "lora_b"])
def test_an_input_that_was_written_before_the_backward_is_an_error(op: str, leaf: int) -> None:
    """Autograd's own: the backward reads it again, and would give gradients of something else."""
    x = Inputs()
    leaves = x.trained()
    used = [leaf * 1 for leaf in leaves]
    outputs = OPS[op](x, *used)
    with torch.no_grad():
        used[leaf].mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(outputs, leaves, upstream(outputs))


# Threads and streams


@each_op
def test_threads_give_the_bits_of_one(op: str) -> None:
    """Eight threads, forward and backward at once, each on inputs of its own."""
    want = [pulled(OPS[op], Inputs(seed)) for seed in range(8)]
    start = threading.Barrier(8)

    def work(seed: int) -> bool:
        start.wait(30)
        return all(equal(pulled(OPS[op], Inputs(seed)), want[seed]) for _ in range(3))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


@each_op
def test_the_backward_may_run_in_another_thread(op: str) -> None:
    x = Inputs()
    leaves = x.trained()
    outputs = OPS[op](x, *leaves)
    with ThreadPoolExecutor(1) as pool:
        grads = pool.submit(torch.autograd.grad, outputs, leaves, upstream(outputs)).result(60)
    assert equal([*(y.detach() for y in outputs), *grads], pulled(OPS[op], x))


def test_a_thread_that_is_done_leaves_the_others_their_precision() -> None:
    """The precision of products is the process's: it is put back when the last call ends, not the first."""
    began, over = threading.Event(), threading.Event()
    seen: list[str] = []

    class Waits(ReferenceBackend):
        name = "waits"

        def forward(self, *arguments: Any, **keywords: Any) -> Forwarded:
            if threading.current_thread() is not threading.main_thread():
                began.set()
                assert over.wait(60)
            seen.append(torch.get_float32_matmul_precision())
            return super().forward(*arguments, **keywords)

    example = random_example(3, dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with installed(Waits(), alone=True), ThreadPoolExecutor(1) as pool:
            # The main thread's call begins first and ends first, within its loss; the other's is still running then.
            def loss_fn(s: Any, index: Tensor) -> Tensor:
                waiting.append(pool.submit(example.score, backend="waits"))
                assert began.wait(60)
                return s.log_probs

            waiting: list[Any] = []
            linear_policy_loss(example.hidden, example.head, example.labels, loss_fn, backend="waits")
            seen.append(torch.get_float32_matmul_precision())
            over.set()
            waiting[0].result(60)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        over.set()
        torch.set_float32_matmul_precision(before)
    assert seen[-2:] == ["highest", "highest"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="streams are a GPU's")
def test_two_streams() -> None:
    """Two calls on two streams at once have the bits of one after the other."""
    examples = [random_example(64, vocab=1000, dtype=torch.float32, device="cuda", seed=seed) for seed in range(2)]
    want = [example.run(backend="torch") for example in examples]
    streams = [torch.cuda.Stream() for _ in examples]
    for _ in range(5):
        got = []
        torch.cuda.synchronize()
        for example, stream in zip(examples, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(example.run(backend="torch"))
        torch.cuda.synchronize()
        for one, right in zip(got, want, strict=True):
            assert torch.equal(one.scores.log_probs, right.scores.log_probs)
            assert all(torch.equal(one.gradients[name], grad) for name, grad in right.gradients.items())
