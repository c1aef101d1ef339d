"""What the reference design's forwards are called with: what does not fit is told by its name, before a model runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_cpu import alone, build_gpt, hf_config
from torch import Tensor, nn

from logitless.errors import InputTypeError, InvalidInputError
from logitless_mcore import (
    fused_forward_model_gen,
    fused_gptmodel_forward_no_padding,
    gptmodel_forward_no_padding,
    model_forward_gen,
    postprocess_bshd,
    postprocess_bshd_no_padding,
    postprocess_packed_seqs,
    preprocess_bshd,
    preprocess_packed_seqs,
)

IDS = torch.arange(14).view(2, 7)
ONES = torch.ones_like(IDS)
LAST = {"labels": IDS, "labels_mask": ONES, "temperature": 1.0}


def jagged(*lengths: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(n, dtype=dtype) for n in lengths], layout=torch.jagged)


class Stage(nn.Module):
    """Returns what a stage hands on; it must not run where a call is refused."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(sequence_parallel=False, fp8=None)
        self.pre_process, self.post_process, self.ran = True, last, 0

    def forward(self, input_ids: Tensor, **call: Any) -> Tensor:
        self.ran += 1
        self.call = call
        return input_ids.float()[..., None]


def rows(model: Any, data_format: str, **changed: Any) -> Any:
    named = {"input_ids": IDS, "position_ids": None, "attention_mask": ONES, **LAST, **changed}
    return fused_forward_model_gen()(model, multi_modal_inputs={}, data_format=data_format, **named)


def nested(model: Any, data_format: str, **changed: Any) -> Any:
    named = {"input_ids": jagged(7, 5), **changed}
    return fused_gptmodel_forward_no_padding(model, data_format=data_format, **named)


def refused(call: Any, error: type[Exception], start: str, *args: Any, **changed: Any) -> None:
    model = Stage()
    with pytest.raises(error) as caught:
        call(model, *args, **changed)
    assert str(caught.value).startswith(start), caught.value
    assert not model.ran


