"""Every Python block of README and of the pages runs as it stands, page by page; commands are ones that exist.

A page says what it takes for granted in `<!-- given: name, ... -->`: fixtures of this module. A block that needs what
is not here says so in `<!-- skip: next "reason" -->`; it is compiled. Checks that readers need not see stand in the
page as `<!-- invisible-code-block: python ... -->`.
"""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import torch
import typer.main
from sybil import Example, Sybil
from sybil.evaluators.skip import Skipper
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import logitless_mcore
from logitless import cli, errors
from logitless.testing.distributed import run_ranks
from logitless_hf.score import records

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGES = [path for pattern in ("*.md", "packages/*/README.md", "docs/**/*.md") for path in sorted(ROOT.glob(pattern))]


# --- what a page may take for granted -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def model() -> LlamaForCausalLM:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


@pytest.fixture
def input_ids() -> torch.Tensor:
    return torch.randint(3, 50, (2, 5))


@pytest.fixture
def attention_mask() -> torch.Tensor:
    return torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture
def completion_mask() -> torch.Tensor:
    return torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]])


@pytest.fixture
def temperature() -> float:
    return 0.7


@pytest.fixture
def rewards() -> torch.Tensor:
    return torch.tensor([1.0, 0.0])


@pytest.fixture
def advantages() -> torch.Tensor:
    return torch.tensor([1.0, -1.0])


@pytest.fixture
def group() -> torch.Tensor:
    return torch.tensor([0, 0])


@pytest.fixture
def engine_log_probs() -> torch.Tensor:
    return torch.rand(2, 5) - 2.0


@pytest.fixture
def optimizer(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.fixture
def hidden() -> torch.Tensor:
    return torch.randn(2, 5, 16, requires_grad=True)


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(50, 16, requires_grad=True)


@pytest.fixture
def ref_hidden() -> torch.Tensor:
    return torch.randn(2, 5, 24)


@pytest.fixture
def ref_weight() -> torch.Tensor:
    return torch.randn(50, 24)


@pytest.fixture
def labels() -> torch.Tensor:
    return torch.randint(0, 50, (2, 5))


@pytest.fixture
def path(model: LlamaForCausalLM, tmp_path: Path) -> str:
    model.save_pretrained(tmp_path / "checkpoint")
    return str(tmp_path / "checkpoint")


@pytest.fixture
def dataset(path: str) -> Any:
    """Of prompts, whose tokenizer is in the model's folder."""
    datasets = pytest.importorskip("datasets", reason="needs TRL, which is for Python 3.11 or newer here")
    core = Tokenizer(WordLevel({f"w{i}": i for i in range(50)}, unk_token="w3"))
    core.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "w0", "bos_token": "w1", "eos_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(path)
    return datasets.Dataset.from_dict({"prompt": ["w5 w6", "w7 w8 w9"] * 2})


@pytest.fixture
def reward() -> Callable[..., list[float]]:
    return lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids]


@pytest.fixture
def args(tmp_path: Path) -> Any:
    """Of a GRPOTrainer with a reference model."""
    trl = pytest.importorskip("trl", reason="needs TRL, which is for Python 3.11 or newer here")
    size = {"max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4}
    return trl.GRPOConfig(str(tmp_path / "trained"), **size, beta=0.04, report_to=[], use_cpu=True, bf16=False)


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(ROOT / "packages/adapter-mcore/tests")
    return importlib.import_module("megatron_cpu").__name__


# --- commands -------------------------------------------------------------------------------------------------------

EXTRAS = {
    project["name"]: project.get("optional-dependencies", {}).keys()
    for file in ROOT.glob("packages/*/pyproject.toml")
    for project in [tomllib.loads(file.read_text())["project"]]
}
SESSIONS = re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)


def commands(block: str) -> Iterator[list[str]]:
    """The words of each command, without the settings of the environment before it."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for parted, command in groupby(words, key=lambda word: word == "&&"):
            found = list(command)
            while found and re.match(r"\w+=", found[0]):
                found = found[1:]
            if found and not parted:
                yield found


def check_command(words: list[str]) -> None:
    """Raise if a command of ours has no such subcommand or option, a package no such extra, or nox no such session."""
    if "-m" in words and words[words.index("-m") + 1] == "logitless":
        words = words[words.index("-m") + 1 :]
    name, *rest = words
    if name == "logitless":
        group = typer.main.get_command(cli.app)
        with group.make_context(name, rest) as context:
            subcommand, command, options = group.resolve_command(context, rest)
            command.make_context(subcommand, options)
    elif rest[:2] == ["-m", "pip"] or name.endswith("pip"):
        for dist, extras in re.findall(r"(?<![\w/])(logitless[a-z-]*)(?:\[([\w,]+)\])?", " ".join(rest)):
            assert {extra for extra in extras.split(",") if extra} <= EXTRAS[dist]
    elif name.endswith("nox") and "-s" in rest:
        assert re.match(r"\w+", rest[rest.index("-s") + 1])[0] in SESSIONS
    elif name == "python" and rest[0] == "-c":
        compile(rest[1], "-c", "exec")


def check_commands(example: Example) -> None:
    for words in commands(example.parsed):
        check_command(words)


def check_records(example: Example) -> None:
    for i, line in enumerate(example.parsed.splitlines()):
        records.parse(line.encode(), records.Place(Path(example.path), i))


# --- the pages ------------------------------------------------------------------------------------------------------

SYBIL = Sybil(
    parsers=[
        PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE),
        CodeBlockParser(language="bash", evaluator=check_commands),
        CodeBlockParser(language="json", evaluator=check_records),
        SkipParser(),
    ]
)


def run_page(page: Path, given: dict[str, Any]) -> list[tuple[int, str]]:
    """Run a page's blocks in one namespace; of those that were skipped, the line and the reason."""
    document, skipped = SYBIL.parse(page), []
    document.namespace.update(given)
    for example in document:
        if isinstance(example.region.evaluator, Skipper):
            example.evaluate()
            continue
        if example.region.evaluator not in (check_commands, check_records):
            compile(getattr(example.parsed, "source", example.parsed), f"{page}, line {example.line}", "exec")
        try:
            example.evaluate()
        except SkipTest as reason:
            skipped.append((example.line, str(reason)))
    return skipped


