"""Two gloo ranks with tokens of their own: scores and averaged gradients are those of one process that has them all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from logitless.testing.distributed import run_ranks
from logitless_hf import bind

RANKS = 2
FAMILIES = ["llama", "gemma2", "phi"]  # plain; tied and capped; with a bias
Arrange = Callable[[Any], Any]


def tokens_of(rank: int) -> Tensor:
    return torch.randint(5, 101, (2, 7), generator=torch.Generator().manual_seed(3 + rank))


def drawn(rank: int, seed: int) -> Tensor:
    return torch.randn(2, 7, generator=torch.Generator().manual_seed(seed + rank), dtype=torch.float64)


def temperatures(rank: int) -> Tensor:
    return drawn(rank, 30).abs() + 0.5


def loss_of(rank: int, log_probs: Tensor, entropy: Tensor) -> Tensor:
    return (drawn(rank, 10) * log_probs + drawn(rank, 20) * entropy).sum()


def whole(model: nn.Module, check: Any) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    """Every rank's scores, and the gradients of their mean loss, in one process from the model's own logits."""
    scores, loss = [], torch.zeros((), dtype=torch.float64)
    for rank in range(RANKS):
        tokens = tokens_of(rank)
        pair = check.own_scores(model, check.shift(tokens), temperatures(rank), input_ids=tokens)
        scores.append([x.detach() for x in pair])
        loss = loss + loss_of(rank, *pair) / RANKS
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(parameters.values()))
    return scores, dict(zip(parameters, grads, strict=True))


def one_rank(rank: int, size: int, build: Callable[[], Any], arrange: Arrange) -> Any:
    warnings.filterwarnings("error", message=".*returned a view tensor")  # FSDP2's hooks hang on what is returned
    wrapped = arrange(build())
    out = wrapped(tokens_of(rank), return_log_probs=True, temperature=temperatures(rank))
    loss_of(rank, out.log_probs, out.entropy).backward()
    model = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    grads = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in trained.items()}
    return [out.log_probs.detach(), out.entropy.detach()], grads


def assert_as_whole(build: Callable[[], Any], arrange: Arrange, check: Any) -> None:
    scores, grads = whole(build(), check)
    for rank, (found, gradients) in enumerate(run_ranks(RANKS, one_rank, build, arrange)):
        for got, expected in zip(found, scores[rank], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
        check.gradients_equal(gradients, grads, rtol=1e-9)


# --- DDP --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ddp(options: dict[str, Any], make_model: Any, check: Any) -> None:
    assert_as_whole(make_model, lambda model: DistributedDataParallel(bind(model), **options), check)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_ddp_of_families(family: str, make_model: Any, check: Any) -> None:
    assert_as_whole(lambda: make_model(family), lambda model: DistributedDataParallel(bind(model)), check)


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def shard(model: Any, head: str = "root", **options: Any) -> Any:
    """Every layer its own unit, the rest in the root's; the head in the root's, its own, or one with the last norm."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in list(model.modules()):
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, mesh=mesh, **options)
    if head == "own":
        fully_shard(model.get_output_embeddings(), mesh=mesh, **options)
    if head == "norm":  # as transformers' own plans have it
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False, **options)
    return fully_shard(model, mesh=mesh, **options)


@pytest.mark.parametrize("bound", ["before", "after"])
@pytest.mark.parametrize(
    ("family", "head"),
    [*((family, "root") for family in FAMILIES), ("llama", "own"), ("phi", "own"), ("llama", "norm")],
)
def test_fsdp2(family: str, head: str, bound: str, make_model: Any, check: Any) -> None:
    def arrange(model: Any) -> Any:
        return shard(bind(model), head) if bound == "before" else bind(shard(model, head))

    assert_as_whole(lambda: make_model(family), arrange, check)


def split_from_its_embeddings(rank: int, size: int, model: Any, bound: str) -> str:
    with pytest.raises(Exception, match="shared") as caught:
        model = shard(bind(model), "own") if bound == "before" else bind(shard(model, "own"))
        model(tokens_of(rank), return_log_probs=True)
    return str(caught.value)


@pytest.mark.parametrize("bound", ["before", "after"])
def test_torch_still_refuses_to_split_a_tied_head_from_its_embeddings(bound: str, make_model: Any) -> None:
    # Had the head been out of its slot at the first call, it would have been missed, and the two trained apart.
    run_ranks(RANKS, split_from_its_embeddings, make_model("gemma2"), bound)
