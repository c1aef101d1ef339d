"""What a model does to its logits is found or refused, whatever it is, and looking leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logitless import PackedBatch
from logitless.errors import UnsupportedError
from logitless.testing.distributed import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_cpu import build_gpt, hf_model, parallel
from oracle import load

from logitless_mcore import make_forward
from logitless_mcore.examine import examined, forget
from logitless_mcore.head import Transform


class Capped(ColumnParallelLinear):
    """As Gemma's head does in Megatron-Bridge."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, bias = super().forward(*args, **kwargs)
        return 3.0 * torch.tanh(0.5 * logits / 3.0), bias


class Multiplied(GPTModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return 0.3 * out if isinstance(out, Tensor) else out


class RowDependent(ColumnParallelLinear):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, bias = super().forward(*args, **kwargs)
        return logits * torch.linspace(1, 2, logits.shape[-1]), bias


class Masked(ColumnParallelLinear):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, bias = super().forward(*args, **kwargs)
        return logits.masked_fill(torch.arange(logits.shape[-1]) > 100, -torch.inf), bias


class Cubed(ColumnParallelLinear):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        logits, bias = super().forward(*args, **kwargs)
        return logits + logits**3, bias


class Unseen(ColumnParallelLinear):
    """What comes before the product is not seen by the probe: the self-check is there for it."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(1.1 * hidden, *args, **kwargs)


class Elsewhere(ColumnParallelLinear):
    def forward(self, hidden: Tensor, weight: Tensor | None = None, **_: Any) -> Any:
        return hidden @ (self.weight if weight is None else weight).t(), None


def head_of(cls: type) -> Callable[[Any], None]:
    def change(gpt: Any) -> None:
        gpt.output_layer.__class__ = cls

    return change


def multiplied(gpt: Any) -> None:
    gpt.__class__ = Multiplied


def scores_and_own(gpt: Any, transform: Transform) -> tuple[float, float]:
    """Errors of log_probs and of the head's gradient against the model's own logits."""
    ids = torch.arange(12) * 7 % 128
    batch = PackedBatch.from_sequences([ids])
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    grads, found = [], []
    g = torch.linspace(-1, 1, 11)
    for fused in (True, False):
        gpt.zero_grad()
        if fused:
            log_probs = make_forward(gpt)(batch, temperature=0.6).log_probs[:-1]
        else:
            logits = gather_from_tensor_model_parallel_region(gpt(ids[None], torch.arange(12)[None], None))[0, :-1]
            log_probs = (logits / 0.6).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        (g * log_probs).sum().backward()
        found.append(log_probs.detach())
        grads.append([gpt.output_layer.weight.grad.clone(), gpt.embedding.word_embeddings.weight.grad.clone()])
    assert examined(gpt) == transform
    return (
        float((found[0] - found[1]).abs().max()),
        max(float((a - b).abs().max()) for a, b in zip(*grads, strict=True)),
    )


def understood(rank: int, size: int, hf: Any, change: Any, transform: Transform, config: Any) -> tuple[float, float]:
    with parallel(tp=size):
        gpt = load(build_gpt(hf.config, **config), hf, False)
        change(gpt)
        return scores_and_own(gpt, transform)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("change", "transform", "config"),
    [
        (lambda gpt: None, Transform(), {}),
        (head_of(Capped), Transform(0.5, 3.0), {}),
        (multiplied, Transform(0.3), {}),
        (lambda gpt: None, Transform(0.25), {"use_mup": True, "mup_output_mult": 0.25}),
    ],
    ids=["plain", "softcap", "scale", "mup"],
)
def test_scale_and_softcap_are_found(change: Any, transform: Transform, config: dict[str, Any], tp: int) -> None:
    if config and not hasattr(TransformerConfig, "use_mup"):
        pytest.skip("this Megatron has no MuP")
    for errors in run_ranks(tp, understood, hf_model("llama"), change, transform, config):
        assert max(errors) <= 1e-5


def refused(rank: int, size: int, hf: Any, change: Any, match: str) -> None:
    with parallel():
        gpt = load(build_gpt(hf.config), hf, False)
        change(gpt)
        for _ in range(2):  # and it stays refused
            with pytest.raises(UnsupportedError, match=match):
                make_forward(gpt)


def on_meta(gpt: Any) -> None:
    gpt.decoder.to("meta")


def linear(gpt: Any) -> None:
    gpt.output_layer = nn.Linear(64, 128, bias=False)


def mtp(gpt: Any) -> None:
    gpt.config.mtp_num_layers = 1


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (head_of(RowDependent), "neither a scale nor a softcap"),
        (head_of(Masked), "infinite or NaN"),
        (head_of(Cubed), "neither a scale nor a softcap"),
        (head_of(Unseen), "scores differ from the model's own logits"),
        (head_of(Elsewhere), "multiplies 0 times"),
        (linear, "output layer is a Linear"),
        (on_meta, "meta device"),
        (mtp, "multi-token prediction"),
    ],
    ids=["row", "mask", "cube", "unseen", "elsewhere", "linear", "meta", "mtp"],
)
def test_what_is_not_understood_is_refused(change: Any, match: str) -> None:
    run_ranks(1, refused, hf_model("llama"), change, match)


def no_trace(rank: int, size: int, hf: Any) -> None:
    with parallel():
        gpt = load(build_gpt(hf.config), hf, False)
        gpt.train()
        gpt.decoder.layers[0].eval()
        state, modes = torch.get_rng_state(), [module.training for module in gpt.modules()]
        before = {name: x.clone() for name, x in gpt.state_dict().items() if isinstance(x, Tensor)}
        make_forward(gpt)
        assert torch.equal(torch.get_rng_state(), state)
        assert [module.training for module in gpt.modules()] == modes
        assert all(parameter.grad is None for parameter in gpt.parameters())
        assert all(torch.equal(gpt.state_dict()[name], x) for name, x in before.items())
        assert {"forward", "_forward_impl"}.isdisjoint(gpt.output_layer.__dict__)
        assert not gpt._forward_pre_hooks


def test_examination_leaves_no_trace() -> None:
    run_ranks(1, no_trace, hf_model("llama"))


def later_stage(rank: int, size: int, hf: Any, sp: bool) -> None:
    with parallel(tp=size):
        gpt = build_gpt(hf.config, sequence_parallel=sp, model={"pre_process": False})
        given = torch.ones(8 // size if sp else 8, 1, hf.config.hidden_size)
        gpt.set_input_tensor(given)
        assert examined(gpt) == Transform()
        assert gpt.decoder.input_tensor is given


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True)], ids=["tp1", "tp2-sp"])
def test_a_later_stage_keeps_the_input_that_the_schedule_gave_it(tp: int, sp: bool) -> None:
    run_ranks(tp, later_stage, hf_model("llama"), sp)


def changed(rank: int, size: int, hf: Any) -> None:
    with parallel():
        gpt = load(build_gpt(hf.config), hf, False)
        make_forward(gpt)
        gpt.output_layer.__class__ = Capped
        forget(gpt)
        assert examined(gpt) == Transform(0.5, 3.0)


def test_a_changed_head_is_examined_again() -> None:
    run_ranks(1, changed, hf_model("llama"))
