"""The plan is what a call does: its chunks and blocks, seen from inside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import logitless
from logitless.testing import MemoryTracker
from logitless.testing.example import random_example
from logitless.types import Request
from logitless_triton import backward, forward, held, policy
from logitless_triton.config import Config, Tile, trying
from logitless_triton.held import Held
from logitless_triton.plan import plan

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def request_of(n: int, vocab: int, hidden_size: int, **options: Any) -> Request:
    settings = {"hidden_dtype": torch.float32, "weight_dtype": torch.float32, **options}
    return Request(DEVICE, n_tokens=n, hidden_size=hidden_size, vocab_rows=vocab, **settings)


@pytest.mark.parametrize("keep_bytes", [0, 40_000, 1 << 20])
@pytest.mark.parametrize("workspace_bytes", [30_000, 1 << 20])
def test_says_what_the_backward_makes_again(
    keep_bytes: int, workspace_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {"again": [], "kept": []}
    for kind, name in (("again", "dz_from_logits"), ("kept", "dz_from_kept")):
        inner = getattr(backward, name)

        def spy(*args: Any, kind: str = kind, inner: Any = inner) -> None:
            seen[kind].append(args[-1].shape)
            inner(*args)

        monkeypatch.setattr(backward, name, spy)
    n, vocab, hidden_size = 40, 1111, 16
    example = random_example(n, vocab=vocab, hidden_size=hidden_size, dtype=torch.float32, device=DEVICE, ignored=False)
    example.run(backend="triton", keep_bytes=keep_bytes, workspace_bytes=workspace_bytes)
    said = plan(request_of(n, vocab, hidden_size, workspace_bytes=workspace_bytes), keep_bytes)
    again = [shape for shape in seen["again"] if shape[0] == said.block_tokens or shape[0] == n % said.block_tokens]
    assert len(again) == len(seen["again"]) == said.blocks * -(-n // said.block_tokens)
    assert sum(shape[0] * shape[1] for shape in seen["again"]) == n * (vocab - said.kept_columns)
    assert sum(shape[0] * shape[1] for shape in seen["kept"]) == n * said.kept_columns
    assert max((shape[1] for shape in again), default=0) == said.block_columns


@pytest.mark.parametrize("workspace_bytes", [20_000, 90_000, 1 << 20])
def test_says_the_chunks_of_a_single_pass(workspace_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = []
    inner = policy.forward_pass

    def spy(work: Any, rows: Any, kept: Any, *rest: Any) -> None:
        chunks.append((rows.count, kept.columns))
        inner(work, rows, kept, *rest)

    monkeypatch.setattr(policy, "forward_pass", spy)
    n, vocab, hidden_size = 40, 301, 16
    fresh = random_example(
        n, vocab=vocab, hidden_size=hidden_size, dtype=torch.float32, device=DEVICE, ignored=False
    ).fresh()
    logitless.linear_policy_loss(
        fresh.hidden,
        fresh.head,
        fresh.labels,
        lambda scores, index: scores.log_probs,
        backend="triton",
        workspace_bytes=workspace_bytes,
    )
    said = plan(request_of(n, vocab, hidden_size, workspace_bytes=workspace_bytes))
    assert chunks[0] == (said.single_pass_tokens, vocab if said.single_pass_keeps else 0)
    assert len(chunks) == -(-n // said.single_pass_tokens)


def test_held_logits_have_tiles_of_their_own() -> None:
    """Of a kept set and the most likely tokens; other scores keep the plain forward's bits."""
    from logitless_triton import kl_products  # with Triton, when its interpreter has been chosen

    wide, narrow = (Tile(64, columns, 32, warps=1, stages=1, per_sm=2) for columns in (256, 64))
    example = random_example(9, vocab=301, hidden_size=16, dtype=torch.float32, device=DEVICE, ignored=False).fresh()
    seen: list[int] = []
    scan = forward.scan

    def spy(work: Any, *rest: Any) -> None:
        seen.append(work.config.forward.columns)
        scan(work, *rest)

    with pytest.MonkeyPatch.context() as patch, trying(Config(wide, wide, narrow)):
        for module in (forward, held, kl_products):
            patch.setattr(module, "scan", spy)
        for options, features, columns in (
            ({}, {}, 256),
            ({"stats": ("is_argmax",)}, {"stats": ("is_argmax",)}, 256),
            ({"top_p": 0.9}, {"kept_set": True}, 64),
        ):
            example.score(backend="triton", **options)
            assert set(seen) == {columns} == {plan(request_of(9, 301, 16, **features)).tiles.forward.columns}
            seen.clear()
        hidden, weight = example.hidden.detach(), example.head.weight.detach()
        logitless.top_k_log_probs(hidden, weight, 5, backend="triton")
        logitless.linear_kl(hidden, weight, hidden, weight, backend="triton")
        assert seen == [64, 256]


