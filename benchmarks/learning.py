"""A policy that learns, twice: `examples/grpo_minimal.py` as it stands, and the same loop over the logits in full.

    python benchmarks/learning.py [--seeds 3] [--model FOLDER] [--steps 80 ...] [--output results/NAME.json --plot FILE]

Both ways share the loop, the seeds and the task, sums of two numbers whose reply earns less the further it is off; only
the forward differs: `logitless.make_forward` against padded rows, `log_softmax` of the logits and autograd. Without a
model, a small random Llama learns from scratch, on a vocabulary of words that are numbers.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from datetime import date
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import logitless
from logitless import PackedBatch, TokenLogProbs
from logitless_hf import CausalLMOutputForPPO

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
import grpo_minimal  # noqa: E402

WORDS = 512
TINY = grpo_minimal.Settings(
    steps=80, prompts=16, samples=16, new_tokens=1, max_tokens=1024, learning_rate=3e-3, layers=0
)
LAST = 10  # steps whose mean reward is "at the end"
Curves = dict[str, dict[str, list[float]]]  # way -> seed -> reward of each step


class FullLogits:
    """A `ForwardFn` as a trainer writes it without this package: rows, the logits whole, and autograd."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(
        self,
        batch: PackedBatch,
        *,
        temperature: float = 1.0,
        entropy: bool = True,
        loss_fn: Callable[[TokenLogProbs, Tensor], Tensor] | None = None,
    ) -> CausalLMOutputForPPO:
        rows = batch.to_padded()
        logits = self.model(input_ids=rows.input_ids, attention_mask=rows.attention_mask.long()).logits
        log_p = (logits.float() / temperature).log_softmax(-1)
        label = rows.labels.clamp(min=0).unsqueeze(-1)
        live = batch.labels != -100
        log_probs = rows.to_packed(log_p.gather(-1, label).squeeze(-1)) * live
        entropies = rows.to_packed(-(log_p.exp() * log_p).sum(-1)) * live if entropy else None
        loss = None
        if loss_fn is not None:
            index = live.nonzero().squeeze(1)
            scores = TokenLogProbs(log_probs[index], None if entropies is None else entropies[index])
            loss = loss_fn(scores, index).sum()
        return CausalLMOutputForPPO(loss=loss, log_probs=log_probs.detach(), entropy=entropies)


WAYS: dict[str, Callable[[Any], Any]] = {"logitless": logitless.make_forward, "full logits": FullLogits}


def tiny(seed: int) -> tuple[Any, Any]:
    """A random Llama and a tokenizer of the words that a sum and its result are made of, and many more."""
    words = ["<pad>", "</s>", "+", "=", *map(str, range(WORDS - 4))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval(), tokenizer


def run(way: str, model: str | None, s: grpo_minimal.Settings) -> Iterator[dict[str, float]]:
    policy, tokenizer = grpo_minimal.load(model, s) if model else tiny(s.seed)
    return grpo_minimal.train(policy, tokenizer, WAYS[way](policy), s)


def summary(curves: Curves) -> dict[str, Any]:
    """Rewards at both ends by seed, and how far the ways are apart against how far the seeds are."""
    ends = {way: {seed: statistics.fmean(curve[-LAST:]) for seed, curve in by.items()} for way, by in curves.items()}
    begins = {way: {seed: statistics.fmean(curve[:LAST]) for seed, curve in by.items()} for way, by in curves.items()}
    ours, theirs = ends["logitless"], ends["full logits"]
    pairs = {seed: zip(curve, curves["full logits"][seed], strict=True) for seed, curve in curves["logitless"].items()}
    same = {seed: len(list(takewhile(lambda pair: pair[0] == pair[1], pair))) for seed, pair in pairs.items()}
    return {
        f"mean reward of the first {LAST} steps": begins,
        f"mean reward of the last {LAST} steps": ends,
        "difference of the ways' means at the end": statistics.fmean(ours.values()) - statistics.fmean(theirs.values()),
        "standard deviation over seeds at the end": {
            way: statistics.stdev(by.values()) if len(by) > 1 else None for way, by in ends.items()
        },
        "first steps with the very same reward": same,
    }


def plot(path: Path, curves: Curves, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (way, by_seed), color, style in zip(curves.items(), ("C0", "C1"), ("-", "--"), strict=True):
        for curve in by_seed.values():
            axes.plot(range(1, len(curve) + 1), curve, style, color=color, linewidth=0.7, alpha=0.5)
        mean = [statistics.fmean(at) for at in zip(*by_seed.values(), strict=True)]
        axes.plot(range(1, len(mean) + 1), mean, style, color=color, label=f"{way}, mean of {len(by_seed)} seeds")
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title=title)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a causal model; a small random one if not given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--plot", type=Path, help="picture of the curves")
    for field in fields(TINY):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=getattr(TINY, field.name))
    given = vars(parser.parse_args())
    model, seeds, output, picture = (given.pop(name) for name in ("model", "seeds", "output", "plot"))
    settings = grpo_minimal.Settings(**given)
    torch.set_num_threads(1)

    curves: Curves = {way: {} for way in WAYS}
    first_ratio_error = 0.0
    with Progress() as progress:
        for seed in range(settings.seed, settings.seed + seeds):
            for way in WAYS:
                task = progress.add_task(f"{way}, seed {seed}", total=settings.steps)
                curves[way][str(seed)] = curve = []
                for row in run(way, model, replace(settings, seed=seed)):
                    curve.append(row["reward"])
                    if way == "logitless":
                        first_ratio_error = max(first_ratio_error, row["first_ratio_error"])
                    progress.advance(task)
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, 1 thread",
        "versions": {name: version(name) for name in ("logitless", "logitless-torch", "torch", "transformers")},
        "model": Path(model).name if model else f"random Llama, 2 layers of 64, {WORDS} words",
        "settings": asdict(settings),
        "largest |first ratio - 1|, logitless": first_ratio_error,
        **summary(curves),
        "curves": curves,
    }
    print(json.dumps({name: value for name, value in result.items() if name != "curves"}, indent=2))
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")
    if picture:
        plot(picture, curves, f"sums, {result['model']}")


if __name__ == "__main__":
    main()
