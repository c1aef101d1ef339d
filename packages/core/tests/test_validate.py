"""Every wrong call is refused with what was got, what was expected and what to do, before any backend runs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from logitless import LMHead, linear_log_probs
from logitless._validate import check_kept
from logitless.errors import InputTypeError, InvalidInputError, LogitlessError

pytestmark = pytest.mark.usefixtures("reference_backend")

N, D, V = 5, 4, 7
GOOD: dict[str, Any] = {"hidden": torch.zeros(N, D), "labels": torch.arange(N)}
WEIGHT = torch.zeros(V, D)
PAIR = (torch.zeros(N, 2), torch.zeros(V, 2))


class DTensor(torch.Tensor):
    """Told by its method, as torch's own."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


SHARDED = WEIGHT.as_subclass(DTensor)

# what to change: arguments of the call, or `head`; and the words that the message must hold
TYPES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "hidden-list": ({"hidden": [[0.0] * D] * N}, ["hidden: got list", "expected a tensor [..., D]"]),
    "hidden-int": ({"hidden": torch.zeros(N, D).long()}, ["hidden: got dtype torch.int64", "float16"]),
    "hidden-nested": (
        {"hidden": torch.nested.nested_tensor([torch.zeros(N, D)])},
        ["hidden: got a nested tensor", "a dense one; pass the values()"],
    ),
    "head-module": ({"head": torch.nn.Linear(D, V)}, ["head: got Linear", "a [V, D] tensor or a logitless.LMHead"]),
    "weight-list": ({"head": LMHead([[0.0] * D])}, ["head.weight: got list", "expected a tensor"]),
    "weight-int": ({"head": torch.zeros(V, D).int()}, ["head.weight: got dtype torch.int32", "float16"]),
    "weight-dtensor": ({"head": SHARDED}, ["head.weight: got a DTensor", "plain tensor", "to_local()", "tp_group="]),
    "hidden-dtensor": ({"hidden": torch.zeros(N, D).as_subclass(DTensor)}, ["hidden: got a DTensor", "to_local()"]),
    "bias-int": ({"head": LMHead(WEIGHT, torch.zeros(V).int())}, ["head.bias: got dtype torch.int32", "float"]),
    "scale-text": ({"head": LMHead(WEIGHT, scale="1")}, ["head.scale: got str", "expected a number"]),
    "scale-bool": ({"head": LMHead(WEIGHT, scale=True)}, ["head.scale: got bool", "expected a number"]),
    "softcap-tensor": ({"head": LMHead(WEIGHT, softcap=torch.ones(()))}, ["head.softcap: got Tensor", "positive"]),
    "vocab-size-float": ({"head": LMHead(WEIGHT, vocab_size=7.0)}, ["head.vocab_size: got float", "an int"]),
    "lora-tensor": ({"head": LMHead(WEIGHT, lora=(torch.zeros(N, 2),))}, ["head.lora[0]", "a pair (u [..., r], b"]),
    "lora-triple": ({"head": LMHead(WEIGHT, lora=((*PAIR, 1),))}, ["head.lora[0]", "a pair"]),
    "lora-dict": ({"head": LMHead(WEIGHT, lora={"u": PAIR[0]})}, ["head.lora: got dict", "a tuple or list of pairs"]),
    "lora-int": ({"head": LMHead(WEIGHT, lora=((PAIR[0].int(), PAIR[1]),))}, ["head.lora[0].u: got dtype", "float"]),
    "buffer-bf16": ({"head": LMHead(WEIGHT, grad_buffer=WEIGHT.bfloat16())}, ["head.grad_buffer: got", "float32"]),
    "labels-float": ({"labels": torch.zeros(N)}, ["labels: got dtype torch.float32", "int64"]),
    "labels-bool": ({"labels": torch.zeros(N, dtype=torch.bool)}, ["labels: got dtype torch.bool", "int64"]),
    "labels-list": ({"labels": [0] * N}, ["labels: got list", "expected a tensor"]),
    "temperature-text": ({"temperature": "hot"}, ["temperature: got str", "expected a positive number"]),
    "temperature-none": ({"temperature": None}, ["temperature: got NoneType", "expected a positive number"]),
    "temperature-bool": ({"temperature": True}, ["temperature: got bool", "expected a positive number"]),
    "ignore-index-float": ({"ignore_index": -100.0}, ["ignore_index: got float", "expected an int"]),
    "entropy-int": ({"entropy": 1}, ["entropy: got int", "expected True or False"]),
    "validate-none": ({"validate": None}, ["validate: got NoneType", "expected True or False"]),
    "keep-bytes-float": ({"keep_bytes": 1e9}, ["keep_bytes: got float", "a number of bytes"]),
    "workspace-bool": ({"workspace_bytes": True}, ["workspace_bytes: got bool", "a number of bytes"]),
    "group-int": ({"tp_group": 2}, ["tp_group: got int", "ProcessGroup"]),
    "top-k-float": ({"top_k": 5.0}, ["top_k: got float", "an int or None"]),
    "top-k-bool": ({"top_k": True}, ["top_k: got bool"]),
    "top-p-text": ({"top_p": "0.9"}, ["top_p: got str", "a number or None"]),
    "top-p-bool": ({"top_p": True}, ["top_p: got bool"]),
    "stats-name": ({"stats": "is_argmax"}, ["stats: got str", "a tuple of names, such as ('is_kept',)"]),
    "stats-none": ({"stats": None}, ["stats: got NoneType", "a tuple of names, such as ('is_kept',)"]),
}
VALUES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "labels-too-long": ({"labels": torch.arange(N + 1)}, ["labels: got shape (6,)", "expected (5,)", "shifted"]),
    "labels-2d": ({"labels": torch.zeros(1, N).long()}, ["labels: got shape (1, 5)", "expected (5,)"]),
    "labels-beyond": ({"labels": torch.tensor([0, 1, V, 2, 3])}, ["got 7 at flat position 2", "0 to 6", "tokenizer"]),
    "labels-negative": ({"labels": torch.tensor([0, -1, 1, 2, 3])}, ["got -1 at flat position 1", "ignore_index -100"]),
    "labels-padded": (
        {"head": LMHead(WEIGHT, vocab_size=5), "labels": torch.tensor([0, 1, 5, 2, 3])},
        ["got 5 at flat position 2", "0 to 4"],
    ),
    "hidden-scalar": ({"hidden": torch.zeros(())}, ["hidden: got shape ()", "[..., D] with D >= 1"]),
    "hidden-sparse": (
        {"hidden": torch.zeros(N, D).to_sparse()},
        ["hidden: got layout torch.sparse_coo", "a dense tensor; call to_dense()"],
    ),
    "hidden-meta": ({"hidden": torch.zeros(N, D, device="meta")}, ["hidden: is on the meta device", "holds no values"]),
    "hidden-empty": ({"hidden": torch.zeros(N, 0)}, ["hidden: got shape (5, 0)", "D >= 1"]),
    "weight-transposed": ({"head": WEIGHT.T}, ["head.weight: got shape (4, 7)", "hidden has size 4", "not transposed"]),
    "weight-1d": ({"head": torch.zeros(D)}, ["head.weight: got shape (4,)", "expected (vocab rows >= 1, 4)"]),
    "weight-empty": ({"head": torch.zeros(0, D)}, ["head.weight: got shape (0, 4)", "vocab rows >= 1"]),
    "weight-elsewhere": ({"head": WEIGHT.to("meta")}, ["head.weight: is on meta", "hidden is on cpu", "move one"]),
    "bias-short": ({"head": LMHead(WEIGHT, torch.zeros(D))}, ["head.bias: got shape (4,)", "expected (7,)"]),
    "scale-low": ({"head": LMHead(WEIGHT, scale=-math.inf)}, ["head.scale: got -inf", "a finite number"]),
    "scale-nan": ({"head": LMHead(WEIGHT, scale=float("nan"))}, ["head.scale: got nan", "a finite number"]),
    "softcap-zero": ({"head": LMHead(WEIGHT, softcap=0.0)}, ["head.softcap: got 0.0", "a positive finite number"]),
    "softcap-high": ({"head": LMHead(WEIGHT, softcap=1e20)}, ["head.softcap: got 1e+20", "to 1000.0, so that"]),
    "scale-high": ({"head": LMHead(WEIGHT, scale=1e20)}, ["head.scale: got 1e+20", "at most 1000.0 either way"]),
    "vocab-size-zero": ({"head": LMHead(WEIGHT, vocab_size=0)}, ["head.vocab_size: got 0", "at least 1"]),
    "vocab-size-beyond": ({"head": LMHead(WEIGHT, vocab_size=V + 1)}, ["head.vocab_size: got 8", "7 rows"]),
    "vocab-start-negative": ({"head": LMHead(WEIGHT, vocab_start=-1)}, ["head.vocab_start: got -1", "at least 0"]),
    "vocab-start-alone": ({"head": LMHead(WEIGHT, vocab_start=3)}, ["head.vocab_start: got 3", "tp_group"]),
    "lora-u-short": (
        {"head": LMHead(WEIGHT, lora=((torch.zeros(N - 1, 2), PAIR[1]),))},
        ["head.lora[0].u: got shape (4, 2)", "expected (5, 2)"],
    ),
    "lora-ranks-differ": (
        {"head": LMHead(WEIGHT, lora=((torch.zeros(N, 3), PAIR[1]),))},
        ["head.lora[0].u: got shape (5, 3)", "expected (5, 2)"],
    ),
    "lora-b-transposed": (
        {"head": LMHead(WEIGHT, lora=(PAIR, (PAIR[0], PAIR[1].T)))},
        ["head.lora[1].b: got shape (2, 7)", "expected (7, 7)"],
    ),
    "lora-b-1d": (
        {"head": LMHead(WEIGHT, lora=((PAIR[0], torch.zeros(V)),))},
        ["head.lora[0].b: got shape (7,)", "expected (7, r) with r >= 1"],
    ),
    "lora-rank-zero": (
        {"head": LMHead(WEIGHT, lora=((torch.zeros(N, 0), torch.zeros(V, 0)),))},
        ["head.lora[0].b: got shape (7, 0)", "expected (7, r) with r >= 1"],
    ),
    "buffer-expanded": (
        {"head": LMHead(WEIGHT, grad_buffer=torch.zeros(1, D).expand(V, D))},
        ["head.grad_buffer: is an expanded tensor", "clone it"],
    ),
    "buffer-shape": (
        {"head": LMHead(WEIGHT, grad_buffer=torch.zeros(D, V))},
        ["head.grad_buffer: got shape (4, 7)", "expected (7, 4)"],
    ),
    "buffer-grad": (
        {"head": LMHead(WEIGHT, grad_buffer=torch.zeros(V, D, requires_grad=True))},
        ["head.grad_buffer: requires grad", "pass a buffer that does not"],
    ),
    "temperature-zero": ({"temperature": 0}, ["temperature: got 0", "a positive finite number"]),
    "temperature-negative": ({"temperature": -0.5}, ["temperature: got -0.5", "a positive finite number"]),
    "temperature-low": ({"temperature": 9.9e-6}, ["temperature: got 9.9e-06", "from 1e-05 to 100000.0"]),
    "temperature-high": ({"temperature": 100001}, ["temperature: got 100001", "from 1e-05 to 100000.0"]),
    "temperature-low-token": (
        {"temperature": torch.tensor([1.0, 1.0, 9.9e-6, 1.0, 1.0])},
        ["temperature: got 9.8999", "at flat position 2", "from 1e-05 to 100000.0"],
    ),
    "temperature-high-token": (
        {"temperature": torch.tensor([1.0, 1e5, 1.0, 100001.0, 1.0])},
        ["temperature: got 100001.0 at flat position 3", "from 1e-05 to 100000.0"],
    ),
    "temperature-nan": ({"temperature": float("nan")}, ["temperature: got nan", "a positive finite number"]),
    "temperature-per-row": (
        {"temperature": torch.ones(V)},
        ["temperature: got shape (7,)", "expected (5,)", "one for each token"],
    ),
    "temperature-grad": (
        {"temperature": torch.ones(N, requires_grad=True)},
        ["temperature: requires grad", "detach it"],
    ),
    "temperature-cold-token": (
        {"temperature": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])},
        ["temperature: got 0.0 at flat position 2", "positive finite"],
    ),
    "labels-of-none": ({"labels": torch.zeros(N, 0).long()}, ["labels: got shape (5, 0)", "(5, 'K') for K labels"]),
    "labels-3d": ({"labels": torch.zeros(N, 2, 2).long()}, ["labels: got shape (5, 2, 2)", "expected (5,)"]),
    "top-k-zero": ({"top_k": 0}, ["top_k: got 0", "at least 1, or None to keep every token"]),
    "top-k-off": ({"top_k": -1}, ["top_k: got -1", "None to keep every token"]),
    "top-p-zero": ({"top_p": 0.0}, ["top_p: got 0.0", "more than 0 and at most 1"]),
    "top-p-percent": ({"top_p": 95}, ["top_p: got 95", "at most 1"]),
    "top-p-nan": ({"top_p": float("nan")}, ["top_p: got nan", "more than 0"]),
    "stats-nested": ({"stats": [["is_kept"]]}, ["stats: got ['is_kept']", "'sum_sq_probs'"]),
    "stats-unknown": ({"stats": ("median",)}, ["stats: got 'median'", "'sum_sq_probs'", "'is_kept'"]),
    "ignore-index-wide": ({"ignore_index": 1 << 63}, ["ignore_index: got 9223372036854775808", "a 64-bit int"]),
    "keep-bytes-negative": ({"keep_bytes": -1}, ["keep_bytes: got -1", "at least 0"]),
    "workspace-zero": ({"workspace_bytes": 0}, ["workspace_bytes: got 0", "at least 1"]),
}


