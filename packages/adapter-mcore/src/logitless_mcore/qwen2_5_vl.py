"""Qwen2.5-VL on Megatron-Core: the vision tower of transformers in front of a GPTModel with positions of three axes.

The tower is the same on every tensor-parallel rank, and stands on the first pipeline stage. The model is called with
the caller's rows and their mask even where it runs packed: it counts positions and puts the images' features in place
over whole sequences, and only then cuts them for context and sequence parallelism.

Shape suffixes: B rows, S columns as the caller has them; b by s the grid that the language model runs (1 by T packed
tokens, or B by S' rows aligned left); D hidden size; N features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

from logitless.errors import InvalidInputError, NotFoundError, UnsupportedError
from logitless_mcore.arrangement import Arrangement, Ranks, arrange, as_rows, lengthened
from logitless_mcore.head import set_vocab_size
from logitless_mcore.mrope import axes_positions, use_mrope
from logitless_mcore.packing import arranged_as
from logitless_mcore.spec import layer_spec

__all__ = ["Qwen2_5_VL", "build_qwen2_5_vl", "qwen2_5_vl_config"]

MODEL_TYPE = "qwen2_5_vl"


# --- settings -----------------------------------------------------------------------------------------------------


def _text(hf_config: Any) -> Any:
    if getattr(hf_config, "model_type", None) != MODEL_TYPE:
        raise UnsupportedError(
            f"hf_config: got {type(hf_config).__qualname__} of the family "
            f"{getattr(hf_config, 'model_type', None)!r}, expected transformers' configuration of a Qwen2.5-VL model"
        )
    return hf_config.get_text_config()


def _rope(text: Any) -> Mapping[str, Any]:
    """Its place moved in transformers 5."""
    told = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return {"rope_theta": getattr(text, "rope_theta", None), **told}


def qwen2_5_vl_config(hf_config: Any, **settings: Any) -> TransformerConfig:
    """Megatron's configuration of a Qwen2.5-VL's language model, with the sizes of `parallel_state`.

    Args:
        hf_config: transformers' Qwen2_5_VLConfig.
        settings: of TransformerConfig, in place of what is derived (`sequence_parallel=True`, `params_dtype=...`).
    """
    text = _text(hf_config)
    derived = {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "num_attention_heads": text.num_attention_heads,
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        "ffn_hidden_size": text.intermediate_size,
        "layernorm_epsilon": text.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "apply_rope_fusion": False,
        "mrope_section": list(_rope(text)["mrope_section"]),
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # which Megatron wants of any model with variable lengths
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
    }
    return TransformerConfig(**{**derived, **settings})


# --- the model ----------------------------------------------------------------------------------------------------


class Qwen2_5_VL(MegatronModule):  # type: ignore[misc]
    """A pipeline stage of the model; its weights come by `load_hf_weights`.

    Args:
        config: of `qwen2_5_vl_config`.
        hf_config: transformers' Qwen2_5_VLConfig.
        vocab_size: rows of the head, over all ranks; by default the configuration's, padded to a multiple of the
            tensor-parallel ranks. Padded rows stay out of the softmax.
        transformer_layer_spec: the layers'; `layer_spec(config)` unless given.
        pre_process, post_process: whether this is the first, the last pipeline stage; by `parallel_state` unless given.
        vp_stage: of a virtual pipeline.
        vision_attention: transformers' attention implementation for the tower; it chooses unless one is given.

    Attributes:
        language_model: Megatron's GPTModel.
        vision_model: the tower of transformers on the first pipeline stage, None elsewhere.
        hf_tower: what begins the names of the tower's tensors in a checkpoint.
    """

    hf_tower = "visual."

    def __init__(
        self,
        config: TransformerConfig,
        hf_config: Any,
        *,
        vocab_size: int | None = None,
        transformer_layer_spec: Any = None,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
        vision_attention: str | None = None,
    ) -> None:
        super().__init__(config=config)
        text = _text(hf_config)
        tp = parallel_state.get_tensor_model_parallel_world_size()
        self.hf_config = hf_config
        self.pre_process = parallel_state.is_pipeline_first_stage() if pre_process is None else pre_process
        self.post_process = parallel_state.is_pipeline_last_stage() if post_process is None else post_process
        staged: dict[str, Any] = {} if vp_stage is None else {"vp_stage": vp_stage}
        self.language_model = GPTModel(
            config=config,
            transformer_layer_spec=transformer_layer_spec or layer_spec(config, **staged),
            vocab_size=vocab_size or math.ceil(text.vocab_size / tp) * tp,
            max_sequence_length=text.max_position_embeddings,
            pre_process=self.pre_process,
            post_process=self.post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
            position_embedding_type="none",
            scatter_embedding_sequence_parallel=False,  # of the features' places, too, and after them
            **staged,
        )
        rope = _rope(text)
        use_mrope(self.language_model, rope["rope_theta"], config.mrope_section)
        set_vocab_size(self.language_model, text.vocab_size)
        self.share_embeddings_and_output_weights = self.language_model.share_embeddings_and_output_weights
        self.vision_model = self._tower(vision_attention) if self.pre_process else None

    def _tower(self, attention: str | None) -> nn.Module:
        try:
            from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
        except ImportError as error:
            raise NotFoundError(
                f"Qwen2.5-VL needs transformers, for its vision tower: pip install transformers ({error})"
            ) from error
        chosen = {} if attention is None else {"attn_implementation": attention}
        kind: Any = Qwen2_5_VisionTransformerPretrainedModel
        tower = kind._from_config(self.hf_config.vision_config, **chosen)
        for parameter in tower.parameters():
            parameter.data = parameter.data.to(self.config.params_dtype)
        moved: nn.Module = tower.to(next(self.language_model.parameters()).device)
        return moved

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Qwen2_5_VL:
        """Frequencies of the tower stay in float32, as transformers loads them: Float16Module casts all there is."""
        kept = [
            (module, name, buffer)
            for module in (self.vision_model.modules() if self.vision_model is not None else ())
            for name, buffer in module.named_buffers(recurse=False)
            if name in module._non_persistent_buffers_set
        ]
        super()._apply(fn, recurse)
        for module, name, buffer in kept:
            setattr(module, name, buffer.to(getattr(module, name).device))
        return self

    def set_input_tensor(self, input_tensor: Any) -> None:
        """What the previous pipeline stage gave."""
        self.language_model.set_input_tensor(input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The language model's, for Megatron to sum a tied weight's gradients over stages."""
        weight: Tensor | None = self.language_model.shared_embedding_or_output_weight()
        return weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | None = None,
    ) -> Any:
        """Logits [b, s, V] of this rank, the stage's tensor, or a loss [b, s] where `labels` are given.

        Args:
            input_ids: [B, S], on every stage.
            position_ids: [3, B, S]; counted from the ids and grids unless given.
            attention_mask: [B, S] of 0 and 1: padding in any place with `packed_seq_params`, else at the end of rows.
                None: there is no padding.
            labels, loss_mask: as the language model takes them, [b, s].
            packed_seq_params: run these rows packed, each padded as they say; whole sequences even over context
                parallelism. None: run the rows.
            pixel_values: [patches, values] of all images, in the order of the rows.
            image_grid_thw: [images, 3] patches of each along time, height and width.
            pixel_values_videos, video_grid_thw: the same of videos.
            second_per_grid_ts: [videos] seconds between frames; 1 unless given.
        """
        if input_ids.ndim != 2:
            raise InvalidInputError(f"input_ids: got shape {tuple(input_ids.shape)}, expected [B, S]")
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if mask.shape != input_ids.shape:
            raise InvalidInputError(
                f"attention_mask: got shape {tuple(mask.shape)}, expected that of input_ids, {tuple(input_ids.shape)}"
            )
        run = self._arranged(mask, packed_seq_params)
        if position_ids is None:
            position_ids = axes_positions(
                self.hf_config, input_ids, mask, image_grid_thw, video_grid_thw, second_per_grid_ts
            )
        whole = replace(run, ranks=replace(run.ranks, cp=1))  # of every context-parallel rank
        ids = whole.pack(input_ids)
        embedded = None
        if self.pre_process:
            embedded = self._embedded(
                ids, {"image": (pixel_values, image_grid_thw), "video": (pixel_values_videos, video_grid_thw)}
            )
            embedded = run.part(embedded)
            if self.config.sequence_parallel:
                group = self.language_model.pg_collection.tp
                embedded = scatter_to_sequence_parallel_region(embedded, group=group)
        told = {} if loss_mask is None else {"loss_mask": loss_mask}
        return self.language_model(
            input_ids=run.part(ids.t()).t(),
            position_ids=whole.pack(position_ids.permute(1, 2, 0)).permute(2, 0, 1),
            attention_mask=None,  # a causal one: padding comes last
            decoder_input=embedded,
            labels=labels,
            packed_seq_params=packed_seq_params,
            **told,
        )

    def _arranged(self, mask: Tensor, packed_seq_params: Any) -> Arrangement:
        """How the rows' tokens stand in what the language model runs."""
        batch = as_rows(mask)
        ranks = Ranks.of(self.language_model)
        if packed_seq_params is not None:
            return arranged_as(packed_seq_params, batch, mask.shape[0], None, ranks)
        rows = arrange(batch, "bshd", ranks, sequence_parallel=False)  # which has no context parallelism
        rows = replace(rows, batch=lengthened(batch, [mask.shape[1]] * mask.shape[0]))
        if not torch.equal(rows.pack(mask), mask):
            raise InvalidInputError("attention_mask: rows that are not packed must have their padding at the end")
        return rows

    def _embedded(self, ids: Tensor, media: Mapping[str, tuple[Tensor | None, Tensor | None]]) -> Tensor:
        """[s, b, D] of ids [b, s], the features of images and videos in the places of their tokens."""
        embedded: Tensor = self.language_model.embedding(input_ids=ids, position_ids=None).transpose(0, 1)
        tower: Any = self.vision_model
        for kind, (pixels, grid) in media.items():
            places = ids == getattr(self.hf_config, f"{kind}_token_id")
            if (pixels is None) != (grid is None):
                raise InvalidInputError(f"{kind}s: got pixels or a grid without the other, expected both or neither")
            features = embedded.new_zeros(0, embedded.shape[-1])
            if pixels is not None:
                out = tower(pixels.to(tower.patch_embed.proj.weight.dtype), grid_thw=grid)
                features = getattr(out, "pooler_output", out)  # a tensor before transformers 5
            if int(places.sum()) != len(features):
                raise InvalidInputError(
                    f"input_ids: hold {int(places.sum())} tokens of {kind}s, expected {len(features)}, as many as the "
                    f"{kind}s have features"
                )
            if len(features):
                embedded = embedded.masked_scatter(places[..., None], features.to(embedded.dtype))
        if all(pixels is None for pixels, _ in media.values()) and torch.is_grad_enabled():
            # Megatron's DDP waits for a gradient of every parameter, also in a step without any image.
            nothing = sum(p.flatten()[:0].sum(dtype=embedded.dtype) for p in tower.parameters() if p.requires_grad)
            embedded = embedded + nothing
        return embedded.transpose(0, 1).contiguous()


def build_qwen2_5_vl(
    source: Any, *, load: bool = True, dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> Qwen2_5_VL:
    """This rank's part of a Qwen2.5-VL, built and loaded.

    Call it on every rank, once `parallel_state` is initialized.

    Args:
        source: a folder with a checkpoint of transformers, or one of its models.
        load: False leaves the weights as they were drawn, different ones on each rank.
        dtype: of the parameters.
        settings: of TransformerConfig; see `qwen2_5_vl_config`.
    """
    if isinstance(source, (str, Path)):
        from transformers import AutoConfig

        hf_config: Any = AutoConfig.from_pretrained(source)
    else:
        hf_config = source.config
    low = {} if dtype == torch.float32 else {"bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16}
    typed = {"params_dtype": dtype, "pipeline_dtype": dtype, **low}
    model = Qwen2_5_VL(qwen2_5_vl_config(hf_config, **{**typed, **settings}), hf_config)
    if load:
        from logitless_mcore.weights import load_hf_weights

        load_hf_weights(model, source)
    return model
