"""Divergence of two heads: the teacher's logits are held in fp32, in the workspace, and the student's tiles read them.

The forward holds all columns of some tokens, as `logitless_triton.held` does; the backward makes blocks of some columns
again. The student's logits meet the teacher's as they are made (`logitless_triton.kl_products`). They are held only
where they are looked at again: for Jensen-Shannon's forward, which needs both normalisers first, and for what is kept.
Equals `logitless.reference.linear_kl`.

What the forward may keep is dz of the leading columns, for an upstream gradient of 1 and without k = ds/dz, each row
times a power of two (`_exponent`) that makes the most of float16's range, in which bfloat16's dz is kept: what is below
2^-29 of the largest that a row may hold loses digits there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import Gradients, Needs, Problem
from logitless_triton.candidates import normalisers
from logitless_triton.combine import combine
from logitless_triton.forward import scan
from logitless_triton.held import Held
from logitless_triton.kept import Kept
from logitless_triton.kl_kernels import FORWARD, JSD, REVERSE, divergence_dz_kernel, mixture_kernel
from logitless_triton.kl_products import divergences, dz_from_teacher
from logitless_triton.layout import DZ, LOGITS, Blocks, divergence_columns
from logitless_triton.rounding import scale_rows
from logitless_triton.rows import Rows, Work
from logitless_triton.sums import Sums, matmul, pass_scale
from logitless_triton.tile import LN2, TYPES, ceil_div

__all__ = ["kl_backward", "kl_forward"]

PARTS = 4  # of a block's tokens: for one at a time the backward holds the teacher's logits
KINDS = {"forward": FORWARD, "reverse": REVERSE, "jsd": JSD}


def kl_forward(
    student: Problem, teacher: Problem, *, direction: str, beta: float, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Divergences [n] and, for the backward, M and log2 S of both and what p's slope is relative to: [5, n].

    `kept` is filled with dz of the leading columns.
    """
    kind, keeps = KINDS[direction], kept is not None and kept.numel() > 0
    both = kind == JSD or keeps
    # Ranks must chunk alike, and what is kept is a rank's own.
    work, ref = _pair(student, teacher, both or student.group is not None)
    ref_held, held = Held(ref), Held(work) if both else None
    n, kept_dz = work.n, _kept_dz(work, kept, fill=True)
    value, stats = work.empty(n), work.empty(5, n)
    for start, stop in ref_held.spans():
        rows, ref_rows, span = work.rows(start, stop), ref.rows(start, stop), stats[:, start:stop]
        x, y = held.of(rows) if held is not None else None, ref_held.of(ref_rows)
        if held is not None and kind == JSD:
            value[start:stop] = _mixture((held, ref_held), (rows, ref_rows), span, beta)
        else:
            divergences(work, ref, (rows, ref_rows), (x, y), kind, span)
            value[start:stop] = span[4]
        if x is not None and keeps:
            out, up = kept_dz[start:stop], _exponent(span, kind).exp2()
            _dz(work, (x, y), (rows.f, ref_rows.f), span, up, out, kind, beta)
    return value, stats


def _pair(student: Problem, teacher: Problem, both: bool) -> tuple[Work, Work]:
    """With a workspace for each whose logits are held; and with the same tiles, whose maxima are compared."""
    share = student.workspace_bytes
    share = share // 2 if both else share - share // 32  # for the tiles' partial statistics
    work, ref = (Work(replace(p, workspace_bytes=share)) for p in (student, teacher))
    work.config = ref.config = min(work.config, ref.config, key=lambda config: config.forward.columns)
    return work, ref


def _normalisers(held: Held, rows: Rows) -> Tensor:
    """M and S [2, m] of all ranks, of a block of rows whose logits are then held."""
    work, p, parts = held.work, held.work.problem, held.scan(rows)
    own, unused = work.empty(3, parts.shape[2]), work.empty(0)
    combine(parts, unused, rows.f, own, unused, unused, p.vocab_size, finish=False)
    own = own[:2, : rows.count]
    return own if p.group is None else normalisers(gather_stacked(own, p.group), rows.f)


