"""verl's own Megatron call order, on its own package: scores and gradients are those of full logits, sharded or not.

Skipped where verl is not installed; `nox -s verl` installs it.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
import verl.models.mcore.model_forward_fused as fused
from megatron_cpu import build_gpt, hf_model, parallel
from oracle import deviation, expect, load, summed_over_tp

from logitless.errors import UnsupportedError
from logitless.testing.distributed import run_ranks
from logitless_mcore import verl as plugin

SEQUENCES = [torch.arange(9) * 5 % 128, torch.arange(4) * 11 % 128, torch.arange(6) * 3 % 128]
TEMPERATURE = 0.7


def nested(tensors: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def run_verl(gpt: Any) -> list[list[Tensor]]:
    """As MegatronEngine does: patch at start, then the fused forward over nested ids, which are its labels too."""
    fused.patch_fused_forward(gpt)
    forward = fused.fused_forward_model_engine(False)
    ids = nested(SEQUENCES)
    out = forward(
        gpt,
        input_ids=ids,
        labels=ids.clone(),
        multi_modal_inputs={},
        temperature=TEMPERATURE,
        calculate_entropy=True,
        pad_token_id=0,
    )
    return [list(out[name].unbind()) for name in ("log_probs", "entropy")]


def run_case(tp: int, sequence_parallel: bool, tied: bool) -> list[float]:
    """Largest errors of log_probs, of entropies and of any parameter's gradient, over the ranks."""
    model = hf_model("qwen2", tied)
    expected = expect(model, SEQUENCES, TEMPERATURE)

    def case(rank: int, size: int) -> tuple[float, float, float]:
        with parallel(tp=tp):
            gpt = load(build_gpt(model.config, sequence_parallel=sequence_parallel), model, tied)
            log_probs, entropy = run_verl(gpt)
            terms = zip(expected.upstream, log_probs, entropy, strict=True)
            loss: Any = sum((g * lp[:-1]).sum() + (e * ent[:-1]).sum() for (g, e), lp, ent in terms)
            loss.backward()
            summed_over_tp(gpt)
            errors = [
                max(float((mine[:-1] - theirs).abs().max()) for mine, theirs in zip(found, wanted, strict=True))
                for found, wanted in ((log_probs, expected.log_probs), (entropy, expected.entropy))
            ]
            return errors[0], errors[1], deviation(gpt, expected, tied)[0]

    return [max(errors) for errors in zip(*run_ranks(tp, case), strict=True)]


def test_verl_finds_the_plugin() -> None:
    assert "logitless_mcore" in {entry.name for entry in entry_points(group="verl.plugins")}
    assert plugin.state() == "registered"
    assert fused.fused_output_processor.__module__ == "logitless_mcore.verl"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"])
def test_equals_full_logits(tp: int, sequence_parallel: bool, tied: bool) -> None:
    log_probs, entropy, gradient = run_case(tp, sequence_parallel, tied)
    assert log_probs < 1e-5
    assert entropy < 1e-5
    assert gradient < 1e-5


def test_unregister_gives_verl_its_own_back() -> None:
    ours = fused.fused_output_processor
    plugin.unregister()
    try:
        assert plugin.state() == "not registered"
        assert {getattr(fused, name).__module__ for name in plugin.PARAMETERS} == {fused.__name__}
    finally:
        plugin.register()
    assert plugin.state() == "registered"
    assert fused.fused_output_processor is not ours


def test_a_moved_seam_is_told_and_refused(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    plugin.unregister()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(fused, "fused_output_processor", lambda *, hidden_states, labels: None)
            plugin.register()
            assert "fused_output_processor takes no context, output_layer, output_weight" in caplog.text
            assert caplog.records[0].levelname == "ERROR"
            with pytest.raises(UnsupportedError, match=r"verl 0.*written for verl 0.9.1"):
                fused.patch_fused_forward(torch.nn.Linear(1, 1))
            assert plugin.state().startswith("refused: verl 0")
            plugin.unregister()
    finally:
        plugin.register()
    assert plugin.state() == "registered"


def test_waits_for_verl_to_import_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, plugin.MODULE)
    assert plugin.state() == "waiting"
