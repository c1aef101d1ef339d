"""Every causal text family of the installed transformers, tiny: does a batch equal each of its sequences alone?

In each layout, log-probabilities, entropies and the gradient of every parameter of three sequences are compared, in
float32, with those of the same weights on each sequence by itself, by the family's own forward and its own logits. So
that equal means something, the row is also scored as if it were one sequence: a family whose scores that hardly moves
shows nothing, and counts as untold.

    python tests/packed/families.py [--layout thd] [NAME ...]

The exit code is 1 if any family is wrong or untold. Without names, and layouts, the table is written.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import logitless
from logitless import PackedBatch
from logitless.errors import LogitlessError
from logitless_hf import bind

sys.path.insert(0, str(Path(__file__).parents[1] / "zoo"))
from tiny import FIRST_SPECIAL, VOCAB, tiny_config, tiny_model

__all__ = ["Verdict", "check", "families"]

LAYOUTS = ("thd", "nested", "bshd")
LENGTHS = (21, 38, 30)  # together more than a tiny model's longest sequence, each more than its windows and chunks
LARGEST = 20_000_000  # parameters; a family that does not shrink is not built
SECONDS = 120
LOUD = 20.0
NATS, GRADIENT = 1e-4, 1e-3  # what counts as wrong
TOLD = 30  # times its error that a family's scores have to move if packed sequences see one another


@dataclass(frozen=True)
class Verdict:
    """One family in one layout.

    Attributes:
        kind: "right", "wrong", "refused", "untold" or "not built".
        borders: what told sequences apart.
        error: largest difference of a score, nats.
        gradient: largest difference of a parameter's gradient, relative to its norm.
        moved: how far scores are off if the row is taken for one sequence, nats.
        reason: why refused or not built.
    """

    name: str
    kind: str
    borders: str = ""
    error: float = 0.0
    gradient: float = 0.0
    moved: float = 0.0
    reason: str = ""


class _TooLong(Exception):
    pass


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TooLong(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def families() -> list[str]:
    """Names of the causal text classes that transformers' auto class knows."""
    return sorted({name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if isinstance(name, str)})


def _build(name: str) -> nn.Module:
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(tiny_config(model_class)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:.3g} parameters, shrunk as it is")
    model: Any = tiny_model(model_class, torch.float32)
    with torch.no_grad():  # logits of up to LOUD, so that next tokens are neither certain nor alike
        loudest = float(model(input_ids=_sequences()[0].unsqueeze(0), use_cache=False).logits.abs().max())
        model.get_output_embeddings().weight.mul_(min(1.0, LOUD / loudest))
    return model


def _sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(FIRST_SPECIAL, VOCAB - 20, (length,), generator=generator) for length in LENGTHS]


