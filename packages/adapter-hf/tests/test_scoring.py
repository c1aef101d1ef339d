"""Scores and gradients of bound models against the models' own logits, and the errors of a scoring call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

import logitless
import logitless_hf
from logitless import reference
from logitless.errors import InputTypeError, InvalidInputError, NotFoundError
from logitless_hf import bind, unbind


@pytest.mark.parametrize(("dtype", "left", "rtol"), [(torch.float64, 0, 1e-9), (torch.float32, 2, 1e-5)])
def test_values_and_every_gradient_equal_the_models_own(
    dtype: torch.dtype, left: int, rtol: float, family: str, make_model: Any, tokens: Tensor, check: Any
) -> None:
    """Padded left in float32 only: in float64 Gemma2's own logits of such a batch are NaN."""
    model = make_model(family, dtype)
    mask = torch.ones_like(tokens)
    mask[0, :left] = 0
    mask[1, 5:] = 0  # padded right
    targets = torch.where((mask[:, 1:] & mask[:, :-1]).bool(), tokens[:, 1:], -100)
    targets = torch.nn.functional.pad(targets, (0, 1), value=-100)
    expected = check.own_scores(model, targets, 0.7, input_ids=tokens, attention_mask=mask)
    expected_gradients = check.gradients(model, expected)

    out = bind(model)(tokens, attention_mask=mask, return_log_probs=True, temperature=0.7)

    torch.testing.assert_close(out.log_probs, expected[0], rtol=rtol, atol=rtol)
    torch.testing.assert_close(out.entropy, expected[1], rtol=rtol, atol=rtol)
    check.gradients_equal(
        check.gradients(model, (out.log_probs, out.entropy)), expected_gradients, rtol=1e-4 if left else 1e-6
    )


def test_a_missed_transform_would_show(make_model: Any, tokens: Tensor, check: Any) -> None:
    """The scaled heads make each transform worth far more than the tolerances."""
    for family in ("gemma2", "gemma3_text", "cohere", "granite", "phi"):
        model = make_model(family)
        with torch.no_grad():
            hidden = model.model(tokens)[0]
            plain = (hidden @ model.lm_head.weight.T).log_softmax(-1)
            targets = check.shift(tokens)
            got = check.own_scores(model, targets, input_ids=tokens)[0]
        plain_scores = plain.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        assert float((plain_scores - got)[:, :-1].abs().max()) > 0.1, family


def test_temperature_for_each_token(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model("gemma2")
    temperature = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(5)) + 0.5
    expected = check.own_scores(model, check.shift(tokens), temperature.double(), input_ids=tokens)
    out = bind(model)(tokens, return_log_probs=True, temperature=temperature)
    torch.testing.assert_close(out.log_probs, expected[0])
    torch.testing.assert_close(out.entropy, expected[1])


