"""The plugin in a verl of our own making: its plugin loop, its seam and its call, as verl 0.9.1 has them.

`test_verl_engine.py` runs the real one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForTokenClassification, LlamaConfig, LlamaForCausalLM

from logitless.errors import NotFoundError, UnsupportedError
from logitless_hf import verl as plugin
from logitless_hf.binding import binding_of

LOOP = """
import logging
import os
from importlib.metadata import entry_points

for entry in entry_points(group="verl.plugins"):
    if entry.name in os.environ["VERL_USE_EXTERNAL_PLUGINS"].split(","):
        try:
            entry.load()
        except Exception as error:
            logging.getLogger(__name__).debug("Failed to load plugin '%s': %s", entry.name, error)
"""
PATCH = """
seen = []

def patch_forward_with_backends(model, use_fused_kernels=False, fused_kernels_backend=None):
    seen.append((model, use_fused_kernels, fused_kernels_backend))

def apply_monkey_patch(model, use_fused_kernels=False, fused_kernels_backend=None):
    patch_forward_with_backends(model, use_fused_kernels=use_fused_kernels, fused_kernels_backend=fused_kernels_backend)
"""
ENGINE = 'extra_args["shift_labels"] = output_args["input_ids_rmpad_rolled"].unsqueeze(0)\n'
FILES = {
    "__init__.py": LOOP,
    "models/__init__.py": "",
    "models/transformers/__init__.py": "",
    "models/transformers/monkey_patch.py": PATCH,
    plugin.ENGINE: ENGINE,
}
MOVED = {
    "gone": (plugin.MODULE, "patch_forward_with_backends", "choose_forward", "has no patch_forward_with_backends"),
    "other parameters": (
        plugin.MODULE,
        "fused_kernels_backend=None):\n    seen",
        "fused_kernels_backend=None, more=1):\n    seen",
        "takes (model",
    ),
    "not called": (
        plugin.MODULE,
        "    patch_forward_with_backends(model, use",
        "    print(model, use",
        "does not call",
    ),
    "no labels": (f"verl.{plugin.ENGINE[:-3]}".replace("/", "."), "shift_labels", "labels", "passes no shift_labels"),
}


@pytest.fixture
def make_verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`make_verl(module, old, new)` imports a verl in which that text is changed; its `monkey_patch` comes back."""

    def forget() -> None:
        for name in [
            name for name in sys.modules if name.split(".")[0] == "verl" or name == "logitless_hf.verl_plugin"
        ]:
            del sys.modules[name]

    def make(module: str = "", old: str = "", new: str = "") -> Any:
        for name, text in FILES.items():
            path = tmp_path / "verl" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            here = module.replace(".", "/").removeprefix("verl/") + ".py" == name
            assert not here or old in text
            path.write_text(text.replace(old, new) if here else text)
        importlib.invalidate_caches()
        importlib.import_module("verl")
        return sys.modules.get(plugin.MODULE)

    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "verl"}
    forget()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "logitless_hf")
    yield make
    forget()
    sys.modules.update(before)


def tiny() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).double()


def engine_call() -> dict[str, Any]:
    """Two sequences in one row, as the FSDP engine passes them with `use_remove_padding`."""
    ids = (torch.arange(11) * 7 % 101)[None]
    return {
        "input_ids": ids,
        "attention_mask": None,
        "position_ids": torch.cat([torch.arange(6), torch.arange(5)])[None],
        "temperature": 0.7,
        "return_dict": True,
        "shift_labels": ids.roll(-1, 1),
        "use_cache": False,
    }