def _mixture(held: tuple[Held, Held], rows: tuple[Rows, Rows], stats: Tensor, beta: float) -> Tensor:
    """Jensen-Shannon's divergences [m] of a block of rows, and its stats [5, m]."""
    for place, (one, those) in enumerate(zip(held, rows, strict=True)):
        stats[place], total = _normalisers(one, those)
        stats[2 + place] = total.log2()
    sums = _sums(held, rows, stats, beta).mul_(LN2)
    stats[4] = sums[0]
    # The sum, not each of the two: next to equal heads their roundings are large, of opposite sign, and cancel.
    return (beta * sums[1] + (1.0 - beta) * sums[0]).clamp_(min=0.0)


def _bound(stats: Tensor, kind: int) -> Tensor:
    """[n] what |dz| of an upstream gradient of 1 cannot exceed, k aside: the largest p or q, 1/S; or KL + 1."""
    return torch.minimum(stats[2], stats[3]).neg().exp2() if kind == FORWARD else 1.0 + stats[4]


def _exponent(stats: Tensor, kind: int) -> Tensor:
    """[n] log2 of what rows of kept dz are multiplied by: float16 ends just below 2^16."""
    return 15.0 - _bound(stats, kind).log2().ceil()


def _kept_dz(work: Work, kept: Tensor | None, *, fill: bool = False) -> Tensor:
    """[n, columns] of a kept buffer; `fill` zeroes what no kernel will write."""
    dtype, valid = DZ[work.operand], work.head.valid
    if kept is None:
        return work.empty(work.n, 0, dtype=dtype)
    columns = divergence_columns(kept.shape[0], work.n, valid, work.operand)
    flat, size = kept.view(dtype), work.n * columns
    rows = flat[:size].view(work.n, columns)
    if fill:
        flat[size:].zero_()
        rows[:, valid:].zero_()
    return rows[:, :valid]


def _sums(held: tuple[Held, Held], rows: tuple[Rows, Rows], stats: Tensor, beta: float) -> Tensor:
    """What `mixture_kernel` sums, over all ranks' columns: [2, m]."""
    (mine, those), work = rows, held[0].work
    x, y = held[0].of(mine), held[1].of(those)
    sums, group = work.empty(2, mine.count), work.problem.group
    block_rows, block = (16, 512) if work.interpreted else (1, 2048)
    mixture_kernel[(ceil_div(mine.count, block_rows),)](
        x,
        y,
        mine.f,
        those.f,
        stats,
        sums,
        mine.count,
        work.head.valid,
        beta,
        x.stride(0),
        y.stride(0),
        stats.stride(0),
        ROWS=block_rows,
        BLOCK=block,
        num_warps=8,
    )
    return sums if group is None else gather_stacked(sums, group).sum(0)


class _Teacher:
    """The teacher's logits of a block of columns, made again for some tokens at a time; a plain head's by cuBLAS."""

    def __init__(self, work: Work, most: int, columns: int) -> None:
        self.work, self.rows, self.width = work, work.rows(0, work.n), work.config.forward.columns
        tiles, head = ceil_div(columns, self.width), work.head
        self.plain = head.bias is None and not (head.rank or head.softcap or head.negate)
        self.buffer = work.empty(most * tiles * self.width)
        self.parts = work.empty(3, tiles, ceil_div(most, 16) * 16)

    def logits(self, start: int, stop: int, begin: int, end: int) -> tuple[Rows, Tensor]:
        """Tokens begin to end, and x of columns start to stop: [m, C], or [m, whole tiles]."""
        rows, head, columns = self.rows.span(begin, end), self.work.head.columns(start, stop), stop - start
        if self.plain:
            stride = ceil_div(columns, 4) * 4  # 16 bytes, as descriptors need
            x = self.buffer[: rows.count * stride].view(rows.count, stride)[:, :columns]
            matmul(rows.hidden, head.weight.T, x)
            return rows, x
        tiles = ceil_div(columns, self.width)
        x = self.buffer[: rows.count * tiles * self.width].view(rows.count, -1)
        kept = Kept(LOGITS, columns, self.width, x)
        scan(_of_columns(self.work, start, stop), rows, kept, None, self.parts[:, :tiles])
        return rows, x


def _of_columns(work: Work, start: int, stop: int) -> Work:
    """The same work of some columns only."""
    part = copy.copy(work)
    part.head = work.head.columns(start, stop)
    return part


