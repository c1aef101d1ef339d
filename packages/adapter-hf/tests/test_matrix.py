"""Family by family, place by place: what a bound model gives is what the plain model's own logits give, or a refusal.

With `LOGITLESS_MATRIX=FILE`, as `nox -s matrix` sets it, the table is written there.

The plain model runs alone, in one process, eager, in eval mode. Scores and every parameter's gradient are compared.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from logitless.errors import UnsupportedError
from logitless.testing.distributed import run_ranks
from logitless_hf import bind

RANKS, TEMPERATURE = 2, 0.7
MOE = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {},
    "cohere": {},
    "granite": {},
    "phi": {},
    "gpt2": {},
    "opt": {},
    "qwen3_moe": MOE,
    "falcon_h1": {**MAMBA, "head_dim": 8, "lm_head_multiplier": 0.3, "num_hidden_layers": 1},
}
SINGLE = ("plain", "checkpointing", "LoRA head", "offload", "compile")
SPREAD = ("DDP", "FSDP2")
WRITE_TO = os.environ.get("LOGITLESS_MATRIX")
QUICK = {"llama", "gpt2"}  # compiled at every run; the others, which take minutes, when the table is written
# In float32: its grouped product of experts knows no float64. The bounds are nats, and of a gradient's largest element.
NARROW, TIGHT, LOOSE = {"qwen3_moe"}, (1e-9, 1e-8), (1e-4, 1e-3)
Found = tuple[list[Tensor], dict[str, Tensor | None]]


def tokens_of(rank: int) -> Tensor:
    return torch.randint(5, 101, (2, 7), generator=torch.Generator().manual_seed(3 + rank))


def loss_of(rank: int, scores: Any) -> Tensor:
    generator = torch.Generator().manual_seed(10 + rank)
    upstream = [torch.randn(2, 7, generator=generator, dtype=torch.float64) for _ in scores]
    return torch.stack([(g * x).sum() for g, x in zip(upstream, scores, strict=True)]).sum()


def scores_of(model: Any, rank: int = 0) -> tuple[Tensor, Tensor]:
    out = model(tokens_of(rank), return_log_probs=True, temperature=TEMPERATURE)
    return out.log_probs, out.entropy


# --- the places -------------------------------------------------------------------------------------------------------


def checkpointed(model: Any) -> Any:
    bind(model).train()
    for module in model.modules():  # train mode, for the checkpoints; nothing random
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def with_lora(model: Any) -> Any:
    """LoRA on the head, at work, and every parameter of the base trained as well."""
    name = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=[name], r=3, lora_alpha=5))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter_name, parameter in wrapped.named_parameters():
            parameter.requires_grad_()
            if "lora_" in parameter_name:  # A is drawn anew each time, and B is 0
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return wrapped


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,))
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList) and module[0].__class__.__name__.endswith(("Layer", "Block")):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    return bind(fully_shard(model, mesh=mesh))


PLACES: dict[str, Callable[[Any], Any]] = {
    "plain": bind,
    "checkpointing": checkpointed,
    "LoRA head": bind,
    "offload": lambda model: bind(accelerate.cpu_offload(model, execution_device=torch.device("cpu"))),
    "compile": lambda model: torch.compile(bind(model), backend="aot_eager", fullgraph=True),
    "DDP": lambda model: DistributedDataParallel(bind(model), find_unused_parameters=True),
    "FSDP2": sharded,
}


# --- what is compared -------------------------------------------------------------------------------------------------


class Places:
    """Runs the cells, and keeps what several need."""

    def __init__(self, make_model: Any, check: Any) -> None:
        self.make_model, self.check = make_model, check
        self.table: dict[tuple[str, str], str] = {}

    @functools.cache  # noqa: B019  # as long-lived as the session
    def _model(self, family: str) -> Any:
        return self.make_model(family, torch.float32 if family in NARROW else torch.float64, **FAMILIES[family])

    def model(self, family: str, place: str) -> Any:
        model = copy.deepcopy(self._model(family))
        return with_lora(model) if place == "LoRA head" else model

    def expected(self, family: str, place: str, ranks: int) -> tuple[list[list[Tensor]], dict[str, Tensor | None]]:
        """Each rank's scores, and the gradients of the mean loss, by the plain model's logits."""
        model, all_scores, loss = self.model(family, place), [], torch.zeros((), dtype=torch.float64)
        for rank in range(ranks):
            tokens = tokens_of(rank)
            scores = self.check.own_scores(model, self.check.shift(tokens), TEMPERATURE, input_ids=tokens)
            loss = loss + loss_of(rank, scores) / ranks
            all_scores.append([x.detach() for x in scores])
        loss.backward()
        return all_scores, {name: p.grad for name, p in model.named_parameters()}

    def bounds(self, family: str) -> tuple[float, float]:
        return LOOSE if family in NARROW else TIGHT

    def compared(self, family: str, found: Found, scores: list[Tensor], grads: dict[str, Tensor | None]) -> str:
        nats, relative = self.bounds(family)
        for got, wanted in zip(found[0], scores, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0.0, atol=nats)
        for name, x in found[1].items():  # experts that no token went to: nothing, or zeros
            if (x is None) != (grads[name] is None):
                assert x is None or not x.any(), name
                assert grads[name] is None or not grads[name].any(), name  # type: ignore[union-attr]
        both = [name for name, x in found[1].items() if x is not None and grads[name] is not None]
        self.check.gradients_equal({n: found[1][n] for n in both}, {n: grads[n] for n in both}, rtol=relative)
        return "right"


def own_gradients(model: Any) -> dict[str, Tensor | None]:
    grads = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters()}
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in grads.items()}


def itself_fails(run: Callable[[], Any]) -> bool:
    """Whether the model without logitless fails in this place as well."""
    try:
        run()
    except Exception:
        return True
    return False


def alone(places: Places, family: str, place: str) -> str:
    if place == "offload":
        return offloaded(places, family)
    torch._dynamo.reset()
    (scores,), grads = places.expected(family, place, 1)
    model = places.model(family, place)
    try:
        wrapped = PLACES[place](model)
        found = scores_of(wrapped)
    except UnsupportedError as error:
        return f"refused: {error}"
    except Exception:
        plain = torch.compile(places.model(family, place), backend="aot_eager", fullgraph=True)
        if place == "compile" and itself_fails(lambda: plain(tokens_of(0), use_cache=False)):
            return "the model itself does not compile"
        raise
    loss_of(0, found).backward()
    return places.compared(family, ([x.detach() for x in found], own_gradients(model)), scores, grads)


def offloaded(places: Places, family: str) -> str:
    """Weights that accelerate brings in for a call get no gradient, bound or not; what flows through them does."""

    def run(model: Any, score: Callable[[], Any]) -> Found:
        leaves: list[Tensor] = []

        def leaf(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            leaves.append(output.detach().requires_grad_())
            return leaves[-1]

        model.get_input_embeddings().register_forward_hook(leaf)
        scores = score()
        (grad,) = torch.autograd.grad(loss_of(0, scores), leaves)
        return [x.detach() for x in scores], {"embeddings": grad}

    plain, tokens = places.model(family, "offload"), tokens_of(0)
    labels = places.check.shift(tokens)
    wanted = run(plain, lambda: places.check.own_scores(plain, labels, TEMPERATURE, input_ids=tokens))
    model = PLACES["offload"](places.model(family, "offload"))
    return places.compared(family, run(model, lambda: scores_of(model)), *wanted)


def on_a_rank(rank: int, size: int, places: Places, place: str) -> dict[str, Found | str]:
    """Of every family, so that processes are started once."""
    found: dict[str, Found | str] = {}
    for family in FAMILIES:
        model = places.model(family, place)
        try:
            wrapped = PLACES[place](model)  # kept: DDP's backward has but a weak reference to it
            scores = scores_of(wrapped, rank)
        except UnsupportedError as error:
            found[family] = f"refused: {error}"
            continue
        loss_of(rank, scores).backward()
        found[family] = ([x.detach() for x in scores], own_gradients(model))
    return found


def write(path: Path, table: dict[tuple[str, str], str]) -> None:
    """The table, with what it means; cells other than "right" are spelled out below."""
    columns = (*SINGLE, *SPREAD)
    others = sorted({cell for cell in table.values() if cell != "right"})
    lines = [
        "# Families and the places where their weights live",
        "",
        "Written by the script of `nox -s matrix`"
        ", which runs each cell: a tiny model, its log-probabilities, entropies and every "
        "parameter's gradient, against the plain model's own logits in one process. "
        f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}, accelerate "
        f"{accelerate.__version__}, CPU; DDP (`find_unused_parameters=True`) and FSDP2 (each layer and the root) on "
        f"{RANKS} gloo ranks with tokens of their own; compile is `fullgraph=True` by aot_eager; LoRA with every "
        "parameter trained. Offloaded weights get no gradient, by accelerate's design: there the gradient at the "
        "embeddings' output is compared.",
        "",
        f'"right" is within {TIGHT[0]:.0e} nats, and gradients within {TIGHT[1]:.0e} of the largest element, in '
        f"float64; {', '.join(sorted(NARROW))} within {LOOSE[0]:.0e} and {LOOSE[1]:.0e} in float32.",
        "",
        f"| family | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for family in FAMILIES:
        cells = [table.get((family, place), "not run") for place in columns]
        told = [cell if cell in ("right", "not run") else f"({1 + others.index(cell)})" for cell in cells]
        lines.append(f"| {family} | {' | '.join(told)} |")
    lines += ["", *(f"{number}. {cell}" for number, cell in enumerate(others, 1))]
    path.write_text("\n".join(lines).rstrip() + "\n")


@pytest.fixture(scope="module")
def places(make_model: Any, check: Any) -> Iterator[Places]:
    made = Places(make_model, check)
    yield made
    if WRITE_TO:
        write(Path(WRITE_TO), made.table)


@pytest.fixture(scope="module")
def spread(places: Places) -> Callable[[str], list[dict[str, Any]]]:
    return functools.cache(lambda place: run_ranks(RANKS, on_a_rank, places, place, seconds=300.0))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", SINGLE)
def test_in_one_process(place: str, family: str, places: Places) -> None:
    if place == "compile" and family not in QUICK and not WRITE_TO:
        pytest.skip("compiled by `nox -s matrix`")
    places.table[family, place] = alone(places, family, place)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", SPREAD)
def test_on_two_ranks(place: str, family: str, places: Places, spread: Any) -> None:
    scores, grads = places.expected(family, place, RANKS)
    verdicts = set()
    for rank, found in enumerate(spread(place)):
        result = found[family]
        verdicts.add(result if isinstance(result, str) else places.compared(family, result, scores[rank], grads))
    (places.table[family, place],) = verdicts
