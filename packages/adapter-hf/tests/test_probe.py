"""What the probe finds in families, what it refuses, and that it leaves no trace."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from logitless.errors import UnsupportedError
from logitless_hf import bind, inspect_head

EXPECTED = {  # scale, softcap, bias; as the models of conftest are configured
    "gemma2": (1.0, 5.0, False),
    "gemma3_text": (1.0, 7.0, False),
    "cohere": (0.3, None, False),
    "granite": (1 / 3, None, False),
    "phi": (1.0, None, True),
}


def test_the_transform_of_each_family(family: str, make_model: Any) -> None:
    report = inspect_head(make_model(family))
    scale, softcap, bias = EXPECTED.get(family, (1.0, None, False))
    assert report.reason is None
    assert report.scale == pytest.approx(scale, rel=1e-12)
    assert (report.softcap, report.bias) == (softcap, bias)
    assert (report.vocab_size, report.hidden_size, report.dtype) == (101, 32, torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "granite"], indirect=True)
def test_low_precision_models_are_read_as_exactly(family: str, dtype: torch.dtype, make_model: Any) -> None:
    report = inspect_head(make_model(family, dtype))
    scale, softcap, _ = EXPECTED.get(family, (1.0, None, False))
    assert (report.reason, report.softcap) == (None, softcap)
    assert report.scale == pytest.approx(scale, rel=1e-12)


def test_an_attribute_that_the_forward_ignores_is_not_believed(make_model: Any) -> None:
    model = make_model("llama")
    model.config.final_logit_softcapping, model.config.logit_scale = 5.0, 0.1
    report = inspect_head(model)
    assert (report.scale, report.softcap) == (1.0, None)


@pytest.mark.parametrize("vocab", [3, 11, 4099])
def test_any_size_of_vocabulary(vocab: int, make_model: Any) -> None:
    report = inspect_head(make_model("gemma2", vocab_size=vocab))
    assert (report.reason, report.scale, report.softcap, report.vocab_size) == (None, 1.0, 5.0, vocab)


class Altered(LlamaForCausalLM):
    """A llama whose forward does something to its logits."""

    def alter(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        output = super().forward(input_ids=input_ids, **kwargs)
        output.logits = self.alter(output.logits)
        return output


def altered(
    make_model: Any, alter: Callable[[Any, Tensor], Tensor], prepare: Callable[[Any], None] | None = None
) -> Any:
    model = make_model()
    model.__class__ = type("Altered", (Altered,), {"alter": alter})
    if prepare is not None:
        prepare(model)
    return model


def rows(z: Tensor, axis: int) -> Tensor:
    """1, 2, 3 … along an axis."""
    shape = [1] * z.ndim
    shape[axis] = z.shape[axis]
    return torch.arange(1, z.shape[axis] + 1, dtype=z.dtype).view(shape)


def top_k(model: Any, z: Tensor) -> Tensor:
    if z.shape[-1] < 7:
        return z
    return z.masked_fill(z < z.topk(7).values[..., -1:], float("-inf"))


def mask_low(model: Any, z: Tensor) -> Tensor:
    return z.index_fill(-1, torch.arange(min(3, z.shape[-1])), float("-inf"))


def suppress(model: Any, z: Tensor) -> Tensor:
    return z - (rows(z, -1) == 5) * 4.0


def learn(name: str, value: Tensor, frozen: bool = False, buffer: bool = False) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        if buffer:
            model.register_buffer(name, value)
        else:
            model.register_parameter(name, nn.Parameter(value, requires_grad=not frozen))

    return prepare


ONE, BIAS = torch.tensor(1.0).double(), torch.randn(101).double()
ADVERSARIES: dict[str, tuple[Any, Any, str]] = {
    "batch-dependent": (lambda m, z: z * rows(z, 0), None, "batch row"),
    "position-dependent": (lambda m, z: z * rows(z, 1), None, "position"),
    "vocabulary-dependent": (lambda m, z: z * rows(z, 2), None, "vocab row"),
    "learned scale": (lambda m, z: z * m.alpha, learn("alpha", ONE), "depends on alpha"),
    "frozen learned scale": (lambda m, z: z * m.alpha, learn("alpha", ONE, frozen=True), "depends on alpha"),
    "buffer scale": (lambda m, z: z * m.alpha, learn("alpha", ONE, buffer=True), "depends on alpha"),
    "train-only scale": (lambda m, z: z * (2.0 if m.training else 1.0), None, "eval.*train"),
    "vocabulary mask": (mask_low, None, "mask"),
    "finite vocabulary mask": (suppress, None, "vocab row"),
    "slice": (lambda m, z: z[..., :50], None, "slice"),
    "scale and bias buffer": (
        lambda m, z: 2 * z + m.final_bias[: z.shape[-1]],
        learn("final_bias", BIAS, buffer=True),
        "depends on final_bias, and more than adds it",
    ),
    "scale buffer of each vocab row": (
        lambda m, z: z * m.final_bias[: z.shape[-1]],
        learn("final_bias", BIAS, buffer=True),
        "vocab row",
    ),
    "bias buffer, capped": (
        lambda m, z: 9 * torch.tanh((z + m.final_bias[: z.shape[-1]]) / 9),
        learn("final_bias", BIAS, buffer=True),
        "vocab row|neither",
    ),
    "bias buffer of positions": (
        lambda m, z: z + m.final_bias[: z.shape[1], None],
        learn("final_bias", BIAS, buffer=True),
        "vocab row|position",
    ),
    "bias parameter": (
        lambda m, z: z + m.final_bias[: z.shape[-1]],
        learn("final_bias", BIAS),
        "depends on final_bias",
    ),
    "log_softmax": (lambda m, z: z.log_softmax(-1), None, "position|vocab row|neither"),
    "clamp": (lambda m, z: z.clamp(-30, 30), None, "neither"),
    "affine with offset": (lambda m, z: 2 * z + 1, None, "neither"),
    "square": (lambda m, z: z.square(), None, "neither"),
    "nothing left": (lambda m, z: z * 0, None, "neither"),
    "top-k mask": (top_k, None, "mask"),
    "norm over the vocabulary": (lambda m, z: z / (z.norm(dim=-1, keepdim=True) + 1), None, "position"),
    "norm over the batch": (lambda m, z: z / (z.abs().amax(0, keepdim=True) + 1e-3), None, "vocab row"),
    "mask in place": (lambda m, z: z.index_fill_(-1, torch.arange(min(3, z.shape[-1])), -1e9), None, "vocab row"),
    "train-only scale in place": (lambda m, z: z.mul_(2.0) if m.training else z, None, "eval.*train"),
    "eval-only softcap": (lambda m, z: z if m.training else 9 * torch.tanh(z / 9), None, "eval.*train"),
    "train-only mask": (lambda m, z: mask_low(m, z) if m.training else z, None, "mask"),
    "train-only clamp": (lambda m, z: z.clamp(-30, 30) if m.training else z, None, "neither"),
    "noise": (lambda m, z: z + 0.1 * torch.randn_like(z), None, "vocab row"),
}


@pytest.mark.parametrize("case", ADVERSARIES)
def test_what_is_not_understood_is_refused_with_the_reason(case: str, make_model: Any, tokens: Tensor) -> None:
    alter, prepare, reason = ADVERSARIES[case]
    model = altered(make_model, alter, prepare)
    cls, flags = type(model), [p.requires_grad for p in model.parameters()]
    with pytest.raises(UnsupportedError, match=reason):
        bind(model)
    assert type(model) is cls
    assert [p.requires_grad for p in model.parameters()] == flags
    assert not any(buffer.requires_grad for buffer in model.buffers())
    assert inspect_head(model).reason is not None


def test_the_same_model_unaltered_binds(make_model: Any, tokens: Tensor, check: Any) -> None:
    """So that the refusals above are of what was altered."""
    model = altered(make_model, lambda m, z: 9 * torch.tanh(z * 0.7 / 9))
    expected = check.own_scores(model, check.shift(tokens), input_ids=tokens)[0]
    bind(model)
    torch.testing.assert_close(model(tokens, return_log_probs=True).log_probs, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(101,), (1, 101), (1, 1, 101)])
@pytest.mark.parametrize("value", [BIAS, torch.zeros(101)], ids=["drawn", "zeros"])
def test_a_bias_buffer_is_added(
    value: Tensor, shape: tuple[int, ...], make_model: Any, tokens: Tensor, check: Any
) -> None:
    model = altered(
        make_model, lambda m, z: z + m.final_bias, learn("final_bias", value.view(shape).clone(), buffer=True)
    )
    bind(model)
    assert inspect_head(model).offset == "final_bias"
    for change in (0.0, 1.5):  # it is looked up at each call
        model.final_bias[..., 7] += change
        before = model.final_bias
        expected = check.own_scores(model, check.shift(tokens), 0.7, input_ids=tokens)
        out = model(tokens, return_log_probs=True, temperature=0.7)
        torch.testing.assert_close((out.log_probs, out.entropy), expected, rtol=1e-9, atol=1e-9)
        got = check.gradients(model, (out.log_probs, out.entropy))
        check.gradients_equal(got, check.gradients(model, expected), rtol=1e-9)
        assert model.final_bias is before


def test_a_scale_in_place_is_understood(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = altered(make_model, lambda m, z: z.mul_(0.5))
    expected = check.own_scores(model, check.shift(tokens), input_ids=tokens)[0]
    assert inspect_head(model).scale == 0.5
    torch.testing.assert_close(bind(model)(tokens, return_log_probs=True).log_probs, expected, rtol=1e-9, atol=1e-9)


def test_a_scale_of_the_hidden_states_is_captured(make_model: Any, tokens: Tensor, check: Any) -> None:
    model = make_model()
    model.model.norm.register_forward_hook(lambda module, args, out: out * 0.25)
    expected = check.own_scores(model, check.shift(tokens), input_ids=tokens)[0]
    assert inspect_head(model).scale == 1.0
    torch.testing.assert_close(bind(model)(tokens, return_log_probs=True).log_probs, expected)


def test_a_hook_that_alters_the_logits_is_caught_by_the_self_check(make_model: Any) -> None:
    """The probe's stand-in has no hooks; the comparison with the model's own logits sees them."""
    model = make_model()
    model.lm_head.register_forward_hook(lambda module, args, out: out * 2 if isinstance(out, Tensor) else out)
    with pytest.raises(UnsupportedError, match="differ from the model's own logits"):
        bind(model)


CASES = ["none", "no linear", "instance forward", "quantised", "twice", "never", "elsewhere"]


@pytest.mark.parametrize("case", CASES)
def test_a_head_that_is_not_understood_is_refused(case: str, make_model: Any) -> None:
    model = make_model()
    words = {"none": "None", "no linear": "LayerNorm", "quantised": "int8", "twice": "more than once"}
    words |= {"never": "never calls", "elsewhere": "not registered"}
    if case == "none":
        model.get_output_embeddings = lambda: None
    elif case == "no linear":
        model.lm_head = nn.LayerNorm(32)
    elif case == "instance forward":
        model.lm_head.forward = lambda hidden: hidden @ model.lm_head.weight.T * 2
    elif case == "quantised":
        model.lm_head.weight = nn.Parameter(torch.zeros(101, 32, dtype=torch.int8), requires_grad=False)
    elif case == "twice":
        model = altered(make_model, lambda m, z: z)
        type(model).alter = lambda m, z: m.lm_head(torch.zeros(*z.shape[:-1], 32, dtype=z.dtype)) + z
    elif case == "never":
        spare = nn.Linear(32, 101, bias=False)
        model.spare = spare
        model.get_output_embeddings = lambda: spare
    else:
        model.get_output_embeddings = lambda: nn.Linear(32, 101, bias=False)
    with pytest.raises(UnsupportedError, match=words.get(case, "a forward on its instance")):
        bind(model)
    if case != "none":
        assert inspect_head(model).reason


def test_a_model_that_does_not_run_on_input_ids_says_so(make_model: Any) -> None:
    model = make_model()
    model.__class__ = type("Picky", (LlamaForCausalLM,), {"forward": lambda self, pixels, **kwargs: None})
    with pytest.raises(UnsupportedError, match=r"Picky does not run on text alone.*TypeError.*pixels"):
        bind(model)


@pytest.mark.parametrize("training", [False, True])
def test_binding_disturbs_nothing(training: bool, make_model: Any, tokens: Tensor) -> None:
    """Dropout draws, a buffer written in the forward, gradients, modes of single modules and the grad mode."""
    model = make_model("gpt2", torch.float32, resid_pdrop=0.5, attn_pdrop=0.5)
    model.train(training)
    model.transformer.h[0].train(not training)  # a mode of its own
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, args: module.calls.add_(random.random()) and None)
    model(tokens).logits.sum().backward()
    model.transformer.h[1].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
    states = torch.get_rng_state(), random.getstate()
    keys = {name: set(module.__dict__) for name, module in model.named_modules()}

    bind(model)

    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers
    for name, p in model.named_parameters():
        kept = grads[name]
        assert (p.grad is None) == (kept is None)
        assert kept is None or torch.equal(p.grad, kept)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert [module.training for module in model.modules()] == modes
    assert {name: set(module.__dict__) - {"_logitless"} for name, module in model.named_modules()} == keys


def test_the_self_check_is_as_strict_under_autocast(make_model: Any) -> None:
    model = make_model("llama", torch.float32)
    model.lm_head.register_forward_hook(lambda module, args, out: out * 1.003 if isinstance(out, Tensor) else out)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedError, match="own logits"):
        bind(model)


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_binding_within_any_context(context: Any, make_model: Any) -> None:
    model = make_model("gemma2", torch.float32)
    with context():
        bind(model)
    assert inspect_head(model).softcap == 5.0
    model = altered(make_model, lambda m, z: z * m.alpha, learn("alpha", ONE))
    with context(), pytest.raises(UnsupportedError, match="alpha"):
        bind(model)
