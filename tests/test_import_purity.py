"""`import logitless` is cheap and harmless: no plugin, no framework, no GPU, no file, no global changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROBE = """
import json, sys
import torch
before, threads, dtype = set(sys.modules), torch.get_num_threads(), torch.get_default_dtype()
import logitless
print(json.dumps({
    "new": sorted({name.split(".")[0] for name in set(sys.modules) - before}),
    "dynamo": "torch._dynamo" in sys.modules,
    "cuda": torch.cuda.is_initialized(),
    "distributed": torch.distributed.is_available() and torch.distributed.is_initialized(),
    "globals": [torch.get_num_threads() == threads, torch.get_default_dtype() == dtype],
}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an import brought, where triton, transformers and their like can all be imported."""
    stubs: Path = tmp_path_factory.mktemp("stubs")
    for name in ("triton", "transformers", "megatron"):
        (stubs / name).mkdir()
        (stubs / name / "__init__.py").touch()
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(stubs)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", ["triton", "transformers", "megatron", "pyarrow", "matplotlib", "typer", "pytest"])
def test_loads_no(name: str, seen: dict[str, Any]) -> None:
    assert name not in seen["new"]


def test_loads_no_plugin(seen: dict[str, Any]) -> None:
    assert [name for name in seen["new"] if name.startswith("logitless")] == ["logitless"]


def test_does_not_set_up_the_compiler(seen: dict[str, Any]) -> None:
    # torch._dynamo takes a second to import, and imports triton where there is one.
    assert seen["dynamo"] is False


def test_touches_no_gpu_and_no_global(seen: dict[str, Any]) -> None:
    assert seen["cuda"] is False
    assert seen["distributed"] is False
    assert seen["globals"] == [True, True]
