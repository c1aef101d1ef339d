from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logitless.errors import InvalidInputError
from logitless_hf.score.records import ChatRecord, InputFile, Place, TextRecord, TokenRecord, parse

PLACE = Place(Path("some.jsonl"), 2)
MARK = b"\xef\xbb\xbf"

BAD: list[tuple[str, bytes, str]] = [
    ("empty", b"\n", "got an empty line.*remove"),
    ("blank", b"  \t\n", "got an empty line"),
    ("not json", b"{'prompt': 1}\n", "got invalid JSON.*expected one JSON object on one line"),
    ("cut off", b'{"prompt": "a", "comple', "got invalid JSON"),
    ("two objects", b"{} {}\n", "got invalid JSON"),
    ("twice", b'{"prompt": "a", "completion": "b", "prompt": "c"}', 'the name "prompt" stands twice in one object'),
    ("twice, within", b'{"messages": [{"role": "user", "role": "a"}]}', 'the name "role" stands twice in one object'),
    ("deep", b"[" * 100_000, "got invalid JSON"),
    ("huge integer", b'{"input_ids": [' + b"9" * 5000 + b"]}", "got invalid JSON"),
    ("not utf-8", b'{"prompt": "\xff"}', "not UTF-8"),
    ("list", b"[1, 2]\n", r"got \[1, 2\] \(list\), expected a JSON object"),
    ("no form", b'{"text": "a"}\n', 'got the fields "text", expected "prompt" and "completion"'),
    ("no fields", b"{}\n", "got the fields none"),
    ("two forms", b'{"prompt": "a", "completion": "b", "messages": []}\n', "make more than one form; keep"),
    ("missing completion", b'{"prompt": "a"}\n', 'field "completion" is missing, expected a string that is not empty'),
    ("missing prompt", b'{"completion": "a"}\n', 'field "prompt" is missing'),
    ("missing length", b'{"input_ids": [1, 2]}\n', 'field "prompt_length" is missing'),
    ("number", b'{"prompt": 5, "completion": "a"}\n', r'"prompt": got 5 \(int\), expected a string'),
    ("null", b'{"prompt": null, "completion": "a"}\n', r'"prompt": got null \(NoneType\)'),
    ("string ids", b'{"input_ids": "12", "prompt_length": 1}\n', r'"input_ids": got "12" \(str\)'),
    ("float id", b'{"input_ids": [1, 2.5], "prompt_length": 1}\n', r'"input_ids\[1\]": got 2.5 \(float\)'),
    ("bool id", b'{"input_ids": [1, true], "prompt_length": 1}\n', r'"input_ids\[1\]": got true \(bool\)'),
    ("string length", b'{"input_ids": [1, 2], "prompt_length": "1"}\n', r'"prompt_length": got "1" \(str\)'),
    ("message text", b'{"messages": "hi"}\n', r'"messages": got "hi" \(str\)'),
    ("message parts", b'{"messages": [{"role": "user", "content": []}]}\n', r'"messages\[0\].content": got \[\]'),
    ("no role", b'{"messages": [{"content": "a"}]}\n', r'"messages\[0\].role" is missing'),
]


@pytest.mark.parametrize(("raw", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_line_is_refused_with_its_place(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"(?s)^some.jsonl, line 3 \(record 2\): .*{message}"):
        parse(raw, PLACE)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "a", "completion": "b"}, TextRecord(prompt="a", completion="b")),
        ({"input_ids": [1, 2], "prompt_length": 1}, TokenRecord(input_ids=[1, 2], prompt_length=1)),
    ],
)
def test_other_fields_are_ignored(fields: dict[str, Any], expected: object) -> None:
    assert parse(json.dumps({**fields, "reward": 1.5, "id": None}).encode(), PLACE) == expected


def test_what_a_message_holds_besides_reaches_the_template() -> None:
    record = parse(b'{"messages": [{"role": "assistant", "content": "a", "name": "b"}]}', PLACE)
    assert isinstance(record, ChatRecord)
    assert record.messages[0].model_dump() == {"role": "assistant", "content": "a", "name": "b"}


def test_lines_are_counted_and_hashed(write: Callable[..., Path]) -> None:
    import hashlib

    path = write("a", "b\u2028c", "d")
    path.write_bytes(path.read_bytes()[:-1])  # the last line needs no line break
    source = InputFile(path)
    assert [(place.record, raw) for place, raw in source.lines()] == [
        (0, b"a\n"),
        (1, "b\u2028c\n".encode()),
        (2, b"d"),
    ]
    assert source.records == 3
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_missing_input_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="does not exist; expected a JSONL file"):
        InputFile(tmp_path / "none.jsonl")
    with pytest.raises(InvalidInputError, match="not a regular file"):
        InputFile(tmp_path)


def test_a_byte_order_mark_may_begin_the_file(tmp_path: Path) -> None:
    path = tmp_path / "marked.jsonl"
    line = b'{"prompt": "a", "completion": "b"}\n'
    path.write_bytes(MARK + line + MARK + line)
    (first, raw), (second, again) = InputFile(path).lines()
    assert parse(raw, first) == TextRecord(prompt="a", completion="b")
    with pytest.raises(InvalidInputError, match="line 2 .* invalid JSON"):
        parse(again, second)
