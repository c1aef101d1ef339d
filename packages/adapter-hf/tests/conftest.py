"""Tiny models of the families that must bind, with heads whose transforms show, and the models' own scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 101
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"head_dim": 8},
    "gemma2": {**GEMMA, "final_logit_softcapping": 5.0},
    "gemma3_text": {**GEMMA, "final_logit_softcapping": 7.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "phi": {},
    "gpt2": GPT2,
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "olmo2": {},
}


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float64, **changes: Any) -> nn.Module:
    """In eval mode, with vectors (norms, biases) perturbed and the head scaled so that a missed transform shows."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **FAMILIES.get(family, {}), **changes})
    model: Any = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.get_output_embeddings().weight.mul_(20)
    return model


def own_scores(model: Any, targets: Tensor, temperature: Any = 1.0, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [batch, sequence] from the model's own logits; 0 where the target is -100."""
    logits = model(**inputs, use_cache=False).logits
    temperature = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    live = targets != -100
    picked = log_p.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.where(live, picked, 0.0), torch.where(live, entropy, 0.0)


def shift(tokens: Tensor) -> Tensor:
    return torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)


def gradients(model: nn.Module, outputs: tuple[Tensor, ...], seed: int = 1) -> dict[str, Tensor | None]:
    """Gradients of every parameter for random upstream gradients; the model's `.grad` fields are left alone."""
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outputs]
    named = dict(model.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    found = torch.autograd.grad(outputs, list(trained.values()), upstream, allow_unused=True)
    return dict(zip(trained, found, strict=True))


def assert_gradients_equal(got: dict[str, Tensor | None], expected: dict[str, Tensor | None], rtol: float) -> None:
    """Each within `rtol` of the largest element of the expected one; absent ones are absent in both.

    The floor is for gradients that are zero but for rounding, as that of a key projection's bias.
    """
    assert got.keys() == expected.keys()
    floor = 1e-3 * max(float(wanted.abs().max()) for wanted in expected.values() if wanted is not None)
    for name, wanted in expected.items():
        found = got[name]
        assert (found is None) == (wanted is None), name
        if wanted is not None:
            assert found is not None
            worst = float((found - wanted).abs().max())
            assert worst <= rtol * max(float(wanted.abs().max()), floor), f"{name}: off by {worst}"


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    return tiny_model


@pytest.fixture
def tokens() -> Tensor:
    """[3, 7] ids, none of them special."""
    return torch.randint(5, VOCAB, (3, 7), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def check() -> Any:
    """The comparisons that several modules of tests share."""

    class Check:
        own_scores = staticmethod(own_scores)
        shift = staticmethod(shift)
        gradients = staticmethod(gradients)
        gradients_equal = staticmethod(assert_gradients_equal)

    return Check


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    """This process alone, as gloo's rank 0 of 1."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Of words w0 to w100, whose ids are their numbers; padding, beginning and end are the first three."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", bos_token="w1", eos_token="w2")


@pytest.fixture
def own_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer's precision is not taken over from the last one: accelerate keeps it in a singleton."""
    from accelerate.state import AcceleratorState

    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    AcceleratorState._reset_state(reset_partial_state=True)
