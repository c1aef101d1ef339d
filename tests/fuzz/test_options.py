"""Odd arguments of the op and of batches: the value that the reference gives, or an error that names an argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from common import TALLY, fuzzed
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import logitless
from logitless import LMHead, PackedBatch, reference
from logitless.errors import LogitlessError

N, D, V = 5, 4, 7
NUMBERS = [0, 1, -1, 2, 0.5, -0.5, 1e-40, 1e-30, 1e30, 1e39, 10**400, float("nan"), float("inf"), True, 2**63, -(2**70)]
ODD = [None, "1", "", b"1", [], {}, (1,), 1j, object(), torch.float32, float, *NUMBERS]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=generator()).to(dtype)


TENSORS: list[Tensor] = [
    torch.tensor(1.0),
    torch.zeros(0),
    torch.ones(N),
    torch.arange(N),
    torch.full((N,), float("nan")),
    tensor(N, D),
    tensor(D, N),
    tensor(N, 0),
    tensor(V, D),
    tensor(D, V),
    tensor(V, 1),
    tensor(0, D),
    tensor(2, N, D),
    tensor(N, D, dtype=torch.float64),
    tensor(N, D, dtype=torch.float16),
    tensor(V, D, dtype=torch.bfloat16),
    torch.ones(N, D, dtype=torch.int64),
    torch.ones(N, dtype=torch.bool),
    torch.ones(N, D, dtype=torch.complex64),
    torch.ones(N, D, device="meta"),
    torch.eye(N).to_sparse(),
    tensor(V, D).T.contiguous().T,
    tensor(1, D).expand(N, D),
    torch.tensor([0, 6, -100, 3, 3], dtype=torch.int32),
    torch.tensor([0, 7, -100, 3, 3]),
    torch.tensor([0, -1, -100, 3, 3]),
    torch.tensor([[0, 1], [2, 3], [4, -100], [-100, -100], [6, 6]]),
    torch.tensor([2**40] * N),
    torch.full((N,), -100),
    torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged),
]
anything = st.one_of(st.sampled_from(ODD), st.sampled_from(TENSORS))


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.one_of(st.sampled_from(values), anything)


@st.composite
def heads(draw: st.DrawFn) -> LMHead:
    """Whole heads with some fields odd."""
    fields: dict[str, Any] = {"weight": tensor(V, D, dtype=draw(st.sampled_from([torch.float32, torch.float64])))}
    odd: dict[str, st.SearchStrategy[Any]] = {
        "weight": one_of(tensor(V, D), tensor(V, D, dtype=torch.float16)),
        "bias": one_of(tensor(V), tensor(V + 1), None),
        "scale": one_of(0.5, 2, -1.0),
        "softcap": one_of(3.0, None),
        "vocab_size": one_of(V, V - 2, V + 1, 1),
        "vocab_start": one_of(0, 1, None),
        "lora": one_of(
            [(tensor(N, 2), tensor(V, 2))],
            ((tensor(N, 2), tensor(V, 2)), (tensor(N, 1), tensor(V, 1))),
            [(tensor(N, 2), tensor(V, 3))],
            [(tensor(N, 2),)],
            [tensor(2, N, 2)],
        ),
        "grad_buffer": one_of(None, torch.zeros(V, D), torch.zeros(1, 1).expand(V, D)),
    }
    for name in draw(st.lists(st.sampled_from(sorted(odd)), max_size=2)):
        fields[name] = draw(odd[name])
    return LMHead(**fields)


SHARED: dict[str, st.SearchStrategy[Any]] = {
    "hidden": one_of(tensor(N, D), tensor(N, D, dtype=torch.bfloat16)),
    "head": st.one_of(heads(), anything),
    "temperature": one_of(1.0, 0.7, 2, torch.full((N,), 0.5), torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0])),
    "workspace_bytes": one_of(1, 1000),
    "validate": one_of(True, False),
    "reduce_hidden_grad": one_of(True, False),
    "tp_group": anything,
    "backend": one_of(None, "torch", "triton", "abacus", "torch\n", "../torch"),
}
SCORED: dict[str, st.SearchStrategy[Any]] = {
    **SHARED,
    "labels": one_of(torch.tensor([1, -100, 0, 6, 2])),
    "entropy": one_of(True, False),
    "entropy_grad": one_of(True, False),
    "ignore_index": one_of(-100, 0, 3, -1),
    "top_k": one_of(1, 3, V, 100),
    "top_p": one_of(0.5, 1, 1.0, 1e-9),
}


def told(names: Any, error: LogitlessError) -> str:
    """The message; it names an argument."""
    message = str(error)
    assert re.search(rf"\b({'|'.join(names)})\b", message), message
    assert len(message) < 2000
    return message


def run(area: str, given_: dict[str, Any], changed: dict[str, Any], call: Callable[[], Any]) -> Any:
    """What the call gives; None if it told what is wrong with an argument."""
    message = None
    try:
        return call()
    except LogitlessError as error:
        message = told(given_, error)
    assert changed, message
    TALLY.told(area, message)
    return None


def changes(odd: dict[str, st.SearchStrategy[Any]], most: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    return st.lists(st.sampled_from(sorted(odd)), max_size=most, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: odd[name] for name in names})
    )


def as_double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def double_head(head: Any) -> LMHead:
    head = head if isinstance(head, LMHead) else LMHead(head)
    lora = tuple((u.double(), b.double()) for u, b in head.lora)
    return LMHead(head.weight.double(), as_double(head.bias), head.scale, head.softcap, head.vocab_size, lora=lora)


def close(got: Tensor | None, expected: Tensor, given_: dict[str, Any]) -> None:
    """Within the contract, of the same inputs in float64; float16's and bfloat16's are exact in it."""
    if got is not None:
        atol = 1e-4 + largest_logit(given_) * 2.0**-22
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=atol, equal_nan=True)


@torch.no_grad()
def largest_logit(given_: dict[str, Any]) -> float:
    """In size, of those that are finite."""
    hidden, temperature = given_["hidden"].double(), as_double(given_["temperature"])
    logits = reference.head_logits(hidden, double_head(given_["head"]), temperature)
    return float(logits[logits.isfinite()].abs().max()) if logits.isfinite().any() else 0.0


def gradient_of(values: Tensor, hidden: Tensor) -> Tensor:
    return torch.autograd.grad(values, hidden, tensor(*values.shape).to(values))[0]


@fuzzed(8)
@given(
    changed=changes(
        {
            **SCORED,
            "keep_bytes": one_of(0, 1000),
            "stats": one_of((), ("is_argmax",), ["mean_logit"], "is_kept", ("x",)),
        }
    )
)
def test_linear_log_probs(changed: dict[str, Any]) -> None:
    given_ = {"hidden": tensor(N, D), "head": tensor(V, D), "labels": torch.tensor([1, -100, 0, 6, 2]), **changed}
    names = {*SCORED, "keep_bytes", "stats"}
    out = run("linear_log_probs", dict.fromkeys(names), changed, lambda: logitless.linear_log_probs(**given_))
    if out is None:
        return
    TALLY.right("linear_log_probs")
    given_ = {"temperature": 1.0, "ignore_index": -100, "top_k": None, "top_p": None, **given_}
    labels, vocab = given_["labels"].long(), double_head(given_["head"])
    rows = vocab.vocab_size or vocab.weight.shape[0]
    ignored = labels == given_["ignore_index"]
    bad = ~ignored & ((labels < 0) | (labels >= rows))
    assert not bad.any() or given_.get("validate") is False
    if bad.any() or (isinstance(given_["temperature"], Tensor) and given_.get("validate") is False):
        return  # NaN where promised; tests of the op hold it to that
    expected = reference.linear_log_probs(
        given_["hidden"].double(),
        vocab,
        labels,
        **{name: as_double(given_[name]) for name in ("temperature", "ignore_index", "top_k", "top_p")},
    )
    if given_["top_k"] is None and given_["top_p"] in (None, 1):  # a border falls otherwise in another precision
        close(out.log_probs, expected.log_probs, given_)
        close(out.entropy, expected.entropy, given_)
    assert (out.log_probs[ignored] == 0).all()


def close_gradient(got: Tensor, expected: Tensor, given_: dict[str, Any]) -> None:
    """Of a divergence, d_hidden: within the rounding of its factors, where it is a number of `got`'s dtype."""
    largest, head = largest_logit(given_), double_head(given_["head"])
    rounding = 1e-6 + largest * 2.0**-22 + 4 * torch.finfo(got.dtype).eps
    slope = float(head.weight.abs().max()) * abs(head.scale) / float(given_["temperature"])
    rows = expected.isfinite() & (expected.abs() < torch.finfo(got.dtype).max)
    atol = V * rounding * (1 + 2 * largest) * slope
    torch.testing.assert_close(got.double()[rows], expected[rows], rtol=0, atol=atol)


