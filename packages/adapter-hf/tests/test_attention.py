"""Packed equals alone in every family, and costs what its sequences cost; the model is as it was after each call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import __version__ as transformers_version

import logitless
from logitless import PackedBatch
from logitless.errors import UnsupportedError
from logitless.testing import AllocationGuard
from logitless_hf import attention
from logitless_hf.attention import attention_configs, implementations, packed_attention
from logitless_hf.forward import PackedForward

LENGTHS = (11, 1, 18, 4)
OLD = Version(transformers_version) < Version("5")
# name, changes to the tiny model; a window of 4 bites in all sequences but one
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "gemma2": ("gemma2", {"sliding_window": 4, "attn_logit_softcapping": 0.02, "attn_implementation": "eager"}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "phi": ("phi", {}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"attention_multiplier": 0.7}),
    "cohere": ("cohere", {}),
    "eager": ("llama", {"attn_implementation": "eager"}),
}


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 101, (length,), generator=generator) for length in lengths]


def alone(check: Any, model: Any) -> tuple[Tensor, Tensor]:
    """[T] scores of each sequence by itself, by the model's own attention and from its own logits."""
    scores = [check.own_scores(model, check.shift(ids.unsqueeze(0)), input_ids=ids.unsqueeze(0)) for ids in sequences()]
    return torch.cat([one[0].squeeze(0) for one in scores]), torch.cat([one[1].squeeze(0) for one in scores])


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, make_model: Callable[..., Any]) -> tuple[str, Any]:
    name, changes = CASES[request.param]
    if OLD and request.param == "opt":
        pytest.skip("OPT makes its own mask before transformers 5, so it is refused")
    return request.param, make_model(name, **changes)


def test_packed_equals_alone(case: tuple[str, Any], check: Any) -> None:
    name, model = case
    expected = alone(check, model)
    expected_grads = check.gradients(model, expected)
    forward = logitless.make_forward(model, "thd")
    assert forward.borders == "packed"
    out = forward(PackedBatch.from_sequences(sequences()))
    in_float32 = ("gemma2", "gemma3_text", "cohere", "eager")  # norms or softmax, whatever the model's dtype
    loose = 1e-5 if name in in_float32 else 1e-9
    for got, wanted in zip((out.log_probs, out.entropy), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=loose, atol=loose)
    check.gradients_equal(check.gradients(model, (out.log_probs, out.entropy)), expected_grads, rtol=10 * loose)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("window", [0, 1, 3, 6, 40])
@pytest.mark.parametrize("heads", [2, 6])
def test_equals_attention_with_a_dense_mask(
    heads: int, window: int, softcap: float | None, sunk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK", 4)  # several blocks to a sequence
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, heads, sum(LENGTHS), 4), *(((1, 2, sum(LENGTHS), 4),) * 2))
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = torch.tensor([window, *LENGTHS]).view(-1, 1, 1, 1)
    sinks = torch.randn(heads, generator=generator, dtype=torch.float64, requires_grad=True) if sunk else None
    extras = {"scaling": 0.7, "softcap": softcap, "s_aux": sinks}
    got, _ = attention._packed_forward("eager", torch.nn.Module(), *leaves, mask, **extras)

    query, key, value = leaves[0], *(x.repeat_interleave(heads // 2, dim=1) for x in leaves[1:])
    owner = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    behind = torch.arange(len(owner)).unsqueeze(1) - torch.arange(len(owner))
    seen = (owner.unsqueeze(1) == owner) & (behind >= 0) & (behind < (window or len(owner)))
    scores = query @ key.mT * 0.7
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(1, -1, 1, 1).expand(1, -1, len(owner), 1)), -1)
        leaves.append(sinks)
    expected = (scores.softmax(-1)[..., : len(owner)] @ value).transpose(1, 2)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    grads = [torch.autograd.grad(out, leaves, upstream) for out in (got, expected)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 0.5])
