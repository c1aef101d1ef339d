"""A bound Megatron model against the Hugging Face model of the same weights, and against its own logits path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import logitless
from logitless import PackedBatch
from logitless.errors import InvalidInputError, UnsupportedError
from logitless.testing.distributed import run_ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed", exc_type=ImportError)
from megatron.core import parallel_state
from megatron_cpu import build_gpt, hf_model, parallel
from oracle import Expected, deviation, expect, load, summed_over_tp

from logitless_mcore import (
    McoreAdapter,
    fused_gptmodel_forward_no_padding,
    make_forward,
    set_vocab_size,
    to_value_model,
)

LENGTHS = (7, 12, 1, 5)
TOLERANCE = 1e-5


def sequences(vocab: int = 128) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (n,), generator=generator) for n in LENGTHS]


def scores_and_gradients(
    rank: int, size: int, hf: Any, expected: Expected, tied: bool, sp: bool, temperature: float
) -> dict[str, tuple[float, float, float, str]]:
    """Errors of log_probs, entropy and the parameters' gradients, in every layout."""
    found = {}
    with parallel(tp=size):
        gpt = load(build_gpt(hf.config, sequence_parallel=sp), hf, tied)
        for layout in ("thd", "bshd", "nested"):
            gpt.zero_grad()
            batch = packed(layout)
            out = make_forward(gpt, layout)(batch, temperature=temperature)
            parts = [list(batch.unpack(x).unbind() if layout == "nested" else batch.unpack(x)) for x in scores(out)]
            terms = zip(expected.upstream, *parts, strict=True)
            sum((g * lp[:-1]).sum() + (e * ent[:-1]).sum() for (g, e), lp, ent in terms).backward()  # type: ignore[union-attr]
            summed_over_tp(gpt)
            assert all(float(x[-1]) == 0.0 for own in parts for x in own)
            errors = [
                max(float((x[:-1] - y).abs().max()) for x, y in zip(own, other, strict=True) if len(y))
                for own, other in zip(parts, (expected.log_probs, expected.entropy), strict=True)
            ]
            found[layout] = (*errors, *deviation(gpt, expected, tied))
    return found  # type: ignore[return-value]


