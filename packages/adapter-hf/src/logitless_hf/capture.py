"""Two phases inside one forward: the family's own code with an empty head, then the real head with the op.

First a stand-in takes the head's slot: it keeps the hidden states and returns logits of width 0, so that whatever the
family does before and after the head runs unchanged and almost for nothing. Then the real head is called, through
`__call__` with the op as its forward, so that the hooks of FSDP, accelerate and users fire as they always do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from logitless.errors import UnsupportedError
from logitless_hf.head import Head, find_head, in_slot, lora_pairs, own_weight
from logitless_hf.sharding import HeadRows, Results, local_rows, opened, sealed

__all__ = ["OTHERWISE", "StandIn", "call_head", "capture", "check_linear", "emptied", "first_stream"]

OTHERWISE = "if this cannot be helped, score the model from its own logits"
AWRY = (AttributeError, IndexError, TypeError, ValueError)  # what code for logits ends in, given a tuple


class StandIn(nn.Module):
    """Takes the head's slot for one forward: keeps its input, and answers with `answer(hidden)`."""

    def __init__(self, head: Head, answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._linear = (head.linear,)  # in a tuple, so that it is not registered as a submodule
        self._answer = answer
        self.hidden: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias", "in_features", "out_features"):  # families read these of their head
            return getattr(self._linear[0], name)
        return super().__getattr__(name)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.hidden is not None:
            raise UnsupportedError("the model calls its head more than once in a forward")
        self.hidden = hidden
        return self._answer(hidden)


def first_stream(x: Tensor) -> Tensor:
    """Of [batch, streams, sequence, …], which a family that predicts several tokens ahead gives its head, the next
    token's; anything else as it is. The probe finds out whether the logits are of that stream."""
    return x[:, 0] if x.ndim == 4 else x


def _no_logits(hidden: Tensor) -> Tensor:
    return hidden.new_zeros(*hidden.shape[:-1], 0)


@contextmanager
def emptied(model: nn.Module, buffer: str | None) -> Iterator[None]:
    """Within the block, the buffer has no elements, so that it can be added to logits of width 0."""
    if buffer is None:
        yield
        return
    path, _, name = buffer.rpartition(".")
    buffers = model.get_submodule(path)._buffers
    before = buffers[name]
    buffers[name] = model.get_buffer(buffer)[..., :0]
    try:
        yield
    finally:
        buffers[name] = before


def capture(
    model: nn.Module, call: Callable[[], Any], answer: Callable[[Tensor], Tensor] = _no_logits
) -> tuple[Any, Tensor, Head]:
    """Run `call` with a stand-in for the model's head.

    Returns:
        What `call` returned, the hidden states [..., D] whose product the logits are, and the head.
    """
    head = find_head(model)
    stand_in = StandIn(head, answer)
    with in_slot(model, head.outer, stand_in):
        output = call()
    if stand_in.hidden is None:
        raise UnsupportedError(f"{type(model).__qualname__}: its forward never calls the head that it names")
    return output, first_stream(stand_in.hidden), head


def _call_as(module: nn.Module, function: Callable[..., Any], hidden: Tensor) -> Any:
    """`module(hidden)` with `function` in place of its forward, inside of the module's hooks."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    # torch.compile sees an instance's own forward from torch 2.13 on.
    if torch.compiler.is_compiling() and not any(hooks) and "_hf_hook" not in module.__dict__:
        return function(hidden)
    name = "_old_forward" if "_hf_hook" in module.__dict__ else "forward"  # accelerate's hook calls _old_forward
    before, over = module.__dict__.get(name), False

    def run(hidden: Tensor, **asked: Any) -> Any:
        nonlocal over
        result = function(hidden, **asked)
        over = True
        return result

    module.__dict__[name] = run
    try:
        return module(hidden)
    except AWRY as error:
        if over:
            raise _hooked(f"raised {type(error).__name__} ({error})", module) from error
        raise
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


def _hooked(did: str, *modules: nn.Module) -> UnsupportedError:
    hooks = [hook for module in dict.fromkeys(modules) for hook in module._forward_hooks.values()]
    names = ", ".join(getattr(hook, "__name__", type(hook).__name__) for hook in hooks)
    return UnsupportedError(
        f"a forward hook on the head ({names or 'of a library'}) {did}, expected it to pass on what it got, "
        "which in a scoring call is a tuple of scores, no logits. One that only reads logits may leave alone what is "
        f"no tensor; one that changes them is not served, so remove it; {OTHERWISE}"
    )


def _passed_on(head: Head, results: Any, exact: Results) -> Results:
    """The results after the head's hooks: they may hang nodes of their own on them, and make nothing else of them."""
    modules, count = (head.outer, head.linear), len(exact)
    if not isinstance(results, (list, tuple)) or len(results) != count:
        size = len(results) if isinstance(results, (list, tuple)) else tuple(getattr(results, "shape", ()))
        raise _hooked(f"made a {type(results).__qualname__} of {size} out of the scores, {count} in all", *modules)
    for x, own in zip(results, exact, strict=True):
        if x is own:
            continue
        if not isinstance(x, Tensor) or own is None or x.shape != own.shape:
            score = None if own is None else f"a score of shape {tuple(own.shape)}"
            raise _hooked(f"made {x!r:.60} out of {score}", *modules)
        if x.dtype != own.dtype or torch.compiler.is_compiling():  # the caller does not take those that are rounded
            continue
        # This waits for the device, where a hook gives other tensors than it got.
        if not torch.allclose(x, own.to(x.device), rtol=0, atol=0, equal_nan=True):
            raise _hooked("changed the scores", *modules)
    return tuple(results)


def check_linear(model: nn.Module, call: Callable[[], Any]) -> None:
    """Refuse a head with a forward of its own that is not linear, in the mode that the model is in.

    It is called within `call`, where FSDP has gathered it, on random vectors from small to large.
    """
    head = find_head(model)
    if not head.own:
        return

    @torch.no_grad()
    def compare(hidden: Tensor) -> Tensor:
        weight = own_weight(head.linear, hidden)
        wide = torch.promote_types(weight.dtype, torch.float32)
        rounding = max(torch.finfo(dtype).eps for dtype in (hidden.dtype, weight.dtype))
        if hidden.device.type != "cpu":
            rounding = max(rounding, 2**-10)  # its product may be in TF32
        drawn = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for size in (2.0**-4, 1.0, 2.0**8):
            x = (size * drawn).to(hidden)
            expected = x.to(wide) @ weight.T.to(wide)
            error = type(head.linear).forward(head.linear, x).to(wide) - expected
            bound = 16 * rounding * (x.to(wide).abs() @ weight.T.to(wide).abs())
            # And on the whole within the rounding of the outcome: activations in 8 bits are twice as far off.
            whole = (0.5 if rounding >= 2**-10 else 16) * rounding * float(expected.norm())
            if not ((error.abs() <= bound).all() and float(error.norm()) <= whole):
                raise UnsupportedError(
                    f"the head's own forward, of {type(head.linear).__qualname__}, is not linear in the hidden states "
                    "(it has an offset, a cap, a norm, dropout, a quantiser or the like); do that outside of the head"
                )
        return hidden.new_zeros(())

    def answer(hidden: Tensor) -> Tensor:
        _call_as(head.linear, compare, hidden)
        return _no_logits(hidden)

    capture(model, call, answer)


def call_head(head: Head, hidden: Tensor, op: Callable[..., Results]) -> Any:
    """`op(hidden, rows of the head, lora pairs)`, run as the forward of the head's own modules."""
    exact: list[Results] = []
    parallel = False

    def inner(hidden: Tensor, pairs: tuple[tuple[Tensor, Tensor], ...]) -> Any:
        nonlocal parallel
        if head.own:
            weight = own_weight(head.linear, hidden)
            wide = torch.promote_types(hidden.dtype, weight.dtype)  # such a forward may give its logits in float32
            rows, hidden = HeadRows(weight.to(wide), None), hidden.to(wide)
        else:
            rows = local_rows(head.linear, hidden, head.parallel, bool(head.adapters))
        parallel = isinstance(hidden, DTensor)
        exact.append(op(hidden.to_local() if isinstance(hidden, DTensor) else hidden, rows, pairs))
        return sealed(exact[0], hidden) if isinstance(hidden, DTensor) else exact[0]

    def outer(hidden: Tensor, **asked: Any) -> Any:
        if asked:  # PEFT's `adapter_names`, different adapters for each row
            raise UnsupportedError(f"the head is called with {', '.join(asked)}, which is not understood")
        pairs = lora_pairs(head, hidden)
        if head.linear is head.outer:
            return inner(hidden, pairs)
        return _call_as(head.linear, lambda hidden: inner(hidden, pairs), hidden)

    results = _call_as(head.outer, outer, hidden)
    results = opened(results, exact[0]) if parallel else _passed_on(head, results, exact[0])
    # A hook may hang a node of its own on the results, but not round them, as FSDP2's `output_dtype` does.
    pairs = zip(results, exact[0], strict=True)
    return tuple(own if x is not None and own is not None and x.dtype != own.dtype else x for x, own in pairs)
