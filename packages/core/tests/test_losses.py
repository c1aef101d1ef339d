"""Each loss equals what its paper says, from full logits: values and gradients, whole and in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from logitless import PackedBatch, TokenLogProbs, losses
from logitless.errors import InputTypeError, InvalidInputError
from logitless.testing.distributed import run_ranks

N, V = 12, 7
SEQUENCE = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2])
COUNT = 4  # the last sequence has no token


def draw() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(N, V, generator=g, dtype=torch.float64)
    labels = torch.randint(V, (N,), generator=g)
    log_probs = logits.log_softmax(-1)[torch.arange(N), labels]
    noise = torch.randn(N, generator=g, dtype=torch.float64)
    return {
        "logits": logits,
        "labels": labels,
        "old": log_probs + 0.3 * noise,
        "ref": log_probs - 0.2 * noise,
        "advantages": torch.randn(N, generator=g, dtype=torch.float64),
    }


def scores(logits: Tensor, labels: Tensor) -> TokenLogProbs:
    log_p = logits.log_softmax(-1)
    return TokenLogProbs(log_p[torch.arange(N), labels], -(log_p.exp() * log_p).sum(-1))


def ppo_by_cases(r: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    """The clip written out: no gradient where the ratio has already gone too far in the advantage's direction."""
    stopped = torch.where(a > 0, r > 1 + high, r < 1 - low)
    bound = torch.where(a > 0, torch.full_like(r, 1 + high), torch.full_like(r, 1 - low))
    return -torch.where(stopped, bound.detach(), r) * a


