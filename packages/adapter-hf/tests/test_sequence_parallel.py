"""A row of packed sequences cut over two ranks after the labels were shifted: what one rank gives for the whole row.

The attention here is the simplest that such a cut needs: it gathers keys and values of all ranks, where Ulysses trades
heads for tokens. What it hands to the head is the same: this rank's tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from logitless import PackedBatch
from logitless.errors import UnsupportedError
from logitless.testing.distributed import run_ranks
from logitless_hf import bind
from logitless_hf.forward import make_forward

RANKS, LENGTHS, NAME = 2, (9, 5), "gathers_over_ranks"


def batch() -> PackedBatch:
    generator = torch.Generator().manual_seed(2)
    return PackedBatch.from_sequences([torch.randint(5, 101, (length,), generator=generator) for length in LENGTHS])


def upstream() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    return tuple(torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


class Gather(torch.autograd.Function):
    """[1, H, T, E] of the whole row from every rank's [1, H, T / RANKS, E]; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(RANKS)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return torch.chunk(grad, RANKS, dim=2)[dist.get_rank()]


def gathering(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Queries of this rank's part of the row, keys and values of the whole row; causal within each sequence."""
    key, value = Gather.apply(key), Gather.apply(value)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask = (sequence.unsqueeze(1) == sequence) & torch.ones(len(sequence), len(sequence), dtype=torch.bool).tril()
    mask = torch.chunk(mask, RANKS)[dist.get_rank()]
    out = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous(), None


def one_rank(rank: int, size: int, model: Any) -> Any:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    bind(model)
    whole, (g, e) = batch(), upstream()
    shard = whole.shard(rank, size, "contiguous")
    with pytest.raises(UnsupportedError, match="shard"):  # it could not attend to what other ranks hold
        make_forward(model, "bshd", None)(shard)
    AttentionInterface.register(NAME, gathering)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    model.set_attn_implementation(NAME)
    out = model(
        input_ids=shard.input_ids.unsqueeze(0),
        position_ids=shard.position_ids.unsqueeze(0),
        shift_labels=shard.labels.unsqueeze(0),
        return_log_probs=True,
        temperature=0.7,
    )
    scores = [shard.gather(x.squeeze(0), dist.group.WORLD) for x in (out.log_probs, out.entropy)]
    (g * scores[0] + e * scores[1]).sum().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        dist.all_reduce(parameter.grad)  # each rank has the part that its tokens give
        grads[name] = parameter.grad
    return [x.detach() for x in scores], grads


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_contiguous_shards(family: str, make_model: Any, check: Any) -> None:
    model, whole = make_model(family), batch()
    parts, begin = [], 0
    for length in LENGTHS:  # each alone, from the model's own logits
        ids = whole.input_ids[begin : begin + length].unsqueeze(0)
        parts.append(check.own_scores(model, check.shift(ids), 0.7, input_ids=ids))
        begin += length
    scores = [torch.cat([part[i].squeeze(0) for part in parts]) for i in range(2)]
    parameters = dict(model.named_parameters())
    expected = dict(zip(parameters, torch.autograd.grad(scores, list(parameters.values()), upstream()), strict=True))
    border = sum(LENGTHS) // RANKS
    assert whole.labels[border - 1] == whole.input_ids[border]  # a label that another rank's part begins with
    for found, grads in run_ranks(RANKS, one_rank, make_model(family)):
        for got, wanted in zip(found, scores, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
        check.gradients_equal(grads, expected, rtol=1e-9)
