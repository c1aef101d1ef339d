"""The reference design's packing functions: its worked values, its faults mended, and the way there and back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from megatron_cpu import parallel
from torch import Tensor

from logitless.errors import InputTypeError, InvalidInputError, UnsupportedError
from logitless.testing.distributed import run_ranks
from logitless_mcore.packing import (
    postprocess_bshd,
    postprocess_bshd_no_padding,
    postprocess_packed_seqs,
    postprocess_thd_no_padding,
    preprocess_bshd,
    preprocess_bshd_no_padding,
    preprocess_packed_seqs,
    preprocess_thd_no_padding,
)

DTYPES = [torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32]
HOLES = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]])
HOLED_IDS = torch.tensor([[0, 0, 5, 6, 7], [8, 0, 9, 3, 0]])


def right_padded(lengths: tuple[int, ...]) -> Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def jagged(*parts: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(parts), layout=torch.jagged)


def tp2(rank: int, size: int, function: Any, *args: Any) -> Any:
    with parallel(tp=size):
        return function(*args)


def cp2(rank: int, size: int, function: Any, *args: Any) -> Any:
    with parallel(cp=size):
        return function(*args)


# --- worked values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_holes_close_and_return_as_zeros(dtype: torch.dtype) -> None:
    mask = HOLES.to(dtype)
    packed, params = preprocess_packed_seqs(HOLED_IDS, mask)
    assert packed.tolist() == [[5, 6, 7, 8, 9, 3]]
    assert params.cu_seqlens_q.tolist() == [0, 3, 6]
    assert params.cu_seqlens_q.dtype == torch.int32
    assert postprocess_packed_seqs(packed, params, mask, 2, 5).tolist() == HOLED_IDS.tolist()


def fp8_lengths() -> tuple[list[int], int, tuple[int, ...]]:
    mask = right_padded((20, 5))
    packed, params = preprocess_packed_seqs(mask, mask, use_fp8_padding=True)
    for name in ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        assert torch.equal(getattr(params, name), params.cu_seqlens_q)
    assert params.max_seqlen_kv == params.max_seqlen_q
    return params.cu_seqlens_q.tolist(), params.max_seqlen_q, tuple(packed.shape)


def test_fp8_pads_the_last_sequence_until_the_total_divides() -> None:
    assert run_ranks(2, tp2, fp8_lengths) == [([0, 32, 256], 224, (1, 256))] * 2


def boundary_labels() -> list[int]:
    packed, _ = preprocess_thd_no_padding(jagged(torch.arange(1, 9)), need_roll=True)
    return packed[0].tolist()


def test_labels_are_shifted_before_they_are_cut_for_context_parallelism() -> None:
    assert run_ranks(2, cp2, boundary_labels) == [[2, 3, 8, 0], [4, 5, 6, 7]]


# --- faults mended ------------------------------------------------------------------------------------------------


def test_an_int_mask_selects_and_does_not_index() -> None:
    ids = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]])
    packed, _ = preprocess_packed_seqs(ids, torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0]]))
    assert packed.tolist() == [[11, 12, 13, 14, 22, 23]]


def test_labels_do_not_cross_sequences() -> None:
    ids = jagged(torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6]))
    assert preprocess_thd_no_padding(ids, need_roll=True)[0].tolist() == [[2, 3, 0, 0, 6, 0]]
    assert preprocess_bshd_no_padding(ids, need_roll=True)[0].tolist() == [[2, 3, 0], [0, 0, 0], [6, 0, 0]]


def short_sequences() -> tuple[list[int], list[int], list[list[int]]]:
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    ids = torch.tensor([[1, 0, 0, 0], [2, 3, 4, 5], [0, 0, 0, 0]])
    packed, params = preprocess_packed_seqs(ids, mask)
    back = postprocess_packed_seqs(packed, params, mask, 3, 4)
    return packed[0].tolist(), params.cu_seqlens_q.tolist(), back.tolist()


def test_sequences_shorter_than_the_chunks_are_padded() -> None:
    back = [[1, 0, 0, 0], [2, 3, 4, 5], [0, 0, 0, 0]]
    assert run_ranks(2, cp2, short_sequences) == [
        ([1, 0, 2, 5], [0, 4, 8, 8], back),
        ([0, 0, 3, 4], [0, 4, 8, 8], back),
    ]


def test_an_all_masked_batch_gives_zeros() -> None:
    mask = torch.zeros(2, 3, dtype=torch.int64)
    packed, params = preprocess_packed_seqs(mask, mask)
    assert tuple(packed.shape) == (1, 0)
    assert postprocess_packed_seqs(packed.float(), params, mask, 2, 3).tolist() == [[0.0] * 3] * 2


# --- there and back -----------------------------------------------------------------------------------------------


def naive_packed(x: Tensor, mask: Tensor, align: int) -> Tensor:
    """The specification: sequence by sequence."""
    parts = []
    for row, keep in zip(x, mask.bool(), strict=True):
        kept = row[keep]
        parts += [kept, kept.new_zeros(-len(kept) % align, *kept.shape[1:])]
    return torch.cat(parts)[None]


def naive_zigzag(packed: Tensor, cu: list[int], rank: int, size: int) -> Tensor:
    parts = []
    for begin, end in itertools.pairwise(cu):
        chunks = packed[:, begin:end].chunk(2 * size, dim=1)
        parts += [chunks[rank], chunks[2 * size - 1 - rank]]
    return torch.cat(parts, dim=1)


def check_there_and_back(rank: int, size: int, tp: int, cp: int) -> list[float]:
    """Trailing dimensions, any order of sequences, and the gradient of what comes back."""
    with parallel(tp=tp, cp=cp):
        generator = torch.Generator().manual_seed(3)
        mask = torch.rand(4, 9, generator=generator) < 0.6
        x = torch.randn(4, 9, 2, 3, generator=generator, requires_grad=True)
        packed, params = preprocess_packed_seqs(x, mask)
        whole = naive_packed(x.detach(), mask, 2 * tp * cp if cp > 1 else tp)
        own = naive_zigzag(whole, params.cu_seqlens_q.tolist(), rank // tp, cp) if cp > 1 else whole
        assert torch.equal(packed, own)
        upstream = torch.randn(4, 9, 2, 3, generator=generator)
        back = postprocess_packed_seqs(2 * packed, params, mask, 4, 9)
        assert torch.equal(back, 2 * x * mask[..., None, None])
        back.backward(upstream)
        assert x.grad is not None
        return x.grad.flatten().tolist()


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_comes_back_with_its_gradient(tp: int, cp: int) -> None:
    grads = torch.tensor(run_ranks(tp * cp, check_there_and_back, tp, cp)).view(cp, tp, 4, 9, 2, 3)
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(4, 9, generator=generator) < 0.6
    torch.randn(4, 9, 2, 3, generator=generator)
    upstream = torch.randn(4, 9, 2, 3, generator=generator)
    # Each context-parallel rank holds the gradient of its own tokens: together they are all, once.
    torch.testing.assert_close(grads[:, 0].sum(0), 2 * upstream * mask[..., None, None])


def test_nested_comes_back_with_its_lengths_gradient_and_offsets() -> None:
    parts = [torch.randn(n, 2) for n in (3, 0, 5)]
    x = jagged(*parts).requires_grad_()
    packed, params = preprocess_thd_no_padding(x)
    back: Any = postprocess_thd_no_padding(3 * packed, params, x, 3)
    assert [tuple(part.shape) for part in back.unbind()] == [(3, 2), (0, 2), (5, 2)]
    (back * x).sum().backward()  # shares the offsets, or this would raise
    torch.testing.assert_close(x.grad.values(), 6 * torch.cat(parts))  # type: ignore[union-attr]


def bshd_there_and_back(sequence_parallel: bool) -> list[Any]:
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 1, 2, 3]])
    ids, mask, position_ids = preprocess_bshd(HOLED_IDS, HOLES.bool(), positions, sequence_parallel)
    back = postprocess_bshd(ids, mask, HOLES, 5)
    return [ids.tolist(), mask.dtype, mask.int().tolist(), position_ids.tolist(), back.tolist()]


def test_rows_align_left_and_return() -> None:
    narrow = [[[5, 6, 7], [8, 9, 3]], torch.bool, [[1] * 3] * 2, [[0, 1, 2], [0, 1, 2]], HOLED_IDS.tolist()]
    wide = [
        [[5, 6, 7, 0], [8, 9, 3, 0]],
        torch.bool,
        [[1, 1, 1, 0]] * 2,
        [[0, 1, 2, 0], [0, 1, 2, 0]],
        HOLED_IDS.tolist(),
    ]
    assert run_ranks(2, tp2, bshd_there_and_back, False) == [narrow] * 2
    assert run_ranks(2, tp2, bshd_there_and_back, True) == [wide] * 2


def nested_rows() -> list[Any]:
    x = jagged(torch.tensor([1, 2, 3]), torch.tensor([4]))
    rows, mask, positions = preprocess_bshd_no_padding(x)
    back: Any = postprocess_bshd_no_padding(rows, mask)
    return [rows.tolist(), mask.int().tolist(), positions.tolist(), [part.tolist() for part in back.unbind()]]


def test_nested_rows_are_as_long_as_tensor_parallelism_divides() -> None:
    expected = [
        [[1, 2, 3, 0], [4, 0, 0, 0]],
        [[1, 1, 1, 0], [1, 0, 0, 0]],
        [[0, 1, 2, 3], [0, 1, 2, 3]],
        [[1, 2, 3], [4]],
    ]
    assert run_ranks(2, tp2, nested_rows) == [expected] * 2


def test_other_stages_get_their_arguments_back() -> None:
    x, nested = HOLED_IDS, jagged(torch.tensor([1, 2]))
    assert preprocess_packed_seqs(x, HOLES, pre_process=False)[0] is x
    assert preprocess_bshd(x, HOLES, HOLES, pre_process=False)[0] is x
    assert preprocess_thd_no_padding(nested, pre_process=False)[0] is nested
    assert preprocess_bshd_no_padding(nested, pre_process=False)[0] is nested
    stage: Any = torch.zeros(7, 1, 8)
    assert postprocess_packed_seqs(stage, None, HOLES, 2, 5, post_process=False) is stage
    assert postprocess_bshd(stage, HOLES, HOLES, 5, post_process=False) is stage
    assert postprocess_thd_no_padding(stage, None, nested, 1, post_process=False) is stage
    assert postprocess_bshd_no_padding(stage, HOLES, post_process=False) is stage


# --- errors -------------------------------------------------------------------------------------------------------


def test_errors_name_the_argument() -> None:
    _, params = preprocess_packed_seqs(HOLED_IDS, HOLES)
    with pytest.raises(InvalidInputError, match="attention_mask: got .* expected a tensor"):
        preprocess_packed_seqs(HOLED_IDS, HOLES[0])
    with pytest.raises(InvalidInputError, match="other than 0 and 1"):
        preprocess_packed_seqs(HOLED_IDS, HOLES * 2)
    with pytest.raises(InvalidInputError, match="output: got"):
        postprocess_packed_seqs(torch.zeros(1, 5), params, HOLES, 2, 5)
    with pytest.raises(InvalidInputError, match="batch_size: got 3"):
        postprocess_packed_seqs(torch.zeros(1, 6), params, HOLES, 3, 5)
    with pytest.raises(InvalidInputError, match="seq_len: got 4"):
        postprocess_packed_seqs(torch.zeros(1, 6), params, HOLES, 2, 4)
    with pytest.raises(InvalidInputError, match="do not hold"):
        postprocess_packed_seqs(torch.zeros(1, 6), params, torch.ones(2, 5), 2, 5)
    with pytest.raises(InvalidInputError, match="origin_seqlen: got 4"):
        postprocess_bshd(torch.zeros(2, 3), torch.ones(2, 3), HOLES, 4)
    with pytest.raises(InvalidInputError, match="its rows hold"):
        postprocess_bshd(torch.zeros(2, 2), torch.ones(2, 2), HOLES, 5)
    with pytest.raises(InputTypeError, match="nested"):
        preprocess_thd_no_padding(HOLED_IDS)


def rows_over_context() -> str:
    with pytest.raises(UnsupportedError) as caught:
        preprocess_bshd(HOLED_IDS, HOLES, HOLES)
    return str(caught.value)


def test_rows_over_context_parallelism_are_refused() -> None:
    assert all("bshd" in message for message in run_ranks(2, cp2, rows_over_context))
