"""Further statistics of a plain call: equal to full logits', and without a bit of difference to the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from full_logits import DEVICE, FULL, HAS_GPU, STATS, check, example_of, several, truth

import logitless
from logitless._call import make_call
from logitless._live import Live
from logitless._ops import linear_log_probs_op
from logitless.testing import Example

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("option", [{}, {"scale": -0.7, "bias": True}, FULL], ids=["plain", "negative", "full"])
def test_equals_the_logits_in_full(option: dict[str, Any]) -> None:
    check(example_of(**option))


@pytest.mark.parametrize("labels", [example_of, several], ids=["one", "several"])
@pytest.mark.parametrize("option", [{}, {**FULL, "softcap": None}, FULL], ids=["plain", "uncapped", "full"])
def test_a_scale_of_0_makes_ties_of_all(option: dict[str, Any], labels: Callable[..., Example]) -> None:
    example = labels(**option | {"scale": 0.0})
    got, want = example.run(backend="triton", stats=STATS), truth(example)
    assert got.scores.stats is not None
    assert want.scores.stats is not None
    for name, right in want.scores.stats.items():
        torch.testing.assert_close(got.scores.stats[name].double(), right.double(), msg=name)
    torch.testing.assert_close(got.scores.log_probs.double(), want.scores.log_probs, rtol=1e-6, atol=0)
    assert all(grad is not None and grad.count_nonzero() == 0 for grad in got.gradients.values())


def test_change_no_bits() -> None:
    example = example_of(30)
    want, got = example.run(backend="triton"), example.run(backend="triton", stats=STATS)
    assert torch.equal(got.scores.log_probs, want.scores.log_probs)
    assert torch.equal(got.scores.entropy, want.scores.entropy)
    assert all(torch.equal(got.gradients[name], want.gradients[name]) for name in want.gradients)
    assert list(got.scores.stats or ()) == list(STATS)
    assert set(example.score(backend="triton", stats=["mean_logit"]).stats or ()) == {"mean_logit"}


def test_of_tied_logits_each_is_the_largest() -> None:
    """Read off the tiles that the maximum is of, not off a dot of its own; at an offset that all logits share."""
    weight = torch.tensor([[10001.0], [10000.0], [10001.0]], device=DEVICE)
    hidden, labels = torch.ones(3, 1, device=DEVICE), torch.arange(3, device=DEVICE)
    stats = logitless.linear_log_probs(hidden, weight, labels, backend="triton", stats=STATS).stats
    assert stats is not None
    assert stats["is_argmax"].tolist() == [True, False, True]
    assert stats["is_kept"].all()
    assert stats["mean_logit"].tolist() == pytest.approx([10000.0 + 2 / 3] * 3, rel=1e-7)


@pytest.mark.parametrize("ignored", [False, True], ids=["all-live", "some-ignored"])
def test_of_a_forward_launched_before_the_host_knows(ignored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the answer is there at once; here it is hidden until it is asked for, as on a GPU."""
    if not HAS_GPU:
        hidden = property(lambda self: self._facts[0] if self._known is None else None)
        monkeypatch.setattr(Live, "on_device", hidden)
    check(example_of(ignored=ignored))
    check(example_of(ignored=ignored), top_k=5)


def test_nothing_is_kept_beside_held_logits() -> None:
    """What is kept has the size that a compiler was told; it stays empty, since logits are not held for a backward."""
    example = example_of()
    call, _ = make_call(
        example.hidden,
        example.head,
        example.labels,
        temperature=example.temperature,
        entropy=True,
        entropy_grad=True,
        ignore_index=-100,
        tp_group=None,
        reduce_hidden_grad=True,
        keep_bytes=1 << 16,
        workspace_bytes=1 << 20,
        validate=True,
        backend="triton",
        stats=STATS,
    )
    assert call.kept_shape(True, True, 1 << 16) != (0,)
    assert call.kept_shape(True, True, 1 << 16, STATS) == (0,)
    arguments = (*call.args, True, True, 1 << 16, list(STATS))
    torch.library.opcheck(linear_log_probs_op, arguments, test_utils=("test_faketensor",))
