"""Two gloo ranks with tokens of their own: scores and averaged gradients are those of one process that has them all."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from logitless import PackedBatch
from logitless.errors import InvalidInputError
from logitless.testing.distributed import run_ranks
from logitless_hf import bind
from logitless_hf.forward import make_forward

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


def held_after_bind(rank: int, size: int, model: Any, head: str) -> list[str]:
    sharded = shard(model, head)
    before = dict(sharded.named_parameters())
    bind(sharded)
    return [name for name, parameter in sharded.named_parameters() if parameter is not before[name]]


@pytest.mark.parametrize("head", ["root", "own", "norm"])
def test_bind_leaves_the_parameters_that_an_optimizer_is_to_hold(head: str, make_model: Any) -> None:
    assert run_ranks(RANKS, held_after_bind, make_model("llama"), head) == [[], []]


def split_from_its_embeddings(rank: int, size: int, model: Any, bound: str) -> str:
    def call() -> Any:
        found = shard(bind(model), "own") if bound == "before" else bind(shard(model, "own"))
        return found(tokens_of(rank), return_log_probs=True)

    with pytest.raises(Exception, match="shared") as caught:
        call()
    return str(caught.value)


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.12"), reason="this torch splits them, also where nothing is bound"
)
@pytest.mark.parametrize("bound", ["before", "after"])
def test_torch_still_refuses_to_split_a_tied_head_from_its_embeddings(bound: str, make_model: Any) -> None:
    # Had the head been out of its slot at the first call, it would have been missed, and the two trained apart.
    for told in run_ranks(RANKS, split_from_its_embeddings, make_model("gemma2"), bound):
        assert "lm_head.weight" in told


# --- FSDP2's mixed precision ------------------------------------------------------------------------------------------

# What accelerate sets for bf16: all three, and inputs are cast.
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)


def in_bf16(rank: int, size: int, model: Any, check: Any, head: str, bound: bool) -> Any:
    model = shard(model, head, mp_policy=BF16)
    tokens, temperature = tokens_of(rank), 0.7
    if bound:
        out = bind(model)(tokens, return_log_probs=True, temperature=temperature)
        scores = out.log_probs, out.entropy
    else:
        scores = check.own_scores(model, check.shift(tokens), temperature, input_ids=tokens)
    loss_of(rank, *scores).backward()
    grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return [x.detach() for x in scores], grads


def worst(found: Any, truth: Any) -> tuple[float, float]:
    """Largest error of the scores, and of a gradient relative to that parameter's largest."""
    scores = max(float((a - b).abs().max()) for a, b in zip(found[0], truth[0], strict=True))
    grads = max(float((x - truth[1][name]).abs().max() / truth[1][name].abs().max()) for name, x in found[1].items())
    return scores, grads


@pytest.mark.parametrize("head", ["root", "own"])
def test_bf16_is_no_worse_than_the_models_own_logits_in_bf16(head: str, make_model: Any, check: Any) -> None:
    def build(dtype: torch.dtype) -> Any:
        return make_model("llama", torch.bfloat16).to(dtype)  # weights that bf16 holds

    truth_model = build(torch.float64)
    loss, truths = torch.zeros((), dtype=torch.float64), []
    for rank in range(RANKS):
        pair = check.own_scores(truth_model, check.shift(tokens_of(rank)), 0.7, input_ids=tokens_of(rank))
        loss, truths = loss + loss_of(rank, *pair) / RANKS, [*truths, [x.detach() for x in pair]]
    parameters = dict(truth_model.named_parameters())
    grads = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))

    ours, theirs = (run_ranks(RANKS, in_bf16, build(torch.float32), check, head, bound) for bound in (True, False))
    for rank in range(RANKS):
        assert ours[rank][0][0].dtype == ours[rank][0][1].dtype == torch.float32
        (scores, gradients), (their_scores, their_gradients) = (
            worst(found[rank], (truths[rank], grads)) for found in (ours, theirs)
        )
        assert scores <= 1.2 * their_scores
        assert gradients <= 1.2 * their_gradients


def temperatures_in_bf16(rank: int, size: int, model: Any) -> Any:
    model = bind(shard(model, mp_policy=BF16))
    tokens, warmth = tokens_of(rank), temperatures(rank).float()
    with pytest.raises(InvalidInputError, match="cast_forward_inputs"):
        model(tokens, return_log_probs=True, temperature=warmth)
    batch = PackedBatch.from_padded(tokens, torch.ones_like(tokens))
    packed = make_forward(model, "bshd", None)
    return [
        [batch.unpack(packed(batch, temperature=warmth.flatten()).log_probs.detach()) for warmth in warmths]
        for warmths in ([warmth], [warmth.bfloat16().float()])
    ]


def test_temperatures_are_not_rounded_by_fsdp2(make_model: Any) -> None:
    for (exact,), (rounded,) in run_ranks(RANKS, temperatures_in_bf16, make_model("llama", torch.float32)):
        assert not torch.equal(exact, rounded)