def scores(out: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(out, logitless.CausalLMOutputForPPO)
    assert out.logits is None
    return out.log_probs, out.entropy  # type: ignore[return-value]


def packed(layout: str) -> PackedBatch:
    if layout == "nested":
        return PackedBatch.from_nested(torch.nested.nested_tensor(sequences(), layout=torch.jagged))
    return PackedBatch.from_sequences(sequences())


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_equals_hugging_face(family: str, tied: bool, tp: int, sp: bool) -> None:
    hf = hf_model(family, tied)
    expected = expect(hf, sequences(), 0.8)
    for of_rank in run_ranks(tp, scores_and_gradients, hf, expected, tied, sp, 0.8):
        for layout, found in of_rank.items():
            assert max(found[:3]) <= TOLERANCE, (layout, found)


# --- what else a call may ask for ---------------------------------------------------------------------------------


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded left, right, with holes, and one of no tokens."""
    mask = torch.zeros(4, 11, dtype=torch.int64)
    mask[0, 4:] = mask[1, :9] = mask[2, [1, 2, 5, 6, 10]] = 1
    return torch.randint(0, 128, mask.shape, generator=torch.Generator().manual_seed(2)), mask


def options(rank: int, size: int, hf: Any, sp: bool) -> None:
    with parallel(tp=size):
        gpt = load(build_gpt(hf.config, sequence_parallel=sp), hf, True)
        ids, mask = ragged()
        plain = PackedBatch.from_padded(ids, mask)
        generator = torch.Generator().manual_seed(1)
        temperature = 0.5 + torch.rand(sum(plain.padded_lengths), generator=generator)
        advantages = torch.randn(temperature.shape, generator=generator)
        of_layout = []
        for layout in ("thd", "bshd"):
            forward = make_forward(gpt, layout)
            gpt.zero_grad()
            whole = forward(plain, temperature=temperature)
            of_layout.append(torch.stack([whole.log_probs.detach(), whole.entropy.detach()]))
            (advantages * whole.log_probs - 0.1 * whole.entropy).sum().backward()
            grads = {name: p.grad.clone() for name, p in gpt.named_parameters()}

            def loss_fn(scores: Any, index: torch.Tensor) -> torch.Tensor:
                return advantages[index] * scores.log_probs - 0.1 * scores.entropy

            gpt.zero_grad()
            single = forward(plain, temperature=temperature, loss_fn=loss_fn)
            assert torch.equal(single.log_probs, whole.log_probs)
            assert single.loss is not None
            scored = plain.labels != -100
            terms = (advantages * whole.log_probs - 0.1 * whole.entropy)[scored]
            torch.testing.assert_close(single.loss, terms.sum())
            single.loss.backward()
            for name, parameter in gpt.named_parameters():
                torch.testing.assert_close(parameter.grad, grads[name], rtol=0, atol=1e-5, msg=name)

            assert forward(plain, entropy=False).entropy is None
            detached = forward(plain, entropy_grad=False)
            assert detached.log_probs.requires_grad
            assert not detached.entropy.requires_grad
            # Sequences padded on, and half of the tokens not scored: the same scores where both score.
            aligned = PackedBatch.from_padded(ids, mask, align=6, loss_mask=torch.arange(11).expand(4, -1) % 2)
            longer = forward(aligned, temperature=0.5)
            same = plain.unpack(forward(plain, temperature=0.5).log_probs)
            some = aligned.unpack((aligned.labels != -100).float()).bool()
            torch.testing.assert_close(aligned.unpack(longer.log_probs), same * some, rtol=0, atol=1e-5)
        torch.testing.assert_close(*of_layout, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"])
def test_losses_temperatures_and_padding(tp: int, sp: bool) -> None:
    run_ranks(tp, options, hf_model("qwen3", True), sp)


def ratio(rank: int, size: int, hf: Any, sp: bool) -> None:
    with parallel(tp=size):
        gpt = load(build_gpt(hf.config, sequence_parallel=sp), hf, False).train()
        batch = packed("thd")
        for layout in ("thd", "bshd"):
            forward = make_forward(gpt, layout)
            with torch.no_grad():
                old = forward(batch, entropy=False).log_probs
            new = forward(batch, keep_bytes=1 << 20).log_probs
            assert torch.equal((new - old).exp(), torch.ones_like(old))
            assert bool((old[batch.labels != -100] < 0).all())


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True)], ids=["tp1", "tp2-sp"])
def test_the_first_ratio_is_one(tp: int, sp: bool) -> None:
    run_ranks(tp, ratio, hf_model("qwen2"), sp)


def idle(rank: int, size: int, hf: Any, sp: bool) -> None:
    with parallel(tp=size):
        gpt = load(build_gpt(hf.config, sequence_parallel=sp), hf, False)
        nothing = PackedBatch.from_sequences([[], []])
        for layout in ("thd", "bshd", "nested"):
            out = make_forward(gpt, layout)(nothing)
            assert out.log_probs.tolist() == []
            width = PackedBatch.from_padded(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3), align=4)
            out = make_forward(gpt, layout)(width)
            assert width.unpack(out.entropy).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True)], ids=["tp1", "tp2-sp"])
def test_a_batch_without_a_token_runs(tp: int, sp: bool) -> None:
    run_ranks(tp, idle, hf_model("qwen2"), sp)


def vocabulary(rank: int, size: int, hf: Any, expected: Expected) -> list[tuple[float, float]]:
    """The padding's logits would outweigh all others."""
    with parallel(tp=size):
        gpt = load(build_gpt(hf.config, vocab_size=160), hf, False)
        weight, first = gpt.output_layer.weight, rank * gpt.output_layer.weight.shape[0]
        padding = torch.arange(first, first + len(weight)) >= 128
        with torch.no_grad():
            weight[padding] = 3.0
        found = []
        for told in (128, None):
            if told is not None:
                set_vocab_size(gpt, told)
            else:
                del gpt.logitless_vocab_size
            gpt.zero_grad()
            batch = packed("thd")
            out = make_forward(gpt)(batch)
            parts = [batch.unpack(x) for x in scores(out)]
            terms = zip(expected.upstream, *parts, strict=True)
            sum((g * lp[:-1]).sum() + (e * ent[:-1]).sum() for (g, e), lp, ent in terms).backward()  # type: ignore[union-attr]
            lp = max(
                float((x[:-1] - y).abs().max()) for x, y in zip(parts[0], expected.log_probs, strict=True) if len(y)
            )
            found.append((lp, float(weight.grad[padding].abs().max()) if padding.any() else 0.0))
            if told is not None:
                assert deviation(gpt, expected, False)[0] <= TOLERANCE
        return found


@pytest.mark.parametrize("tp", [1, 2])
def test_padded_vocab_rows_stay_out_of_the_softmax(tp: int) -> None:
    hf = hf_model("llama")
    for told, untold in run_ranks(tp, vocabulary, hf, expect(hf, sequences())):
        assert told[0] <= TOLERANCE
        assert told[1] == 0.0
        assert untold[0] > 0.1


def half(rank: int, size: int, hf: Any) -> None:
    """In bf16 the logits are never rounded: scores are those of fp32 products of the same hidden states."""
    with parallel():
        gpt = load(build_gpt(hf.config, params_dtype=torch.bfloat16, bf16=True).bfloat16(), hf, True)
        batch, hidden = packed("thd"), []
        handle = gpt.decoder.register_forward_hook(lambda *call: hidden.append(call[-1]))
        forward = make_forward(gpt)
        hidden.clear()
        out = forward(batch, temperature=0.7)
        handle.remove()
        weight = gpt.embedding.word_embeddings.weight
        log_p = (hidden[0][:, 0].float() @ weight.float().t() / 0.7).log_softmax(-1)
        live = batch.labels != -100
        expected = log_p[live].gather(-1, batch.labels[live, None])[:, 0]
        assert out.log_probs.dtype == out.entropy.dtype == torch.float32
        torch.testing.assert_close(out.log_probs[live], expected, rtol=0, atol=1e-4)
        out.log_probs.sum().backward()
        assert weight.grad.dtype == torch.bfloat16


def test_bf16_models_give_fp32_scores() -> None:
    run_ranks(1, half, hf_model("qwen2", True))


def frozen(rank: int, size: int, hf: Any) -> None:
    with parallel(tp=size):
        gpt = load(build_gpt(hf.config), hf, False)
        gpt.output_layer.weight.requires_grad_(False)
        make_forward(gpt)(packed("thd")).log_probs.sum().backward()
        assert gpt.output_layer.weight.grad is None
        assert float(gpt.embedding.word_embeddings.weight.grad.abs().sum()) > 0


def test_a_frozen_head_gets_no_gradient() -> None:
    run_ranks(2, frozen, hf_model("llama"))


def value_model(rank: int, size: int, hf: Any, sp: bool) -> list[float]:
    with parallel(tp=size):
        gpt = to_value_model(load(build_gpt(hf.config, sequence_parallel=sp), hf, False))
        with torch.no_grad():
            gpt.output_layer.weight.copy_(torch.linspace(-1, 1, hf.config.hidden_size))
        outs = [make_forward(gpt, layout)(packed("thd")) for layout in ("thd", "bshd")]
        assert outs[0].log_probs is None
        torch.testing.assert_close(outs[0].values, outs[1].values, rtol=0, atol=TOLERANCE)
        options = {"loss_fn": lambda scores, index: scores.log_probs, "stats": ("is_argmax",), "top_k": 5, "top_p": 0.9}
        for name, value in options.items():
            with pytest.raises(InvalidInputError, match=f"{name}: got some for a value model"):
                make_forward(gpt)(packed("thd"), **{name: value})
        return outs[0].values.tolist()


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, True)], ids=["tp1", "tp2-sp"])
def test_value_models_give_values(tp: int, sp: bool) -> None:
    hf = hf_model("qwen2")
    trunk = torch.cat([hf.model(input_ids=ids[None]).last_hidden_state[0] for ids in sequences()]).detach()
    expected = trunk @ torch.linspace(-1, 1, hf.config.hidden_size)
    for found in run_ranks(tp, value_model, hf, sp):
        torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=TOLERANCE)