RETURNED: list[Any] = [None, 1.0, torch.tensor(1.0), torch.ones(99), torch.ones(1, 1), tensor(3).requires_grad_(), "x"]


@fuzzed(4)
@given(
    changed=changes({**SCORED, "loss_fn": anything.filter(lambda x: not callable(x))}),  # whose own errors are its own
    returned=st.one_of(st.just("own"), st.just("own"), st.sampled_from(RETURNED)),
)
def test_linear_policy_loss(changed: dict[str, Any], returned: Any) -> None:
    def loss_fn(scores: Any, index: Tensor) -> Any:
        return -scores.log_probs * 2 if isinstance(returned, str) and returned == "own" else returned

    given_ = {"hidden": tensor(N, D).requires_grad_(), "head": tensor(V, D), "labels": torch.tensor([1, -100, 0, 6, 2])}
    given_ |= {"loss_fn": loss_fn, **changed}
    odd = changed or (None if isinstance(returned, str) and returned == "own" else {"loss_fn": returned})
    found = run(
        "linear_policy_loss",
        {**dict.fromkeys(SCORED), "loss_fn": None},
        odd or {},
        lambda: logitless.linear_policy_loss(**given_),
    )
    if found is None:
        return
    TALLY.right("linear_policy_loss")
    loss, out = found
    if isinstance(returned, str) and returned == "own" and "loss_fn" not in changed:
        torch.testing.assert_close(loss, -2 * out.log_probs.sum(), equal_nan=True)


