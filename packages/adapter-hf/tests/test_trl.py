"""TRL's trainers with scores from here: equal to stock TRL's and to full logits, and nothing of TRL is touched."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logitless.errors import InputTypeError, InvalidInputError, UnsupportedError
from logitless_hf.trl import release, status, with_logitless

pytest.importorskip("trl", reason="needs TRL: pip install 'logitless-hf[trl]'")
pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

import trl.trainer.grpo_trainer as grpo_module  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from trl import (  # noqa: E402
    GRPOConfig,
    GRPOTrainer,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
)

pytestmark = pytest.mark.usefixtures("own_precision")
VOCAB = 101
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]
COMPLETIONS = [[20, 21, 22, 2], [23, 24], [30, 31, 32, 33, 34, 2], [35, 36, 37]]
METRICS = ("loss", "entropy", "kl", "grad_norm", "reward")
ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"], "init_lora_weights": False}


@pytest.fixture
def checkpoint(make_model: Any, tmp_path: Path) -> Any:
    """`checkpoint(family)` saves a tiny fp32 model; TRL makes the reference model from its path."""

    def save(family: str = "llama", **changes: Any) -> str:
        folder = tmp_path / family
        make_model(family, torch.float32, **changes).save_pretrained(folder)
        return str(folder)

    return save


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def replay(trainer: Any) -> Any:
    """The trainer's class, generating recorded completions."""

    class Replay(trainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            made = [COMPLETIONS[i % len(COMPLETIONS)] for i in range(len(prompt_ids))]
            return made if isinstance(self, RLOOTrainer) else (made, None)

    return Replay


def build(trainer: Any, model: Any, tokenizer: Any, out: Path, *, peft_config: Any = None, **settings: Any) -> Any:
    config = RLOOConfig if issubclass(trainer, RLOOTrainer) else GRPOConfig
    settings = {"learning_rate": 0.02, "optim": "sgd", "max_steps": 3, "beta": 0.1, "temperature": 0.7, **settings}
    args = config(
        output_dir=str(out),
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=settings.pop("bf16", False),
        gradient_checkpointing=settings.pop("gradient_checkpointing", False),
        **settings,
    )
    prompts = [" ".join(f"w{i}" for i in ids) for ids in PROMPTS]
    data = Dataset.from_dict({"prompt": prompts * 4})
    return replay(trainer)(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def history(trainer: Any) -> list[dict[str, float]]:
    trainer.train()
    return [{name: log[name] for name in METRICS if name in log} for log in trainer.state.log_history if "loss" in log]


def assert_same(got: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float = 1e-5) -> None:
    assert len(got) == len(expected) > 0
    assert got[0].keys() == expected[0].keys() >= {"entropy", "grad_norm"}
    for ours, theirs in zip(got, expected, strict=True):
        for name, value in theirs.items():
            rounding = 1.01e-4 if value == round(value, 4) else 0.0  # of the loss, in the log of transformers 4
            assert abs(ours[name] - value) <= tolerance * max(1.0, abs(value)) + rounding, (name, got, expected)


class FullLogits(GRPOTrainer):  # type: ignore[misc]
    """Scores by the model's own logits, by plain torch."""

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, **_: Any
    ) -> Any:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
        log_p = (logits / self.temperature).log_softmax(-1)
        picked = log_p.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
        return picked, -(log_p.exp() * log_p).sum(-1), None


SETTINGS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "plain": ("llama", GRPOTrainer, {}),
    "entropy bonus": ("llama", GRPOTrainer, {"entropy_coef": 0.3}),
    "softcap": ("gemma2", GRPOTrainer, {"entropy_coef": 0.3}),
    "scale": ("cohere", GRPOTrainer, {"entropy_coef": 0.3}),
    "checkpointing": ("llama", GRPOTrainer, {"gradient_checkpointing": True}),
    "sequence ratio": ("llama", GRPOTrainer, {"importance_sampling_level": "sequence", "num_iterations": 2}),
    "rloo": ("llama", RLOOTrainer, {}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_equals_stock(case: str, checkpoint: Any, tokenizer: Any, tmp_path: Path) -> None:
    family, trainer, settings = SETTINGS[case]
    path = checkpoint(family)
    expected = history(build(trainer, path, tokenizer, tmp_path, **settings))
    ours = build(with_logitless(trainer, backend="torch"), path, tokenizer, tmp_path, **settings)
    got = history(ours)
    assert len({log["entropy"] for log in got}) > 1  # else equality says nothing
    assert_same(got, expected)
    found = status(ours)
    assert found["policy"].calls >= 3
    assert found["reference"].calls >= 1
    assert found["policy"].backend == "torch"
    assert found["policy"].report.softcap == (5.0 if family == "gemma2" else None)


def test_lora_head_equals_full_logits(
    checkpoint: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, settings = checkpoint("llama"), {"entropy_coef": 0.3, "learning_rate": 0.02, "max_steps": 4}

    def run(trainer: Any) -> list[dict[str, float]]:
        torch.manual_seed(1)
        adapter = peft.LoraConfig(**ADAPTER, task_type="CAUSAL_LM")
        return history(build(trainer, path, tokenizer, tmp_path, peft_config=adapter, **settings))

    got = run(with_logitless(GRPOTrainer))
    with pytest.raises(ValueError, match="lm_head"):
        run(GRPOTrainer)
    monkeypatch.setattr(grpo_module, "BaseTunerLayer", ())
    expected = run(FullLogits)
    assert expected[0]["kl"] > 1e-3  # the reference is the model without its adapter
    assert_same(got, expected)


def test_peft_trains_the_adapter_on_the_head(checkpoint: Any, tokenizer: Any, tmp_path: Path) -> None:
    adapter = peft.LoraConfig(**ADAPTER, task_type="CAUSAL_LM")
    trainer = build(with_logitless(GRPOTrainer), checkpoint(), tokenizer, tmp_path, peft_config=adapter)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lm_head.lora" in name}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert len(before) == 2
    assert all(not torch.equal(after[name], value) for name, value in before.items())


def test_own_trainers_and_their_constructors(checkpoint: Any, tokenizer: Any, tmp_path: Path) -> None:
    class Mine(GRPOTrainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seen = "before"
            super().__init__(*args, **kwargs)
            self.seen = "after"

    made = with_logitless(Mine)
    assert issubclass(made, Mine)
    assert made.__name__ == "Mine"
    trainer = build(made, checkpoint(), tokenizer, tmp_path)
    assert trainer.seen == "after"
    assert set(status(trainer)) == {"policy", "reference"}


def test_a_constructor_that_goes_around_is_refused(checkpoint: Any, tokenizer: Any, tmp_path: Path) -> None:
    class Around(GRPOTrainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            GRPOTrainer.__init__(self, *args, **kwargs)

    with pytest.raises(UnsupportedError, match=r"Around.*super\(\)"):
        build(with_logitless(Around), checkpoint(), tokenizer, tmp_path, beta=0.0)


def test_it_keeps_the_signature_and_is_not_made_twice() -> None:
    made = with_logitless(GRPOTrainer)
    assert inspect.signature(made) == inspect.signature(GRPOTrainer)
    assert (made.__name__, made.__module__) == (GRPOTrainer.__name__, GRPOTrainer.__module__)
    with pytest.raises(InvalidInputError, match="already"):
        with_logitless(replay(made), keep_bytes=1)


def test_mixed_precision(checkpoint: Any, tokenizer: Any, tmp_path: Path) -> None:
    path = checkpoint()
    expected = history(build(GRPOTrainer, path, tokenizer, tmp_path, bf16=True))
    trainer = build(with_logitless(GRPOTrainer), path, tokenizer, tmp_path, bf16=True)
    assert_same(history(trainer), expected, tolerance=0.05)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    ids = torch.tensor([PROMPTS[1]])
    assert model(ids, labels=ids, fused_lm_head=True).log_probs.shape == (1, 4)
    release(trainer)
    assert "forward" not in model.__dict__


def test_release_under_mixed_precision(checkpoint: Any, tokenizer: Any, tmp_path: Path) -> None:
    trainer = build(with_logitless(GRPOTrainer), checkpoint(), tokenizer, tmp_path, bf16=True, max_steps=1)
    trainer.train()
    assert "_original_forward" in trainer.model.__dict__
    release(trainer)
    assert not {"forward", "_original_forward"} & trainer.model.__dict__.keys()


def test_nothing_of_trl_is_touched(checkpoint: Any, tokenizer: Any, tmp_path: Path) -> None:
    names = dict(grpo_module.__dict__)
    path = checkpoint()
    trainer = build(with_logitless(GRPOTrainer), path, tokenizer, tmp_path)
    assert {name: value for name, value in grpo_module.__dict__.items() if names.get(name) is not value} == {}
    stock = build(GRPOTrainer, path, tokenizer, tmp_path)
    assert status(stock) == {}
    assert type(stock.model) is type(trainer.model).__mro__[1]


def test_release_leaves_no_trace(checkpoint: Any, tokenizer: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    cls, keys = type(model), set(model.__dict__)
    trainer = build(with_logitless(GRPOTrainer), model, tokenizer, tmp_path)
    reference = trainer.ref_model
    trainer.train()
    assert type(model) is not cls
    release(trainer)
    assert type(model) is cls
    assert type(reference) is cls
    assert set(model.__dict__) - keys <= {"model_tags", "_is_accelerate_prepared"}  # by TRL and accelerate
    assert status(trainer) == {}
    again = build(with_logitless(GRPOTrainer), model, tokenizer, tmp_path)
    twice = build(with_logitless(GRPOTrainer), model, tokenizer, tmp_path)
    assert set(status(again)) == set(status(twice)) == {"policy", "reference"}


def test_without_asking_nothing_changes(checkpoint: Any, tokenizer: Any, tmp_path: Path, tokens: Tensor) -> None:
    path = checkpoint()
    trainer = build(with_logitless(GRPOTrainer), path, tokenizer, tmp_path)
    plain, model = AutoModelForCausalLM.from_pretrained(path).eval(), trainer.model.eval()
    with torch.no_grad():
        expected, got = plain(tokens, labels=tokens), model(tokens, labels=tokens)
        assert torch.equal(got.logits, expected.logits)
        assert torch.equal(got.loss, expected.loss)
        generated = [m.generate(tokens[:1], max_new_tokens=4, do_sample=False) for m in (plain, model)]
    assert torch.equal(*generated)


def test_a_head_that_is_not_understood_is_refused(checkpoint: Any, tokenizer: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    model.lm_head = nn.Sequential(model.lm_head)
    model.lm_head.weight = model.lm_head[0].weight
    model.lm_head.bias = None
    with pytest.raises(UnsupportedError, match="Sequential"):
        build(with_logitless(GRPOTrainer), model, tokenizer, tmp_path, beta=0.0)


def test_a_cast_head_is_refused(checkpoint: Any, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cast_lm_head_to_fp32"):
        build(with_logitless(GRPOTrainer), checkpoint(), tokenizer, tmp_path, beta=0.0, cast_lm_head_to_fp32=True)


def test_a_seam_that_moved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputTypeError, match="class"):
        with_logitless(object())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"RewardTrainer.*add_fused_lm_head"):
        with_logitless(RewardTrainer)

    def moved(model: Any, temperature: float, heads: Any) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(grpo_module, "add_fused_lm_head", moved)
        with pytest.raises(UnsupportedError, match=r"takes \(model, temperature, heads\)"):
            with_logitless(GRPOTrainer)
    utils = importlib.import_module("trl.trainer.utils")
    with monkeypatch.context() as patch:
        patch.setattr(utils, "FusedCausalLMOutput", dict)
        with pytest.raises(UnsupportedError, match="has no loss, log_probs"):
            with_logitless(GRPOTrainer)
