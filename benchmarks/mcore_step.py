"""Forward and backward of a Megatron-Core model by fused scores, against its logits path: values, time, peak memory.

    python benchmarks/mcore_step.py [--shape 1B] [--sequences 16 --length 2048] [--output results/NAME.json]

A GPTModel of random weights in Llama 3.2 1B's shape, bf16, one process, packed sequences of mixed lengths (THD) through
`layer_spec`'s attention. First the gate: fused log-probs against fp32 logits of the same hidden states, and gradients
against the logits path's. Then medians over rounds in which every candidate runs once. Needs megatron-core and a GPU;
on CUDA, logitless-triton.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
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

import logitless
from logitless import PackedBatch
from logitless_mcore import gptmodel_forward_no_padding, layer_spec, make_forward
from logitless_mcore.capture import run_scored
from logitless_mcore.spec import keep_rotary_on_device

SHAPES = {  # layers, hidden, ffn, heads, key heads, vocabulary
    "tiny": (2, 64, 128, 4, 2, 512),
    "1B": (16, 2048, 8192, 32, 8, 128256),
}
TEMPERATURE = 0.8
DISTS = ("logitless", "logitless-torch", "logitless-triton", "logitless-mcore", "megatron-core", "torch", "triton")
SAMPLED = 256  # tokens of the gate's fp32 logits


def build(shape: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    layers, hidden, ffn, heads, groups, vocab = SHAPES[shape]
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        ffn_hidden_size=ffn,
        **PLAIN,
        use_cpu_initialization=device.type == "cpu",
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config),
        vocab_size=vocab,
        max_sequence_length=1 << 16,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
        parallel_output=True,
    )
    gpt = keep_rotary_on_device(gpt.to(device, dtype))
    with torch.no_grad():
        gpt.embedding.word_embeddings.weight.mul_(4.0)  # logits that are not all alike
    return gpt


def sequences(args: argparse.Namespace, vocab: int, device: torch.device) -> list[Tensor]:
    """Lengths from a quarter of the longest to all of it."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(args.length / 4, args.length, args.sequences).int().tolist()
    return [torch.randint(0, vocab, (n,), generator=generator).to(device) for n in lengths]


def by_logits(logits: Tensor, label: Tensor) -> dict[str, Tensor]:
    """Log-probs and entropy of fp32 logits, both differentiable."""
    log_p = (logits.float() / TEMPERATURE).log_softmax(-1)
    return {"log_probs": log_p.gather(-1, label[..., None])[..., 0], "entropy": -(log_p.exp() * log_p).sum(-1)}


def by_cross_entropy(logits: Tensor, label: Tensor) -> dict[str, Tensor]:
    """Log-probs alone, by Megatron's vocabulary-parallel cross-entropy."""
    scaled = (logits.float() / TEMPERATURE).transpose(0, 1).contiguous()
    loss = tensor_parallel.vocab_parallel_cross_entropy(scaled, label.t().contiguous())
    return {"log_probs": -loss.t()}


