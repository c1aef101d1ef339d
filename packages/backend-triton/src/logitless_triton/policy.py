"""Single pass: chunk by chunk of tokens, the logits once, the loss, the gradients: 6NDV operations in all.

A chunk is as many tokens as can keep all their columns within `workspace_bytes`; what is kept turns into dz in place.
If only a handful could, chunks are larger and their logits are made twice. The kernels are the forward's, so
log_probs have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.types import Needs, PolicyResult, Problem, TokenLoss
from logitless_triton.backward import backward_pass, one_block
from logitless_triton.forward import Scores, forward_pass, partials_rows
from logitless_triton.kept import DIFFERENCES, Kept
from logitless_triton.layout import bytes_per_row
from logitless_triton.rows import Work
from logitless_triton.sums import Sums
from logitless_triton.tile import ceil_div

__all__ = ["chunk_of", "policy_loss"]

FEWEST = 256  # tokens of a chunk with kept columns: below, d_weight is read and written too often


def chunk_of(work: Work) -> tuple[int, bool]:
    """Tokens of a chunk, a multiple of 16, and whether their columns are kept."""
    most = partials_rows(work)
    # The whole vocabulary, not this rank's: ranks with uneven shards must make the same chunks.
    fit = work.problem.workspace_bytes // bytes_per_row(work.problem.vocab_size, work.config.forward.columns, work.item)
    if work.operand != torch.float16 and fit >= min(FEWEST, work.n):
        return _even(work.n, min(most, max(16, fit // 128 * 128 if fit >= 128 else fit // 16 * 16))), True
    return most, False


def _even(n: int, most: int) -> int:
    """Chunks of nearly one size: as many as `most` makes of them."""
    each = ceil_div(n, max(1, ceil_div(n, most)))
    return min(most, max(16, ceil_div(each, 128) * 128))


def policy_loss(
    problem: Problem, *, entropy: bool, token_loss: TokenLoss, needs: Needs, grad_buffer: Tensor | None
) -> PolicyResult:
    """Scores of the n live tokens and the gradients of the summed token losses."""
    work = Work(problem)
    chunk, keep = chunk_of(work)
    starts = range(0, work.n, chunk)
    everything = Kept(DIFFERENCES, work.head.valid) if keep else Kept()
    whole = one_block(work, min(chunk, work.n), everything, consume=True)
    sums = Sums(work, needs, grad_buffer, passes=len(starts), whole=whole, half=False)
    scores = Scores(work, work.n)
    buffer: Tensor | None = None
    for start in starts:
        stop = min(start + chunk, work.n)
        rows, kept = work.rows(start, stop), Kept()
        if keep and any((needs.hidden, needs.weight, needs.bias, needs.lora_u, needs.lora_b)):
            if buffer is None:
                buffer = Kept.buffer(work, min(chunk, work.n))
            kept = Kept.of(work, buffer, stop - start, DIFFERENCES)
        forward_pass(work, rows, kept, scores, start)
        log_prob, entropy_m = scores.log_prob[start:stop], scores.entropy[start:stop]
        grads = token_loss(log_prob, entropy_m if entropy else None, range(start, stop))
        if grads is None:
            sums.skip(start, stop)
        else:
            backward_pass(work, rows, kept, scores.stats[:, start:stop], grads, sums, start, consume=True)
        del kept
    buffer = None  # before the gradients are rounded: that needs room for another d_weight
    return PolicyResult(scores.log_prob, scores.entropy if entropy else None, sums.finish())
