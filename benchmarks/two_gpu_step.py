"""One PPO-shaped step of a language model on two GPUs, beside its logits path and equal to one GPU's.

    python benchmarks/two_gpu_step.py [--ways fsdp2 tp cp] [--shape 1.5B] [--output results/NAME.json]

Qwen2's architecture with random weights; bf16 with float32 weights in the optimizer, plain SGD. `fsdp2` is the Hugging
Face model, its sequences split over the ranks; `tp` and `cp` are Megatron-Core's GPTModel with the same weights, under
tensor parallelism with sequence parallelism, and under context parallelism. Each way runs on one GPU in float32, on one
in bf16 and on two in bf16, in processes of their own. The gate: log-probs before and after the step are no further from
the float32 run's on two GPUs than 1.5 times what they are on one. `--device cpu --shape tiny --ways fsdp2` tries the
script itself over gloo. Needs transformers; for tp and cp megatron-core and a GPU; on CUDA, logitless-triton.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plain_megatron import PLAIN
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from logitless import PackedBatch, TokenLogProbs, losses
from logitless.bench.record import machine

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
}
VOCAB = {"tiny": 512, "1.5B": 151936}
WAYS = ("fsdp2", "tp", "cp")
HOWS = ("logits", "scores", "single pass")
ENTROPY_BONUS, GATE = 0.01, 1.5
TIMEOUT = datetime.timedelta(minutes=5)
RUNS = {"one GPU, float32": (1, torch.float32), "one GPU": (1, torch.bfloat16), "two GPUs": (2, torch.bfloat16)}


def hf_config(shape: str) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(vocab_size=VOCAB[shape], num_key_value_heads=2, tie_word_embeddings=False, **SHAPES[shape])


def hf_model(shape: str, device: torch.device) -> Any:
    """The same float32 weights in every process."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(hf_config(shape), attn_implementation="sdpa", dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)  # logits that are not all alike
    return model


class Rollout:
    """Recorded tokens [B, L], what the loss takes for each, and the loss; the same in every process."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        noise = torch.Generator().manual_seed(1)
        size = (args.sequences, args.length)
        self.ids = torch.randint(VOCAB[args.shape], size, generator=noise).to(device)
        self.advantages = torch.randn(args.sequences, 1, generator=noise).expand(size).to(device)
        self.weight = 1.0 / (args.sequences * (args.length - 1))

    def loss(self, scores: TokenLogProbs, old: Tensor, advantages: Tensor) -> Tensor:
        """Of each token, PPO's clipped loss and an entropy bonus; without entropies, the former alone."""
        found = losses.ppo_clip(scores.log_probs, old, advantages)
        if scores.entropy is not None:
            found = found + losses.entropy_bonus(scores.entropy, ENTROPY_BONUS)
        return self.weight * found