def _scores(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """[L] log-probabilities and entropies of one sequence from the model's own logits; 0 at its end."""
    log_p = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float().log_softmax(-1)
    picked = log_p[:-1].gather(-1, ids[1:].unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)[:-1]
    return nn.functional.pad(picked, (0, 1)), nn.functional.pad(entropy, (0, 1))


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _gradients(model: nn.Module, outputs: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    upstream = [torch.randn(out.shape, generator=generator) for out in outputs]
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(outputs, list(named.values()), upstream, allow_unused=True)
    return {name: grad for name, grad in zip(named, found, strict=True) if grad is not None}


def _furthest(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest relative difference of a gradient; those of next to no norm are measured by the largest norm of all."""
    if got.keys() != wanted.keys():
        return float("inf")
    floor = 1e-3 * max(float(grad.norm()) for grad in wanted.values())
    return max(float((got[name] - grad).norm()) / max(float(grad.norm()), floor) for name, grad in wanted.items())


def _off(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    """Largest difference; a NaN is infinitely far."""
    worst = max(float((a - b).detach().abs().max()) for a, b in zip(got, wanted, strict=True))
    return worst if worst == worst else float("inf")


def check(name: str, layout: str = "thd") -> Verdict:
    """The verdict on one family."""
    try:
        model = _build(name)
        parts = _sequences()
        expected = _joined([_scores(model, part) for part in parts])
        wanted = _gradients(model, expected)
    except Exception as error:
        return Verdict(name, "not built", reason=f"{type(error).__name__}: {error}")
    try:
        moved = _off(_scores(model, torch.cat(parts)), expected)
    except Exception:  # too long for its table of positions
        moved = float("inf")
    try:
        bind(model)
        forward: Any = logitless.make_forward(model, layout)
        out = forward(PackedBatch.from_sequences(parts))
    except LogitlessError as error:
        return Verdict(name, "refused", moved=moved, reason=str(error))
    scores = (out.log_probs, out.entropy)
    error, gradient = _off(scores, expected), _furthest(_gradients(model, scores), wanted)
    kind = "wrong" if not (error <= NATS and gradient <= GRADIENT) else "right"
    if kind == "right" and layout != "bshd" and moved < TOLD * error:
        kind = "untold"
    return Verdict(name, kind, forward.borders if layout != "bshd" else "", error, gradient, moved)


def _guarded(name: str, layout: str) -> Verdict:
    try:
        with _at_most(SECONDS):
            return check(name, layout)
    except _TooLong as error:
        return Verdict(name, "not built", reason=str(error))
    except Exception as error:  # neither refused nor right
        return Verdict(name, "wrong", reason=f"{type(error).__name__}: {error}")


# --- the table ----------------------------------------------------------------------------------------------------


def _cell(text: str) -> str:
    plain = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()
    return plain if len(plain) <= 400 else plain[:397] + "…"


def _overall(verdicts: dict[str, Verdict]) -> str:
    """The kind of a family: that of "thd", unless another layout is wrong."""
    wrong = [v.kind for v in verdicts.values() if v.kind in ("wrong", "untold")]
    return wrong[0] if wrong else verdicts["thd"].kind


def page(found: dict[str, dict[str, Verdict]]) -> str:
    """The table as Markdown; `found` holds each family's verdicts by layout."""
    kinds = {name: _overall(verdicts) for name, verdicts in found.items()}
    counts = Counter(kinds.values())
    rows = Counter(verdicts["bshd"].kind for verdicts in found.values())
    lines = [
        "# Packed sequences, by family",
        "",
        "Written by the script of `nox -s packed`"
        f" with transformers {transformers.__version__} and torch {torch.__version__} on the "
        f"CPU: every class of `AutoModelForCausalLM`, tiny, in float32. Sequences of {LENGTHS} tokens, together and "
        "each alone: log-probabilities, entropies and the gradients of all parameters.",
        "",
        f"- **{counts['right']} right**: packed in one row (thd and nested), and in padded rows (bshd), equal to each "
        f"sequence alone within {NATS:g} nats and {GRADIENT:g} of each gradient's norm.",
        f"- **{counts['wrong']} wrong**, {counts['untold']} untold (packing changes nothing that could be seen).",
        f"- **{counts['refused']} refused** packed, with the reason. In padded rows {rows['right']} families are "
        f"right, {rows['refused']} refused and {rows['wrong']} wrong.",
        f"- {counts['not built']} not built: no tiny model of it could be made here, or its own forward fails.",
        "",
        "*By*: `packed` is attention, and recurrent layers, within each sequence; `positions` is transformers' own way "
        "with positions that restart. *Score error*: the largest of any score in any layout, nats. *Gradient error*: "
        "the largest of any parameter's gradient, relative to its norm. *Mixed*: how far off scores are if the row is "
        "taken for one sequence, nats (inf: the row is longer than the model's table of positions).",
        "",
        "## Right",
        "",
        "| class | by | score error | gradient error | mixed |",
        "|---|---|---|---|---|",
    ]
    for name, verdicts in found.items():
        if kinds[name] == "right":
            error, gradient = (max(getattr(v, what) for v in verdicts.values()) for what in ("error", "gradient"))
            by, moved = verdicts["thd"].borders, verdicts["thd"].moved
            lines.append(f"| {name} | {by} | {error:.1e} | {gradient:.1e} | {moved:.2g} |")
    sections = {kind.capitalize(): ("thd", kind) for kind in ("wrong", "untold", "refused", "not built")}
    sections["Refused in padded rows"] = ("bshd", "refused")
    for title, (layout, kind) in sections.items():
        chosen = [
            v[layout] for name, v in found.items() if (kinds[name] if layout == "thd" else v[layout].kind) == kind
        ]
        if chosen:
            lines += ["", f"## {title}", "", "| class | reason |", "|---|---|"]
            lines += [f"| {v.name} | {_cell(v.reason)} |" for v in chosen]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[2] / "docs/packed.md")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    found: dict[str, dict[str, Verdict]] = {}
    for name in asked.names or families():
        found[name] = {layout: _guarded(name, layout) for layout in asked.layout or LAYOUTS}
        for layout, v in found[name].items():
            figures = f"{v.error:8.1e} {v.gradient:8.1e} {v.moved:8.1e}"
            print(f"{name:40s} {layout:6s} {v.kind:9s} {v.borders:9s} {figures} {_cell(v.reason)}".rstrip(), flush=True)
    if not asked.names and not asked.layout:
        asked.output.write_text(page(found), encoding="utf-8")
    kinds = Counter((layout, v.kind) for verdicts in found.values() for layout, v in verdicts.items())
    for (layout, kind), count in sorted(kinds.items()):
        print(f"{layout} {kind}: {count}")
    return int(any(kind in ("wrong", "untold") for _, kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