def per_sequence(s: Tensor, x: dict[str, Tensor]) -> Tensor:
    means = [(s - x["old"])[i == SEQUENCE].mean() if (i == SEQUENCE).any() else s.new_zeros(()) for i in range(COUNT)]
    return torch.stack(means).exp()[SEQUENCE]


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "ppo": (
        lambda s, x: losses.ppo_clip(s.log_probs, x["old"], x["advantages"]),
        lambda s, x: ppo_by_cases((s.log_probs - x["old"]).exp(), x["advantages"], 0.2, 0.2),
    ),
    "dapo": (
        lambda s, x: losses.ppo_clip(s.log_probs, x["old"], x["advantages"], clip_high=0.28),
        lambda s, x: ppo_by_cases((s.log_probs - x["old"]).exp(), x["advantages"], 0.2, 0.28),
    ),
    "grpo": (
        lambda s, x: losses.grpo(s.log_probs, x["old"], x["advantages"], x["ref"], beta=0.1),
        lambda s, x: (
            ppo_by_cases((s.log_probs - x["old"]).exp(), x["advantages"], 0.2, 0.2)
            + 0.1 * ((x["ref"] - s.log_probs).exp() - (x["ref"] - s.log_probs) - 1)
        ),
    ),
    "cispo": (
        lambda s, x: losses.cispo(s.log_probs, x["old"], x["advantages"], clip_high=0.1),
        lambda s, x: -(s.log_probs - x["old"]).exp().detach().clamp(0, 1.1) * x["advantages"] * s.log_probs,
    ),
    "gspo": (
        lambda s, x: losses.gspo(s.log_probs, x["old"], x["advantages"], SEQUENCE, COUNT, clip_low=0.05, clip_high=0.1),
        lambda s, x: ppo_by_cases(per_sequence(s.log_probs, x), x["advantages"], 0.05, 0.1),
    ),
    "gspo token": (
        lambda s, x: losses.gspo_token(
            s.log_probs,
            losses.sequence_ratios(s.log_probs.detach(), x["old"], SEQUENCE, COUNT)[SEQUENCE],
            x["advantages"],
            clip_low=0.05,
            clip_high=0.1,
        ),
        lambda s, x: ppo_by_cases(
            per_sequence(s.log_probs.detach(), x) * (s.log_probs - s.log_probs.detach()).exp(),
            x["advantages"],
            0.05,
            0.1,
        ),
    ),
    "entropy": (lambda s, x: losses.entropy_bonus(s.entropy, 0.01), lambda s, x: -0.01 * s.entropy),
    "k1": (lambda s, x: losses.kl_to_reference(s.log_probs, x["ref"], "k1"), lambda s, x: s.log_probs - x["ref"]),
    "k2": (
        lambda s, x: losses.kl_to_reference(s.log_probs, x["ref"], "k2"),
        lambda s, x: (s.log_probs - x["ref"]) ** 2 / 2,
    ),
    "k3": (
        lambda s, x: losses.kl_to_reference(s.log_probs, x["ref"]),
        lambda s, x: (x["ref"] - s.log_probs).exp() - 1 - (x["ref"] - s.log_probs),
    ),
    "importance": (
        lambda s, x: losses.truncated_importance_weights(s.log_probs, x["ref"], 1.1) * s.log_probs,
        lambda s, x: (s.log_probs - x["ref"]).exp().detach().clamp(max=1.1) * s.log_probs,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_its_formula(name: str) -> None:
    ours, formula = CASES[name]
    x = draw()
    logits = x["logits"].requires_grad_()
    upstream = torch.randn(N, dtype=torch.float64)
    got, expected = ours(scores(logits, x["labels"]), x), formula(scores(logits, x["labels"]), x)
    assert got.shape == (N,)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(got, logits, upstream), torch.autograd.grad(expected, logits, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gspo_token_form_has_the_sequence_form_gradient() -> None:
    x = draw()
    x["advantages"] = torch.randn(COUNT, dtype=torch.float64)[SEQUENCE]  # one for each sequence, as in GSPO
    logits = x["logits"].requires_grad_()
    tokens = torch.bincount(SEQUENCE, minlength=COUNT)[SEQUENCE]
    both = []
    for name in ("gspo", "gspo token"):
        value = (CASES[name][0](scores(logits, x["labels"]), x) / tokens).sum()
        both.append((value.detach(), torch.autograd.grad(value, logits)[0]))
    torch.testing.assert_close(both[0], both[1], rtol=1e-10, atol=1e-12)


def test_gspo_token_form_gives_the_ratio_no_gradient() -> None:
    ratio = torch.full((3,), 1.0, requires_grad=True)
    log_probs = torch.zeros(3, requires_grad=True)
    loss = losses.gspo_token(log_probs, ratio, torch.ones(3)).sum()
    assert torch.autograd.grad(loss, (log_probs, ratio), allow_unused=True)[1] is None


def test_k3_keeps_its_digits_where_the_policies_are_close() -> None:
    """exp(d) − 1 − d would be off by a rounding of 1, which is more than the whole."""
    d = torch.tensor([1e-4, -1e-4])
    k3 = losses.kl_to_reference(torch.zeros(2), d)
    torch.testing.assert_close(k3.double(), d.double().square() / 2, rtol=1e-2, atol=0.0)


def test_clip_stops_the_gradient_and_only_there() -> None:
    log_probs = torch.tensor([0.5, 0.5, -0.5, -0.5, 0.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    (grad,) = torch.autograd.grad(losses.ppo_clip(log_probs, torch.zeros(5).double(), advantages).sum(), log_probs)
    assert (grad == 0).tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("scale", [True, False])
def test_group_advantages(scale: bool) -> None:
    rewards = torch.tensor([1.0, 3.0, 2.0, 5.0, 5.0, 7.0])
    groups = torch.tensor([0, 0, 0, 2, 2, 1])
    got = losses.group_advantages(rewards, groups, scale=scale)
    expected = torch.tensor([-1.0, 1.0, 0.0, 0.0, 0.0, 0.0])  # standard deviation 1, 0, and of one
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_group_of_equal_rewards_gets_no_advantage(dtype: torch.dtype) -> None:
    """Seven times 0.7 has a mean off by a rounding, of which a division by eps made 0.06, in bfloat16 0.9."""
    rewards = torch.tensor([0.7] * 7 + [0.1] * 9 + [-3e4, 3e4]).to(dtype)
    got = losses.group_advantages(rewards, torch.tensor([0] * 7 + [1] * 9 + [2] * 2))
    assert got.dtype == dtype
    assert not got[:16].any()
    torch.testing.assert_close(got[16:].float(), torch.tensor([-1.0, 1.0]) * 0.5**0.5, rtol=4e-3, atol=0)


def test_groups_are_any_integers() -> None:
    """Numbers or hashes of prompts: nothing is made as long as the largest."""
    rewards, groups = torch.tensor([1.0, 3.0, 2.0, 5.0]), torch.tensor([-7, -7, 2**62, 2**62])
    want = losses.group_advantages(rewards, torch.tensor([0, 0, 1, 1]))
    assert torch.equal(losses.group_advantages(rewards, groups), want)
    with pytest.raises(InputTypeError, match=r"groups: got torch.float32, expected integers"):
        losses.group_advantages(rewards, groups.float())


def test_rewards_may_be_integers_or_booleans() -> None:
    groups = torch.tensor([0, 0, 0, 1], dtype=torch.int32)
    for rewards in (torch.tensor([1, 0, 0, 1]), torch.tensor([True, False, False, True])):
        want = losses.group_advantages(rewards.float(), groups)
        assert torch.equal(losses.group_advantages(rewards, groups), want)
        assert want.dtype == torch.float32
        assert want[0] > 1


def batch_of(lengths: list[int]) -> PackedBatch:
    return PackedBatch.from_sequences([list(range(1, length + 1)) for length in lengths], align=2)


def test_weights_add_up_over_micro_batches() -> None:
    """The loss of a batch does not depend on how it was cut."""
    batch = batch_of([5, 2, 4, 1])
    assert losses.count_tokens([batch]) == 4 + 1 + 3
    values = torch.randn(4, 5, dtype=torch.float64)
    expected_tokens = torch.cat([values[i, : n - 1] for i, n in enumerate(batch.lengths)]).mean()
    expected_sequences = (
        torch.stack([values[i, : n - 1].mean() for i, n in enumerate(batch.lengths) if n > 1]).sum() / 4
    )
    parts = batch.micro_batches(8)
    assert len(parts) > 1
    assert losses.count_tokens(parts) == 8
    tokens = sequences = torch.zeros((), dtype=torch.float64)
    for part in parts:
        own = part.pack([values[i, : batch.lengths[i]] for i in part.sequences], of="prediction")
        tokens = tokens + (losses.token_mean_weights(part.labels, 8) * own).sum()
        sequences = sequences + (losses.sequence_mean_weights(part, 4) * own).sum()
    torch.testing.assert_close(tokens, expected_tokens)
    torch.testing.assert_close(sequences, expected_sequences)


def idle_weights(rank: int, size: int) -> list[Tensor]:
    batch = batch_of([5, 2, 4] if rank == 0 else [3])
    return [losses.sequence_mean_weights(part, 4) for part in batch.micro_batches(6, dist.group.WORLD)]


def test_an_idle_micro_batch_has_weights_too() -> None:
    """A rank with fewer sequences than another gets batches of none, and runs the same lines."""
    ours, theirs = run_ranks(2, idle_weights)
    assert len(ours) == len(theirs) == 2
    assert sum(float(weights.sum()) for weights in ours) == pytest.approx(3 / 4)
    assert [float(weights.sum()) for weights in theirs] == [0.25, 0.0]


def test_a_shard_gets_its_weights_from_the_whole() -> None:
    batch = PackedBatch.from_sequences([[1, 2, 3, 4], [5, 6]], align=4)
    weights = losses.sequence_mean_weights(batch, 2)
    for rank in range(2):
        shard = batch.shard(rank, 2)
        with pytest.raises(InvalidInputError, match=r"batch: got a shard \(., 2, 'zigzag'\)"):
            losses.sequence_mean_weights(shard, 2)
        own = shard.pack(batch.unpack(weights), of="prediction")  # as the message says
        assert torch.equal(own > 0, shard.labels != -100)
        assert set(own[own > 0].tolist()) <= set(weights.tolist())


def counted(rank: int, size: int) -> int:
    return losses.count_tokens([batch_of([3 + rank]), batch_of([2])], group=dist.group.WORLD)


def test_tokens_are_counted_over_the_ranks() -> None:
    assert run_ranks(2, counted) == [2 + 1 + 3 + 1] * 2


def test_grpo_without_a_penalty_is_ppo() -> None:
    x = draw()
    log_probs = scores(x["logits"], x["labels"]).log_probs
    got = losses.grpo(log_probs, x["old"], x["advantages"], beta=0.0)
    assert torch.equal(got, losses.ppo_clip(log_probs, x["old"], x["advantages"]))


def test_bad_calls() -> None:
    x: Any = torch.zeros(3)
    with pytest.raises(InvalidInputError, match="estimator: got 'k4', expected 'k1', 'k2' or 'k3'"):
        losses.kl_to_reference(x, x, "k4")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="ref_log_probs: got None with beta 0.1"):
        losses.grpo(x, x, x, beta=0.1)
    with pytest.raises(InvalidInputError, match=r"rewards, groups: got shapes \(3,\) and \(2,\)"):
        losses.group_advantages(x, x[:2].long())


def test_nothing_to_score() -> None:
    assert losses.count_tokens([]) == 0
    empty = batch_of([1])
    assert losses.token_mean_weights(empty.labels, 0).tolist() == [0.0, 0.0]
    for total in (0, 1):
        assert losses.sequence_mean_weights(empty, total).tolist() == [0.0, 0.0]
    assert losses.group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)
