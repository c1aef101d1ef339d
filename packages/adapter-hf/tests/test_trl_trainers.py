"""TRL's trainers that ask for more statistics, or attend by trees: what they log and train equals stock TRL's."""

from __future__ import annotations

import importlib
import queue
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from logitless.errors import UnsupportedError
from logitless_hf import trl as adapter
from logitless_hf.trl import status, with_logitless

pytest.importorskip("trl", reason="needs TRL: pip install 'logitless-hf[trl]'")
pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

import trl.trainer.sft_trainer as sft_module  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer  # noqa: E402
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head  # noqa: E402

pytestmark = pytest.mark.usefixtures("own_precision")
VOCAB = 101
SERVED = ("log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs")  # all that TRL's function offers
OF_TIME = ("runtime", "_per_second", "perf/", "time_in_queue")
COMMON = {
    "max_steps": 3,
    "learning_rate": 0.02,
    "optim": "sgd",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
}


def words(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def rows(trainer: Any, model: Any) -> list[dict[str, Any]]:
    """Completions that the model likes, half of whose tokens are its most likely ones, and others of other lengths."""
    random = torch.Generator().manual_seed(0)
    found = []
    for i in range(12):
        prompt, other = (torch.randint(4, VOCAB, (n,), generator=random).tolist() for n in (3, 4 + i % 3))
        liked = list(prompt)
        for _ in range(3 + i % 2):
            with torch.no_grad():
                liked.append(int(model(torch.tensor([liked])).logits[0, -1, 4:].argmax()) + 4)
            liked.append(int(torch.randint(4, VOCAB, (1,), generator=random)))
        row: dict[str, Any] = {"prompt": words(prompt), "completion": words(liked[3:])}
        if issubclass(trainer, DPOTrainer):
            row = {"prompt": row["prompt"], "chosen": row["completion"], "rejected": words(other)}
        elif issubclass(trainer, KTOTrainer):
            row |= {"label": True} if i % 2 else {"label": False, "completion": words(other)}
        found.append(row)
    return found


def build(trainer: Any, path: str, data: Any, tokenizer: Any, peft_config: Any = None, **settings: Any) -> Any:
    kinds = {SFTTrainer: SFTConfig, DPOTrainer: DPOConfig, KTOTrainer: KTOConfig}
    config = next(made for kind, made in kinds.items() if issubclass(trainer, kind))
    return trainer(
        model=path,
        args=config(output_dir=path, **COMMON, **settings),
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data[:5]),
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def history(trainer: Any) -> list[dict[str, float]]:
    """All that is logged, but for times: three steps, and an evaluation where there is data for one."""
    trainer.train()
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    logs = [log for log in trainer.state.log_history if "train_runtime" not in log]
    return [{k: v for k, v in log.items() if not any(part in k for part in OF_TIME)} for log in logs]


def assert_same(got: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """To 1e-4 of the value; a difference of sums over sequences (rewards, KL) also to the sums' rounding."""
    assert [log.keys() for log in got] == [log.keys() for log in expected]
    for ours, theirs in zip(got, expected, strict=True):
        for name, value in theirs.items():
            rounding = 1.01e-4 if name == "loss" and value == round(value, 4) else 0.0  # in the log of transformers 4
            floor = 2e-6 if name.startswith(("logits", "rewards", "kl", "eval_")) else 0.0
            assert abs(ours[name] - value) <= 1e-4 * abs(value) + floor + rounding, (name, ours[name], value)


VIRTUAL = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)  # before the prompt; never scored
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sft": ("llama", SFTTrainer, {}),
    "sft, packed": ("llama", SFTTrainer, {"packing": True, "max_length": 16, "completion_only_loss": True}),
    "sft, dynamic": ("cohere", SFTTrainer, {"loss_type": "dft"}),
    "dpo": ("llama", DPOTrainer, {}),
    "dpo, weighted": ("gemma2", DPOTrainer, {"use_weighting": True}),
    "dpo, virtual tokens": ("llama", DPOTrainer, {"peft_config": VIRTUAL}),
    "kto": ("gemma2", KTOTrainer, {}),
}
METRICS = {
    SFTTrainer: ["mean_token_accuracy"],
    DPOTrainer: ["mean_token_accuracy", "logits/chosen", "logits/rejected"],
    KTOTrainer: ["logits/chosen", "logits/rejected", "kl"],
}


