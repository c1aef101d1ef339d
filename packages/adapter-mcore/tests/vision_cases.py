"""A tiny Qwen2.5-VL of transformers, sequences with images and videos, and what it makes of them by its logits."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from oracle import Expected
from torch import Tensor

__all__ = ["Sample", "expect_images", "hf_images", "joined", "samples"]

IMAGE, VIDEO, START, END = 120, 121, 118, 119
PATCH = 3 * 2 * 14 * 14


def hf_images(tied: bool = False, seed: int = 0, **text: Any) -> Any:
    """In eval mode, fp32, every parameter perturbed; the same on every rank."""
    language = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]},
    }
    tower = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config={**language, **text},
        vision_config=tower,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(config, attn_implementation="sdpa")
        with torch.no_grad():
            for parameter in model.float().eval().parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@dataclass
class Sample:
    """One sequence, with its images and videos."""

    ids: Tensor
    media: dict[str, list[Tensor]] = field(default_factory=dict)


def _sample(plan: list[Any], generator: torch.Generator) -> Sample:
    """Of text lengths, and of grids (t, h, w) in patches: one of a single frame is an image."""
    parts, media = [], {}
    for piece in plan:
        if isinstance(piece, int):
            parts.append(torch.randint(1, 100, (piece,), generator=generator))
            continue
        video, count = piece[0] > 1, piece[0] * piece[1] * piece[2]
        token = torch.full((count // 4,), VIDEO if video else IMAGE)
        parts += [torch.tensor([START]), token, torch.tensor([END])]
        names = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
        media.setdefault(names[0], []).append(torch.randn(count, PATCH, generator=generator))
        media.setdefault(names[1], []).append(torch.tensor([piece]))
        if video:
            media.setdefault("second_per_grid_ts", []).append(torch.tensor([0.5 * len(media[names[0]])]))
    return Sample(torch.cat(parts), media)


def samples() -> list[Sample]:
    """An image; none; several in one; a video with an image; a video."""
    generator = torch.Generator().manual_seed(5)
    plans = [
        [3, (1, 4, 4), 5],
        [6],
        [1, (1, 4, 8), 2, (1, 2, 4), 3],
        [2, (2, 4, 4), 1, (1, 4, 2), 4],
        [(3, 2, 4), 3],
    ]
    return [_sample(plan, generator) for plan in plans]


def joined(of: list[Sample]) -> dict[str, Tensor]:
    """The media of all samples, in their order."""
    names = dict.fromkeys(itertools.chain.from_iterable(sample.media for sample in of))
    return {name: torch.cat([x for sample in of for x in sample.media.get(name, ())]) for name in names}


def expect_images(model: Any, of: list[Sample], temperature: float = 1.0) -> Expected:
    """By the model's own logits, each sample alone."""
    generator = torch.Generator().manual_seed(11)
    log_probs, entropies, upstream = [], [], []
    model.zero_grad()
    loss = torch.zeros(())
    for sample in of:
        ids = sample.ids[None]
        kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        told = {"mm_token_type_ids": kinds} if int(transformers.__version__.split(".")[0]) >= 5 else {}
        media = {name: torch.cat(parts) for name, parts in sample.media.items()}
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **media, **told).logits[0]
        log_p = (logits / temperature).log_softmax(-1)
        scored = log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)[:-1]
        g, e = torch.randn(2, len(scored), generator=generator) / 8
        loss = loss + (g * scored).sum() + (e * entropy).sum()
        log_probs.append(scored.detach())
        entropies.append(entropy.detach())
        upstream.append((g, e))
    loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Expected(log_probs, entropies, grads, upstream)
