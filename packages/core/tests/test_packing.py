"""PackedBatch: there and back for any lengths, masks, alignments and ranks, and no label across a border."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logitless import PackedBatch
from logitless._segments import shard_index
from logitless.errors import InputTypeError, InvalidInputError
from logitless.packing import IGNORE_INDEX
from logitless.testing.distributed import run_ranks

LENGTHS = st.lists(st.integers(0, 9), max_size=6)
KINDS = ("padded", "nested", "list")
IDS, ONES = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
LAYOUTS = ("left", "right", "holes")


def ids_of(lengths: list[int]) -> list[Tensor]:
    """Distinct ids, so that a token that strays shows."""
    starts = [1 + sum(lengths[:i]) for i in range(len(lengths))]
    return [torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def padded(parts: list[Tensor], layout: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """[B, S] ids and mask: left, right, or with holes; ids are -7 where the mask is 0."""
    width = max((len(part) for part in parts), default=0) + 2
    ids, mask = torch.full((len(parts), width), -7), torch.zeros(len(parts), width, dtype=torch.int64)
    g = torch.Generator().manual_seed(seed)
    for row, part in enumerate(parts):
        where = {
            "left": torch.arange(width - len(part), width),
            "right": torch.arange(len(part)),
            "holes": torch.randperm(width, generator=g)[: len(part)].sort().values,
        }[layout]
        ids[row, where], mask[row, where] = part, 1
    return ids, mask


def make(kind: str, lengths: list[int], align: int = 1, **extra: Any) -> PackedBatch:
    parts = ids_of(lengths)
    if kind == "padded":
        return PackedBatch.from_padded(*padded(parts, "holes"), align=align, **extra)
    if kind == "nested":
        return PackedBatch.from_nested(torch.nested.nested_tensor(parts, layout=torch.jagged), align=align, **extra)
    return PackedBatch.from_sequences(parts, align=align, **extra)


def jagged(lengths: list[int]) -> Tensor:
    """The nested form of lengths, numbered."""
    return torch.nested.nested_tensor(ids_of(lengths), layout=torch.jagged)


def rows(x: Any) -> list[list[int]]:
    return [row.tolist() for row in (x.unbind() if isinstance(x, Tensor) else x)]


def test_worked_example() -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [8, 0, 9, 3, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]])
    batch = PackedBatch.from_padded(ids, mask)
    assert batch.input_ids.tolist() == [5, 6, 7, 8, 9, 3]
    assert batch.labels.tolist() == [6, 7, -100, 9, 3, -100]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 6]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.unpack(batch.input_ids).tolist() == ids.tolist()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.bool, torch.float32, torch.bfloat16])
def test_any_dtype_of_mask(dtype: torch.dtype) -> None:
    """A mask of ints that indexes rows in place of masking corrupts the batch: rows 11 to 14 become 12 by 4."""
    ids, mask = padded(ids_of([11, 12, 13, 14]), "holes")
    batch = PackedBatch.from_padded(ids, mask.to(dtype))
    assert batch.input_ids.tolist() == list(range(1, 51))


@given(
    lengths=LENGTHS, align=st.integers(1, 5), layout=st.sampled_from(["left", "right", "holes"]), seed=st.integers(0, 9)
)
@settings(max_examples=60, deadline=None)
def test_padded_there_and_back(lengths: list[int], align: int, layout: str, seed: int) -> None:
    ids, mask = padded(ids_of(lengths), layout, seed)
    batch = PackedBatch.from_padded(ids, mask, align=align)
    assert batch.unpack(batch.input_ids, fill=-7).tolist() == ids.tolist()
    x = torch.randn(*ids.shape, 2)
    back = batch.unpack(batch.pack(x, of="prediction"), fill=0.5)
    assert torch.equal(back, torch.where(mask.bool().unsqueeze(-1), x, 0.5))


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=6), align=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_every_layout_packs_alike_and_comes_back(kind: str, lengths: list[int], align: int) -> None:
    if kind == "nested" and not sum(lengths):
        return  # torch's jagged layout has no tensor without any value
    batch, reference = make(kind, lengths, align), make("list", lengths, align)
    for name in ("input_ids", "labels", "position_ids", "cu_seqlens", "cu_seqlens_padded"):
        assert torch.equal(getattr(batch, name), getattr(reference, name)), name
    assert batch.max_seqlen == reference.max_seqlen
    back = batch.unpack(batch.input_ids, fill=-7)
    if kind == "padded":
        assert torch.equal(back, padded(ids_of(lengths), "holes")[0])
    else:
        assert rows(back) == rows(ids_of(lengths))


@given(lengths=LENGTHS, align=st.integers(1, 5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_labels_are_the_next_token_and_never_cross(lengths: list[int], align: int, data: st.DataObject) -> None:
    parts = ids_of(lengths)
    masks = [
        torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), dtype=torch.int64) for n in lengths
    ]
    batch = PackedBatch.from_sequences(parts, loss_mask=masks, align=align)
    for i, (part, mask) in enumerate(zip(parts, masks, strict=True)):
        start, stop = batch.cu_seqlens_padded[i : i + 2].tolist()
        expected = [int(part[t + 1]) if mask[t + 1] else IGNORE_INDEX for t in range(len(part) - 1)]
        expected += [IGNORE_INDEX] * (stop - start - len(expected))
        assert batch.labels[start:stop].tolist() == expected
        assert (stop - start) % align == 0
        assert batch.position_ids[start:stop].tolist() == list(range(stop - start))
        assert batch.input_ids[start + len(part) : stop].tolist() == [0] * (stop - start - len(part))


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), align=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_values_of_tokens_go_where_the_token_is_the_label(kind: str, lengths: list[int], align: int) -> None:
    """`pack(ids, of="token")` are the labels, but for the fill."""
    batch = make(kind, lengths, align)
    source = batch.unpack(batch.input_ids)
    got = batch.pack(source, of="token", fill=IGNORE_INDEX)
    assert got.tolist() == batch.labels.tolist()


def test_values_of_sequences_are_spread() -> None:
    batch = make("list", [2, 0, 3], align=2)
    assert batch.pack(torch.tensor([1.0, 2.0, 3.0]), of="sequence", fill=-1).tolist() == [1, 1, 3, 3, 3, -1]
    batch = make("list", [2, 1], align=4)
    assert batch.pack(torch.tensor([[1, 2], [3, 4]]), of="sequence").shape == (8, 2)


@pytest.mark.parametrize("rows_of_positions", [3, 4])
def test_mrope_positions_follow_their_tokens(rows_of_positions: int) -> None:
    ids, mask = padded(ids_of([3, 4]), "holes")
    positions = torch.arange(rows_of_positions * ids.numel()).view(rows_of_positions, *ids.shape)
    batch = PackedBatch.from_padded(ids, mask, position_ids=positions, align=4)
    flat = positions.flatten(1)[:, mask.flatten().bool()]
    assert torch.equal(batch.position_ids[:, :3], flat[:, :3])
    assert torch.equal(batch.position_ids[:, 3], flat[:, 2] + 1)  # counted on through the padding
    assert torch.equal(batch.position_ids[:, 4:], flat[:, 3:])
    listed = PackedBatch.from_sequences(ids_of([3, 4]), position_ids=[flat[:, :3], flat[:, 3:]], align=4)
    assert torch.equal(listed.position_ids, batch.position_ids)


@given(lengths=LENGTHS, align=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_to_padded_and_back(lengths: list[int], align: int) -> None:
    batch = make("list", lengths, align)
    out = batch.to_padded()
    for row, part in enumerate(ids_of(lengths)):
        assert out.input_ids[row, : len(part)].tolist() == part.tolist()
        assert out.attention_mask[row].sum() == len(part)
    for name in ("input_ids", "labels"):
        assert torch.equal(out.to_packed(getattr(out, name)), getattr(batch, name))
    values = torch.randn(batch.input_ids.shape[0], 2)
    assert torch.equal(out.to_packed(out.to_rows(values)), values)
    flat = out.attention_mask.flatten().nonzero().squeeze(1)
    assert torch.equal(batch.input_ids[out.packed_index(flat)], out.input_ids.flatten()[flat])


@given(lengths=LENGTHS, size=st.integers(1, 4), scheme=st.sampled_from(["zigzag", "contiguous"]))
@settings(max_examples=60, deadline=None)
def test_shards_hold_each_token_once_with_its_label(lengths: list[int], size: int, scheme: Any) -> None:
    batch = make("list", lengths, align=2 * size)
    shards = [batch.shard(rank, size, scheme) for rank in range(size)]
    for name in ("input_ids", "labels", "position_ids"):
        together = torch.cat([getattr(shard, name) for shard in shards])
        assert sorted(together.tolist()) == sorted(getattr(batch, name).tolist())
    pairs = [pair for shard in shards for pair in zip(shard.input_ids.tolist(), shard.labels.tolist(), strict=True)]
    for token, label in pairs:
        assert label == IGNORE_INDEX or label == token + 1  # ids count up within a sequence


@given(lengths=LENGTHS, size=st.integers(1, 4), scheme=st.sampled_from(["zigzag", "contiguous"]))
@settings(max_examples=60, deadline=None)
def test_shard_packs_its_own_values(lengths: list[int], size: int, scheme: Any) -> None:
    batch = make("list", lengths, align=2 * size)
    values = [torch.randn(length, 2) for length in lengths]
    for of, x in (("token", values), ("prediction", values), ("sequence", torch.randn(len(lengths), 2))):
        whole = batch.pack(x, of=of)
        for rank in range(size):
            index = shard_index(batch.padded_lengths, rank, size, scheme, "cpu")
            assert torch.equal(batch.shard(rank, size, scheme).pack(x, of=of), whole[index])


def test_zigzag_of_context_parallelism() -> None:
    """Shift first, then shard: the label at a shard's border is the other shard's first token."""
    batch = PackedBatch.from_sequences([list(range(1, 9))], align=4)
    assert [batch.shard(rank, 2).labels.tolist() for rank in (0, 1)] == [[2, 3, 8, -100], [4, 5, 6, 7]]
    assert [batch.shard(rank, 2).input_ids.tolist() for rank in (0, 1)] == [[1, 2, 7, 8], [3, 4, 5, 6]]


def gathered(rank: int, size: int, lengths: list[int], scheme: Any) -> tuple[Tensor, Tensor]:
    batch = make("list", lengths, align=2 * size)
    shard = batch.shard(rank, size, scheme)
    x = torch.stack((shard.input_ids, shard.labels), dim=1).double().requires_grad_()
    whole = shard.gather(x, dist.group.WORLD)
    upstream = torch.arange(whole.numel(), dtype=torch.float64).view_as(whole)
    (grad,) = torch.autograd.grad(whole, x, upstream)
    return whole.detach(), grad


@pytest.mark.parametrize("scheme", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gather_undoes_shard_and_its_gradient_is_the_own_part(size: int, scheme: Any) -> None:
    lengths = [7, 1, 4]  # one shorter than 2·size: padded, not a crash
    batch = make("list", lengths, align=2 * size)
    whole = torch.stack((batch.input_ids, batch.labels), dim=1).double()
    upstream = torch.arange(whole.numel(), dtype=torch.float64).view_as(whole)
    for rank, (got, grad) in enumerate(run_ranks(size, gathered, lengths, scheme)):
        assert torch.equal(got, whole)
        index = shard_index(batch.padded_lengths, rank, size, scheme, "cpu")
        assert torch.equal(grad, upstream[index])


@given(lengths=st.lists(st.integers(0, 9), max_size=8), align=st.integers(1, 3), slack=st.integers(0, 10))
@settings(max_examples=60, deadline=None)
def test_micro_batches_lose_and_double_nothing(lengths: list[int], align: int, slack: int) -> None:
    for kind in ("list", "padded"):
        batch = make(kind, lengths, align)
        limit = max(batch.padded_lengths, default=1) + slack
        parts = batch.micro_batches(limit)
        assert sorted(i for part in parts for i in part.sequences) == list(range(len(lengths)))
        assert all(sum(part.padded_lengths) <= limit for part in parts)
        whole = batch.unpack(batch.labels, fill=-7)
        for part in parts:
            got = part.unpack(part.labels, fill=-7)
            assert rows(got) == [rows(whole)[i] for i in part.sequences]
            for i, start in zip(part.sequences, part.cu_seqlens_padded[:-1].tolist(), strict=True):
                begin = int(batch.cu_seqlens_padded[i])
                width = batch.padded_lengths[i]
                assert torch.equal(part.position_ids[start : start + width], batch.position_ids[begin : begin + width])


def test_gather_of_a_whole_batch_is_what_it_got() -> None:
    batch = make("list", [7, 4])
    assert batch.gather(batch.labels, None) is batch.labels


def counted(rank: int, size: int) -> list[tuple[int, ...]]:
    batch = make("list", [[5, 5, 5, 5], [6], [2, 1]][rank])
    parts = batch.micro_batches(6, group=dist.group.WORLD)
    assert sorted(i for part in parts for i in part.sequences) == list(range(len(batch.lengths)))
    assert all(part.input_ids.shape[0] > 0 for part in parts)
    for part in parts:
        assert part.sequences or (part.labels == IGNORE_INDEX).all()
        part.unpack(part.labels)
    return [part.sequences for part in parts]


def test_every_rank_gets_as_many_micro_batches() -> None:
    ranks = run_ranks(3, counted)
    assert [len(parts) for parts in ranks] == [4, 4, 4]
    assert ranks[1].count(()) == 3


def test_micro_batches_are_even() -> None:
    """First-fit decreasing makes 10 and 6; it stands where an even filling, of 7 and 5, does not fit."""
    loads = [
        sorted(sum(part.lengths) for part in make("list", lengths).micro_batches(most))
        for lengths, most in (([6, 4, 3, 3], 10), ([3, 3, 2, 2, 2], 6))
    ]
    assert loads == [[7, 9], [6, 6]]


def test_gradients_flow_through_pack_and_unpack() -> None:
    ids, mask = padded(ids_of([3, 5]), "holes")
    batch = PackedBatch.from_padded(ids, mask, align=4)
    x = torch.randn(ids.shape, dtype=torch.float64, requires_grad=True)
    for of in ("token", "prediction"):
        assert torch.autograd.gradcheck(lambda x, of=of: batch.pack(x, of=of), (x,))
    y = torch.randn(batch.input_ids.shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(batch.unpack, (y,))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: PackedBatch.from_padded(IDS[0], ONES), InvalidInputError, "input_ids: got shape (3,), expected 2 dim"),
        (lambda: PackedBatch.from_padded(ONES, ONES), InputTypeError, "input_ids: got torch.float32"),
        (lambda: PackedBatch.from_padded(IDS, ONES.T), InvalidInputError, "attention_mask: got (3, 2), expected shape"),
        (lambda: PackedBatch.from_padded(IDS, 2 * ONES), InvalidInputError, "got values other than 0 and 1"),
        (lambda: PackedBatch.from_padded(IDS, ONES, align=0), InvalidInputError, "align: got 0"),
        (lambda: PackedBatch.from_padded(IDS, ONES, align=True), InvalidInputError, "align: got True"),
        (lambda: PackedBatch.from_padded(IDS, ONES, loss_mask=ONES[0]), InvalidInputError, "loss_mask: got (3,)"),
        (lambda: PackedBatch.from_padded(IDS, ONES, loss_mask=ONES / 2), InvalidInputError, "loss_mask: got 0.5, expe"),
        (lambda: PackedBatch.from_sequences([[1]], loss_mask=[[0.5]]), InvalidInputError, "loss_mask: got 0.5, expe"),
        (
            lambda: PackedBatch.from_padded(IDS, ONES.to("meta")),
            InvalidInputError,
            "attention_mask: is on meta, input_ids on cpu",
        ),
        (lambda: PackedBatch.from_nested(IDS), InputTypeError, "expected a nested tensor"),
        (
            lambda: make("nested", [4, 2], loss_mask=jagged([4, 3])),
            InvalidInputError,
            "loss_mask: got lengths [4, 3], expected those of input_ids, [4, 2]",
        ),
        (
            lambda: make("nested", [4, 2], position_ids=torch.zeros(3, 5)),
            InvalidInputError,
            "position_ids: got shape (3, 5), expected 6 entries, one for each token",
        ),
        (
            lambda: PackedBatch.from_sequences([[1, 2]], loss_mask=[[1]]),
            InvalidInputError,
            "loss_mask: got lengths [1], expected those of input_ids, [2]",
        ),
        (lambda: make("list", [3]).shard(0, 2), InvalidInputError, "pack with align=4"),
        (lambda: make("list", [3]).shard(0, 2, "contiguous"), InvalidInputError, "pack with align=2"),
        (lambda: make("list", [4]).shard(2, 2), InvalidInputError, "rank: got 2, expected 0 to 1"),
        (lambda: make("list", [4]).shard(0, 2, "round"), InvalidInputError, "scheme: got 'round'"),
        (lambda: make("list", [4]).shard(0, 2).unpack(ONES), InvalidInputError, "unpack: this is a shard"),
        (lambda: make("list", [4]).unpack(ONES[0]), InvalidInputError, "x: got 3 rows, expected 4"),
        (lambda: make("list", [4]).pack([ONES[0]]), InvalidInputError, "x: got lengths [3], expected [4]"),
        (lambda: make("padded", [4]).pack(ONES), InvalidInputError, "x: got (2, 3), expected a tensor (1, 6)"),
        (lambda: make("list", [3]).pack([ONES[0]], of="row"), InvalidInputError, "of: got 'row'"),
        (lambda: make("list", [4, 1]).pack(ONES[0], of="sequence"), InvalidInputError, "x: got 3 rows, expected 2"),
        (lambda: make("list", [4, 9]).micro_batches(8), InvalidInputError, "max_tokens: got 8, expected at least 9"),
        (lambda: make("list", [4]).micro_batches(2.5), InvalidInputError, "max_tokens: got 2.5, expected an int"),
        (lambda: make("list", [4]).shard(0.0, 1), InvalidInputError, "rank: got 0.0, expected an int"),
        (lambda: make("list", [4]).shard(0, "2"), InvalidInputError, "size: got '2', expected an int"),
        (lambda: make("list", [4]).unpack(torch.eye(4).to_sparse()), InvalidInputError, "x: got layout torch.sparse"),
        (lambda: make("list", [4]).pack(jagged([4]), of="sequence"), InputTypeError, "expected a tensor [B, ...]"),
        (lambda: PackedBatch.from_padded(IDS, ONES, align=1 << 31), InvalidInputError, "align: got 2147483648"),
        (lambda: PackedBatch.from_padded(IDS, ONES, position_ids=[0]), InputTypeError, "position_ids: got list"),
        (lambda: make("nested", [4], loss_mask=[1]), InputTypeError, "loss_mask: got list, expected a tensor"),
        (lambda: make("nested", [4], loss_mask=torch.ones(3, 4)), InvalidInputError, "loss_mask: got shape (3, 4)"),
        (lambda: PackedBatch.from_sequences([[1]], device="abacus"), InvalidInputError, "device: got 'abacus'"),
        (lambda: PackedBatch.from_sequences("12"), InputTypeError, "input_ids: got str, expected a list"),
        (lambda: PackedBatch.from_sequences(3), InputTypeError, "input_ids: got int, expected a list"),
        (lambda: PackedBatch.from_sequences([[1], "a"]), InputTypeError, "input_ids[1]: got what makes no tensor"),
        (lambda: PackedBatch.from_sequences([[1], 2]), InputTypeError, "input_ids[1]: got a number"),
        (lambda: PackedBatch.from_sequences([[1]], loss_mask=1), InputTypeError, "loss_mask: got int, expected a list"),
        (lambda: PackedBatch.from_sequences([torch.tensor([1j])]), InputTypeError, "input_ids[0]: got torch.complex64"),
    ],
)
def test_bad_calls(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


def test_an_idle_micro_batch_takes_what_the_others_take() -> None:
    """The rank that got it must not fail where the others go on."""
    for kind in ("list", "padded"):
        idle = make(kind, [3, 2])._idle()
        assert idle.pack(torch.zeros(0), of="sequence").shape == idle.labels.shape
        empty: Any = torch.zeros(0, 7) if kind == "padded" else []
        width = idle.origin.shape[1] if kind == "padded" else 0
        assert idle.pack(torch.zeros(0, width) if kind == "padded" else empty).shape == idle.labels.shape
        assert len(idle.unpack(idle.labels)) == 0
        assert idle.micro_batches(9)[0] is idle


def test_ids_come_as_embeddings_take_them() -> None:
    assert PackedBatch.from_sequences([torch.tensor([1, 2], dtype=torch.uint8)]).input_ids.dtype == torch.int64
    assert PackedBatch.from_sequences([torch.tensor([1, 2], dtype=torch.int32)]).input_ids.dtype == torch.int32
    with pytest.raises(InputTypeError, match=r"input_ids\[0\]: got torch.float32"):
        PackedBatch.from_sequences([[1.5, 2], [3]])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.pack([1.0, 2.0], of="sequence"), "x: got list, expected a tensor"),
        (lambda b: b.pack([1.0, 2.0]), "x[0]: got a number"),
        (lambda b: b.unpack([ONES]), "x: got list"),
        (lambda b: b.unpack(torch.tensor(1.0)), "x: got Tensor, expected a tensor"),
    ],
)
def test_values_of_the_wrong_type(call: Any, message: str) -> None:
    with pytest.raises(InputTypeError) as raised:
        call(make("list", [4, 2]))
    assert message in str(raised.value)


def test_nested_masks_and_positions_are_taken_in_order() -> None:
    mask = torch.nested.nested_tensor([torch.tensor([1, 0, 1]), torch.tensor([0, 1])], layout=torch.jagged)
    batch = make("nested", [3, 2], loss_mask=mask, position_ids=jagged([3, 2]))
    assert batch.position_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.labels.tolist() == [IGNORE_INDEX, 3, IGNORE_INDEX, 5, IGNORE_INDEX]


def test_a_nested_tensor_with_room_between_its_rows() -> None:
    """As `torch.nested.narrow` makes: rows start where the offsets say and end by their lengths."""
    starts, lengths = torch.tensor([1, 0, 2]), torch.tensor([3, 0, 2])
    ids = torch.nested.narrow(torch.arange(15).view(3, 5), 1, starts, lengths, layout=torch.jagged)
    batch = PackedBatch.from_nested(ids)
    assert batch.lengths == (3, 0, 2)
    assert batch.input_ids.tolist() == [1, 2, 3, 12, 13]
    assert batch.labels.tolist() == [2, 3, IGNORE_INDEX, 13, IGNORE_INDEX]


def test_a_nested_tensor_with_room_around_its_rows() -> None:
    ids = torch.nested.nested_tensor_from_jagged(torch.arange(6), torch.tensor([1, 3, 3, 5]))
    assert PackedBatch.from_nested(ids).input_ids.tolist() == [1, 2, 3, 4]


def test_a_sequence_of_no_tokens_is_a_list() -> None:
    batch = PackedBatch.from_sequences([[1, 2], [], [3]])
    assert batch.input_ids.tolist() == [1, 2, 3]
    assert batch.input_ids.dtype == torch.int64
    assert batch.lengths == (2, 0, 1)


def test_a_transposed_nested_tensor_is_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)], layout=torch.jagged)
    batch = make("nested", [2, 3])
    assert batch.pack(nested).shape == (5, 6)
    with pytest.raises(InvalidInputError, match="ragged dimension"):
        batch.pack(nested.transpose(1, 2))


@pytest.mark.parametrize("kind", ["padded", "nested", "list"])
def test_values_on_another_device_are_told(kind: str) -> None:
    batch = make(kind, [3, 2])
    whole = torch.ones(sum(batch.padded_lengths), device="meta")
    for call in (lambda: batch.unpack(whole), lambda: batch.pack(whole[:2], of="sequence")):
        with pytest.raises(InvalidInputError, match="x: is on meta, the batch on cpu; move one of them"):
            call()
    values = {"padded": batch.unpack(torch.ones(5)), "nested": jagged([3, 2])}.get(kind)
    if values is not None:  # a list's parts are moved, as those of `from_sequences`
        with pytest.raises(InvalidInputError, match="x: is on meta, the batch on cpu; move one of them"):
            batch.pack(values.to("meta"))
