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
from logitless.errors import InvalidInputError, UnsupportedError
from logitless.testing.distributed import run_ranks
from logitless_mcore import (
    Qwen2_5_VL,
    build_qwen2_5_vl,
    fused_gptmodel_forward_no_padding,
    get_mcore_forward_fn,
    get_mcore_forward_fused_fn,
    get_mcore_forward_no_padding_fn,
    hf_weights,
    load_hf_weights,
    make_forward,
    save_hf_weights,
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
    found, groups = hf_gradients(model.language_model), model.language_model.pg_collection
    for name, parameter in model.vision_model.named_parameters() if model.vision_model is not None else ():
        assert parameter.grad is not None, name
        dist.all_reduce(parameter.grad, group=groups.cp)
        found["visual." + name] = parameter.grad
    stages: list[Any] = [None] * groups.pp.size()
    dist.all_gather_object(stages, found, group=groups.pp)
    found = {name: grad for stage in stages for name, grad in stage.items()}
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
        for positions, scheme in ((False, "zigzag"), (True, "zigzag"), (True, "contiguous")):
            batch = batch_of("thd", align=2 * size)
            if positions:  # as a caller may have counted them
                counted = [own_positions(hf, sample) for sample in samples()]
                ids = [sample.ids for sample in samples()]
                batch = PackedBatch.from_sequences(ids, position_ids=counted, align=2 * size)
            shard = batch.shard(cp_rank, cp, scheme)  # type: ignore[arg-type]
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


# --- batches without images, stages, weights ----------------------------------------------------------------------


def without_images(rank: int, size: int, hf: Any) -> None:
    with parallel():
        model = build(hf)
        texts = [torch.arange(1, 9), torch.arange(20, 23)]
        batch = PackedBatch.from_sequences(texts)
        for layout in ("thd", "bshd"):
            model.zero_grad()
            out = make_forward(model, layout)(batch)
            for ids, scores in zip(texts, batch.unpack(out.log_probs), strict=True):
                log_p = hf(input_ids=ids[None]).logits[0].log_softmax(-1)
                expected = log_p[:-1].gather(-1, ids[1:, None])[:, 0]
                torch.testing.assert_close(scores[:-1], expected, rtol=0, atol=TOLERANCE)
            out.log_probs.sum().backward()
            for parameter in model.vision_model.parameters():  # type: ignore[union-attr]  # Megatron's DDP waits for it
                assert torch.equal(parameter.grad, torch.zeros_like(parameter))
        model.vision_model.requires_grad_(False)  # type: ignore[union-attr]
        make_forward(model)(batch).log_probs.sum().backward()


def test_a_batch_without_images_gives_the_tower_zeros() -> None:
    run_ranks(1, without_images, hf_images())


def refusals(rank: int, size: int, hf: Any) -> None:
    with parallel():
        model = build(hf)
        forward, batch, media = make_forward(model), batch_of("thd"), joined(samples())
        with pytest.raises(InvalidInputError, match=r"got frames, mask, which Qwen2_5_VL does not take"):
            forward(batch, multi_modal_inputs={**media, "mask": 1, "frames": 2})
        with pytest.raises(InvalidInputError, match="got input_ids"):
            forward(batch, multi_modal_inputs={"input_ids": batch.input_ids})
        with pytest.raises(InvalidInputError, match="hold 16 tokens of images, expected 0"):
            forward(batch)
        with pytest.raises(InvalidInputError, match="expected both or neither"):
            forward(batch, multi_modal_inputs={**media, "pixel_values": None})
        text = PackedBatch.from_sequences([samples()[1].ids])
        with pytest.raises(InvalidInputError, match="hold 0 tokens of images, expected 16"):
            forward(text, multi_modal_inputs={name: media[name] for name in ("pixel_values", "image_grid_thw")})
        ids = samples()[1].ids
        with pytest.raises(UnsupportedError, match="count up by one"):
            forward(PackedBatch.from_sequences([ids], position_ids=[2 * torch.arange(len(ids))]))
        rows, mask = ids[None], torch.ones_like(ids)[None]
        mask[0, 0] = 0
        with pytest.raises(InvalidInputError, match="padding at the end"):
            model(rows, attention_mask=mask)
        with pytest.raises(InvalidInputError, match="expected that of input_ids"):
            model(rows, attention_mask=mask[:, 1:])
        with pytest.raises(InvalidInputError, match=r"expected \[B, S\]"):
            model(ids)
        model.config.apply_rope_fusion = True  # which Megatron itself refuses without Transformer Engine
        with pytest.raises(UnsupportedError, match="three axes"):
            Qwen2_5_VL(model.config, hf.config)
        with pytest.raises(InvalidInputError, match="expected a sum of 8"):
            build(hf, mrope_section=[2, 3, 4])
        with pytest.raises(InvalidInputError, match=r"mrope_section: \[4, 2, 2\], expected \[2, 3, 3\]"):
            build(hf, mrope_section=[4, 2, 2])


def test_what_is_refused() -> None:
    run_ranks(1, refusals, hf_images())


def round_trip(rank: int, size: int, hf: Any, folder: str) -> None:
    with parallel(tp=size):
        model = build(folder)
        found = dict(hf_weights(model))
        assert found.keys() == {_published(name) for name in hf.state_dict()}
        for name, tensor in hf.state_dict().items():
            assert torch.equal(found[_published(name)], tensor), name
        save_hf_weights(model, f"{folder}-again", config=hf.config)
        again = build(f"{folder}-again")
        for (name, mine), other in zip(model.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(mine, other), name
        with pytest.raises(InvalidInputError, match=r"lacks visual\.blocks\.0"):
            load_hf_weights(model, {name: x for name, x in found.items() if "visual" not in name})
        with pytest.raises(InvalidInputError, match=r"holds visual\.extra"):
            load_hf_weights(model, {**found, "visual.extra": torch.ones(1)})


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_come_and_go_as_checkpoints_have_them(tp: int, tmp_path: Any) -> None:
    hf = hf_images()
    hf.save_pretrained(tmp_path / "hf")
    run_ranks(tp, round_trip, hf, str(tmp_path / "hf"))
    kind: Any = type(hf)
    theirs = kind.from_pretrained(tmp_path / "hf-again")
    for name, tensor in hf.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor), name


def staged(rank: int, size: int, hf: Any, expected: Any, tied: bool) -> list[Any]:
    """Errors of scores (on the last stage) and of all gradients, those of the tower among them."""
    from megatron.core import parallel_state

    errors = []
    with parallel(pp=2):
        model = build(hf)
        assert (model.vision_model is None) == (rank == 1)
        for layout in ("thd", "bshd"):
            model.zero_grad()
            batch, worst = batch_of(layout), 0.0
            lengths = batch.padded_lengths
            shape = (sum(lengths), 1) if layout == "thd" else (max(lengths), len(lengths))
            hidden = torch.empty(*shape, hf.config.get_text_config().hidden_size)
            if rank == 1:
                dist.recv(hidden, 0)
                model.set_input_tensor(hidden.requires_grad_())
            out = make_forward(model, layout)(batch, temperature=0.8, multi_modal_inputs=joined(samples()))
            if rank == 1:
                loss, worst = loss_and_error(*(list(batch.unpack(x)) for x in (out.log_probs, out.entropy)), expected)
                loss.backward()
                dist.send(hidden.grad, 0)
            else:
                dist.send(out.detach(), 1)
                dist.recv(hidden, 1)
                out.backward(hidden)
            if tied:  # as `finalize_model_grads` does
                group = parallel_state.get_embedding_group()
                dist.all_reduce(model.shared_embedding_or_output_weight().grad, group=group)  # type: ignore[union-attr]
            errors.append((worst, *deviation(model, expected)))
    return errors


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_stages_of_a_pipeline_have_the_tower_on_the_first(tied: bool) -> None:
    hf = hf_images(tied)
    expected = expect_images(hf, samples(), 0.8)
    for of_rank in run_ranks(2, staged, hf, expected, tied):
        for found in of_rank:
            assert max(found) <= TOLERANCE, of_rank


def in_half(rank: int, size: int, hf: Any) -> None:
    with parallel():
        model = build_qwen2_5_vl(hf, **ON_CPU)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        model.bfloat16()  # as Float16Module does
        buffers = dict(model.vision_model.named_buffers())  # type: ignore[union-attr]
        assert buffers
        for name, wanted in hf.model.visual.named_buffers():
            assert torch.equal(buffers[name], wanted), name
        rotary = model.language_model.rotary_pos_emb
        assert torch.equal(rotary.inv_freq, hf.model.language_model.rotary_emb.inv_freq)


def test_frequencies_stay_in_float32() -> None:
    run_ranks(1, in_half, hf_images())


# --- another library's wrapper ------------------------------------------------------------------------------------


class Theirs(torch.nn.Module):
    """A wrapper that hands no `output_processor` on, and takes images its own way."""

    def __init__(self, inner: Qwen2_5_VL) -> None:
        super().__init__()
        self.language_model, self.held, self.config = inner.language_model, [inner], inner.config
        self.pre_process = self.post_process = True

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor,
        packed_seq_params: Any = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
    ) -> Tensor:
        assert position_ids is None
        assert input_ids.shape == attention_mask.shape == (5, max(len(sample.ids) for sample in samples()))
        media = (pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
        out: Tensor = self.held[0](input_ids, None, attention_mask, None, None, packed_seq_params, *media)
        return out


def wrapped(rank: int, size: int, hf: Any) -> None:
    with parallel():
        inner = build(hf)
        theirs, media = Theirs(inner), joined(samples())
        seconds = media.pop("second_per_grid_ts")
        batch = batch_of("thd")
        for layout in ("thd", "bshd"):
            ours = make_forward(inner, layout)(batch, multi_modal_inputs=media)
            out = make_forward(theirs, layout)(batch, multi_modal_inputs=media)
            assert torch.equal(out.log_probs, ours.log_probs)
        with pytest.raises(InvalidInputError, match="second_per_grid_ts, which Theirs does not take"):
            make_forward(theirs)(batch, multi_modal_inputs={**media, "second_per_grid_ts": seconds})
        ids = torch.nested.nested_tensor([sample.ids for sample in samples()], layout=torch.jagged)
        told = {**media, "second_per_grid_ts": seconds}  # not of the reference's four: such a model goes without
        nested = fused_gptmodel_forward_no_padding(theirs, ids, told, vision_model=True, pad_token_id=0)
        ours = make_forward(inner)(batch, multi_modal_inputs=media)
        assert torch.equal(nested["log_probs"].values(), torch.cat(batch.unpack(ours.log_probs)))


def test_wrappers_of_other_libraries() -> None:
    run_ranks(1, wrapped, hf_images())
