"""One class's verdict: its tiny model, bound, against the scores and gradients that its own logits give."""

from __future__ import annotations

import importlib
import inspect
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tiny import VOCAB, tiny_model
from torch import Tensor, nn

import logitless_hf
from logitless import linear_log_probs
from logitless.errors import LogitlessError

__all__ = ["Verdict", "judge"]

TOLERANCE = 1e-4  # nats, and of each gradient relative to its largest element; what a missed transform costs is ~1
ROWS, COLUMNS, TEMPERATURE = 2, 7, 0.7


class NotFinite(Exception):
    """A family's own gradients are infinite or NaN, so that there is nothing to compare with."""


@dataclass
class Verdict:
    """A row of the table.

    Attributes:
        verdict: "right", "wrong", "refused", "not run" (its own forward gives no logits for text) or "not built".
        transform: what the binding found.
        score_error: the largest error of a log_prob or entropy, nats, in eval and in train mode.
        gradient_error: the largest of any parameter's gradient, relative to that gradient's largest element.
        untransformed: what the largest error of a log_prob would be from `hidden @ weight.T` alone, nats.
        reason: why it was refused, or not run, or not built.
    """

    name: str
    verdict: str
    transform: str = ""
    dtype: str = ""
    score_error: float | None = None
    gradient_error: float | None = None
    untransformed: float | None = None
    reason: str = ""

    as_dict = asdict


def _tokens() -> Tensor:
    """Ids that are text for every tiny model; those from the vocabulary's end stand for images and the like."""
    return torch.randint(10, VOCAB // 2, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(1))


def _inputs(model: nn.Module) -> dict[str, Tensor]:
    """What a call on text alone must be given."""
    taken = inspect.signature(type(model).forward).parameters
    inputs = {"input_ids": _tokens()}
    if "decoder_input_ids" in taken:
        inputs["decoder_input_ids"] = _tokens().roll(1, 1)
    if "mm_token_type_ids" in taken:
        inputs["mm_token_type_ids"] = torch.zeros(ROWS, COLUMNS, dtype=torch.long)
    return inputs


def _own_scores(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """From the model's own logits, [ROWS, COLUMNS] each."""
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def _gradients(model: nn.Module, scores: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(2)
    upstream = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in scores]
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(scores, list(named.values()), upstream, allow_unused=True)
    return dict(zip(named, found, strict=True))


def _gradient_error(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """Relative to each gradient's largest element; one that is but rounding counts against a thousandth of the largest
    of all. Where a parameter has no gradient, the other side must have none, or zeros."""
    floor = 1e-3 * max((float(wanted.abs().max()) for wanted in expected.values() if wanted is not None), default=0.0)
    worst = 0.0
    for name, wanted in expected.items():
        found = got[name]
        if found is not None and not found.isfinite().all():
            return float("inf")  # a NaN compares as less than whatever is the worst as yet
        if found is None or wanted is None:
            rest = found if wanted is None else wanted
            worst = max(worst, 0.0 if rest is None else float(rest.abs().max()) / max(floor, 1e-30))
        elif wanted.numel():
            error = float((found - wanted).abs().max()) / max(float(wanted.abs().max()), floor, 1e-30)
            worst = max(worst, error)
    return worst


def _largest(*errors: Tensor) -> float:
    return max(float(error.detach().abs().nan_to_num(float("inf")).max()) for error in errors)


def _compare(model: Any, inputs: dict[str, Tensor], report: Any) -> dict[str, float]:
    """Errors of a bound model, which was examined already."""
    targets = torch.randint(0, VOCAB, (ROWS, COLUMNS), generator=torch.Generator().manual_seed(3))
    worst_score = worst_gradient = untransformed = 0.0
    for training in (False, True):
        model.train(training)
        torch.manual_seed(5)  # dropout
        logits = model(**inputs, use_cache=False).logits
        targets = targets % logits.shape[-1]
        expected = _own_scores(logits, targets)
        expected_gradients = _gradients(model, expected)
        if not all(found.isfinite().all() for found in expected_gradients.values() if found is not None):
            raise NotFinite("its own gradients of text are not finite")
        torch.manual_seed(5)
        out = model(**inputs, return_log_probs=True, shift_labels=targets, temperature=TEMPERATURE)
        got = (out.log_probs, out.entropy)
        worst_score = max(worst_score, _largest(*(a - b for a, b in zip(got, expected, strict=True))))
        worst_gradient = max(worst_gradient, _gradient_error(_gradients(model, got), expected_gradients))
    with torch.no_grad():
        hidden: list[Tensor] = []
        head = model.eval().get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
        logits = model(**inputs, use_cache=False).logits
        hook.remove()
        first = hidden[0][:, 0] if hidden[0].ndim == 4 else hidden[0]  # of several streams, the next token's
        plain = linear_log_probs(first, head.weight.to(first.dtype), targets, temperature=TEMPERATURE)
        untransformed = _largest(plain.log_probs - _own_scores(logits, targets)[0])
    return {"score_error": worst_score, "gradient_error": worst_gradient, "untransformed": untransformed}


def _told(report: Any) -> str:
    parts = [] if report.scale == 1 else [f"× {report.scale:.6g}"]
    parts += [] if report.softcap is None else [f"softcap {report.softcap:.6g}"]
    parts += ["bias"] if report.bias else []
    parts += [] if report.offset is None else ["bias buffer"]
    parts += ["own forward"] if report.own_forward else []
    return ", ".join(parts) or "none"


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _judge(name: str, cls: Any, dtype: torch.dtype) -> Verdict:
    try:
        model = tiny_model(cls, dtype)
    except Exception as error:
        return Verdict(name, "not built", reason=_sentence(error))
    inputs = _inputs(model)
    told = str(dtype).removeprefix("torch.")
    try:
        logits = model(**inputs, use_cache=False).logits
        if not isinstance(logits, Tensor) or not logits.isfinite().all():
            return Verdict(name, "not run", dtype=told, reason="its own logits of text are not finite")
    except Exception as error:
        return Verdict(name, "not run", dtype=told, reason=_sentence(error))
    try:
        logitless_hf.bind(model)
    except LogitlessError as error:
        return Verdict(name, "refused", dtype=told, reason=str(error))
    report = logitless_hf.inspect_head(model)
    try:
        errors = _compare(model, inputs, report)
    except LogitlessError as error:
        return Verdict(name, "refused", dtype=told, reason=str(error))
    except NotFinite as error:
        return Verdict(name, "not run", dtype=told, reason=str(error))
    right = max(errors["score_error"], errors["gradient_error"]) <= TOLERANCE
    return Verdict(name, "right" if right else "wrong", _told(report), told, **errors)


def judge(module: str, name: str) -> dict[str, Any]:
    """The verdict on `module.name`, in float64, or in float32 where its own code takes no float64."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    cls = getattr(importlib.import_module(module), name)
    verdict = _judge(name, cls, torch.float64)
    if verdict.verdict == "not run" or "Double" in verdict.reason or "double" in verdict.reason:
        again = _judge(name, cls, torch.float32)
        verdict = verdict if again.verdict == "not run" else again
    return verdict.as_dict()
