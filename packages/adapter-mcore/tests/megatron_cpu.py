"""Megatron-Core on the CPU: CUDA look-ups that resolve to the CPU, groups over gloo, tiny models of each family.

Only tests do this; the package patches nothing. A module that imports this one is skipped where Megatron is absent.
`run_ranks(2, function)` with a function that enters `parallel(tp=2)` is how a model runs here, on one rank too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Transformer Engine, Apex and absl are not installed
    pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

pytest.importorskip("transformers")
from transformers import AutoConfig, AutoModelForCausalLM

from logitless import PackedBatch
from logitless.testing.distributed import RANKS, run_ranks
from logitless_mcore.layouts import Copy
from logitless_mcore.spec import keep_rotary_on_device, layer_spec
from logitless_mcore.weights import _gathered, _targets

__all__ = [
    "FAMILIES",
    "alone",
    "build_gpt",
    "cuda_as_cpu",
    "gpt_config",
    "hf_config",
    "hf_gradients",
    "hf_model",
    "packed",
    "parallel",
    "run_model",
]

VOCAB = 128
FAMILIES = {
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "llama": {},
    "mistral": {},
}
LAZY = ["megatron.core.models.gpt.gpt_layer_specs", *(f"transformers.models.{x}.modeling_{x}" for x in FAMILIES)]
for _name in LAZY:  # here once: each process that `run_ranks` forks would import them again
    importlib.import_module(_name)

# --- CUDA look-ups ------------------------------------------------------------------------------------------------


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.pin_memory:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **kwargs)


class _Nothing:
    """A stream or event on which nothing happens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Nothing()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *exc: Any) -> None: ...


def _splits(x: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Sizes for an all-to-all as Megatron brings them from a GPU: gloo takes no tensor for them."""
    return x.numpy() if as_numpy and isinstance(x, Tensor) else x


@contextlib.contextmanager
def cuda_as_cpu() -> Iterator[None]:
    """Within the block, what asks for a CUDA device gets the CPU, and streams, events and CUDA's RNG are no-ops.

    With `run_ranks` on GPUs nothing is replaced, and this rank's GPU is the current one, as Megatron wants it.
    """
    if os.environ.get(RANKS) == "nccl":
        torch.cuda.set_device(dist.get_rank())
        yield
        return
    replaced = {
        "is_available": lambda: False,
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *args, **kwargs: None,
        "Stream": _Nothing,
        "Event": _Nothing,
        "current_stream": _Nothing,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state().clone(),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "is_current_stream_capturing": lambda: False,
    }
    eager: Any = torch.compiler.set_stance("force_eager")  # a compiler would take longer than all that it speeds up
    with pytest.MonkeyPatch.context() as patch, _CudaToCpu(), eager:
        for name, stand_in in replaced.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.cuda.random, "get_rng_state", replaced["get_rng_state"])
        # A mode is off within backward, where Megatron calls this too.
        patch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        patch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", _splits)
        # 0.16's router looks for it, and fails without Transformer Engine.
        if not hasattr(moe_utils, "te_general_gemm"):
            patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        yield


# --- process groups -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def parallel(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, seed: int = 1234) -> Iterator[None]:
    """Megatron's parallel state over the ranks of `run_ranks`, with `cuda_as_cpu`.

    One rank is a process of its own too, `run_ranks(1, function)`: after gloo ran in this one, a fork of it hangs.
    """
    with cuda_as_cpu():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
        )
        # The inference tracker forks no CUDA RNG state.
        tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True, force_reset_rng=True)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


# --- models -------------------------------------------------------------------------------------------------------


def scheduled(model: Any, forward_step: Callable[..., Any], data: Any = None, micro_batches: int = 1) -> None:
    """Forward and backward by Megatron's own schedule, across pipeline stages where there are any."""
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=data,
        model=[model],
        num_microbatches=micro_batches,
        seq_length=32,
        micro_batch_size=1,
        forward_only=False,
    )


def hf_config(family: str = "qwen2", tied: bool = False, **changes: Any) -> Any:
    """Two layers, grouped queries, and no default value where a missed setting should show."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "tie_word_embeddings": tied,
        "head_dim": 16 if family == "qwen2" else 32,
    }
    if family == "mistral":
        shape["sliding_window"] = None
    return AutoConfig.for_model(family, **{**shape, **changes})


def hf_model(family: str = "qwen2", tied: bool = False, seed: int = 0, **changes: Any) -> Any:
    """The Hugging Face model in eval mode, fp32, every parameter perturbed; the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            hf_config(family, tied, **changes), attn_implementation="sdpa", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def _of_family(hf: Any) -> dict[str, Any]:
    if hf.model_type != "qwen3_moe":
        return FAMILIES[hf.model_type]
    return {
        "qk_layernorm": True,
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
    }


def gpt_config(hf: Any, **changes: Any) -> TransformerConfig:
    """Megatron's configuration for such a model, with the sizes of the parallel state."""
    settings = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        "ffn_hidden_size": hf.intermediate_size,
        "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        **_of_family(hf),
    }
    return TransformerConfig(**{**settings, **changes})


