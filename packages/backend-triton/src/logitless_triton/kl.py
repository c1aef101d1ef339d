"""Divergence of two heads: sweeps over both heads' tiles, and blocks of dz whose products are cuBLAS's.

A sweep makes the logits of both and reduces them (`logitless_triton.kl_kernels`); nothing [n, V] is held but a block of
dz, as in `logitless_triton.backward`. Equals `logitless.reference.linear_kl`.
"""

# mypy: ignore-errors
# (Triton has no types)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from logitless.collectives import gather_stacked
from logitless.types import Gradients, Needs, Problem
from logitless_triton.config import INTERPRETED, Tile
from logitless_triton.forward import TYPES
from logitless_triton.kl_kernels import DZ, FORWARD, JSD, MIXTURE, REVERSE, STATISTICS, fold_kernel, kl_kernel
from logitless_triton.layout import CHUNK, Blocks
from logitless_triton.rows import Head, Rows, Work
from logitless_triton.sums import Sums, pass_scale
from logitless_triton.tile import LN2, ceil_div, descriptor

__all__ = ["kl_backward", "kl_forward"]

KINDS = {"forward": FORWARD, "reverse": REVERSE, "jsd": JSD}


def _fold(parts: Tensor, f: Tensor, ref_f: Tensor, kind: int) -> Tensor:
    """[5, tiles, >= m] of tiles, or of ranks, to [5, m]."""
    out = parts.new_empty(5, f.shape[0])
    if f.shape[0]:
        strides = (parts.stride(0), parts.stride(1), out.stride(0))
        options = {"BLOCK": 16, "PART": 64, "KIND": kind, "num_warps": 4, "enable_fp_fusion": False}
        fold_kernel[(ceil_div(f.shape[0], 16),)](parts, f, ref_f, out, f.shape[0], parts.shape[1], *strides, **options)
    return out


def _tile(work: Work) -> Tile:
    """Two accumulators a program, so twice the warps of the plain forward's; not measured."""
    if work.device.capability == INTERPRETED or work.operand == torch.float32:
        return work.config.forward
    depth = 64 if work.device.has_tma else 32
    return Tile(128, 128, depth, warps=8, stages=3, per_sm=1)


