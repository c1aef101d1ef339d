"""ForwardFns: packed equals each sequence alone, in every layout, values and gradients; or the model is refused."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch

import logitless
from logitless import PackedBatch, reference
from logitless.errors import InvalidInputError, UnsupportedError
from logitless_hf import CausalLMOutputForPPO, unbind
from logitless_hf.binding import is_bound_class
from logitless_hf.forward import PackedForward, _fault

BEFORE_5 = int(version("transformers").split(".")[0]) < 5
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


@pytest.mark.parametrize("kept", [{}, {"top_k": 20, "top_p": 0.7}], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kept_sets_statistics_and_several_labels_in_batch_order(
    layout: str, kept: dict[str, Any], make_model: Any
) -> None:
    model = make_model()
    batch = PackedBatch.from_sequences(sequences(), align=4)
    labels = torch.randint(3, 101, (batch.labels.shape[0], 3), generator=torch.Generator().manual_seed(2))
    labels[batch.labels == -100] = -100
    stats = ("mean_logit", "is_kept")
    logits = [model(input_ids=ids[None], use_cache=False).logits[0] / 0.7 for ids in sequences()]
    expected = reference.scores_of(batch.pack(logits, "prediction"), labels, **kept, stats=stats)
    g, e = torch.randn(4, len(labels), dtype=torch.float64).split([3, 1])
    parameters = list(model.parameters())
    wanted = torch.autograd.grad((expected.log_probs, expected.entropy), parameters, (g.t(), e[0]))

    forward = logitless.make_forward(model, layout)
    out = forward(batch, temperature=0.7, **kept, stats=stats, labels=labels)
    torch.testing.assert_close(out.log_probs, expected.log_probs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.entropy, expected.entropy, rtol=1e-9, atol=1e-9)
    assert out.stats is not None
    for name, x in out.stats.items():
        torch.testing.assert_close(x, expected.stats[name], rtol=1e-9, atol=1e-9)  # type: ignore[index]
    grads = torch.autograd.grad((out.log_probs, out.entropy), parameters, (g.t(), e[0]))
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=0, atol=1e-8 * float(want.abs().max()))
    of_one = forward(batch, temperature=0.7, labels=labels[:, 0])
    assert of_one.stats is None
    if not kept:
        torch.testing.assert_close(of_one.log_probs, expected.log_probs[:, 0], rtol=1e-9, atol=1e-9)
    with pytest.raises(InvalidInputError, match=r"labels: got shape \(3,\), expected a tensor \(28,\) or \(28, K\)"):
        forward(batch, labels=labels[0])


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
    with pytest.raises(InvalidInputError, match="multi_modal_inputs: got labels, use_cache, which the batch"):
        forward(batch, multi_modal_inputs={"use_cache": True, "labels": None, "pixel_values": torch.zeros(1)})
    with pytest.raises(
        InvalidInputError, match=r"temperature: got shape \(2,\), expected \(28,\), one for each packed"
    ):
        forward(batch, temperature=torch.ones(2))


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_made_in_inference_mode(layout: str, make_model: Any) -> None:
    """As bind is: what is tried out needs gradients."""
    model = make_model()
    with torch.inference_mode():
        forward = logitless.make_forward(model, layout)
    forward(PackedBatch.from_sequences(sequences())).log_probs.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_a_model_unbound_since_says_so(layout: str, make_model: Any) -> None:
    forward = logitless.make_forward(make_model(), layout)
    unbind(forward.model)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM: it was unbound after make_forward"):
        forward(PackedBatch.from_sequences(sequences()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_small_leak_is_a_leak(dtype: torch.dtype) -> None:
    """Untrained, one sequence moves the other by less than bf16 rounds; trained, it would not stay so small."""
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=1000, hidden_size=64, n_layer=2, n_head=4)).to(dtype)
    with pytest.raises(UnsupportedError, match="BloomForCausalLM: two sequences packed in one row"):
        logitless.make_forward(model, "thd")


@pytest.mark.parametrize("behind", [2, -2])
def test_a_leak_that_no_score_shows_has_a_gradient(behind: int, make_model: Any) -> None:
    """Each token sees 1e-12 of another, in its own sequence or not."""
    model = make_model()
    forward = PackedForward(logitless.make_forward(model, "thd").model, "thd", "packed")
    assert _fault(forward) is None
    model.model.layers[0].register_forward_hook(lambda _m, _a, out: out + 1e-12 * out.roll(behind, 1))
    why = _fault(forward)
    assert why is not None
    assert "two sequences packed in one row" in why


def test_a_model_without_a_backward_is_judged_by_its_scores(make_model: Any) -> None:
    model = make_model()
    model.model.layers[0].register_forward_hook(lambda _m, _a, out: out.detach())
    assert logitless.make_forward(model, "thd").borders == "packed"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_that_do_not_count_from_0(layout: str, make_model: Any, check: Any) -> None:
    """RoBERTa counts from behind its padding id: rows may leave that to it, one row of all tokens cannot."""
    model = make_model("roberta", is_decoder=True, type_vocab_size=1)
    if layout == "bshd" and BEFORE_5:
        pytest.skip("transformers 4's own mask of RoBERTa overflows in float64")
    expected, _ = alone(check, model)
    if layout != "bshd":
        reason = "two sequences packed in one row" if BEFORE_5 else "its positions do not count from 0"
        with pytest.raises(UnsupportedError, match=reason):
            logitless.make_forward(model, layout)
        return
    out = logitless.make_forward(model, layout)(PackedBatch.from_sequences(sequences()))
    torch.testing.assert_close(out.log_probs, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(BEFORE_5, reason="packed GPT-Neo is served from transformers 5 on, and refused before")
def test_a_row_longer_than_a_table_of_positions(make_model: Any) -> None:
    model = make_model("gpt_neo", hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]])
    forward = logitless.make_forward(model, "thd")
    with pytest.raises(UnsupportedError, match=r"batch: 80 tokens in one row, more than 64, .* at most that many"):
        forward(PackedBatch.from_sequences([torch.arange(40) + 5] * 2))
    assert forward(PackedBatch.from_sequences([torch.arange(30) + 5] * 2)).log_probs is not None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_that_is_nan_at_padding(layout: str, make_model: Any) -> None:
    """Where the padding's embedding is zero, as it is made, the root of its size has no gradient."""
    model = make_model()
    model.model.layers[0].register_forward_hook(lambda _m, _a, out: out * out.square().sum(-1, True).sqrt())
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        assert not model.model.embed_tokens.weight[0].any()
    if layout != "bshd":
        assert logitless.make_forward(model, layout) is not None
        return
    with pytest.raises(UnsupportedError, match="gradients are NaN where rows are padded; layout='thd' has no padding"):
        logitless.make_forward(model, layout)