def test_entropy_is_optional_and_its_gradient_too(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model())
    assert model(tokens, return_log_probs=True, entropy=False).entropy is None
    out = model(tokens, return_log_probs=True, entropy_grad=False)
    assert not out.entropy.requires_grad
    assert out.log_probs.requires_grad
    assert model(tokens, return_log_probs=True).entropy.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scores_are_float32_and_better_than_rounded_logits(
    dtype: torch.dtype, make_model: Any, tokens: Tensor, check: Any
) -> None:
    model = make_model("gemma2", dtype)
    with torch.no_grad():
        hidden = model.model(tokens, use_cache=False)[0].double()
        z = hidden @ model.lm_head.weight.double().T
        log_p = (5.0 * torch.tanh(z / 5.0) / 0.7).log_softmax(-1)
        out = bind(model)(tokens, return_log_probs=True, temperature=0.7)
    expected = log_p.gather(-1, check.shift(tokens).clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert out.log_probs.dtype == out.entropy.dtype == torch.float32
    torch.testing.assert_close(out.log_probs[:, :-1].double(), expected[:, :-1], rtol=0, atol=1e-4)


def test_autocast_is_the_same_forward_and_backward(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model("llama", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = check.own_scores(model, check.shift(tokens), input_ids=tokens)
        expected_gradients = check.gradients(model, expected)
        bind(model)
        out = model(tokens, return_log_probs=True)
    torch.testing.assert_close(out.log_probs, expected[0], rtol=0, atol=0.1)
    got = check.gradients(model, (out.log_probs, out.entropy))
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in got.values())
    check.gradients_equal(got, expected_gradients, rtol=0.1)


def test_a_frozen_head_or_trunk_gets_no_gradient(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model())
    model.lm_head.weight.requires_grad_(False)
    model(tokens, return_log_probs=True).log_probs.sum().backward()
    assert model.lm_head.weight.grad is None
    assert model.model.norm.weight.grad is not None
    model.requires_grad_(False)
    assert not model(tokens, return_log_probs=True).log_probs.requires_grad


def test_keep_bytes_changes_no_bit(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model("llama", torch.float32))
    a = model(tokens, return_log_probs=True)
    b = model(tokens, return_log_probs=True, keep_bytes=1 << 20)
    assert torch.equal(a.log_probs, b.log_probs)


def test_all_masked_and_all_ignored_batches_are_zero(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model("llama", torch.float32))
    ignored = torch.full_like(tokens, -100)
    for call in ({"labels": ignored}, {"shift_labels": ignored}, {"attention_mask": torch.zeros_like(tokens)}):
        model.zero_grad()
        out = model(tokens, return_log_probs=True, **call)
        assert out.log_probs.count_nonzero() == out.entropy.count_nonzero() == 0
        (out.log_probs.sum() + out.entropy.sum()).backward()
        assert model.lm_head.weight.grad is None or model.lm_head.weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("shape", [(0, 7), (3, 1)])
def test_batches_in_which_nothing_is_scored(shape: tuple[int, int], make_model: Any) -> None:
    out = bind(make_model())(torch.full(shape, 7), return_log_probs=True)
    assert out.log_probs.shape == out.entropy.shape == shape
    assert out.log_probs.count_nonzero() == 0
    out.log_probs.sum().backward()


def test_labels_and_shift_labels(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model()
    labels = tokens.flip(0).clone()
    labels[0, 3] = -100
    expected = check.own_scores(model, check.shift(labels), input_ids=tokens)[0]
    bind(model)
    torch.testing.assert_close(model(tokens, labels=labels, return_log_probs=True).log_probs, expected)
    by_hand = tokens.roll(2, 1)
    expected = check.own_scores(model, by_hand, input_ids=tokens)[0]
    got = model(tokens, labels=labels, shift_labels=by_hand, return_log_probs=True).log_probs
    torch.testing.assert_close(got, expected)


def test_packed_sequences_score_as_each_alone(make_model: Any, tokens: Tensor) -> None:
    """Labels rolled across a border would score the first token of the next sequence."""
    model = bind(make_model())
    lengths = (3, 4)
    alone = [model(part, return_log_probs=True).log_probs for part in tokens[:1].split(lengths, dim=1)]
    position_ids = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    packed = model(tokens[:1], position_ids=position_ids, return_log_probs=True).log_probs
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))
    assert packed[0, 2] == 0


KEPT: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.7}]


def full(model: Any, targets: Tensor, tokens: Tensor, **asked: Any) -> logitless.TokenLogProbs:
    """By the model's own logits, at temperature 0.7."""
    return reference.scores_of(model(tokens, use_cache=False).logits / 0.7, targets, **asked)