def test_says_the_chunks_whose_logits_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, n, vocab, hidden_size, workspace_bytes = [], 9, 301, 16, 14_000
    inner = policy.held_pass

    def spy(held: Any, rows: Any, *rest: Any) -> None:
        chunks.append(rows.count)
        inner(held, rows, *rest)

    monkeypatch.setattr(policy, "held_pass", spy)
    monkeypatch.setattr("logitless_triton.held.held_pass", spy)
    example = random_example(
        n, vocab=vocab, hidden_size=hidden_size, dtype=torch.float32, device=DEVICE, ignored=False
    ).fresh()
    options: dict[str, Any] = {"backend": "triton", "top_k": 3, "workspace_bytes": workspace_bytes}
    said = plan(request_of(n, vocab, hidden_size, workspace_bytes=workspace_bytes, kept_set=True), 1 << 20)
    assert said.kept_columns == 0
    example.score(**options)
    assert chunks == [said.forward_tokens, n - said.forward_tokens]
    chunks.clear()
    logitless.linear_policy_loss(example.hidden, example.head, example.labels, lambda s, i: s.log_probs, **options)
    assert chunks == [said.single_pass_tokens, n - said.single_pass_tokens]
    assert "holds their logits, and keeps nothing" in str(said)


@pytest.mark.parametrize(
    ("asked", "ranks", "tokens"),
    [({"stats": ("is_argmax",)}, 1, 3), ({"kept_set": True}, 1, 2), ({"kept_set": True}, 2, 3), ({"best": True}, 2, 2)],
    ids=["stats", "kept", "kept by ranks", "best by ranks"],
)
def test_a_short_list_takes_room_where_there_is_one(asked: dict[str, Any], ranks: int, tokens: int) -> None:
    """Ranks that find a threshold together have none; with tiles of 128 columns, whatever the device's are."""
    tile = Tile(64, 128, 32, warps=1, stages=1, per_sm=2)
    with trying(Config(tile, tile, tile)):
        said = plan(request_of(6, 5000 // ranks, 16, workspace_bytes=75_000, group_size=ranks, **asked))
    group = SimpleNamespace(size=lambda: ranks) if ranks > 1 else None
    work: Any = SimpleNamespace(
        problem=SimpleNamespace(vocab_size=5000, workspace_bytes=75_000, group=group),
        config=said.tiles,
        head=SimpleNamespace(valid=5000 // ranks),
        n=6,
        truncated="kept_set" in asked,
        empty=torch.empty,
    )
    assert Held(work, int("best" in asked)).chunk == said.forward_tokens == tokens


def test_can_be_read() -> None:
    text = str(plan(request_of(8192, 151936, 4096, hidden_dtype=torch.bfloat16, weight_dtype=torch.bfloat16), 1 << 30))
    assert "keeps differences of" in text
    assert "made again in" in text
    assert "single pass: chunks of" in text
    assert "keeps nothing" in str(plan(request_of(1, 1, 1)))


@pytest.mark.skipif(HAS_GPU, reason="on the CPU a product is made apart and then put in place")
def test_the_single_pass_makes_no_tile_of_a_gradient_that_it_writes_once() -> None:
    """d_weight, a product on its way there and the logits that were kept, all of one size; a tile would be a fourth."""
    tokens, vocab, hidden_size = 64, 2048, 64
    example = random_example(tokens, vocab=vocab, hidden_size=hidden_size, dtype=torch.float32, ignored=False).fresh()
    with MemoryTracker() as tracker:
        loss, _ = logitless.linear_policy_loss(
            example.hidden, example.head, example.labels, lambda scores, _: scores.log_probs, backend="triton"
        )
    assert loss.requires_grad
    assert tracker.peak_bytes < 3.5 * 4 * vocab * hidden_size
