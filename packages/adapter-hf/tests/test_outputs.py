from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

import logitless
from logitless.errors import UnsupportedError
from logitless_hf import CausalLMOutputForPPO, bind
from logitless_hf.outputs import scored_output, unrounded


def moe() -> CausalLMOutputForPPO:
    family = MoeCausalLMOutputWithPast(
        logits=torch.zeros(1, 2, 0), aux_loss=torch.tensor(1.0), router_logits=(torch.ones(2), torch.ones(3))
    )
    return scored_output(family, torch.ones(1, 2), None)


def test_fields_and_protocol() -> None:
    out = scored_output(CausalLMOutputWithPast(logits=torch.zeros(1, 2, 0)), torch.ones(1, 2), torch.zeros(1, 2))
    assert type(out) is CausalLMOutputForPPO
    assert isinstance(out, CausalLMOutputWithPast)
    assert isinstance(out, logitless.CausalLMOutputForPPO)
    assert list(out) == ["log_probs", "entropy"]
    for name in ("loss", "logits", "values", "past_key_values", "hidden_states", "attentions", "aux_loss", "stats"):
        assert getattr(out, name) is None


def test_the_cache_has_its_old_name_too() -> None:
    assert CausalLMOutputForPPO(past_key_values=(1,), log_probs=torch.ones(1)).past_key_values == (1,)


def test_the_familys_other_fields_are_carried() -> None:
    out = moe()
    assert isinstance(out, CausalLMOutputForPPO)
    assert type(out) is type(moe())
    assert list(out) == ["log_probs", "aux_loss", "router_logits"]
    assert len(out.router_logits) == 2
    with pytest.raises(UnsupportedError, match="tuple"):
        scored_output((torch.ones(1),), torch.ones(1), None)


@pytest.mark.parametrize("make", [moe, lambda: CausalLMOutputForPPO(log_probs=torch.ones(2))], ids=["moe", "plain"])
def test_outputs_flatten_and_copy(make: Any) -> None:
    """FSDP, DDP and compile flatten outputs; `values`, a field, hides the dict's method that transformers calls."""
    out = make()
    doubled = pytree.tree_map(lambda leaf: 2 * leaf, out)
    assert type(doubled) is type(out)
    assert torch.equal(doubled.log_probs, 2 * out.log_probs)
    for twin in (pickle.loads(pickle.dumps(out)), copy.deepcopy(out)):
        assert type(twin) is type(out)
        assert list(twin) == list(out)
        assert torch.equal(twin.log_probs, out.log_probs)


def test_rounded_results_are_put_back_exactly() -> None:
    """FSDP2's mixed precision casts what a forward returns."""
    stats = {"mean_logit": torch.tensor([0.1]), "is_kept": torch.tensor([True])}
    made = CausalLMOutputForPPO(log_probs=torch.tensor([-0.7]), entropy=torch.tensor([0.3]), stats=stats)
    rounded = pytree.tree_map(lambda x: x.bfloat16() if x.is_floating_point() else x, made)
    assert rounded.stats["mean_logit"].dtype == torch.bfloat16
    back = unrounded(rounded, made)
    for name in ("log_probs", "entropy"):
        assert getattr(back, name) is getattr(made, name)
    assert back.stats["mean_logit"] is stats["mean_logit"]
    assert torch.equal(back.stats["is_kept"], stats["is_kept"])
    assert unrounded(CausalLMOutputForPPO(log_probs=torch.ones(2)), None).stats is None


class Policy(nn.Module):
    """A trainer's own module around a bound model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **call: Any) -> Any:
        out = self.model(**call)
        assert out.log_probs is out["log_probs"]
        out.log_probs = out.log_probs + 0  # what a module does to it is not lost
        assert out.log_probs is out["log_probs"]
        return out


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", [lambda model: model, Policy], ids=["bare", "within a module"])
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}, {}], ids=str)
def test_ddp_passes_the_output_on(wrap: Any, options: dict[str, bool], make_model: Any, tokens: Tensor) -> None:
    """DDP that looks for unused parameters calls `values()` of each dict in an output."""
    model = bind(make_model("mixtral", torch.float32, num_local_experts=4, output_router_logits=True))
    expected = model(input_ids=tokens, return_log_probs=True)
    ddp = DistributedDataParallel(wrap(model), **options)
    for grad in (True, False, True):
        with torch.set_grad_enabled(grad):
            out = ddp(input_ids=tokens, return_log_probs=True)
        assert type(out) is type(expected)
        assert list(out) == list(expected)
        assert out.values is None
        assert torch.equal(out.log_probs, expected.log_probs)
        assert torch.equal(out.aux_loss, expected.aux_loss)
        if grad:
            out.log_probs.sum().backward()
    assert model.lm_head.weight.grad.count_nonzero() > 0
