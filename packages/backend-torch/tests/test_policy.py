"""The single pass equals two passes and plain torch from full logits: loss, scores and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from single_pass import D, LossFn, N, V, head_of, live, make, policy
from torch import Tensor

from logitless import LMHead, TokenLogProbs, linear_log_probs, linear_policy_loss, losses, reference
from logitless.errors import InputTypeError, InvalidInputError, UnsupportedError


@pytest.mark.parametrize("workspace_bytes", [1 << 29, 60_000, 4_000], ids=["one-chunk", "chunks", "recomputed"])
def test_equals_plain_torch_from_full_logits(workspace_bytes: int) -> None:
    tensors, labels, temperature = make()
    loss_fn = policy(labels)
    plain = reference.linear_log_probs(tensors["hidden"], head_of(tensors), labels, temperature=temperature)
    expected = loss_fn(*live(plain, labels)).sum()
    expected_grads = torch.autograd.grad(expected, list(tensors.values()))
    loss, out = linear_policy_loss(
        tensors["hidden"],
        head_of(tensors),
        labels,
        loss_fn,
        temperature=temperature,
        workspace_bytes=workspace_bytes,
    )
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.log_probs, plain.log_probs.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(out.entropy, plain.entropy, rtol=1e-10, atol=1e-12)
    assert not out.log_probs.requires_grad
    for got, wanted in zip(torch.autograd.grad(loss, list(tensors.values())), expected_grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def every_loss(name: str) -> LossFn:
    """Each ready-made loss of one chunk; what belongs to a token is looked up by its index."""
    g = torch.Generator().manual_seed(2)
    old, ref, advantages = (torch.randn(N, generator=g, dtype=torch.float64) for _ in range(3))
    old, ref = old - 5, ref - 5
    ratio = torch.rand(N, generator=g, dtype=torch.float64) + 0.5

    def entropy(scores: TokenLogProbs) -> Tensor:
        assert scores.entropy is not None
        return scores.entropy

    table: dict[str, LossFn] = {
        "ppo": lambda s, i: losses.ppo_clip(s.log_probs, old[i], advantages[i]),
        "dapo": lambda s, i: losses.ppo_clip(s.log_probs, old[i], advantages[i], clip_high=0.28),
        "grpo": lambda s, i: losses.grpo(s.log_probs, old[i], advantages[i], ref[i], beta=0.1),
        "cispo": lambda s, i: losses.cispo(s.log_probs, old[i], advantages[i]),
        "gspo token": lambda s, i: losses.gspo_token(s.log_probs, ratio[i], advantages[i], clip_low=0.2, clip_high=0.3),
        "entropy": lambda s, i: losses.entropy_bonus(entropy(s), 0.01),
        "k1": lambda s, i: losses.kl_to_reference(s.log_probs, ref[i], "k1"),
        "k2": lambda s, i: losses.kl_to_reference(s.log_probs, ref[i], "k2"),
        "k3": lambda s, i: losses.kl_to_reference(s.log_probs, ref[i], "k3"),
        "importance": lambda s, i: losses.truncated_importance_weights(old[i], ref[i]) * s.log_probs,
    }
    return table[name]


@pytest.mark.parametrize(
    "name", ["ppo", "dapo", "grpo", "cispo", "gspo token", "entropy", "k1", "k2", "k3", "importance"]
)
def test_each_loss_in_one_pass_and_in_two(name: str) -> None:
    """Both equal the loss of full logits, values and every gradient."""
    tensors, labels, temperature = make()
    loss_fn, leaves = every_loss(name), list(tensors.values())
    plain = reference.linear_log_probs(tensors["hidden"], head_of(tensors), labels, temperature=temperature)
    expected = loss_fn(*live(plain, labels)).sum()
    two = linear_log_probs(tensors["hidden"], head_of(tensors), labels, temperature=temperature, keep_bytes=1 << 14)
    second = loss_fn(*live(two, labels)).sum()
    one, _ = linear_policy_loss(
        tensors["hidden"], head_of(tensors), labels, loss_fn, temperature=temperature, workspace_bytes=60_000
    )
    expected_grads = torch.autograd.grad(expected, leaves)
    for loss in (one, second):
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        for got, wanted in zip(torch.autograd.grad(loss, leaves), expected_grads, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


def test_gspo_by_sequence_in_two_passes() -> None:
    tensors, labels, _ = make(ignored=False)
    sequence = torch.arange(N) // 10
    count = int(sequence[-1]) + 1
    g = torch.Generator().manual_seed(3)
    old = torch.randn(N, generator=g, dtype=torch.float64) * 0.1 - 5
    advantages = torch.randn(count, generator=g, dtype=torch.float64)[sequence]
    found = []
    for out in (
        reference.linear_log_probs(tensors["hidden"], LMHead(tensors["weight"]), labels),
        linear_log_probs(tensors["hidden"], tensors["weight"], labels, keep_bytes=1 << 20),
    ):
        loss = losses.gspo(out.log_probs, old, advantages, sequence, count, clip_low=0.5, clip_high=9.0).mean()
        found.append((loss.detach(), *torch.autograd.grad(loss, (tensors["hidden"], tensors["weight"]))))
    assert found[0][1].any()
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("workspace_bytes", [1 << 29, 60_000, 4_000], ids=["one-chunk", "chunks", "recomputed"])
def test_has_the_bits_of_two_passes(dtype: torch.dtype, workspace_bytes: int) -> None:
    """So the first PPO ratio is exactly 1, whichever way each of the two policies was scored."""
    tensors, labels, temperature = make(dtype)
    options: dict[str, Any] = {"temperature": temperature, "workspace_bytes": workspace_bytes}
    with torch.no_grad():
        old = linear_log_probs(tensors["hidden"], head_of(tensors), labels, entropy=False, **options).log_probs
    _, out = linear_policy_loss(tensors["hidden"], head_of(tensors), labels, policy(labels), **options)
    assert torch.equal(out.log_probs, old)
    ratios: list[Tensor] = []

    def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
        ratios.append((scores.log_probs - old[index]).exp())
        return -ratios[-1]

    linear_policy_loss(tensors["hidden"], head_of(tensors), labels, loss_fn, **options)
    assert torch.equal(torch.cat(ratios), torch.ones(int((labels != -100).sum())))


def test_loss_fn_sees_live_tokens_only_and_their_places() -> None:
    tensors, labels, _ = make()
    seen: list[Tensor] = []

    def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
        seen.append(index)
        assert scores.log_probs.shape == index.shape
        return scores.log_probs

    shaped = tensors["hidden"].view(1, N, D), labels.view(1, N)
    linear_policy_loss(shaped[0], tensors["weight"], shaped[1], loss_fn, workspace_bytes=4_000)
    assert len(seen) > 1
    assert torch.equal(torch.cat(seen), (labels != -100).nonzero().squeeze(1))


def test_without_validation_ignored_tokens_count_for_nothing() -> None:
    """Nothing is compacted: the loss sees 0.0 there, and what it makes of it is dropped, NaN included."""
    tensors, labels, _ = make()
    with torch.no_grad():
        tensors["hidden"][labels == -100] = float("nan")

    def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
        assert scores.entropy is not None
        return scores.log_probs.abs().log() + scores.entropy  # at a score of 0: -inf, with an infinite gradient

    found = []
    for validate in (True, False):
        loss, out = linear_policy_loss(tensors["hidden"], tensors["weight"], labels, loss_fn, validate=validate)
        found.append((loss.detach(), out.log_probs, *torch.autograd.grad(loss, (tensors["hidden"], tensors["weight"]))))
    assert all(x.isfinite().all() for x in found[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)


def test_entropy_options() -> None:
    tensors, labels, _ = make()
    hidden, weight = tensors["hidden"], tensors["weight"]

    def of_entropy(scores: TokenLogProbs, index: Tensor) -> Tensor:
        assert scores.entropy is not None
        return scores.log_probs + 3.0 * scores.entropy

    loss, _ = linear_policy_loss(hidden, weight, labels, of_entropy, entropy_grad=False)
    got = torch.autograd.grad(loss, (hidden, weight))
    out = linear_log_probs(hidden, weight, labels)
    assert out.entropy is not None
    torch.testing.assert_close(loss, out.log_probs.sum() + 3.0 * out.entropy.sum())
    torch.testing.assert_close(got, torch.autograd.grad(out.log_probs.sum(), (hidden, weight)), rtol=1e-10, atol=1e-12)

    def without(scores: TokenLogProbs, index: Tensor) -> Tensor:
        assert scores.entropy is None
        return scores.log_probs

    _, scores = linear_policy_loss(hidden, weight, labels, without, entropy=False)
    assert scores.entropy is None


def test_no_grad_makes_no_gradients() -> None:
    tensors, labels, _ = make()

    def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
        assert not scores.log_probs.requires_grad
        return scores.log_probs

    with torch.no_grad():
        loss, out = linear_policy_loss(tensors["hidden"], tensors["weight"], labels, loss_fn)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, out.log_probs.sum())


def test_upstream_gradient_scales_and_absent_gradients_are_none() -> None:
    tensors, labels, _ = make()
    weight = tensors["weight"].detach()
    loss, _ = linear_policy_loss(tensors["hidden"], weight, labels, lambda s, i: s.log_probs)
    (3.0 * loss).backward()
    expected = torch.autograd.grad(
        linear_log_probs(tensors["hidden"], weight, labels).log_probs.sum(), tensors["hidden"]
    )[0]
    torch.testing.assert_close(tensors["hidden"].grad, 3.0 * expected, rtol=1e-12, atol=1e-12)
    assert weight.grad is None


def test_grad_buffer_is_filled_in_the_forward() -> None:
    tensors, labels, temperature = make(torch.bfloat16)
    loss_fn = policy(labels)
    plain, _ = linear_policy_loss(tensors["hidden"], head_of(tensors), labels, loss_fn, temperature=temperature)
    expected = torch.autograd.grad(plain, list(tensors.values()))
    buffer = torch.full((V, D), 2.0)
    head = head_of(tensors, grad_buffer=buffer)
    loss, _ = linear_policy_loss(tensors["hidden"], head, labels, loss_fn, temperature=temperature)
    torch.testing.assert_close((buffer - 2.0).bfloat16(), expected[1], rtol=0.02, atol=2e-4)
    loss.backward()
    assert tensors["weight"].grad is None
    torch.testing.assert_close(tensors["hidden"].grad, expected[0])
    for factor in (2.0, 0.5):
        again, _ = linear_policy_loss(tensors["hidden"], head, labels, loss_fn, temperature=temperature)
        with pytest.raises(InvalidInputError, match=f"upstream gradient of {factor} with grad_buffer, expected 1"):
            (factor * again).backward()


def test_what_a_loss_says_of_ignored_tokens_is_dropped_unvalidated() -> None:
    tensors, labels, temperature = make()
    ignored = labels == -100
    weight = torch.ones(N, dtype=torch.float64).masked_fill(ignored, float("nan"))
    grads = [
        torch.autograd.grad(
            linear_policy_loss(
                tensors["hidden"],
                head_of(tensors),
                labels,
                lambda scores, index: weight[index] * scores.log_probs,
                temperature=temperature,
                validate=validate,
            )[0],
            list(tensors.values()),
        )
        for validate in (True, False)
    ]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-12)
    assert not grads[1][0][ignored].count_nonzero()


def test_second_backward_is_refused() -> None:
    tensors, labels, _ = make()
    loss, _ = linear_policy_loss(tensors["hidden"], tensors["weight"], labels, lambda s, i: s.log_probs)
    loss.backward(retain_graph=True)
    with pytest.raises(UnsupportedError, match="second backward"):
        loss.backward()


def test_nothing_to_score_gives_zero_with_zero_gradients() -> None:
    tensors, labels, _ = make()

    def never(scores: TokenLogProbs, index: Tensor) -> Tensor:
        raise AssertionError("no token is live")

    for hidden, target in ((tensors["hidden"], torch.full_like(labels, -100)), (tensors["hidden"][:0], labels[:0])):
        loss, out = linear_policy_loss(hidden, tensors["weight"], target, never)
        assert loss.item() == 0.0
        assert not out.log_probs.any()
        grads = torch.autograd.grad(loss, (tensors["hidden"], tensors["weight"]), allow_unused=True)
        assert all(grad is not None and not grad.any() for grad in grads)


class Foreign:
    value = torch.ones((), requires_grad=True)
    row = torch.ones(N, requires_grad=True)


def test_a_foreign_leaf_itself_is_noticed() -> None:
    tensors, labels, _ = make()
    own = torch.ones(int((labels != -100).sum()), requires_grad=True)
    with pytest.raises(InvalidInputError, match="another tensor that requires grad"):
        linear_policy_loss(tensors["hidden"], tensors["weight"], labels, lambda s, i: own)


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (None, InputTypeError, "loss_fn: got NoneType, expected a function"),
        (lambda s, i: 1.0, InputTypeError, "loss_fn: returned float, expected a float tensor"),
        (lambda s, i: i, InputTypeError, "loss_fn: returned torch.int64"),
        (lambda s, i: s.log_probs.mean(), InvalidInputError, "loss_fn: returned shape (), expected"),
        (lambda s, i: s.log_probs[:, None], InvalidInputError, "divide by the global token count inside"),
        (lambda s, i: s.log_probs * Foreign.value, InvalidInputError, "depends on another tensor that requires grad"),
        (lambda s, i: Foreign.value.expand(len(i)), InvalidInputError, "depends on another tensor that requires grad"),
        (lambda s, i: Foreign.row[: len(i)], InvalidInputError, "depends on another tensor that requires grad"),
        (lambda s, i: torch.ones(len(i)), InvalidInputError, "does not depend on the scores"),
        (torch.no_grad()(lambda s, i: 2 * s.log_probs), InvalidInputError, "computed without gradient"),
        (lambda s, i: s.log_probs + (2 * Foreign.value).exp(), InvalidInputError, "detach that tensor"),
    ],
)
def test_bad_loss_fns(loss_fn: Any, error: type[Exception], message: str) -> None:
    tensors, labels, _ = make()
    with pytest.raises(error) as raised:
        linear_policy_loss(tensors["hidden"], tensors["weight"], labels, loss_fn)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda s, i: -s.log_probs - 0.01 * s.entropy,
        lambda s, i: -s.log_probs - s.entropy.clamp(max=1),
        lambda s, i: -s.log_probs - torch.exp(s.entropy),
        lambda s, i: torch.where(s.log_probs < -1, s.log_probs, s.entropy),
    ],
    ids=["arithmetic", "method", "function", "overload"],
)
def test_a_loss_fn_that_has_no_entropy_is_told_why(loss_fn: Any) -> None:
    tensors, labels, _ = make()
    with pytest.raises(InputTypeError, match="^loss_fn: scores.entropy is None, since .* Got ") as raised:
        linear_policy_loss(tensors["hidden"], tensors["weight"], labels, loss_fn, entropy=False)
    assert isinstance(raised.value.__cause__, TypeError | AttributeError)
    linear_policy_loss(tensors["hidden"], tensors["weight"], labels, loss_fn)


@pytest.mark.parametrize(
    ("entropy", "fault"),
    [
        (False, TypeError("too few arguments")),
        (True, TypeError("got NoneType")),
        (False, InputTypeError("weights: got NoneType")),
        (False, ValueError("got NoneType")),
    ],
    ids=str,
)
def test_a_loss_fns_own_error_stays_as_it_is(entropy: bool, fault: Exception) -> None:
    def loss_fn(scores: Any, index: Tensor) -> Tensor:
        raise fault

    tensors, labels, _ = make()
    with pytest.raises(type(fault)) as raised:
        linear_policy_loss(tensors["hidden"], tensors["weight"], labels, loss_fn, entropy=entropy)
    assert raised.value is fault


def test_second_derivatives_are_refused() -> None:
    tensors, labels, _ = make()
    loss, _ = linear_policy_loss(tensors["hidden"], tensors["weight"], labels, lambda s, i: s.log_probs)
    with pytest.raises(UnsupportedError, match="first derivatives only"):
        torch.autograd.grad(loss, tensors["hidden"], create_graph=True)


@pytest.mark.parametrize("share", [1e-5, 1e-7])
def test_small_fp16_gradients_survive_until_a_grad_scaler_lifts_them(share: float) -> None:
    """Weights of 1/total are as small as that: rounded in the forward, most of their gradients would be zero."""
    tensors, labels, _ = make(torch.float16)
    leaves = (tensors["hidden"], tensors["weight"])
    scale = 2.0**20
    loss, _ = linear_policy_loss(*leaves, labels, lambda s, i: -share * s.log_probs)
    got = torch.autograd.grad(scale * loss, leaves)
    out = linear_log_probs(*leaves, labels)
    expected = torch.autograd.grad(-scale * share * out.log_probs.sum(), leaves)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == torch.float16
        assert float((a.float() - b.float()).norm() / b.float().norm()) < 1e-3


def test_breaks_a_compiled_graph_once() -> None:
    from torch._dynamo.testing import CompileCounter

    tensors, labels, _ = make(torch.float32)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        loss, _ = linear_policy_loss(hidden * 2, weight, labels, lambda s, i: -s.log_probs)
        return loss + 1.0

    counter = CompileCounter()
    compiled: Any = torch.compile(step, backend=counter)
    inputs = (tensors["hidden"], tensors["weight"])
    assert torch.equal(compiled(*inputs), step(*inputs))
    assert counter.frame_count == 2
