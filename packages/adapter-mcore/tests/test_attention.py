"""Packed and padded attention against each sequence alone, by value and gradient, on one rank and over several."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cpu import alone, build_gpt, hf_gradients, hf_model, packed, parallel, run_model
from torch import Tensor
from torch.nn import functional

from logitless import PackedBatch
from logitless.errors import InvalidInputError, UnsupportedError
from logitless.testing.distributed import run_ranks
from logitless_mcore import attention as attention_module
from logitless_mcore.attention import PackedAttention
from logitless_mcore.weights import load_hf_weights

GENERATOR = torch.Generator().manual_seed(5)
LENGTHS = (5, 1, 12, 8)
SEQUENCES = [torch.randint(0, 128, (n,), generator=GENERATOR) for n in LENGTHS]
UPSTREAM = [torch.randn(n, 128, generator=GENERATOR) for n in LENGTHS]


def expected(family: str, tied: bool = False, **changes: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The Hugging Face model on each sequence alone: logits, and gradients summed over the sequences."""
    model = hf_model(family, tied, **changes)
    logits = []
    for ids, upstream in zip(SEQUENCES, UPSTREAM, strict=True):
        logits.append(model(ids[None], use_cache=False).logits[0])
        logits[-1].backward(upstream)
    return [x.detach() for x in logits], {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def far(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


def assert_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Within 1e-5 of the largest element; that of a key's bias, which is zero but for rounding, of all of them."""
    assert found.keys() == wanted.keys()
    floor = 1e-2 * max(float(x.abs().max()) for x in wanted.values())
    off = {n: far(found[n], x) / max(float(x.abs().max()), floor) for n, x in wanted.items()}
    assert max(off.values()) <= 1e-5, off


def merged(stages: list[dict[str, Tensor]], tied: bool) -> dict[str, Tensor]:
    """Gradients of all stages; a tied embedding lies on the first and the last, whose gradients Megatron adds up."""
    whole: dict[str, Tensor] = {}
    for stage in stages:
        for name, gradient in stage.items():
            whole[name] = whole[name] + gradient if name in whole else gradient
    return whole


# --- packed (THD) -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tp", "pp", "sp", "align"),
    [(1, 1, False, 1), (1, 1, False, 4), (2, 1, False, 1), (2, 1, True, 2), (1, 2, False, 1), (2, 2, True, 2)],
    ids=str,
)
def test_packed_equals_each_sequence_alone(tp: int, pp: int, sp: bool, align: int) -> None:
    families = [("qwen2", False), ("qwen3", False), ("llama", True), ("mistral", False)]
    padded = [n + -n % align for n in LENGTHS]

    def run(rank: int, size: int) -> list[tuple[Tensor | None, dict[str, Tensor]]]:
        found = []
        with parallel(tp=tp, pp=pp):
            for family, tied in families:
                reference = hf_model(family, tied)
                gpt = build_gpt(reference.config, sequence_parallel=sp).eval()
                load_hf_weights(gpt, reference)
                upstream = [functional.pad(x, (0, 0, 0, -x.shape[0] % align)) for x in UPSTREAM]
                out = run_model(gpt, torch.cat(upstream)[None], **packed(SEQUENCES, align))
                found.append((out, hf_gradients(gpt)))
        return found

    ranks = run_ranks(tp * pp, run, seconds=120)
    for i, (family, tied) in enumerate(families):
        logits, gradients = expected(family, tied)
        (out,) = ranks[-1][i][0]
        for got, wanted in zip(out.split(padded), logits, strict=True):
            assert far(got[: len(wanted)], wanted) <= (1e-6 if tp * pp == 1 else 1e-5)
        for offset in range(tp):  # every tensor-parallel rank holds the whole
            assert_gradients(merged([ranks[stage * tp + offset][i][1] for stage in range(pp)], tied), gradients)


@pytest.mark.parametrize(("tp", "cp", "sp"), [(1, 2, False), (1, 3, False), (2, 2, True)], ids=str)
def test_packed_over_context_parallel_ranks(tp: int, cp: int, sp: bool) -> None:
    align = 2 * cp * tp
    padded = [n + -n % align for n in LENGTHS]

    def run(rank: int, size: int) -> tuple[Tensor, dict[str, Tensor]]:
        with parallel(tp=tp, cp=cp):
            reference = hf_model("qwen3")
            gpt = build_gpt(reference.config, sequence_parallel=sp).eval()
            load_hf_weights(gpt, reference)
            whole = torch.cat([functional.pad(x, (0, 0, 0, -x.shape[0] % align)) for x in UPSTREAM])
            batch = PackedBatch.from_sequences(SEQUENCES, align=align).shard(gpt.pg_collection.cp.rank(), cp)
            upstream = whole.index_select(0, shard_places(padded, gpt.pg_collection.cp.rank(), cp))
            out = run_model(gpt, upstream[None], **packed(SEQUENCES, align))
            assert out is not None
            return batch.gather(out[0], gpt.pg_collection.cp), hf_gradients(gpt)

    logits, gradients = expected("qwen3")
    for out, found in run_ranks(tp * cp, run):
        for got, wanted in zip(out.split(padded), logits, strict=True):
            assert far(got[: len(wanted)], wanted) <= 1e-5
        assert_gradients(found, gradients)


def shard_places(padded: list[int], rank: int, size: int) -> Tensor:
    """Where a rank's tokens stand in the whole row, written out: chunks `rank` and `2·size - 1 - rank` of each."""
    places, begin = [], 0
    for length in padded:
        chunk = length // (2 * size)
        for i in (rank, 2 * size - 1 - rank):
            places += range(begin + i * chunk, begin + (i + 1) * chunk)
        begin += length
    return torch.tensor(places)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_packed_with_recomputation(recompute: str) -> None:
    full = {"recompute_method": "uniform", "recompute_num_layers": 1} if recompute == "full" else {}

    def run() -> dict[str, Tensor]:
        reference = hf_model("llama")
        gpt = build_gpt(reference.config, recompute_granularity=recompute, **full).train()
        load_hf_weights(gpt, reference)
        run_model(gpt, torch.cat(UPSTREAM)[None], **packed(SEQUENCES))
        return hf_gradients(gpt)

    assert_gradients(alone(run), expected("llama")[1])


# --- padded rows (BSHD) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_rows_equal_each_sequence_alone(side: str) -> None:
    columns = max(LENGTHS)
    keep = torch.arange(columns) < torch.tensor(LENGTHS)[:, None]
    keep = keep if side == "right" else keep.flip(1)
    positions = (keep.cumsum(1) - 1).clamp(min=0)

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        reference = hf_model("qwen3")
        gpt = build_gpt(reference.config).eval()
        load_hf_weights(gpt, reference)
        ids, upstream = torch.zeros(keep.shape, dtype=torch.int64), torch.zeros(*keep.shape, 128)
        ids[keep], upstream[keep] = torch.cat(SEQUENCES), torch.cat(UPSTREAM)
        # Under a causal mask what is padded right is out of sight; what is padded left must be hidden, and its own
        # rows, in which then nothing is seen, must not give NaN.
        hidden = None if side == "right" else ~keep[:, None, None, :]
        out = run_model(gpt, upstream, input_ids=ids, position_ids=positions, attention_mask=hidden)
        assert out is not None
        return out[keep], hf_gradients(gpt)

    out, found = alone(run)
    logits, gradients = expected("qwen3")
    assert far(out, torch.cat(logits)) <= 2e-6
    assert_gradients(found, gradients)


def test_rows_over_context_parallel_ranks() -> None:
    ids = torch.stack([SEQUENCES[2], SEQUENCES[2].flip(0)])

    def run(rank: int, size: int) -> Tensor:
        with parallel(cp=2):
            reference = hf_model("llama")
            gpt = build_gpt(reference.config).eval()
            load_hf_weights(gpt, reference)
            places = shard_places([12], rank, 2)
            mine = ids[:, places]
            out = run_model(gpt, input_ids=mine, position_ids=places.expand_as(mine), attention_mask=None)
            with pytest.raises(UnsupportedError, match="padded rows under context parallelism"):
                run_model(gpt, input_ids=mine, position_ids=mine, attention_mask=torch.zeros(2, 1, 1, 6).bool())
            assert out is not None
            return out

    with torch.no_grad():
        logits = hf_model("llama")(ids, use_cache=False).logits
    for rank, out in enumerate(run_ranks(2, run)):
        assert far(out, logits[:, shard_places([12], rank, 2)]) <= 1e-5


# --- the module ---------------------------------------------------------------------------------------------------


def core(
    mask: str = "causal",
    window: tuple[int, int] | None = None,
    softmax_scale: float | None = None,
    head: int = 8,
    **changes: Any,
) -> PackedAttention:
    from megatron.core.transformer.enums import AttnMaskType

    read = {
        "kv_channels": head,
        "window_size": window,
        "window_attn_skip_freq": None,
        "softmax_type": "vanilla",
        "attention_dropout": 0.0,
        "sequence_parallel": True,
    }
    config = SimpleNamespace(**{**read, **changes})
    return PackedAttention(config, 1, AttnMaskType[mask], "self", softmax_scale=softmax_scale)


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """One sequence, [L, H, E], in fp64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1).float()


class Packed:
    """What the module reads of PackedSeqParams."""

    qkv_format = "thd"
    cu_seqlens_q_padded = None
    cp_group = None

    def __init__(self, *lengths: int) -> None:
        self.cu_seqlens_q = torch.tensor([0, *lengths]).cumsum(0).int()
        self.max_seqlen_q = max(lengths)


@pytest.mark.parametrize("mask", ["causal", "padding_causal", "no_mask"])
@pytest.mark.parametrize("window", [None, (2, 0), (0, 0), (3, 1), (-1, 0)], ids=str)
def test_masks_and_windows(mask: str, window: tuple[int, int] | None) -> None:
    q, k, v = (torch.randn(11, heads, 8) for heads in (4, 2, 2))
    left, right = window or (-1, -1)
    right = right if mask == "no_mask" else 0

    def seen(n: int) -> Tensor:
        behind = torch.arange(n)[:, None] - torch.arange(n)
        return (behind <= (left if left >= 0 else n)) & (behind >= (-right if right >= 0 else -n))

    module = core(mask, window)
    thd = module(q, k, v, packed_seq_params=Packed(7, 0, 4))
    rows = module(*(x[:7, None] for x in (q, k, v)), None)[:, 0]
    first, second = by_hand(q[:7], k[:7], v[:7], seen(7)), by_hand(q[7:], k[7:], v[7:], seen(4))
    assert far(thd, torch.cat((first, second))) <= 1e-6
    assert far(rows, first) <= 1e-6


def test_a_padding_token_that_sees_nothing_sees_itself() -> None:
    q, k, v = (torch.randn(5, 1, heads, 8) for heads in (4, 2, 2))
    hidden = torch.tensor([True, True, False, False, False])[None, None, None]
    out = core()(q, k, v, hidden)
    assert torch.equal(out[:2, 0], v[:2, 0].repeat_interleave(2, 1).flatten(1))
    assert far(out[2:, 0], by_hand(q[2:, 0], k[2:, 0], v[2:, 0], torch.ones(3, 3).tril().bool())) <= 1e-6


def test_lengths_that_do_not_add_up() -> None:
    q = torch.randn(11, 4, 8)
    with pytest.raises(InvalidInputError, match=r"add up to 10 queries and 10 keys on this rank, but there are 11"):
        core()(q, q, q, packed_seq_params=Packed(7, 3))


def test_what_it_does_not_compute() -> None:
    q = torch.randn(3, 1, 4, 8)
    with pytest.raises(UnsupportedError, match="attention_bias"):
        core()(q, q, q, attention_bias=torch.zeros(1))
    with pytest.raises(UnsupportedError, match="got 'padding' without an attention_mask"):
        core("padding")(q, q, q)
    with pytest.raises(UnsupportedError, match="softmax_type: got 'off-by-one', expected 'vanilla'"):
        core(softmax_type="off-by-one")


def test_dropout_only_in_training() -> None:
    q = torch.randn(11, 4, 8)
    module = core(attention_dropout=0.5)
    call = {"packed_seq_params": Packed(7, 4)}
    without = core()(q, q, q, **call)
    assert torch.equal(without, module.eval()(q, q, q, **call))
    assert not torch.allclose(without, module.train()(q, q, q, **call))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_draws_from_the_ranks_own_generator(sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without sequence parallelism the ranks run on one seed, and hold different heads."""
    forks = []

    class Tracker:
        @contextmanager
        def fork(self) -> Iterator[None]:
            forks.append(True)
            yield

    monkeypatch.setattr("megatron.core.tensor_parallel.get_cuda_rng_tracker", Tracker)
    q = torch.randn(11, 4, 8)
    module = core(attention_dropout=0.5, sequence_parallel=sequence_parallel)
    module(q, q, q, packed_seq_params=Packed(11))
    assert forks == ([] if sequence_parallel else [True])


# --- torch's varlen kernel ----------------------------------------------------------------------------------------


class Kernel:
    """Stands in for `varlen_attn` as each version of torch has it, on the CPU; refuses what that version would."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *longest: int, **options: Any
    ) -> Any:
        self.calls.append(options)
        assert cu_q.dtype == torch.int32
        assert longest == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        assert q.shape[1] == k.shape[1] or options.pop("enable_gqa")
        q = q * (options.pop("scale", q.shape[-1] ** -0.5) * math.sqrt(q.shape[-1]))
        left, right = options.pop("window_size", (-1, 0 if options.pop("is_causal", False) else -1))
        assert not options
        outs = []
        for (a, b), (c, d) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
            behind = torch.arange(d - c - (b - a), d - c)[:, None] - torch.arange(d - c)
            seen = (behind <= left if left >= 0 else behind <= d) & (behind >= -right if right >= 0 else behind >= -d)
            outs.append(by_hand(q[a:b], k[c:d], v[c:d], seen))
        return torch.cat(outs).unflatten(-1, (q.shape[1], -1))

    @property
    def parameters(self) -> frozenset[str]:
        own = {10: {"is_causal"}, 11: {"window_size", "scale"}, 12: {"window_size", "scale", "enable_gqa"}}
        return frozenset(own[self.version])


@pytest.mark.parametrize("version", [10, 11, 12])
@pytest.mark.parametrize("softmax_scale", [None, 0.3])
def test_the_kernel_is_given_what_its_version_takes(
    version: int, softmax_scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (torch.randn(11, heads, 8) for heads in (4, 2, 2))
    module, kernel = core(softmax_scale=softmax_scale), Kernel(version)
    expected = module(q, k, v, packed_seq_params=Packed(7, 4))
    monkeypatch.setattr(attention_module, "_takes_varlen", lambda *_: True)
    monkeypatch.setattr(attention_module, "_varlen_attn", lambda: (kernel, kernel.parameters))
    assert far(module(q, k, v, packed_seq_params=Packed(7, 4)), expected) <= 1e-5
    assert len(kernel.calls) == 1


@pytest.mark.parametrize(
    ("takes", "change"),
    [
        (True, {}),
        (False, {"is_cuda": False}),
        (False, {"dtype": torch.float32}),
        (False, {"shape": (5, 4, 512)}),
        (False, {"shape": (5, 4, 12)}),
        (False, {"window": (3, 0)}),
    ],
    ids=str,
)
def test_when_the_kernel_is_taken(takes: bool, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    class Query:
        is_cuda = change.get("is_cuda", True)
        dtype = change.get("dtype", torch.bfloat16)
        shape = change.get("shape", (5, 4, 8))

    query: Any = Query()
    kernel = Kernel(10)
    monkeypatch.setattr(attention_module, "_varlen_attn", lambda: (kernel, kernel.parameters))
    assert attention_module._takes_varlen(query, query, change.get("window")) is takes
    monkeypatch.setattr(attention_module, "_varlen_attn", lambda: None)
    assert attention_module._takes_varlen(query, query, None) is False


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, (3, 0)], ids=str)
def test_the_kernel_equals_sdpa(window: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module, sizes = core(window=window, head=64), Packed(100, 7, 193)
    given = [torch.randn(300, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2)]
    upstream = torch.randn(300, 512, dtype=torch.bfloat16, device="cuda")

    def run(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        out = module(*leaves, packed_seq_params=sizes)
        return [out.detach().float(), *(x.float() for x in torch.autograd.grad(out, leaves, upstream.to(dtype)))]

    fused = run(torch.bfloat16)
    monkeypatch.setattr(attention_module, "_varlen_attn", lambda: None)
    plain, truth = run(torch.bfloat16), run(torch.float32)
    for by_kernel, by_sdpa, true in zip(fused, plain, truth, strict=True):
        assert far(by_kernel, true) <= 2 * far(by_sdpa, true)
