"""torch's `varlen_attn` is asked for what plain attention within each sequence gives, and only for what it does."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import logitless
from logitless import PackedBatch
from logitless_hf import attention

LENGTHS = (11, 1, 18, 4)
# Keywords of torch's `varlen_attn`, by torch's version.
VARLEN = {
    "2.10": {"is_causal"},
    "2.11": {"scale", "window_size"},
    "2.12": {"scale", "window_size", "enable_gqa"},
}


def varlen_of(version: str, calls: list[dict[str, Any]]) -> Callable[..., Tensor]:
    """That version's `varlen_attn`, as its documentation says, in plain torch."""

    def attend(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, same: Tensor, *most: int, **rest: Any) -> Any:
        calls.append({"heads": key.shape[1], **rest})
        assert rest.keys() <= VARLEN[version]
        assert query.shape[1] == key.shape[1] or rest["enable_gqa"]
        assert starts.dtype == same.dtype == torch.int32
        assert starts.tolist() == same.tolist()
        assert most == (int(starts.diff().max()),) * 2
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        at = torch.arange(query.shape[0])
        owner, behind, (left, right) = (
            torch.bucketize(at, starts[1:], right=True),
            at.unsqueeze(1) - at,
            rest["window_size"],
        )
        seen = (owner.unsqueeze(1) == owner) & ((behind <= left) | (left < 0)) & ((behind >= -right) | (right < 0))
        scale = query.shape[-1] ** -0.5 if rest["scale"] is None else rest["scale"]
        scores = torch.einsum("qhe,khe->hqk", query, key) * scale
        return torch.einsum("hqk,khe->qhe", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)

    keywords = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(VARLEN[version])]
    attend.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    return attend


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """Puts one in torch's place, and takes any tensors as fit for it; gives the list of its calls."""

    def put(version: str) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []
        module = ModuleType("torch.nn.attention.varlen")
        if version in VARLEN:
            module.varlen_attn = varlen_of(version, calls)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(attention, "_flash_takes", lambda *_: True)
        attention._varlen_attn.cache_clear()
        return calls

    yield put
    attention._varlen_attn.cache_clear()


@pytest.mark.parametrize("version", ["2.9", *VARLEN])
@pytest.mark.parametrize("window", [0, 1, 3, 40])
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("scaling", [None, 0.7])
def test_varlen_attention_is_asked_for_the_same(
    scaling: float | None, heads: int, window: int, version: str, stand_in: Callable[[str], list[dict[str, Any]]]
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, sum(LENGTHS), 4), *(((1, 2, sum(LENGTHS), 4),) * 2))
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = torch.tensor([window, *LENGTHS]).view(-1, 1, 1, 1)
    expected, _ = attention._packed_forward("sdpa", torch.nn.Module(), *leaves, mask, scaling=scaling)
    calls = stand_in(version)
    got, _ = attention._packed_forward("sdpa", torch.nn.Module(), *leaves, mask, scaling=scaling)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    grads = [torch.autograd.grad(out, leaves, upstream) for out in (got, expected)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)
    assert len(calls) == (version in ("2.11", "2.12"))
    for call in calls:
        assert call["window_size"] == (window - 1 if window else -1, 0)
        assert call["heads"] == (heads if version == "2.11" else 2)
        assert call.get("enable_gqa", False) == (version == "2.12" and heads > 2)


def test_varlen_attention_is_asked_only_for_what_it_does(
    stand_in: Callable[[str], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    row, mask, takes = torch.randn(1, 2, 5, 8), torch.tensor([0, 3, 2]).view(-1, 1, 1, 1), attention._flash_takes
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not takes(*[row.bfloat16()] * 3)  # on a CPU
    calls = stand_in("2.12")
    for other in ({"softcap": 0.5}, {"dropout": 0.5}):
        attention._packed_forward("eager", torch.nn.Module(), row, row, row, mask, **other)
    assert not calls
    attention._packed_forward("eager", torch.nn.Module(), row, row, row, mask)
    assert len(calls) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("family", "window"), [("llama", None), ("qwen2", None), ("gemma2", 4)])
def test_varlen_attention_on_a_gpu_equals_each_sequence_by_itself(
    family: str, window: int | None, make_model: Callable[..., Any], check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if attention._varlen_attn() is None:
        pytest.skip("torch has no varlen_attn that takes a window")
    changes = {"sliding_window": window, "attn_logit_softcapping": None} if window else {}
    model = make_model(family, torch.bfloat16, **changes).cuda()
    forward = logitless.make_forward(model, "thd")
    assert forward.borders == "packed"
    batch = PackedBatch.from_sequences([torch.randint(3, 101, (length,), device="cuda") for length in LENGTHS])

    def scores() -> tuple[tuple[Tensor, Tensor], dict[str, Tensor | None]]:
        out = forward(batch)
        return (out.log_probs, out.entropy), check.gradients(model, (out.log_probs, out.entropy))

    calls = []
    own = attention._attend_varlen
    monkeypatch.setattr(attention, "_attend_varlen", lambda *args: calls.append(own(*args)) or calls[-1])
    got, grads = scores()
    assert len(calls) == 2
    assert all(call is not None for call in calls)
    monkeypatch.setattr(attention, "_attend_varlen", lambda *_: None)
    expected, expected_grads = scores()
    model.float()
    truth, true_grads = scores()
    # Both round in bf16: neither may be much further from float32 of the same weights than the other is.
    for one, other, exact in zip(got, expected, truth, strict=True):
        assert float((one - exact).norm()) <= 2 * float((other - exact).norm()) + 1e-3
    for name, exact in true_grads.items():
        one, other = ((x[name].float() - exact).norm() for x in (grads, expected_grads))
        assert float(one) <= 2 * float(other) + 1e-2 * float(exact.norm()), name
