from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from logitless.errors import InvalidInputError
from logitless_hf.score.encode import Encoder
from logitless_hf.score.records import ChatRecord, Place, Record, TextRecord, TokenRecord

PLACE = Place(Path("some.jsonl"), 0)


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerFast) -> Encoder:
    return Encoder(tokenizer, vocab_size=400, max_positions=40)


def text(prompt: str, completion: str) -> TextRecord:
    return TextRecord(prompt=prompt, completion=completion)


def chat(*turns: tuple[str, str]) -> ChatRecord:
    return ChatRecord.model_validate({"messages": [{"role": role, "content": content} for role, content in turns]})


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Unigram with SentencePiece's dummy prefix: "a" alone is "▁a"."""
    pieces = ["<s>", "</s>", "<unk>", "▁", "▁Paris", "Paris", "▁is", "is", "a", "☺", "\n", "▁a", "."]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_bos_is_put_before_a_prompt_once(encoder: Encoder, tokenizer: PreTrainedTokenizerFast) -> None:
    bos = tokenizer.bos_token_id
    plain = encoder(text("the capital", " of France"), PLACE)
    marked = encoder(text("<s>the capital", " of France"), PLACE)
    assert plain == marked
    assert plain.ids[0] == bos
    assert plain.ids.count(bos) == 1
    assert tokenizer.decode(plain.ids[1 : plain.prompt_length]) == "the capital"
    assert tokenizer.decode(plain.ids[plain.prompt_length :]) == " of France"


def test_an_empty_prompt_is_bos_alone(encoder: Encoder, tokenizer: PreTrainedTokenizerFast) -> None:
    sequence = encoder(text("", "the"), PLACE)
    assert sequence.ids[: sequence.prompt_length] == [tokenizer.bos_token_id]


def test_no_token_straddles_the_border(encoder: Encoder, tokenizer: PreTrainedTokenizerFast) -> None:
    merged = tokenizer(" France", add_special_tokens=False)["input_ids"]
    sequence = encoder(text("of Fr", "ance"), PLACE)
    assert tokenizer.decode(sequence.ids[sequence.prompt_length :]) == "ance"
    assert len(merged) == 1
    assert merged[0] not in sequence.ids


def test_a_dummy_prefix_is_kept_off_the_completion() -> None:
    tokenizer = spaced_tokenizer()
    encoder = Encoder(tokenizer, 13, None)
    assert tokenizer.tokenize("Paris", add_special_tokens=False) == ["▁Paris"]
    sequence = encoder(text("a is ", "Paris."), PLACE)
    assert encoder.tokens(sequence.ids) == ["<s>", "▁a", "▁is", "▁", "Paris", "."]  # BOS once, and EOS not at all
    assert sequence.prompt_length == 4
    assert encoder.tokens(encoder(text("a", " Paris"), PLACE).ids)[2:] == ["▁Paris"]
    assert encoder.describe()["completion_dummy_prefix"] == "removed"


def test_a_chat_is_what_the_template_renders(encoder: Encoder, tokenizer: PreTrainedTokenizerFast) -> None:
    sequence = encoder(chat(("user", "hello"), ("assistant", "world"), ("user", "not read")), PLACE)
    assert tokenizer.decode(sequence.ids[: sequence.prompt_length]) == "<turn>user\nhello</s>\n<turn>assistant\n"
    assert tokenizer.decode(sequence.ids[sequence.prompt_length :]) == "world</s>"
    assert tokenizer.bos_token_id not in sequence.ids