# --- context parallelism ------------------------------------------------------------------------------------------


def sharded(rank: int, size: int, hf: Any, expected: Expected, tp: int, sp: bool) -> dict[str, Any]:
    """Errors of log_probs, entropy and gradients, of shards and of the fused forward that cuts them itself."""
    found = {}
    with parallel(tp=tp, cp=2):
        gpt = load(build_gpt(hf.config, sequence_parallel=sp), hf, False)
        cp_rank, group = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_group()
        batch = PackedBatch.from_sequences(sequences(), align=4 * tp)
        with pytest.raises(InvalidInputError, match="expected shard"):
            make_forward(gpt)(batch)
        for way in ("zigzag", "contiguous", "nested"):
            gpt.zero_grad()
            if way == "nested":
                ids = torch.nested.nested_tensor(sequences(), layout=torch.jagged)
                parts = [x.unbind() for x in fused_gptmodel_forward_no_padding(gpt, ids).values()]
            else:
                shard = batch.shard(cp_rank, 2, way)
                parts = [batch.unpack(shard.gather(x, group)) for x in scores(make_forward(gpt)(shard))]
            terms = zip(expected.upstream, *parts, strict=True)
            sum((g * lp[:-1]).sum() + (e * ent[:-1]).sum() for (g, e), lp, ent in terms).backward()  # type: ignore[union-attr]
            for parameter in gpt.parameters():
                dist.all_reduce(parameter.grad, group=group)
            summed_over_tp(gpt)
            errors = [
                max(float((x[:-1] - y).abs().max()) for x, y in zip(own, other, strict=True) if len(y))
                for own, other in zip(parts, (expected.log_probs, expected.entropy), strict=True)
            ]
            found[way] = [*errors, *deviation(gpt, expected, False)]
    return found


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["cp2", "tp2-cp2", "tp2-sp-cp2"])
def test_context_parallelism_equals_hugging_face(tp: int, sp: bool) -> None:
    hf = hf_model("qwen2")
    for of_rank in run_ranks(2 * tp, sharded, hf, expect(hf, sequences()), tp, sp):
        for way, found in of_rank.items():
            assert max(found[:3]) <= TOLERANCE, (way, found)


