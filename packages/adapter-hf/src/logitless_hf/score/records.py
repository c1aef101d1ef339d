"""Records: the three forms that a line of an input file may have, read as a stream.

| form | fields | the completion, which is scored |
|---|---|---|
| text | `prompt`, `completion` | `completion` |
| chat | `messages` | the last message whose role is "assistant"; messages after it are not read |
| tokens | `input_ids`, `prompt_length` | `input_ids[prompt_length:]` |

Any of them may carry `logprobs`, what the rollout engine gave for the completion's tokens, in nats. Other fields are
allowed and ignored, so that a file may carry rewards, ids and the like. A line with the fields of two forms is refused
rather than guessed at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from logitless.errors import InvalidInputError

__all__ = ["ChatRecord", "InputFile", "Message", "Place", "Record", "TextRecord", "TokenRecord", "parse"]

_FORMS = '"prompt" and "completion", or "messages", or "input_ids" and "prompt_length"'

_EXPECTED = {
    "prompt": "a string",
    "completion": "a string that is not empty",
    "messages": 'a list of {"role": string, "content": string}',
    "role": "a string",
    "content": "a string",
    "input_ids": "a list of integers, each 0 or greater",
    "prompt_length": "an integer from 1 to the number of input_ids less 1",
    "logprobs": "a list of numbers in nats, none above 0, one for each of the completion's tokens; rename the field to "
    "have it ignored",
}


# No engine's rounding gives a log-prob above 0 by more; what does is not one.
LogProb = Annotated[float, Field(le=1e-3, allow_inf_nan=False)]


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    logprobs: list[LogProb] | None = None


class TextRecord(_Form):
    """A prompt and the completion to score, both plain text."""

    prompt: str
    completion: str


class Message(BaseModel):
    """One turn of a chat; fields beside these two reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    role: str
    content: str


class ChatRecord(_Form):
    """A chat whose last assistant message is the completion to score."""

    messages: list[Message]


class TokenRecord(_Form):
    """Token ids, taken as they are; the first `prompt_length` of them are not scored."""

    input_ids: list[int]
    prompt_length: int


Record = TextRecord | ChatRecord | TokenRecord


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record stands, to begin an error with."""

    path: Path
    record: int  # from 0

    def error(self, message: str) -> InvalidInputError:
        """The error to raise for this record."""
        return InvalidInputError(f"{self.path}, line {self.record + 1} (record {self.record}): {message}")


class InputFile:
    """The lines of a JSONL file as a stream; no more than one line is held."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise InvalidInputError(f"--input: got {path}, which does not exist; expected a JSONL file of records")
        if not path.is_file():
            raise InvalidInputError(
                f"--input: got {path}, which is not a regular file; it is read twice, so save a pipe's content first"
            )
        self.path = path
        self.sha256 = ""
        self.records = 0

    def lines(self) -> Iterator[tuple[Place, bytes]]:
        """Each line, unparsed, with its place; `sha256` and `records` are set once the last has been read."""
        digest = hashlib.sha256()
        record = -1
        try:
            with self.path.open("rb") as file:
                for record, raw in enumerate(file):
                    digest.update(raw)
                    yield Place(self.path, record), raw
        except OSError as error:
            raise InvalidInputError(f"--input: {self.path} cannot be read: {error}") from error
        self.sha256 = digest.hexdigest()
        self.records = record + 1


def parse(raw: bytes, place: Place) -> Record:
    """One line as a record; `InvalidInputError` names the place, what was got, expected, and to do."""
    if not raw.strip():
        raise place.error("got an empty line, expected a JSON object; remove the line")
    try:
        # Some editors begin a file with a byte order mark.
        text = raw.decode("utf-8-sig" if place.record == 0 else "utf-8")
        fields = json.loads(text, object_pairs_hook=_once)
    except UnicodeDecodeError as error:
        raise place.error(f"got bytes that are not UTF-8 ({error}); save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise place.error(f"got invalid JSON ({error}), expected one JSON object on one line") from error
    if not isinstance(fields, dict):
        raise place.error(f"got {_shown(fields)}, expected a JSON object with {_FORMS}")
    form = _form(fields, place)
    try:
        return form.model_validate(fields)
    except ValidationError as error:
        raise place.error(_explain(error)) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON's own reading takes the last of several, and nobody knows which was meant."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {json.dumps(twice)} stands twice in one object")
    return fields


def _form(fields: dict[str, Any], place: Place) -> type[TextRecord] | type[ChatRecord] | type[TokenRecord]:
    found: list[type[TextRecord] | type[ChatRecord] | type[TokenRecord]] = []
    if "prompt" in fields or "completion" in fields:
        found.append(TextRecord)
    if "messages" in fields:
        found.append(ChatRecord)
    if "input_ids" in fields or "prompt_length" in fields:
        found.append(TokenRecord)
    if len(found) == 1:
        return found[0]
    names = ", ".join(json.dumps(name) for name in list(fields)[:8]) or "none"
    if not found:
        raise place.error(f"got the fields {names}, expected {_FORMS}")
    raise place.error(f"got the fields {names}, which make more than one form; keep {_FORMS}, and rename the rest")


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    path = first["loc"]
    name = str(path[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:])
    expected = _EXPECTED[next(str(part) for part in reversed(path) if str(part) in _EXPECTED)]
    if first["type"] == "missing":
        return f'the field "{name}" is missing, expected {expected}; a record has {_FORMS}'
    return f'field "{name}": got {_shown(first["input"])}, expected {expected}'


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
