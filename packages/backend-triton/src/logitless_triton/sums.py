"""The gradients that are needed, summed in fp32 whatever the number of blocks, and rounded once.

d_weight is written where it will stand if one pass and one block of tokens make all of it; a caller's fp32 buffer is
added into; else it is summed in fp32, in a tile of its columns or, over the chunks of a single pass, whole.
In fp16 dz comes multiplied by a power of two: its products are divided by it before they are added to anything.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from logitless.collectives import all_reduce
from logitless.types import Gradients, Needs
from logitless_triton.layout import Blocks
from logitless_triton.rounding import rounded
from logitless_triton.rows import Rows, Work, part

__all__ = ["Sums", "matmul", "pass_scale"]


def matmul(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """`out = a @ b` or `out += a @ b`, summed in fp32 and stored in out's dtype.

    Where b is wider than a half-precision a (fp32 LoRA pairs beside a bf16 head), b enters as two half parts.
    """
    if not a.is_cuda:  # the interpreter: no out_dtype there, and no promise of fp32 sums
        wide = a.float() @ b.float()
        out.copy_(out + wide if accumulate else wide)
        return
    if a.dtype != b.dtype:
        high = b.to(a.dtype)
        matmul(a, high, out, accumulate=accumulate)
        b, accumulate = (b - high).to(a.dtype), True
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out, beta=1 if accumulate else 0)
    elif accumulate:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def pass_scale(work: Work, rows: Rows, grads: tuple[Tensor, Tensor | None]) -> Tensor | None:
    """The power of two that brings the largest dz near 2^8: small ones survive fp16, large ones fit. None: not fp16."""
    if work.operand != torch.float16 or not rows.count:
        return None
    k = rows.factor * abs(work.head.slope)
    sizes = [grad.abs().sum(1) if grad.ndim == 2 else grad for grad in grads if grad is not None]
    found = [(size * k).abs().nan_to_num(0.0, 0.0, 0.0).amax() for size in sizes]
    exponent = 8.0 - torch.stack(found).amax().clamp(min=1e-30).log2().ceil()
    return exponent.clamp(-60.0, 60.0).exp2()


class Sums:
    """Gradients as they grow: by blocks of columns, and within one by blocks of tokens.

    Args:
        passes: how many passes over the columns there will be, each for other tokens.
        whole: one product makes all of d_hidden, which is then rounded where it is written, if cuBLAS can: it writes
            the operands' dtype or float32.
        half: False leaves gradients of float16 inputs in float32, for a single pass whose upstream comes later.
    """

    def __init__(
        self,
        work: Work,
        needs: Needs,
        grad_buffer: Tensor | None,
        *,
        passes: int = 1,
        half: bool = True,
        whole: bool = False,
    ) -> None:
        p, self.work, self.grad_buffer, self.half = work.problem, work, grad_buffer, half
        self.needs, self.scaled = needs, work.operand == torch.float16
        self.whole = whole and p.group is None and p.hidden.dtype == work.operand and not self.scaled
        self.lora_u = None
        if needs.lora_u and p.lora_u is not None:
            self.lora_u = work.empty(work.n, p.lora_u.shape[1]).zero_()
        self.bias = None if not needs.bias or p.bias is None else work.empty(*p.bias.shape).zero_()
        self.lora_b = None if not needs.lora_b or p.lora_b is None else work.empty(*p.lora_b.shape).zero_()
        own_weight = needs.weight and grad_buffer is None
        self.direct = own_weight and passes == 1 and (half or p.weight.dtype != torch.float16)
        self.tile: Tensor | None = None
        self.dz_scale: Tensor | None = None
        self.passes = 0
        self.fresh = True  # no block of columns has been added to d_hidden in this pass
        self.first = True  # no block of tokens has been added to this block of columns

    @cached_property
    def hidden(self) -> Tensor | None:
        """[n, D]; made where it is first asked for, as d_weight is: a pass's first kernel need not wait for either."""
        if not self.needs.hidden:
            return None
        dtype = self.work.operand if self.whole else torch.float32
        hidden = self.work.empty(self.work.n, self.work.head.hidden_size, dtype=dtype)
        return hidden if self.work.head.valid else hidden.zero_()

    @cached_property
    def weight(self) -> Tensor | None:
        """[V, D], or the caller's buffer; 0 in rows that are padding."""
        if self.grad_buffer is not None or not self.needs.weight:
            return self.grad_buffer
        like, valid = self.work.head.weight, self.work.head.valid
        weight = self.work.empty(*like.shape, dtype=like.dtype if self.direct else torch.float32)
        if valid < like.shape[0]:
            weight[valid:] = 0
        return weight

    def tiled(self, token_blocks: int) -> bool:
        """Whether d_weight's columns are summed in a tile before they are put in place."""
        # In this order: a pass that needs no tile makes d_weight once d_hidden's product is launched.
        return (self.scaled or (self.direct and token_blocks > 1)) and self.weight is not None

    def blocks(self, tokens: int, columns: int, item: int, parts: int = 1) -> Blocks:
        """How dz of so many tokens and columns is cut, as `Blocks.plan` has it."""
        p, size, multiprocessors = self.work.problem, self.work.head.hidden_size, self.work.device.multiprocessors
        return Blocks.plan(
            *(tokens, columns, size, item, p.workspace_bytes),
            scaled=self.tiled(1),
            multiprocessors=multiprocessors,
            parts=parts,
        )

    def begin_pass(self, dz_scale: Tensor | None) -> None:
        """Before the blocks of columns of some tokens."""
        self.dz_scale, self.fresh, self.passes = dz_scale, True, self.passes + 1

    @property
    def unwritten(self) -> bool:
        """Whether this block of columns of d_weight holds nothing yet; a caller's buffer always holds something."""
        return self.grad_buffer is None and self.passes <= 1 and self.first

    def open(self, start: int, stop: int, token_blocks: int) -> None:
        """Before a block of columns."""
        if self.tiled(token_blocks):
            self.tile = self.work.empty(stop - start, self.work.head.hidden_size)
        self.first = True

    def add(self, dz: Tensor, rows: Rows, at: int, start: int) -> None:
        """The products of dz [m, C]: tokens from `at` on, columns from `start` on."""
        p, stop, token_stop = self.work.problem, start + dz.shape[1], at + rows.count
        if self.hidden is not None:
            matmul(dz, part(p.weight, start, stop), part(self.hidden, at, token_stop), accumulate=not self.fresh)
        if self.tile is not None:
            matmul(dz.T, rows.hidden, self.tile, accumulate=not self.first)
        elif self.weight is not None:
            matmul(dz.T, rows.hidden, part(self.weight, start, stop), accumulate=not self.unwritten)
        if self.bias is not None:
            self.bias[start:stop] += self._unscaled(dz.sum(0, dtype=torch.float32))
        if self.lora_u is not None and p.lora_b is not None:
            matmul(dz, p.lora_b[start:stop], self.lora_u[at:token_stop], accumulate=True)
        if self.lora_b is not None and rows.lora_u is not None:
            product = self.lora_b.new_empty(stop - start, rows.lora_u.shape[1])
            matmul(dz.T, rows.lora_u, product)
            self.lora_b[start:stop] += self._unscaled(product)
        self.first = False

    def close(self, start: int, stop: int) -> None:
        """After a block of columns: its tile is rounded once, or added to the whole."""
        self.fresh = False
        if self.tile is not None and self.weight is not None:
            if self.grad_buffer is None and self.passes <= 1:
                self.weight[start:stop] = self._unscaled(self.tile)
            else:
                self.weight[start:stop] += self._unscaled(self.tile)
            self.tile = None

    def end_pass(self, start: int, stop: int) -> None:
        """After all columns of tokens start to stop."""
        for rows in (self.hidden, self.lora_u):
            if rows is not None:
                self._unscaled(rows[start:stop])

    def skip(self, start: int, stop: int) -> None:
        """Instead of a pass: tokens start to stop get no gradient."""
        if self.hidden is not None:
            self.hidden[start:stop] = 0

    def _unscaled(self, x: Tensor) -> Tensor:
        """x, divided in place by dz's scale."""
        return x if self.dz_scale is None else x.div_(self.dz_scale)

    def finish(self) -> Gradients:
        """In the inputs' dtypes, exactly 0 at tokens that are not live, whole over the ranks."""
        p = self.work.problem
        if self.weight is not None and self.grad_buffer is None and not self.passes:
            self.weight.zero_()
        if p.group is not None and p.reduce_hidden_grad:
            for whole in (self.hidden, self.lora_u):
                if whole is not None:
                    all_reduce(whole, p.group)

        def rounding(sums: Tensor | None, like: Tensor | None, of_tokens: bool = False) -> Tensor | None:
            if sums is None or like is None:
                return None
            dtype = like.dtype if self.half or like.dtype != torch.float16 else torch.float32
            return _spread(sums, like, dtype, p.live) if of_tokens else rounded(sums, dtype)

        return Gradients(
            hidden=rounding(self.hidden, p.hidden, of_tokens=True),
            weight=rounding(self.weight, p.weight) if self.grad_buffer is None else None,
            bias=rounding(self.bias, p.bias),
            lora_u=rounding(self.lora_u, p.lora_u, of_tokens=True),
            lora_b=rounding(self.lora_b, p.lora_b),
        )


def _spread(sums: Tensor, like: Tensor, dtype: torch.dtype, live: Tensor | None) -> Tensor:
    """[n, ...] sums to [N, ...] gradients."""
    if live is None:
        return sums.to(dtype)
    return like.new_zeros(like.shape, dtype=dtype).index_copy_(0, live, sums.to(dtype))
