"""Heads that PEFT wraps: LoRA as a low-rank addition, and whatever else it does honoured or refused."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from logitless.errors import UnsupportedError
from logitless_hf import bind, inspect_head, unbind


def with_lora(model: Any, **changes: Any) -> Any:
    """LoRA on the head and on an attention projection, with B away from zero so that it shows."""
    options = {"r": 4, "lora_alpha": 12, "target_modules": ["lm_head", "q_proj"], "init_lora_weights": False}
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **{**options, **changes})).eval()
    return wrapped.to(next(model.parameters()).dtype)


def assert_own(model: Any, tokens: Tensor, check: Any) -> None:
    """Scores and gradients of the bound model equal those from its own logits, as it is now."""
    expected = check.own_scores(model, check.shift(tokens), 0.7, input_ids=tokens)
    out = model(tokens, return_log_probs=True, temperature=0.7)
    torch.testing.assert_close(out.log_probs, expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.entropy, expected[1], rtol=1e-9, atol=1e-9)
    if expected[0].requires_grad:
        got = check.gradients(model, (out.log_probs, out.entropy))
        check.gradients_equal(got, check.gradients(model, expected), rtol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi"], indirect=True)
@pytest.mark.parametrize("first", ["bind", "peft"])
def test_lora_on_the_head(first: str, family: str, make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model(family)
    plain = bind(copy.deepcopy(model))(tokens, return_log_probs=True, temperature=0.7).log_probs
    wrapped = bind(with_lora(model)) if first == "peft" else with_lora(bind(model))
    assert_own(wrapped, tokens, check)
    out = wrapped(tokens, return_log_probs=True, temperature=0.7)
    assert (out.log_probs - plain)[:, :-1].abs().max() > 0.5  # so the adapter shows
    assert model.lm_head.base_layer.weight.grad is None


def test_adapters_that_are_disabled_merged_or_switched(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = bind(with_lora(make_model()))
    assert inspect_head(model).adapters == ("default",)
    with model.disable_adapter():
        assert_own(model, tokens, check)
    model.merge_adapter()
    assert_own(model, tokens, check)
    with model.disable_adapter():  # PEFT unmerges at the next forward
        scores = model(tokens, return_log_probs=True, temperature=0.7).log_probs
        expected = check.own_scores(model, check.shift(tokens), 0.7, input_ids=tokens)[0]
        torch.testing.assert_close(scores, expected, rtol=1e-9, atol=1e-9)
    assert_own(model, tokens, check)
    config = peft.LoraConfig(r=2, lora_alpha=7, target_modules=["lm_head"], init_lora_weights=False)
    model.add_adapter("second", config)
    model.double()
    model.set_adapter("second")
    assert_own(model, tokens, check)
    model.base_model.set_adapter(["default", "second"])
    assert_own(model, tokens, check)
    model.base_model.delete_adapter("second")
    model.set_adapter("default")
    merged = model.merge_and_unload()
    assert_own(merged, tokens, check)
    assert type(unbind(merged)).__name__ == "LlamaForCausalLM"


def test_dropout_of_the_adapter_draws_as_pefts_own(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = bind(with_lora(make_model(), lora_dropout=0.5, target_modules=["lm_head"])).train()
    torch.manual_seed(4)
    expected = check.own_scores(model, check.shift(tokens), input_ids=tokens)[0]
    torch.manual_seed(4)
    torch.testing.assert_close(model(tokens, return_log_probs=True).log_probs, expected, rtol=1e-9, atol=1e-9)
    torch.manual_seed(5)
    assert not torch.allclose(model(tokens, return_log_probs=True).log_probs, expected)


def test_no_delta_of_the_weights_size_is_built(
    make_model: Any, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bind(with_lora(make_model()))
    monkeypatch.setattr(type(model.base_model.model.lm_head), "get_delta_weight", None)
    model(tokens, return_log_probs=True).log_probs.sum().backward()


def test_modules_to_save(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = bind(with_lora(make_model(), target_modules=["q_proj"], modules_to_save=["lm_head"]))
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(0.5)
    assert_own(model, tokens, check)
    with model.disable_adapter():
        assert_own(model, tokens, check)
    saved = model.base_model.model.lm_head.modules_to_save["default"].weight
    model(tokens, return_log_probs=True).log_probs.sum().backward()
    assert saved.grad is not None
    assert saved.grad.count_nonzero() > 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "is a variant, DoraLinearVariant, expected plain LoRA; use that, or"),
        ({"lora_bias": True}, "has a bias, expected none; use lora_bias=False, or"),
    ],
    ids=["dora", "bias"],
)
def test_a_variant_of_lora_is_refused(changes: dict[str, Any], reason: str, make_model: Any, tokens: Tensor) -> None:
    """In the same words at `bind` and, put on the head after it, at the call."""
    model = with_lora(make_model(), **changes)
    with pytest.raises(UnsupportedError, match=reason) as at_bind:
        bind(model)
    late = bind(make_model())
    wrapped = with_lora(late, **changes)
    with pytest.raises(UnsupportedError, match=reason) as at_call:
        wrapped(tokens, return_log_probs=True)
    assert str(at_call.value) == str(at_bind.value)
    for remedy in ("merge_adapter()", "target_modules", "modules_to_save", "score the model from its own logits"):
        assert str(at_call.value).count(remedy) == 1
    with wrapped.disable_adapter():
        assert wrapped(tokens, return_log_probs=True).log_probs is not None


def test_another_tuner_is_refused_unless_it_is_off(make_model: Any, tokens: Tensor, check: Any) -> None:
    config = peft.LoHaConfig(r=2, target_modules=["lm_head"], init_weights=False)
    model = peft.get_peft_model(make_model(), config).double().eval()
    with pytest.raises(UnsupportedError, match=r"loha.*expected .*plain LoRA; merge it \(merge_adapter\(\)\)"):
        bind(model)
    with model.disable_adapter():
        assert_own(bind(model), tokens, check)
    model.merge_adapter()
    assert_own(model, tokens, check)


def test_adapters_of_a_mixed_batch_are_refused(make_model: Any, tokens: Tensor) -> None:
    model = bind(with_lora(make_model()))
    with pytest.raises(UnsupportedError, match="adapter_names"):
        model(tokens, return_log_probs=True, adapter_names=["default", "__base__", "default"])


def test_a_tied_head_gets_both_gradients(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = bind(make_model("llama", tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_own(model, tokens, check)


def test_a_head_with_a_bias(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model()
    model.lm_head.bias = nn.Parameter(torch.randn(101, dtype=torch.float64))
    assert_own(bind(model), tokens, check)
    assert inspect_head(model).bias


def test_a_parametrised_head(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    assert_own(bind(model), tokens, check)


def test_a_head_that_zero_3_holds_in_parts_is_refused(make_model: Any) -> None:
    model = make_model()
    weight = model.lm_head.weight
    weight.ds_id, weight.ds_shape, weight.data = 0, weight.shape, torch.empty(0, dtype=weight.dtype)
    assert "fully_shard" in (inspect_head(model).reason or "")
    with pytest.raises(UnsupportedError, match="ZeRO-3"):
        bind(model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_is_resized_after_bind(tied: bool, make_model: Any, tokens: Tensor, check: Any) -> None:
    """Padded to a multiple of 64: the model's own logits have the rows that were added, and so have scores."""
    model = bind(make_model("llama", tie_word_embeddings=tied))
    model.resize_token_embeddings(101, pad_to_multiple_of=64, mean_resizing=False)
    assert model.lm_head.weight.shape == (128, 32)
    assert_own(model, tokens, check)
    assert inspect_head(bind(model)).vocab_size == 128


