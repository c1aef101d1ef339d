"""Single pass: chunk by chunk of tokens, the logits once, the loss, the gradients: 6NDV operations in all.

A chunk is as many tokens as can keep all their columns within `workspace_bytes`; what is kept turns into dz in place.
If only a handful could, chunks are larger and their logits are made twice; so they are of kept sets, whose forward has
held them as they were. The kernels are the forward's, so log_probs have the same bits.
"""

from __future__ import annotations

from torch import Tensor

from logitless.types import Needs, PolicyResult, Problem, TokenLoss
from logitless_triton.backward import backward_pass
from logitless_triton.forward import Scores, forward_pass
from logitless_triton.held import Held, HeldScores, held_pass
from logitless_triton.kept import DIFFERENCES, Kept
from logitless_triton.layout import single_pass_chunk
from logitless_triton.rows import Work
from logitless_triton.sums import Sums

__all__ = ["policy_loss"]


def policy_loss(
    problem: Problem, *, entropy: bool, token_loss: TokenLoss, needs: Needs, grad_buffer: Tensor | None
) -> PolicyResult:
    """Scores of the n live tokens and the gradients of the summed token losses."""
    work = Work(problem)
    if work.truncated:
        return _of_kept_sets(work, entropy, token_loss, needs, grad_buffer)
    vocab, width = problem.vocab_size, work.config.forward.columns
    chunk, keep = single_pass_chunk(work.n, vocab, width, work.operand, problem.workspace_bytes)
    starts = range(0, work.n, chunk)
    sums = Sums(work, needs, grad_buffer, passes=len(starts), half=False)
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


def _of_kept_sets(
    work: Work, entropy: bool, token_loss: TokenLoss, needs: Needs, grad_buffer: Tensor | None
) -> PolicyResult:
    held, scores = Held(work), HeldScores(work)
    spans = held.spans()
    sums = Sums(work, needs, grad_buffer, passes=len(spans), half=False)
    for start, stop in spans:
        rows = work.rows(start, stop)
        held_pass(held, rows, scores, start)
        scores.finish(start, stop)
        entropy_m = scores.entropy[start:stop] if entropy else None
        grads = token_loss(scores.log_prob[start:stop], entropy_m, range(start, stop))
        if grads is None:
            sums.skip(start, stop)
        else:
            backward_pass(work, rows, Kept(), scores.stats[:, start:stop], grads, sums, start)
    return PolicyResult(scores.log_prob, scores.entropy if entropy else None, sums.finish())
