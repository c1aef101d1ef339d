"""The one family of tolerances: how far results may be from the float64 truth of the same rounded inputs.

Gradients are held to what rounding costs, not to a guess: in float16 and bfloat16 to the float64 gradient with dz
rounded once to the inputs' dtype and the result rounded once (the floor); in float32 to the error that autograd makes
through full float32 logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from logitless.reference import head_logits, raw_logits, scores_of, tempered
from logitless.testing.example import Example, Results
from logitless.types import TokenLogProbs

__all__ = ["check_gradients", "check_results", "check_scores", "floor_gradients"]

FLOOR_FACTOR, FLOAT32_FACTOR, FLOAT64_RELATIVE = 1.1, 2.0, 1e-10


def _rows(tensor: Tensor) -> Tensor:
    """[..., d] as [rows, d]; with no leading dimension, one row."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _live_tokens(example: Example) -> Tensor:
    """[...] bool: tokens of which a label is scored."""
    return example.live.any(-1) if example.live.ndim == example.hidden.ndim else example.live


def _largest_logit(example: Example) -> Tensor:
    """[...] max|z/T| of each token, at least 1."""
    exact = example.to(torch.float64)
    z = head_logits(exact.hidden, exact.head, exact.temperature)
    return z.abs().masked_fill(z.isinf(), 0.0).amax(-1).clamp(min=1.0)


def _score_bound(example: Example, truth: Tensor) -> Tensor:
    """[...] how far a token's score may be off."""
    top = _largest_logit(example)
    top = top.unsqueeze(-1) if truth.ndim > top.ndim else top  # of several labels
    if example.dtype == torch.float64:
        return FLOAT64_RELATIVE * truth.abs() + 8 * torch.finfo(torch.float64).eps * top
    ulp = torch.exp2(top.log2().floor() - 23)
    return 1e-4 + 2 * ulp


def _check_score(name: str, got: Tensor, truth: Tensor, example: Example) -> None:
    expected = torch.promote_types(example.dtype, torch.float32)
    if got.dtype != expected or got.shape != truth.shape:
        raise AssertionError(
            f"{name}: got {got.dtype} {tuple(got.shape)}, expected {expected} {tuple(truth.shape)}, as the labels"
        )
    live = example.live.any(-1) if example.live.ndim > got.ndim else example.live
    dead = got.detach().masked_select(~live)
    if dead.count_nonzero():
        raise AssertionError(
            f"{name}: got {dead[dead != 0][0]:.9g} for an ignored token ({dead.count_nonzero()} of {dead.numel()} are "
            "not 0), expected exactly 0"
        )
    value, bound = got.detach().double(), _score_bound(example, truth)
    wrong = live & ~((value - truth).abs() <= bound) & (value != truth)
    if wrong.any():
        at = int(wrong.flatten().nonzero()[0, 0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} tokens are off; the first, {at}, got {value.flatten()[at]:.9g}, "
            f"truth {truth.flatten()[at]:.9g}, allowed {bound.flatten()[at]:.3g}"
        )


def check_scores(got: TokenLogProbs, example: Example, truth: TokenLogProbs | None = None) -> None:
    """Raises if a score of a token is off by more than 1e-4 + 2 ulp32(max|z/T|), or 1e-10 relative in float64.

    Args:
        truth: `example.truth().scores`, where the caller has it already.
    """
    truth = truth or example.truth().scores
    _check_score("log_probs", got.log_probs, truth.log_probs, example)
    if got.entropy is not None and truth.entropy is not None:
        _check_score("entropy", got.entropy, truth.entropy, example)


def _logit_gradient(example: Example, asked: Mapping[str, Any]) -> Tensor:
    """dz with respect to the raw logits h·W + b + u·B, [..., V], in float64."""
    exact = example.to(torch.float64)
    raw = raw_logits(exact.hidden, exact.head).detach().requires_grad_()
    z = tempered(raw, exact.head, exact.temperature)[..., : exact.head.vocab_size]
    scores = scores_of(z, exact.labels, exact.ignore_index, **asked)
    assert scores.entropy is not None
    upstream = (exact.grad_log_probs, exact.grad_entropy)
    return torch.autograd.grad((scores.log_probs, scores.entropy), raw, upstream)[0]


def _rounded(dz: Tensor, dtype: torch.dtype) -> Tensor:
    """dz rounded once; in float16 scaled by a power of two, so that small gradients survive."""
    if dtype != torch.float16:
        return dz.to(dtype).double()
    top = float(dz.abs().max()) if dz.numel() else 0.0
    scale = 2.0 ** (14 - math.floor(math.log2(top))) if top > 0 else 1.0
    return (dz * scale).to(dtype).double() / scale


