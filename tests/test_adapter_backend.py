"""Each adapter on each backend: a bound model scores as its own logits say, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import logitless
from logitless import PackedBatch, Request
from logitless._registry import explain_choice

REQUEST = Request(torch.device("cpu"), torch.float32, torch.float32, n_tokens=8, hidden_size=32, vocab_rows=101)


def backends() -> list[Any]:
    choice = explain_choice(REQUEST)
    names = [status.name for status in logitless.backends()]
    return [
        pytest.param(name, marks=pytest.mark.skip(reason=choice.refused[name]) if _cannot(choice, name) else ())
        for name in names
    ]


def _cannot(choice: Any, name: str) -> bool:
    return name != choice.name and "priority" not in choice.refused[name]


def tiny() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = AutoConfig.for_model("gemma2", **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config.final_logit_softcapping = 5.0
    model: Any = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("layout", ["thd", "bshd", "nested"])
def test_packed_scores_equal_the_model_s_own(backend: str, layout: str) -> None:
    model = tiny()
    parts = [torch.arange(5, 12), torch.arange(20, 32), torch.arange(40, 43)]
    expected = []
    for ids in parts:
        log_p = (model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1] / 0.7).log_softmax(-1)
        expected.append(torch.nn.functional.pad(log_p.gather(1, ids[1:, None])[:, 0], (0, 1)))
    want = torch.cat(expected)
    upstream = torch.randn(want.shape)
    parameters = list(model.parameters())
    want_grads = torch.autograd.grad(want, parameters, upstream)
    out = logitless.make_forward(model, layout, backend)(PackedBatch.from_sequences(parts), temperature=0.7)
    assert out.log_probs is not None
    torch.testing.assert_close(out.log_probs, want, rtol=0, atol=2e-5)
    for got, grad in zip(torch.autograd.grad(out.log_probs, parameters, upstream), want_grads, strict=True):
        torch.testing.assert_close(got, grad, rtol=0, atol=2e-4 * float(grad.abs().max()))


def test_there_is_a_backend_and_an_adapter() -> None:
    """Else all of the above would be skipped, and say nothing."""
    assert explain_choice(REQUEST).name is not None
    assert any(status.ok for status in logitless.adapters())
