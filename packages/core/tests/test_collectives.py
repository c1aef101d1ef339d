"""What ranks tell each other of a call, on one process: the gather is replaced by what the ranks would give."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from logitless import collectives
from logitless._live import FACTS, Live
from logitless.errors import InvalidInputError

CPU = torch.device("cpu")


def told(monkeypatch: pytest.MonkeyPatch, *ranks: dict[str, object]) -> str:
    """The error of ranks of these facts; "" where there is none."""
    texts: list[Any] = []

    def gathered(x: torch.Tensor, group: Any) -> torch.Tensor:
        texts.append(x)
        return torch.stack(texts)

    monkeypatch.setattr(collectives, "gather_stacked", gathered)
    said = ""
    for facts in ranks:
        try:
            collectives.check_agreement(None, facts, CPU, "group")
        except InvalidInputError as error:
            said = str(error)
    return said


@pytest.mark.parametrize("sequences", [2, 5000])
def test_facts_of_any_length_are_compared_whole(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch's lengths may be thousands of numbers, and differ in the last one alone."""
    lengths = tuple(range(100, 100 + sequences))
    same: dict[str, object] = {"scheme": "zigzag", "padded lengths": lengths}
    assert told(monkeypatch, same, dict(same)) == ""
    said = told(monkeypatch, same, {**same, "padded lengths": (*lengths[:-1], 7)})
    assert said.startswith("group: its ranks disagree (padded lengths: rank 0 has (100, 101")
    assert "scheme" not in said
    assert len(said) < 600


def test_all_facts_of_a_divergence_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long each of them is: two calls' facts, and what is asked of them."""
    long: dict[str, object] = {f"ref_hidden's dtype {i:02d}": "x" * 500 for i in range(45)}
    assert told(monkeypatch, long, {**long, "beta": 0.25}).startswith(
        "group: its ranks disagree (beta: rank 0 has None"
    )


def test_masks_of_as_many_tokens_are_told_apart() -> None:
    """Of five tokens two are live; the sums of their places are equal for some pairs of them: 1 + 4 and 2 + 3."""
    pairs = list(combinations(range(5), 2))
    masks = [torch.full((5,), -100).index_fill(0, torch.tensor(pair), 0) for pair in pairs]
    told = [Live(labels, None, -100, 7, validate=True)._of_rank().tolist() for labels in masks]
    assert len({facts[FACTS.index("checksum of labels")] for facts in told}) == len(pairs)
    assert {tuple(facts[:4]) for facts in told} == {(2, 0, 0, 0)}