@pytest.mark.parametrize("kept", [*KEPT, {}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_kept_sets_and_statistics(name: str, kept: dict[str, Any], make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model(name)
    names = ("is_kept", "mean_logit", "sum_sq_probs", "is_argmax")
    expected = full(model, check.shift(tokens), tokens, **kept, stats=names)
    assert bool(expected.stats["is_kept"][:, :-1].all()) == (not kept)  # type: ignore[index]  # some labels are out
    wanted = check.gradients(model, (expected.log_probs, expected.entropy))
    out = bind(model)(tokens, return_log_probs=True, temperature=0.7, **kept, stats=names)
    loose = 1e-6 if name == "gemma2" else 1e-9  # its norms are computed in float32 whatever the model's dtype
    torch.testing.assert_close(out.log_probs, expected.log_probs, rtol=loose, atol=loose)
    torch.testing.assert_close(out.entropy, expected.entropy, rtol=loose, atol=loose)
    assert list(out.stats) == list(names)
    for stat, x in out.stats.items():
        torch.testing.assert_close(x, expected.stats[stat], rtol=loose, atol=loose)  # type: ignore[index]
    check.gradients_equal(check.gradients(model, (out.log_probs, out.entropy)), wanted, rtol=1e-6)


@pytest.mark.parametrize("kept", [{}, {"top_k": 20, "top_p": 0.7}], ids=str)
def test_several_labels(kept: dict[str, Any], make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model()
    mask = torch.ones_like(tokens)
    mask[1, 5:] = 0
    several = torch.randint(5, 101, (*tokens.shape, 3), generator=torch.Generator().manual_seed(4))
    several[0, 2, 1] = -100
    shifted = F.pad(several[:, 1:], (0, 0, 0, 1), value=-100)
    shifted[1, 4:] = -100
    stats = ("sum_sq_probs", "is_kept")
    for given, targets in (({"labels": several}, shifted), ({"shift_labels": several}, several)):
        logits = unbind(model)(tokens, attention_mask=mask, use_cache=False).logits / 0.7
        expected = reference.scores_of(logits, targets, **kept, stats=stats)
        wanted = check.gradients(model, (expected.log_probs, expected.entropy))
        call = {"attention_mask": mask, "temperature": 0.7, "return_log_probs": True, "stats": stats}
        out = bind(model)(tokens, **call, **kept, **given)
        assert out.log_probs.shape == (*tokens.shape, 3)
        torch.testing.assert_close(out.log_probs, expected.log_probs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(out.entropy, expected.entropy, rtol=1e-9, atol=1e-9)
        for name, x in out.stats.items():
            torch.testing.assert_close(x, expected.stats[name], rtol=1e-9, atol=1e-9)  # type: ignore[index]
        check.gradients_equal(check.gradients(model, (out.log_probs, out.entropy)), wanted, rtol=1e-6)


def test_a_loss_over_a_kept_set(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model()
    expected = full(model, check.shift(tokens), tokens, **KEPT[2])
    wanted = check.gradients(model, ((expected.log_probs + 0.1 * expected.entropy).sum(),))
    call = {"return_log_probs": True, "temperature": 0.7, **KEPT[2]}
    out = bind(model)(tokens, loss_fn=lambda scores, index: scores.log_probs + 0.1 * scores.entropy, **call)
    torch.testing.assert_close(out.log_probs, expected.log_probs, rtol=1e-9, atol=1e-9)
    check.gradients_equal(check.gradients(model, (out.loss,)), wanted, rtol=1e-6)


def test_inputs_embeds_need_labels(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model()
    embeds = model.get_input_embeddings()(tokens).detach()
    expected = check.own_scores(model, check.shift(tokens), inputs_embeds=embeds)[0]
    bind(model)
    got = model(inputs_embeds=embeds, labels=tokens, return_log_probs=True).log_probs
    torch.testing.assert_close(got, expected)
    with pytest.raises(InvalidInputError, match="labels"):
        model(inputs_embeds=embeds, return_log_probs=True)


def test_other_outputs_of_the_family_are_kept(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model())
    out = model(tokens, return_log_probs=True, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert out.logits is None
    assert out.loss is None
    assert out.values is None
    assert out.past_key_values is None
    assert model(tokens, return_log_probs=True, use_cache=True).past_key_values.get_seq_length() == 7


def test_a_mixture_of_experts_keeps_its_routers_loss(tokens: Tensor) -> None:
    config = AutoConfig.for_model(
        "mixtral", vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    expected = model(tokens, output_router_logits=True)
    out = bind(model)(tokens, output_router_logits=True, return_log_probs=True)
    torch.testing.assert_close(out.aux_loss, expected.aux_loss)
    torch.testing.assert_close(out.router_logits, expected.router_logits)
    assert isinstance(out, logitless_hf.CausalLMOutputForPPO)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        ({"return_dict": False}, InvalidInputError, ["return_dict", "False"]),
        ({"logits_to_keep": 2}, InvalidInputError, ["logits_to_keep", "leave it out"]),
        ({"loss_fn": lambda scores, index: scores.log_probs.sum()}, InvalidInputError, ["loss_fn", "shape"]),
        ({"labels": torch.zeros(3, 6, dtype=torch.long)}, InvalidInputError, ["labels", "(3, 6)", "(3, 7)"]),
        ({"shift_labels": torch.zeros(21, dtype=torch.long)}, InvalidInputError, ["shift_labels", "(21,)", "(3, 7)"]),
        ({"shift_labels": torch.full((3, 7), 101)}, InvalidInputError, ["labels", "101", "100"]),
        ({"labels": [1, 2]}, InvalidInputError, ["labels", "list"]),
        ({"attention_mask": torch.ones(3, 1, 7, 7)}, InvalidInputError, ["attention_mask", "shift_labels"]),
        ({"position_ids": torch.zeros(3, 3, 7)}, InvalidInputError, ["position_ids", "shift_labels"]),
        ({"temperature": 0.0}, InvalidInputError, ["temperature", "0.0", "positive"]),
        ({"temperature": float("nan")}, InvalidInputError, ["temperature", "nan"]),
        ({"keep_bytes": -1}, InvalidInputError, ["keep_bytes", "-1"]),
        ({"top_k": 0}, InvalidInputError, ["top_k", "0"]),
        ({"top_p": 1.5}, InvalidInputError, ["top_p", "1.5"]),
        ({"stats": ("entropy",)}, InvalidInputError, ["stats", "'is_kept'"]),
        ({"stats": "is_kept"}, InputTypeError, ["stats", "tuple"]),
        ({"stats": ("is_kept",), "loss_fn": lambda s, i: s.log_probs}, InvalidInputError, ["stats", "loss_fn"]),
        ({"shift_labels": torch.zeros(3, 6, 2, dtype=torch.long)}, InvalidInputError, ["(3, 6, 2)", "(3, 7)"]),
        ({"shift_labels": torch.zeros(3, 7, 2, 1, dtype=torch.long)}, InvalidInputError, ["(3, 7, 2, 1)", "(3, 7)"]),
        ({"input_ids": torch.zeros(3, 7, dtype=torch.long)}, InvalidInputError, ["input_ids", "twice|both"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_call_says_what_was_got_and_expected(
    call: dict[str, Any], error: type[Exception], words: list[str], make_model: Any, tokens: Tensor
) -> None:
    model = bind(make_model())
    with pytest.raises(error) as caught:
        model(tokens, return_log_probs=True, **call)
    for word in words:
        assert any(part in str(caught.value) for part in word.split("|")), str(caught.value)
    assert model.lm_head is model.get_output_embeddings()  # the head is back in its slot
    assert model(tokens).logits.shape == (3, 7, 101)


@pytest.mark.parametrize("bad", [101, -1])
def test_an_id_outside_of_the_vocabulary_is_named(bad: int, family: str, make_model: Any, tokens: Tensor) -> None:
    model = make_model(family)
    tokens[1, 4] = bad
    said = rf"got {bad} at \({{}}\), expected 0 to 100, the rows of the model's embedding"
    with pytest.raises(InvalidInputError, match="^input_ids: " + said.format("1, 4")) as caught:
        bind(model)(tokens, return_log_probs=True)
    assert isinstance(caught.value.__cause__, IndexError)
    with pytest.raises(InvalidInputError, match="^input_ids: " + said.format("0, 11")):
        logitless.make_forward(model)(logitless.PackedBatch.from_sequences(list(tokens)))


def test_an_index_error_of_another_cause_stays(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model("gpt2"))
    with pytest.raises(IndexError, match="out of range"):
        model(tokens, position_ids=torch.arange(60, 67)[None], return_log_probs=True)


def test_an_unknown_backend_is_refused_at_bind_and_leaves_no_trace(make_model: Any) -> None:
    model = make_model()
    cls = type(model)
    with pytest.raises(NotFoundError, match="nosuch"):
        bind(model, backend="nosuch")
    assert type(model) is cls


def test_an_error_in_the_trunk_puts_the_head_back(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model())
    head = model.lm_head
    with pytest.raises(InvalidInputError, match="got 1000"):
        model(torch.full_like(tokens, 1000), return_log_probs=True)
    assert model.lm_head is head


def test_an_encoder_decoder_scores_what_its_decoder_is_given(tokens: Tensor, check: Any) -> None:
    """T5, whose hidden states are scaled before the head."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    model: Any = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).double().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    bind(model)
    decoder_ids, mask = tokens.roll(1, 0)[:, :5], torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    inputs = {"input_ids": tokens, "decoder_input_ids": decoder_ids, "decoder_attention_mask": mask}
    out = model(**inputs, return_log_probs=True)
    live = F.pad(mask[:, 1:], (0, 1)) == 1
    targets = check.shift(decoder_ids).masked_fill(~live, -100)
    expected = check.own_scores(model, targets, **inputs)
    torch.testing.assert_close(out.log_probs, expected[0], rtol=1e-9, atol=1e-9)
    got = check.gradients(model, (out.log_probs, out.entropy))
    check.gradients_equal(got, check.gradients(model, expected), rtol=1e-6)
    with pytest.raises(InvalidInputError, match=r"^decoder_input_ids: got 101 at \(0, 0\), expected 0 to 100"):
        model(**{**inputs, "decoder_input_ids": torch.full_like(decoder_ids, 101)}, return_log_probs=True)
    for wrong in ({"input_ids": tokens}, {**inputs, "labels": decoder_ids}):
        with pytest.raises(InvalidInputError, match="decoder_input_ids"):
            model(**wrong, return_log_probs=True)
