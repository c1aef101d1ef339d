"""Hidden states on both ways to them: state dicts, hooks and wrappers as they were, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logitless import PackedBatch
from logitless.errors import UnsupportedError
from logitless.testing.distributed import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron_cpu import build_gpt, hf_model, parallel
from oracle import Expected, deviation, expect, load, summed_over_tp

from logitless_mcore import make_forward
from logitless_mcore.capture import language_model, run_scored

SEQUENCES = [torch.arange(9) * 5 % 128, torch.arange(4) * 11 % 128]


class Older(GPTModel):
    """A model whose forward takes no output_processor, on any Megatron."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any, packed_seq_params: Any = None
    ) -> Tensor:
        return super().forward(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params)


class Twice(GPTModel):
    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any, **call: Any) -> Tensor:
        super().forward(input_ids, position_ids, attention_mask, **call)
        return super().forward(input_ids, position_ids, attention_mask, **call)


class Wrapper(nn.Module):
    """A model of another library around a language model; it knows of no output_processor."""

    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.language_model = gpt
        self.config, self.pre_process, self.post_process = gpt.config, gpt.pre_process, gpt.post_process

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any, packed_seq_params: Any = None
    ) -> Any:
        out = self.language_model(input_ids, position_ids, attention_mask, packed_seq_params=packed_seq_params)
        return {"out": out}


def loss_of(out: Any, batch: PackedBatch, expected: Expected) -> Tensor:
    terms = zip(expected.upstream, batch.unpack(out.log_probs), batch.unpack(out.entropy), strict=True)
    return sum((g * lp[:-1]).sum() + (e * ent[:-1]).sum() for (g, e), lp, ent in terms)  # type: ignore[return-value]


def every_wrapper(rank: int, size: int, hf: Any, expected: Expected, tied: bool, sp: bool) -> list[Any]:
    found = []
    with parallel(tp=size):
        gpt = load(build_gpt(hf.config, sequence_parallel=sp), hf, tied)
        for cls in (GPTModel, Older):
            gpt.__class__ = cls
            for model in (gpt, Wrapper(gpt)):
                gpt.zero_grad()
                batch = PackedBatch.from_sequences(SEQUENCES)
                out = make_forward(model)(batch)
                loss_of(out, batch, expected).backward()
                summed_over_tp(gpt)
                lp = max(
                    float((x[:-1] - y).abs().max())
                    for x, y in zip(batch.unpack(out.log_probs), expected.log_probs, strict=True)
                )
                found.append((lp, *deviation(gpt, expected, tied)))
    return found


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_both_ways_equal_hugging_face(tied: bool, tp: int, sp: bool) -> None:
    hf = hf_model("qwen2", tied)
    expected = expect(hf, SEQUENCES)
    for of_rank in run_ranks(tp, every_wrapper, hf, expected, tied, sp):
        for found in of_rank:
            assert max(found[:2]) <= 1e-5, found


def sharded_keys(gpt: Any) -> list[tuple[str, Any]]:
    found = gpt.sharded_state_dict()
    return sorted((name, getattr(x, "global_shape", None)) for name, x in found.items())


def checkpoints(rank: int, size: int, hf: Any, tied: bool) -> None:
    with parallel(tp=size):
        gpt = load(build_gpt(hf.config), hf, tied)
        keys, sharded = list(gpt.state_dict()), sharded_keys(gpt)
        for cls in (GPTModel, Older):
            gpt.__class__ = cls
            seen = []

            def look(*_: Any, seen: list[Any] = seen) -> None:
                seen.append((list(gpt.state_dict()), sharded_keys(gpt)))

            forward = make_forward(gpt)
            handle = gpt.output_layer.register_forward_pre_hook(look)
            forward(PackedBatch.from_sequences(SEQUENCES))
            handle.remove()
            assert seen == [(keys, sharded)]  # the output layer's hooks fired, once, and meanwhile all was there
            assert (list(gpt.state_dict()), sharded_keys(gpt)) == (keys, sharded)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("tp", [1, 2])
def test_checkpoints_are_what_they_were_even_within_a_call(tp: int, tied: bool) -> None:
    run_ranks(tp, checkpoints, hf_model("qwen2", tied), tied)


def failing(rank: int, size: int, hf: Any) -> None:
    def loss_fn(scores: Any, index: Tensor) -> Tensor:
        raise ZeroDivisionError

    with parallel():
        gpt = load(build_gpt(hf.config), hf, False)
        for cls in (GPTModel, Older):
            gpt.__class__ = cls
            forward = make_forward(gpt)
            with pytest.raises(ZeroDivisionError):
                forward(PackedBatch.from_sequences(SEQUENCES), loss_fn=loss_fn)
            assert "forward" not in gpt.output_layer.__dict__
            assert not gpt._forward_pre_hooks
            assert forward(PackedBatch.from_sequences(SEQUENCES)).log_probs is not None


def test_an_error_within_leaves_nothing_behind() -> None:
    run_ranks(1, failing, hf_model("llama"))


def twice(rank: int, size: int, hf: Any) -> None:
    with parallel():
        gpt = load(build_gpt(hf.config), hf, False)
        ids = torch.arange(4)[None]
        inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": None}
        gpt.__class__ = Twice
        with pytest.raises(UnsupportedError, match="more than once"):
            run_scored(gpt, inputs, lambda hidden, layer, weight: hidden)
        gpt.__class__ = GPTModel
        gpt.forward = lambda **_: None
        with pytest.raises(UnsupportedError, match="never calls its output layer"):
            run_scored(gpt, inputs, lambda hidden, layer, weight: hidden)


def test_a_head_called_twice_or_never_is_refused() -> None:
    run_ranks(1, twice, hf_model("llama"))


def wrapped_in_half(rank: int, size: int, hf: Any) -> None:
    with parallel():
        gpt = load(build_gpt(hf.config, params_dtype=torch.bfloat16, bf16=True), hf, False)
        module = DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), Float16Module(gpt.config, gpt))
        batch = PackedBatch.from_sequences(SEQUENCES)
        out, bare = make_forward(module)(batch), make_forward(gpt)(batch)
        assert torch.equal(out.log_probs, bare.log_probs)
        assert out.log_probs.dtype == torch.float32
        weight = gpt.output_layer.weight
        out.log_probs.sum().backward()
        assert float(weight.main_grad.abs().sum()) > 0  # DDP's hook saw its gradient


def test_within_ddp_and_float16_module() -> None:
    run_ranks(1, wrapped_in_half, hf_model("llama"))


def test_the_language_model_is_found_within_wrappers() -> None:
    inner, outer = nn.Linear(1, 1), nn.Module()
    outer.module = nn.Module()
    outer.module.language_model = nn.Module()
    outer.module.language_model.module = inner
    assert language_model(outer) is inner
    assert language_model(inner) is inner
