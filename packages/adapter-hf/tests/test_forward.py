"""ForwardFns: packed equals each sequence alone, in every layout, values and gradients; or the model is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import logitless
from logitless import PackedBatch
from logitless.errors import InvalidInputError, UnsupportedError
from logitless_hf import CausalLMOutputForPPO, unbind
from logitless_hf.binding import is_bound_class

LAYOUTS = ("thd", "bshd", "nested")
LENGTHS = (7, 1, 12, 3)


def sequences() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randint(3, 101, (length,), generator=g) for length in LENGTHS]


def alone(check: Any, model: Any, temperature: torch.Tensor | float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] scores of each sequence by itself, from the model's own logits; 0 at each one's end."""
    log_probs, entropies, start = [], [], 0
    for ids in sequences():
        targets = torch.cat((ids[1:], torch.tensor([-100]))).unsqueeze(0)
        own = temperature
        if isinstance(temperature, torch.Tensor):
            own = temperature[start : start + len(ids)].unsqueeze(0)
        one = check.own_scores(model, targets, own, input_ids=ids.unsqueeze(0))
        log_probs.append(one[0].squeeze(0))
        entropies.append(one[1].squeeze(0))
        start += len(ids)
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_equals_each_sequence_alone(name: str, layout: str, make_model: Any, check: Any) -> None:
    model = make_model(name)
    temperature = torch.rand(sum(LENGTHS), dtype=torch.float64) + 0.5
    expected = alone(check, model, temperature)
    g, e = torch.randn(sum(LENGTHS), dtype=torch.float64), torch.randn(sum(LENGTHS), dtype=torch.float64)
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected_grads = torch.autograd.grad(expected, parameters, (g, e))

    forward = logitless.make_forward(model, layout)
    out = forward(PackedBatch.from_sequences(sequences()), temperature=temperature)
    assert isinstance(out, CausalLMOutputForPPO)
    assert out.log_probs is not None
    assert out.entropy is not None
    loose = 1e-6 if name == "gemma2" else 1e-9  # its norms are computed in float32 whatever the model's dtype
    torch.testing.assert_close(out.log_probs, expected[0], rtol=loose, atol=loose)
    torch.testing.assert_close(out.entropy, expected[1], rtol=loose, atol=loose)
    grads = torch.autograd.grad((out.log_probs, out.entropy), parameters, (g, e))
    for grad, wanted in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=10 * loose * float(wanted.abs().max()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_fn_sees_batch_order(layout: str, make_model: Any) -> None:
    """Its indices are of the packed batch whatever the layout runs, so advantages and weights fit."""
    model = make_model()
    forward = logitless.make_forward(model, layout)
    batch = PackedBatch.from_sequences(sequences(), align=4)
    weights = torch.randn(batch.input_ids.shape[0], dtype=torch.float64)
    out = forward(batch)
    assert out.log_probs is not None
    assert out.entropy is not None
    expected = (weights * (out.log_probs + 0.1 * out.entropy))[batch.labels != -100].sum()
    parameters = list(model.parameters())
    expected_grads = torch.autograd.grad(expected, parameters)
    one = forward(batch, loss_fn=lambda scores, index: weights[index] * (scores.log_probs + 0.1 * scores.entropy))
    assert one.loss is not None
    assert one.log_probs is not None
    torch.testing.assert_close(one.loss, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.log_probs, out.log_probs.detach(), rtol=0, atol=1e-12)
    for grad, wanted in zip(torch.autograd.grad(one.loss, parameters), expected_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-8, atol=1e-8 * float(wanted.abs().max()))


def test_a_model_that_mixes_packed_sequences_is_refused_and_left_unbound(make_model: Any, check: Any) -> None:
    model = make_model("bloom", n_layer=2, n_head=4)
    with pytest.raises(UnsupportedError, match="BloomForCausalLM: two sequences packed .* use layout='bshd'"):
        logitless.make_forward(model, "thd")
    assert not is_bound_class(type(model))
    out = logitless.make_forward(model, "bshd")(PackedBatch.from_sequences(sequences()))
    expected, _ = alone(check, unbind(model))
    torch.testing.assert_close(out.log_probs, expected, rtol=1e-9, atol=1e-9)


def test_bad_calls(make_model: Any) -> None:
    model = make_model()
    batch = PackedBatch.from_sequences(sequences(), align=4)
    with pytest.raises(InvalidInputError, match="layout: got 'sbhd', expected 'thd', 'bshd' or 'nested'"):
        logitless.make_forward(model, "sbhd")
    forward = logitless.make_forward(model)
    with pytest.raises(InvalidInputError, match="batch: got Tensor, expected a logitless.PackedBatch"):
        forward(batch.input_ids)
    with pytest.raises(UnsupportedError, match="batch: is a shard"):
        forward(batch.shard(0, 2))
    with pytest.raises(UnsupportedError, match="multi_modal_inputs: got pixel_values"):
        forward(batch, multi_modal_inputs={"pixel_values": torch.zeros(1)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_leak_is_a_leak(dtype: torch.dtype) -> None:
    """Untrained, one sequence moves the other by less than bf16 rounds; trained, it would not stay so small."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=1000, hidden_size=64, n_layer=2, n_head=4)).to(dtype)
    with pytest.raises(UnsupportedError, match="BloomForCausalLM: two sequences packed in one row"):
        logitless.make_forward(model, "thd")
