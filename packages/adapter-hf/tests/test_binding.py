"""A bound model is the same model: what else uses it, copies it, saves it or inspects it sees no difference."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import logitless
from logitless.errors import InputTypeError, InvalidInputError, UnsupportedError
from logitless_hf import CausalLMOutputForPPO, bind, inspect_head, unbind


def scores(model: Any, tokens: Tensor) -> Tensor:
    result: Tensor = model(tokens, return_log_probs=True).log_probs
    return result


def test_the_same_object_comes_back(make_model: Any, tokens: Tensor) -> None:
    model = make_model()
    assert bind(model) is model
    out = model(tokens, return_log_probs=True)
    assert isinstance(out, CausalLMOutputForPPO)
    assert isinstance(out, logitless.CausalLMOutputForPPO)
    assert unbind(model) is model


def test_without_asking_nothing_changes(family: str, make_model: Any, tokens: Tensor) -> None:
    model = make_model(family, torch.float32)
    with torch.no_grad():
        before = model(tokens, labels=tokens)
        generated = model.generate(tokens[:1], attention_mask=torch.ones_like(tokens[:1]), max_new_tokens=5)
        bind(model)
        after = model(tokens, labels=tokens)
        assert type(after) is type(before)
        assert list(after) == list(before)
        assert torch.equal(after.logits, before.logits)
        assert torch.equal(after.loss, before.loss)
        assert isinstance(model(tokens, return_dict=False), tuple)
        assert torch.equal(model(tokens, return_log_probs=False).logits, before.logits)
        again = model.generate(tokens[:1], attention_mask=torch.ones_like(tokens[:1]), max_new_tokens=5)
    assert torch.equal(again, generated)


def test_unbind_leaves_no_trace(make_model: Any, tokens: Tensor) -> None:
    model = make_model()
    cls, keys = type(model), {name: set(module.__dict__) for name, module in model.named_modules()}
    forward = cls.forward
    bind(model)
    scores(model, tokens)
    unbind(model)
    assert type(model) is cls
    assert cls.forward is forward
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == keys
    assert "forward" not in model.lm_head.__dict__
    with torch.no_grad():
        assert model(tokens, return_log_probs=True).logits.shape == (3, 7, 101)  # swallowed, as any unknown keyword
    assert unbind(model) is model


def test_a_second_instance_is_untouched(make_model: Any, tokens: Tensor) -> None:
    model, other = make_model(), make_model()
    bind(model)
    assert type(other) is not type(model)
    assert isinstance(model, type(other))
    assert other(tokens, return_log_probs=True).logits is not None
    bind(other)
    unbind(model)
    assert torch.equal(scores(other, tokens), scores(bind(model), tokens))


def test_binding_twice_takes_the_later_backend(make_model: Any, tokens: Tensor) -> None:
    model = make_model()
    cls = type(model)
    expected = scores(bind(model), tokens)
    assert torch.equal(scores(bind(model, backend="torch"), tokens), expected)
    assert type(unbind(model)) is cls


def test_a_deep_copy_is_bound_and_independent(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model())
    twin = copy.deepcopy(model)
    expected = scores(model, tokens)
    assert torch.equal(scores(twin, tokens), expected)
    with torch.no_grad():
        twin.lm_head.weight.mul_(0.5)
    assert torch.equal(scores(model, tokens), expected)  # a closure would have run the other model
    assert not torch.equal(scores(twin, tokens), expected)
    unbind(twin)
    assert torch.equal(scores(model, tokens), expected)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickled_model_is_bound(how: str, make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model("gemma2"))
    if how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert type(twin) is type(model)
    assert torch.equal(scores(twin, tokens), scores(model, tokens))


def test_saving_and_loading(make_model: Any, tokens: Tensor, tmp_path: Any) -> None:
    model = make_model("llama", torch.float32)
    cls = type(model)
    model.save_pretrained(tmp_path / "before")
    bind(model).save_pretrained(tmp_path / "after")
    for path in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / path.name).read_bytes() == path.read_bytes(), path.name
    assert model.config.architectures == [cls.__name__]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert type(loaded) is cls
    assert torch.equal(scores(bind(loaded), tokens), scores(model, tokens))


def test_the_signature_is_the_familys(family: str, make_model: Any) -> None:
    model = make_model(family)
    for name in ("forward", "generate"):
        expected = inspect.signature(getattr(model, name))
        assert inspect.signature(getattr(bind(model), name)) == expected
        assert not hasattr(getattr(model, name), "__wrapped__")  # accelerate would strip the binding
        unbind(model)


def test_trainer_keeps_the_familys_columns_and_trains(make_model: Any, tokens: Tensor, tmp_path: Any) -> None:
    model = make_model("llama", torch.float32)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, save_strategy="no")
    trainers = [Trainer(m, arguments, train_dataset=rows) for m in (copy.deepcopy(model), bind(model))]
    for trainer in trainers:
        trainer._set_signature_columns_if_needed()
    assert trainers[0]._signature_columns == trainers[1]._signature_columns
    assert trainers[0].model_accepts_loss_kwargs == trainers[1].model_accepts_loss_kwargs
    losses = [trainer.train().training_loss for trainer in trainers]
    assert losses[0] == losses[1]
    assert scores(model, tokens).shape == (3, 7)


def test_a_model_with_accelerates_hooks(make_model: Any, tokens: Tensor) -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Counting(hooks.ModelHook):  # type: ignore[misc, name-defined]
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            return args, kwargs

    model = make_model()
    expected = scores(bind(copy.deepcopy(model)), tokens)
    for module in (model, model.lm_head):
        hooks.add_hook_to_module(module, Counting())
    bind(model)
    Counting.calls = 0
    assert torch.equal(scores(model, tokens), expected)
    assert Counting.calls == 2  # the model's and the head's
    assert torch.equal(scores(copy.deepcopy(model), tokens), expected)
    unbind(model)
    assert model(tokens).logits.shape == (3, 7, 101)
    hooks.remove_hook_from_module(model)
    assert model.forward.__func__ is type(model).forward


def test_a_model_whose_weights_are_offloaded(make_model: Any, tokens: Tensor) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make_model("gemma2")
    expected = scores(bind(copy.deepcopy(model)), tokens)
    model = bind(accelerate.cpu_offload(model, execution_device=torch.device("cpu")))
    assert inspect_head(model).softcap == 5.0
    assert model.lm_head.weight.is_meta
    with torch.no_grad():
        assert torch.equal(scores(model, tokens), expected)


def test_accelerates_mixed_precision_wraps_a_bound_model(make_model: Any, tokens: Tensor) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = bind(make_model("llama", torch.float32))
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # Trainer's, of another test
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare_model(model)
    out = prepared(tokens, return_log_probs=True)
    assert out.log_probs.shape == (3, 7)
    stripped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert scores(stripped, tokens).shape == (3, 7)
    unbind(stripped)
    assert stripped(tokens).logits.shape == (3, 7, 101)
    fresh = accelerator.prepare_model(make_model("llama", torch.float32))
    with pytest.raises(UnsupportedError, match="bind the model before"):
        bind(fresh)


def test_hooks_of_users_fire_once(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model())
    seen: list[str] = []
    model.register_forward_hook(lambda *args: seen.append("model"))
    model.lm_head.register_forward_pre_hook(lambda *args: seen.append("head"))
    scores(model, tokens)
    assert seen == ["head", "model"]


@pytest.mark.parametrize(
    "asked", [{"temperature": 0.7}, {"loss_fn": print}, {"top_k": 3, "stats": ("is_kept",)}, {"keep_bytes": 1}], ids=str
)
def test_what_scores_take_is_not_swallowed_where_none_are_asked(
    asked: dict[str, Any], make_model: Any, tokens: Tensor
) -> None:
    model = bind(make_model())
    with pytest.raises(InvalidInputError, match=f"{', '.join(asked)}: got without return_log_probs=True"):
        model(tokens, **asked)
    model.generate(tokens, max_new_tokens=2, do_sample=True, temperature=0.7, top_k=3, pad_token_id=0)


@pytest.mark.parametrize("asked", [{"return_log_probs": True}, {}], ids=str)
@pytest.mark.parametrize(
    ("name", "meant"), [("temperatur", "temperature"), ("return_logprobs", "return_log_probs"), ("topk", "top_k")]
)
def test_a_misspelt_keyword_is_not_swallowed(
    name: str, meant: str, asked: dict[str, Any], make_model: Any, tokens: Tensor
) -> None:
    model = bind(make_model())
    with pytest.raises(InvalidInputError, match=f"{name}: got a keyword .* expected {meant}"):
        model(tokens, **asked, **{name: 2})
    assert model(tokens, num_items_in_batch=4, **asked) is not None


def test_a_meta_model_is_examined_at_its_first_call(make_model: Any, tokens: Tensor, check: Any) -> None:
    full = make_model("gemma2")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(full.config).double().eval()
    bind(model)
    with pytest.raises(UnsupportedError, match="meta"):
        model(tokens.to("meta"), return_log_probs=True)
    model.to_empty(device="cpu")
    model.load_state_dict(full.state_dict())
    for name, buffer in full.named_buffers():  # those that no checkpoint holds
        model.get_buffer(name).copy_(buffer)
    expected = check.own_scores(full, check.shift(tokens), input_ids=tokens)[0]
    torch.testing.assert_close(scores(model, tokens), expected)
    assert inspect_head(model).softcap == 5.0


@pytest.mark.parametrize(("fault", "reason"), [("clamp", "neither"), ("hook", "own logits")])
def test_a_meta_model_that_is_not_understood_is_refused_at_each_call(
    fault: str, reason: str, make_model: Any, tokens: Tensor
) -> None:
    model = make_model()
    cls = type(model)
    if fault == "clamp":
        cls = type("Clamped", (cls,), {"forward": lambda self, **call: clamp(type(model).forward(self, **call))})
    with torch.device("meta"):
        meta = cls(model.config).double().eval()
    if fault == "hook":
        meta.lm_head.register_forward_hook(lambda module, args, out: out * 2 if isinstance(out, Tensor) else out)
    bind(meta).to_empty(device="cpu").load_state_dict(model.state_dict())
    for name, buffer in model.named_buffers():
        meta.get_buffer(name).copy_(buffer)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=reason):
            meta(input_ids=tokens, return_log_probs=True)
    assert type(unbind(meta)) is cls


def clamp(output: Any) -> Any:
    output.logits = output.logits.clamp(-1, 1)
    return output


def test_gradient_checkpointing_changes_nothing(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = bind(make_model()).train()
    expected = check.gradients(model, (model(tokens, return_log_probs=True).log_probs,))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = check.gradients(model, (model(tokens, return_log_probs=True).log_probs,))
    check.gradients_equal(got, expected, rtol=1e-12)


@pytest.mark.parametrize("asked", [{}, {"top_k": 20, "stats": ("is_kept", "mean_logit")}], ids=str)
def test_compiled_equals_eager(asked: dict[str, Any], make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model("gemma2", torch.float32))
    expected = model(tokens, return_log_probs=True, **asked)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = compiled(tokens, return_log_probs=True, **asked)
    torch.testing.assert_close(got.log_probs, expected.log_probs)
    torch.testing.assert_close(got.entropy, expected.entropy)
    torch.testing.assert_close(got.stats, expected.stats)


def test_what_is_no_model_is_refused(make_model: Any) -> None:
    with pytest.raises(InputTypeError, match="str"):
        bind("llama")  # type: ignore[type-var]
    with pytest.raises(UnsupportedError, match="get_output_embeddings"):
        bind(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match=r"bind its \.module"):
        bind(nn.DataParallel(make_model()))
    with pytest.raises(UnsupportedError, match=r"bind its \._orig_mod"):
        bind(torch.compile(make_model(), backend="eager"))
    patched = make_model()
    patched.forward = functools.partial(patched.forward)
    with pytest.raises(UnsupportedError, match="a forward of its own, a partial; bind"):
        bind(patched)


def test_a_bound_model_that_another_bind_refuses_is_unbound(make_model: Any, tokens: Tensor) -> None:
    model = make_model()
    base = type(model)
    forward = logitless.make_forward(model)
    handle = model.lm_head.register_forward_hook(lambda module, args, output: output.abs())
    with pytest.raises(UnsupportedError, match="a forward hook on the head"):
        bind(model)
    assert type(model) is base
    with pytest.raises(UnsupportedError, match="was unbound after make_forward"):
        forward(logitless.PackedBatch.from_padded(tokens, torch.ones_like(tokens)))
    handle.remove()
    assert scores(bind(model), tokens).isfinite().all()


def test_a_model_of_a_bound_models_class_is_unbound(make_model: Any, tokens: Tensor) -> None:
    model = make_model()
    base = type(model)
    bind(model)
    fresh = type(model)(model.config).to(torch.float64).eval()
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh(tokens).logits, model(tokens).logits)
    assert fresh.generate(tokens[:1], max_new_tokens=2).shape[1] == tokens.shape[1] + 2
    assert type(unbind(fresh)) is base
    again = bind(type(model)(model.config).to(torch.float64).eval())
    assert type(again) is type(model)
    assert scores(again, tokens).isfinite().all()
    assert type(unbind(again)) is base


def test_unbind_under_a_wrapper_of_the_bound_forward(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model())
    expected = model(tokens).logits
    wrapped = model.forward
    model.forward = lambda *args, **kwargs: wrapped(*args, **kwargs)  # as accelerate does for mixed precision
    unbind(model)
    assert torch.equal(model(tokens).logits, expected)
