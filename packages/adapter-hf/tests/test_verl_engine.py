"""verl's own FSDP engine on the CPU: scores, gradients and the optimizer's step are those of its full-logits path.

Skipped where verl is not installed; `nox -s verl` installs it. The device is brought by verl's own platform plugin, and
attention is `sdpa`: flash-attn needs a GPU.
"""

from __future__ import annotations

import os
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from logitless.testing.distributed import run_ranks
from logitless_hf import verl as plugin
from logitless_hf.binding import binding_of

os.environ.setdefault("VERL_PLATFORM", "nvidia")  # else verl looks for a device, and warns that there is none
pytest.importorskip("verl", reason="verl is not installed", exc_type=ImportError)
import verl.plugin.platform.platform_manager as platforms
from verl.models.transformers import monkey_patch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

VOCAB = 101
LENGTHS = [(3, 5), (4, 2), (2, 7), (5, 1)]  # of prompts and responses
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


class NoDevice:
    """What `torch.cuda` is elsewhere."""

    def mem_get_info(self, *args: Any) -> tuple[int, int]:
        return 1, 1

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0


class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    device_name = "cpu"

    @property
    def device_module(self) -> Any:
        return NoDevice()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "_current_platform", PlatformCPU())
    monkeypatch.setattr(monkey_patch, "is_trl_available", lambda: False)  # verl 0.9.1 breaks on TRL 1.16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,  # so that all ranks but the first hold it on the meta device when it is patched
        architectures=["Qwen2ForCausalLM"],
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("qwen2")
    model.save_pretrained(path)
    return path


def engine(path: Path, fused: bool, rmpad: bool, **changes: Any) -> Any:
    model = HFModelConfig(
        path=str(path),
        load_tokenizer=False,
        override_config={"attn_implementation": "sdpa"},
        use_remove_padding=rmpad,
        use_fused_kernels=fused,
        fused_kernel_options={"impl_backend": "torch"},
        **changes,
    )
    settings = FSDPEngineConfig(strategy="fsdp2", mixed_precision=FP32, use_torch_compile=False)
    optimizer = FSDPOptimizerConfig(lr=1e-3, clip_grad=1e9, total_training_steps=2)
    torch.manual_seed(1)  # of LoRA
    built = FSDPEngineWithLMHead(model, settings, optimizer, CheckpointConfig())
    built.initialize()
    return built


def nested(tensors: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def batch(fused: bool, rmpad: bool, rank: int) -> Any:
    """As verl's trainer sends it to its workers."""
    generator = torch.Generator().manual_seed(3 + rank)
    prompts, responses = (
        [torch.randint(3, VOCAB, (pair[i],), generator=generator) for pair in LENGTHS] for i in range(2)
    )
    masks = [torch.ones_like(response) for response in responses]
    tensors = {
        "input_ids": nested([torch.cat(pair) for pair in zip(prompts, responses, strict=True)]),
        "position_ids": nested([torch.arange(sum(pair)) for pair in LENGTHS]),
        "prompts": nested(prompts),
        "responses": nested(responses),
        "loss_mask": nested(masks),
        "response_mask": nested(masks),
        "old_log_probs": nested([torch.randn(len(mask), generator=generator) / 10 - 4 for mask in masks]),
        "advantages": nested([torch.randn(len(mask), generator=generator) for mask in masks]),
    }
    settings = {
        "temperature": 0.7,
        "use_remove_padding": rmpad,
        "use_fused_kernels": fused,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "calculate_entropy": True,
        "global_batch_size": len(LENGTHS),
        "pad_token_id": 0,
    }
    return tu.get_tensordict(tensors, settings)


def run_engine(built: Any, fused: bool, rmpad: bool, rank: int) -> dict[str, Tensor]:
    """`compute_log_prob` and `update_actor`: scores that a policy loss reads, gradients and weights after the step."""
    with built.eval_mode():
        output = built.infer_batch(batch(fused, rmpad, rank))["model_output"]
    found = {name: torch.cat([x[:-1] for x in output[name].unbind()]) for name in ("log_probs", "entropy")}
    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.01)
    step = built.optimizer_step

    def kept() -> float:
        for name, parameter in built.module.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad.full_tensor().clone()
        norm: float = step()
        return norm

    built.optimizer_step = kept
    with built.train_mode():
        built.train_batch(batch(fused, rmpad, rank), loss_function=partial(ppo_loss, actor))
    return found


def compare(rank: int, size: int, path: Path, rmpad: bool, changes: dict[str, Any]) -> dict[str, float]:
    """Largest difference between fused and full logits; of gradients, relative to the largest entry."""
    stock = run_engine(engine(path, False, rmpad, **changes), False, rmpad, rank)
    built = engine(path, True, rmpad, **changes)
    model = built.module.get_base_model() if changes else built.module
    assert binding_of(model) is not None
    ours = run_engine(built, True, rmpad, rank)
    assert stock.keys() == ours.keys()
    assert any(name.startswith("gradient") for name in stock)
    scale = {name: float(x.abs().max()) if name.startswith("gradient") else 1.0 for name, x in stock.items()}
    return {name: float((stock[name] - ours[name]).abs().max()) / (scale[name] or 1.0) for name in stock}


def test_verl_finds_the_plugin() -> None:
    assert "logitless_hf" in {entry.name for entry in entry_points(group="verl.plugins")}
    assert plugin.state() == "registered"
    assert monkey_patch.patch_forward_with_backends.__wrapped__.__module__ == plugin.MODULE


@pytest.mark.parametrize("rmpad", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "lora"])
def test_the_actor_gives_what_full_logits_give(checkpoint: Path, rmpad: bool, changes: dict[str, Any]) -> None:
    (errors,) = run_ranks(1, compare, checkpoint, rmpad, changes, seconds=120)
    assert max(errors.values()) < 2e-5, max(errors.items(), key=lambda item: item[1])


def test_two_ranks_of_which_one_starts_without_weights(checkpoint: Path) -> None:
    for errors in run_ranks(2, compare, checkpoint, True, {}, seconds=120):
        assert max(errors.values()) < 2e-5, max(errors.items(), key=lambda item: item[1])