@dataclass(frozen=True, slots=True)
class Pair:
    """Both problems as the kernels read them."""

    work: Work
    ref: Work
    kind: int
    beta: float

    @classmethod
    def of(cls, student: Problem, teacher: Problem, direction: str, beta: float) -> Pair:
        return cls(Work(student), Work(teacher), KINDS[direction], beta)

    @property
    def tile(self) -> Tile:
        """One that fits both operands."""
        tiles = (_tile(self.work), _tile(self.ref))
        return min(tiles, key=lambda tile: tile.rows * tile.columns)

    @property
    def chunk(self) -> int:
        """Tokens whose partial statistics fit the workspace; by all ranks' vocabulary, which must chunk alike."""
        p = self.work.problem
        fit = p.workspace_bytes // (20 * max(ceil_div(p.vocab_size, self.tile.columns), 1))
        return max(16, min(CHUNK, fit) // 16 * 16)

    def launch(
        self, mode: int, rows: Rows, ref_rows: Rows, heads: tuple[Head, Head], stats: Tensor, up: Tensor, out: Tensor
    ) -> None:
        """A tile of both heads each, into parts [5, tiles, >= m] or dz [m, C]."""
        (head, ref_head), tile = heads, self.tile
        tiles, programs = ceil_div(rows.count, tile.rows) * ceil_div(head.valid, tile.columns), self.work.programs(tile)
        if not tiles:
            return
        h, w, tma = _operands(self.work, rows, head, tile)
        ref_h, ref_w, ref_tma = _operands(self.ref, ref_rows, ref_head, tile)
        steps, ref_steps = (ceil_div(one.hidden_size, tile.depth) for one in heads)
        target = None
        if mode == DZ and self.work.device.has_tma:
            target = descriptor(out, [tile.rows, tile.columns // 2])
        kl_kernel[(min(programs, tiles),)](
            h,
            w,
            head.bias,
            rows.lora_u,
            head.lora_b,
            rows.f,
            ref_h,
            ref_w,
            ref_head.bias,
            ref_rows.lora_u,
            ref_head.lora_b,
            ref_rows.f,
            stats,
            up,
            out if target is None else target,
            rows.count,
            head.valid,
            head.hidden_size,
            head.rank,
            ref_head.hidden_size,
            ref_head.rank,
            head.pre,
            ref_head.pre,
            self.beta,
            *rows.hidden.stride(),
            *head.weight.stride(),
            *rows.lora_strides,
            *head.lora_strides,
            *ref_rows.hidden.stride(),
            *ref_head.weight.stride(),
            *ref_rows.lora_strides,
            *ref_head.lora_strides,
            stats.stride(0),
            out.stride(0),
            out.stride(1),
            BM=tile.rows,
            BN=tile.columns,
            BK=tile.depth,
            BR=_rank_block(head),
            REF_BR=_rank_block(ref_head),
            GROUP=tile.group,
            PROGRAMS=programs,
            FLATTEN=tma and ref_tma and steps == ref_steps and not (head.rank or ref_head.rank),
            TMA=tma,
            REF_TMA=ref_tma,
            WIDER=(steps > ref_steps) + 2 * (steps < ref_steps),
            OUT_TMA=target is not None,
            OUT_TYPE=TYPES[out.dtype],
            SOFTCAP=head.softcap,
            NEGATE=head.negate,
            REF_SOFTCAP=ref_head.softcap,
            REF_NEGATE=ref_head.negate,
            MODE=mode,
            KIND=self.kind,
            num_warps=tile.warps,
            num_stages=tile.stages,
            enable_fp_fusion=mode != STATISTICS,
        )


def _rank_block(head: Head) -> int:
    return max(16, min(64, triton.next_power_of_2(head.rank))) if head.rank else 16


def _operands(work: Work, rows: Rows, head: Head, tile: Tile):
    """hidden and weight as TMA descriptors where they can be, or the tensors."""
    if work.device.has_tma:
        h = descriptor(rows.hidden, [tile.rows, tile.depth])
        w = descriptor(head.weight[: head.valid], [tile.columns, tile.depth])
        if h is not None and w is not None:
            return h, w, True
    return rows.hidden, head.weight, False


def kl_forward(student: Problem, teacher: Problem, *, direction: str, beta: float) -> tuple[Tensor, Tensor]:
    """Divergences [n] and, for the backward, M and log2 S of both and what p's slope is relative to: [5, n]."""
    pair = Pair.of(student, teacher, direction, beta)
    work, n = pair.work, pair.work.n
    value, stats = work.empty(n), work.empty(5, n)
    for start in range(0, n, pair.chunk):
        stop = min(start + pair.chunk, n)
        value[start:stop] = _score(pair, work.rows(start, stop), pair.ref.rows(start, stop), stats[:, start:stop])
    return value, stats


def _score(pair: Pair, rows: Rows, ref_rows: Rows, stats: Tensor) -> Tensor:
    """Divergences [m] of a block of rows; fills their statistics."""
    work, group, heads = pair.work, pair.work.problem.group, (pair.work.head, pair.ref.head)

    def sweep(mode: int, kind: int) -> Tensor:
        tiles = ceil_div(work.head.valid, pair.tile.columns)
        # A stride that 16 divides, whatever m is, as in the forward.
        parts = work.empty(5, tiles, ceil_div(rows.count, 16) * 16)
        if mode == MIXTURE:
            parts.zero_()  # at maxima of 0 the fold is a sum
        pair.launch(mode, rows, ref_rows, heads, stats, stats, parts)
        own = _fold(parts, rows.f, ref_rows.f, kind)
        return own if group is None else _fold(gather_stacked(own, group).transpose(0, 1), rows.f, ref_rows.f, kind)

    stats.copy_(sweep(STATISTICS, pair.kind))
    sums, gap = stats[2:4].clone(), stats[4].clone()
    sums_log = sums.log2()
    stats[2:4] = sums_log
    if pair.kind == JSD:
        shares = sweep(MIXTURE, REVERSE)[2:4].clamp_(min=0.0) * LN2
        stats[4] = shares[0]
        return pair.beta * shares[1] + (1.0 - pair.beta) * shares[0]
    weigh = 1 if pair.kind == FORWARD else 0
    value = ((gap / sums[weigh] + (sums_log[1 - weigh] - sums_log[weigh])) * LN2).clamp_(min=0.0)
    stats[4] = value
    return value


def kl_backward(
    student: Problem,
    teacher: Problem,
    stats: Tensor,
    grad: Tensor,
    needs: Needs,
    *,
    direction: str,
    beta: float,
) -> Gradients:
    """The student's gradients for upstream [n]; the products of those that nobody needs are not run."""
    pair = Pair.of(student, teacher, direction, beta)
    work = pair.work
    sums = Sums(work, needs, None)
    if not work.n:
        return sums.finish()
    rows, ref_rows = work.rows(0, work.n), pair.ref.rows(0, work.n)
    # |p·(ln(p/q) − KL)| is at most KL + 1: what float16's dz must have room for.
    bound = grad if pair.kind == FORWARD else grad * (1.0 + stats[4])
    dz_scale = pass_scale(work, rows, (bound, None))
    sums.begin_pass(dz_scale)
    up = rows.f * grad * (work.head.slope * (1.0 - beta if pair.kind == JSD else 1.0))
    up = up if dz_scale is None else up * dz_scale
    valid = work.head.valid
    blocks = Blocks.plan(work.n, valid, work.head.hidden_size, work.item, student.workspace_bytes, sums.tiled(1))
    spans = blocks.of_tokens(work.n)
    buffer = work.empty(min(blocks.tokens, work.n), blocks.columns, dtype=work.operand)
    for start, stop in blocks.of_columns(0, valid):
        sums.open(start, stop, len(spans))
        heads = (work.head.columns(start, stop), pair.ref.head.columns(start, stop))
        for begin, end in spans:
            span, dz = rows.span(begin, end), buffer[: end - begin, : stop - start]
            pair.launch(DZ, span, ref_rows.span(begin, end), heads, stats[:, begin:end], up[begin:end], dz)
            sums.add(dz, span, begin, start)
        sums.close(start, stop)
    sums.end_pass(0, work.n)
    return sums.finish()
