"""The reference design's forwards: their contract on a stand-in, their values on real models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cpu import build_gpt, hf_model, parallel
from oracle import Expected, deviation, expect, load, summed_over_tp
from torch import Tensor, nn

from logitless.errors import InvalidInputError, UnsupportedError
from logitless.testing.distributed import run_ranks
from logitless_mcore import (
    fused_forward_model_gen,
    fused_gptmodel_forward_no_padding,
    gptmodel_forward_no_padding,
    model_forward_gen,
    to_value_model,
)
from logitless_mcore.capture import forward_as

IDS = torch.tensor([[0, 0, 5, 6, 7], [8, 0, 9, 3, 0]])
HOLES = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 1, 0]])
TOLERANCE = 1e-5


class Echo(nn.Module):
    """Records its call, and returns each token's id as an output of `width` columns."""

    def __init__(self, width: int = 2, post_process: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(sequence_parallel=False, fp8=None)
        self.pre_process, self.post_process, self.width = True, post_process, width

    def forward(self, **call: Any) -> Tensor:
        self.call = call
        if not self.post_process:
            return torch.full((3, 1, 4), 2.5)
        return call["input_ids"].float()[..., None].expand(*call["input_ids"].shape, self.width)


def jagged(*parts: Any) -> Tensor:
    return torch.nested.nested_tensor([torch.as_tensor(part) for part in parts], layout=torch.jagged)


# --- the contract -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data_format", ["thd", "bshd"])
def test_output_comes_back_to_its_places(data_format: str) -> None:
    model = Echo()
    out = model_forward_gen()(model, IDS, HOLES, None, {}, data_format=data_format)
    assert torch.equal(out, IDS[..., None].expand(2, 5, 2).float())
    expected = [[5, 6, 7, 8, 9, 3]] if data_format == "thd" else [[5, 6, 7], [8, 9, 3]]
    assert model.call["input_ids"].tolist() == expected
    assert ("packed_seq_params" in model.call) == (data_format == "thd")
    assert model.call["attention_mask"] is None


@pytest.mark.parametrize("data_format", ["thd", "bshd"])
def test_a_processor_sees_packed_arguments_and_its_results_come_back(data_format: str) -> None:
    def processor(output: Tensor, label: Tensor, weight: float) -> dict[str, Tensor]:
        assert output.shape[:2] == label.shape
        return {"sum": output[..., 0] + weight * label, "both": output}

    arguments = {"label": 10 * IDS, "weight": 2.0}
    out = model_forward_gen()(Echo(), IDS, HOLES.bool(), None, {}, processor, arguments, data_format=data_format)
    assert torch.equal(out["sum"], 21.0 * IDS)
    assert torch.equal(out["both"], IDS[..., None].expand(2, 5, 2).float())


@pytest.mark.parametrize("data_format", ["thd", "bshd"])
def test_nested_labels_are_shifted_within_their_sequence(data_format: str) -> None:
    ids = jagged([5, 6, 7], [8], [9, 3])

    def processor(output: Tensor, label: Tensor, other: Tensor) -> dict[str, Tensor]:
        return {"label": label, "other": other, "ids": output[..., 0]}

    arguments = {"label": ids, "other": ids}
    out = gptmodel_forward_no_padding(Echo(), ids, {}, processor, arguments, data_format=data_format)
    assert [part.tolist() for part in out["label"].unbind()] == [[6, 7, 0], [0], [3, 0]]
    assert [part.tolist() for part in out["other"].unbind()] == [[5, 6, 7], [8], [9, 3]]
    assert [part.tolist() for part in out["ids"].unbind()] == [[5, 6, 7], [8], [9, 3]]
    assert out["ids"].offsets() is ids.offsets()


def test_value_models_drop_the_last_dimension() -> None:
    out = model_forward_gen()(Echo(1), IDS, HOLES, None, {}, value_model=True)
    assert torch.equal(out, IDS.float())
    nested = gptmodel_forward_no_padding(Echo(1), jagged([5, 6], [7]), {}, value_model=True)
    assert [part.tolist() for part in nested.unbind()] == [[5.0, 6.0], [7.0]]


def test_a_value_model_of_more_than_one_number_is_refused() -> None:
    message = "value_model: got True .* gives 2 numbers for each token, expected 1; call to_value_model"
    with pytest.raises(InvalidInputError, match=message):
        model_forward_gen()(Echo(2), IDS, HOLES, None, {}, value_model=True)
    with pytest.raises(InvalidInputError, match=message):
        gptmodel_forward_no_padding(Echo(2), jagged([5, 6], [7]), {}, value_model=True)


def test_other_stages_return_their_raw_tensor() -> None:
    ids, stage = jagged([5, 6], [7]), Echo(post_process=False)
    nobody: Any = lambda **_: pytest.fail("a processor ran on a stage without logits")  # noqa: E731
    for out in (
        model_forward_gen()(stage, IDS, HOLES, None, {}, nobody, {}, value_model=True),
        gptmodel_forward_no_padding(stage, ids, {}, nobody, {}, value_model=True),
        fused_forward_model_gen()(stage, IDS, None, HOLES, IDS, HOLES, 1.0, {}),
        fused_gptmodel_forward_no_padding(stage, ids),
    ):
        assert tuple(out.shape) == (3, 1, 4)


@pytest.mark.parametrize("fused", [False, True])
def test_vision_models_get_padded_ids_with_packed_parameters(fused: bool) -> None:
    stage = Echo(post_process=False)
    images = {"pixel_values": torch.ones(4, 3), "image_grid_thw": torch.tensor([[1, 2, 2]]), "unknown": 3}
    if fused:
        fused_forward_model_gen(True)(stage, IDS, HOLES, HOLES, IDS, HOLES, 1.0, images)
    else:
        model_forward_gen(True)(stage, IDS, HOLES, HOLES, images)
    assert stage.call["input_ids"] is IDS
    assert stage.call["attention_mask"] is HOLES
    assert stage.call["position_ids"] is None
    assert stage.call["packed_seq_params"].cu_seqlens_q.tolist() == [0, 3, 6]
    assert stage.call["pixel_values"].shape == (4, 3)
    assert {"pixel_values_videos", "video_grid_thw", "unknown"}.isdisjoint(stage.call)
    ids = jagged([5, 6], [7])
    gptmodel_forward_no_padding(stage, ids, images, vision_model=True, pad_token_id=1)
    assert stage.call["input_ids"].tolist() == [[5, 6], [7, 1]]
    assert stage.call["attention_mask"].tolist() == [[True, True], [True, False]]
    with pytest.raises(InvalidInputError, match="pad_token_id"):
        gptmodel_forward_no_padding(stage, ids, images, vision_model=True)


@pytest.mark.parametrize("nested", [False, True])
def test_vision_models_get_rows_aligned_left_in_bshd(nested: bool) -> None:
    stage = Echo(post_process=False)
    if nested:
        gptmodel_forward_no_padding(
            stage, jagged([5, 6, 7], [8]), {}, vision_model=True, pad_token_id=1, data_format="bshd"
        )
    else:
        model_forward_gen(True)(stage, IDS, HOLES.float(), None, {}, data_format="bshd")
    assert stage.call["input_ids"].tolist() == ([[5, 6, 7], [8, 0, 0]] if nested else [[5, 6, 7], [8, 9, 3]])
    assert stage.call["attention_mask"].tolist() == [[True] * 3, [True, not nested, not nested]]
    assert "packed_seq_params" not in stage.call


def test_multi_token_prediction_gets_its_labels() -> None:
    model, config = Echo(), SimpleNamespace(enable_train=True)

    def processor(output: Tensor, label: Tensor, label_mask: Tensor) -> dict[str, Tensor]:
        return {"x": output}

    arguments = {"label": IDS + 1, "label_mask": HOLES.bool()}
    model_forward_gen()(model, IDS, HOLES, None, {}, processor, arguments, mtp_config=config)
    assert model.call["labels"].tolist() == [[6, 7, 8, 9, 10, 4]]
    assert model.call["loss_mask"].tolist() == [[True] * 6]


def test_positions_are_packed_or_counted() -> None:
    model = Echo()
    model_forward_gen()(model, IDS, HOLES, None, {})
    assert model.call["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2]]
    model_forward_gen()(model, IDS, HOLES, HOLES.cumsum(1) + 3, {})
    assert model.call["position_ids"].tolist() == [[4, 5, 6, 4, 5, 6]]


def test_what_is_refused() -> None:
    forward = model_forward_gen()
    with pytest.raises(InvalidInputError, match="data_format: got 'sbhd'"):
        forward(Echo(), IDS, HOLES, None, {}, data_format="sbhd")
    model = Echo()
    model.config.fp8 = "e4m3"
    with pytest.raises(UnsupportedError, match="fp8"):
        forward(model, IDS, HOLES, None, {}, data_format="bshd")
    with pytest.raises(InvalidInputError, match="no sequence"):
        forward(Echo(), IDS[:0], HOLES[:0], None, {})


# --- values -------------------------------------------------------------------------------------------------------


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 128, (n,), generator=generator) for n in (7, 12, 2, 5)]


