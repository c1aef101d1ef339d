"""Policy losses as plain functions of per-token scores: [n] in, each token's contribution [n] out, in nats.

They are what a `loss_fn` of `linear_policy_loss` returns, and work as well on the outputs of `linear_log_probs`. None
divides by a count: multiply by weights made once for the whole batch (`token_mean_weights`, `sequence_mean_weights`),
so that micro-batches and ranks add up to the batch's loss whatever they are cut into.

    weights = losses.token_mean_weights(batch.labels, total=losses.count_tokens(batches, group))
    def loss_fn(scores, i):
        return weights[i] * losses.ppo_clip(scores.log_probs, old_log_probs[i], advantages[i])

Where data-parallel gradients are averaged over ranks (DDP, FSDP), multiply the weights by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from logitless._segments import ramp
from logitless.collectives import all_reduce
from logitless.errors import InputTypeError, InvalidInputError
from logitless.packing import IGNORE_INDEX, PackedBatch

__all__ = [
    "cispo",
    "count_tokens",
    "entropy_bonus",
    "group_advantages",
    "grpo",
    "gspo",
    "gspo_token",
    "kl_to_reference",
    "ppo_clip",
    "sequence_mean_weights",
    "sequence_ratios",
    "token_mean_weights",
    "truncated_importance_weights",
]


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)


def ppo_clip(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Tensor:
    """`-min(r·A, clip(r, 1 − clip_low, 1 + clip_high)·A)` with `r = exp(log_probs − old_log_probs)`.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, eq. 7. With clip_high 0.28 it is
    the decoupled clip of Yu et al. 2025, "DAPO", arXiv:2503.14476, whose token-level normalisation is
    `token_mean_weights`. Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) is this with `group_advantages(scale=False)` and
    a constant weight.
    """
    return _clipped((log_probs - old_log_probs).exp(), advantages, clip_low, clip_high)


def grpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    ref_log_probs: Tensor | None = None,
    *,
    beta: float = 0.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """`ppo_clip + beta·k3` against a reference policy.

    Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300, eq. 3 and 4; its mean over each output and then over outputs is
    `sequence_mean_weights`, its advantages are `group_advantages`.
    """
    loss = ppo_clip(log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high)
    if beta == 0.0:
        return loss
    if ref_log_probs is None:
        raise InvalidInputError(f"ref_log_probs: got None with beta {beta}, expected the reference's log_probs [n]")
    return loss + beta * kl_to_reference(log_probs, ref_log_probs, "k3")


def cispo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float = 1.0, clip_high: float = 2.0
) -> Tensor:
    """`-sg(clip(r, 1 − clip_low, 1 + clip_high))·A·log_prob`: the weight is clipped, and every token keeps a gradient.

    MiniMax 2025, "MiniMax-M1", arXiv:2506.13585. `clip_low` 1.0 is no lower bound.
    """
    ratio = (log_probs.detach() - old_log_probs).exp().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -ratio * advantages * log_probs


def sequence_ratios(log_probs: Tensor, old_log_probs: Tensor, sequence: Tensor, count: int) -> Tensor:
    """[count] `exp(mean over a sequence's tokens of log_probs − old_log_probs)`; 1 for a sequence of no tokens.

    Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071, eq. 7.

    Args:
        log_probs: [n].
        old_log_probs: [n].
        sequence: [n] ints, the sequence that each token belongs to.
        count: number of sequences.
    """
    zeros = log_probs.new_zeros(count)
    total = zeros.index_add(0, sequence, log_probs - old_log_probs)
    tokens = zeros.index_add(0, sequence, torch.ones_like(log_probs))
    return (total / tokens.clamp(min=1.0)).exp()


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    count: int,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """`-min(s·A, clip(s)·A)` at each token, with s its sequence's ratio; weigh with `sequence_mean_weights`.

    arXiv:2507.18071, eq. 5; the clip's defaults are its section 5.1. It needs whole sequences, so it takes the outputs
    of `linear_log_probs` (with `keep_bytes`); inside `linear_policy_loss` use `gspo_token`.
    """
    ratio = sequence_ratios(log_probs, old_log_probs, sequence, count)
    return _clipped(ratio.index_select(0, sequence), advantages, clip_low, clip_high)


def gspo_token(
    log_probs: Tensor,
    sequence_ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """The token form of GSPO, `s = sg(sequence_ratio)·π/sg(π)`: the same value and, summed over a sequence, gradient.

    arXiv:2507.18071, eq. 13 and 14. `sequence_ratio` [n] is each token's sequence's, made before, without gradient.
    """
    ratio = sequence_ratio.detach() * (log_probs - log_probs.detach()).exp()
    return _clipped(ratio, advantages, clip_low, clip_high)


def entropy_bonus(entropy: Tensor, coefficient: float) -> Tensor:
    """`-coefficient·entropy`, to be added to a loss.

    Williams and Peng 1991, "Function optimization using connectionist reinforcement learning algorithms".
    """
    return -coefficient * entropy


def kl_to_reference(log_probs: Tensor, ref_log_probs: Tensor, estimator: Literal["k1", "k2", "k3"] = "k3") -> Tensor:
    """An estimate of KL(policy ‖ reference) from the sampled token alone.

    With `d = ref_log_probs − log_probs`: k1 is `-d` (unbiased), k2 `d²/2` (biased, low variance), k3
    `exp(d) − 1 − d` (unbiased, never negative). Schulman 2020, "Approximating KL Divergence". As losses, only k2 has
    the gradient of the KL in expectation over the policy's own samples; that of k1 is zero on average.
    """
    d = ref_log_probs - log_probs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return d.expm1() - d
    raise InvalidInputError(f"estimator: got {estimator!r}, expected 'k1', 'k2' or 'k3'")


def truncated_importance_weights(old_log_probs: Tensor, rollout_log_probs: Tensor, cap: float = 2.0) -> Tensor:
    """`min(exp(old_log_probs − rollout_log_probs), cap)`, detached: weighs tokens that another engine sampled.

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". `old_log_probs` are the
    trainer's own for the policy that sampled, `rollout_log_probs` the rollout engine's.
    """
    return (old_log_probs - rollout_log_probs).detach().exp().clamp(max=cap)


def group_advantages(rewards: Tensor, groups: Tensor, *, scale: bool = True, eps: float = 1e-6) -> Tensor:
    """[B] rewards minus their group's mean, over its standard deviation (n − 1) if `scale`.

    arXiv:2402.03300, section 4.1.2; `scale=False` is Dr. GRPO, arXiv:2503.20783. A group of one, or of equal rewards,
    gets exactly 0.

    Args:
        rewards: [B] numbers.
        groups: [B] ints, the same for all sequences that answer one prompt.

    Returns:
        [B] in the rewards' dtype, float32 for integers; computed in float32 or wider.
    """
    if rewards.ndim != 1 or groups.shape != rewards.shape:
        raise InvalidInputError(
            f"rewards, groups: got shapes {tuple(rewards.shape)} and {tuple(groups.shape)}, expected [B] and [B], one "
            "for each sequence"
        )
    if groups.is_floating_point():
        raise InputTypeError(f"groups: got {groups.dtype}, expected integers, one for each prompt")
    prompts, groups = torch.unique(groups, return_inverse=True)
    wide = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    zeros = wide.new_zeros(prompts.shape)
    # Off the least, since the mean of equal numbers may be rounded, and eps is no larger than what is then left.
    above = wide - zeros.scatter_reduce(0, groups, wide, "amin", include_self=False)[groups]
    sizes = zeros.index_add(0, groups, torch.ones_like(wide))
    centred = above - (zeros.index_add(0, groups, above) / sizes.clamp(min=1.0))[groups]
    if scale:
        variance = zeros.index_add(0, groups, centred.square()) / (sizes - 1.0).clamp(min=1.0)
        centred = centred / (variance.sqrt()[groups] + eps)
    return centred.to(rewards.dtype) if rewards.is_floating_point() else centred


def count_tokens(batches: Iterable[PackedBatch], group: Any = None) -> int:
    """How many labels are scored in all of a step's batches, over the ranks of a data-parallel group."""
    counts = [(batch.labels != IGNORE_INDEX).sum() for batch in batches]
    total = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64)
    if group is not None:
        all_reduce(total, group)
    return int(total)


