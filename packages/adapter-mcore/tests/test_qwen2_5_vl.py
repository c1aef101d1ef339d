"""Qwen2.5-VL against transformers' model of the same weights: scores, and gradients of language model and tower."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cpu import hf_gradients, parallel
from torch import Tensor
from vision_cases import expect_images, hf_images, joined, samples

from logitless import PackedBatch
from logitless.testing.distributed import run_ranks
from logitless_mcore import (
    Qwen2_5_VL,
    build_qwen2_5_vl,
    get_mcore_forward_fn,
    get_mcore_forward_fused_fn,
    get_mcore_forward_no_padding_fn,
    make_forward,
)
from logitless_mcore.hf_source import _published

TOLERANCE = 1e-5
ON_CPU = {
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
}


def build(hf: Any, **settings: Any) -> Qwen2_5_VL:
    return build_qwen2_5_vl(hf, dtype=torch.float32, **ON_CPU, **settings)


def loss_and_error(log_probs: list[Tensor], entropies: list[Tensor], expected: Any) -> tuple[Tensor, float]:
    loss, worst = torch.zeros(()), 0.0
    for (g, e), lp, ent, *other in zip(
        expected.upstream, log_probs, entropies, expected.log_probs, expected.entropy, strict=True
    ):
        loss = loss + (g * lp[: len(g)]).sum() + (e * ent[: len(g)]).sum()
        for found, wanted in zip((lp, ent), other, strict=True):
            worst = max(worst, float((found[: len(g)] - wanted).detach().abs().max()))
    return loss, worst


def deviation(model: Qwen2_5_VL, expected: Any) -> tuple[float, float]:
    """The largest error of a gradient, relative to its largest entry if that is above 1: language model, tower."""
    found = hf_gradients(model.language_model)
    for name, parameter in model.vision_model.named_parameters():  # type: ignore[union-attr]
        assert parameter.grad is not None, name
        dist.all_reduce(parameter.grad, group=model.language_model.pg_collection.cp)
        found["visual." + name] = parameter.grad
    wanted = {_published(name): grad for name, grad in expected.grads.items() if grad is not None}
    assert found.keys() == wanted.keys()
    worst = {False: 0.0, True: 0.0}
    for name, grad in wanted.items():
        error = float((found[name] - grad).abs().max()) / max(1.0, float(grad.abs().max()))
        worst[name.startswith("visual.")] = max(worst[name.startswith("visual.")], error)
    assert max(float(grad.abs().max()) for name, grad in wanted.items() if name.startswith("visual.")) > 1e-3
    return worst[False], worst[True]


# --- make_forward -------------------------------------------------------------------------------------------------


def batch_of(layout: str, align: int = 1) -> PackedBatch:
    ids = [sample.ids for sample in samples()]
    if layout == "nested":
        return PackedBatch.from_nested(torch.nested.nested_tensor(ids, layout=torch.jagged), align=align)
    return PackedBatch.from_sequences(ids, align=align)


def bound(rank: int, size: int, hf: Any, expected: Any, sp: bool) -> dict[str, Any]:
    found = {}
    with parallel(tp=size):
        model = build(hf, sequence_parallel=sp)
        for layout in ("thd", "bshd", "nested"):
            model.zero_grad()
            batch = batch_of(layout)
            out = make_forward(model, layout)(batch, temperature=0.8, multi_modal_inputs=joined(samples()))
            parts = [list(batch.unpack(x)) for x in (out.log_probs, out.entropy)]
            loss, worst = loss_and_error(*parts, expected)
            loss.backward()
            found[layout] = (worst, *deviation(model, expected))
    return found


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_bound_model_equals_hugging_face(tied: bool, tp: int, sp: bool) -> None:
    hf = hf_images(tied)
    expected = expect_images(hf, samples(), 0.8)
    for of_rank in run_ranks(tp, bound, hf, expected, sp):
        for layout, found in of_rank.items():
            assert max(found) <= TOLERANCE, (layout, found)


# --- the reference design's forwards ------------------------------------------------------------------------------


def scattered() -> tuple[Tensor, Tensor]:
    """The samples in rows that are padded left, right, and with holes among the tokens of images."""
    of = samples()
    width = max(len(sample.ids) for sample in of) + 3
    ids, mask = torch.full((len(of), width), 77), torch.zeros(len(of), width, dtype=torch.int64)
    for row, sample in enumerate(of):
        length = len(sample.ids)
        places = torch.arange(length) + (width - length if row % 2 else 0)
        if row == 2:
            places = torch.randperm(width, generator=torch.Generator().manual_seed(1))[:length].sort().values
        ids[row, places], mask[row, places] = sample.ids, 1
    return ids, mask


def reference_ways(data_format: str, model: Any) -> Any:
    """Scores [row][place] by every forward of the reference design, in this layout."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    def processor(logits: Tensor, label: Tensor) -> dict[str, Tensor]:
        log_p = (gather_from_tensor_model_parallel_region(logits) / 0.8).log_softmax(-1)
        scored = log_p.gather(-1, label[..., None])[..., 0]
        return {"log_probs": scored, "entropy": -(log_p.exp() * log_p).sum(-1)}

    hf_config, media = model.hf_config, joined(samples())
    ids, mask = scattered()
    nested = torch.nested.nested_tensor([sample.ids for sample in samples()], layout=torch.jagged)
    labels = torch.zeros_like(ids)
    for row in range(len(ids)):
        at = mask[row].nonzero()[:, 0]
        labels[row, at[:-1]] = ids[row, at[1:]]
    rows: dict[str, Any] = {"data_format": data_format}
    yield (
        get_mcore_forward_fn(hf_config)(model, ids, mask, None, media, processor, {"label": labels}, **rows),
        mask,
    )
    yield get_mcore_forward_fused_fn(hf_config)(model, ids, None, mask, labels, mask, 0.8, media, **rows), mask
    nested_forward = get_mcore_forward_no_padding_fn(hf_config)
    arguments: Any = (model, nested, media, processor, {"label": nested})
    yield nested_forward(*arguments, pad_token_id=77, **rows), None
    from logitless_mcore import fused_gptmodel_forward_no_padding

    yield (
        fused_gptmodel_forward_no_padding(
            model, nested, media, temperature=0.8, vision_model=True, pad_token_id=77, **rows
        ),
        None,
    )


