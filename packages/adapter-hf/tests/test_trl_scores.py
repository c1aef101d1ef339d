"""One scoring call of a trainer's model: equal to TRL's head, and only scored tokens cost."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from logitless.errors import UnsupportedError
from logitless.testing.memory import ProductCounter
from logitless_hf import unbind
from logitless_hf.trl import Scoring, _add, with_logitless

pytest.importorskip("trl", reason="needs TRL: pip install 'logitless-hf[trl]'")
pytest.importorskip("datasets")

import trl.trainer.grpo_trainer as grpo_module
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.usefixtures("own_precision")
VOCAB = 101


def scores(trainer: Any, model: Any, keep: int, ids: Tensor, mask: Tensor, **more: Any) -> tuple[Any, ...]:
    found: tuple[Any, ...] = trainer._get_per_token_logps_and_entropies(
        model, ids, mask, keep, compute_entropy=True, **more
    )
    return found


def pair(trainer: Any, model: Any) -> tuple[Any, Any]:
    """The model with TRL's head, and a copy with ours."""
    ours = copy.deepcopy(model)
    grpo_module.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    output = grpo_module.add_fused_lm_head.__globals__["FusedCausalLMOutput"]
    _add(ours, Scoring(output, 0.7, ("log_probs", "entropy"), True, 0), None)
    return model, ours


@pytest.fixture
def build(make_model: Any, tokenizer: Any, tmp_path: Path) -> Any:
    """`build(**options)` makes a GRPOTrainer of a tiny model, with these options of `with_logitless`."""

    def build(**options: Any) -> Any:
        return with_logitless(GRPOTrainer, **options)(
            model=make_model("llama", torch.float32),
            reward_funcs=lambda completion_ids, **_: [0.0] * len(completion_ids),
            args=GRPOConfig(
                output_dir=str(tmp_path),
                temperature=0.7,
                report_to=[],
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["w5 w6 w7"] * 8}),
            processing_class=tokenizer,
        )

    return build


@pytest.fixture
def trainer(build: Any) -> Any:
    return build()


def test_prompts_and_padding_cost_nothing(trainer: Any, tokens: Tensor) -> None:
    ids = torch.cat([tokens, tokens], 1)
    flops = []
    for live in (8, 4):
        mask = torch.ones_like(ids)
        mask[:, 6 + live :] = 0
        with torch.no_grad(), ProductCounter() as trunk:
            trainer.model.model(ids, mask)
        with torch.no_grad(), ProductCounter() as whole:
            scores(trainer, trainer.model, 8, ids, mask)
        flops.append(whole.flops - trunk.flops)
    assert flops[0] == 2 * 24 * 32 * VOCAB
    assert flops[1] == flops[0] // 2


def test_no_live_token_gives_a_zero_that_can_be_differentiated(trainer: Any, tokens: Tensor) -> None:
    mask = torch.ones_like(tokens)
    mask[:, 3:] = 0
    log_probs, entropy, _ = scores(trainer, trainer.model, 4, tokens, mask)
    (log_probs.sum() + entropy.sum()).backward()
    assert not log_probs.any()
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_the_first_ratio_is_exactly_one(keep_bytes: int, build: Any, tokens: Tensor) -> None:
    trainer = build(keep_bytes=keep_bytes)
    mask = torch.ones_like(tokens)
    with torch.no_grad():
        old = scores(trainer, trainer.model, 4, tokens, mask)[0]
    new = scores(trainer, trainer.model, 4, tokens, mask)[0]
    assert new.requires_grad
    assert torch.equal((new - old).exp(), torch.ones_like(old))


def test_entropy_grad_false_detaches(build: Any, tokens: Tensor) -> None:
    trainer = build(entropy_grad=False, keep_bytes=1 << 20)
    log_probs, entropy, _ = scores(trainer, trainer.model, 4, tokens, torch.ones_like(tokens))
    assert log_probs.requires_grad
    assert not entropy.requires_grad


def test_experts_auxiliary_loss(trainer: Any, tokens: Tensor, check: Any) -> None:
    config = AutoConfig.for_model(
        "mixtral",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    stock, ours = pair(trainer, AutoModelForCausalLM.from_config(config))
    mask = torch.ones_like(tokens)
    expected = scores(trainer, stock, 4, tokens, mask, compute_aux_loss=True)
    got = scores(trainer, ours, 4, tokens, mask, compute_aux_loss=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    check.gradients_equal(check.gradients(ours, got), check.gradients(stock, expected), 1e-4)
    losses = [m(tokens, labels=tokens, fused_lm_head=True, output_router_logits=True).loss for m in (stock, ours)]
    torch.testing.assert_close(losses[1], losses[0], atol=1e-5, rtol=1e-5)


def test_pixels_arrive(trainer: Any, check: Any) -> None:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = CLIPVisionConfig(**size, image_size=8, patch_size=4, projection_dim=16)
    text = LlamaConfig(**size, vocab_size=VOCAB, max_position_embeddings=64)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=99, image_seq_length=4)
    torch.manual_seed(0)
    stock, ours = pair(trainer, LlavaForConditionalGeneration(config))
    ids = torch.tensor([[5, 99, 99, 99, 99, 6, 7, 8, 9], [5, 99, 99, 99, 99, 10, 11, 12, 0]])
    mask = (ids != 0).long()
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    asked = {"pixel_values": pixels, "num_images": [1, 1], "batch_size": 1}
    expected, got = (scores(trainer, model, 3, ids, mask, **asked)[:2] for model in (stock, ours))
    blank = scores(trainer, ours, 3, ids, mask, **{**asked, "pixel_values": pixels * 0})
    assert float((blank[0] - got[0]).detach().abs().max()) > 1e-4  # the pixels matter
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    check.gradients_equal(check.gradients(ours, got), check.gradients(stock, expected), 1e-4)


def test_loss_and_pre_shifted_labels(make_model: Any, trainer: Any, tokens: Tensor, check: Any) -> None:
    stock, ours = pair(trainer, make_model("llama", torch.float32))
    labels = tokens.masked_fill(tokens % 3 == 0, -100)
    for call in (
        {"labels": labels},
        {"shift_labels": check.shift(labels)},
        {"labels": labels, "num_items_in_batch": 5},
    ):
        expected = stock(tokens, fused_lm_head=True, **call)
        got = ours(tokens, fused_lm_head=True, **call)
        assert type(got) is type(expected)
        assert torch.equal(got.label_mask, expected.label_mask)
        for name in ("loss", "log_probs", "entropy"):
            torch.testing.assert_close(got[name], expected[name], atol=1e-5, rtol=1e-5)


def test_an_unbound_model_scores_no_more(trainer: Any, tokens: Tensor) -> None:
    unbind(trainer.model)
    with pytest.raises(UnsupportedError, match="unbound"):
        scores(trainer, trainer.model, 4, tokens, torch.ones_like(tokens))
