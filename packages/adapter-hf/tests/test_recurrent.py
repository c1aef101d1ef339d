"""Layers with a state run on each packed sequence by itself, and only these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from transformers import __version__ as transformers_version

import logitless
from logitless import PackedBatch
from logitless.errors import UnsupportedError
from logitless_hf.forward import PackedForward, _fault
from logitless_hf.recurrent import by_sequence, recurrent_layers

LENGTHS = (11, 1, 18, 4)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("5.0", {"state_size": 4, "time_step_rank": 4}),
    "recurrent_gemma": ("5.0", {"head_dim": 8, "lru_width": 32, "attention_window_size": 16, "num_hidden_layers": 3}),
    "lfm2": ("5.0", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}),
    "qwen3_next": (
        "5.0",
        {
            **{"head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
            **{"linear_value_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]},
        },
    ),
}


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 101, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", CASES)
def test_packed_equals_alone(family: str, checkpointed: bool, make_model: Callable[..., Any], check: Any) -> None:
    since, changes = CASES[family]
    if Version(transformers_version) < Version(since):
        pytest.skip("its layers are tried on newer transformers only")
    model = make_model(family, torch.float32, **changes)
    scores = [check.own_scores(model, check.shift(ids.unsqueeze(0)), input_ids=ids.unsqueeze(0)) for ids in sequences()]
    expected = tuple(torch.cat([one[i].squeeze(0) for one in scores]) for i in range(2))
    expected_grads = check.gradients(model, expected)
    forward = logitless.make_forward(model, "thd")
    assert forward.borders == "packed"
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    out = forward(PackedBatch.from_sequences(sequences()))
    assert not any("forward" in module.__dict__ for module in model.modules())
    for got, wanted in zip((out.log_probs, out.entropy), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    check.gradients_equal(check.gradients(model, (out.log_probs, out.entropy)), expected_grads, rtol=1e-3)
    assert _fault(PackedForward(model, "thd", "positions"))


class Mixer(nn.Module):
    """A running sum, and what else it was given."""

    def forward(self, x: Tensor, mask: Any = None, *, pair: Any = None, number: int = 0) -> Any:
        return x.cumsum(1), (mask, pair[0] + x if pair else None)


def test_what_belongs_to_a_sequence_is_cut_and_joined() -> None:
    x, other = torch.randn(1, 6, 2), torch.randn(1, 6, 2)
    mask = torch.tensor([0, 4, 2]).view(-1, 1, 1, 1)
    summed, (nothing, added) = by_sequence(Mixer(), (4, 2))(x, mask, pair=(other, torch.zeros(3)), number=1)
    torch.testing.assert_close(summed, torch.cat((x[:, :4].cumsum(1), x[:, 4:].cumsum(1)), 1), rtol=0, atol=0)
    assert nothing is None
    torch.testing.assert_close(added, other + x, rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match="a recurrent layer returned int"):
        by_sequence(lambda x: 3, (4, 2))(x)


def test_only_outermost_layers_of_the_text_model() -> None:
    class Layer(nn.Module):
        def __init__(self, inner: nn.Module | None = None) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 2, 1)
            if inner is not None:
                self.inner = inner

    class Decays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log = nn.Parameter(torch.zeros(2))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Layer()
            self.text = nn.ModuleDict(
                {"embed": nn.Embedding(3, 2), "a": Layer(Layer()), "b": Decays(), "c": nn.Linear(2, 2)}
            )

        def get_input_embeddings(self) -> nn.Module:
            return self.text["embed"]

    model = Model()
    assert recurrent_layers(model) == [model.text["a"], model.text["b"]]