@fuzzed(4)
@given(
    changed=changes(
        {
            **SHARED,
            "ref_hidden": one_of(tensor(N, 3), tensor(N, D)),
            "ref_head": st.one_of(heads(), anything),
            "direction": one_of("forward", "reverse", "jsd"),
            "beta": one_of(0.5, 0.1),
            "mask": one_of(None, torch.tensor([True, False, True, True, False])),
            "keep_bytes": anything,
        }
    ),
    keep_bytes=st.sampled_from([0, 100, 200, 1000, 1 << 20]),  # none, or of few tiles some, or all
)
def test_linear_kl(changed: dict[str, Any], keep_bytes: int) -> None:
    given_ = {
        "hidden": tensor(N, D),
        "head": tensor(V, D),
        "ref_hidden": tensor(N, D).flip(0),  # as they are drawn, all tensors are of one seed, and no two models differ
        "ref_head": tensor(V, D),
        "keep_bytes": keep_bytes,
        **changed,
    }
    if isinstance(given_["hidden"], Tensor) and given_["hidden"].is_floating_point():
        given_["hidden"] = given_["hidden"].detach().requires_grad_()  # without it nothing is kept
    names = {*SHARED, "ref_hidden", "ref_head", "direction", "beta", "mask", "keep_bytes"}
    value = run("linear_kl", dict.fromkeys(names), changed, lambda: logitless.linear_kl(**given_))
    if value is None:
        return
    TALLY.right("linear_kl")
    gradient = gradient_of(value, given_["hidden"])
    unkept = logitless.linear_kl(**{**given_, "keep_bytes": 0})
    torch.testing.assert_close(value, unkept, rtol=0, atol=0, equal_nan=True)
    if isinstance(given_.get("temperature"), Tensor):
        return
    both = [double_head(given_[name]) for name in ("head", "ref_head")]
    asked = {name: given_[name] for name in ("direction", "beta", "temperature", "mask") if name in given_}
    exact = given_["hidden"].detach().double().requires_grad_()
    expected = reference.linear_kl(exact, both[0], given_["ref_hidden"].double(), both[1], **asked)
    given_ = {"temperature": 1.0, **given_}
    close(value, expected, given_)
    close_gradient(gradient, gradient_of(expected, exact), given_)