def test_dropout_is_of_the_weights(softcap: float | None) -> None:
    values = torch.ones(1, 1, 400, 1)
    mask = torch.tensor([0, 200, 200]).view(-1, 1, 1, 1)
    leaves = (torch.zeros(1, 1, 400, 1), torch.zeros(1, 1, 400, 1), values)
    torch.manual_seed(0)
    out, _ = attention._packed_forward("eager", torch.nn.Module(), *leaves, mask, dropout=0.5, softcap=softcap)
    first = out[0, [0, 200], 0, 0]  # sees one token: nothing, or twice of it
    assert set(first.tolist()) <= {0.0, 2.0}
    assert 0.9 < float(out.mean()) < 1.1
    assert len(out.unique()) > 20


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("mistral", {"sliding_window": 4})])
def test_nothing_is_as_large_as_the_square_of_the_row(
    family: str, changes: dict[str, Any], make_model: Callable[..., Any]
) -> None:
    model = make_model(family, torch.float32, **changes)
    batch = PackedBatch.from_sequences(sequences((8,) * 128))
    square = batch.input_ids.numel() ** 2  # bytes of a mask of bools
    forward = logitless.make_forward(model, "thd")
    with AllocationGuard(square - 1):
        forward(batch).log_probs.sum().backward()
    with pytest.raises(AssertionError, match="bytes, allowed"), AllocationGuard(square - 1):
        PackedForward(model, "thd", "positions")(batch)


def snapshot(model: Any) -> list[Any]:
    modules = [dict(module.__dict__, _parameters=None) for module in model.modules()]
    return [modules, [copy.copy(config.__dict__) for config in attention_configs(model)]]


def test_the_model_is_as_it_was_after_each_call(make_model: Callable[..., Any]) -> None:
    model, other = make_model(), make_model("gpt2")
    model.gradient_checkpointing_enable()
    forward = logitless.make_forward(model, "thd")
    before, during = snapshot(model), []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda *_: during.append((implementations(model), implementations(other)))
    )
    forward(PackedBatch.from_sequences(sequences()))
    assert during == [({"logitless_packed_sdpa"}, {"sdpa"})]
    hook.remove()
    assert snapshot(model) == before

    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        forward(PackedBatch.from_sequences(sequences()))
    hook.remove()
    assert snapshot(model) == before
    assert attention._lengths.get() is None


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox"])
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "wrapper"])
def test_layers_are_recomputed_alike_in_the_backward(
    how: str, family: str, make_model: Callable[..., Any], check: Any
) -> None:
    changes = {"sliding_window": 4} if family == "mistral" else {}
    model = make_model(family, **changes).train()
    batch, other = PackedBatch.from_sequences(sequences()), PackedBatch.from_sequences(sequences((3, 9)))
    forward = logitless.make_forward(model, "thd")
    out = forward(batch)
    expected = check.gradients(model, (out.log_probs, out.entropy))
    layer = type((model.gpt_neox if family == "gpt_neox" else model.model).layers[0])
    if how == "wrapper":
        apply_activation_checkpointing(model, check_fn=lambda module: type(module) is layer)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
    runs = []
    for module in model.modules():
        if type(module) is layer:
            module.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    out = forward(batch)
    forward(other)  # what is recomputed is of the first call, not of the last
    first = len(runs)
    weights = torch.Generator().manual_seed(1)
    upstream = [torch.randn(sum(LENGTHS), generator=weights, dtype=torch.float64) for _ in range(2)]
    torch.autograd.backward((out.log_probs, out.entropy), upstream)
    assert len(runs) == first + 2  # both layers, once more
    got = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    check.gradients_equal(got, expected, rtol=1e-9)


def test_flash_attention_keeps_its_place_and_is_told_the_borders(make_model: Callable[..., Any]) -> None:
    model = make_model()
    forward = PackedForward(logitless.make_forward(model, "thd").model, "thd", "flash")
    seen: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def stop(module: Any, args: Any, kwargs: Any) -> None:
        seen.update(kwargs, implementations=implementations(module))
        raise Stop

    model.register_forward_pre_hook(stop, with_kwargs=True)
    with pytest.raises(UnsupportedError, match="implementation became sdpa after make_forward"):
        forward(PackedBatch.from_sequences(sequences()))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(Stop):
        forward(PackedBatch.from_sequences(sequences(), align=4))
    assert seen["implementations"] == {"flash_attention_2"}
    assert seen.get("attention_mask") is None
    for name in ("q", "k"):
        assert seen[f"cu_seq_lens_{name}"].tolist() == [0, 12, 16, 36, 40]
        assert seen[f"max_length_{name}"] == 20