class Fsdp2:
    """The Hugging Face model, sharded; this rank's rows of the rollout."""

    def __init__(self, args: argparse.Namespace, rollout: Rollout, dtype: torch.dtype, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        from logitless_hf import bind

        rank, size = dist.get_rank(), dist.get_world_size()
        self.rollout, self.rows, self.size = rollout, slice(rank, None, size), size
        self.ids, self.advantages = rollout.ids[self.rows], rollout.advantages[self.rows, :-1]
        self.model = hf_model(args.shape, device)
        mesh = init_device_mesh(device.type, (size,))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        bind(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.learning_rate)

    def score(self) -> Tensor:
        """[b, L - 1] log-probs of this rank's rows, without gradients."""
        with torch.no_grad():
            return self.model(self.ids, return_log_probs=True).log_probs[:, :-1]

    def everyone(self, log_probs: Tensor) -> Tensor:
        """[B, L - 1] of all rows."""
        parts = [torch.empty_like(log_probs) for _ in range(self.size)]
        dist.all_gather(parts, log_probs.contiguous())
        return torch.stack(parts, 1).flatten(0, 1)

    def backward(self, how: str, old: Tensor) -> None:
        """Gradients of the whole step's loss; the ranks' are averaged, so each counts for all."""
        self.optimizer.zero_grad()
        if how == "single pass":
            padded = [torch.nn.functional.pad(x, (0, 1)).flatten() for x in (old, self.advantages)]

            def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
                return self.rollout.loss(scores, *(x[index] for x in padded))

            loss = self.model(self.ids, return_log_probs=True, loss_fn=loss_fn).loss
        else:
            loss = self.rollout.loss(self._scores(how), old, self.advantages).sum()
        (loss * self.size).backward()

    def _scores(self, how: str) -> TokenLogProbs:
        if how == "scores":
            out = self.model(self.ids, return_log_probs=True)
            return TokenLogProbs(out.log_probs[:, :-1], out.entropy[:, :-1])
        log_p = self.model(self.ids).logits[:, :-1].float().log_softmax(-1)
        label = self.ids[:, 1:, None]
        return TokenLogProbs(log_p.gather(-1, label)[..., 0], -(log_p.exp() * log_p).sum(-1))

    def step(self) -> float:
        """Updates the weights; the gradient's norm."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        self.optimizer.step()
        return float(norm.full_tensor())  # type: ignore[attr-defined]


class Megatron:
    """GPTModel in Megatron's DDP with its optimizer; packed sequences."""

    def __init__(self, args: argparse.Namespace, rollout: Rollout, dtype: torch.dtype, device: torch.device) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from logitless_mcore import load_hf_weights, make_forward

        self.rollout, self.size = rollout, dist.get_world_size()
        self.context = args.way == "cp" and self.size > 1
        sizes = {"cp": {"context_parallel_size": self.size}, "tp": {"tensor_model_parallel_size": self.size}}
        parallel_state.initialize_model_parallel(**sizes[args.way])
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
        gpt = gpt_model(args, dtype, device)
        load_hf_weights(gpt, dict(hf_model(args.shape, torch.device("cpu")).state_dict()))
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(gpt.config, ddp_config, gpt)
        settings = OptimizerConfig(
            optimizer="sgd", lr=args.learning_rate, sgd_momentum=0.0, clip_grad=0.0, bf16=dtype == torch.bfloat16
        )
        self.optimizer = get_megatron_optimizer(settings, [self.model])
        self.forward = make_forward(self.model, "thd")
        align = 2 * self.size if self.context else self.size  # as sequence and context parallelism split them
        self.whole = PackedBatch.from_sequences(list(rollout.ids), align=align)
        self.batch = self.whole
        if self.context:
            self.batch = self.whole.shard(parallel_state.get_context_parallel_rank(), self.size)
        self.group = parallel_state.get_context_parallel_group()
        self.advantages = self.batch.pack(list(rollout.advantages))

    def score(self) -> Tensor:
        """[t] log-probs of this rank's tokens, without gradients."""
        with torch.no_grad():
            return self.forward(self.batch).log_probs

    def everyone(self, log_probs: Tensor) -> Tensor:
        """[B, L - 1] of all sequences."""
        whole = self.batch.gather(log_probs, self.group) if self.context else log_probs
        return torch.stack(list(self.whole.unpack(whole)))[:, :-1]

    def backward(self, how: str, old: Tensor) -> None:
        """Gradients of the whole step's loss; DDP averages over context-parallel ranks."""
        from megatron.core.distributed import finalize_model_grads

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        if how == "single pass":

            def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
                return self.rollout.loss(scores, old[index], self.advantages[index])

            loss = self.forward(self.batch, loss_fn=loss_fn).loss
        else:
            scores = self._from_logits() if how == "logits" else self.forward(self.batch)
            scored = TokenLogProbs(scores.log_probs, scores.entropy)
            live = self.batch.labels != losses.IGNORE_INDEX
            loss = (live * self.rollout.loss(scored, old, self.advantages)).sum()
        (loss * (self.size if self.context else 1)).backward()
        finalize_model_grads([self.model])

    def _from_logits(self) -> TokenLogProbs:
        """By Megatron's vocabulary-parallel cross-entropy, which gives no entropy."""
        from megatron.core import tensor_parallel
        from megatron.core.packed_seq_params import PackedSeqParams

        lengths, longest = self.whole.cu_seqlens_padded, self.whole.max_seqlen
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=lengths,
            cu_seqlens_kv=lengths,
            cu_seqlens_q_padded=lengths,
            cu_seqlens_kv_padded=lengths,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        ids, positions = self.batch.input_ids[None], self.batch.position_ids[None]
        logits = self.model(ids, positions, None, packed_seq_params=params)  # [1, t, V / tp]
        labels = self.batch.labels.clamp(min=0)[:, None]
        loss = tensor_parallel.vocab_parallel_cross_entropy(logits.float().transpose(0, 1).contiguous(), labels)
        return TokenLogProbs(-loss[:, 0], None)

    def step(self) -> float:
        """Updates the weights; the gradient's norm."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        self.optimizer.step_with_ready_grads()
        return norm


def gpt_model(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Any:
    """This rank's part of a GPTModel in the same shape, without what needs Apex or Transformer Engine."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from logitless_mcore import layer_spec
    from logitless_mcore.spec import keep_rotary_on_device

    hf = hf_config(args.shape)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        ffn_hidden_size=hf.intermediate_size,
        layernorm_epsilon=hf.rms_norm_eps,
        **PLAIN,
        add_qkv_bias=True,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=tp,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        sequence_parallel=tp > 1,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config),
        vocab_size=hf.vocab_size,
        max_sequence_length=1 << 16,
        position_embedding_type="rope",
        rotary_base=int(hf.rope_parameters["rope_theta"]),
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    )
    return keep_rotary_on_device(gpt.to(device, dtype))


