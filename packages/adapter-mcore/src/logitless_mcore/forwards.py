"""The reference design's forwards: pack, run a Megatron model, unpack; by its logits, or fused, without any.

Every function returns, on a pipeline stage that is not the last, the raw stage tensor. The fused ones examine a model
at its first call (see `examine`), so that call is made on every rank of the model's groups.

Shape suffixes: B sequences, S columns, j ragged, P packed tokens of this rank, S' columns of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from logitless import PackedBatch
from logitless.errors import InvalidInputError, UnsupportedError
from logitless.types import STATS
from logitless_mcore.arguments import check_places, check_rows
from logitless_mcore.arrangement import IGNORE_INDEX, Arrangement, Layout, Ranks, arrange, as_batch, as_rows
from logitless_mcore.capture import is_last_stage, language_model, run_scored, unwrapped
from logitless_mcore.examine import examined
from logitless_mcore.head import Asked, Scored, score, vocab_size_of
from logitless_mcore.prediction import Ahead, own_logits, without_prediction
from logitless_mcore.vision import images_of, vision_rows

__all__ = [
    "fused_forward_model_gen",
    "fused_gptmodel_forward_no_padding",
    "gptmodel_forward_no_padding",
    "model_forward_gen",
]

Processor = Callable[..., Mapping[str, Tensor]]


# --- what the model is called with -----------------------------------------------------------------------------------


def _rows_for(model: Any, input_ids: Tensor, attention_mask: Tensor, data_format: str) -> Arrangement:
    """The arrangement of padded rows that the model takes."""
    check_rows(input_ids, attention_mask)
    return _arranged_for(model, as_rows(attention_mask), None, data_format)


def _nested_for(model: Any, input_ids: Tensor, data_format: str) -> Arrangement:
    """The arrangement of nested ids that the model takes."""
    batch, offsets = as_batch(input_ids)
    check_places("input_ids", input_ids, input_ids, integers=True)
    return _arranged_for(model, batch, offsets, data_format)


def _arranged_for(model: Any, batch: PackedBatch, offsets: Tensor | None, data_format: str) -> Arrangement:
    config = getattr(unwrapped(model), "config", None)
    fp8 = getattr(config, "fp8", None)
    if data_format not in ("thd", "bshd"):
        raise InvalidInputError(f"data_format: got {data_format!r}, expected 'thd' or 'bshd'")
    if data_format == "bshd" and fp8:
        raise UnsupportedError("data_format: got 'bshd' for a model in fp8, expected 'thd'")
    layout: Layout = "bshd" if data_format == "bshd" else "thd"
    sequence_parallel = bool(getattr(config, "sequence_parallel", False))
    return arrange(
        batch,
        layout,
        Ranks.of(language_model(model)),
        sequence_parallel=sequence_parallel,
        fp8=fp8 in ("e4m3", "hybrid"),
        offsets=offsets,
    ).occupied()


def _inputs(
    arrangement: Arrangement, input_ids: Tensor, position_ids: Tensor | None, vision: Mapping[str, Any]
) -> dict[str, Any]:
    """Keywords of a model's forward; a language model needs no mask: under a causal one, padding comes too late."""
    positions = arrangement.shaped(arrangement.batch.position_ids)
    if position_ids is not None:
        check_places("position_ids", position_ids, input_ids)
        positions = arrangement.pack(position_ids, name="position_ids")
    inputs = {"input_ids": arrangement.pack(input_ids), "attention_mask": None, "position_ids": positions, **vision}
    if arrangement.params is not None:
        inputs["packed_seq_params"] = arrangement.params
    return inputs


def _looks_ahead(mtp_config: Any) -> bool:
    return mtp_config is not None and bool(mtp_config.enable_train)


# --- by logits -------------------------------------------------------------------------------------------------------


def _pack_all(
    arrangement: Arrangement, input_ids: Tensor, arguments: Mapping[str, Any] | None, shifted: tuple[str, ...]
) -> dict[str, Any]:
    packed = {}
    for key, x in (arguments or {}).items():
        packed[key] = x
        if isinstance(x, Tensor) and x.ndim > 1:
            name = f"logits_processor_args[{key!r}]"
            check_places(name, x, input_ids, more=None)
            packed[key] = arrangement.pack(x, "token" if key in shifted else "prediction", name=name)
    return packed