def floor_gradients(example: Example, **asked: Any) -> dict[str, Tensor]:
    """float64 gradients of dz rounded once to the example's dtype: what any half-precision product starts from."""
    exact = example.to(torch.float64)
    dz = _rows(_rounded(_logit_gradient(example, asked), example.dtype))
    flat = {name: leaf if name == "bias" else _rows(leaf) for name, leaf in exact.leaves().items()}
    live = _live_tokens(example).flatten().unsqueeze(1)
    tokens = {name: leaf.masked_fill(~live, 0.0) for name, leaf in flat.items() if name[:6] in ("hidden", "lora_u")}
    found = {"hidden": dz @ flat["weight"], "weight": dz.T @ tokens["hidden"]}
    if "bias" in flat:
        found["bias"] = dz.sum(0)
    for i in range(len(exact.head.lora)):
        found[f"lora_u{i}"] = dz @ flat[f"lora_b{i}"]
        found[f"lora_b{i}"] = dz.T @ tokens[f"lora_u{i}"]
    return {name: found[name].view(leaf.shape) for name, leaf in exact.leaves().items()}


def _guard(example: Example, name: str) -> float:
    """Absolute error that rounding 1 − p once, to float32 or float64, may cause."""
    wide = torch.promote_types(example.dtype, torch.float32)
    live = _live_tokens(example)
    upstream = torch.stack([example.grad_log_probs[example.live].norm(), example.grad_entropy[live].norm()]).norm()
    coldest = float(torch.as_tensor(example.temperature).flatten().amin()) if example.labels.numel() else 1.0
    leaves = {key: leaf.detach().double() for key, leaf in example.leaves().items()}
    partner = {"hidden": "weight", "weight": "hidden", "bias": ""}.get(name)
    if partner is None:
        partner = name.replace("_u", "_b") if "_u" in name else name.replace("_b", "_u")
    other = _rows(leaves[partner]) if partner else torch.ones(1, 1)
    if partner and (partner == "hidden" or "_u" in partner):
        other = other[live.flatten()]
    size = float(other.norm(dim=-1).max()) if other.numel() else 0.0
    return 2 * torch.finfo(wide).eps * float(upstream) * abs(example.head.scale) / coldest * size


def _bounds(example: Example, truth: Results, got: Mapping[str, Tensor], asked: Mapping[str, Any]) -> dict[str, float]:
    """Allowed L2 error of each gradient, before the caller's factor."""
    exact = truth.gradients
    if example.dtype == torch.float64:
        return {name: FLOAT64_RELATIVE * float(_of(exact, name).norm()) for name in exact}
    if example.dtype == torch.float32:
        own = example.reference(**asked).gradients
        return {name: FLOAT32_FACTOR * float((_of(own, name).double() - _of(exact, name)).norm()) for name in exact}
    bounds = {}
    for name, grad in floor_gradients(example, **asked).items():
        if name in got:
            rounded = grad.to(got[name].dtype).double()
            bounds[name] = FLOOR_FACTOR * float((rounded - _of(exact, name)).norm())
    return bounds


def _of(gradients: Mapping[str, Tensor | None], name: str) -> Tensor:
    grad = gradients[name]
    if grad is None:
        raise AssertionError(f"d_{name}: got None, expected a gradient")
    return grad.detach()


def check_gradients(
    got: Mapping[str, Tensor | None],
    example: Example,
    *,
    truth: Results | None = None,
    factors: Mapping[str, float] | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    **asked: Any,
) -> None:
    """Raises if a gradient has another dtype or shape than its input, or is further off than the module says.

    Args:
        got: gradient of each leaf by name; None is skipped, since whether one is due is the caller's to say.
        truth: `example.truth()`, where the caller has it already.
        factors: what to allow in place of 1.1 floors, by leaf (1.3 for d_weight without an entropy gradient).
        dtypes: expected dtypes that are not the input's, by leaf (float32 for a `grad_buffer`).
        asked: top_k and top_p of the call.
    """
    given = {name: grad for name, grad in got.items() if grad is not None}
    for name, leaf in example.leaves().items():
        dtype = (dtypes or {}).get(name, leaf.dtype)
        if name in given and (given[name].dtype != dtype or given[name].shape != leaf.shape):
            raise AssertionError(
                f"d_{name}: got {given[name].dtype} {tuple(given[name].shape)}, expected {dtype} {tuple(leaf.shape)}"
            )
    truth = truth or example.truth(**asked)
    bounds = _bounds(example, truth, given, asked)
    wide = torch.finfo(torch.promote_types(example.dtype, torch.float32))
    logits = wide.eps * float(_largest_logit(example).amax()) if example.labels.numel() else 0.0
    for name, grad in given.items():
        exact = _of(truth.gradients, name)
        error, size = float((grad.detach().double() - exact).norm()), float(exact.norm())
        # On a handful of numbers a floor may be small by luck: rounding logits and result once is always allowed.
        least = (logits + torch.finfo(grad.dtype).eps / 2) * size + _guard(example, name)
        allowed = max(bounds[name] * (factors or {}).get(name, FLOOR_FACTOR) / FLOOR_FACTOR, least)
        if not error <= allowed:
            raise AssertionError(f"d_{name}: L2 error {error:.3g}, allowed {allowed:.3g}, norm {size:.3g}")


def check_results(
    got: Results,
    example: Example,
    *,
    truth: Results | None = None,
    factors: Mapping[str, float] | None = None,
    **asked: Any,
) -> None:
    """`check_scores` and `check_gradients` against one truth; `asked` are top_k and top_p of the call."""
    truth = truth or example.truth(**asked)
    check_scores(got.scores, example, truth.scores)
    check_gradients(got.gradients, example, truth=truth, factors=factors, **asked)
