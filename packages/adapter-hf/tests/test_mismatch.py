from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from logitless.errors import InvalidInputError, NotFoundError
from logitless.mismatch import Mismatch, rollout_mismatch
from logitless_hf import mismatch as module
from logitless_hf.mismatch import plot_mismatch

HERE = torch.tensor([-1.0, -2.0, -0.5])
ENGINE = torch.tensor([-1.1, -2.0, -0.5])


def test_a_picture_of_the_tokens_that_count(tmp_path: Path) -> None:
    mask = torch.tensor([True, True, False])
    path = tmp_path / "mismatch.png"
    found = plot_mismatch(HERE, torch.tensor([-1.1, -2.0, torch.nan]), path, mask)
    assert found == rollout_mismatch(HERE[:2], ENGINE[:2])
    with_all, without = io.BytesIO(), io.BytesIO()
    plot_mismatch(HERE, ENGINE, with_all)
    plot_mismatch(HERE[:2], ENGINE[:2], without)
    assert path.read_bytes() == without.getvalue() != with_all.getvalue()
    assert without.getvalue().startswith(b"\x89PNG")


def test_statistics_of_a_whole_that_the_tensors_are_a_sample_of() -> None:
    whole = Mismatch(tokens=10**6)
    sample, alone = io.BytesIO(), io.BytesIO()
    assert plot_mismatch(HERE, ENGINE, sample, of=whole) is whole
    plot_mismatch(HERE, ENGINE, alone)
    assert sample.getvalue() != alone.getvalue()


@pytest.mark.parametrize("count", [0, 1])
def test_few_tokens(count: int) -> None:
    plot_mismatch(HERE[:count], HERE[:count], io.BytesIO())


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match="rollout_log_probs: got shape"):
        plot_mismatch(HERE, ENGINE[:2], io.BytesIO())
    monkeypatch.setattr(module, "can_plot", lambda: False)
    with pytest.raises(NotFoundError, match=r"pip install 'logitless-hf\[plot\]'"):
        plot_mismatch(HERE, ENGINE, io.BytesIO())
