"""Single pass of the torch backend: chunk by chunk, logits once, loss, gradients.

A chunk is as many blocks of tokens as can keep their logits in what the tiles leave of `workspace_bytes`; if not even
one block can, its logits are made twice. Of a kept set one block's logits are held in any case. Blocks and tiles are
the forward's, so log_probs have the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from logitless.types import Needs, PolicyResult, Problem, TokenLoss
from logitless_torch.backward import Sums, backward_pass
from logitless_torch.forward import forward_pass
from logitless_torch.tiles import TilePlan

__all__ = ["policy_loss"]


def policy_loss(
    problem: Problem, *, entropy: bool, token_loss: TokenLoss, needs: Needs, grad_buffer: Tensor | None
) -> PolicyResult:
    """Scores of the n live tokens and the gradients of the summed token losses."""
    plan = TilePlan(problem)
    sums = Sums(plan, needs, grad_buffer, by_tile=False)
    # The whole vocabulary, not this rank's: ranks with uneven shards must make the same chunks.
    row_bytes = problem.vocab_size * plan.dtype.itemsize
    blocks = 1 if plan.held else plan.spare_bytes // (plan.rows * row_bytes)
    chunk = max(1, blocks) * plan.rows
    kept_bytes = min(chunk, plan.n) * problem.vocab_valid * plan.dtype.itemsize if blocks else 0
    kept = problem.hidden.new_empty(kept_bytes, dtype=torch.uint8)
    log_prob_n = problem.hidden.new_empty(plan.n, dtype=plan.dtype)
    entropy_n = torch.empty_like(log_prob_n) if entropy else None
    for start in range(0, plan.n, chunk):
        tokens = range(start, min(start + chunk, plan.n))
        span = slice(tokens.start, tokens.stop)
        out = forward_pass(plan, tokens, kept)
        log_prob_n[span] = out.log_probs
        if entropy_n is not None:
            entropy_n[span] = out.entropy if out.entropy is not None else 0.0
        grads = token_loss(out.log_probs, out.entropy if entropy else None, tokens)
        if grads is not None:
            backward_pass(plan, tokens, out.stats, kept, grads, sums)
    return PolicyResult(log_prob_n, entropy_n, sums.finish(half=False))
