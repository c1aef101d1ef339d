"""Plugins by others beside ours: good ones serve, broken ones are told and break nothing (`nox -s plugins`).

`acme-logprobs` is a good third party's distribution, `shoddy-logprobs` one whose plugins are each broken in their own
way; both are in dists/.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import logitless
from logitless import reference
from logitless.errors import BrokenPluginError, NotFoundError, UnsupportedError

REASONS = {
    "shoddy-exit": "shoddy wants a GPU",
    "shoddy-future": "speaks protocol 2, this logitless speaks 1; pip install --upgrade logitless",
    "shoddy-import": "No module named 'a_module_that_nobody_has'",
    "shoddy-init": "shoddy lost its licence key",
    "shoddy-missing": "NotThere",
    "shoddy-mute": "protocol",
    "shoddy-past": "speaks protocol 0, this logitless speaks 1; pip install --upgrade shoddy-logprobs",
    "shoddy-text": "'one'",
}
each_broken = pytest.mark.parametrize("name", REASONS)
LABELS = torch.tensor([3, 0, -100, 10, 4])


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8, dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    return hidden.requires_grad_(), weight.requires_grad_()


def call(hidden: torch.Tensor, weight: torch.Tensor, backend: str | None = None) -> logitless.TokenLogProbs:
    return logitless.linear_log_probs(hidden, weight, LABELS, temperature=0.7, backend=backend)


def status(name: str) -> logitless.PluginStatus:
    (found,) = [line for line in logitless.backends() if line.name == name]
    return found


def cli(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("logitless")), *arguments]
    clean = {**os.environ, "NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb", **env}
    return subprocess.run(command, env=clean, capture_output=True, text=True, check=False, timeout=120)


def test_good_backends_are_listed_with_their_distribution() -> None:
    assert status("acme") == logitless.PluginStatus("acme", "acme-logprobs", "1.2.3", True)
    assert status("torch").ok


@each_broken
def test_broken_backend_is_a_status_with_its_exception(name: str) -> None:
    found = status(name)
    assert (found.dist, found.version, found.ok) == ("shoddy-logprobs", "0.0.1", False)
    assert found.reason is not None
    assert REASONS[name] in found.reason
    assert isinstance(found.error, BaseException)


@each_broken
def test_broken_backend_raises_when_named(name: str, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(BrokenPluginError) as caught:
        call(*inputs, backend=name)
    assert REASONS[name] in str(caught.value)
    assert "shoddy-logprobs" in str(caught.value)


def test_failed_import_is_kept_as_the_cause(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(BrokenPluginError) as caught:
        call(*inputs, backend="shoddy-import")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_two_distributions_of_one_name_are_both_named(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    lines = [line for line in logitless.backends() if line.name == "twin"]
    assert sorted(line.dist for line in lines) == ["acme-logprobs", "shoddy-logprobs"]
    assert not any(line.ok for line in lines)
    with pytest.raises(BrokenPluginError, match="acme-logprobs and shoddy-logprobs"):
        call(*inputs, backend="twin")


@pytest.mark.parametrize("backend", ["acme", "torch", None])
def test_good_backends_serve_among_broken_ones(backend: str | None, inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    hidden, weight = inputs
    got = call(hidden, weight, backend=backend)
    want = reference.linear_log_probs(hidden, logitless.LMHead(weight), LABELS, temperature=0.7)
    assert got.entropy is not None
    assert want.entropy is not None
    g, e = torch.randn(2, 5, dtype=torch.float64)
    for mine, theirs in zip(
        [got.log_probs, got.entropy, *torch.autograd.grad(g @ got.log_probs + e @ got.entropy, inputs)],
        [want.log_probs, want.entropy, *torch.autograd.grad(g @ want.log_probs + e @ want.entropy, inputs)],
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_named_backend_that_cannot_serve_gives_its_reason(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    hidden, weight = inputs
    head = logitless.LMHead(weight, bias=torch.zeros(11, dtype=torch.float64))
    with pytest.raises(UnsupportedError, match="acme computes plain heads"):
        logitless.linear_log_probs(hidden, head, LABELS, backend="acme")
    logitless.linear_log_probs(hidden, head, LABELS)


def test_choice_is_argument_then_block_then_environment(
    inputs: tuple[torch.Tensor, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGITLESS_BACKEND", "shoddy-init")
    with pytest.raises(BrokenPluginError, match="licence key"):
        call(*inputs)
    with logitless.use_backend("shoddy-past"):
        with pytest.raises(BrokenPluginError, match="protocol 0"):
            call(*inputs)
        call(*inputs, backend="acme")


def test_backend_is_resolved_in_the_forward(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    with logitless.use_backend("acme"):
        out = call(*inputs)
    with logitless.use_backend("shoddy-init"):
        out.log_probs.sum().backward()
    assert inputs[0].grad is not None


def test_backend_that_raises_when_asked_breaks_only_itself(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(BrokenPluginError, match="shoddy divides by zero"):
        call(*inputs, backend="shoddy-supports")


def test_unknown_backend_lists_what_is_installed(inputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(NotFoundError, match="'no-such'.*acme"):
        call(*inputs, backend="no-such")


def test_good_adapter_serves_beside_a_broken_one() -> None:
    from acme_logprobs import AcmeModel

    assert {line.name: line.ok for line in logitless.adapters()} == {"acme": True, "shoddy": False}
    model = AcmeModel(hidden_size=4, outputs=11)
    batch = logitless.PackedBatch.from_sequences([[3, 1, 4], [1, 5]])
    out = logitless.make_forward(model, layout="bshd", backend="acme")(batch, temperature=2.0)
    want = (model(torch.tensor([[3, 1, 4]])) / 2.0).log_softmax(-1)[0, [0, 1], [1, 4]]
    torch.testing.assert_close(out.log_probs[:2], want)


def test_model_that_no_adapter_knows_gets_every_reason() -> None:
    with pytest.raises(UnsupportedError) as caught:
        logitless.make_forward(torch.nn.Linear(2, 2))
    assert "acme binds AcmeModel only" in str(caught.value)
    assert "a_module_that_nobody_has" in str(caught.value)


def test_import_loads_no_plugin() -> None:
    code = "import sys, logitless; print([n for n in sys.modules if n.startswith(('acme', 'shoddy', 'logitless_'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_doctor_tells_good_and_broken() -> None:
    done = cli("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    lines = {(line["name"], line["dist"]): line for line in report["backends"]}
    assert lines["acme", "acme-logprobs"]["ok"] is True
    assert lines["acme", "acme-logprobs"]["version"] == "1.2.3"
    for name, reason in REASONS.items():
        assert lines[name, "shoddy-logprobs"]["ok"] is False
        assert reason in lines[name, "shoddy-logprobs"]["reason"]
    assert {line["name"]: line["ok"] for line in report["adapters"]} == {"acme": True, "shoddy": False}


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [("acme", 0, "would run on acme"), ("shoddy-init", 1, "licence key"), ("no-such", 1, "no-such")],
)
def test_doctor_exits_by_the_backend_that_was_asked_for(name: str, code: int, said: str) -> None:
    done = cli("doctor", "--dtype", "float32", LOGITLESS_BACKEND=name)
    assert done.returncode == code
    assert said in (done.stdout or done.stderr)  # of a name that nobody knows there is nothing to report
    assert "Traceback" not in done.stderr


def test_command_of_a_third_party_runs() -> None:
    assert cli("acme-greet", "the world").stdout == "acme greets the world\n"


def test_broken_command_says_why_and_breaks_no_other() -> None:
    done = cli("shoddy-command")
    assert done.returncode != 0
    assert "a_module_that_nobody_has" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    listed = cli("--help")
    assert listed.returncode == 0
    assert "acme-greet" in listed.stdout
    assert "doctor" in listed.stdout