def padded() -> tuple[Tensor, Tensor]:
    """Left, right, with holes: where each row's tokens stand."""
    mask = torch.zeros(4, 14, dtype=torch.int64)
    mask[0, 7:] = mask[1, :12] = mask[2, 5] = mask[2, 9] = mask[3, [1, 2, 5, 6, 13]] = 1
    ids = torch.zeros_like(mask)
    ids[mask.bool()] = torch.cat(sequences())
    return ids, mask


def labels_of(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Each place's next token of its row, and the places that have one."""
    labels, places = torch.full_like(ids, 77), torch.zeros_like(mask, dtype=torch.bool)
    for row in range(len(ids)):
        at = mask[row].nonzero()[:, 0]
        labels[row, at[:-1]] = ids[row, at[1:]]
        places[row, at[:-1]] = True
    return labels, places


def loss_and_errors(out: dict[str, Any], expected: Expected) -> tuple[Tensor, float]:
    """Scores at the places that predict, row after row."""
    _, places = labels_of(*padded())
    flat = {
        name: torch.cat([part[:-1] for part in x.unbind()]) if x.is_nested else x[places] for name, x in out.items()
    }
    g, e = (torch.cat(parts) for parts in zip(*expected.upstream, strict=True))
    worst = max(
        float((flat["log_probs"] - torch.cat(expected.log_probs)).abs().max()),
        float((flat["entropy"] - torch.cat(expected.entropy)).abs().max()),
    )
    return (g * flat["log_probs"]).sum() + (e * flat["entropy"]).sum(), worst


def by_logits(gpt: Any, data_format: str, nested: bool) -> dict[str, Any]:
    """What the reference design's users do: log-probs and entropy in a processor, from this rank's logits, gathered."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    def processor(logits: Tensor, label: Tensor) -> dict[str, Tensor]:
        log_p = (gather_from_tensor_model_parallel_region(logits) / 0.9).log_softmax(-1)
        return {
            "log_probs": log_p.gather(-1, label[..., None])[..., 0],
            "entropy": -(log_p.exp() * log_p).sum(-1),
        }

    ids, mask = padded()
    if nested:
        given = jagged(*sequences())
        return gptmodel_forward_no_padding(gpt, given, {}, processor, {"label": given}, data_format=data_format)
    labels, _ = labels_of(ids, mask)
    forward = model_forward_gen()
    return forward(gpt, ids, mask, mask.cumsum(1), {}, processor, {"label": labels}, data_format=data_format)


def fused(gpt: Any, data_format: str, nested: bool) -> dict[str, Any]:
    ids, mask = padded()
    if nested:
        return fused_gptmodel_forward_no_padding(gpt, jagged(*sequences()), temperature=0.9, data_format=data_format)
    labels, places = labels_of(ids, mask)
    temperature = torch.full((4,), 0.9) if data_format == "thd" else torch.full(ids.shape, 0.9)
    forward = fused_forward_model_gen()
    return forward(gpt, ids, mask.cumsum(1), mask, labels, places, temperature, {}, data_format=data_format)


def every_way(rank: int, size: int, hf: Any, expected: Expected, sp: bool) -> dict[str, Any]:
    found = {}
    with parallel(tp=size):
        gpt = load(build_gpt(hf.config, sequence_parallel=sp), hf, True)
        for way in (by_logits, fused):
            for data_format in ("thd", "bshd"):
                for nested in (False, True):
                    gpt.zero_grad()
                    loss, worst = loss_and_errors(way(gpt, data_format, nested), expected)
                    loss.backward()
                    summed_over_tp(gpt)
                    found[way.__name__, data_format, nested] = (worst, *deviation(gpt, expected, True))
    return found


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"])
def test_both_paths_equal_hugging_face_in_every_layout(tp: int, sp: bool) -> None:
    hf = hf_model("qwen3", True)
    expected = expect(hf, sequences(), 0.9)
    for of_rank in run_ranks(tp, every_way, hf, expected, sp):
        assert len(of_rank) == 8
        for key, found in of_rank.items():
            assert max(found[:2]) <= TOLERANCE, (key, found)


def masked(rank: int, size: int, hf: Any) -> None:
    with parallel():
        gpt = load(build_gpt(hf.config), hf, False)
        forward = fused_forward_model_gen()
        ids, mask = padded()
        labels, places = labels_of(ids, mask)
        whole = forward(gpt, ids, None, mask, labels, places, 1.0, {})
        some = places & (torch.arange(14) % 2 == 0)
        wild = labels.masked_fill(~some, 10**6)  # where the mask is false, a label may be anything
        part = forward(gpt, ids, None, mask.bool(), wild, some.float(), 1.0, {})
        assert torch.equal(part["log_probs"], whole["log_probs"].masked_fill(~some, 0.0))
        assert torch.equal(part["entropy"], whole["entropy"])  # as in the reference: of every token
        assert bool((part["entropy"][mask.bool()] > 0).all())
        ignored = forward(gpt, ids, None, mask, labels.masked_fill(~some, -100), some, 1.0, {})
        torch.testing.assert_close(ignored["log_probs"], part["log_probs"], rtol=0, atol=1e-6)
        assert torch.equal(ignored["entropy"] != 0, some)
        nested = fused_gptmodel_forward_no_padding(gpt, jagged(*sequences()), labels_mask=jagged(*sequences()) * 0 + 1)
        torch.testing.assert_close(nested["log_probs"].values(), whole["log_probs"][mask.bool()], rtol=0, atol=1e-6)
        assert set(forward(gpt, ids, None, mask, labels, places, 1.0, {}, entropy=False)) == {"log_probs"}
        nothing = torch.zeros_like(mask)
        for data_format in ("thd", "bshd"):
            zeros = forward(gpt, ids, None, nothing, labels, places, 1.0, {}, data_format=data_format)
            assert all(torch.equal(x, torch.zeros(4, 14)) for x in zeros.values())
            logits = model_forward_gen()(gpt, ids, nothing, None, {}, data_format=data_format)
            assert torch.equal(logits, torch.zeros(4, 14, 128))


def test_masks_of_labels_and_batches_without_a_token() -> None:
    run_ranks(1, masked, hf_model("qwen2"))


def without_logits(rank: int, size: int, hf: Any) -> None:
    with parallel():
        gpt = load(build_gpt(hf.config), hf, False)
        ids = jagged(*sequences())
        fused_gptmodel_forward_no_padding(gpt, ids)  # examined: eight tokens by their logits

        def product(**_: Any) -> Tensor:
            raise AssertionError("the output layer made logits")

        with forward_as(gpt.output_layer, product, "_forward_impl"):
            with pytest.raises(AssertionError, match="made logits"):
                gptmodel_forward_no_padding(gpt, ids, {})
            out = fused_gptmodel_forward_no_padding(gpt, ids)
        assert all(tuple(x.values().shape) == (26,) for x in out.values())


def test_the_fused_path_makes_no_logits() -> None:
    run_ranks(1, without_logits, hf_model("qwen2"))


def values(rank: int, size: int, hf: Any, sp: bool) -> dict[str, list[float]]:
    with parallel(tp=size):
        gpt = to_value_model(load(build_gpt(hf.config, sequence_parallel=sp), hf, True))
        assert not gpt.share_embeddings_and_output_weights  # or Megatron would sum the two's gradients over stages
        with torch.no_grad():
            gpt.output_layer.weight.copy_(torch.linspace(-1, 1, hf.config.hidden_size))
        found = {}
        ids, mask = padded()
        for data_format in ("thd", "bshd"):
            rows = model_forward_gen()(gpt, ids, mask, None, {}, value_model=True, data_format=data_format)
            nested = gptmodel_forward_no_padding(
                gpt, jagged(*sequences()), {}, value_model=True, data_format=data_format
            )
            gpt.zero_grad()
            (rows[mask.bool()].square().sum() + nested.values().square().sum()).backward()
            summed_over_tp(gpt)
            grad = gpt.output_layer.weight.grad
            found[data_format] = [rows[mask.bool()].tolist(), nested.values().tolist(), grad[0].tolist()]
        return found


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2-sp"])
def test_value_models_equal_the_trunk_times_their_head(tp: int, sp: bool) -> None:
    hf = hf_model("qwen2", True)
    trunk = torch.cat([hf.model(input_ids=ids[None]).last_hidden_state[0] for ids in sequences()]).detach()
    expected = trunk @ torch.linspace(-1, 1, hf.config.hidden_size)
    grad = 4 * expected @ trunk
    for of_rank in run_ranks(tp, values, hf, sp):
        for found in of_rank.values():
            rows, nested, own = map(torch.tensor, found)
            torch.testing.assert_close(rows, expected, rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(nested, expected, rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(own, grad, rtol=1e-5, atol=1e-5)
