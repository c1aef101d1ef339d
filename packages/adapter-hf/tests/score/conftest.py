"""A tiny llama with a tiny byte-level tokenizer, saved as a checkpoint, and ways to score a file with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from logitless_hf.score import runner
from logitless_hf.score.options import Options
from logitless_hf.score.runner import Summary

BOS, EOS, START = "<s>", "</s>", "<turn>"
TEMPLATE = (
    "{% for message in messages %}<turn>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
CORPUS = ["the capital of France is Paris and the sum of two and two is four", "user assistant system hello world"] * 8


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=380,
            special_tokens=[BOS, EOS, START],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    others = "extra_special_tokens" if int(transformers.__version__.split(".")[0]) >= 5 else "additional_special_tokens"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, **{others: [START]})
    fast.chat_template = TEMPLATE
    return fast


def make_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # else every distribution is nearly uniform and hides mistakes
    return model.eval()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model, in float32."""
    folder = tmp_path_factory.mktemp("checkpoint")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write lines (objects as JSON, strings and bytes as they are) to a JSONL file."""

    def write(*lines: Any, name: str = "records.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(b"".join(as_bytes(line) + b"\n" for line in lines))
        return path

    def as_bytes(line: Any) -> bytes:
        if isinstance(line, bytes):
            return line
        return (line if isinstance(line, str) else json.dumps(line)).encode()

    return write


@pytest.fixture(scope="session")
def varied() -> Callable[[int], list[dict[str, Any]]]:
    """Records of all three forms and many lengths."""
    words = ("the", "capital", "of", "France", "is", "Paris", "and", "sum")

    def record(n: int) -> dict[str, Any]:
        text = " ".join(words[(n + i) % 8] for i in range(1 + n % 7))
        answer = " ".join(words[(3 * n + i) % 8] for i in range(1 + (5 * n) % 6))
        forms: list[dict[str, Any]] = [
            {"prompt": text, "completion": " " + answer, "reward": 0.5},
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]},
            {"input_ids": [(7 * n + i) % 400 for i in range(4 + n % 9)], "prompt_length": 1 + n % 3},
        ]
        return forms[n % 3]

    return lambda count: [record(n) for n in range(count)]


@pytest.fixture
def score(checkpoint: Path, tmp_path: Path) -> Callable[..., Summary]:
    """Run with the tiny model and small parts."""

    def score(records: Path, output: str = "scores.jsonl", **changes: Any) -> Summary:
        options = {"model": checkpoint, "device": "cpu", "max_tokens_per_batch": 40, "records_per_part": 4, **changes}
        return runner.run(Options(input=records, output=tmp_path / output, **options), Console(quiet=True))

    return score


class Commands:
    """`logitless score` as a process of its own, by itself or on `torchrun` ranks of this machine."""

    def start(self, *arguments: object, torchrun: int = 0) -> subprocess.Popen[str]:
        launcher = [sys.executable]
        if torchrun:
            launcher += [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={torchrun}",
                "-m",
                "logitless",
            ]
        else:
            launcher += [str(Path(sys.executable).with_name("logitless"))]
        return subprocess.Popen(
            [*launcher, "score", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, *arguments: object, torchrun: int = 0) -> subprocess.CompletedProcess[str]:
        with self.start(*arguments, torchrun=torchrun) as process:
            try:
                out, err = process.communicate(timeout=240)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@pytest.fixture(scope="session")
def commands() -> Commands:
    return Commands()
