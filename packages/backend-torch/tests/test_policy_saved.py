"""The single pass under hooks on what is saved for a backward: checkpoint's, save_on_cpu's; batched backwards."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from single_pass import D, LossFn, V, head_of, live, make, policy
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from logitless import TokenLogProbs, linear_policy_loss, reference
from logitless.errors import InvalidInputError, UnsupportedError


def under_checkpoint(loss_fn: LossFn, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one checkpointed region, with more after it so that its second run is whole; and the gradients."""
    tensors, labels, temperature = make()
    more = {"temperature": temperature, "backend": "torch", "workspace_bytes": 4_000}

    def region(hidden: Tensor) -> Tensor:
        loss, _ = linear_policy_loss(hidden.sin(), head_of(tensors, **options), labels, loss_fn, **more)
        return loss + hidden.exp().sum()

    loss = checkpoint(region, tensors["hidden"], use_reentrant=False)
    loss.backward()
    return loss.detach(), {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}


def test_in_a_checkpoint_each_run_sees_each_token_once() -> None:
    tensors, labels, temperature = make()
    loss_fn, seen = policy(labels), []

    def counted(scores: TokenLogProbs, index: Tensor) -> Tensor:
        seen.extend(index.tolist())
        return loss_fn(scores, index)

    loss, grads = under_checkpoint(counted)
    live_tokens = (labels != -100).nonzero().flatten().tolist()
    assert seen == 2 * live_tokens
    out, index = live(
        reference.linear_log_probs(tensors["hidden"].sin(), head_of(tensors), labels, temperature=temperature), labels
    )
    want = loss_fn(out, index).sum() + tensors["hidden"].exp().sum()
    torch.testing.assert_close(loss, want.detach())
    for name, grad in zip(tensors, torch.autograd.grad(want, list(tensors.values())), strict=True):
        torch.testing.assert_close(grads[name], grad)


def test_in_a_checkpoint_a_buffer_is_refused() -> None:
    _, labels, _ = make()
    with pytest.raises(UnsupportedError, match="fill the buffer again"):
        under_checkpoint(policy(labels), grad_buffer=torch.zeros(V, D))


@pytest.mark.parametrize("hooked", [False, True])
def test_a_loss_fn_may_not_change_what_its_gradient_needs(hooked: bool) -> None:
    def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
        ratio = scores.log_probs.exp()
        loss = ratio * 2.0
        ratio.add_(1.0)
        return loss

    tensors, labels, _ = make()
    with save_on_cpu() if hooked else nullcontext(), pytest.raises((RuntimeError, InvalidInputError), match="place"):
        linear_policy_loss(tensors["hidden"], head_of(tensors), labels, loss_fn, backend="torch")


def test_a_batch_of_backwards_is_refused() -> None:
    tensors, labels, _ = make()
    loss, _ = linear_policy_loss(tensors["hidden"], head_of(tensors), labels, policy(labels), backend="torch")
    with pytest.raises(UnsupportedError, match="one; take linear_log_probs"):
        torch.autograd.grad(loss, tensors["hidden"], torch.ones(2, dtype=torch.float64), is_grads_batched=True)
