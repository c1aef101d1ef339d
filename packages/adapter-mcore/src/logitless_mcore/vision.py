"""What a model that takes images is called with: its rows as they are, their mask, and the images.

It counts its own positions and cuts its own sequences, once the images' features are in place.

Shape suffixes: B sequences, S columns, j ragged, S' columns of the longest sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from logitless import PackedBatch
from logitless.errors import InvalidInputError
from logitless_mcore.arrangement import Arrangement
from logitless_mcore.capture import language_model, unwrapped

__all__ = ["batch_inputs", "images_of", "padded_rows", "takes_images", "vision_rows"]

VISION = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
SECONDS = "second_per_grid_ts"  # between the frames of a video


def _keywords(model: Any) -> set[str]:
    return set(inspect.signature(type(unwrapped(model)).forward).parameters)


def takes_images(model: Any) -> bool:
    """Whether the model wraps a language model and takes `pixel_values`."""
    return unwrapped(model) is not language_model(model) and "pixel_values" in _keywords(model)


def images_of(model: Any, multi_modal_inputs: Mapping[str, Any] | None, device: torch.device) -> dict[str, Tensor]:
    """Those of the four names that are given, and a video's seconds if the model takes them, on the device."""
    given = {name: x for name, x in (multi_modal_inputs or {}).items() if x is not None}
    names = [*VISION, SECONDS] if SECONDS in given and SECONDS in _keywords(model) else VISION
    return {name: torch.as_tensor(given[name], device=device) for name in names if name in given}


def padded_rows(input_ids: Any, pad_token_id: int | None) -> tuple[Tensor, Tensor]:
    """A nested tensor as [B, S] ids and their mask."""
    if pad_token_id is None:
        raise InvalidInputError("pad_token_id: got None for a vision model, expected an id to pad its rows with")
    lengths = input_ids.offsets().diff() if input_ids.lengths() is None else input_ids.lengths()
    rows = input_ids.to_padded_tensor(pad_token_id)
    return rows, torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]


def vision_rows(
    arrangement: Arrangement, input_ids: Tensor, attention_mask: Tensor | None, pad_token_id: int | None = None
) -> dict[str, Any]:
    """Ids, mask and positions in place of a language model's: as they were given if it runs packed, or in its rows.

    Args:
        arrangement: of these sequences.
        input_ids: [B, S], or nested [B, j].
        attention_mask: [B, S]; None for a nested tensor.
        pad_token_id: for a nested tensor.
    """
    rows, mask = padded_rows(input_ids, pad_token_id) if attention_mask is None else (input_ids, attention_mask)
    if arrangement.layout == "bshd":
        rows, mask = arrangement.pack(input_ids), arrangement.pack(torch.ones_like(input_ids)) != 0
    return {"input_ids": rows, "attention_mask": mask, "position_ids": None}


def batch_inputs(
    model: Any, run: Arrangement, batch: PackedBatch, multi_modal_inputs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Keywords of a vision model's forward for a packed batch, whole or this rank's shard of it.

    Args:
        model: see `takes_images`.
        run: the batch as the language model runs it.
        batch: as it was given. Positions of more than one axis are handed on, [3, B, S]; others are the model's.
        multi_modal_inputs: of all of its sequences, in their order.

    Raises:
        InvalidInputError: a name that the model does not take, or one that the batch determines.
    """
    whole = _of_all_ranks(run)
    rows = whole.to_padded()
    inputs: dict[str, Any] = {"input_ids": rows.input_ids, "attention_mask": rows.attention_mask, "position_ids": None}
    if whole.position_ids.ndim > 1:
        inputs["position_ids"] = rows.position_ids[-3:]  # of four, the first is the place in the sequence
    if run.params is not None:
        inputs["packed_seq_params"] = run.params
    given = {name: x for name, x in (multi_modal_inputs or {}).items() if x is not None}
    unknown = sorted(given.keys() - (_keywords(model) - inputs.keys() - {"self", "labels", "loss_mask"}))
    if unknown:
        raise InvalidInputError(
            f"multi_modal_inputs: got {', '.join(unknown)}, which {type(unwrapped(model)).__qualname__} does not take"
        )
    device = batch.input_ids.device
    return inputs | {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}


def _of_all_ranks(run: Arrangement) -> PackedBatch:
    """The arranged batch; over context parallelism, with the ids and positions of every rank's shard."""
    own, group = run.batch, run.ranks.cp_group
    if own.shard_of is None:
        return own
    ids = own.gather(own.input_ids, group)
    positions = own.gather(own.position_ids.movedim(-1, 0), group).movedim(0, -1)
    return replace(own, input_ids=ids, position_ids=positions, labels=ids, shard_of=None)
