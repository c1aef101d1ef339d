"""Each package installed alone, as a user would: it imports, works, or says which `pip install` is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Python = Callable[[str, str], str]
PACKAGES = {
    "core": "logitless",
    "torch": "logitless_torch",
    "triton": "logitless_triton",
    "hf": "logitless_hf",
    "mcore": "logitless_mcore",
}
each_package = pytest.mark.parametrize("package", PACKAGES)

# Modules that serve another project, and what they may lack where it is not installed.
OPTIONAL = {"core": {"hypothesis", "pytest"}, "hf": {"verl"}, "mcore": {"megatron", "verl"}}

IMPORT_ALL = """
import importlib, importlib.metadata, pkgutil
package = importlib.import_module({name!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in {optional!r}:
            raise
print(package.__version__, importlib.metadata.version({dist!r}))
"""

CALL = """
import torch, logitless, logitless.reference
from logitless.errors import NotFoundError
hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
try:
    logitless.linear_log_probs(hidden, weight, torch.arange(5))
except NotFoundError as error:
    print(error)
"""

SOLVE = """
import torch, logitless, logitless.reference
hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
labels = torch.tensor([0, 6, -100, 3, 3])
grads = []
head = logitless.LMHead(weight)
for solve in (logitless.linear_log_probs, logitless.reference.linear_log_probs):
    out = solve(hidden, head, labels, temperature=0.7)
    grads.append(torch.autograd.grad((out.log_probs * 2 + out.entropy).sum(), (hidden, weight)))
torch.testing.assert_close(*grads)
assert logitless.backends()[0].name == "torch"
"""

BIND = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from logitless.errors import NotFoundError
import logitless_hf
sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes))
try:
    logitless_hf.bind(model)(input_ids=torch.arange(6)[None], return_log_probs=True)
except NotFoundError as error:
    print(error)
"""

CALL_MCORE = """
import logitless_mcore
from logitless.errors import NotFoundError
try:
    logitless_mcore.layer_spec(None)
except NotFoundError as error:
    print(error)
"""


@each_package
def test_only_it_and_core_are_there(package: str, run_in: Callable[..., Any]) -> None:
    listed = json.loads(run_in(package, "python", "-m", "pip", "list", "--format=json").stdout)
    ours = {row["name"].replace("-", "_") for row in listed if row["name"].startswith("logitless")}
    assert ours == {"logitless", PACKAGES[package]}
    check = run_in(package, "python", "-m", "pip", "check")
    assert check.returncode == 0, check.stdout


@each_package
def test_every_module_imports(package: str, python_in: Python) -> None:
    name = PACKAGES[package]
    code = IMPORT_ALL.format(name=name, dist=name.replace("_", "-"), optional=OPTIONAL.get(package, set()))
    stated, installed = python_in(package, code).split()
    assert stated == installed


def test_core_alone_names_the_backend_to_install(python_in: Python) -> None:
    assert "pip install logitless-torch" in python_in("core", CALL)


def test_core_alone_names_the_adapter_to_install(python_in: Python) -> None:
    code = """
import torch, logitless, logitless.reference
try:
    logitless.make_forward(torch.nn.Linear(2, 2))
except logitless.errors.NotFoundError as error:
    print(error)
"""
    assert "pip install logitless-hf" in python_in("core", code)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_core_alone_names_the_named_backends_package(backend: str, python_in: Python) -> None:
    code = CALL.replace("torch.arange(5)", f"torch.arange(5), backend={backend!r}")
    assert f"pip install logitless-{backend}" in python_in("core", code)


def test_core_alone_lists_nothing(python_in: Python) -> None:
    assert python_in("core", "import logitless; print(logitless.backends(), logitless.adapters())") == "[] []\n"


def test_doctor_runs_with_core_alone(run_in: Callable[..., Any]) -> None:
    done = run_in("core", "logitless", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["backends"] == report["adapters"] == []
    plain = run_in("core", "logitless", "doctor")
    assert "pip install logitless-torch" in plain.stdout + plain.stderr


def test_doctor_fails_where_a_backend_was_asked_for(run_in: Callable[..., Any]) -> None:
    done = run_in("core", "logitless", "doctor", env={"LOGITLESS_BACKEND": "torch"})
    assert done.returncode == 1
    assert "pip install logitless-torch" in done.stdout + done.stderr


def test_score_without_its_package_names_it(run_in: Callable[..., Any]) -> None:
    done = run_in("core", "logitless", "score", "--model", "x", "--input", "y", "--output", "z")
    assert done.returncode != 0
    assert "pip install logitless-hf" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_torch_backend_serves(python_in: Python) -> None:
    python_in("torch", SOLVE)


def test_triton_backend_says_why_it_cannot_serve_a_cpu(python_in: Python) -> None:
    told = python_in("triton", CALL.replace("import NotFoundError", "import LogitlessError as NotFoundError"))
    assert "it runs on NVIDIA GPUs" in told


def test_mcore_adapter_names_the_extra_that_it_runs_with(python_in: Python) -> None:
    told = python_in("mcore", CALL_MCORE)
    assert "pip install 'logitless-mcore[mcore]'" in told


def test_mcore_adapter_is_listed_without_megatron(python_in: Python) -> None:
    listed = "import logitless; print([(s.name, s.ok) for s in logitless.adapters()])"
    assert python_in("mcore", listed) == "[('mcore', True)]\n"


def test_hf_adapter_without_a_backend_names_one(python_in: Python) -> None:
    assert "pip install logitless-torch" in python_in("hf", BIND)


def test_hf_adapter_is_listed(python_in: Python) -> None:
    assert (
        python_in("hf", "import logitless; print([(s.name, s.ok) for s in logitless.adapters()])") == "[('hf', True)]\n"
    )


@pytest.mark.parametrize(
    ("option", "extra"), [(["--output", "scores.parquet"], "score"), (["--output", "scores.jsonl"], None)]
)
def test_score_names_the_extra_that_parquet_needs(
    option: list[str], extra: str | None, run_in: Callable[..., Any]
) -> None:
    done = run_in("hf", "logitless", "score", "--model", "no-such-model", "--input", "no-such.jsonl", *option)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert ("logitless-hf[score]" in said) == (extra is not None), said
