"""Layer specs for models that take packed sequences, with or without Transformer Engine."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from logitless.errors import BrokenPluginError, NotFoundError, UnsupportedError
from logitless_mcore.attention import PackedAttention

__all__ = [
    "LayerNorm",
    "RMSNorm",
    "keep_rotary_on_device",
    "layer_spec",
    "prediction_spec",
    "require_megatron",
    "transformer_engine",
]


# --- what is installed --------------------------------------------------------------------------------------------


def require_megatron() -> str:
    """Import Megatron-Core and return its version.

    Raises:
        NotFoundError: it is not installed.
        BrokenPluginError: it cannot be imported, for instance because Transformer Engine is half installed.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise NotFoundError(
            "megatron-core is not installed: pip install 'logitless-mcore[mcore]', or 'megatron-core==0.16.1' on "
            "Python 3.10 and 3.11"
        )
    try:
        return str(importlib.import_module("megatron.core").__version__)
    except (ImportError, OSError) as error:  # Transformer Engine without its library raises FileNotFoundError
        reason = transformer_engine()
        why = f"Transformer Engine is {reason}" if reason and not reason.startswith("not") else str(error)
        raise BrokenPluginError(f"megatron-core is installed but cannot be imported: {why}") from error


def transformer_engine() -> str | None:
    """None where Transformer Engine is whole, else why it is not used: not installed, or installed by half."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        return (
            f"half installed ({type(error).__name__}: {error}); install its torch extension with "
            "`pip install --no-build-isolation 'transformer_engine[pytorch]'`, or remove it with "
            "`pip uninstall transformer_engine transformer_engine_torch transformer_engine_cu12`"
        )
    return None


# --- the spec -----------------------------------------------------------------------------------------------------


def layer_spec(
    config: Any, *, use_transformer_engine: bool | None = None, vp_stage: int | None = None, pp_rank: int | None = None
) -> Any:
    """A `transformer_layer_spec` for GPTModel whose attention takes packed sequences: this pipeline stage's layers.

    Args:
        config: the model's TransformerConfig.
        use_transformer_engine: None takes it where it is whole and there is a GPU; True raises where it is not.
        vp_stage, pp_rank: as in Megatron's `get_gpt_decoder_block_spec`.

    Returns:
        Megatron's TransformerBlockSubmodules.

    Raises:
        NotFoundError, BrokenPluginError: see `require_megatron`.
        UnsupportedError: Transformer Engine was asked for and is not whole, or the configuration asks for a norm that
            torch has not.
    """
    require_megatron()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    whole = _whole(use_transformer_engine)
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=whole,
        normalization=config.normalization,
        vp_stage=vp_stage,
        pp_rank=pp_rank,
    )
    if whole:
        return spec
    norm = _norm(config)
    spec.layer_norm = norm
    for layer in {id(layer): layer for layer in spec.layer_specs}.values():
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = norm
        attention = parts.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm and hasattr(attention, "k_layernorm"):
            attention.q_layernorm = attention.k_layernorm = norm
    return spec


def prediction_spec(
    config: Any, spec: Any, *, use_transformer_engine: bool | None = None, vp_stage: int | None = None
) -> Any:
    """GPTModel's `mtp_block_spec` for `config.mtp_num_layers` further heads, of layers like the last of `layer_spec`'s.

    Args:
        config: as for `layer_spec`, as are `use_transformer_engine` and `vp_stage`.
        spec: what `layer_spec` gave.

    Returns:
        Megatron's MultiTokenPredictionBlockSubmodules, or None on a pipeline stage that has none of these layers.
    """
    require_megatron()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    whole = _whole(use_transformer_engine)
    found = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=whole, vp_stage=vp_stage)
    if found is not None and not whole:
        for layer in found.layer_specs:
            parts = layer.submodules
            parts.enorm = parts.hnorm = parts.layer_norm = _norm(config)
    return found


def _whole(use_transformer_engine: bool | None) -> bool:
    """Whether Transformer Engine is to be used."""
    missing = transformer_engine()
    if missing and use_transformer_engine:
        raise UnsupportedError(f"use_transformer_engine: Transformer Engine is {missing}")
    if use_transformer_engine is None:
        return missing is None and torch.cuda.is_available()
    return use_transformer_engine


# --- norms --------------------------------------------------------------------------------------------------------
# Megatron's own torch norm refuses sequence parallelism, for which its parameters need only be marked: their gradients
# are then summed over the tensor-parallel ranks.


def _mark(module: nn.Module, config: Any) -> None:
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class RMSNorm(nn.RMSNorm):
    """torch's, built as a layer spec builds its norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self, config)


class LayerNorm(nn.LayerNorm):
    """torch's, built as a layer spec builds its norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self, config)


def _norm(config: Any) -> type[nn.Module]:
    if config.layernorm_zero_centered_gamma:
        raise UnsupportedError("layernorm_zero_centered_gamma: only Transformer Engine's norms have it")
    norms: dict[str, type[nn.Module]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
    if config.normalization not in norms:
        raise UnsupportedError(f"normalization: got {config.normalization!r}, expected 'RMSNorm' or 'LayerNorm'")
    return norms[config.normalization]


# --- rotary embedding ---------------------------------------------------------------------------------------------


class _DeviceRotary(nn.Module):
    """Megatron's rotary embedding, on the model's device: its own moves to the current GPU, whatever the model's."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "own", own)  # no child: it has no parameters, and `_apply` below sees to the rest

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "own"), name)

    def _apply(self, fn: Any, recurse: bool = True) -> _DeviceRotary:
        # The device alone: rounded to bf16, frequencies are off by whole turns at long range.
        self.own.inv_freq = self.own.inv_freq.to(fn(self.own.inv_freq).device)
        return self

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """[S, 1, 1, 2 · frequencies], of this context-parallel rank's positions unless packed."""
        freqs = self.own.get_freqs_non_repeated(max_seq_len, offset)
        twice = freqs.repeat_interleave(2, -1) if self.own.rotary_interleaved else torch.cat((freqs, freqs), -1)
        group = self.own.cp_group if cp_group is None else cp_group
        if group is not None and group.size() > 1 and not packed_seq:
            chunks = twice.chunk(2 * group.size())
            twice = torch.cat((chunks[group.rank()], chunks[2 * group.size() - 1 - group.rank()]))
        return twice[:, None, None, :]


def keep_rotary_on_device(model: Any) -> Any:
    """Let a GPTModel's rotary embedding follow the model's device instead of going to the current GPU; returns it.

    Only Megatron's plain rotary embedding is replaced; others are left alone.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    own: Any = getattr(model, "rotary_pos_emb", None)
    if type(own) is RotaryEmbedding:
        model.rotary_pos_emb = _DeviceRotary(own)
        device = next(model.parameters()).device
        own.inv_freq = own.inv_freq.to(device)
    return model