def test_an_adapter_of_dora_that_is_merged_or_off(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = with_lora(make_model(), use_dora=True)
    with model.disable_adapter():
        bind(model)
        assert_own(model, tokens, check)
    model.merge_adapter()
    assert_own(model, tokens, check)


class RowScaled(nn.Linear):
    """A head with a learned scale for each vocab row, and logits in float32 or more."""

    def __init__(self, linear: nn.Linear, bias: bool = False) -> None:
        super().__init__(linear.in_features, linear.out_features, bias, dtype=linear.weight.dtype)
        self.weight = linear.weight
        self.row_scale = nn.Parameter(torch.linspace(0.5, 2, linear.out_features, dtype=linear.weight.dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        logits = super().forward(hidden)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(wide) * self.row_scale.to(wide)


def with_head(model: Any, head: type[nn.Linear], **options: Any) -> Any:
    model.lm_head = head(model.lm_head, **options)
    return model


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"], indirect=True)
def test_a_head_whose_own_forward_is_linear(
    training: bool, family: str, make_model: Any, tokens: Tensor, check: Any
) -> None:
    plain = bind(make_model(family))(tokens, return_log_probs=True, temperature=0.7).log_probs
    model = bind(with_head(make_model(family), RowScaled)).train(training)
    assert_own(model, tokens, check)
    assert (model(tokens, return_log_probs=True, temperature=0.7).log_probs - plain)[:, :-1].abs().max() > 0.5
    assert inspect_head(model).own_forward
    assert not inspect_head(make_model(family)).own_forward


def test_lora_on_a_head_with_a_forward_of_its_own(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = with_lora(bind(with_head(make_model(), RowScaled)))
    assert_own(model, tokens, check)
    assert_own(model.merge_and_unload(), tokens, check)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_of_its_own_in_low_precision(dtype: torch.dtype, make_model: Any, tokens: Tensor) -> None:
    """No further from float32 than the model's own logits are, twice over."""
    model = with_head(make_model(dtype=dtype), RowScaled)
    hidden = model.model(tokens).last_hidden_state.float()
    exact = (hidden @ (model.lm_head.weight.float() * model.lm_head.row_scale.float().unsqueeze(-1)).T).log_softmax(-1)
    own = model(tokens).logits.log_softmax(-1)
    got = bind(model)(tokens, return_log_probs=True).log_probs[:, :-1]
    wanted = exact[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    assert (got - wanted).abs().max() <= 2 * (own - exact).abs().max()


class Offset(RowScaled):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + 0.5


class Capped(RowScaled):
    def forward(self, hidden: Tensor) -> Tensor:
        return 30 * torch.tanh(super().forward(hidden) / 30)


class Normed(RowScaled):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(nn.functional.normalize(hidden, dim=-1))


class Dropped(RowScaled):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(hidden, 0.1, self.training))


class Rowwise(RowScaled):
    def forward(self, hidden: Tensor) -> Tensor:
        scale = torch.arange(1, hidden.shape[0] + 1).view(-1, *[1] * (hidden.ndim - 1))
        return super().forward(hidden) * (1 if hidden.ndim < 3 else scale)


class EightBits(RowScaled):
    def forward(self, hidden: Tensor) -> Tensor:
        step = hidden.abs().amax(-1, keepdim=True) / 127
        return super().forward(hidden + ((hidden / step.clamp(min=1e-9)).round() * step - hidden).detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("head", [Offset, Capped, Normed, Dropped, Rowwise, EightBits])
def test_a_head_whose_own_forward_is_not_linear_is_refused(
    head: type[nn.Linear], dtype: torch.dtype, make_model: Any
) -> None:
    model = make_model(dtype=dtype)
    with torch.no_grad():
        model.lm_head.weight.div_(200)  # so that no cap shows at the model's own hidden states
    with pytest.raises(UnsupportedError, match="is not linear in the hidden states"):
        bind(with_head(model, head))
    assert type(model).__name__ == "LlamaForCausalLM"
    with pytest.raises(UnsupportedError, match="is not linear in the hidden states"):
        bind(with_head(make_model(dtype=dtype), RowScaled, bias=True) if head is Offset else model)


def test_a_head_that_got_a_forward_of_its_own_after_bind_is_refused(make_model: Any, tokens: Tensor) -> None:
    """It would be scored by what it gives for unit vectors, which is something else where it is not linear."""
    model = bind(make_model())
    with_head(model, Capped)
    with pytest.raises(UnsupportedError, match=r"a Capped with a forward of its own, was put there after bind; bind"):
        model(tokens, return_log_probs=True)
    with_head(model, RowScaled)
    assert bind(model)(tokens, return_log_probs=True).log_probs.shape == tokens.shape


class Streams(nn.Module):
    """In place of a trunk's last norm: two streams of hidden states, as families that predict several tokens ahead."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.stack([self.norm(hidden), -hidden], 1)


def streams(make_model: Any, pick: Any) -> Any:
    model = make_model()
    base = type(model)
    model.model.norm = Streams(model.model.norm)

    def forward(self: Any, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        output = base.forward(self, input_ids=input_ids, **kwargs)
        output.logits = pick(output.logits)
        return output

    model.__class__ = type("Ahead", (base,), {"forward": forward})
    return model


def test_of_several_streams_the_next_tokens_is_scored(make_model: Any, tokens: Tensor, check: Any) -> None:
    assert_own(bind(streams(make_model, lambda z: z[:, 0])), tokens, check)


@pytest.mark.parametrize("pick", [lambda z: z[:, 1], lambda z: z.mean(1), lambda z: z[:, 0] + 0 * z[:, 1]])
def test_logits_of_another_stream_are_refused(pick: Any, make_model: Any) -> None:
    with pytest.raises(UnsupportedError, match="infinite or NaN"):
        bind(streams(make_model, pick))