def referenced(rank: int, size: int, hf: Any, expected: Any, sp: bool) -> list[Any]:
    found = []
    with parallel(tp=size):
        model = build(hf, sequence_parallel=sp)
        for data_format in ("thd", "bshd"):
            for out, mask in reference_ways(data_format, model):
                model.zero_grad()
                parts = [
                    list(x.unbind()) if mask is None else [row[m == 1] for row, m in zip(x, mask, strict=True)]
                    for x in (out["log_probs"], out["entropy"])
                ]
                loss, worst = loss_and_error(*parts, expected)
                loss.backward()
                found.append((worst, *deviation(model, expected)))
    return found


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"])
def test_the_reference_forwards_equal_hugging_face(tp: int, sp: bool) -> None:
    hf = hf_images()
    expected = expect_images(hf, samples(), 0.8)
    for of_rank in run_ranks(tp, referenced, hf, expected, sp):
        assert len(of_rank) == 8
        for found in of_rank:
            assert max(found) <= TOLERANCE, of_rank


# --- context parallelism ------------------------------------------------------------------------------------------


def in_context(rank: int, size: int, hf: Any, expected: Any, cp: int) -> list[Any]:
    found = []
    with parallel(tp=size // cp, cp=cp):
        from megatron.core import parallel_state

        group, cp_rank = parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_rank()
        model = build(hf, sequence_parallel=size > cp)
        for positions in (False, True):
            batch = batch_of("thd", align=2 * size)
            if positions:  # as a caller may have counted them
                counted = [own_positions(hf, sample) for sample in samples()]
                ids = [sample.ids for sample in samples()]
                batch = PackedBatch.from_sequences(ids, position_ids=counted, align=2 * size)
            shard = batch.shard(cp_rank, cp)
            model.zero_grad()
            out = make_forward(model, "thd")(shard, temperature=0.8, multi_modal_inputs=joined(samples()))
            parts = [list(batch.unpack(shard.gather(x, group))) for x in (out.log_probs, out.entropy)]
            loss, worst = loss_and_error(*parts, expected)
            loss.backward()
            found.append((worst, *deviation(model, expected)))
        model.zero_grad()
        out, mask = list(reference_ways("thd", model))[1]
        parts = [[row[m == 1] for row, m in zip(x, mask, strict=True)] for x in (out["log_probs"], out["entropy"])]
        loss, worst = loss_and_error(*parts, expected)
        loss.backward()
        found.append((worst, *deviation(model, expected)))
    return found


def own_positions(hf: Any, sample: Any) -> Tensor:
    from logitless_mcore.mrope import axes_positions

    media = {name: torch.cat(x) for name, x in sample.media.items() if not name.startswith("pixel")}
    ids = sample.ids[None]
    return axes_positions(hf.config, ids, torch.ones_like(ids), **media)[:, 0]


@pytest.mark.parametrize(("size", "cp"), [(2, 2), (4, 2)], ids=["cp2", "tp2-sp-cp2"])
def test_context_parallel_ranks_cut_after_the_images_are_in_place(size: int, cp: int) -> None:
    hf = hf_images()
    expected = expect_images(hf, samples(), 0.8)
    for of_rank in run_ranks(size, in_context, hf, expected, cp):
        for found in of_rank:
            assert max(found) <= TOLERANCE, of_rank
