"""Models that also see: packed sequences with images equal each alone, in every layout, towers included."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import logitless
from logitless import PackedBatch
from logitless.errors import InvalidInputError, UnsupportedError
from logitless_hf import unbind
from logitless_hf.attention import implementations
from logitless_hf.forward import PackedForward

IMAGE, BEGIN, END = 99, 97, 96
TEXT = {
    **{"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
LAYOUTS = ("thd", "nested", "bshd")
# Of three sequences: one image, none, and two of different sizes, in patches of 4 by 4 pixels.
GRIDS = [torch.tensor([[1, 4, 4]]), torch.zeros(0, 3, dtype=torch.int64), torch.tensor([[1, 4, 4], [1, 2, 4]])]


def head_scaled(model: Any) -> Any:
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model.double().eval()


def qwen() -> Any:
    torch.manual_seed(0)
    vision = {
        **{"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4},
        **{"out_hidden_size": 32, "fullatt_block_indexes": [0], "window_size": 16},
    }
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=98,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    if "mm_token_type_ids" not in inspect.signature(model.model.get_rope_index).parameters:
        pytest.skip("its positions were made in another way before")
    return head_scaled(model)


def tokens(images: list[int]) -> Tensor:
    ids = [7, 8]
    for count in images:
        ids += [BEGIN, *[IMAGE] * count, END, 11, 12]
    return torch.tensor([*ids, 13, 14, 15, 20, 31])


def scores(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    log_p = model(input_ids=ids.unsqueeze(0), use_cache=False, **inputs).logits[0].log_softmax(-1)
    return torch.nn.functional.pad(log_p[:-1].gather(-1, ids[1:, None])[:, 0], (0, 1))


def compare(model: Any, got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    upstream = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    named = dict(model.named_parameters())
    grads = [torch.autograd.grad(x, list(named.values()), upstream, allow_unused=True) for x in (got, expected)]
    for name, found, wanted in zip(named, *grads, strict=True):
        assert (found is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8, msg=name)
    assert any(
        "visual" in name or "vision" in name for name, grad in zip(named, grads[1], strict=True) if grad is not None
    )


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_of_three_axes(layout: str, rows: int) -> None:
    model = qwen()
    generator = torch.Generator().manual_seed(2)
    parts = [tokens((grid.prod(1) // 4).tolist()) for grid in GRIDS]
    patches = [torch.randn(int(g.prod(1).sum()), 96, generator=generator, dtype=torch.float64) for g in GRIDS]
    expected, positions = [], []
    for ids, grid, pixels in zip(parts, GRIDS, patches, strict=True):
        kinds = (ids == IMAGE).int().unsqueeze(0)
        with_image = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds} if len(grid) else {}
        expected.append(scores(model, ids, **with_image))
        place = torch.arange(len(ids)).expand(3, -1)
        if len(grid):
            place = model.model.get_rope_index(ids.unsqueeze(0), kinds, image_grid_thw=grid)[0][:, 0]
        positions.append(place if rows == 3 else torch.cat((torch.arange(len(ids)).unsqueeze(0), place)))
    forward = logitless.make_forward(model, layout)
    batch = PackedBatch.from_sequences(parts, position_ids=positions)
    media = {"pixel_values": torch.cat(patches), "image_grid_thw": torch.cat(GRIDS)}
    out = forward(batch, multi_modal_inputs={**media, "mm_token_type_ids": (torch.cat(parts) == IMAGE).int()})
    assert out.log_probs is not None
    compare(model, out.log_probs, torch.cat(expected))
    with pytest.raises(InvalidInputError, match=r"position_ids: got \[T\], expected \[3, T\] .*get_rope_index"):
        forward(PackedBatch.from_sequences(parts), multi_modal_inputs=media)
    if layout != "bshd" and rows == 3:
        with pytest.raises(InvalidInputError, match=r"position_ids: got \[3, T\], which tells no sequences apart"):
            PackedForward(model, layout, "positions")(batch, multi_modal_inputs=media)


def llava() -> Any:
    torch.manual_seed(0)
    vision = {
        **{"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "image_size": 8, "patch_size": 4, "projection_dim": 32},
    }
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama"}, vision_config=vision, image_token_index=IMAGE
    )
    return head_scaled(transformers.LlavaForConditionalGeneration(config))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tower_keeps_its_attention(layout: str) -> None:
    model = llava()
    parts = [tokens([4]), tokens([]), tokens([4, 4])]
    pixels = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ranges = (slice(0, 1), slice(0, 0), slice(1, 3))
    expected = [
        scores(model, ids, **({"pixel_values": pixels[images]} if len(pixels[images]) else {}))
        for ids, images in zip(parts, ranges, strict=True)
    ]
    forward: Any = logitless.make_forward(model, layout)
    assert layout == "bshd" or forward.borders == "packed"
    out = forward(PackedBatch.from_sequences(parts), multi_modal_inputs={"pixel_values": pixels})
    compare(model, out.log_probs, torch.cat(expected))


def test_images_that_see_both_ways_are_refused_packed() -> None:
    """Gemma 3 lets the tokens of an image see each other, which is no causal mask."""
    torch.manual_seed(0)
    vision = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4},
        **{"image_size": 8, "patch_size": 4, "vision_use_head": False},
    }
    config = transformers.Gemma3Config(
        text_config={**TEXT, "query_pre_attn_scalar": 8, "sliding_window": 64},
        vision_config=vision,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        mm_tokens_per_image=4,
    )
    model = head_scaled(transformers.Gemma3ForConditionalGeneration(config))
    parts = [tokens([4]), tokens([])]
    pixels = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    kinds = [(ids == IMAGE).long() for ids in parts]
    expected = [
        scores(model, parts[0], pixel_values=pixels, token_type_ids=kinds[0].unsqueeze(0)),
        scores(model, parts[1], token_type_ids=kinds[1].unsqueeze(0)),
    ]
    media = {"pixel_values": pixels, "token_type_ids": torch.cat(kinds)}
    batch = PackedBatch.from_sequences(parts)
    forward: Any = logitless.make_forward(model, "thd")
    assert forward.borders == "packed"
    with pytest.raises(UnsupportedError, match="attention mask is not causal .* use layout='bshd'"):
        forward(batch, multi_modal_inputs=media)
    assert implementations(model) == {"sdpa"}
    out = logitless.make_forward(unbind(model), "bshd")(batch, multi_modal_inputs=media)
    torch.testing.assert_close(out.log_probs, torch.cat(expected), rtol=1e-5, atol=1e-5)