def candidates(gpt: Any, batch: PackedBatch, nested: Tensor, g: Tensor, e: Tensor) -> dict[str, Callable[[], Any]]:
    """Each runs a forward and a backward, and returns its log_probs [T]."""
    forward = make_forward(gpt, "thd")
    everything = 3 * batch.input_ids.numel() * gpt.vocab_size
    inputs = {"temperature": TEMPERATURE}

    def done(log_probs: Tensor, entropy: Tensor | None) -> Tensor:
        loss = (g * log_probs).sum() + (0.0 if entropy is None else (e * entropy).sum())
        loss.backward()
        return log_probs.detach()

    def logits(processor: Callable[..., Any]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            out = gptmodel_forward_no_padding(gpt, nested, {}, processor, {"label": nested})
            entropy = out["entropy"].values() if "entropy" in out else None
            return done(out["log_probs"].values(), entropy)

        return run

    def fused(**asked: Any) -> Callable[[], Tensor]:
        def run() -> Tensor:
            out = forward(batch, **inputs, **asked)
            return done(out.log_probs, out.entropy)

        return run

    def loss_fn(scores: Any, index: Tensor) -> Tensor:
        return g[index] * scores.log_probs + e[index] * scores.entropy

    def single_pass() -> Tensor:
        out = forward(batch, **inputs, loss_fn=loss_fn)
        out.loss.backward()
        return out.log_probs

    def trunk() -> None:
        ids, positions = batch.input_ids[None], batch.position_ids[None]
        params = {"packed_seq_params": packed(batch)}
        call = {"input_ids": ids, "position_ids": positions, "attention_mask": None, **params}
        run_scored(gpt, call, lambda hidden, layer, weight: hidden.float().square().mean()).backward()

    return {
        "trunk alone": trunk,
        "logits": logits(by_logits),
        "logits, no entropy": logits(by_cross_entropy),
        "fused": fused(),
        "fused, no entropy": fused(entropy=False),
        "fused, all kept": fused(keep_bytes=everything),
        "fused, single pass": single_pass,
    }


def packed(batch: PackedBatch) -> Any:
    from logitless_mcore.arrangement import Arrangement, Ranks

    return Arrangement(batch, "thd", Ranks()).params


def gate(gpt: Any, shape: str, batch: PackedBatch, runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Errors of the fused path; stops here where it does not hold."""
    names = ("embedding.word_embeddings.weight", "decoder.layers.0.self_attention.linear_qkv.weight")
    kept: dict[str, tuple[Tensor, list[Tensor]]] = {}
    for name in ("logits", "fused", "fused, single pass"):
        gpt.zero_grad()
        log_probs = runs[name]()
        grads = dict(gpt.named_parameters())
        kept[name] = log_probs, [grads[one].grad.clone() for one in names]
    hidden: list[Tensor] = []
    call = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None], "attention_mask": None}
    with torch.no_grad():
        run_scored(gpt, {**call, "packed_seq_params": packed(batch)}, lambda h, layer, weight: hidden.append(h))
        live = (batch.labels != -100).nonzero()[:, 0]
        some = live[torch.linspace(0, len(live) - 1, min(SAMPLED, len(live))).long()]
        weight = gpt.embedding.word_embeddings.weight.double()
        log_p = (hidden[0][some, 0].double() @ weight.t() / TEMPERATURE).log_softmax(-1)
        truth = log_p.gather(-1, batch.labels[some, None])[:, 0]
    found = {
        f"log_probs, {name}, against fp64 of the same hidden states": float((x[some] - truth).abs().max())
        for name, (x, _) in kept.items()
    }
    with torch.no_grad():
        padded = make_forward(gpt, "bshd")(batch, temperature=TEMPERATURE).log_probs
        wide = build(shape, batch.input_ids.device, torch.float32)
        wide.load_state_dict(gpt.state_dict())
        exact = make_forward(wide, "thd")(batch, temperature=TEMPERATURE).log_probs
        del wide
    # Two attention kernels, each rounding to bf16 in all layers: packed rows may not be the worse for it.
    packed_off, padded_off = ((x - exact)[live].abs().mean() for x in (kept["fused"][0], padded))
    found["log_probs, padded rows against an fp32 model, mean"] = float(padded_off)
    found["log_probs, packed rows against an fp32 model, mean"] = float(packed_off)
    for one, a, b in zip(names, kept["fused"][1], kept["logits"][1], strict=True):
        found[f"gradient of {one}, fused against logits"] = float((a - b).float().norm() / b.float().norm())
    if not torch.equal(kept["fused"][0], kept["fused, single pass"][0]):
        raise SystemExit("the single pass has other log_probs; not timed")
    for key, value in found.items():
        bound = 1e-3 if "fp64" in key and "fused" in key else 0.5 if "fp64" in key else 0.05
        if "fp32" in key:
            bound = 1.25 * float(padded_off)
        if not value <= bound:
            raise SystemExit(f"{key}: {value}, expected at most {bound}; not timed")
    return found


def measure(gpt: Any, runs: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, int] = {}
    failed: dict[str, str] = {}
    for one in range(1 + rounds):  # the first warms up
        for name, run in runs.items():
            if name in failed:
                continue
            gpt.zero_grad()
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            before, start = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
            try:
                run()
            except torch.OutOfMemoryError as error:
                failed[name] = f"out of memory: {str(error).splitlines()[0]}"
                continue
            if cuda:
                torch.cuda.synchronize()
            if one:
                seconds[name].append(time.perf_counter() - start)
                peaks[name] = (torch.cuda.max_memory_allocated() if cuda else 0) - before
    return {
        name: {"not_run": failed[name]}
        if name in failed
        else {"median_seconds": statistics.median(taken), "seconds": taken, "peak_bytes": peaks[name] or None}
        for name, taken in seconds.items()
    }


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in DISTS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def run_benchmark(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """With Megatron's parallel state of one process."""
    gpt = build(args.shape, device)
    ids = sequences(args, gpt.vocab_size, device)
    batch = PackedBatch.from_sequences(ids, device=device)
    nested = torch.nested.nested_tensor(ids, layout=torch.jagged)
    generator = torch.Generator().manual_seed(1)
    g, e = (torch.randn(2, len(batch.labels), generator=generator) / len(batch.labels)).to(device)
    live = batch.labels != -100
    runs = candidates(gpt, batch, nested, g * live, 0.1 * e * live)
    errors = gate(gpt, args.shape, batch, runs)
    chosen = {name: run for name, run in runs.items() if not args.runs or name in args.runs}
    card = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    return {
        "date": date.today().isoformat(),
        "device": {"type": device.type, "name": card},
        "backends": [f"{item.name} {item.version}" for item in logitless.backends() if item.ok],
        "versions": versions(),
        "model": dict(zip(("layers", "hidden", "ffn", "heads", "key_heads", "vocab"), SHAPES[args.shape], strict=True)),
        "parameters": sum(parameter.numel() for parameter in gpt.parameters()),
        "tokens": len(batch.labels),
        "sequences": len(ids),
        "rounds": args.rounds,
        "errors": errors,
        "runs": measure(gpt, chosen, args.rounds, device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1B")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048, help="tokens of the longest")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--runs", nargs="+", help="only these candidates")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("Megatron-Core asks for a GPU, and there is none")
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        record = run_benchmark(args, torch.device("cuda", torch.cuda.current_device()))
        dist.destroy_process_group()
    report(record)
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


def report(record: dict[str, Any]) -> None:
    print(
        f"{record['device']['name']}, {record['parameters'] / 1e9:.2f} B parameters, {record['tokens']} tokens in "
        f"{record['sequences']} sequences, medians of {record['rounds']}"
    )
    for name, error in record["errors"].items():
        print(f"  {name}: {error:.3g}")
    for name, run in record["runs"].items():
        peak = f"{run['peak_bytes'] / 2**30:8.2f} GiB" if run.get("peak_bytes") else ""
        print(f"  {name:22s}", run["not_run"] if "not_run" in run else f"{run['median_seconds']:8.4f} s{peak}")


if __name__ == "__main__":
    main()
