"""What a call may ask of the op, kept sets, several labels and statistics, through every forward that has no logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cpu import build_gpt, hf_model, parallel
from oracle import Expected, deviation, load, summed_over_tp
from torch import Tensor

from logitless import PackedBatch
from logitless.errors import InvalidInputError
from logitless.reference import scores_of
from logitless.testing.distributed import run_ranks
from logitless_mcore import fused_forward_model_gen, fused_gptmodel_forward_no_padding, make_forward

TOLERANCE = 1e-5
LENGTHS = (7, 12, 2, 5)
GENERATOR = torch.Generator().manual_seed(7)
SEQUENCES = [torch.randint(0, 128, (n,), generator=GENERATOR) for n in LENGTHS]
LABELS = [torch.randint(0, 128, (n, 3), generator=GENERATOR) for n in LENGTHS]
for _labels in LABELS:
    _labels[-1] = -100
    _labels[0, 1] = -100
STATS = ("is_kept", "sum_sq_probs", "mean_logit", "is_argmax")
KEPT: dict[str, Any] = {"top_k": 40, "top_p": 0.8}
ASKED = {"kept": (KEPT, 1), "several": ({}, 3), "both": (KEPT, 3)}


def labels_of(count: int) -> list[Tensor]:
    """[L, K] of each sequence, or [L] of one."""
    return LABELS if count > 1 else [labels[:, 0] for labels in LABELS]


def wanted(hf: Any, kept: dict[str, Any], count: int) -> tuple[Expected, list[dict[str, Tensor]]]:
    """By the model's own logits, each sequence alone."""
    generator, loss = torch.Generator().manual_seed(11), torch.zeros(())
    found, stats = Expected([], [], {}, []), []
    hf.zero_grad()
    for ids, labels in zip(SEQUENCES, labels_of(count), strict=True):
        scores = scores_of(hf(input_ids=ids[None]).logits[0] / 0.8, labels, **kept, stats=STATS)
        g, e = torch.randn(labels.shape, generator=generator) / 8, torch.randn(len(ids), generator=generator) / 8
        loss = loss + (g * scores.log_probs).sum() + (e * scores.entropy).sum()
        found.log_probs.append(scores.log_probs.detach())
        found.entropy.append(scores.entropy.detach())  # type: ignore[union-attr]
        found.upstream.append((g, e))
        stats.append(dict(scores.stats or {}))
    loss.backward()
    found.grads |= {name: parameter.grad for name, parameter in hf.named_parameters()}
    return found, stats


def bound(gpt: Any, layout: str, labels: list[Tensor], **asked: Any) -> dict[str, list[Tensor]]:
    """By `make_forward`; over context parallelism of a shard, brought home."""
    group = gpt.pg_collection.cp
    batch = PackedBatch.from_sequences(SEQUENCES, align=2 * group.size() if group.size() > 1 else 1)
    own, packed = batch, batch.pack(labels, "prediction", -100)
    if group.size() > 1:
        places = torch.arange(len(batch.labels))
        own = batch.shard(group.rank(), group.size())
        packed = packed[replace(batch, input_ids=places).shard(group.rank(), group.size()).input_ids]
    out = make_forward(gpt, layout)(own, labels=packed, **asked)
    found = {"log_probs": out.log_probs, "entropy": out.entropy, **out.stats}
    if own is not batch:
        found = {name: own.gather(x, group) for name, x in found.items()}
    return {name: batch.unpack(x) for name, x in found.items()}


def of_rows(gpt: Any, layout: str, labels: list[Tensor], **asked: Any) -> dict[str, list[Tensor]]:
    whole = PackedBatch.from_sequences(SEQUENCES)
    rows = whole.to_padded()
    mask = rows.attention_mask.long()
    padded = rows.to_rows(whole.pack(labels, "prediction", -100), -100)
    out = fused_forward_model_gen()(
        gpt, rows.input_ids, None, mask, padded, mask, asked.pop("temperature"), {}, data_format=layout, **asked
    )
    return {name: [row[: len(ids)] for row, ids in zip(x, SEQUENCES, strict=True)] for name, x in out.items()}


def of_nested(gpt: Any, layout: str, labels: list[Tensor], **asked: Any) -> dict[str, list[Tensor]]:
    """Whose forward shifts the labels itself."""
    ids, unshifted = (
        torch.nested.nested_tensor(parts, layout=torch.jagged) for parts in (SEQUENCES, [x.roll(1, 0) for x in labels])
    )
    out = fused_gptmodel_forward_no_padding(gpt, ids, labels=unshifted, data_format=layout, **asked)
    return {name: list(x.unbind()) for name, x in out.items()}


