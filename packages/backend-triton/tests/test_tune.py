"""`logitless tune` in the interpreter: it measures, refuses what does not fit, and leaves the tiles as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from logitless.bench.candidates import Outcome
from logitless.cli import app
from logitless_triton import tune as module
from logitless_triton.config import Device, Tile, config_for, device_facts, trying

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = ["--tokens", "9", "--hidden", "16", "--vocab", "70", "--dtype", "float32", "--device", DEVICE, "--rounds", "1"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["tune", *arguments])


def test_times_tiles_beside_the_tables_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    other, wrong = Tile(32, 64, 16, 1, 1, 2), Tile(16, 16, 16, 1, 1, 1)
    monkeypatch.setattr(module, "candidates", lambda tile: [tile, other, wrong])
    inner = module._run

    def spy(inputs: Any, config: Any, backward: bool) -> Outcome:
        out = inner(inputs, config, backward)
        if wrong in (config.forward, config.dz):
            return Outcome(out.log_probs + 1.0, out.entropy)
        return out

    monkeypatch.setattr(module, "_run", spy)
    before = config_for(device_facts(torch.device(DEVICE)), torch.float32, 16)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a terminal of any stream
    monkeypatch.setenv("NO_COLOR", "1")
    done = run(*SMALL)
    assert done.exit_code == 0, done.output
    for stands in ("forward: compile and check", "forward: rounds", "dz: compile and check", "dz: rounds"):
        assert stands in done.stderr
        assert stands not in done.stdout
    assert "single pass: chunks of" in done.output
    assert "32×64×16" in done.output
    assert done.output.count("log_probs are off by 1 nats") == 2
    assert config_for(device_facts(torch.device(DEVICE)), torch.float32, 16) == before


def test_a_trial_ends_with_its_block_even_by_an_error() -> None:
    facts = device_facts(torch.device("cpu"))
    before = config_for(facts, torch.float32, 16)
    with pytest.raises(ZeroDivisionError), trying(config_for(facts, torch.bfloat16, 16)):
        _ = 1 / 0
    assert config_for(facts, torch.float32, 16) == before


def test_candidates_are_each_once_and_begin_with_the_tables() -> None:
    tile = Tile(128, 128, 64, warps=4, stages=3, per_sm=2)
    found = module.candidates(tile)
    assert found[0] == tile
    assert len(set(found)) == len(found) > 8


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dtype", "int8"], "--dtype: got 'int8'"),
        (["--tokens", "0"], "--tokens: got 0"),
        (["--device", ""], "--device: got ''"),
        (["--device", "cuda:99"], "--device: got 'cuda:99'"),
    ],
)
def test_bad_options(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1
    assert said in str(done.exception)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [64, 4096])
def test_tiles_have_sizes_that_triton_takes(capability: tuple[int, int], dtype: torch.dtype, hidden_size: int) -> None:
    chosen = config_for(Device(capability, 100), dtype, hidden_size)
    for tile in (chosen.forward, chosen.dz, chosen.held):
        for size in (tile.rows, tile.columns, tile.depth, tile.warps):
            assert size & (size - 1) == 0, tile
