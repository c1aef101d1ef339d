"""A tensor-parallel head: two gloo ranks give what one process gives, in values and in every parameter's gradient."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM
from transformers.integrations import tensor_parallel

from logitless.errors import UnsupportedError
from logitless.reference import scores_of
from logitless.testing.distributed import run_ranks
from logitless_hf import bind, inspect_head

PLANNED = ["llama", "gemma2", "cohere"]  # the last two tie their embeddings
Build = Callable[[], Any]


def upstream() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(3, 7, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def temperatures() -> Tensor:
    return torch.rand(3, 7, generator=torch.Generator().manual_seed(6), dtype=torch.float64) + 0.5


def whole(model: nn.Module, tokens: Tensor, check: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Scores and gradients of one process, from the model's own logits."""
    scores = check.own_scores(model, check.shift(tokens), temperatures(), input_ids=tokens)
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(scores, list(parameters.values()), upstream())
    return [x.detach() for x in scores], dict(zip(parameters, grads, strict=True))


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def sharded(rank: int, size: int, build: Build, tokens: Tensor) -> Any:
    """Scores and gradients of this rank, by two passes and by the single one; gradients of shards put together.

    To keep only one rank's part of a gathered weight's gradient is the fault of `full_tensor()` without
    `grad_placements=[Partial()]`; here that would leave the other rank's rows 0.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    model = bind(build())
    assert isinstance(model.get_output_embeddings().weight, DTensor)
    g, e = upstream()

    def loss_fn(scores: Any, index: Tensor) -> Tensor:
        return g.flatten()[index] * scores.log_probs + e.flatten()[index] * scores.entropy

    results = []
    for fn in (None, loss_fn):
        out = model(tokens, return_log_probs=True, temperature=temperatures(), loss_fn=fn)
        assert out.log_probs.requires_grad == out.entropy.requires_grad == (fn is None)
        model.zero_grad()
        (out.loss if fn else (g * out.log_probs + e * out.entropy).sum()).backward()
        grads = {name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()}
        results.append(([out.log_probs.detach(), out.entropy.detach()], grads))
    detached = model(tokens, return_log_probs=True, entropy_grad=False)
    assert (detached.log_probs.requires_grad, detached.entropy.requires_grad) == (True, False)
    kept: dict[str, Any] = {"top_k": 20, "top_p": 0.7, "stats": ("is_kept", "mean_logit")}
    several = torch.stack([tokens, tokens.roll(1, 1)], -1)
    with torch.no_grad():
        found = model(tokens, return_log_probs=True, temperature=temperatures(), shift_labels=several, **kept)
        logits = full(model(tokens, use_cache=False).logits) / temperatures()[..., None]
    expected = scores_of(logits, several, **kept)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=1e-9, atol=1e-9)
    for name, x in found.stats.items():
        torch.testing.assert_close(x, expected.stats[name], rtol=1e-9, atol=1e-9)  # type: ignore[index]
    return results


def assert_as_whole(build: Build, reference: nn.Module, tokens: Tensor, check: Any) -> None:
    scores, grads = whole(reference, tokens, check)
    for results in run_ranks(2, sharded, build, tokens):
        for found, gradients in results:
            for got, expected in zip(found, scores, strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
            check.gradients_equal(gradients, grads, rtol=1e-9)


@pytest.mark.skipif(
    not hasattr(tensor_parallel.TensorParallelLayer, "install_forward"),
    reason="this transformers shards heads in another way: by hooks (4.x), or not by default (5.0 to 5.3)",
)
@pytest.mark.parametrize("rows", [101, 102])
@pytest.mark.parametrize("family", PLANNED)
def test_a_plan_of_transformers(
    family: str, rows: int, make_model: Any, tokens: Tensor, check: Any, tmp_path: Path
) -> None:
    make_model(family, vocab_size=rows).save_pretrained(tmp_path)

    def load(**options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, **options).eval()

    try:
        assert_as_whole(lambda: load(tp_plan="auto"), load(), tokens, check)
    except RuntimeError as error:
        if "must be divisible by the tensor parallel size" not in str(error):
            raise
        pytest.skip("this transformers (5.20) splits no vocabulary unevenly")


def parallelized(model: nn.Module, **layouts: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    name = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())  # type: ignore[operator]
    return parallelize_module(model, mesh, {name: ColwiseParallel(**layouts)})


@pytest.mark.parametrize("family", ["llama", "phi"])  # phi's has a bias
def test_hooks_of_torch(family: str, make_model: Any, tokens: Tensor, check: Any) -> None:
    def build() -> Any:
        return parallelized(make_model(family, tie_word_embeddings=False), output_layouts=Replicate())

    assert_as_whole(build, make_model(family, tie_word_embeddings=False), tokens, check)


def refused(rank: int, size: int, build: Build, tokens: Tensor) -> str:
    model = build()
    cls = type(model)
    with pytest.raises(UnsupportedError) as caught:
        bind(model)(tokens, return_log_probs=True)
    assert type(model) is cls
    assert inspect_head(model).reason == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("layouts", "reason"),
    [({}, "leaves them sharded"), ({"output_layouts": Replicate(), "use_local_output": False}, "DTensor as logits")],
    ids=["not gathered", "left a DTensor"],
)
def test_logits_that_are_not_whole_are_refused(layouts: Any, reason: str, make_model: Any, tokens: Tensor) -> None:
    for told in run_ranks(2, refused, lambda: parallelized(make_model(), **layouts), tokens):
        assert reason in told


def with_a_bare_dtensor(model: Any) -> Any:
    """A head sharded by hand, and a forward that makes the hidden states fit, but for the head's stand-in."""
    mesh = init_device_mesh("cpu", (2,))
    model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh, [Shard(0)]))
    model.lm_head.register_forward_pre_hook(lambda _, args: (DTensor.from_local(args[0], mesh, [Shard(0)]),))
    model.lm_head.register_forward_hook(
        lambda _, args, out: out.redistribute(placements=[Shard(0)]).to_local() if isinstance(out, DTensor) else out
    )
    return model


def test_a_dtensor_over_ranks_of_other_tokens_is_refused(make_model: Any, tokens: Tensor) -> None:
    for told in run_ranks(2, refused, lambda: with_a_bare_dtensor(make_model()), tokens):
        assert "tensor-parallel plan shards" in told


def test_lora_on_such_a_head_is_refused(make_model: Any, tokens: Tensor) -> None:
    peft = pytest.importorskip("peft")

    def build() -> Any:
        model = parallelized(make_model(tie_word_embeddings=False), output_layouts=Replicate())
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], r=4)).get_base_model()

    for told in run_ranks(2, refused, build, tokens):
        assert "LoRA on a tensor-parallel head" in told
