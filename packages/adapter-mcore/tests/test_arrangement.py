"""Arrangements over many random batches: where every token, label and position stands."""

from __future__ import annotations

import pytest
import torch

from logitless import PackedBatch
from logitless.errors import InvalidInputError

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
from megatron.core.packed_seq_params import PackedSeqParams

from logitless_mcore.arrangement import TAKES_INDEX, Layout, Ranks, arrange, lengthened


def random_batch(seed: int) -> tuple[PackedBatch, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 9, (int(torch.randint(1, 6, (), generator=generator)),), generator=generator)
    parts = [torch.randint(1, 100, (int(n),), generator=generator) for n in lengths]
    positions = [torch.arange(len(part)) + seed for part in parts]
    align = int(torch.randint(1, 4, (), generator=generator))
    return PackedBatch.from_sequences(parts, position_ids=positions, align=align), parts


@pytest.mark.parametrize("seed", range(30))
def test_lengthened_batches_keep_their_tokens_labels_and_positions(seed: int) -> None:
    batch, parts = random_batch(seed)
    longer = lengthened(batch, [length + extra for extra, length in enumerate(batch.padded_lengths)])
    ends = longer.cu_seqlens_padded.tolist()
    assert ends[-1] == len(longer.input_ids) == len(longer.labels) == longer.position_ids.shape[-1]
    for part, begin, end in zip(parts, ends, ends[1:], strict=False):
        rest = end - begin - len(part)
        assert longer.input_ids[begin:end].tolist() == part.tolist() + [0] * rest
        following = part.tolist()[1:] + [-100] * bool(len(part))
        assert longer.labels[begin:end].tolist() == following + [-100] * rest
        steps = longer.position_ids[begin:end].diff()
        assert bool((steps == 1).all())  # counted on through the padding
        if len(part):
            assert int(longer.position_ids[begin]) == seed
    assert [one.tolist() for one in longer.unpack(longer.input_ids)] == [one.tolist() for one in parts]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(("layout", "fp8"), [("thd", False), ("thd", True), ("bshd", False)])
def test_values_return_from_every_arrangement(seed: int, layout: Layout, fp8: bool) -> None:
    batch, parts = random_batch(seed)
    tp = 1 + seed % 4
    found = arrange(batch, layout, Ranks(tp), fp8=fp8)
    lengths = found.batch.padded_lengths
    assert all(length % tp == 0 for length in lengths)
    if fp8:
        assert all(length % 16 == 0 for length in lengths)
        assert sum(lengths) % (128 * tp) == 0
    if layout == "bshd":
        assert len(set(lengths)) == 1
    x = [torch.randn(len(part), 3) for part in parts]
    packed = found.pack(x)
    assert packed.shape == (*found.shape, 3)
    assert torch.equal(found.shaped(found.batch.input_ids), found.pack(parts).long())
    back = found.unpack(packed)
    assert all(torch.equal(a, b) for a, b in zip(back, x, strict=True))


def test_occupied_arrangements_have_a_place_for_each_rank() -> None:
    empty = PackedBatch.from_sequences([[], []])
    assert arrange(empty, "thd", Ranks(4)).occupied().shape == (1, 4)
    assert arrange(empty, "bshd", Ranks(4)).occupied().shape == (2, 4)
    with pytest.raises(InvalidInputError, match="no sequence"):
        arrange(PackedBatch.from_sequences([]), "thd", Ranks(4)).occupied()


def test_one_process_is_all_there_is_where_nothing_is_initialized() -> None:
    assert Ranks.present() == Ranks()
    assert Ranks.of(torch.nn.Linear(1, 1)) == Ranks()
    assert Ranks(2, 4).align == 16
    assert Ranks(2).align == 2


@pytest.mark.skipif(not TAKES_INDEX, reason="Mamba layers of this Megatron-Core tell sequences apart by cu_seqlens")
@pytest.mark.parametrize("seed", range(5))
def test_layers_with_a_state_are_told_where_sequences_begin(seed: int) -> None:
    batch, _ = random_batch(seed)
    arranged = arrange(batch, "thd", Ranks(tp=2))
    total = sum(arranged.batch.padded_lengths)
    own = PackedSeqParams(cu_seqlens_q_padded=arranged.batch.cu_seqlens_padded, total_tokens=total).seq_idx
    found = arranged.params.seq_idx  # type: ignore[union-attr]
    assert found.dtype == own.dtype
    assert torch.equal(found, own)
