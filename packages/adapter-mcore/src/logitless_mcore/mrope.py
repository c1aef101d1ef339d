"""Rotary positions of three axes (time, height, width), as vision-language models of the Qwen family have them.

Megatron's own module goes to the current GPU by itself, and over context parallelism cuts its frequencies as if all
tokens were one sequence. This one leaves them whole: attention over packed sequences takes each token's own.

Shape suffixes: B sequences, S columns, T tokens of the row before it is cut for context parallelism, F frequencies.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from logitless.errors import InvalidInputError, UnsupportedError

__all__ = ["MultimodalRotary", "axes_positions", "use_mrope"]


class MultimodalRotary(nn.Module):
    """Angles of whole rows of tokens, in float32, on the device of the model around it.

    Args:
        size: rotary size of a head, 2F.
        base: of the frequencies, `rope_theta`.
        device: to begin on.
    """

    def __init__(self, size: int, base: float, device: torch.device) -> None:
        super().__init__()
        self.rotary_interleaved, self.seq_len_interpolation_factor = False, None
        self.inv_freq = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)

    def _apply(self, fn: Any, recurse: bool = True) -> MultimodalRotary:
        # The device alone: rounded to bf16, frequencies are off by whole turns at long range.
        self.inv_freq = self.inv_freq.to(fn(self.inv_freq).device)
        return self

    def forward(self, position_ids: Tensor, mrope_section: Sequence[int], cp_group: Any = None) -> Tensor:
        """[T, B, 1, 2F] of positions [3, B, T]; `mrope_section` says how many frequencies each axis has in turn."""
        angles_3BTF = position_ids.float()[..., None] * self.inv_freq
        sections = torch.split(angles_3BTF, list(mrope_section), -1)
        angles_BTF = torch.cat([section[i % 3] for i, section in enumerate(sections)], -1)
        return torch.cat((angles_BTF, angles_BTF), -1).transpose(0, 1)[:, :, None].contiguous()


def use_mrope(gpt: Any, base: float, section: Sequence[int]) -> None:
    """Give a GPTModel that was built without positions (`position_embedding_type="none"`) those of three axes.

    Args:
        gpt: unwrapped, any pipeline stage.
        base: `rope_theta`.
        section: frequencies of each axis in turn; their sum is half of `kv_channels`.

    Raises:
        InvalidInputError: the sum is another.
        UnsupportedError: the rotary kernel is fused; for packed tokens it counts positions by itself, on one axis.
    """
    if gpt.config.apply_rope_fusion:
        raise UnsupportedError("apply_rope_fusion: got True, but its kernel has no positions of three axes")
    size = gpt.config.kv_channels
    if 2 * sum(section) != size:
        raise InvalidInputError(f"mrope_section: got {list(section)}, expected a sum of {size // 2}, half of a head")
    gpt.position_embedding_type, gpt.mrope_section = "mrope", list(section)
    gpt.rotary_pos_emb = MultimodalRotary(size, base, next(gpt.parameters()).device)


def axes_positions(
    hf_config: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    second_per_grid_ts: Tensor | None = None,
) -> Tensor:
    """Positions [3, B, S] of a Qwen2.5-VL model, by transformers' own `get_rope_index`; anything where the mask is 0.

    Versions of transformers differ in where the text after a video goes on, so what is installed decides.

    Args:
        hf_config: Qwen2_5_VLConfig.
        input_ids: [B, S].
        attention_mask: [B, S] of 0 and 1, padded left, right or with holes.
        image_grid_thw: [images, 3] patches of each image, in the order of the rows.
        video_grid_thw: [videos, 3].
        second_per_grid_ts: [videos] seconds between the frames of a video; 1 unless given.
    """
    if image_grid_thw is None and video_grid_thw is None:
        return (attention_mask.long().cumsum(1) - 1).clamp(min=0).expand(3, -1, -1)
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    counter: Any = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    nn.Module.__init__(counter)  # its method alone: no layers
    counter.config = hf_config
    device = input_ids.device
    given = {"image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw}
    # Their loop asks for numbers one by one: on a GPU each would wait.
    inputs = {name: None if x is None else x.cpu() for name, x in given.items()}
    ids, mask = input_ids.cpu(), attention_mask.long().cpu()
    if second_per_grid_ts is not None:
        inputs["second_per_grid_ts"] = torch.as_tensor(second_per_grid_ts).cpu()
    if "mm_token_type_ids" in inspect.signature(counter.get_rope_index).parameters:  # since transformers 5
        images, videos = ids == hf_config.image_token_id, ids == hf_config.video_token_id
        inputs["mm_token_type_ids"] = images.int() + 2 * videos.int()
    positions: Tensor = counter.get_rope_index(input_ids=ids, attention_mask=mask, **inputs)[0]
    return positions.to(device)