def run_megatron_page(rank: int, size: int, page: Path, given: dict[str, Any]) -> list[tuple[int, str]]:
    """A rank's `run_page`, where Megatron's process groups are; `model` is a GPTModel of the checkpoint at `path`."""
    import megatron_cpu

    with megatron_cpu.parallel():
        model = megatron_cpu.build_gpt(AutoConfig.from_pretrained(given["path"]))
        logitless_mcore.load_hf_weights(model, given["path"])
        names = {"model": model, "config": model.config, "hf_config": AutoConfig.from_pretrained(given["path"])}
        return run_page(page, {**given, **names})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run_in_order(
    page: Path, request: pytest.FixtureRequest, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(request.getfixturevalue("tmp_path"))
    for variable in ("LOGITLESS_BACKEND", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    names = [name for found in re.findall(r"<!-- given: (.*) -->", page.read_text()) for name in found.split(", ")]
    given = {name: request.getfixturevalue(name) for name in names}
    if "megatron" in given:
        (skipped,) = run_ranks(1, run_megatron_page, page, given)
    else:
        skipped = run_page(page, given)
    for line, reason in skipped:
        with subtests.test(line=line):
            pytest.skip(reason)


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", "assert x == 2"),
        ("```python\n>>> int('a')\nTraceback (most recent call last):\n    ...\nValueError: b\n```\n", "ValueError: b"),
        ("```bash\nlogitless scores\n```\n", "No such command"),
        ('```json\n{"prompt": "a"}\n```\n', "line 1"),
        ('<!-- skip: next "no GPU" -->\n```python\nx = = 1\n```\n', "invalid syntax"),
        ("<!-- invisible-code-block: python\nassert False\n-->\n", "assert False"),
    ],
)
def test_a_wrong_block_is_told(page: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(page)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        run_page(tmp_path / "page.md", {})
    assert fault in "".join(traceback.format_exception(caught.value))


def test_a_skipped_block_is_told_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text('<!-- skip: next "no GPU" -->\n```python\nassert False\n```\n')
    assert run_page(tmp_path / "page.md", {}) == [(2, "no GPU")]


def test_commands_stand_where_they_are_checked() -> None:
    for page in PAGES:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            told = re.search(r"^(logitless|pip|python|nox|torchrun) ", block, re.MULTILINE)
            assert language == "bash" or not told, (page, block)


def test_links_between_files_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), (page, link)


def test_commands_of_readme_are_those_of_ci() -> None:
    readme = (ROOT / "README.md").read_text()
    demo, everything = re.findall(r"```bash\n(.*?)\n```", readme, re.DOTALL)
    assert everything in (ROOT / ".ci" / "run").read_text()
    assert demo == f"{everything} -s demo"


def test_pictures_are_what_their_script_draws() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["PICTURES"]
    written = {path.stem: path.read_text() for path in (ROOT / "docs" / "pictures").glob("*.svg")}
    assert written == {name: draw() for name, draw in drawn.items()}, "run docs/pictures.py"


@pytest.mark.parametrize("name", ["doctor", "score", "bench", "tune"])
def test_each_option_is_told(name: str) -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    group = typer.main.get_command(cli.app)
    with group.make_context("logitless", [name]) as context:
        for parameter in group.get_command(context, name).params:
            assert any(f"`{option}`" in page for option in parameter.opts), parameter.opts


@pytest.mark.parametrize("name", errors.__all__)
def test_each_error_has_its_remedy(name: str) -> None:
    assert f"\n## `{name}`" in (ROOT / "docs" / "errors.md").read_text()


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("logitless scores --model x", "No such command"),
        ("logitless score --model x --input y --output z --temperatur 1", "No such option"),
        ("logitless score --model x", "Missing parameter: input"),
        ("python -m logitless doctor --devise cpu", "No such option"),
        ("pip install 'logitless-hf[plots]'", "plots"),
        ("pip install logitless-tensorflow", "tensorflow"),
        ("nox -s demos", "demos"),
    ],
)
def test_a_wrong_command_is_told(command: str, fault: str) -> None:
    (words,) = commands(command)
    with pytest.raises(Exception, match=fault):
        check_command(words)