def test_what_is_not_understood_is_refused_by_name(make_model: Callable[..., Any]) -> None:
    row = torch.zeros(1, 2, 5, 4)
    mask = torch.tensor([0, 3, 2]).view(-1, 1, 1, 1)

    def attend(mask: Any = mask, own: str = "sdpa", key: Tensor = row, **rest: Any) -> Any:
        return attention._packed_forward(own, torch.nn.Module(), row, key, key, mask, **rest)

    assert attend(position_ids=row, head_mask=None, sliding_window=3, output_attentions=False)[0].shape == (1, 5, 2, 4)
    with pytest.raises(UnsupportedError, match="got head_mask, position_bias, which it does not understand"):
        attend(head_mask=row, position_bias=row)
    with pytest.raises(UnsupportedError, match="got output_attentions"):
        attend(output_attentions=True)
    for name in ("softcap", "s_aux"):
        with pytest.raises(UnsupportedError, match=rf"got {name} \(load the model with attn_implementation='eager'"):
            attend(**{name: row})
    with pytest.raises(UnsupportedError, match="a window of no token"):
        attend(torch.tensor([-1, 3, 2]).view(-1, 1, 1, 1))
    with pytest.raises(UnsupportedError, match=r"gives a mask \(1, 1, 5, 5\) of torch.bool"):
        attend(torch.ones(1, 1, 5, 5, dtype=torch.bool))
    with pytest.raises(UnsupportedError, match="gives NoneType"):
        attend(None)
    with pytest.raises(UnsupportedError, match="got 5 tokens, expected 6"):
        attend(torch.tensor([0, 3, 3]).view(-1, 1, 1, 1))
    with pytest.raises(UnsupportedError, match="a cache"):
        attend(key=torch.zeros(1, 2, 6, 4))


@pytest.mark.parametrize(
    ("sees", "local_size", "fine"),
    [
        (lambda b, h, q, k: k <= q, None, True),
        (lambda b, h, q, k: (k <= q) & (k > q - 3), 3, True),
        (lambda b, h, q, k: (k <= q) & (k > q - 3), None, False),  # a window that is not told
        (lambda b, h, q, k: (k <= q) & (k > q - 4), 3, False),
        (lambda b, h, q, k: (k <= q) & (k // 3 == q // 3), 3, False),  # chunks
        (lambda b, h, q, k: (k <= q) & (k // 16 == q // 16), 16, True),  # one chunk is all
        (lambda b, h, q, k: k <= q + 1, None, False),
        (lambda b, h, q, k: k < q, None, False),
    ],
)
def test_a_mask_is_looked_at_before_it_is_replaced(
    sees: Callable[..., Tensor], local_size: int | None, fine: bool, make_model: Callable[..., Any]
) -> None:
    def ask(**changes: Any) -> Tensor:
        asked = {"mask_function": sees, "kv_length": 12, "local_size": local_size, "device": "cpu", "batch_size": 1}
        return attention._packed_mask(**{**asked, **changes})

    with packed_attention(make_model(), (5, 0, 7)):
        if not fine:
            with pytest.raises(UnsupportedError, match="mask is not causal within"):
                ask()
            return
        assert ask().flatten().tolist() == [local_size or 0, 5, 7]
        assert ask(local_size=0).flatten().tolist() == [-1, 5, 7]
        ask(attention_mask=torch.ones(1, 12, dtype=torch.bool))
        with pytest.raises(UnsupportedError, match="not of the packed row"):
            ask(attention_mask=torch.arange(12).unsqueeze(0) > 2)
        with pytest.raises(UnsupportedError, match="not of the packed row"):
            ask(kv_length=13)
    with pytest.raises(UnsupportedError, match="not of the packed row"):
        ask()


def test_the_inner_model_of_a_peft_model_is_switched(make_model: Callable[..., Any], check: Any) -> None:
    peft = pytest.importorskip("peft")
    model = make_model("mistral", sliding_window=4)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    tuned = peft.get_peft_model(model, config).double().eval()
    expected = alone(check, tuned)
    forward: Any = logitless.make_forward(tuned, "thd")
    assert forward.borders == "packed"
    out = forward(PackedBatch.from_sequences(sequences()))
    torch.testing.assert_close((out.log_probs, out.entropy), expected, rtol=1e-9, atol=1e-9)
