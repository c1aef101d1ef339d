"""The op: log-probabilities and entropies of labels, straight from hidden states and the head.

The logits `[tokens, vocab]` exist only in tiles, in the backend. The formulas and their gradients are derived in
docs/math.md; `logitless.reference` is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from logitless._call import make_call
from logitless._ops import scores
from logitless._validate import check_stats
from logitless.head import LMHead
from logitless.types import STATS, TokenLogProbs

__all__ = ["linear_log_probs"]


def linear_log_probs(
    hidden: Tensor,
    head: LMHead | Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = True,
    entropy_grad: bool = True,
    top_k: int | None = None,
    top_p: float | None = None,
    stats: Sequence[str] = (),
    ignore_index: int = -100,
    tp_group: Any = None,
    reduce_hidden_grad: bool = True,
    keep_bytes: int = 0,
    workspace_bytes: int = 512 << 20,
    validate: bool = True,
    backend: str | None = None,
) -> TokenLogProbs:
    """Log-probability and entropy of each label, [...] in nats, without the [..., V] logits.

    Equals, for a plain head: `log_p = (hidden @ weight.T / temperature).log_softmax(-1)`, then
    `log_p.gather(-1, labels[..., None])[..., 0]` and `-(log_p.exp() * log_p).sum(-1)`, in float32 from inputs of any
    float dtype (float64 from float64). Differentiable once, in hidden, weight, bias and the LoRA pairs.

    Where rollouts were sampled with top-k or top-p, pass the same: the scores are then those of the distribution that
    was sampled from, and ratios are not off by the mass that was cut away. `top_k` keeps the tokens with fewer than k
    of larger logit; `top_p`, of the softmax over those, the tokens with less than p in the tokens of larger logit, so
    the one that crosses p is kept. Tokens of equal logit at the border are all kept: vLLM and transformers do so for
    top-k, and keep some of them, by the order of their sort, for top-p; what they sampled is in the set either way. The
    gradient takes the set as constant. A label outside (engine and trainer differ by rounding, or the policy has moved
    on) gets the log-prob that it has when it alone is added to the set: finite, with its gradient, and near what it
    would be just inside; `-inf` would turn ratios into 0 and their difference into NaN. `stats=("is_kept",)` tells.

    Args:
        hidden: [..., D], float16, bfloat16, float32 or float64.
        head: a weight [V, D] or an `LMHead`.
        labels: [...] integers, the token that each hidden state predicts: already shifted. Or [..., K], K tokens to
            score for each hidden state in one pass: log_probs are [..., K], the entropy [...].
        temperature: a positive number, or a tensor of the tokens' shape.
        entropy: False leaves `out.entropy` None and does no work for it.
        entropy_grad: False gives the entropy detached, for logging, with a cheaper backward.
        top_k: how many of the most likely tokens the sampler kept; None, all.
        top_p: the mass that it kept, of the tempered distribution after top_k; None or 1, all.
        stats: names of further statistics, from the same pass and without gradient, for `out.stats`: "sum_sq_probs",
            Σp² [...] of the distribution that is scored; "mean_logit", the mean [...] of the tempered logits over the
            whole vocabulary; "is_argmax" and "is_kept", bool, whether a label has the largest logit, and whether it is
            in the kept set.
        ignore_index: tokens with this label cost nothing: outputs exactly 0.0, gradients exactly 0.
        tp_group: torch.distributed group over which the vocabulary is sharded. Its ranks are first compared, in one
            small gather (on a GPU, with `validate`): where their tokens or options differ, all of them raise.
        reduce_hidden_grad: with tp_group, whether every rank gets the whole d_hidden or its own partial sum.
        keep_bytes: memory that the forward may keep so that the backward recomputes less; of no use with a kept set,
            nor on the triton backend with several labels or stats.
        workspace_bytes: bound on temporary memory.
        validate: check labels and temperatures, at the price of one device-to-host copy. False: no copy and no
            compaction of ignored tokens; labels out of range give NaN.
        backend: name of a backend; None takes `use_backend`, LOGITLESS_BACKEND, or the best that can serve.

    Raises:
        InputTypeError, InvalidInputError: an argument is wrong; the message names it.
        NotFoundError, UnsupportedError: no backend can serve; the message holds the reason.
        CollectiveError: another rank of tp_group died, raised, or made no such call within the group's timeout.
    """
    wanted = check_stats(stats) if stats != () else ()
    call, needs_grad = make_call(
        hidden,
        head,
        labels,
        temperature=temperature,
        entropy=entropy,
        entropy_grad=entropy_grad,
        ignore_index=ignore_index,
        tp_group=tp_group,
        reduce_hidden_grad=reduce_hidden_grad,
        keep_bytes=keep_bytes,
        workspace_bytes=workspace_bytes,
        validate=validate,
        backend=backend,
        top_k=top_k,
        top_p=top_p,
        stats=wanted,
    )
    grad_buffer = head.grad_buffer if isinstance(head, LMHead) else None
    entropy_grad = entropy and entropy_grad and needs_grad
    keep_bytes = keep_bytes if needs_grad else 0
    log_probs, entropies, found = scores(call, entropy, entropy_grad, keep_bytes, grad_buffer, wanted)
    if hidden.ndim != 2:
        shape = hidden.shape[:-1]
        log_probs, entropies = log_probs.view(labels.shape), entropies.view(shape) if entropy else entropies
        if found is not None:
            found = {name: x.view(labels.shape if STATS[name] else shape) for name, x in found.items()}
    if not entropy:
        return TokenLogProbs(log_probs, None, found)
    return TokenLogProbs(log_probs, entropies if entropy_grad else entropies.detach(), found)