ROWS: list[tuple[str, Any, type[Exception], str]] = [
    ("input_ids", None, InputTypeError, "got None, expected a tensor [B, S]"),
    ("input_ids", jagged(7, 5), InvalidInputError, "got nested shape (2, j"),
    ("input_ids", IDS[0], InvalidInputError, "got shape (7,), expected a tensor [B, S]"),
    ("input_ids", IDS.float(), InputTypeError, "got dtype torch.float32, expected integers"),
    ("attention_mask", None, InputTypeError, "got None, expected a tensor (2, 7), a value for each place"),
    ("attention_mask", ONES[:1], InvalidInputError, "got shape (1, 7), expected a tensor (2, 7)"),
    ("attention_mask", ONES[..., None], InvalidInputError, "got shape (2, 7, 1), expected a tensor (2, 7)"),
    ("attention_mask", ONES * 2, InvalidInputError, "got values other than 0 and 1"),
    ("position_ids", IDS[:, :5], InvalidInputError, "got shape (2, 5), expected a tensor (2, 7)"),
    ("labels", None, InputTypeError, "got None, expected a tensor (2, 7) or (2, 7, K)"),
    ("labels", IDS[:1], InvalidInputError, "got shape (1, 7), expected a tensor (2, 7) or (2, 7, K)"),
    ("labels", IDS[:, :5], InvalidInputError, "got shape (2, 5), expected a tensor (2, 7)"),
    ("labels", IDS.view(2, 7, 1, 1), InvalidInputError, "got shape (2, 7, 1, 1), expected a tensor (2, 7)"),
    ("labels", IDS + 0.9, InputTypeError, "got dtype torch.float32, expected integers"),
    ("labels", ONES.bool(), InputTypeError, "got dtype torch.bool, expected integers"),
    ("labels", IDS.to("meta"), InvalidInputError, "is on meta, input_ids on cpu"),
    ("labels_mask", None, InputTypeError, "got None, expected a tensor (2, 7), a value for each place"),
    ("labels_mask", ONES.tolist(), InputTypeError, "got list, expected a tensor (2, 7)"),
    ("labels_mask", ONES[:1], InvalidInputError, "got shape (1, 7), expected a tensor (2, 7)"),
    ("labels_mask", ONES[:, :5], InvalidInputError, "got shape (2, 5), expected a tensor (2, 7)"),
    ("labels_mask", jagged(7, 7), InvalidInputError, "got nested shape (2, j"),
    ("temperature", torch.ones(3), InvalidInputError, "got shape (3,), expected a number, a tensor (2,)"),
    ("temperature", torch.ones(1, 7), InvalidInputError, "got shape (1, 7), expected a number, a tensor (2,)"),
    ("temperature", torch.ones(2, 1), InvalidInputError, "got shape (2, 1), expected a number, a tensor (2,)"),
]
NESTED: list[tuple[str, Any, type[Exception], str]] = [
    ("input_ids", None, InputTypeError, "got NoneType, expected a nested tensor"),
    ("input_ids", IDS, InputTypeError, "got a tensor of layout torch.strided, expected a nested tensor"),
    ("input_ids", jagged(7, 5, dtype=torch.float32), InputTypeError, "got dtype torch.float32, expected integers"),
    ("labels", IDS, InvalidInputError, "got shape (2, 7), expected a nested tensor of layout torch.jagged (2, j)"),
    ("labels", jagged(7), InvalidInputError, "got nested shape (1, j"),
    ("labels", jagged(5, 7), InvalidInputError, "got lengths [5, 7], expected [7, 5]"),
    ("labels", jagged(7, 5, dtype=torch.float32), InputTypeError, "got dtype torch.float32, expected integers"),
    ("labels_mask", ONES, InvalidInputError, "got shape (2, 7), expected a nested tensor"),
    ("labels_mask", jagged(5, 7), InvalidInputError, "got lengths [5, 7], expected [7, 5]"),
    ("labels_mask", torch.nested.nested_tensor([ONES[0], ONES[0, :5]]), InvalidInputError, "got a nested tensor of"),
    ("temperature", torch.ones(3), InvalidInputError, "got shape (3,), expected a number, a tensor (2,)"),
    ("temperature", torch.ones(2, 7), InvalidInputError, "got shape (2, 7), expected a number, a tensor (2,)"),
]


@pytest.mark.parametrize("data_format", ["thd", "bshd"])
@pytest.mark.parametrize(("name", "value", "error", "text"), ROWS)
def test_of_rows(name: str, value: Any, error: type[Exception], text: str, data_format: str) -> None:
    refused(rows, error, f"{name}: {text}", data_format, **{name: value})


@pytest.mark.parametrize("data_format", ["thd", "bshd"])
@pytest.mark.parametrize(("name", "value", "error", "text"), NESTED)
def test_of_nested_tensors(name: str, value: Any, error: type[Exception], text: str, data_format: str) -> None:
    refused(nested, error, f"{name}: {text}", data_format, **{name: value})


@pytest.mark.parametrize("value_model", [False, True])
@pytest.mark.parametrize(("name", "value", "error", "text"), [case for case in ROWS if case[0] not in LAST])
def test_by_logits(name: str, value: Any, error: type[Exception], text: str, value_model: bool) -> None:
    named = {"input_ids": IDS, "attention_mask": ONES, "position_ids": None, "multi_modal_inputs": {}, name: value}
    refused(model_forward_gen(), error, f"{name}: {text}", value_model=value_model, **named)


def test_of_a_processors_arguments() -> None:
    forward, train = model_forward_gen(), SimpleNamespace(enable_train=True)
    of_rows = (IDS, ONES, None, {}, dict)
    for wrong in (IDS[:1], IDS[:, :5], torch.ones(2, 1)):
        text = f"logits_processor_args['label']: got shape {tuple(wrong.shape)}, expected a tensor (2, 7, ...)"
        refused(forward, InvalidInputError, text, *of_rows, {"label": wrong})
    given = (jagged(7, 5), {}, dict)
    text = "logits_processor_args['label']: got lengths [5, 7], expected [7, 5]"
    refused(gptmodel_forward_no_padding, InvalidInputError, text, *given, {"label": jagged(5, 7)})
    refused(gptmodel_forward_no_padding, InvalidInputError, "logits_processor_args['x']", *given, {"x": IDS})
    refused(gptmodel_forward_no_padding, InputTypeError, "input_ids: got NoneType", None, {}, value_model=True)
    for arguments, error in (
        (None, "['label']: got None, expected a tensor (2, 7)"),
        ({"label": IDS}, "['label_mask']: got None, expected a tensor (2, 7)"),
        ({"label": IDS + 0.9, "label_mask": ONES}, "['label']: got dtype torch.float32, expected integers"),
    ):
        model = Stage(last=True)
        with pytest.raises(InputTypeError) as caught:
            forward(model, *of_rows, arguments, mtp_config=train)
        assert str(caught.value).startswith(f"logits_processor_args{error}")
        assert not model.ran


