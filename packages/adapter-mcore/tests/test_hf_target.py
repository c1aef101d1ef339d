"""A save that fails on one rank is told on all, and leaves the checkpoint that was there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from megatron_cpu import build_gpt, hf_model, parallel

from logitless.errors import CollectiveError
from logitless.testing.distributed import run_ranks
from logitless_mcore.weights import save_hf_weights


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def full(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_is_full(failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second file of a stage does not fit."""
    hf, real = hf_model("qwen2"), safetensors.torch.save_file

    def run(rank: int, size: int) -> str:
        with parallel(pp=size):
            gpt = build_gpt(hf.config)
            save_hf_weights(gpt, tmp_path, config=hf.config)
            before = contents(tmp_path)
            torch.distributed.barrier()
            written: list[Any] = []

            def second_fails(*args: Any, **options: Any) -> None:
                written.append(args)
                (full if rank == failing and len(written) > 1 else real)(*args, **options)

            monkeypatch.setattr(safetensors.torch, "save_file", second_fails)
            with pytest.raises((OSError, CollectiveError)) as caught:
                save_hf_weights(gpt, tmp_path, config=hf.config, file_bytes=40_000)
            torch.distributed.barrier()
            assert contents(tmp_path) == before
            return f"{type(caught.value).__name__}: {caught.value}"

    said = run_ranks(2, run)
    assert said[failing] == "OSError: [Errno 28] No space left on device"
    assert said[1 - failing].startswith(
        f"CollectiveError: save_hf_weights: rank {failing} (OSError: [Errno 28] No space"
    )


def test_an_index_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = hf_model("qwen2")

    def run(rank: int, size: int) -> str:
        with parallel(tp=size):
            gpt = build_gpt(hf.config)
            monkeypatch.setattr(Path, "write_text", full)
            with pytest.raises((OSError, CollectiveError)) as caught:
                save_hf_weights(gpt, tmp_path)
            return type(caught.value).__name__

    assert run_ranks(2, run) == ["OSError", "CollectiveError"]
