"""Records to token ids: how BOS, the chat template and the border between prompt and completion are treated.

- The prompt and the completion are tokenised separately, as in a rollout: the engine tokenises the prompt and the model
  goes on from there. So no token ever holds text of both, even where the whole text would have been merged otherwise.
- A tokenizer that puts a space before whatever it is given (SentencePiece's dummy prefix) must not do so in the middle
  of a text: the completion is tokenised behind a sentinel, whose tokens are then taken off.
- BOS, or whatever else the tokenizer itself puts in front, is put before a prompt unless its tokens are there already.
  What the tokenizer puts behind (EOS) is left out, and none is added to a completion.
- A chat is what the chat template renders, and nothing is added to that. Its completion is what the template renders
  beyond the prompt with its generation prompt, up to the last end-of-text token where there is one (the line break that
  many templates put behind it is never sampled).
"""

from __future__ import annotations

import hashlib
from typing import Any

from logitless_hf.score.batches import TokenSequence
from logitless_hf.score.records import ChatRecord, Place, Record, TextRecord, TokenRecord

__all__ = ["Encoder"]

_SENTINELS = ("☺", "\n", "a", "0")


class Encoder:
    """Turns records into token sequences that a model of `vocab_size` and `max_positions` can score.

    Args:
        tokenizer: None for a model that has none, which can score token ids alone.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, max_positions: int | None) -> None:
        self._tokenizer: Any = tokenizer
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._prefix: list[int] = []
        self._dummy_prefix = False
        self._no_text = "the model's folder has no tokenizer" if tokenizer is None else self._try_out()

    def __call__(self, record: Record, place: Place) -> TokenSequence:
        """The record as tokens; `InvalidInputError` if it cannot be scored."""
        if self._no_text and not isinstance(record, TokenRecord):
            raise place.error(f'got text, but {self._no_text}; give "input_ids" and "prompt_length"')
        if isinstance(record, TextRecord):
            prompt, completion = self._text(record, place)
        elif isinstance(record, ChatRecord):
            prompt, completion = self._chat(record, place)
        else:
            prompt, completion = self._tokens(record, place)
        if not completion:
            raise place.error("the completion tokenises to nothing, so there is no token to score; remove the record")
        if not prompt:
            raise place.error(
                "the prompt has no tokens and the tokenizer adds no BOS, so nothing predicts the completion's first "
                "token; give a prompt"
            )
        ids = prompt + completion
        self._check(ids, place)
        if record.logprobs is not None and len(record.logprobs) != len(completion):
            raise place.error(
                f'field "logprobs": got {len(record.logprobs)} of them, expected {len(completion)}, one for each '
                "of the completion's tokens as they are scored here; give the engine's own tokens as \"input_ids\" and "
                '"prompt_length"'
            )
        return TokenSequence(place.record, ids, len(prompt), record.logprobs)

    def tokens(self, ids: list[int]) -> list[str | None]:
        """The vocabulary's own strings for `ids`; None for an id that the tokenizer does not know, or without one."""
        if self._tokenizer is None:
            return [None] * len(ids)
        known: list[str | None] = self._tokenizer.convert_ids_to_tokens(ids)
        return known

    def describe(self) -> dict[str, Any]:
        """How text becomes tokens, for the output's metadata."""
        if self._no_text:
            return {"text": f"none taken: {self._no_text}", "token_records": "taken as they are; none added"}
        template = getattr(self._tokenizer, "chat_template", None)
        digest = hashlib.sha256(repr(template).encode()).hexdigest() if template else None
        return {
            "bos": {
                "token_ids": self._prefix,
                "text_records": "put before the prompt unless it starts with them" if self._prefix else "none added",
                "chat_records": "what the chat template renders; none added",
                "token_records": "taken as they are; none added",
            },
            "eos": "none added to a completion; a chat's completion ends with the template's, if it has one",
            "chat_template_sha256": digest,
            "border": "prompt and completion tokenised separately",
            "completion_dummy_prefix": "removed" if self._dummy_prefix else "the tokenizer has none",
        }

    def _text(self, record: TextRecord, place: Place) -> tuple[list[int], list[int]]:
        for name, text in (("prompt", record.prompt), ("completion", record.completion)):
            _refuse_surrogates(text, name, place)
        if not record.completion:
            raise place.error('field "completion": got "", expected a string that is not empty')
        prompt = self._plain(record.prompt) if record.prompt else []
        if prompt[: len(self._prefix)] != self._prefix:
            prompt = self._prefix + prompt
        return prompt, self._continued(record.completion, place)

    def _chat(self, record: ChatRecord, place: Place) -> tuple[list[int], list[int]]:
        if not getattr(self._tokenizer, "chat_template", None):
            raise place.error(
                'got "messages", but the model\'s tokenizer has no chat template; give "prompt" and "completion"'
            )
        turns = [message.model_dump() for message in record.messages]
        last = max((i for i, turn in enumerate(turns) if turn["role"] == "assistant"), default=None)
        if last is None:
            raise place.error('field "messages": got no message whose role is "assistant", expected one to score')
        if not turns[last]["content"]:
            raise place.error(f'field "messages[{last}].content": got "", expected the completion to score')
        prompt = self._rendered(turns[:last], True, place)
        whole = self._rendered(turns[: last + 1], False, place)
        if not whole.startswith(prompt):
            raise place.error(
                "the chat template renders the prompt otherwise when the completion follows, so no border can be told; "
                'give "prompt" and "completion", or "input_ids" and "prompt_length"'
            )
        completion = self._continued(whole[len(prompt) :], place)
        eos = self._tokenizer.eos_token_id
        if eos in completion:
            completion = completion[: len(completion) - completion[::-1].index(eos)]
        return self._plain(prompt), completion

    def _tokens(self, record: TokenRecord, place: Place) -> tuple[list[int], list[int]]:
        count, border = len(record.input_ids), record.prompt_length
        if not 1 <= border < count:
            raise place.error(
                f'field "prompt_length": got {border} with {count} input_ids, expected 1 to {count - 1}: nothing '
                "predicts the first token, and one or more must be left to score"
                if count > 1
                else f'field "input_ids": got {count} of them, expected 2 or more: one to go on from, one to score'
            )
        return record.input_ids[:border], record.input_ids[border:]

    def _check(self, ids: list[int], place: Place) -> None:
        for position, token in enumerate(ids):
            if not 0 <= token < self._vocab_size:
                raise place.error(
                    f"got token id {token} at position {position}, expected 0 to {self._vocab_size - 1}: the model's "
                    "vocabulary; was the record made with another tokenizer?"
                )
        if self._max_positions is not None and len(ids) > self._max_positions:
            raise place.error(
                f"got {len(ids)} tokens, expected at most {self._max_positions}, the model's max_position_embeddings; "
                "shorten or remove the record"
            )

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids)

    def _continued(self, text: str, place: Place) -> list[int]:
        """`text` as tokens in the middle of a text: no dummy prefix."""
        if not self._dummy_prefix:
            return self._plain(text)
        for sentinel in _SENTINELS:
            front, both = self._plain(sentinel), self._plain(sentinel + text)
            if both[: len(front)] == front:
                return both[len(front) :]
        raise place.error(
            "the tokenizer puts a space before the completion and no way was found to keep it off; "
            'give "input_ids" and "prompt_length"'
        )

    def _rendered(self, turns: list[dict[str, Any]], generation_prompt: bool, place: Place) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=generation_prompt
            )
        except Exception as error:  # a template is a program of its own and may raise anything
            raise place.error(f"the chat template refuses the messages: {error}") from error
        _refuse_surrogates(text, "messages", place)  # whichever part of them brought it in
        return text

    def _try_out(self) -> str | None:
        """Find out what the tokenizer puts in front; why it cannot be told, if so."""
        plain = self._plain("a")
        whole: list[int] = list(self._tokenizer("a", verbose=False)["input_ids"])
        start = next((n for n in range(len(whole)) if plain and whole[n : n + len(plain)] == plain), None)
        if start is None:
            return (
                f'its tokenizer gives {plain} for "a" and {whole} with special tokens, so what it puts in front cannot '
                "be told"
            )
        self._prefix = whole[:start]
        self._dummy_prefix = str(self._tokenizer.convert_ids_to_tokens(plain)[0]).startswith(("▁", "Ġ"))
        return None


def _refuse_surrogates(text: str, name: str, place: Place) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise place.error(f'field "{name}": got a lone surrogate ({error}), expected Unicode text') from error