def token_mean_weights(labels: Tensor, total: int, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """[T] 1/total at scored tokens, 0 elsewhere: the mean over all of a step's tokens (DAPO, arXiv:2503.14476).

    Args:
        labels: [T].
        total: the step's scored tokens, over micro-batches and ranks: `count_tokens`.
        ignore_index: what labels hold where nothing is scored.
    """
    return (labels != ignore_index).to(torch.float32) / max(total, 1)


def sequence_mean_weights(batch: PackedBatch, total: int) -> Tensor:
    """[T] 1/(tokens scored of the sequence · total): the mean over each sequence, then over `total` sequences (GRPO).

    Args:
        batch: a packed batch, whole, not a shard.
        total: the step's sequences, over micro-batches and ranks.
    """
    if batch.shard_of is not None:
        raise InvalidInputError(
            f"batch: got a shard {batch.shard_of}, which holds a part of each sequence's tokens, expected the batch "
            "that was sharded; bring its weights into the shard by shard.pack(batch.unpack(weights), of='prediction')"
        )
    scored = (batch.labels != IGNORE_INDEX).to(torch.float32)
    sequence, _ = ramp(batch.padded_lengths, scored.device)
    tokens = scored.new_zeros(len(batch.padded_lengths)).index_add(0, sequence, scored)
    return scored / (tokens[sequence].clamp(min=1.0) * max(total, 1))
