"""PPO steps on a Megatron-Core policy and value model: packed batches, Megatron's schedule, DDP and optimizer.

    torchrun --nproc-per-node 2 examples/ppo_mcore.py [--tp 2 | --pp 2]

Two GPUs, a tiny random model, made-up rollouts: it shows how the parts meet, not that anything is learnt. Without an
option the two processes are data-parallel. Each step prints the ratio of new to old probabilities; before the first
update it is exactly 1, since scores have the same bits with and without gradients.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import logitless
from logitless import PackedBatch, TokenLogProbs, losses
from logitless_mcore import layer_spec, to_value_model
from logitless_mcore.spec import keep_rotary_on_device

VOCAB, HIDDEN, LAYERS, HEADS = 512, 64, 2, 4
ROWS, PROMPT, LONGEST, TOKENS = 8, 4, 24, 64  # rollouts of a data-parallel rank; tokens of a micro-batch
ENTROPY_BONUS, DISCOUNT, SMOOTHING = 0.01, 0.99, 0.95


# --- the models ------------------------------------------------------------------------------------------------------


def configuration() -> TransformerConfig:
    """A tiny Llama, without what needs Apex or Transformer Engine."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=2,
        ffn_hidden_size=2 * HIDDEN,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,  # the same weights whatever the tensor parallelism
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,  # micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # which Megatron wants with it, of dense models too
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        sequence_parallel=tp > 1,
        finalize_model_grads_func=finalize_model_grads,
    )


@dataclass
class Trained:
    """A model in DDP, its forward over packed batches, and its optimizer."""

    model: Any
    forward: Callable[..., Any]
    optimizer: Any


def build(device: torch.device, *, value_model: bool) -> Trained:
    """This rank's part of a model."""
    config = configuration()
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config),
        vocab_size=VOCAB,
        max_sequence_length=2 * LONGEST,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        parallel_output=True,
    )
    gpt = keep_rotary_on_device(gpt.to(device))
    if value_model:
        to_value_model(gpt)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=0.0), [ddp])
    return Trained(ddp, logitless.make_forward(ddp), optimizer)


def run(trained: Trained, batches: list[PackedBatch], loss_of: Callable[..., Any] | None) -> list[Any]:
    """All micro-batches through Megatron's schedule; on the last stage, what `loss_of` kept of each.

    Args:
        trained: its gradients are filled if `loss_of` gives losses.
        batches: as many on every data-parallel rank.
        loss_of: `loss_of(index)` gives the forward's `loss_fn`, or None, and a function of its output that gives the
            loss; None runs forward only, and keeps the outputs.
    """
    kept: list[Any] = []
    # Megatron averages over micro-batches and data-parallel ranks; the weights of the losses are of the whole step.
    scale = len(batches) * parallel_state.get_data_parallel_world_size()

    def step(iterator: Iterator[int], model: Any) -> tuple[Any, Callable[..., Any]]:
        index = next(iterator)
        loss_fn, finish = (None, None) if loss_of is None else loss_of(index)
        out = trained.forward(batches[index], loss_fn=loss_fn)

        def loss_func(out: Any, non_loss_data: bool = False) -> Any:
            kept.append(out)
            loss = torch.zeros((), device=batches[index].input_ids.device) if finish is None else finish(out)
            return loss * scale, {"loss": loss.detach()}

        return out, loss_func

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(range(len(batches))),
        model=[trained.model],
        num_microbatches=len(batches),
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=loss_of is None,
    )
    return kept


def update(trained: Trained, batches: list[PackedBatch], loss_of: Callable[..., Any]) -> list[Any]:
    """One optimizer step; on the last stage, the outputs from before it."""
    trained.model.zero_grad_buffer()
    trained.optimizer.zero_grad()
    outs = run(trained, batches, loss_of)
    trained.optimizer.step()
    return outs


# --- a rollout -------------------------------------------------------------------------------------------------------


