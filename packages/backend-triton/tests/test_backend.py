"""What the plugin promises without a GPU: it is found, imports without Triton, and says why it cannot serve."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from importlib.resources import files
from typing import Any

import pytest
import torch

import logitless_triton
from logitless.types import Request
from logitless_triton import TritonBackend
from logitless_triton import backend as module
from logitless_triton.config import Device


def request_on(device: str, **options: Any) -> Request:
    settings = {"hidden_dtype": torch.bfloat16, "weight_dtype": torch.bfloat16, **options}
    return Request(torch.device(device), n_tokens=4, hidden_size=8, vocab_rows=16, **settings)


def test_version_types_and_entry_point() -> None:
    dist = distribution("logitless-triton")
    assert logitless_triton.__version__ == dist.version
    assert files(logitless_triton).joinpath("py.typed").is_file()
    found = dist.entry_points.select(group="logitless.backends")
    assert [(entry.name, entry.value) for entry in found] == [("triton", "logitless_triton:TritonBackend")]


def test_importing_it_brings_no_triton() -> None:
    code = "import sys; import logitless_triton; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_triton_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    reason = TritonBackend().supports(request_on("cuda"))
    assert reason is not None
    assert "pip install 'triton>=3.5'" in reason


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (request_on("mps"), "it runs on NVIDIA GPUs, and hidden is on mps"),
        (request_on("cpu"), "interpreter computes bfloat16 products wrongly"),
        (request_on("cpu", hidden_dtype=torch.float64, weight_dtype=torch.float64), "hidden is torch.float64"),
        (request_on("cpu", hidden_dtype=torch.float16, weight_dtype=torch.float64), "weight is torch.float64"),
        (request_on("cpu", hidden_dtype=torch.float32), "cast hidden to torch.bfloat16"),
        (request_on("cpu", hidden_dtype=torch.float16), "cast hidden to torch.bfloat16"),
    ],
)
def test_refuses_with_a_reason(request_: Request, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = TritonBackend().supports(request_)
    assert reason is not None
    assert said in reason


@pytest.mark.parametrize("asked", [{"kept_set": True}, {"several_labels": True}, {}], ids=str)
def test_nothing_is_kept_of_kept_sets_and_several_labels(asked: dict[str, bool]) -> None:
    shape = TritonBackend().kept_shape(request_on("cpu", hidden_dtype=torch.float32, **asked), 1 << 20)
    assert (shape == (0,)) == bool(asked)


def test_a_cpu_is_served_in_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    request_ = request_on("cpu", hidden_dtype=torch.bfloat16, weight_dtype=torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonBackend().supports(request_) is None
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "move it, or take the torch backend" in str(TritonBackend().supports(request_))


@pytest.mark.parametrize(("capability", "served"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((10, 0), True)])
def test_capability(capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "device_facts", lambda device: Device(capability, 132))
    monkeypatch.setattr(torch.version, "hip", None)
    reason = TritonBackend().supports(request_on("cuda"))
    assert reason is None if served else "has 7.5" in str(reason)
