"""While one thread scores, the head's slot holds a stand-in: a call from another is refused, not answered wrongly."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from logitless.errors import UnsupportedError
from logitless_hf import bind
from logitless_hf.traffic import passing


def in_a_thread(function: Any) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return found[0]


@pytest.mark.parametrize(
    ("held", "asked", "refused"), [(True, True, 1), (True, False, 1), (False, True, 1), (False, False, 0)]
)
def test_calls_that_meet(held: bool, asked: bool, refused: int, make_model: Any, tokens: Tensor) -> None:
    """`held` and `asked`: whether the call that is on, and the one that comes, score."""
    model = bind(make_model())
    call = {"return_log_probs": True} if asked else {}
    expected = model(tokens, **call)
    with passing(model, scoring=held):
        met = in_a_thread(lambda: model(tokens, **call))
    if refused:
        assert isinstance(met, UnsupportedError)
        assert "another thread is in a call of this model" in str(met)
    else:
        assert torch.equal(met.logits, expected.logits)
    after = in_a_thread(lambda: model(tokens, **call))  # nothing is left behind
    name = "log_probs" if asked else "logits"
    assert torch.equal(getattr(after, name), getattr(expected, name))


def test_one_thread_may_nest_and_a_failed_call_leaves_nothing(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model())
    with passing(model, scoring=True):
        assert model(tokens).logits.shape[-1] == 101
    with pytest.raises(ValueError, match="temperature"):
        model(tokens, return_log_probs=True, temperature=0.0)
    assert in_a_thread(lambda: model(tokens, return_log_probs=True)).log_probs.shape == tokens.shape


def test_other_models_are_free(make_model: Any, tokens: Tensor) -> None:
    one, other = bind(make_model()), bind(make_model())
    with passing(one, scoring=True):
        assert in_a_thread(lambda: other(tokens, return_log_probs=True)).log_probs.shape == tokens.shape
