from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeCausalLMOutputWithPast

import logitless
from logitless.errors import UnsupportedError
from logitless_hf import CausalLMOutputForPPO
from logitless_hf.outputs import scored_output


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
    for name in ("loss", "logits", "values", "past_key_values", "hidden_states", "attentions", "aux_loss"):
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