@pytest.mark.parametrize("case", CASES)
def test_equals_stock(case: str, make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    family, trainer, settings = CASES[case]
    model, path = make_model(family, torch.float32), str(tmp_path)
    model.save_pretrained(path)
    data = rows(trainer, model)
    expected = history(build(trainer, path, data, tokenizer, **settings))
    ours = build(with_logitless(trainer, backend="torch"), path, data, tokenizer, **settings)
    got = history(ours)
    for name in ("entropy", "grad_norm", *METRICS[trainer]):  # else equality says nothing
        assert len({log[name] for log in got if name in log}) > 1, name
    assert_same(got, expected)
    found = status(ours)
    assert all(scored.calls >= 4 for scored in found.values())
    assert ("reference" in found) == (trainer is not SFTTrainer and "peft_config" not in settings)


def pair(make_model: Any, family: str, **changes: Any) -> tuple[Any, Any]:
    """The same model twice: with TRL's head, and with ours."""
    stock, ours = (make_model(family, torch.float32, **changes) for _ in range(2))
    add_fused_lm_head(stock, temperature=0.7, outputs=SERVED)
    adapter._add(ours, adapter.Scoring(FusedCausalLMOutput, 0.7, SERVED, True, 0), None)
    return stock, ours


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_each_statistic_of_each_token(family: str, make_model: Any, tokens: Tensor, check: Any) -> None:
    stock, ours = pair(make_model, family)
    with torch.no_grad():
        likely = stock(tokens).logits.argmax(-1)
    labels = tokens.clone()
    labels[:, 2::2] = likely[:, 1:-1:2]
    labels[0, 3], labels[1] = -100, -100
    for call in ({"labels": labels}, {"shift_labels": check.shift(labels)}):
        expected, got = (model(tokens, fused_lm_head=True, **call) for model in (stock, ours))
        assert expected.is_top1.any()
        assert not expected.is_top1[expected.label_mask].all()
        for name in SERVED:
            assert got[name].requires_grad == expected[name].requires_grad, name
            torch.testing.assert_close(got[name], expected[name], atol=1e-5, rtol=1e-5)
        found, wanted = (
            check.gradients(model, (out.log_probs, out.entropy)) for model, out in ((ours, got), (stock, expected))
        )
        check.gradients_equal(found, wanted, 1e-4)


def test_only_what_is_asked_for_is_filled(make_model: Any, tokens: Tensor) -> None:
    model = make_model("llama", torch.float32)
    adapter._add(model, adapter.Scoring(FusedCausalLMOutput, 1.0, ("log_probs", "is_top1"), True, 0), None)
    found = model(tokens, labels=tokens, fused_lm_head=True)
    assert {name for name in SERVED if getattr(found, name) is not None} == {"log_probs", "is_top1"}


def test_of_equal_logits_trl_counts_the_first_and_logitless_each(make_model: Any) -> None:
    stock, ours = pair(make_model, "llama", tie_word_embeddings=False)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for model in (stock, ours):
            best = int(model(ids).logits[0, 0].argmax())
            twin = VOCAB - 1 if best != VOCAB - 1 else 0
            model.lm_head.weight[twin] = model.lm_head.weight[best]
        first, second = sorted((best, twin))
        for label, by_trl in ((first, True), (second, False)):
            labels = torch.tensor([[-100, label, -100]])
            found = [bool(m(ids, labels=labels, fused_lm_head=True).is_top1[0, 0]) for m in (stock, ours)]
            assert found == [by_trl, True]


class FullLogits(SFTTrainer):  # type: ignore[misc]
    """Its loss is of the model's own logits, by plain torch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        labels = inputs.pop("labels")[:, 1:]
        logits = model(**inputs).logits[:, :-1].float()
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return total / num_items_in_batch


def test_lora_on_the_head_equals_full_logits(
    make_model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = make_model("llama", torch.float32), str(tmp_path)
    model.save_pretrained(path)
    data = rows(SFTTrainer, model)

    def run(trainer: Any) -> list[tuple[float, float]]:
        torch.manual_seed(1)
        adapted = peft.LoraConfig(
            r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        trainer = build(trainer, path, data, tokenizer, peft_config=adapted)
        trainer.train()
        return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]

    got = run(with_logitless(SFTTrainer))
    with pytest.raises(ValueError, match="lm_head"):
        run(SFTTrainer)
    monkeypatch.setattr(sft_module, "BaseTunerLayer", ())
    expected = run(FullLogits)
    assert len(expected) == 3
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_warning_of_trl_tells_the_users_line(make_model: Any, tokenizer: Any, tmp_path: Path) -> None:
    made, path = with_logitless(SFTTrainer), str(tmp_path)

    class Above(SFTTrainer):  # type: ignore[misc]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    class Below(made):  # type: ignore[misc, valid-type]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    make_model("llama", torch.float32).save_pretrained(path)
    lines = []
    for trainer in (SFTTrainer, made, Above, with_logitless(Above), Below):
        with pytest.warns(FutureWarning, match="`label_smoothing_factor` is deprecated") as found:
            build(trainer, path, [{"prompt": "w5", "completion": "w6"}] * 5, tokenizer, label_smoothing_factor=0.1)
        lines += [(w.filename, w.lineno) for w in found if "label_smoothing_factor" in str(w.message)]
    stock, ours, above, ours_above, below = lines
    assert ours == stock
    assert ours_above == above
    assert below == (above[0], above[1] + 4)


class Curious:
    def __init__(self, model: Any) -> None:
        add_fused_lm_head(model, outputs=("log_probs", "is_top1", "varentropy"))


def test_another_statistic_is_refused(make_model: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"Curious asks for varentropy .* computes log_probs, entropy, is_top1"):
        with_logitless(Curious)(make_model("llama", torch.float32))


def attend(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *_: Any, softmax_scale: float, **__: Any
) -> Tensor:
    """As FlashAttention 3's varlen call does: segment by segment, causal from the end."""
    found = []
    for (a, b), (c, d) in zip(pairwise(ends_q.tolist()), pairwise(ends_k.tolist()), strict=True):
        seen = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        heads = [x.transpose(0, 1).unsqueeze(0) for x in (q[a:b], k[c:d], v[c:d])]
        out = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


class Recorded:
    """A rollout worker with recorded rollouts; also a transfer of weights that sends none."""

    def __init__(self, sample: Any) -> None:
        self.rollout_buffer, self.metrics_queue = queue.Queue[Any](), queue.Queue[Any]()
        random = torch.Generator().manual_seed(0)
        for group in range(12):  # more than are trained on: batches are fetched ahead
            prompt = torch.randint(4, VOCAB, (4,), generator=random)
            for advantage in (-0.5, 1.0):
                ids = torch.cat([prompt, torch.randint(4, VOCAB, (5,), generator=random)])
                new = (torch.arange(9) >= 4).long()
                made = sample([], [], ids.numpy(), new.numpy(), (-4.6 * new).numpy(), advantage, 0, group, {}, 0.0)
                self.rollout_buffer.put(made)

    def check_health(self, stale_after_s: float) -> None:  # asked while the trainer waits for more
        raise AssertionError("the recorded rollouts are used up")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


@pytest.fixture
def asynchronous(monkeypatch: pytest.MonkeyPatch, make_model: Any, tokenizer: Any, tmp_path: Path) -> Any:
    """`asynchronous(wrap)` builds an AsyncGRPOTrainer; in place of a GPU, a server and its kernel are stand-ins."""
    pytest.importorskip("requests", reason="AsyncGRPOTrainer needs requests")
    home, reason = "trl.experimental.async_grpo", "AsyncGRPOTrainer needs transformers 5"
    module = pytest.importorskip(f"{home}.async_grpo_trainer", reason=reason, exc_type=ImportError)
    packing, worker = (importlib.import_module(f"{home}.{name}") for name in ("packing", "async_rollout_worker"))
    config = importlib.import_module(home).AsyncGRPOConfig
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attend))
    monkeypatch.setattr(module, "get_peak_flops_per_device", lambda *_: 1.0)  # asks CUDA for its name
    make_model("llama", torch.float32).save_pretrained(tmp_path)

    def build(wrap: Any = lambda trainer: trainer, **more: Any) -> Any:
        settings = {"token_budget": 0, "max_staleness": 9, "temperature": 0.7, "dtype": "float32"}
        return wrap(module.AsyncGRPOTrainer)(
            model=str(tmp_path),
            args=config(output_dir=str(tmp_path), **COMMON, **settings),
            train_dataset=Dataset.from_list([{"prompt": "w5"}] * 6),
            processing_class=tokenizer,
            rollout_worker=Recorded(worker.RolloutSample),
            weight_transfer=Recorded(worker.RolloutSample),
            **more,
        )

    return build


def test_async_grpo_equals_stock(asynchronous: Any) -> None:
    expected, trainer = history(asynchronous()), asynchronous(with_logitless)
    attention = trainer.model.config._attn_implementation
    assert attention == "tree_fa3"
    got = history(trainer)
    assert len({log["entropy"] for log in got}) == 3
    assert max(log["batch/packing_ratio"] for log in got) > 1.1  # prompts are shared, which a tree is for
    assert_same(got, expected)
    assert status(trainer)["policy"].calls == 3


def test_async_grpo_refuses_lora_on_the_head(asynchronous: Any) -> None:
    adapted = peft.LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="does not support a PEFT adapter on `lm_head`"):
        asynchronous(with_logitless, peft_config=adapted)