def test_what_fits_runs() -> None:
    for changed in (
        {"labels": IDS.int(), "labels_mask": ONES.bool(), "attention_mask": ONES.float()},
        {"labels": IDS[..., None].expand(2, 7, 3), "temperature": torch.tensor(0.5)},
        {"temperature": torch.ones(2)},
        {"temperature": torch.ones(2, 7, dtype=torch.int64), "position_ids": IDS},
    ):
        assert tuple(rows(Stage(), "thd", **changed).shape) == (1, 14, 1)
    for changed in (
        {"labels": None, "labels_mask": None},  # then labels are input_ids, and every place is scored
        {"labels": jagged(7, 5), "labels_mask": jagged(7, 5, dtype=torch.bool)},
        {"temperature": torch.ones(2)},
        {"temperature": jagged(7, 5, dtype=torch.float32)},
    ):
        assert tuple(nested(Stage(), "thd", **changed).shape) == (1, 12, 1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_vision_model_counts_by_itself_whatever_positions_are_given(fused: bool) -> None:
    stage, axes = Stage(), torch.zeros(2, 3, 7, dtype=torch.int64)  # of time, height and width, as its users have them
    if fused:
        fused_forward_model_gen(True)(stage, IDS, axes, ONES, IDS, ONES, 1.0, {})
    else:
        model_forward_gen(True)(stage, IDS, ONES, axes, {})
    assert stage.call["position_ids"] is None


def test_of_the_packing_functions() -> None:
    for call in (
        lambda mask: preprocess_packed_seqs(IDS, mask),
        lambda mask: preprocess_bshd(IDS, mask, IDS),
        lambda mask: postprocess_packed_seqs(IDS, None, mask, 2, 7),
        lambda mask: postprocess_bshd(IDS, mask, ONES, 7),
        lambda mask: postprocess_bshd_no_padding(IDS, mask),
    ):
        with pytest.raises(InputTypeError, match=r"^attention_mask: got NoneType, expected a tensor \[B, S\]"):
            call(None)
    with pytest.raises(InputTypeError, match="^original_attention_mask: got NoneType"):
        postprocess_bshd(IDS, ONES, None, 7)
    with pytest.raises(InvalidInputError, match=r"^input_ids: got \(2, 5\), expected a tensor \(2, 7\)"):
        preprocess_packed_seqs(IDS[:, :5], ONES)
    with pytest.raises(InvalidInputError, match=r"^position_ids: got \(2, 5\), expected a tensor \(2, 7\)"):
        preprocess_bshd(IDS, ONES, IDS[:, :5])


def on_a_last_stage() -> list[str]:
    gpt, found = build_gpt(hf_config()), []
    for forward, changed in (
        (nested, {"temperature": jagged(5, 7, dtype=torch.float32)}),
        (rows, {"temperature": [1.0, 1.0]}),
        (rows, {"temperature": torch.ones(2, 1)}),
    ):
        with pytest.raises((InputTypeError, InvalidInputError)) as caught:
            forward(gpt, "thd", **changed)
        found.append(str(caught.value))
    return found


def test_what_the_last_stage_finds_is_told_by_its_name_as_well() -> None:
    lengths, kind, shape = alone(on_a_last_stage)
    assert lengths == "temperature: got lengths [5, 7], expected [7, 5]"
    assert kind.startswith("temperature: got list, expected a positive number")
    assert shape.startswith("temperature: got shape (2, 1), expected a number")
