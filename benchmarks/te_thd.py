"""Transformer Engine's layers against ours over packed sequences: scores and every gradient of the same weights.

    python benchmarks/te_thd.py [--shape small] [--sequences 12 --length 512] [--output results/NAME.json]

Two GPTModels in bf16, one of Transformer Engine's spec and one of `layer_spec`'s own, score the same packed batch (THD)
through `make_forward`. Both are compared with ours in fp32 of the same weights: Transformer Engine holds if no error of
its is more than twice ours. Needs megatron-core, Transformer Engine and a GPU; without, it says what is missing.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from plain_megatron import PLAIN
from torch import Tensor

from logitless import PackedBatch
from logitless_mcore import hf_weights, layer_spec, load_hf_weights, make_forward
from logitless_mcore.spec import keep_rotary_on_device, transformer_engine
from logitless_mcore.weights import _targets

SHAPES = {  # layers, hidden, ffn, heads, key heads, vocabulary
    "tiny": (2, 64, 128, 4, 2, 512),
    "small": (4, 1024, 2816, 16, 4, 32768),
}
TEMPERATURE = 0.8
FLOOR = 1e-3  # a relative error below which none is told from rounding
DISTS = (
    *("logitless", "logitless-torch", "logitless-triton", "logitless-mcore"),
    *("megatron-core", "transformer_engine", "torch", "triton"),
)


def missing() -> str | None:
    """None where the comparison can run, else why it cannot."""
    engine = transformer_engine()
    if engine is not None:
        return f"Transformer Engine is {engine}"
    return None if torch.cuda.is_available() else "there is no GPU"


def build(shape: str, device: torch.device, dtype: torch.dtype, engine: bool) -> Any:
    layers, hidden, ffn, heads, groups, vocab = SHAPES[shape]
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        ffn_hidden_size=ffn,
        **PLAIN,
        qk_layernorm=True,
        use_cpu_initialization=device.type == "cpu",
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config, use_transformer_engine=engine),
        vocab_size=vocab,
        max_sequence_length=1 << 14,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )
    return keep_rotary_on_device(gpt.to(device, dtype))


def scored(gpt: Any, batch: PackedBatch) -> dict[str, Tensor]:
    """Log-probs, entropies, and every gradient of random upstream ones under Hugging Face names."""
    out = make_forward(gpt, "thd")(batch, temperature=TEMPERATURE)
    generator = torch.Generator().manual_seed(1)
    g, e = torch.randn(2, out.log_probs.shape[0], generator=generator).to(out.log_probs) / len(batch.lengths)
    (g * out.log_probs + e * out.entropy).sum().backward()
    found = {"log_probs": out.log_probs.detach(), "entropy": out.entropy.detach()}
    for target in _targets(gpt):
        parts = target.layout.merge([target.parameter.grad], gpt)
        found |= {f"gradient of {name}": part for name, part in zip(target.names, parts, strict=True)}
    return found


def compared(shape: str, batch: PackedBatch, device: torch.device) -> dict[str, dict[str, float]]:
    """Relative errors of both in bf16, of each result by its name, and of one against the other."""
    torch.manual_seed(0)
    ours = build(shape, device, torch.bfloat16, engine=False)
    weights = {name: x.clone() for name, x in hf_weights(ours)}
    truth = build(shape, device, torch.float32, engine=False)
    engine = build(shape, device, torch.bfloat16, engine=True)
    for model in (truth, engine):
        load_hf_weights(model, weights)
    wanted, mine, theirs = (scored(model, batch) for model in (truth, ours, engine))

    def apart(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b.double()).norm() / b.double().norm())

    return {
        name: {
            "transformer_engine": apart(theirs[name], want),
            "ours": apart(mine[name], want),
            "between_them": apart(theirs[name], mine[name]),
        }
        for name, want in wanted.items()
    }


def state(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"date": date.today().isoformat(), "python": platform.python_version()}
    for name in DISTS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if device.type == "cuda":
        found |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def run(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)
        generator = torch.Generator().manual_seed(0)
        lengths = torch.linspace(args.length / 4, args.length, args.sequences).int().tolist()
        vocab = SHAPES[args.shape][-1]
        batch = PackedBatch.from_sequences(
            [torch.randint(0, vocab, (n,), generator=generator).to(device) for n in lengths]
        )
        errors = compared(args.shape, batch, device)
        dist.destroy_process_group()
    worse = [name for name, error in errors.items() if not error["transformer_engine"] <= max(2 * error["ours"], FLOOR)]
    return {"shape": args.shape, "lengths": lengths, "relative_errors": errors, "holds": not worse, "worse": worse}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--sequences", type=int, default=12)
    parser.add_argument("--length", type=int, default=512, help="of the longest sequence, in tokens")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = missing()
    found = {**state(device), **({"not_run": reason} if reason else run(args, device))}
    for name, value in found.items():
        print(f"{name}: {json.dumps(value)}")
    if args.output is not None and not reason:
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    if found.get("worse"):
        raise SystemExit(f"Transformer Engine is further off than ours in {', '.join(found['worse'])}")


if __name__ == "__main__":
    main()
