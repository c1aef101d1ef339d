"""The package by itself: it imports without Megatron, says its version, is typed, and registers its adapter."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

import logitless_mcore

KINDS = ("packed_seqs", "bshd", "thd_no_padding", "bshd_no_padding")
PACKING = [f"{way}process_{kind}" for way in ("pre", "post") for kind in KINDS]
REFERENCE = [*PACKING, "model_forward_gen", "gptmodel_forward_no_padding", "fused_forward_model_gen"]


def test_version_is_the_distributions() -> None:
    assert logitless_mcore.__version__ == distribution("logitless-mcore").version


def test_is_marked_as_typed() -> None:
    assert files(logitless_mcore).joinpath("py.typed").is_file()


def test_the_reference_designs_names_are_public() -> None:
    assert set(REFERENCE) <= set(logitless_mcore.__all__)


def test_every_public_name_has_a_home() -> None:
    assert sorted(logitless_mcore._HOME) == [name for name in logitless_mcore.__all__ if name != "__version__"]
    assert logitless_mcore.__all__ == sorted(logitless_mcore.__all__)


def test_registers_its_adapter() -> None:
    found = {(entry.group, entry.name, entry.value) for entry in distribution("logitless-mcore").entry_points}
    assert ("logitless.adapters", "mcore", "logitless_mcore.adapter:McoreAdapter") in found


def run(code: str, *path: Path) -> str:
    command = f"import sys; sys.path[:0] = {[str(one) for one in path]}\n{code}"
    return subprocess.run([sys.executable, "-c", command], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_it_and_asking_its_adapter_imports_no_megatron() -> None:
    code = """
import torch, logitless, logitless_mcore
adapter = logitless_mcore.McoreAdapter()
print(adapter.supports(torch.nn.Linear(1, 1)), "megatron" in sys.modules, "transformer_engine" in sys.modules)
"""
    assert run(code) == "Linear is no Megatron-Core model: megatron.core is not imported False False"


def test_without_megatron_a_name_says_what_to_install(tmp_path: Path) -> None:
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.startswith("megatron") else find(name, *rest)
import logitless_mcore
from logitless.errors import NotFoundError
try:
    logitless_mcore.model_forward_gen
except NotFoundError as error:
    print(error)
"""
    assert "pip install" in run(code)


def test_a_half_installed_transformer_engine_is_told(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("raise FileNotFoundError('libtransformer_engine.so')")
    code = """
import logitless_mcore
from logitless.errors import BrokenPluginError
try:
    logitless_mcore.model_forward_gen
except BrokenPluginError as error:
    print(error)
"""
    assert "libtransformer_engine.so" in run(code, tmp_path)
