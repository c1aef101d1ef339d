"""Malformed records: each line is scored as it stands, or refused with its place and what to do; nothing in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from common import TALLY, fuzzed
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from logitless.errors import InvalidInputError
from logitless_hf.score import runner
from logitless_hf.score.encode import Encoder
from logitless_hf.score.options import Options
from logitless_hf.score.records import InputFile, TextRecord, TokenRecord, parse

VOCAB, POSITIONS = 400, 96
BAD: dict[str, Any] = {}
Line = tuple[bytes, "dict[str, Any] | None"]  # with what must be scored; BAD: nothing may; None: one or the other

text = st.text(max_size=12)
words = st.text(alphabet="the capital of France ☺é\u0000\n<>/s", min_size=1, max_size=12)
ids = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=12)
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 0, -1, VOCAB]),
    st.floats(),
    st.sampled_from(["", "\ud800", "a\udfff", "1", "NaN", "\u0000", "x" * 5000]),
    text,
    st.lists(st.one_of(st.integers(), st.floats(), text, st.none()), max_size=4),
    st.dictionaries(text, st.integers(), max_size=3),
    st.sampled_from(["\ud800", "a\udfffb"]),
    st.sampled_from([[[]], {"role": "user"}, [{"role": "assistant", "content": "\udc00"}], [{}], [[1, 2]], ["a"]]),
)
FIELDS = ("prompt", "completion", "messages", "input_ids", "prompt_length", "logprobs")


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    """A good one, of any form."""
    form = draw(st.integers(0, 2))
    if form == 0:
        record: dict[str, Any] = {"prompt": draw(words), "completion": draw(words)}
    elif form == 1:
        roles = draw(st.lists(st.sampled_from(["system", "user", "assistant"]), max_size=2))
        turns = [{"role": role, "content": draw(words)} for role in [*roles, "user"]]
        record = {"messages": [*turns, {"role": "assistant", "content": draw(words)}]}
    else:
        record = {"input_ids": draw(ids)}
        record["prompt_length"] = draw(st.integers(1, len(record["input_ids"]) - 1))
        if draw(st.booleans()):
            count = len(record["input_ids"]) - record["prompt_length"]
            record["logprobs"] = draw(st.lists(st.floats(-50, 0), min_size=count, max_size=count))
    if draw(st.booleans()):
        extra = st.dictionaries(text.filter(lambda name: name not in FIELDS), odd, max_size=2)
        record |= draw(extra)
    return record


@st.composite
def changed(draw: st.DrawFn) -> Line:
    """A record with a field taken out, put in, renamed or given another value: it may be good by chance."""
    record = dict(draw(records()))
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from([*record, *FIELDS]))
        action = draw(st.integers(0, 4))
        if action == 0:
            record.pop(name, None)
        elif action == 1:
            record[draw(text)] = record.pop(name, 0)
        elif action == 2 and isinstance(record.get(name), list) and record[name]:
            record[name] = list(record[name])
            record[name][draw(st.integers(0, len(record[name]) - 1))] = draw(odd)
        elif action == 3 and isinstance(record.get(name), list) and record[name] and isinstance(record[name][0], dict):
            turn = draw(st.integers(0, len(record[name]) - 1))
            key = draw(st.sampled_from(["role", "content", "tool_calls"]))
            record[name] = [{**one, key: draw(odd)} if i == turn else one for i, one in enumerate(record[name])]
        else:
            record[name] = draw(odd)
    return json.dumps(record, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass"), None


def nested(depth: int, inside: str) -> str:
    return inside % ("[" * depth + "]" * depth)


@st.composite
def broken(draw: st.DrawFn) -> Line:
    """Bytes that are no record, most of them."""
    raw = json.dumps(draw(records())).encode()
    at = draw(st.integers(0, len(raw)))
    return draw(
        st.sampled_from(
            [
                raw[:at],
                raw[:at] + draw(st.binary(min_size=1, max_size=4)).replace(b"\n", b"") + raw[at:],
                raw[:at] + b"\x00" + raw[at + 1 :],
                raw + raw,
                raw.decode().encode("utf-16").replace(b"\n", b""),
                b"\xef\xbb\xbf" + raw,
                b" \t\r",
                b"[" * 100_000,
                b'{"prompt":' * 5000,
                b'{"prompt": "a", "completion": ' + b"9" * 5000 + b"}",
                b"NaN",
                b'"' + raw,
                *(
                    nested(depth, inside).encode()
                    for depth in (200, 300, 900, 960, 985)
                    for inside in (
                        "%s",
                        '{"prompt": %s}',
                        '{"prompt": "a", "completion": "b", "note": %s}',
                        '{"messages": [{"role": "assistant", "content": "b", "note": %s}]}',
                        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": %s}]}',
                    )
                ),
            ]
        )
    ), None


@st.composite
def twice(draw: st.DrawFn) -> Line:
    """A record that says two things of one field."""
    record = draw(records())
    name = draw(st.sampled_from(sorted(set(record) & set(FIELDS))))
    front = json.dumps({name: draw(st.one_of(odd, st.just(record[name])))})
    return front[:-1].encode() + b", " + json.dumps(record).encode()[1:], BAD


@st.composite
def good(draw: st.DrawFn) -> Line:
    """A record in one of the ways to write it down."""
    record = draw(records())
    raw = json.dumps(record, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 0])))
    ends = st.sampled_from(["", "\r", " ", "\t"])
    line = draw(ends).join(["", raw.replace("\n", draw(ends)), ""])
    try:
        return line.encode(), record
    except UnicodeEncodeError:  # an odd value beside the fields, written down as it is
        return json.dumps(record).encode(), record


lines = st.one_of(good(), changed(), broken(), twice())


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer, VOCAB, POSITIONS)


def texts(tokenizer: Any, record: dict[str, Any]) -> tuple[str, str]:
    """Prompt and completion as text that the tokens must spell."""
    if "messages" in record:
        *turns, last = record["messages"]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return prompt, last["content"] + "</s>"
    bos = "" if record["prompt"].startswith("<s>") else "<s>"
    return bos + record["prompt"], record["completion"]


def spelt(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return text


@fuzzed(6)
@given(lines=st.lists(lines, min_size=1, max_size=3))
def test_every_line_is_read_as_it_stands_or_refused_by_its_place(
    lines: list[Line], encoder: Encoder, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "records.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in lines))
    source = InputFile(path)
    for place, raw in source.lines():
        line, meant = lines[place.record]
        assert raw.rstrip(b"\n") == line
        told = ""
        try:
            record = parse(raw, place)
            sequence = encoder(record, place)
        except InvalidInputError as error:
            told = str(error)
        if told:
            assert not meant, f"{meant}: {told}"
            where, what = told.split("): ", 1)
            assert where == f"{path}, line {place.record + 1} (record {place.record}"
            TALLY.told("records", what)
            continue
        assert 1 <= sequence.prompt_length < len(sequence.ids) <= POSITIONS
        assert all(type(token) is int and 0 <= token < VOCAB for token in sequence.ids)
        border = sequence.prompt_length
        prompt, completion = sequence.ids[:border], sequence.ids[border:]
        read = json.loads(raw.decode("utf-8-sig" if place.record == 0 else "utf-8"))
        assert meant is not BAD, line
        if isinstance(record, TokenRecord):
            assert (sequence.ids, border) == (read["input_ids"], read["prompt_length"])
        elif isinstance(record, TextRecord) or meant:
            assert (spelt(tokenizer, prompt), spelt(tokenizer, completion)) == texts(tokenizer, read)
        assert sequence.rollout_log_probs == read.get("logprobs")
        TALLY.right("records")
    assert source.records == len(path.read_bytes().splitlines(keepends=True)) or b"\r" in path.read_bytes()


@pytest.fixture(scope="module")
def own(checkpoint: Path) -> Callable[[list[int], int], torch.Tensor]:
    """A sequence's scores, from the logits of the model itself."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)

    @torch.no_grad()
    def own(ids: list[int], border: int) -> torch.Tensor:
        log_p = model(torch.tensor([ids])).logits[0, border - 1 : -1].log_softmax(-1)
        return log_p.gather(-1, torch.tensor(ids[border:])[:, None])[:, 0]

    return own