def call(**changed: Any) -> Any:
    arguments = {**GOOD, "head": WEIGHT, **changed}
    return linear_log_probs(arguments.pop("hidden"), arguments.pop("head"), arguments.pop("labels"), **arguments)


def test_the_unchanged_call_is_good() -> None:
    assert call().log_probs.shape == (N,)


@pytest.mark.parametrize("name", TYPES)
def test_wrong_type(name: str) -> None:
    changed, words = TYPES[name]
    with pytest.raises(InputTypeError) as caught:
        call(**changed)
    assert isinstance(caught.value, TypeError)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("name", VALUES)
def test_wrong_value(name: str) -> None:
    changed, words = VALUES[name]
    with pytest.raises(InvalidInputError) as caught:
        call(**changed)
    assert isinstance(caught.value, ValueError)
    assert [word for word in words if word not in str(caught.value)] == []


def test_every_error_is_ours() -> None:
    assert issubclass(InputTypeError, LogitlessError)
    assert issubclass(InvalidInputError, LogitlessError)


def test_what_ignored_tokens_hold_is_not_checked() -> None:
    labels = torch.tensor([0, -100, 1, 2, 3])
    cold = torch.tensor([1.0, float("nan"), 1.0, 1.0, 1.0])
    assert call(labels=labels, temperature=cold).log_probs[1] == 0.0


