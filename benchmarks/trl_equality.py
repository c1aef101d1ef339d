"""A real GRPOTrainer with scores from here against stock TRL and full logits: the same training, in less memory.

    python benchmarks/trl_equality.py --model FOLDER [--steps 10] [--output results/NAME.json]

Completions are recorded texts, replayed to each run, and the optimizer is plain SGD: sampling and Adam amplify rounding
until two right runs differ. Each run is a process of its own, in fp32 on the CPU, one after another;
its peak is the most memory that it ever held in training. Runs "lora ..." have a LoRA adapter on the head, which stock
TRL refuses. examples/fetch_model.py makes a model; needs trl, peft and datasets.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from datetime import date
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import selective_log_softmax_and_entropy

from logitless_hf.trl import status, with_logitless

RUNS = ("stock", "full logits", "logitless", "lora full logits", "lora logitless")
PAIRS = (("logitless", "stock"), ("logitless", "full logits"), ("lora logitless", "lora full logits"))
METRICS = ("loss", "entropy", "kl", "grad_norm")
DISTS = ("logitless", "logitless-torch", "logitless-hf", "trl", "torch", "transformers", "peft")
EXAMPLES = Path(__file__).parents[1] / "examples/data/records.jsonl"


class FullLogits(GRPOTrainer):  # type: ignore[misc]
    """Scores by the model's logits and TRL's own function of them, as TRL did before it had a fused head."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, **_: Any
    ) -> Any:
        with self.accelerator.autocast():
            asked = {"logits_to_keep": logits_to_keep + 1, "use_cache": False}
            logits = model(input_ids=input_ids, attention_mask=attention_mask, **asked).logits[:, :-1]
        index = input_ids[:, -logits_to_keep:]
        return (*selective_log_softmax_and_entropy(logits, index, temperature=self.temperature), None)


def replaying(trainer: Any, completions: dict[str, list[list[int]]]) -> Any:
    """The trainer's class, which is given each prompt's recorded completions in turn for generating."""

    class Replay(trainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            turns = {key: iter(recorded) for key, recorded in completions.items()}
            return [next(turns[json.dumps(list(ids))]) for ids in prompt_ids], None

    return Replay


def variety(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that needs no judge: the share of distinct tokens."""
    return [len(set(ids)) / max(1, len(ids)) for ids in completion_ids]


def record(args: argparse.Namespace, work: Path) -> None:
    """Prompts with completions of several lengths, by token ids: the texts of the example file, run together."""
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()]
    rows = [row for row in rows if row.get("prompt") and row.get("completion")]
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = tokenizer([row["completion"] for row in rows], add_special_tokens=False)["input_ids"]
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))[: args.steps * args.batch // args.generations]
    recorded = {}
    for i, ids in enumerate(tokenizer(prompts)["input_ids"]):
        group = []
        for j in range(args.generations):
            start = (i * args.generations + j) % len(texts)
            tokens = list(chain(*texts[start:], *texts[:start]))
            group.append([*tokens[: args.completion * (1 + (i + j) % 3) // 3 - 1], tokenizer.eos_token_id])
        recorded[json.dumps(ids)] = group
    (work / "records.json").write_text(json.dumps({"prompts": prompts, "completions": recorded}))


def build(name: str, args: argparse.Namespace, work: Path) -> Any:
    from datasets import Dataset

    records = json.loads((work / "records.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    lora = name.startswith("lora")
    settings = GRPOConfig(
        output_dir=str(work / "out"),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        num_generations=args.generations,
        max_completion_length=args.completion,
        learning_rate=args.lora_rate if lora else args.rate,
        lr_scheduler_type="constant",
        optim="sgd",
        beta=0.04,
        entropy_coef=0.01,
        temperature=0.9,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    adapter = None
    if lora:
        adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM")
    trainer = FullLogits if "full logits" in name else GRPOTrainer
    if "logitless" in name:
        trainer = with_logitless(trainer, keep_bytes=args.keep_bytes)
    with ExitStack() as stack:
        if name == "lora full logits":  # stock TRL refuses an adapter on the head, whatever scores
            stack.enter_context(patch("trl.trainer.grpo_trainer.BaseTunerLayer", ()))
        return replaying(trainer, records["completions"])(
            model=str(args.model),
            reward_funcs=variety,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": records["prompts"]}),
            processing_class=tokenizer,
            peft_config=adapter,
        )


def resident(field: str) -> int:
    """Bytes of this process, from Linux: VmRSS now, VmHWM at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def train(name: str, args: argparse.Namespace, work: Path) -> None:
    trainer = build(name, args, work)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = resident("VmRSS")
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "steps": [{metric: entry[metric] for metric in METRICS} for entry in log],
        "seconds": [entry["step_time"] for entry in log],
        "tokens": log[-1]["num_tokens"],
        "before_bytes": before,
        "peak_bytes": resident("VmHWM"),
        "scored_here": {key: value.calls for key, value in status(trainer).items()},
    }
    (work / f"{name}.json").write_text(json.dumps(found))


def differences(got: Any, expected: Any) -> dict[str, float]:
    """The largest difference of each metric over the steps."""
    pairs = list(zip(got["steps"], expected["steps"], strict=True))
    return {metric: max(abs(a[metric] - b[metric]) for a, b in pairs) for metric in METRICS}


def report(found: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    print(
        f"{'':18s} {'loss':>10s} {'entropy':>9s} {'kl':>10s} {'grad_norm':>10s}   s/step   peak MiB (beyond the start)"
    )
    for name, run in found.items():
        last = run["steps"][-1]
        figures = " ".join(f"{last[metric]:10.6f}" for metric in METRICS)
        seconds = sorted(run["seconds"])[len(run["seconds"]) // 2]
        peak, more = run["peak_bytes"] / 2**20, (run["peak_bytes"] - run["before_bytes"]) / 2**20
        print(f"{name:18s} {figures} {seconds:8.2f} {peak:10.0f} ({more:.0f})")
    compared = {f"{a} - {b}": differences(found[a], found[b]) for a, b in PAIRS if {a, b} <= found.keys()}
    for name, worst in compared.items():
        print(f"max |{name}|: " + ", ".join(f"{metric} {value:.1e}" for metric, value in worst.items()))
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {dist: version(dist) for dist in DISTS},
        "settings": {key: str(value) for key, value in vars(args).items() if key not in ("run", "work", "output")},
        "max_difference": compared,
        "runs": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--completion", type=int, default=128, help="most tokens of a completion")
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--lora-rate", type=float, default=0.5)
    parser.add_argument("--keep-bytes", type=int, default=0)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=RUNS)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("--run", choices=("record", *RUNS), help="one run, in this process (used by the script itself)")
    parser.add_argument("--work", type=Path, help="where --run finds the completions")
    args = parser.parse_args()
    if args.run == "record":
        return record(args, args.work)
    if args.run:
        return train(args.run, args, args.work)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("record", *args.runs):
            command = [sys.executable, __file__, *sys.argv[1:], "--run", name, "--work", folder]
            subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL)
        found = {name: json.loads((Path(folder) / f"{name}.json").read_text()) for name in args.runs}
    figures = report(found, args)
    if args.output:
        args.output.write_text(json.dumps(figures, indent=2) + "\n")
    worst = max((value for pair in figures["max_difference"].values() for value in pair.values()), default=0.0)
    if worst > 1e-4:
        raise SystemExit(f"the runs differ by {worst:.2g}, more than 1e-4")
    return None


if __name__ == "__main__":
    main()