def _logits_forward(
    model: Any,
    arrangement: Arrangement,
    inputs: Mapping[str, Any],
    logits_processor: Processor | None,
    arguments: Mapping[str, Any],
    value_model: bool,
) -> Any:
    inner = language_model(model)
    with own_logits(inner) if "labels" in inputs else without_prediction(inner):
        output = model(**inputs)
    if not is_last_stage(model):
        return output
    if logits_processor is not None:
        processed = logits_processor(output, **arguments)
        return {name: arrangement.unpack(x) for name, x in processed.items()}
    if value_model and output.shape[-1] != 1:
        raise InvalidInputError(
            f"value_model: got True for a model whose output layer gives {output.shape[-1]} numbers for each token, "
            "expected 1; call to_value_model(model) before it is wrapped, or leave value_model out"
        )
    unpacked = arrangement.unpack(output)
    return unpacked.squeeze(-1) if value_model else unpacked  # indexing a nested tensor fails in its backward


def model_forward_gen(vision_model: bool = False) -> Callable[..., Any]:
    """A forward over padded rows [B, S], by the model's logits."""

    def model_forward(
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None,
        multi_modal_inputs: Mapping[str, Any] | None,
        logits_processor: Processor | None = None,
        logits_processor_args: Mapping[str, Any] | None = None,
        value_model: bool = False,
        data_format: str = "thd",
        mtp_config: Any = None,
    ) -> Any:
        """Run the model on packed or padded rows, and bring its output back to [B, S, ...].

        Args:
            model: a Megatron model, wrapped or not.
            input_ids: [B, S].
            attention_mask: [B, S] of 0 and 1, padded left, right or with holes.
            position_ids: [B, S], or None to count from 0 in each sequence. Rotary embeddings count by themselves, and
                so does a vision model, whatever is given.
            multi_modal_inputs: any of pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, in the order
                of the rows; or None.
            logits_processor: `logits_processor(output, **packed args) -> dict`, whose values are brought back.
            logits_processor_args: tensors [B, S, ...] that are packed for it; anything else is passed as it is.
            value_model: drop the output's last dimension, which must be of size 1. With a processor it is not read.
            data_format: "thd" runs one packed row, "bshd" rows aligned left.
            mtp_config: with a true `enable_train`, the last stage gets `label` and `label_mask` of the processor's
                arguments as `labels` and `loss_mask`, and trains its multi-token prediction heads with them; the output
                stays its logits. Otherwise those heads do not run.

        Returns:
            [B, S, ...], 0 where the mask is 0; a dict of them with a processor; or the raw stage tensor.
        """
        arrangement = _rows_for(model, input_ids, attention_mask, data_format)
        images = images_of(model, multi_modal_inputs, input_ids.device)
        inputs = _inputs(arrangement, input_ids, None if vision_model else position_ids, images)
        if vision_model:
            inputs |= vision_rows(arrangement, input_ids, attention_mask)
        given = logits_processor_args or {}
        arguments = _pack_all(arrangement, input_ids, given, shifted=())
        if _looks_ahead(mtp_config) and is_last_stage(model):
            check_places("logits_processor_args['label']", given.get("label"), input_ids, integers=True)
            check_places("logits_processor_args['label_mask']", given.get("label_mask"), input_ids)
            inputs |= {"labels": arguments["label"], "loss_mask": arguments["label_mask"]}
        return _logits_forward(model, arrangement, inputs, logits_processor, arguments, value_model)

    return model_forward


def gptmodel_forward_no_padding(
    model: Any,
    input_ids: Tensor,
    multi_modal_inputs: Mapping[str, Any] | None,
    logits_processor: Processor | None = None,
    logits_processor_args: Mapping[str, Any] | None = None,
    value_model: bool = False,
    vision_model: bool = False,
    pad_token_id: int | None = None,
    data_format: str = "thd",
) -> Any:
    """As `model_forward_gen()`'s forward, over nested tensors [B, j].

    Of the processor's arguments, the one named `label` is shifted: each place gets the next token of its sequence, and
    0 after the last. A vision model needs `pad_token_id`.
    """
    arrangement = _nested_for(model, input_ids, data_format)
    inputs = _inputs(arrangement, input_ids, None, images_of(model, multi_modal_inputs, input_ids.device))
    if vision_model:
        inputs |= vision_rows(arrangement, input_ids, None, pad_token_id)
    arguments = _pack_all(arrangement, input_ids, logits_processor_args, shifted=("label",))
    return _logits_forward(model, arrangement, inputs, logits_processor, arguments, value_model)