@pytest.mark.parametrize("temperature", [1e-5, 1e5])
def test_the_ends_of_the_temperatures_are_served(temperature: float) -> None:
    number, tensor = call(temperature=temperature), call(temperature=torch.full((N,), temperature, dtype=torch.float64))
    assert torch.equal(number.log_probs, tensor.log_probs)


def test_another_ignore_index() -> None:
    labels = torch.tensor([0, 6, 1, 6, 3])
    out = call(labels=labels, ignore_index=6)
    assert out.log_probs[[1, 3]].tolist() == [0.0, 0.0]
    with pytest.raises(InvalidInputError, match="ignore_index 6"):
        call(labels=torch.tensor([0, -100, 1, 6, 3]), ignore_index=6)


def test_a_buffer_is_not_written_by_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(InvalidInputError, match="head.grad_buffer: it is written, so it works in eager mode only"):
        call(head=LMHead(WEIGHT, grad_buffer=torch.zeros(V, D)))


def test_what_keeps_every_token_is_no_kept_set() -> None:
    plain, kept = call(), call(top_k=V, top_p=1.0)
    assert torch.equal(kept.log_probs, plain.log_probs)
    assert check_kept(V, 1.0, V) == (None, None)
    assert check_kept(V - 1, 0.5, V) == (V - 1, 0.5)


def test_unvalidated_call_reads_no_value() -> None:
    out = call(labels=torch.tensor([0, V, 1, -100, 3]), validate=False)
    assert out.log_probs.isnan().tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_every_integer_is_a_label(dtype: torch.dtype) -> None:
    assert call(labels=torch.arange(N, dtype=dtype)).log_probs.shape == (N,)