def rope_theta(hf: Any) -> float:
    """Its place moved in transformers 5."""
    return float((getattr(hf, "rope_parameters", None) or {}).get("rope_theta") or hf.rope_theta)


def build_gpt(
    hf: Any, *, vocab_size: int | None = None, spec: Any = None, model: dict[str, Any] | None = None, **changes: Any
) -> GPTModel:
    """This rank's part of a GPTModel of `hf`'s shape, with weights of its own; load others with `load_hf_weights`.

    Args:
        hf: a configuration, as `hf_config` makes it.
        vocab_size: of the padded head; the configuration's unless given.
        spec: the layers'; `layer_spec`'s unless given.
        model: keywords of GPTModel that differ.
        changes: settings of TransformerConfig that differ, such as `sequence_parallel=True`.
    """
    config = gpt_config(hf, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gpt = GPTModel(
            **{
                "config": config,
                "transformer_layer_spec": spec or layer_spec(config),
                "vocab_size": vocab_size or hf.vocab_size,
                "max_sequence_length": hf.max_position_embeddings,
                "pre_process": parallel_state.is_pipeline_first_stage(),
                "post_process": parallel_state.is_pipeline_last_stage(),
                "share_embeddings_and_output_weights": hf.tie_word_embeddings,
                "position_embedding_type": "rope",
                "rotary_base": rope_theta(hf),
                "parallel_output": True,
                **(model or {}),
            }
        )
    return keep_rotary_on_device(gpt)


# --- runs ---------------------------------------------------------------------------------------------------------


def packed(sequences: Sequence[Tensor], align: int = 1) -> dict[str, Any]:
    """Keywords of a model's forward for these sequences [L] in one row, each padded to a multiple of `align`."""
    batch = PackedBatch.from_sequences(sequences, align=align)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        cu_seqlens_q_padded=batch.cu_seqlens_padded,
        cu_seqlens_kv_padded=batch.cu_seqlens_padded,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
    )
    cp = parallel_state.get_context_parallel_world_size()
    if cp > 1:
        batch = batch.shard(parallel_state.get_context_parallel_rank(), cp)
    return {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "attention_mask": None,
        "packed_seq_params": params,
    }


def run_model(gpt: Any, upstream: Tensor | None = None, **inputs: Any) -> Tensor | None:
    """Logits [B, S, V] of the last pipeline stage, whole; None on others. Stages hand on what they must by hand.

    Args:
        gpt: of `build_gpt`.
        upstream: [B, S, V] gradient of the logits, to go back with; without it, gradients are off.
        inputs: of the forward.
    """
    groups, rows = gpt.pg_collection, inputs["input_ids"]
    stage, last = groups.pp.rank(), groups.pp.size() - 1
    before, after = (dist.get_global_rank(groups.pp, i) for i in (max(stage - 1, 0), min(stage + 1, last)))
    received = None
    with torch.set_grad_enabled(upstream is not None):
        if stage > 0:
            width = rows.shape[1] // (groups.tp.size() if gpt.config.sequence_parallel else 1)
            received = torch.empty(width, rows.shape[0], gpt.config.hidden_size)
            dist.recv(received, before)
            gpt.set_input_tensor(received.requires_grad_())
        out = gpt(**inputs)
    if stage < last:
        dist.send(out.detach().contiguous(), after)
        gradient = torch.empty_like(out)
        if upstream is not None:
            dist.recv(gradient, after)
    elif upstream is not None:
        gradient = upstream.chunk(groups.tp.size(), -1)[groups.tp.rank()]
    if upstream is not None:
        out.backward(gradient)
        if received is not None:
            dist.send(received.grad, before)
    if stage < last:
        return None
    parts = [torch.empty_like(out) for _ in range(groups.tp.size())]
    dist.all_gather(parts, out.detach().contiguous(), group=groups.tp)
    return torch.cat(parts, -1)


def hf_gradients(gpt: Any) -> dict[str, Tensor]:
    """This stage's gradients under Hugging Face names, whole: summed and joined over TP and CP, on every rank."""
    found: dict[str, Tensor] = {}
    for target in _targets(gpt):
        gradient = target.parameter.grad.clone()
        dist.all_reduce(gradient, group=gpt.pg_collection.cp)
        # What every rank holds sees part of the tokens under sequence parallelism, and part of the heads in a norm of
        # queries or keys; Megatron sums both when it finishes the gradients.
        if isinstance(target.layout, Copy) and (gpt.config.sequence_parallel or "_norm.weight" in target.names[0]):
            dist.all_reduce(gradient, group=gpt.pg_collection.tp)
        shards = _gathered(replace(target, parameter=gradient), gpt)
        for name, part in zip(target.names, target.layout.merge(shards, gpt), strict=True):
            found[name] = found[name] + part if name in found else part
    return found


def alone(function: Callable[[], Any]) -> Any:
    """What it returns, on one rank of Megatron's, in a process of its own."""

    def rank_0(rank: int, size: int) -> Any:
        with parallel():
            return function()

    return run_ranks(1, rank_0)[0]