# --- what is refused ----------------------------------------------------------------------------------------------


def refusals(rank: int, size: int, hf: Any) -> None:
    with parallel():
        gpt = load(build_gpt(hf.config), hf, False)
        with pytest.raises(InvalidInputError, match="layout: got 'sbhd'"):
            make_forward(gpt, "sbhd")
        forward, ids = make_forward(gpt), torch.arange(8)[None]
        ones = torch.ones_like(ids)
        jumps = PackedBatch.from_padded(ids, ones, position_ids=2 * ids)
        with pytest.raises(UnsupportedError, match="do not count up by one"):
            forward(jumps)
        later = PackedBatch.from_padded(ids, ones, position_ids=ids + 3)  # relative, so the same
        plain = PackedBatch.from_padded(ids, ones)
        assert torch.equal(forward(later).log_probs, forward(plain).log_probs)
        with pytest.raises(UnsupportedError, match="mrope"):
            forward(PackedBatch.from_padded(ids, ones, position_ids=ids.expand(3, 1, 8)))
        with pytest.raises(InvalidInputError, match="expected a whole batch"):
            forward(PackedBatch.from_padded(ids, ones, align=4).shard(0, 2))
        with pytest.raises(InvalidInputError, match="expected a logitless.PackedBatch"):
            forward(ids)
        with pytest.raises(UnsupportedError, match="pixel_values"):
            forward(plain, multi_modal_inputs={"pixel_values": ids})
        with pytest.raises(InvalidInputError, match="temperature: got shape"):
            forward(plain, temperature=torch.ones(3))
        gpt.config.fp8 = "e4m3"
        with pytest.raises(UnsupportedError, match="fp8"):
            make_forward(gpt, "bshd")
        for wrong in (0, 129, "x"):
            with pytest.raises(InvalidInputError, match="vocab_size: got"):
                set_vocab_size(gpt, wrong)


def test_what_is_refused() -> None:
    run_ranks(1, refusals, hf_model("llama"))


def by_core(rank: int, size: int, hf: Any) -> None:
    with parallel():
        gpt = load(build_gpt(hf.config), hf, False)
        adapter = McoreAdapter()
        assert adapter.supports(gpt) is None
        assert "LanguageModule" in str(adapter.supports(torch.nn.Linear(1, 1)))
        assert "Megatron-Core model" in str(adapter.supports(3))
        found = logitless.make_forward(gpt, "bshd")(packed("thd"))
        assert torch.equal(found.log_probs, make_forward(gpt, "bshd")(packed("thd")).log_probs)


def test_core_finds_the_adapter() -> None:
    run_ranks(1, by_core, hf_model("llama"))
