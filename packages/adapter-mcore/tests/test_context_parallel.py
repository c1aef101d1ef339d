"""Over context-parallel ranks any batch comes through the forwards as on one: nothing lost, moved or scored twice."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_cpu import build_gpt, hf_config, parallel
from torch import Tensor, nn

from logitless import PackedBatch
from logitless.errors import InvalidInputError, UnsupportedError
from logitless.testing.distributed import run_ranks
from logitless_mcore import (
    fused_forward_model_gen,
    fused_gptmodel_forward_no_padding,
    gptmodel_forward_no_padding,
    make_forward,
    model_forward_gen,
)
from logitless_mcore.mrope import use_mrope

# One process draws the batches of all ranks: their collectives must agree.
MASKS = st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=4)


class Doubles(nn.Module):
    """Returns twice the id of each token and its place in its sequence, by way of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(sequence_parallel=False, fp8=None)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Tensor:
        return self.scale * torch.stack([input_ids, position_ids], -1).float()


def drawn(count: int) -> list[tuple[Tensor, Tensor]]:
    """Ids and masks [B, 9], any padding, empty rows and ones shorter than 2 · cp among them."""
    found: list[tuple[Tensor, Tensor]] = []

    @settings(max_examples=count, deadline=None, database=None, derandomize=True)
    @given(MASKS)
    def collect(rows: list[list[bool]]) -> None:
        mask = torch.tensor(rows, dtype=torch.int64)
        found.append((torch.arange(1, mask.numel() + 1).view_as(mask), mask))

    collect()
    return found


def through_the_forwards(rank: int, size: int, batches: list[tuple[Tensor, Tensor]], tp: int) -> None:
    with parallel(tp=tp, cp=size // tp):
        model = Doubles()
        for ids, mask in batches:
            model.scale.grad = None
            out = model_forward_gen()(model, ids, mask, None, {})
            place = mask.cumsum(1) - 1
            assert torch.equal(out, torch.stack([2.0 * ids, 2.0 * place], -1) * mask[..., None])
            weights = torch.arange(1.0, ids.numel() + 1).view_as(mask)
            (out[..., 0] * weights).sum().backward()
            total = model.scale.grad.clone()
            dist.all_reduce(total)
            assert float(total) == tp * float((weights * ids * mask).sum())  # each token once, over the ranks of cp

            labels: list[Tensor] = []

            def processor(output: Tensor, label: Tensor, seen: list[Tensor] = labels) -> dict[str, Tensor]:
                seen.append(label)
                return {"label": label, "output": output[..., 0]}

            rows = [row[own.bool()] for row, own in zip(ids, mask, strict=True)]
            nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
            both = gptmodel_forward_no_padding(model, nested, {}, processor, {"label": nested})
            for own, label, output in zip(rows, both["label"].unbind(), both["output"].unbind(), strict=True):
                assert label.tolist() == [*own[1:].tolist(), 0][: len(own)]
                assert torch.equal(output, 2.0 * own)


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (3, 1), (4, 2)], ids=["cp2", "cp3", "tp2-cp2"])
def test_any_batch_comes_back(ranks: int, tp: int) -> None:
    batches = drawn(40)
    assert any(0 < int(mask.sum(1).min()) < 4 for _, mask in batches)
    assert any(int(mask.sum(1).min()) == 0 for _, mask in batches)
    run_ranks(ranks, through_the_forwards, batches, tp)


