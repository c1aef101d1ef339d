"""Passes over a whole gradient at the memory's speed: PyTorch's own took three times as long on an H200."""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from logitless_triton.config import device_facts
from logitless_triton.tile import ceil_div, factor_args

__all__ = ["multiply_", "rounded", "scale_rows"]

BLOCK = 4096


@triton.jit
def _round_kernel(x, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < size).to(out.dtype.element_ty), mask=at < size)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype; x itself where it has it."""
    if x.dtype == dtype or not x.is_cuda or not x.is_contiguous():
        return x.to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        _round_kernel[(ceil_div(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit
def _multiply_kernel(x, factor, size, BLOCK: tl.constexpr):
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
            at = tl.cast(start, tl.int64) + tl.arange(0, BLOCK)
            value = tl.load(x + at, mask=at < size).to(tl.float32) * by
            tl.store(x + at, value.to(x.dtype.element_ty), mask=at < size)


def multiply_(x: Tensor, factor: Tensor) -> Tensor:
    """x times a factor [], in place; the factor is looked at on the device, and 1 costs nothing."""
    if not x.is_cuda or not x.is_contiguous():
        return x.mul_(factor)
    if x.numel():
        programs = min(ceil_div(x.numel(), BLOCK), 8 * device_facts(x.device).multiprocessors)
        _multiply_kernel[(programs,)](x, factor, x.numel(), BLOCK=BLOCK, num_warps=8)
    return x


@triton.jit
def _scale_rows_kernel(
    x, out, g_ptr, f_ptr, f_value, offset_ptr, D, stride_x, stride_xd, stride_out, stride_g, slope, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    f = tl.load(f_ptr + row) if f_ptr is not None else f_value
    s = -slope * tl.load(g_ptr + row * stride_g) * f * tl.exp2(-tl.load(offset_ptr + row))
    for start in range(0, D, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * stride_x + at * stride_xd, mask=at < D).to(tl.float32) * s
        tl.store(out + row * stride_out + at, value.to(out.dtype.element_ty), mask=at < D)


def scale_rows(x: Tensor, g: Tensor, f: Tensor | float, offset: Tensor, slope: float, out: Tensor) -> Tensor:
    """x [m, D] times s = −g·f·slope·2^(−offset) of each row, into out [m, D], which may be x."""
    if x.shape[0]:
        block = min(2048, triton.next_power_of_2(x.shape[1]))
        _scale_rows_kernel[(x.shape[0],)](
            x,
            out,
            g,
            *factor_args(f),
            offset,
            x.shape[1],
            *x.stride(),
            out.stride(0),
            g.stride(0),
            slope,
            BLOCK=block,
            num_warps=4,
        )
    return out