@fuzzed(4)
@given(changed=changes({**SHARED, "k": one_of(1, 2, V), "mask": anything}))
def test_top_k_log_probs(changed: dict[str, Any]) -> None:
    given_ = {"hidden": tensor(N, D), "head": tensor(V, D), "k": 2, **changed}
    found = run(
        "top_k_log_probs", dict.fromkeys({*SHARED, "k", "mask"}), changed, lambda: logitless.top_k_log_probs(**given_)
    )
    if found is not None:
        TALLY.right("top_k_log_probs")
        assert found[0].shape == found[1].shape == (*given_["hidden"].shape[:-1], given_["k"])


IDS = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]])
MASK = (IDS != 0).long()
NESTED = torch.nested.nested_tensor([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], layout=torch.jagged)
LISTS = [[1, 2, 3], [4, 5]]
of_lists = one_of(
    LISTS, [torch.tensor([1, 2]), torch.tensor([3])], [[1, 2, 3], []], [], [[1.5]], [[1], "a"], [[[1]]], [None], ["12"],
    [[2**70]], [[1, 2, 3], [4]], [[True, False, True], [True, True]], [[1, 0, 1], [1, 1]],
)  # fmt: skip
MAKERS: dict[str, tuple[Callable[..., PackedBatch], dict[str, Any], dict[str, st.SearchStrategy[Any]]]] = {
    "from_padded": (
        PackedBatch.from_padded,
        {"input_ids": IDS, "attention_mask": MASK},
        {
            "input_ids": one_of(IDS, IDS.float(), IDS[0], IDS.int()),
            "attention_mask": one_of(MASK, MASK.bool(), MASK.float(), MASK * 2, -MASK, MASK[:1], MASK.flip(1)),
            "loss_mask": one_of(MASK, MASK.bool(), MASK[:, :2], MASK.float() * float("nan")),
            "position_ids": one_of(MASK.cumsum(1), MASK.expand(3, 2, 4), MASK[0], MASK.float()),
        },
    ),
    "from_nested": (
        PackedBatch.from_nested,
        {"input_ids": NESTED},
        {
            "input_ids": one_of(NESTED, NESTED.to(torch.float32)),
            "loss_mask": one_of(NESTED, torch.ones(5), torch.ones(3, 5)),
            "position_ids": one_of(NESTED, torch.arange(5), torch.ones(3, 5, dtype=torch.int64), torch.ones(4)),
        },
    ),
    "from_sequences": (
        PackedBatch.from_sequences,
        {"input_ids": LISTS},
        {
            "input_ids": of_lists,
            "loss_mask": of_lists,
            "position_ids": of_lists,
            "device": one_of("cpu", "cuda", "abacus", None),
        },
    ),
}


@fuzzed(6)
@given(maker=st.sampled_from(sorted(MAKERS)), data=st.data())
def test_packed_batches(maker: str, data: st.DataObject) -> None:
    make, given_, odd = MAKERS[maker]
    odd = {**odd, "align": one_of(1, 2, 8)}
    changed = data.draw(changes(odd))
    area = f"PackedBatch.{maker}"
    batch = run(area, dict.fromkeys(odd), changed, lambda: make(**{**given_, **changed}))
    if batch is None:
        return
    TALLY.right(area)
    true = batch.input_ids[batch.place_M]
    ends = batch.cu_seqlens.tolist()
    for begin, end in pairwise(ends):
        ids, labels = true[begin:end], batch.labels[batch.place_M[begin:end]]
        assert ((labels[:-1] == ids[1:]) | (labels[:-1] == -100)).all()
        assert (labels[-1:] == -100).all()
    after = {
        "micro_batches": {"max_tokens": one_of(16, 3)},
        "shard": {"rank": one_of(0, 1), "size": one_of(1, 2), "scheme": one_of("zigzag", "contiguous")},
        "unpack": {"x": st.one_of(st.just(batch.labels), anything)},
        "pack": {"x": st.one_of(anything, of_lists), "of": one_of("token", "prediction", "sequence")},
    }
    name = data.draw(st.sampled_from(sorted(after)))
    asked = {key: data.draw(values) for key, values in after[name].items()}
    if run(f"PackedBatch.{name}", asked, asked, lambda: getattr(batch, name)(**asked)) is not None:
        TALLY.right(f"PackedBatch.{name}")