def of_rows(gpt: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """[B, S] scores by the reference design's fused forward."""
    return fused_forward_model_gen()(gpt, ids, None, mask, (7 * ids + 3) % 128, mask, 0.8, {})


def of_shards(gpt: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The same shape by `make_forward`, of a batch that the caller shards and gathers."""
    batch = PackedBatch.from_padded(ids, mask, align=4)
    group = gpt.pg_collection.cp
    shard = batch.shard(group.rank(), group.size()) if group.size() > 1 else batch
    out = make_forward(gpt)(shard, temperature=0.8)
    parts = {"log_probs": out.log_probs, "entropy": out.entropy}
    if shard is not batch:
        parts = {name: shard.gather(x, group) for name, x in parts.items()}
    return {name: batch.unpack(x) for name, x in parts.items()}


def of_contiguous(gpt: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Of a contiguous shard, with a temperature and two labels for each token."""
    batch = PackedBatch.from_padded(ids, mask, align=4)
    group, place = gpt.pg_collection.cp, torch.arange(len(batch.labels))
    labels = torch.stack([batch.labels, (5 * batch.input_ids + place) % 128], -1)
    labels[batch.labels == -100] = -100
    temperature, shard = 0.5 + 0.05 * place, batch
    if group.size() > 1:
        shard = batch.shard(group.rank(), group.size(), "contiguous")
        own = torch.tensor_split(place, group.size())[group.rank()]
        labels, temperature = labels[own], temperature[own]
    out = make_forward(gpt)(shard, temperature=temperature, labels=labels, stats=("is_argmax", "mean_logit"))
    both = out.log_probs @ torch.tensor([1.0, -0.3]) + out.stats["is_argmax"].sum(-1)
    parts = {"log_probs": both, "entropy": out.entropy, "mean_logit": out.stats["mean_logit"]}
    return {name: batch.unpack(shard.gather(x, group)) for name, x in parts.items()}


def of_nested(gpt: Any, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    rows = [row[own.bool()] for row, own in zip(ids, mask, strict=True)]
    out = fused_gptmodel_forward_no_padding(gpt, torch.nested.nested_tensor(rows, layout=torch.jagged), temperature=0.8)
    places = mask.flatten().nonzero()[:, 0]
    blank = torch.zeros(mask.numel())
    return {name: blank.index_copy(0, places, x.values()).view(mask.shape) for name, x in out.items()}


Way = Callable[[Any, Tensor, Tensor], dict[str, Tensor]]


def scores(rank: int, size: int, batches: list[tuple[Tensor, Tensor]], way: Way) -> list[dict[str, Tensor]]:
    """Of one model on one rank or two, with every gradient of random upstream ones."""
    found = []
    with parallel(cp=size):
        torch.manual_seed(0)
        gpt = build_gpt(hf_config("qwen2"))
        for ids, mask in batches:
            gpt.zero_grad()
            out = way(gpt, ids, mask)
            g, e = torch.randn(2, *ids.shape, generator=torch.Generator().manual_seed(1))
            (g * out["log_probs"] + e * out["entropy"]).sum().backward()
            for parameter in gpt.parameters():
                dist.all_reduce(parameter.grad)
            grads = {name: p.grad.clone() for name, p in gpt.named_parameters()}
            found.append({**{name: x.detach() for name, x in out.items()}, **grads})
    return found


@pytest.mark.parametrize("way", [of_rows, of_shards, of_contiguous, of_nested])
def test_scores_and_gradients_of_any_batch_equal_those_of_one_rank(way: Way) -> None:
    batches = drawn(12)
    (alone,) = run_ranks(1, scores, batches, way)
    for of_rank in run_ranks(2, scores, batches, way):
        for (_, mask), found, expected in zip(batches, of_rank, alone, strict=True):
            for name, want in expected.items():
                torch.testing.assert_close(
                    found[name],
                    want,
                    rtol=1e-5,
                    atol=1e-5,
                    msg=lambda text, name=name, mask=mask: f"{name} {mask} {text}",
                )


def of_unlike_losses(rank: int, size: int) -> list[dict[str, Tensor]]:
    """The second rank's loss has no entropy, by a factor of 0 or by leaving it out."""
    found = []
    with parallel(cp=size):
        torch.manual_seed(0)
        gpt = build_gpt(hf_config("qwen2"))
        batch = PackedBatch.from_sequences([torch.arange(8), torch.arange(20)], align=4)
        shard = batch.shard(rank, size, "contiguous")
        for leave_out in (False, True):
            gpt.zero_grad()
            out = make_forward(gpt)(shard, stats=("is_argmax", "mean_logit"))
            assert not any(x.requires_grad for x in out.stats.values())
            loss = 1.7 * out.log_probs.sum()
            if rank == 0 or not leave_out:
                loss = loss + (1 - rank) * out.entropy.sum()
            loss.backward()
            found.append({name: p.grad.clone() for name, p in gpt.named_parameters()})
        assert not make_forward(gpt)(shard, entropy_grad=False).entropy.requires_grad
    return found


def test_a_rank_whose_loss_leaves_the_entropy_of_a_contiguous_shard_out() -> None:
    for whole, left_out in run_ranks(2, of_unlike_losses, seconds=10):
        assert all(torch.equal(left_out[name], grad) for name, grad in whole.items())
        assert max(float(grad.abs().max()) for grad in whole.values()) > 0


def told(rank: int, size: int, name: str, rows: tuple[int, int]) -> str:
    with parallel(cp=size):
        gpt = build_gpt(hf_config("qwen2"))
        shard = PackedBatch.from_sequences([torch.arange(8)], align=4).shard(rank, size, "contiguous")
        wrong = {"labels": torch.ones(rows[rank], dtype=torch.long), "temperature": torch.ones(rows[rank])}
        with pytest.raises(InvalidInputError) as found:
            make_forward(gpt)(shard, **{name: wrong[name]})
    return str(found.value)


@pytest.mark.parametrize("name", ["labels", "temperature"])
def test_other_rows_than_a_contiguous_shards_are_told_by_their_name_on_all_ranks(name: str) -> None:
    for text in run_ranks(2, told, name, (5, 5), seconds=10):
        assert text.startswith(f"{name}: got shape (5,), expected (4, ...)")
    for text in run_ranks(2, told, name, (4, 5), seconds=10):
        assert text.startswith(f"{name}: group: its ranks disagree (x's shape: rank 0 has (4,), rank 1 has (5,))")


def refused(rank: int, size: int) -> None:
    with parallel(cp=size):
        gpt, ids = build_gpt(hf_config("qwen2")), torch.arange(8)[None]
        ones = torch.ones_like(ids)
        match = "context parallelism of 2 takes packed sequences; got the layout 'bshd'"
        with pytest.raises(UnsupportedError, match=match):
            model_forward_gen()(gpt, ids, ones, None, {}, data_format="bshd")
        with pytest.raises(UnsupportedError, match=match):
            fused_forward_model_gen()(gpt, ids, None, ones, ids, ones, 1.0, {}, data_format="bshd")
        shard = PackedBatch.from_padded(ids, ones, align=4).shard(rank, size)
        with pytest.raises(UnsupportedError, match="'bshd' with context parallelism"):
            make_forward(gpt, "bshd")(shard)
        contiguous = PackedBatch.from_padded(ids, ones, align=4).shard(rank, size, "contiguous")
        with pytest.raises(UnsupportedError, match="loss_fn: got one for a contiguous shard"):
            make_forward(gpt)(contiguous, loss_fn=lambda scores, index: scores.log_probs)
        with pytest.raises(InvalidInputError, match=r"got shard\(., 2, 'zigzag'\), expected shard\(., 2, 'zigzag'\)"):
            make_forward(gpt)(PackedBatch.from_padded(ids, ones, align=4).shard(1 - rank, size))


def test_rows_are_refused_by_name() -> None:
    run_ranks(2, refused)


# --- positions --------------------------------------------------------------------------------------------------------

COUNTED = torch.arange(8)
LATER = torch.tensor([0, 1, 7, 8, 9, 10, 6, 7])  # a zig-zag shard of either rank counts up by itself


def of_positions(rank: int, size: int, scheme: Any, axes: bool) -> dict[str, Any]:
    """Scores, or what is said, of one sequence with these positions behind a plain one."""
    found: dict[str, Any] = {}
    kinds = {"plain": COUNTED, "shifted": COUNTED + 3, "doubled": 2 * COUNTED, "later": LATER}
    with parallel(cp=size):
        torch.manual_seed(0)
        gpt = build_gpt(hf_config("qwen2"), model={"position_embedding_type": "none" if axes else "rope"})
        if axes:
            use_mrope(gpt, 5000.0, [2, 3, 3])
        for name, positions in kinds.items():
            given = [COUNTED[:5], positions]
            given = [x.expand(3, -1) for x in given] if axes else given
            ids = [torch.arange(5), torch.arange(8)]
            batch = PackedBatch.from_sequences(ids, position_ids=given, align=2 * size if size > 1 else 1)
            shard = batch.shard(rank, size, scheme) if size > 1 else batch
            try:
                scores = make_forward(gpt)(shard).log_probs
                found[name] = torch.cat(batch.unpack(shard.gather(scores, gpt.pg_collection.cp))).detach()
            except UnsupportedError as error:
                found[name] = str(error)
    return found


@pytest.mark.parametrize("scheme", ["zigzag", "contiguous"])
def test_positions_that_the_model_would_not_take_are_refused_as_on_one_rank(scheme: str) -> None:
    (alone,) = run_ranks(1, of_positions, scheme, False)
    for found in run_ranks(2, of_positions, scheme, False, seconds=20):
        assert found["doubled"] == alone["doubled"]
        assert found["later"] == alone["later"]
        assert alone["doubled"].startswith("batch: its position_ids do not count up by one")
        for name in ("plain", "shifted"):
            torch.testing.assert_close(found[name], alone[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", ["zigzag", "contiguous"])
def test_a_model_of_mrope_takes_any_positions(scheme: str) -> None:
    (alone,) = run_ranks(1, of_positions, scheme, True)
    assert float((alone["doubled"] - alone["plain"]).abs().max()) > 1e-3
    for found in run_ranks(2, of_positions, scheme, True, seconds=20):
        for name, want in alone.items():
            torch.testing.assert_close(found[name], want, rtol=0, atol=1e-5)


def megatrons_own(rank: int, size: int) -> None:
    with parallel(cp=size):
        gpt = build_gpt(hf_config("qwen2"), model={"position_embedding_type": "mrope"}, mrope_section=[2, 3, 3])
        with pytest.raises(UnsupportedError, match="rotary_pos_emb: got MultimodalRotaryEmbedding with context paral"):
            make_forward(gpt)


def test_megatrons_own_mrope_is_refused_over_context_parallelism() -> None:
    run_ranks(2, megatrons_own)
