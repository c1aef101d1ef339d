"""What a call allocates and which products it runs, seen from inside the custom ops as well."""

# mypy: disable-error-code="no-untyped-call"
# (TorchDispatchMode's own methods have no types)

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logitless import _ops, best, kl

__all__ = ["AllocationGuard", "LogitsGuard", "MemoryTracker", "ProductCounter", "poisoned"]

OPS = (_ops.linear_log_probs_op, _ops._backward_op, kl.linear_kl_op, kl._backward_op, best.top_k_log_probs_op)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within the block, memory that nobody has written yet reads as NaN, and as the largest number of an integer dtype.

    `torch.empty` and whatever else allocates without filling does it, in backward and inside of PyTorch's own kernels
    too: a result that depends on what lay there before shows at once, where else it would once in a while.
    """
    settings: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*determin")  # of ops that have no deterministic form
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            settings.fill_uninitialized_memory = before[2]


class _Within(TorchDispatchMode):
    """Sees every op; composite ops and our custom ops are opened, since a mode would take each of them for one."""

    opened: tuple[Any, ...] = OPS

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for op in self.opened:
            if func is op._opoverload:
                with self:
                    return op._init_fn(*args, **kwargs)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        return self.see(func, args, kwargs)

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class MemoryTracker(_Within):
    """Counts the bytes of storages made within the block: `live_bytes` now, `peak_bytes` and `largest_bytes` so far.

    What a caller still holds counts too, so a test allows for outputs and gradients. Scratch memory inside of a
    PyTorch kernel, and buffers that a kernel of another language makes, are not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = self.largest_bytes = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def _free(self, size: int) -> None:
        self.live_bytes -= size

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._known.add(tensor.untyped_storage())
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage in self._known:
                continue
            self._known.add(storage)
            size = storage.nbytes()
            self.allocated(func, tensor, size)
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self.largest_bytes = max(self.largest_bytes, size)
            weakref.finalize(storage, self._free, size)
        return result

    def allocated(self, func: Any, tensor: Tensor, size: int) -> None:
        """A hook for subclasses."""


class AllocationGuard(MemoryTracker):
    """Raises at any single allocation of more than `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes

    def allocated(self, func: Any, tensor: Tensor, size: int) -> None:
        """Raise AssertionError, naming the op and the shape."""
        if size > self.limit_bytes:
            raise AssertionError(
                f"{func} made {tuple(tensor.shape)} {tensor.dtype}: {size} bytes, allowed {self.limit_bytes}"
            )


class LogitsGuard(MemoryTracker):
    """Raises where something else than the op makes a tensor as large as the logits of `n_tokens` tokens.

    That is one with `vocab_size` as one of its dimensions and at least that many rows of it. What is made inside of
    the op is bounded by its `workspace_bytes`, and the backend's affair.
    """

    opened = ()

    def __init__(self, n_tokens: int, vocab_size: int) -> None:
        super().__init__()
        self.n_tokens, self.vocab_size = n_tokens, vocab_size

    def allocated(self, func: Any, tensor: Tensor, size: int) -> None:
        """Raise AssertionError, naming the op and the shape."""
        if self.vocab_size in tensor.shape and tensor.numel() >= self.n_tokens * self.vocab_size:
            raise AssertionError(
                f"{func} made {tuple(tensor.shape)} {tensor.dtype}: logits of {self.n_tokens} tokens or more"
            )


_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "_scaled_mm", "mv", "addmv", "addmv_"}


class ProductCounter(_Within):
    """Counts matrix products (`calls`) and their multiply-adds twice over (`flops`)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.flops = 0

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.name.removeprefix("aten::") in _PRODUCTS:
            matrices = [tensor for tensor in _tensors(args) if tensor.ndim >= 2]
            a, b = matrices[-2:] if len(matrices) > 1 else (matrices[0], matrices[0][..., :1])
            self.calls += 1
            self.flops += 2 * a.numel() * b.shape[-1]
        return func(*args, **kwargs)
