"""Hypothesis strategies of what this project computes with: heads, calls of the op, packed batches and their shards.

    from hypothesis import given
    from logitless.testing.strategies import examples

    @given(examples())
    def test_mine(example):
        check_results(example.run(backend="acme"), example)

Sizes shrink towards nothing, options towards a plain head. Numbers come from a seed that is drawn, so that a large
example costs hypothesis no more than a small one. Needs hypothesis (`pip install "logitless[testing]"`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from logitless._segments import Scheme
from logitless.head import LMHead
from logitless.packing import PackedBatch
from logitless.testing.example import Example, random_example

__all__ = ["examples", "heads", "packed_batches", "shards"]

SEEDS = st.integers(0, 2**16)


@st.composite
def examples(
    draw: st.DrawFn,
    /,
    *,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    refuses: Collection[str] = (),
    min_tokens: int = 0,
    max_tokens: int = 20,
    max_vocab: int = 60,
    max_hidden_size: int = 12,
    **fixed: Any,
) -> Example:
    """Calls of the op: any sizes, parts of a head, temperatures and ignored tokens.

    Args:
        refuses: parts of the head that are left out, by the names of `BackendConformance.refuses`.
        fixed: arguments of `random_example` that are not drawn.
    """
    vocab = draw(st.integers(1, max_vocab))
    options: dict[str, Any] = {
        "vocab_size": draw(st.none() | st.integers(1, vocab)),
        "scale": draw(st.sampled_from([1.0, 0.37, -1.5])),
        "std": draw(st.sampled_from([2.0, 0.0, 1e-3, 20.0])),
        "ignored": draw(st.booleans()),
        "temperature": draw(st.sampled_from([1.0, 0.7, 2.0])),
    }
    if "bias" not in refuses:
        options["bias"] = draw(st.booleans())
    if "softcap" not in refuses:
        options["softcap"] = draw(st.sampled_from([None, 4.0]))
    if "lora" not in refuses:
        options["lora"] = draw(st.lists(st.integers(1, 4), max_size=2).map(tuple))
    if "per_token_temperature" not in refuses:
        options["per_token_temperature"] = draw(st.booleans())
    return random_example(
        draw(st.integers(min_tokens, max_tokens)),
        vocab,
        draw(st.integers(1, max_hidden_size)),
        dtype=dtype,
        device=device,
        seed=draw(SEEDS),
        **{**options, **fixed},
    )


def heads(**options: Any) -> st.SearchStrategy[LMHead]:
    """Heads without LoRA pairs (which belong to certain tokens); `options` are those of `examples`."""
    return examples(**{"max_tokens": 0, "lora": (), **options}).map(lambda example: example.head)


@st.composite
def packed_batches(
    draw: st.DrawFn,
    /,
    vocab_size: int = 50,
    *,
    first_id: int = 0,
    min_length: int = 0,
    min_sequences: int = 0,
    max_sequences: int = 5,
    max_length: int = 10,
    aligns: Collection[int] = (1, 4),
    device: str | torch.device = "cpu",
) -> PackedBatch:
    """Batches of padded (left, right, with holes), nested and listed sequences, some of their tokens not scored."""
    lengths = draw(st.lists(st.integers(min_length, max_length), min_size=min_sequences, max_size=max_sequences))
    noise = torch.Generator().manual_seed(draw(SEEDS))
    options: dict[str, Any] = {"align": draw(st.sampled_from(sorted(aligns)))}

    def rows(high: int, low: int = 0) -> list[Tensor]:
        return [torch.randint(low, high, (length,), generator=noise).to(device) for length in lengths]

    ids, masks = rows(vocab_size, first_id), rows(2) if draw(st.booleans()) else None
    origin = draw(st.sampled_from(["list", "nested", "padded"])) if lengths else "list"
    if origin == "list":
        return PackedBatch.from_sequences(ids, loss_mask=masks, device=device, **options)
    if origin == "nested":
        nested = [None if x is None else torch.nested.nested_tensor(x, layout=torch.jagged) for x in (ids, masks)]
        return PackedBatch.from_nested(nested[0], loss_mask=nested[1], **options)  # type: ignore[arg-type]
    width = max(lengths) + draw(st.integers(0, 3))
    places = [torch.randperm(width, generator=noise)[:length].sort().values for length in lengths]

    def padded(parts: list[Tensor]) -> Tensor:
        zeros = torch.zeros(len(lengths), width, dtype=torch.int64, device=device)
        for row, place, part in zip(zeros, places, parts, strict=True):
            row[place.to(device)] = part
        return zeros

    mask = padded([torch.ones_like(x) for x in ids])
    return PackedBatch.from_padded(padded(ids), mask, loss_mask=None if masks is None else padded(masks), **options)


@st.composite
def shards(draw: st.DrawFn, /, vocab_size: int = 50, *, max_size: int = 4, **options: Any) -> list[PackedBatch]:
    """A batch's shards of all ranks, in their order; `options` are those of `packed_batches`."""
    size = draw(st.integers(1, max_size))
    scheme: Scheme = draw(st.sampled_from(get_args(Scheme)))
    batch = draw(packed_batches(vocab_size, **{**options, "aligns": (2 * size,)}))
    return [batch.shard(rank, size, scheme) for rank in range(size)]