def rollout(seed: int, device: torch.device) -> PackedBatch:
    """Prompts and replies, made up; only replies are scored."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(PROMPT + 2, LONGEST + 1, (ROWS, 1), generator=generator)
    ids = torch.randint(0, VOCAB, (ROWS, LONGEST), generator=generator).to(device)
    places = torch.arange(LONGEST, device=device)
    mask = places < lengths.to(device)
    return PackedBatch.from_padded(ids, mask, loss_mask=mask & (places >= PROMPT))


def advantages_of(batch: PackedBatch, values: Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantages and returns [T] of one micro-batch; the reward of a token is whether its id is even.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
    arXiv:1506.02438, eq. 16.
    """
    live = batch.labels != losses.IGNORE_INDEX
    rewards = torch.where(live, 1.0 - (batch.labels % 2), 0.0)
    following = torch.where(live, values, 0.0).roll(-1) * live.roll(-1)
    delta = torch.where(live, rewards + DISCOUNT * following - values, 0.0)
    advantages = torch.zeros_like(values)
    carried = torch.zeros((), device=values.device)
    for t in reversed(range(len(values))):  # a prompt, never scored, stands between two replies
        carried = torch.where(live[t], delta[t] + DISCOUNT * SMOOTHING * carried, 0.0)
        advantages[t] = carried
    return advantages, torch.where(live, advantages + values, 0.0)


# --- the step --------------------------------------------------------------------------------------------------------


def policy_losses(old: list[Tensor], advantages: list[Tensor], weights: list[Tensor]) -> Callable[[int], Any]:
    """PPO's clipped loss with an entropy bonus, made chunk by chunk inside the forward."""

    def loss_of(i: int) -> tuple[Any, Callable[[Any], Tensor]]:
        def loss_fn(scores: TokenLogProbs, tokens: Tensor) -> Tensor:
            assert scores.entropy is not None
            clipped = losses.ppo_clip(scores.log_probs, old[i][tokens], advantages[i][tokens])
            return weights[i][tokens] * (clipped + losses.entropy_bonus(scores.entropy, ENTROPY_BONUS))

        return loss_fn, lambda out: out.loss

    return loss_of


def value_losses(old: list[Tensor], returns: list[Tensor], weights: list[Tensor]) -> Callable[[int], Any]:
    """PPO's clipped squared error."""

    def loss_of(i: int) -> tuple[Any, Callable[[Any], Tensor]]:
        def finish(out: Any) -> Tensor:
            near = old[i] + (out.values - old[i]).clamp(-0.2, 0.2)
            worse = torch.maximum((out.values - returns[i]) ** 2, (near - returns[i]) ** 2)
            return 0.5 * (weights[i] * worse).sum()

        return None, finish

    return loss_of


@dataclass
class Row:
    """One update: the largest |ratio − 1| before it, and the losses, sums over this rank's tokens."""

    ratio_error: float
    policy_loss: float
    value_loss: float
    entropy: float


def train(device: torch.device, rollouts: int = 2, updates: int = 2) -> list[Row]:
    """On every rank, with Megatron's parallel state initialized; the rows are of the last pipeline stage."""
    policy, critic = build(device, value_model=False), build(device, value_model=True)
    data_rank, data_group = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_group()
    rows: list[Row] = []
    for index in range(rollouts):
        batches = rollout(100 * index + data_rank, device).micro_batches(TOKENS, group=data_group)
        total = losses.count_tokens(batches, data_group)
        weights = [losses.token_mean_weights(batch.labels, total) for batch in batches]
        with torch.no_grad():
            old = [out.log_probs for out in run(policy, batches, None)]
            values = [out.values for out in run(critic, batches, None)]
        estimates = [advantages_of(batch, value) for batch, value in zip(batches, values, strict=False)]
        policy_loss = policy_losses(old, [advantages for advantages, _ in estimates], weights)
        value_loss = value_losses(values, [returns for _, returns in estimates], weights)
        for _ in range(updates):
            outs, critics = update(policy, batches, policy_loss), update(critic, batches, value_loss)
            if not outs:  # a stage that is not the last
                continue
            with torch.no_grad():
                ratios = [(out.log_probs - before).exp() for out, before in zip(outs, old, strict=True)]
                entropies = [(w * out.entropy).sum() for w, out in zip(weights, outs, strict=True)]
                value_parts = [value_loss(i)[1](out) for i, out in enumerate(critics)]
            rows.append(
                Row(
                    max(float((ratio - 1).abs().max()) for ratio in ratios),
                    sum(float(out.loss) for out in outs),
                    sum(map(float, value_parts)),
                    sum(map(float, entropies)),
                )
            )
    return rows


def main() -> None:
    """Print a row for each update."""
    parser = argparse.ArgumentParser(description="PPO steps on Megatron-Core models; run it under torchrun.")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallelism")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallelism")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("Megatron-Core's schedule and DDP need a GPU for each process, and there is none")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    for step, row in enumerate(train(device)):
        print(
            f"update {step}: |ratio − 1| {row.ratio_error:.3g}, policy loss {row.policy_loss:+.4f}, "
            f"value loss {row.value_loss:.4f}, entropy {row.entropy:.4f} nats",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