# --- fused -----------------------------------------------------------------------------------------------------------


def _check_temperature(temperature: Any, input_ids: Tensor) -> None:
    """On every stage: one that refused it alone would leave the others waiting. A number is the op's to check."""
    if isinstance(temperature, Tensor):
        check_places("temperature", temperature, input_ids, coarser=True)


def _temperature(arrangement: Arrangement, temperature: Tensor | float) -> Tensor | float:
    """A number, or [s, b] from [B], [B, S] or nested."""
    if not isinstance(temperature, Tensor) or temperature.ndim == 0:
        return temperature
    of: Any = "sequence" if temperature.ndim == 1 else "prediction"
    return arrangement.pack(temperature, of, 1.0, name="temperature").t()


def _fused_forward(
    model: Any,
    arrangement: Arrangement,
    inputs: Mapping[str, Any],
    labels: Tensor,
    temperature: Tensor | float,
    further: Tensor | None,
    **asked: Any,
) -> Any:
    """Scores of labels [1, P] or [B, S'], or K of each in a last dimension, in the caller's layout; or the raw tensor.

    `further`, labels without that dimension, trains multi-token prediction. `asked` are fields of `Asked`.
    """
    if not is_last_stage(model):
        return model(**inputs)
    backend = asked["backend"]
    transform, vocab_size = examined(model, backend), vocab_size_of(model)
    ahead = None
    if further is not None:
        if further.ndim != 2:
            raise InvalidInputError("labels: got several for each place, expected one, to train further heads by")
        ahead = Ahead(language_model(model), transform, vocab_size, backend)
        inputs = {**inputs, "labels": further, "loss_mask": (further != IGNORE_INDEX).float()}
    call = Asked(labels.transpose(0, 1), _temperature(arrangement, temperature), **asked)

    def scored(hidden: Tensor, output_layer: Any, weight: Tensor | None) -> Scored:
        return score(hidden, output_layer, weight, transform, vocab_size, call)

    found: Scored = run_scored(model, inputs, scored, ahead=ahead)
    out = {"log_probs": found.log_probs, "entropy": found.entropy, **(found.stats or {})}
    return {name: arrangement.unpack(x.transpose(0, 1)) for name, x in out.items() if x is not None}


def fused_forward_model_gen(vision_model: bool = False) -> Callable[..., Any]:
    """A forward over padded rows [B, S] that scores labels without logits."""

    def fused_forward_model(
        model: Any,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor,
        labels: Tensor,
        labels_mask: Tensor,
        temperature: Tensor | float,
        multi_modal_inputs: Mapping[str, Any] | None,
        *,
        data_format: str = "thd",
        entropy: bool = True,
        backend: str | None = None,
        mtp_config: Any = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stats: Sequence[str] = (),
    ) -> Any:
        """Log-probabilities and entropies of labels that the caller has shifted.

        Args:
            model: a Megatron model, wrapped or not.
            input_ids: [B, S].
            position_ids: [B, S], or None to count from 0 in each sequence. Rotary embeddings count by themselves, and
                so does a vision model, whatever is given.
            attention_mask: [B, S] of 0 and 1.
            labels: [B, S], the token that each place predicts, or [B, S, K], K to score there. -100 is not scored, and
                costs nothing.
            labels_mask: [B, S]; log_probs are 0 where it is false, while the entropy there is the model's.
            temperature: a number, or a tensor [B] or [B, S].
            multi_modal_inputs: as for `model_forward_gen`.
            data_format: "thd" runs one packed row, "bshd" rows aligned left.
            entropy: False leaves it out.
            backend: name of a backend; None chooses at each call.
            mtp_config: with a true `enable_train`, the labels that `labels_mask` leaves also train the model's
                multi-token prediction heads: Megatron adds the gradients. Otherwise those heads do not run.
            top_k, top_p, stats: as in `logitless.linear_log_probs`.

        Returns:
            {"log_probs", "entropy"} and the statistics by name, [B, S] nats, 0 where a mask is 0; log_probs, and
            statistics of a label, [B, S, K] for such labels; or the raw stage tensor.
        """
        arrangement = _rows_for(model, input_ids, attention_mask, data_format)
        images = images_of(model, multi_modal_inputs, input_ids.device)
        inputs = _inputs(arrangement, input_ids, None if vision_model else position_ids, images)
        if vision_model:
            inputs |= vision_rows(arrangement, input_ids, attention_mask)
        check_places("labels", labels, input_ids, integers=True, more=1)
        check_places("labels_mask", labels_mask, input_ids)
        _check_temperature(temperature, input_ids)
        unmarked = (labels_mask == 0).view(*labels_mask.shape, *[1] * (labels.ndim - 2))
        unscored = unmarked & (labels != IGNORE_INDEX)  # any token will do
        packed = arrangement.pack(labels.long().masked_fill(unscored, 0), fill=IGNORE_INDEX)
        further = None
        if _looks_ahead(mtp_config):
            further = arrangement.pack(labels.long().masked_fill(unmarked, IGNORE_INDEX), fill=IGNORE_INDEX)
        asked = {"entropy": entropy, "backend": backend, "top_k": top_k, "top_p": top_p, "stats": stats}
        out = _fused_forward(model, arrangement, inputs, packed, temperature, further, **asked)
        if isinstance(out, dict):
            of_labels = {"log_probs", *(name for name in stats if STATS[name])}
            out = {name: x.masked_fill(unmarked, 0.0) if name in of_labels else x for name, x in out.items()}
        return out

    return fused_forward_model


