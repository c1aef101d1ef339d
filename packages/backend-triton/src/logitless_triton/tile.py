"""What every multiplying kernel shares: the order of tiles, and one tile's raw logits.

    x = h·W + b + u·B              fp32, summed over D in steps of BK
    x = tanh(x·s/c)                with a softcap c: `pre` is s/c
    x = −x                         where the scale is negative and there is no softcap

Kernels go on with x·f, f = log2(e)·(c or |s|)/T of the row: log2 units, and f ≥ 0, so that the largest x is the
largest logit. Differences of x are taken before the multiplication by f: the maximum's own term is then exactly 2^0,
which is what keeps the digits of confident tokens.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = [
    "FLOOR",
    "LN2",
    "LOWEST",
    "TYPES",
    "ceil_div",
    "descriptor",
    "expm1",
    "factor_args",
    "factor_of",
    "halves",
    "place",
    "raw_logits",
    "tanh",
]

LN2 = 0.6931471805599453
TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
FLOOR = tl.constexpr(-16384.0)  # 2^FLOOR is 0, FLOOR fits fp16, and 0·FLOOR is 0 where 0·(−inf) would be NaN
LOWEST = tl.constexpr(-1.0e30)  # stands for −inf among tiles' maxima: −inf − −inf would be NaN


def ceil_div(a: int, b: int) -> int:
    """⌈a/b⌉."""
    return -(-a // b)


def factor_args(factor: Tensor | float) -> tuple[Tensor | None, float]:
    """f [m], or one number for all rows, as kernels take it: `f_ptr` and `f_value`."""
    return (None, factor) if isinstance(factor, float) else (factor, 0.0)


def descriptor(tensor, block: list[int]):
    """A TMA descriptor of a [rows, columns] tensor, or None where its layout allows none."""
    aligned = tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0
    if not aligned or tensor.stride(1) != 1 or tensor.stride(0) < tensor.shape[1]:
        return None
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


@triton.jit
def place(tile, num_m, num_n, GROUP: tl.constexpr):
    """Row tile and column tile of a tile's number: GROUP row tiles go through the columns side by side."""
    width = GROUP * num_n
    first = (tile // width) * GROUP
    size = min(num_m - first, GROUP)
    rest = tile % width
    return first + rest % size, rest // size


@triton.jit
def halves(x, BM: tl.constexpr, BN: tl.constexpr):
    """A tile's left and right half: stored one after the other, they take half the shared memory."""
    return tl.split(tl.permute(tl.reshape(x, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def raw_logits(
    h,
    w,
    bias,
    lora_u,
    lora_b,
    row0,
    col0,
    N,
    V,
    D,
    R,
    pre,
    stride_hn,
    stride_hd,
    stride_wv,
    stride_wd,
    stride_un,
    stride_ur,
    stride_bv,
    stride_br,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
    TMA: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NEGATE: tl.constexpr,
):
    """x of a tile [BM, BN]; columns at and beyond V hold anything."""
    rows = row0 + tl.arange(0, BM)
    cols = col0 + tl.arange(0, BN)
    acc = tl.full((BM, BN), 0.0, tl.float32)
    if TMA:
        for k in range((D + BK - 1) // BK):
            a = h.load([row0, k * BK])  # [BM, BK]
            b = w.load([col0, k * BK])  # [BN, BK]
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
    else:
        ks = tl.arange(0, BK)
        h_ptrs = h + rows.to(tl.int64)[:, None] * stride_hn + ks[None, :] * stride_hd
        w_ptrs = w + cols.to(tl.int64)[:, None] * stride_wv + ks[None, :] * stride_wd
        for k in range((D + BK - 1) // BK):
            inside = ks < D - k * BK
            a = tl.load(h_ptrs, mask=(rows < N)[:, None] & inside[None, :], other=0.0)
            b = tl.load(w_ptrs, mask=(cols < V)[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
            h_ptrs += BK * stride_hd
            w_ptrs += BK * stride_wd
    if lora_u is not None:
        rs = tl.arange(0, BR)
        for r in range(0, R, BR):
            inside = r + rs < R
            u_ptrs = lora_u + rows.to(tl.int64)[:, None] * stride_un + (r + rs)[None, :] * stride_ur
            b_ptrs = lora_b + cols.to(tl.int64)[:, None] * stride_bv + (r + rs)[None, :] * stride_br
            a = tl.load(u_ptrs, mask=(rows < N)[:, None] & inside[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=(cols < V)[:, None] & inside[None, :], other=0.0)
            if a.dtype != b.dtype or a.dtype == tl.float32:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + cols, mask=cols < V, other=0.0).to(tl.float32)[None, :]
    if SOFTCAP:
        acc = tanh(acc * pre)
    elif NEGATE:
        acc = -acc
    return acc


@triton.jit
def tanh(x):
    """Near 0 a polynomial: (1 − e)/(1 + e) alone would lose the small logits' digits."""
    magnitude = tl.abs(x)
    e = tl.exp2(magnitude * -2.8853900817779268)
    t = (1.0 - e) / (1.0 + e)
    square = x * x
    near = magnitude * (1.0 + square * (-0.33333333333 + square * (0.13333333333 - square * 0.05396825397)))
    t = tl.where(magnitude < 0.1, near, t)
    return tl.where(x < 0.0, -t, t)


@triton.jit
def factor_of(f_ptr, f_value, rows, inside, SIZE: tl.constexpr):
    """f of rows [SIZE]."""
    return tl.load(f_ptr + rows, mask=inside, other=0.0) if f_ptr is not None else tl.full((SIZE,), f_value, tl.float32)


@triton.jit
def expm1(x):
    """e^x − 1 for x ≤ 0: with a series near 0, where 1 − p of a confident label would lose its digits."""
    series = 0.0013888889 + x * (0.0001984127 + x * 2.48015873e-05)
    series = 1.0 + x * (0.5 + x * (0.16666667 + x * (0.041666668 + x * (0.008333334 + x * series))))
    return tl.where(x > -0.5, x * series, tl.exp2(x * 1.4426950408889634) - 1.0)
