"""Which of torch's transforms of functions are refused, by name, and not left to torch's words or to a wrong zero."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from logitless.errors import UnsupportedError
from logitless.head import LMHead

__all__ = ["refuse_transforms"]


def refuse_transforms(hidden: Tensor, head: LMHead, policy_loss: bool) -> None:
    """Raise under forward mode and torch.func's gradients; of a single pass, under all of torch.func."""
    if torch.compiler.is_compiling():
        return
    _refuse_forward_mode(hidden, head)
    around = {interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or ()}
    if torch._C._functorch.TransformType.Grad in around or (policy_loss and around):
        raise UnsupportedError(
            "torch.func's transforms (grad, vjp, jacrev; for linear_policy_loss vmap too) are not served; use "
            "loss.backward() or torch.autograd.grad, through torch.func.functional_call as well, or logitless.reference"
        )


def _refuse_forward_mode(hidden: Tensor, head: LMHead) -> None:
    """The ops have no forward-mode derivative, and torch would take it for zero."""
    if forward_ad._current_level < 0:
        return
    inputs = (hidden, head.weight, head.bias, *(x for pair in head.lora for x in pair))
    duals = [forward_ad.unpack_dual(x) for x in inputs if x is not None]  # type: ignore[no-untyped-call]
    if any(dual.tangent is not None for dual in duals):
        raise UnsupportedError(
            "forward-mode differentiation (torch.func.jvp, make_dual) is not served; use reverse mode, or "
            "logitless.reference"
        )