def test_verl_loads_it_and_its_call_gives_the_scores_of_full_logits(make_verl: Any, capsys: Any) -> None:
    patch = make_verl()
    assert plugin.state() == "registered"
    model, call = tiny(), engine_call()
    patch.apply_monkey_patch(model, use_fused_kernels=True, fused_kernels_backend="torch")
    assert "scores LlamaForCausalLM, by backend torch" in capsys.readouterr().out
    assert patch.seen == []
    out = model(**call)
    other = tiny()  # of the same class, which keeps its forward
    log_p = (
        other(**{name: call[name] for name in ("input_ids", "position_ids", "use_cache")}).logits / 0.7
    ).log_softmax(-1)
    log_probs = log_p.gather(-1, call["shift_labels"][..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close(out.log_probs, log_probs)
    torch.testing.assert_close(out.entropy, entropy)
    g, e = torch.randn(2, 1, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (g * out.log_probs + e * out.entropy).sum().backward()
    (g * log_probs + e * entropy).sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)


def test_the_model_is_examined_at_its_first_call_not_where_it_is_patched(make_verl: Any) -> None:
    patch, model = make_verl(), tiny()
    patch.apply_monkey_patch(model, True, "auto")
    binding = binding_of(model)
    assert binding is not None
    assert (binding.report, binding.backend) == (None, None)
    model(**engine_call())
    assert binding.report is not None


def test_without_fused_kernels_verl_does_what_it_did(make_verl: Any) -> None:
    patch, model = make_verl(), tiny()
    patch.apply_monkey_patch(model, False, "torch")
    assert patch.seen == [(model, False, "torch")]
    assert binding_of(model) is None


@pytest.mark.parametrize(("name", "told"), [("liger", "liger is verl's own"), ("tirton", "expected 'auto' or an inst")])
def test_a_backend_that_is_none_of_ours_is_refused(make_verl: Any, name: str, told: str) -> None:
    patch = make_verl()
    with pytest.raises(NotFoundError, match=told):
        patch.apply_monkey_patch(tiny(), True, name)


def test_a_critic_is_refused(make_verl: Any) -> None:
    patch = make_verl()
    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.num_labels = 1
    with pytest.raises(UnsupportedError, match="is a value model"):
        patch.apply_monkey_patch(AutoModelForTokenClassification.from_config(config), True, "torch")


def test_a_forward_that_verl_overwrote_is_refused_where_it_is_patched(make_verl: Any) -> None:
    class Patched(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    patch, model = make_verl(), tiny()
    Patched.forward.__module__ = "verl.models.transformers.qwen2_vl"
    model.__class__ = Patched
    with pytest.raises(UnsupportedError, match="verl has overwritten its forward"):
        patch.apply_monkey_patch(model, True, "torch")
    assert type(model) is Patched


@pytest.mark.parametrize("case", MOVED)
def test_a_moved_seam_is_told_although_verl_swallows_it(make_verl: Any, caplog: Any, case: str) -> None:
    module, old, new, told = MOVED[case]
    patch = make_verl(module, old, new)
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert told in record.message
    assert "written for verl 0.9.1" in record.message
    if case == "gone":  # nothing of verl's is left that could refuse
        assert plugin.state() == "not registered"
        return
    assert plugin.state().startswith("refused: UnsupportedError: ")
    with pytest.raises(UnsupportedError, match=r"use_fused_kernels: .*VERL_USE_EXTERNAL_PLUGINS=none"):
        patch.patch_forward_with_backends(nn.Linear(1, 1), True, "torch")
    patch.patch_forward_with_backends("model", False, "torch")
    assert patch.seen == [("model", False, "torch")]


def test_a_failure_stops_verl_where_the_module_is_named(make_verl: Any) -> None:
    make_verl(*MOVED["other parameters"][:3])
    with pytest.raises(UnsupportedError, match="takes"):
        importlib.import_module("logitless_hf.verl_plugin")


def test_unregister_gives_verl_its_own_back(make_verl: Any) -> None:
    patch = make_verl()
    plugin.register()  # twice changes nothing
    plugin.unregister()
    assert plugin.state() == "not registered"
    patch.apply_monkey_patch("model", True, "torch")
    assert patch.seen == [("model", True, "torch")]
