from __future__ import annotations

from typing import Any

import pytest
import torch

from logitless.errors import InputTypeError, InvalidInputError
from logitless_hf.labels import next_token_labels

TOKENS = torch.tensor([[11, 12, 13, 14, 15]])
I = -100  # noqa: E741


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ({}, [12, 13, 14, 15, I]),
        ({"attention_mask": [[1, 1, 1, 1, 1]]}, [12, 13, 14, 15, I]),
        ({"attention_mask": [[0, 0, 1, 1, 1]]}, [I, I, 14, 15, I]),
        ({"attention_mask": [[1, 1, 1, 0, 0]]}, [12, 13, I, I, I]),
        ({"attention_mask": [[1, 1, 0, 1, 1]]}, [12, I, I, 15, I]),
        ({"attention_mask": [[0, 0, 0, 0, 0]]}, [I, I, I, I, I]),
        ({"attention_mask": [[9, 1, 1, 1, 1, 1, 1]]}, [12, 13, 14, 15, I]),
        ({"position_ids": [[0, 1, 2, 3, 4]]}, [12, 13, 14, 15, I]),
        ({"position_ids": [[0, 1, 0, 1, 2]]}, [12, I, 14, 15, I]),
        ({"position_ids": [[3, 4, 0, 0, 1]]}, [12, I, I, 15, I]),
        ({"position_ids": [0, 1, 0, 1, 2]}, [12, I, 14, 15, I]),
        ({"position_ids": [[[0, 1, 0, 1, 2]]] * 4}, [12, I, 14, 15, I]),
        ({"cu_seq_lens_q": [0, 2, 5], "cu_seq_lens_k": [0, 2, 5]}, [12, I, 14, 15, I]),
        ({"cu_seq_lens_q": [0, 2, 4]}, [12, I, 14, I, I]),
        ({"cu_seq_lens_q": [0, 1, 1, 5]}, [I, 13, 14, 15, I]),
        ({"position_ids": [[1, 1, 0, 1, 2]], "attention_mask": [[0, 0, 1, 1, 1]]}, [I, I, 14, 15, I]),
    ],
)
def test_borders(call: dict[str, Any], expected: list[int]) -> None:
    given = {name: torch.tensor(value) for name, value in call.items()}
    assert next_token_labels(TOKENS, given).tolist() == [expected]


@pytest.mark.parametrize(
    "call", [{}, {"attention_mask": torch.tensor([[0, 1, 1, 0, 1]])}, {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])}]
)
def test_several_labels_of_a_place_move_together(call: dict[str, torch.Tensor]) -> None:
    several = torch.stack([TOKENS, TOKENS + 100], -1)
    alone = [next_token_labels(x, call) for x in several.unbind(-1)]
    assert torch.equal(next_token_labels(several, call), torch.stack(alone, -1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8, torch.float32])
def test_a_mask_of_any_dtype(dtype: torch.dtype) -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0]]).to(dtype)
    assert next_token_labels(TOKENS, {"attention_mask": mask}).tolist() == [[I, 13, 14, I, I]]


def test_lengths_count_over_all_rows() -> None:
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    got = next_token_labels(tokens, {"cu_seq_lens_q": torch.tensor([0, 2, 6], dtype=torch.int32)})
    assert got.tolist() == [[2, I, I], [5, 6, I]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.bfloat16, torch.float32])
def test_tokens_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    """2049 is 2048 in float16: the score would be another token's."""
    with pytest.raises(InputTypeError, match=rf"labels: got dtype {dtype}, expected token ids, integers"):
        next_token_labels(TOKENS.to(dtype), {})


def test_labels_are_int64_and_the_tokens_are_not_written() -> None:
    tokens = TOKENS.to(torch.uint8)
    got = next_token_labels(tokens, {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])})
    assert got.dtype == torch.int64
    assert got.tolist() == [[I, 13, 14, 15, I]]
    assert tokens.tolist() == TOKENS.tolist()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "attention_mask"),
        ({"attention_mask": {"full": torch.ones(1, 5)}}, "attention_mask"),
        ({"attention_mask": torch.ones(1, 4)}, "attention_mask"),
        ({"attention_mask": torch.ones(2, 5)}, "attention_mask"),
        ({"position_ids": torch.zeros(3, 1, 5)}, "position_ids"),
        ({"position_ids": torch.zeros(1, 4)}, "position_ids"),
        ({"cu_seq_lens_q": [0, 5]}, "cu_seq_lens"),
        ({"cu_seq_lens_q": torch.zeros(2, 2)}, "cu_seq_lens"),
    ],
)
def test_borders_that_cannot_be_told_ask_for_shift_labels(call: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}.*pass shift_labels"):
        next_token_labels(TOKENS, call)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ({"position_ids": [[0, 1, 0, 1, 2]], "attention_mask": [[1, 1, 1, 1, 1]]}, "attention_mask"),
        ({"position_ids": [[[0, 1, 0, 1, 2]]] * 4, "attention_mask": [[1, 1, 1, 1, 0]]}, "attention_mask"),
        ({"position_ids": [[0, 1, 0, 1, 2]], "use_cache": True}, "use_cache=True"),
    ],
)
def test_packed_sequences_that_transformers_would_mix(call: dict[str, Any], name: str) -> None:
    given = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in call.items()}
    with pytest.raises(InvalidInputError, match=f"{name}: given with position_ids that restart .* leave it out"):
        next_token_labels(TOKENS, given)
    given["position_ids"] = torch.arange(5).unsqueeze(0)  # one sequence
    next_token_labels(TOKENS, given)
