"""The names of the reference design: bound per instance, or assigned to the class as the reference assigns them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import logitless_hf
from logitless.errors import InvalidInputError, NotFoundError, UnsupportedError
from logitless_hf import (
    CausalLMOutputForPPO,
    forward_base_model,
    forward_with_torch_backend,
    forward_with_triton_backend,
    patch_forward_with_backends,
    unbind,
)


@contextmanager
def assigned(cls: Any, forward: Any) -> Iterator[None]:
    original = cls.__dict__["forward"]
    cls.forward = forward
    try:
        yield
    finally:
        cls.forward = original


def test_assigned_to_the_class(family: str, make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model(family)
    expected = check.own_scores(model, check.shift(tokens), 0.7, input_ids=tokens)
    expected_gradients = check.gradients(model, expected)
    with assigned(type(model), forward_with_torch_backend):
        out = model(input_ids=tokens, temperature=0.7, return_dict=True)
        got = check.gradients(model, (out.log_probs, out.entropy))
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.get_output_embeddings().weight.mul_(0.5)
        assert not torch.equal(twin(input_ids=tokens, temperature=0.7).log_probs, out.log_probs)
    assert isinstance(out, CausalLMOutputForPPO)
    torch.testing.assert_close(out.log_probs, expected[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.entropy, expected[1], rtol=1e-9, atol=1e-9)
    check.gradients_equal(got, expected_gradients, rtol=1e-6)
    assert model(tokens).logits.shape[-1] == 101


def test_called_as_functions(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model("gemma2")
    expected = check.own_scores(model, check.shift(tokens), input_ids=tokens)[0]
    torch.testing.assert_close(forward_with_torch_backend(model, tokens).log_probs, expected)
    logitless_hf.bind(model)
    torch.testing.assert_close(forward_with_torch_backend(model, tokens).log_probs, expected)
    patch_forward_with_backends(model, True)
    torch.testing.assert_close(forward_with_torch_backend(model, tokens).log_probs, expected)


def test_labels_come_first_from_shift_labels_then_labels_then_input_ids(
    make_model: Any, tokens: Tensor, check: Any
) -> None:
    model = make_model()
    other, shifted = tokens.flip(0), tokens.roll(3, 1)
    with assigned(type(model), forward_with_torch_backend):
        by_shift = model(input_ids=tokens, labels=other, shift_labels=shifted).log_probs
        by_labels = model(input_ids=tokens, labels=other).log_probs
        with pytest.raises(InvalidInputError, match="labels"):
            model(inputs_embeds=torch.zeros(3, 7, 32, dtype=torch.float64))
        with pytest.raises(InvalidInputError, match="return_dict"):
            model(input_ids=tokens, return_dict=False)
    torch.testing.assert_close(by_shift, check.own_scores(model, shifted, input_ids=tokens)[0])
    torch.testing.assert_close(by_labels, check.own_scores(model, check.shift(other), input_ids=tokens)[0])


def test_a_class_whose_source_cannot_be_read_is_refused(make_model: Any, tokens: Tensor) -> None:
    model = make_model()
    namespace: dict[str, Any] = {"__module__": "builtins", "forward": forward_with_torch_backend}
    model.__class__ = type("Unreadable", (type(model),), namespace)
    with pytest.raises(UnsupportedError, match="source cannot be read"):
        model(input_ids=tokens)


def test_a_head_that_is_not_understood_is_refused_when_assigned(make_model: Any, tokens: Tensor) -> None:
    model = make_model()
    model.lm_head.register_forward_hook(lambda module, args, out: out * 2 if isinstance(out, Tensor) else out)
    with assigned(type(model), forward_with_torch_backend), pytest.raises(UnsupportedError, match="own logits"):
        model(input_ids=tokens)


def test_forward_base_model(make_model: Any, tokens: Tensor) -> None:
    for family in ("llama", "gpt2", "gpt_neox", "opt"):
        model = make_model(family)
        mask = torch.ones_like(tokens)
        outputs = forward_base_model(model, tokens, mask, use_cache=True, output_hidden_states=True)
        assert outputs[0].shape == (3, 7, 32)
        assert len(outputs.hidden_states) == 3
        with torch.no_grad():
            torch.testing.assert_close(model.get_output_embeddings()(outputs[0]), model(tokens).logits)


def test_a_patched_model_scores_without_being_asked(family: str, make_model: Any, tokens: Tensor, check: Any) -> None:
    model, other = make_model(family), make_model(family)
    mask = torch.ones_like(tokens[:1])
    generated = model.generate(tokens[:1], attention_mask=mask, max_new_tokens=4, do_sample=False)
    expected = check.own_scores(model, check.shift(tokens), 0.7, input_ids=tokens)[0]
    cls = type(model)
    assert patch_forward_with_backends(model, use_fused_kernels=True, fused_kernels_backend="torch") is None
    out = model(input_ids=tokens, temperature=0.7)
    torch.testing.assert_close(out.log_probs, expected)
    assert out.logits is None
    again = model.generate(tokens[:1], attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert torch.equal(again, generated)
    assert model(input_ids=tokens, return_log_probs=False).logits is not None
    assert model(input_ids=tokens).log_probs is not None  # also after generate
    assert other(tokens).logits is not None
    assert copy.deepcopy(model)(tokens, temperature=0.7).log_probs is not None
    assert type(unbind(model)) is cls
    assert model(tokens).logits is not None


def test_generate_that_raises_leaves_a_patched_model_scoring(make_model: Any, tokens: Tensor) -> None:
    model = make_model()
    patch_forward_with_backends(model, True)
    with pytest.raises(ValueError, match="nonsense"):
        model.generate(tokens[:1], nonsense=1)
    assert model(tokens).log_probs is not None


def test_patching_without_fused_kernels_does_nothing(make_model: Any) -> None:
    model = make_model()
    cls, keys = type(model), set(model.__dict__)
    assert patch_forward_with_backends(model, use_fused_kernels=False, fused_kernels_backend="torch") is None
    assert type(model) is cls
    assert set(model.__dict__) == keys


def test_an_unknown_backend_is_an_error(make_model: Any) -> None:
    with pytest.raises(NotFoundError, match="nosuch"):
        patch_forward_with_backends(make_model(), True, "nosuch")


def test_the_signatures_are_the_references() -> None:
    names = "self input_ids attention_mask position_ids past_key_values inputs_embeds labels use_cache"
    names += " output_attentions output_hidden_states return_dict cache_position logits_to_keep temperature kwargs"
    for forward in (forward_with_torch_backend, forward_with_triton_backend):
        assert list(inspect.signature(forward).parameters) == names.split()
    names = "self input_ids attention_mask position_ids past_key_values inputs_embeds use_cache output_attentions"
    names += " output_hidden_states return_dict cache_position"
    assert list(inspect.signature(forward_base_model).parameters) == names.split()
    patch = inspect.signature(patch_forward_with_backends).parameters
    assert {name: p.default for name, p in list(patch.items())[1:]} == {
        "use_fused_kernels": False,
        "fused_kernels_backend": None,
    }
