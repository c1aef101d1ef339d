"""What a call allocates and which products it runs, seen from inside the custom ops as well."""

# mypy: disable-error-code="no-untyped-call"
# (TorchDispatchMode's own methods have no types)

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logitless import _ops, best, kl

__all__ = ["AllocationGuard", "MemoryTracker", "ProductCounter"]

OPS = (_ops.linear_log_probs_op, _ops._backward_op, kl.linear_kl_op, kl._backward_op, best.top_k_log_probs_op)


class _Within(TorchDispatchMode):
    """Sees every op; composite ops and our custom ops are opened, since a mode would take each of them for one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for op in OPS:
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
