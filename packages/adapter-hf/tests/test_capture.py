"""Hooks on the head: those of libraries and readers pass, and those that make something else of its result are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from logitless.errors import UnsupportedError
from logitless_hf import bind

Hook = Callable[..., Any]
CHANGES: dict[str, tuple[Hook, str]] = {
    "float": (lambda _m, _a, out: out.float(), "raised AttributeError"),
    "divide": (lambda _m, _a, out: out / 2, "raised TypeError"),
    "twice": (lambda _m, _a, out: out * 2, "made a tuple of 6 out of the scores, 3 in all"),
    "first": (lambda _m, _a, out: out[0], r"made a Tensor of \(2, 7\) out of the scores, 3 in all"),
    "none": (lambda _m, _a, out: tuple(None for _ in out), r"made None out of a score of shape \(2, 7\)"),
    "cut": (lambda _m, _a, out: (out[0][:1], *out[1:]), r"made tensor.* out of a score of shape \(2, 7\)"),
    "values": (lambda _m, _a, out: tuple(x if x is None else x * 2 for x in out), "changed the scores"),
}


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(5, 101, (2, 7), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", ["head", "LoRA's base"])
def test_a_hook_that_changes_what_the_head_gives_is_told(
    where: str, change: str, make_model: Any, tokens: Tensor
) -> None:
    model, (hook, did) = bind(make_model()), CHANGES[change]
    head = model.lm_head
    if where != "head":
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["lm_head"])).double()
    handle = head.register_forward_hook(hook)
    told = rf"a forward hook on the head \(<lambda>\) {did}.*, expected it to pass on.*so remove it; if this cannot"
    with pytest.raises(UnsupportedError, match=told):
        model(tokens, return_log_probs=True)
    handle.remove()
    assert model(tokens, return_log_probs=True).log_probs.shape == (2, 7)


def test_at_bind_it_is_told_in_the_same_words(make_model: Any) -> None:
    model = make_model()
    model.lm_head.register_forward_hook(lambda _m, _a, out: out / 2)
    with pytest.raises(UnsupportedError, match="a forward hook on the head .* raised TypeError") as caught:
        bind(model)
    assert str(caught.value).count("score the model from its own logits") == 1


@pytest.mark.parametrize("own", [True, False])
def test_hooks_that_read_copy_or_hang_a_node_pass(own: bool, make_model: Any, tokens: Tensor, check: Any) -> None:
    """A score that is NaN, of a token of its own, is no change either."""
    model = bind(make_model())
    expected = check.own_scores(model, check.shift(tokens), input_ids=tokens)
    seen = []
    model.lm_head.register_forward_hook(lambda _m, _a, out: seen.append(len(out)))
    if not own:
        model.lm_head.register_forward_hook(lambda _m, _a, out: [x if x is None else x.clone() for x in out])
    out = model(tokens, return_log_probs=True)
    torch.testing.assert_close(out.log_probs, expected[0])
    got = check.gradients(model, (out.log_probs, out.entropy))
    check.gradients_equal(got, check.gradients(model, expected), rtol=1e-6)
    assert seen == [3]
    model.model.norm.register_forward_hook(lambda _m, _a, out: out.index_fill(1, torch.tensor([2]), torch.nan))
    assert model(tokens, return_log_probs=True).log_probs.isnan().sum() == 2


def test_errors_of_what_runs_before_the_scores_stay(make_model: Any, tokens: Tensor) -> None:
    model = bind(make_model())

    def stop(*_: Any) -> None:
        raise ValueError("not today")

    model.lm_head.register_forward_pre_hook(stop)
    with pytest.raises(ValueError, match="^not today$"):
        model(tokens, return_log_probs=True)