def ways(cp: int) -> Iterator[tuple[Any, str]]:
    for way in (bound, of_rows, of_nested):
        for layout in ("thd",) if cp > 1 else ("thd", "bshd"):
            yield way, layout


def asked_of(rank: int, size: int, hf: Any, want: Any, sp: bool, cp: int, kept: dict[str, Any], count: int) -> Any:
    expected, stats = want
    worst = []
    with parallel(tp=size // cp, cp=cp):
        gpt = load(build_gpt(hf.config, sequence_parallel=sp), hf, False)
        for way, layout in ways(cp):
            gpt.zero_grad()
            out = way(gpt, layout, labels_of(count), temperature=0.8, **kept, stats=STATS)
            assert list(out) == ["log_probs", "entropy", *STATS]
            loss = torch.zeros(())
            for i, (g, e) in enumerate(expected.upstream):
                loss = loss + (g * out["log_probs"][i]).sum() + (e * out["entropy"][i])[:-1].sum()
                for name, x in stats[i].items():
                    found = out[name][i]
                    assert found.dtype == x.dtype, name
                    torch.testing.assert_close(found[:-1], x[:-1], rtol=1e-5, atol=1e-5, msg=f"{way} {layout} {name}")
            loss.backward()
            if cp > 1:
                for parameter in gpt.parameters():
                    dist.all_reduce(parameter.grad)
            summed_over_tp(gpt)
            pairs = zip(out["entropy"], expected.entropy, strict=True)
            errors = [max(float((x - y)[:-1].abs().max()) for x, y in pairs)]
            pairs = zip(out["log_probs"], expected.log_probs, strict=True)
            errors.append(max(float((x - y).abs().max()) for x, y in pairs))
            worst.append((*errors, *deviation(gpt, expected, False)))
    return worst


@pytest.mark.parametrize(
    ("asked", "size", "sp", "cp"),
    [
        ("kept", 1, False, 1),
        ("several", 1, False, 1),
        ("both", 1, False, 1),
        ("both", 2, False, 1),
        ("both", 2, True, 1),
        ("both", 2, False, 2),
    ],
    ids=["kept", "several", "both", "tp2", "tp2-sp", "cp2"],
)
def test_equals_the_full_logits(asked: str, size: int, sp: bool, cp: int) -> None:
    hf = hf_model("qwen2")
    kept, count = ASKED[asked]
    want = wanted(hf, kept, count)
    parts = zip(want[1], labels_of(count), strict=True)
    outside = sum(int((~stats["is_kept"] & (labels != -100)).sum()) for stats, labels in parts)
    assert (outside > 0) == bool(kept)
    for of_rank in run_ranks(size, asked_of, hf, want, sp, cp, kept, count):
        for found in of_rank:
            assert max(found[:3]) <= TOLERANCE, found


def refused(rank: int, size: int) -> None:
    with parallel():
        hf = hf_model("qwen2")
        gpt = load(build_gpt(hf.config), hf, False)
        batch, forward = PackedBatch.from_sequences(SEQUENCES), make_forward(gpt)
        with pytest.raises(
            InvalidInputError, match=r"labels: got shape \(3,\), expected a tensor \(26,\) or \(26, K\)"
        ):
            forward(batch, labels=LABELS[0][0])
        with pytest.raises(InvalidInputError, match="top_k: got 0"):
            forward(batch, top_k=0)
        with pytest.raises(InvalidInputError, match="stats: got some with a loss_fn"):
            forward(batch, stats=("is_kept",), loss_fn=lambda scores, index: scores.log_probs)
        out = forward(batch, loss_fn=lambda scores, index: scores.log_probs, **KEPT)
        assert out.stats is None
        assert torch.equal(out.log_probs, forward(batch, **KEPT).log_probs)


def test_what_is_refused_and_a_loss_over_a_kept_set() -> None:
    run_ranks(1, refused)


def masked(rank: int, size: int) -> None:
    with parallel():
        hf = hf_model("qwen2")
        gpt, ids, labels = load(build_gpt(hf.config), hf, False), SEQUENCES[0][None], LABELS[1][None, :7]
        ones = torch.ones_like(ids)
        scored = ones.clone()
        scored[0, 2:5] = 0
        fused = fused_forward_model_gen()
        out, whole = (fused(gpt, ids, None, ones, labels, mask, 1.0, {}, stats=STATS) for mask in (scored, ones))
        assert bool(whole["is_kept"][0, 2].all())
        for name, x in out.items():
            of_label = x.ndim == 3
            assert of_label == (name in ("log_probs", "is_kept", "is_argmax"))
            mask = scored[..., None] if of_label else ones
            assert torch.equal(x, (whole[name] * mask).to(x.dtype)), name


def test_places_that_are_not_scored_have_zeros_of_their_labels() -> None:
    run_ranks(1, masked)