def test_only_the_last_answer_of_a_chat_is_scored(encoder: Encoder, tokenizer: PreTrainedTokenizerFast) -> None:
    turns = (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    sequence = encoder(chat(*turns), PLACE)
    assert tokenizer.decode(sequence.ids[sequence.prompt_length :]) == "d</s>"
    assert sequence.ids.count(tokenizer.eos_token_id) == 4


def test_token_ids_are_taken_as_they_are(encoder: Encoder) -> None:
    sequence = encoder(TokenRecord(input_ids=[399, 0, 0], prompt_length=2), PLACE)
    assert (sequence.ids, sequence.prompt_length) == ([399, 0, 0], 2)
    assert encoder.tokens([399]) == [None]  # the model's vocabulary is padded beyond the tokenizer's


BAD: list[tuple[Record, str]] = [
    (TokenRecord(input_ids=[1, 400], prompt_length=1), "token id 400 at position 1, expected 0 to 399"),
    (TokenRecord(input_ids=[1, -1], prompt_length=1), "token id -1 at position 1"),
    (TokenRecord(input_ids=[1, 2], prompt_length=2), "got 2 with 2 input_ids, expected 1 to 1"),
    (TokenRecord(input_ids=[1, 2], prompt_length=0), "got 0 with 2 input_ids"),
    (TokenRecord(input_ids=[1, 2], prompt_length=-1), "got -1 with 2 input_ids"),
    (TokenRecord(input_ids=[1], prompt_length=1), "got 1 of them, expected 2 or more"),
    (TokenRecord(input_ids=[], prompt_length=0), "got 0 of them"),
    (TokenRecord(input_ids=[1] * 41, prompt_length=1), "got 41 tokens, expected at most 40, the model's max_pos"),
    (chat(("user", "a")), 'no message whose role is "assistant"'),
    (chat(), 'no message whose role is "assistant"'),
    (chat(("user", "a"), ("assistant", "")), r'"messages\[1\].content": got "", expected the completion'),
    (text("a", ""), '"completion": got "", expected a string that is not empty'),
    (text("a\ud800", "b"), '"prompt": got a lone surrogate'),
    (text("a", "\udfff"), '"completion": got a lone surrogate'),
    (chat(("user", "\ud800"), ("assistant", "a")), r'"messages": got a lone surrogate'),
    (chat(("\ud800", "a"), ("assistant", "a")), r'"messages": got a lone surrogate'),
]


@pytest.mark.parametrize(("record", "message"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_scored_is_refused(encoder: Encoder, record: Record, message: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^some.jsonl, line 1 \(record 0\): .*{message}"):
        encoder(record, PLACE)


def _refused(tokenizer: Any, record: Record, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Encoder(tokenizer, 400, None)(record, PLACE)


def test_templates_that_cannot_serve_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    record = chat(("user", "a"), ("assistant", "b"))
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>")
    _refused(other, record, "has no chat template")
    other.chat_template = "{{ raise_exception('roles must alternate') }}"
    _refused(other, record, "chat template refuses the messages: roles must alternate")
    other.chat_template = "{{ messages | length }}{{ messages[-1]['content'] }}"
    _refused(other, record, "no border can be told")


def test_an_empty_prompt_without_bos_is_refused() -> None:
    bare = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>")
    _refused(tokenizer, text("", "a"), "the tokenizer adds no BOS")
    _refused(tokenizer, text("a", " "), "tokenises to nothing")


@pytest.mark.parametrize("record", [text("a", "b"), chat(("user", "a"), ("assistant", "b"))], ids=["text", "chat"])
def test_only_text_needs_a_tokenizer(record: Record) -> None:
    encoder = Encoder(None, 400, None)
    sequence = encoder(TokenRecord(input_ids=[5, 6, 7], prompt_length=1), PLACE)
    assert (sequence.ids, encoder.tokens(sequence.ids)) == ([5, 6, 7], [None] * 3)
    assert encoder.describe()["text"] == "none taken: the model's folder has no tokenizer"
    _refused(None, record, r'line 1 \(record 0\): got text, but the model\'s folder has no tokenizer; give "input_ids"')


class Deaf(PreTrainedTokenizerFast):
    """With special tokens, it makes "b" of everything."""

    def __call__(self, text: Any, add_special_tokens: bool = True, **others: Any) -> Any:
        return super().__call__("b" if add_special_tokens else text, add_special_tokens=add_special_tokens, **others)


@pytest.mark.parametrize(("cls", "letters"), [(Deaf, "ab"), (PreTrainedTokenizerFast, "b")], ids=["other", "nothing"])
def test_a_tokenizer_whose_front_cannot_be_told_is_needed_by_text_alone(
    cls: type[PreTrainedTokenizerFast], letters: str
) -> None:
    tokenizer = cls(tokenizer_object=Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, [])))
    encoder = Encoder(tokenizer, 400, None)
    assert encoder(TokenRecord(input_ids=[0, 0], prompt_length=1), PLACE).ids == [0, 0]
    assert encoder.tokens([0]) == [letters[0]]
    _refused(tokenizer, text("b", "b"), 'got text, but its tokenizer gives .* for "a" and .* cannot be told')