# --- a run ------------------------------------------------------------------------------------------------------------


def timed(trainer: Any, how: str, old: Tensor, rounds: int, device: torch.device) -> dict[str, Any]:
    """Medians of the slower rank's seconds of forward and backward, and its peak of memory beyond the model's."""
    cuda = device.type == "cuda"
    seconds: list[float] = []
    peak = 0
    for turn in range(1 + rounds):  # the first warms up
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
        trainer.backward(how, old)
        if cuda:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        taken = torch.tensor([time.perf_counter() - start, float(peak)], dtype=torch.float64, device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if turn:
            seconds.append(float(taken[0]))
    return {"median_seconds": statistics.median(seconds), "seconds": seconds, "peak_bytes": int(taken[1]) or None}


def one_rank(rank: int, size: int, args: argparse.Namespace, dtype: torch.dtype, folder: str) -> None:
    """One way on this many ranks; rank 0 leaves what it found in the folder."""
    cuda = args.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    rollout = Rollout(args, device)
    trainer = (Fsdp2 if args.way == "fsdp2" else Megatron)(args, rollout, dtype, device)
    old = trainer.score()
    runs = {}
    if dtype != torch.float32:
        runs = {how: timed(trainer, how, old, args.rounds, device) for how in HOWS}
    trainer.backward("single pass", old)
    norm = trainer.step()
    found = {"before": trainer.everyone(old), "after": trainer.everyone(trainer.score()), "norm": norm, "runs": runs}
    if rank == 0:
        torch.save({name: x.cpu() if isinstance(x, Tensor) else x for name, x in found.items()}, f"{folder}/found.pt")
    dist.destroy_process_group()


def run_apart(args: argparse.Namespace, size: int, dtype: torch.dtype) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(one_rank, (size, args, dtype, folder), nprocs=size)
        found: dict[str, Any] = torch.load(f"{folder}/found.pt")
    return found


def run_way(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one way; stops here where two GPUs compute something else than one."""
    found = {name: run_apart(args, *run) for name, run in RUNS.items()}
    exact = found["one GPU, float32"]

    def off(name: str, when: str) -> float:
        return float((found[name][when] - exact[when]).double().square().mean().sqrt())

    errors = {name: {when: off(name, when) for when in ("before", "after")} for name in list(RUNS)[1:]}
    for when in ("before", "after"):
        one, two = errors["one GPU"][when], errors["two GPUs"][when]
        if not two <= GATE * one:
            raise SystemExit(f"{args.way}: log-probs {when} the step are {two:.3g} off float32's, on one GPU {one:.3g}")
    moved = float((exact["after"] - exact["before"]).double().square().mean().sqrt())
    return {
        "rms_error_against_float32": errors,
        "rms_change_by_the_step": moved,
        "gradient_norm": {name: of_run["norm"] for name, of_run in found.items()},
        "runs": {name: found[name]["runs"] for name in list(RUNS)[1:]},
    }


def report(way: str, found: dict[str, Any]) -> None:
    errors = found["rms_error_against_float32"]
    print(f"\n{way}: log-probs, rms off float32's, before and after a step that changes them by ", end="")
    print(f"{found['rms_change_by_the_step']:.3g} nats")
    for name, runs in found["runs"].items():
        print(f"  {name}: {errors[name]['before']:.3g}, {errors[name]['after']:.3g}; ", end="")
        print(f"gradient norm {found['gradient_norm'][name]:.5g}")
        for how, run in runs.items():
            peak = f"{run['peak_bytes'] / 2**30:8.2f} GiB" if run["peak_bytes"] else ""
            print(f"    {how:12s}{run['median_seconds']:9.4f} s{peak}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--sequences", type=int, default=8, help="over all ranks; an even number")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each; a multiple of 4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    if args.device == "cuda" and torch.cuda.device_count() < 2:
        raise SystemExit(f"got {torch.cuda.device_count()} GPUs, expected 2; --device cpu tries the script itself")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # which Megatron wants for sequence parallelism
    sizes = {"shape": args.shape, "sequences": args.sequences, "length": args.length, "rounds": args.rounds}
    sizes["learning_rate"] = args.learning_rate
    record: dict[str, Any] = {**machine(torch.device(args.device)), **sizes, "ways": {}}
    for way in args.ways:
        args.way = way
        record["ways"][way] = run_way(args)
        report(way, record["ways"][way])
        if args.output:
            args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
