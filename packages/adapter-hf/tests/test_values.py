"""Value models through the calls that language models have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

import logitless
from logitless.errors import InvalidInputError, UnsupportedError
from logitless_hf import bind, inspect_head, unbind

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def critic(labels: int = 1, auto: Any = AutoModelForTokenClassification, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **SIZES, num_labels=labels, **changes)
    return auto.from_config(config).double().eval()


def test_values_and_gradients_equal_the_models_own(tokens: Tensor, check: Any) -> None:
    model = critic()
    expected = model(input_ids=tokens).logits.squeeze(-1)
    assert bind(model) is model
    assert inspect_head(model).values
    out = model(input_ids=tokens, return_log_probs=True)
    assert out.log_probs is None
    assert out.entropy is None
    assert torch.equal(out.values, expected)
    assert isinstance(out, logitless.CausalLMOutputForPPO)
    check.gradients_equal(check.gradients(model, (out.values,)), check.gradients(model, (expected,)), rtol=1e-12)
    assert model(input_ids=tokens).logits.shape == (3, 7, 1)
    assert model(input_ids=tokens[:0], return_log_probs=True).values.shape == (0, 7)
    assert "values" not in dir(type(unbind(model)))


@pytest.mark.parametrize("layout", ["thd", "bshd", "nested"])
def test_a_forward_function_gives_values_in_batch_order(layout: str, tokens: Tensor) -> None:
    model, parts = critic(), [tokens[0], tokens[1, :4], tokens[2, :2]]
    alone = torch.cat([model(input_ids=part.unsqueeze(0)).logits.flatten() for part in parts])
    forward = logitless.make_forward(model, layout)
    batch = logitless.PackedBatch.from_sequences(parts)
    out = forward(batch, temperature=0.5)
    torch.testing.assert_close(out.values, alone, rtol=1e-9, atol=1e-12)
    assert out.log_probs is None
    out.values.sum().backward()
    assert model.score.weight.grad.count_nonzero() > 0


def test_an_id_outside_of_the_vocabulary_is_named(tokens: Tensor) -> None:
    tokens[2, 0] = 101
    with pytest.raises(InvalidInputError, match=r"^input_ids: got 101 at \(2, 0\), expected 0 to 100"):
        bind(critic())(tokens, return_log_probs=True)


@pytest.mark.parametrize(
    "asked",
    [{"loss_fn": lambda scores, index: scores.log_probs}, {"top_k": 5}, {"top_p": 0.9}, {"stats": ("is_argmax",)}],
    ids=lambda asked: next(iter(asked)),
)
def test_what_only_scores_have_is_refused(asked: dict[str, Any], tokens: Tensor) -> None:
    with pytest.raises(InvalidInputError, match=f"{next(iter(asked))}: got some, expected none; a value model has no"):
        bind(critic())(input_ids=tokens, return_log_probs=True, **asked)


def test_what_is_no_value_model_is_refused(tokens: Tensor) -> None:
    with pytest.raises(UnsupportedError, match="get_output_embeddings"):
        bind(critic(labels=2))
    with pytest.raises(UnsupportedError, match=r"logits of shape \(2, 1\).*AutoModelForTokenClassification"):
        bind(critic(auto=AutoModelForSequenceClassification))


class Critic(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **call: Any) -> Any:
        out = self.model(**call)
        out.values = out.values * 1  # what a module does to it is not lost
        assert type(out.values * 1) is Tensor
        assert out.values.requires_grad == torch.is_grad_enabled()
        return out


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", [lambda model: model, Critic], ids=["bare", "within a module"])
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}, {}], ids=str)
def test_ddp_passes_values_on(wrap: Any, options: dict[str, bool], tokens: Tensor, check: Any) -> None:
    """DDP that looks for unused parameters calls `values()` of each dict in an output."""
    model = critic()
    expected = model(input_ids=tokens).logits.squeeze(-1)
    grads = check.gradients(model, (expected,))
    ddp = DistributedDataParallel(wrap(bind(model)), **options)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = ddp(input_ids=tokens, return_log_probs=True)
        assert type(out).__name__ == "CausalLMOutputForPPO"
        assert type(out.values) is Tensor
        assert torch.equal(out.values, expected)
        assert out.values is out["values"]
        if grad:
            upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            out.values.backward(upstream)
    check.gradients_equal({name: p.grad for name, p in model.named_parameters()}, grads, rtol=1e-12)