def fused_gptmodel_forward_no_padding(
    model: Any,
    input_ids: Tensor,
    multi_modal_inputs: Mapping[str, Any] | None = None,
    labels: Tensor | None = None,
    labels_mask: Tensor | None = None,
    temperature: Tensor | float = 1.0,
    vision_model: bool = False,
    pad_token_id: int | None = None,
    data_format: str = "thd",
    *,
    entropy: bool = True,
    backend: str | None = None,
    mtp_config: Any = None,
    top_k: int | None = None,
    top_p: float | None = None,
    stats: Sequence[str] = (),
) -> Any:
    """The fused twin of `gptmodel_forward_no_padding`: scores of nested tensors, without logits.

    Args:
        model: a Megatron model, wrapped or not.
        input_ids: nested [B, j].
        multi_modal_inputs: as for `model_forward_gen`.
        labels: nested [B, j] tokens, or [B, j, K], shifted inside, as `label` is there; `input_ids` unless given.
        labels_mask: nested [B, j], of places that predict, as `log_probs` come: 0 is not scored, and costs nothing.
        temperature: a number, or a tensor [B] or nested [B, j].
        vision_model: as in `gptmodel_forward_no_padding`, as is `pad_token_id`.
        pad_token_id: for a vision model.
        data_format: "thd" runs one packed row, "bshd" rows.
        entropy: False leaves it out.
        backend: name of a backend; None chooses at each call.
        mtp_config: as in `fused_forward_model_gen`'s forward, with the labels that are scored.
        top_k, top_p, stats: as in `logitless.linear_log_probs`.

    Returns:
        {"log_probs", "entropy"} and the statistics by name, nested [B, j] (or [B, j, K]) nats; at t of the token after
        t; 0 at each sequence's last place, and where nothing is scored. Or the raw stage tensor.
    """
    arrangement = _nested_for(model, input_ids, data_format)
    inputs = _inputs(arrangement, input_ids, None, images_of(model, multi_modal_inputs, input_ids.device))
    if vision_model:
        inputs |= vision_rows(arrangement, input_ids, None, pad_token_id)
    _check_temperature(temperature, input_ids)
    labels = input_ids if labels is None else labels
    check_places("labels", labels, input_ids, integers=True, more=1)
    packed = arrangement.pack(labels, "token", IGNORE_INDEX, name="labels").long()
    if labels_mask is not None:
        check_places("labels_mask", labels_mask, input_ids)
        unmarked = arrangement.pack(labels_mask, name="labels_mask") == 0
        packed = packed.masked_fill(unmarked.view(*unmarked.shape, *[1] * (packed.ndim - 2)), IGNORE_INDEX)
    further = packed if _looks_ahead(mtp_config) else None
    asked = {"entropy": entropy, "backend": backend, "top_k": top_k, "top_p": top_p, "stats": stats}
    return _fused_forward(model, arrangement, inputs, packed, temperature, further, **asked)