def kl_backward(
    student: Problem,
    teacher: Problem,
    stats: Tensor,
    grad: Tensor,
    needs: Needs,
    *,
    direction: str,
    beta: float,
    kept: Tensor | None = None,
) -> Gradients:
    """The student's gradients for upstream [n]; the products of those that nobody needs are not run."""
    work, ref, kind = Work(student), Work(teacher), KINDS[direction]
    sums = Sums(work, needs, None)
    if not work.n:
        return sums.finish()
    rows = work.rows(0, work.n)
    dz_scale = pass_scale(work, rows, (grad * _bound(stats, kind), None))
    sums.begin_pass(dz_scale)
    up = rows.f * grad * (work.head.slope * (1.0 - beta if kind == JSD else 1.0))
    up = up if dz_scale is None else up * dz_scale
    kept_dz = _kept_dz(work, kept)
    first = kept_dz.shape[1]
    if first:
        exponent = _exponent(stats, kind)

        def from_kept(columns: slice, tokens: slice, out: Tensor) -> None:
            scale_rows(kept_dz[tokens, columns], up[tokens], 1.0, exponent[tokens], -1.0, out)

        _products(rows, sums, sums.blocks(work.n, first, work.item), (0, first), from_kept)
    if first < work.head.valid:
        _from_logits(work, ref, rows, sums, stats, up, first, kind, beta)
    sums.end_pass(0, work.n)
    return sums.finish()


def _from_logits(
    work: Work,
    ref: Work,
    rows: Rows,
    sums: Sums,
    stats: Tensor,
    up: Tensor,
    first: int,
    kind: int,
    beta: float,
) -> None:
    """The columns from `first` on, whose logits are made again."""
    valid = work.head.valid
    blocks = sums.blocks(work.n, valid - first, 4 // PARTS + work.item, PARTS)  # the teacher's logits beside dz
    most = min(blocks.tokens, ceil_div(ceil_div(blocks.tokens, PARTS), 128) * 128)
    teacher = _Teacher(ref, most, blocks.columns)

    def from_logits(columns: slice, tokens: slice, out: Tensor) -> None:
        part = _of_columns(work, columns.start, columns.stop)
        for start in range(tokens.start, tokens.stop, most):
            stop = min(start + most, tokens.stop)
            ref_rows, y = teacher.logits(columns.start, columns.stop, start, stop)
            both, span = (rows.span(start, stop), ref_rows), slice(start, stop)
            dz = out[start - tokens.start : stop - tokens.start]
            dz_from_teacher(part, both, y, stats[:, span], up[span], dz, kind, beta)

    _products(rows, sums, blocks, (first, valid), from_logits)


def _products(
    rows: Rows,
    sums: Sums,
    blocks: Blocks,
    columns: tuple[int, int],
    make: Callable[[slice, slice, Tensor], None],
) -> None:
    """Add up the products of all tokens' dz of a range of columns, which `make` writes block by block."""
    spans, work = blocks.of_tokens(rows.count), sums.work
    buffer = work.empty(min(blocks.tokens, rows.count), blocks.columns, dtype=work.operand)
    for start, stop in blocks.of_columns(*columns):
        sums.open(start, stop, len(spans))
        for begin, end in spans:
            dz = buffer[: end - begin, : stop - start]
            make(slice(start, stop), slice(begin, end), dz)
            sums.add(dz, rows.span(begin, end), begin, start)
        sums.close(start, stop)


def _dz(
    work: Work,
    logits: tuple[Tensor, Tensor],
    factors: tuple[Tensor, Tensor],
    stats: Tensor,
    up: Tensor,
    out: Tensor,
    kind: int,
    beta: float,
) -> None:
    """dz of a block [m, C] from both heads' logits."""
    (count, columns), (block_rows, block) = out.shape, (16, 512) if work.interpreted else (4, 1024)
    divergence_dz_kernel[(ceil_div(count, block_rows), ceil_div(columns, block))](
        *logits,
        *factors,
        stats,
        up,
        out,
        count,
        columns,
        beta,
        *(x.stride(0) for x in logits),
        stats.stride(0),
        out.stride(0),
        ROWS=block_rows,
        BLOCK=block,
        OUT_TYPE=TYPES[out.dtype],
        SOFTCAP=work.head.softcap,
        KIND=kind,
        num_warps=8,
    )