@fuzzed(0.5)
@given(lines=st.lists(st.one_of(good(), good(), lines), min_size=1, max_size=4))
def test_a_file_is_scored_whole_or_nothing_is_written(
    lines: list[Line], checkpoint: Path, own: Any, encoder: Encoder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    path, output = folder / "records.jsonl", folder / "scores.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line, _ in lines))
    options = Options(model=checkpoint, input=path, output=output, device="cpu", records_per_part=2)
    told = ""
    try:
        runner.run(options, Console(quiet=True))
    except InvalidInputError as error:
        told = str(error)
    if told:
        assert any(not meant for _, meant in lines), told
        assert [file.name for file in folder.iterdir()] == [path.name]
        TALLY.told("files of records", told.split("): ", 1)[-1])
        return
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    source = InputFile(path)
    sequences = [encoder(parse(raw, place), place) for place, raw in source.lines()]
    assert [row["record"] for row in rows] == list(range(len(lines)))
    for row, sequence in zip(rows, sequences, strict=True):
        expected = own(sequence.ids, sequence.prompt_length)
        assert row["token_ids"] == sequence.ids[sequence.prompt_length :]
        torch.testing.assert_close(torch.tensor(row["log_probs"]).double(), expected, rtol=0, atol=2e-4)
    TALLY.right("files of records")
