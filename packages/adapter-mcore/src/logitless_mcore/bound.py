"""A Megatron model over packed batches: what `logitless.make_forward` returns for it.

Shape suffixes: T packed tokens of the batch as it was given, B sequences, s by b the grid of tokens that a model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from logitless import PackedBatch, TokenLogProbs
from logitless.collectives import all_reduce_max
from logitless.errors import InvalidInputError, UnsupportedError
from logitless_mcore.arrangement import IGNORE_INDEX, Arrangement, Ranks, arrange, ramp
from logitless_mcore.balance import balance_of
from logitless_mcore.capture import is_last_stage, language_model, run_scored, unwrapped
from logitless_mcore.contiguous import Exchange, cut
from logitless_mcore.examine import examined
from logitless_mcore.head import Asked, Scored, score, vocab_size_of
from logitless_mcore.mrope import MultimodalRotary
from logitless_mcore.outputs import CausalLMOutputForPPO
from logitless_mcore.prediction import Ahead, depth_of, without_prediction
from logitless_mcore.value_head import is_value_model
from logitless_mcore.vision import batch_inputs, takes_images

__all__ = ["McoreForward", "make_forward"]


def _check_batch(batch: Any, layout: str, ranks: Ranks) -> None:
    if not isinstance(batch, PackedBatch):
        raise InvalidInputError(f"batch: got {type(batch).__qualname__}, expected a logitless.PackedBatch")
    wanted = (ranks.cp_rank, ranks.cp) if ranks.cp > 1 else None
    if (batch.shard_of and batch.shard_of[:2]) != wanted:
        what = f"shard{(*wanted, 'zigzag')}" if wanted else "a whole batch"
        raise InvalidInputError(
            f"batch: got {f'shard{batch.shard_of}' if batch.shard_of else 'a whole batch'}, expected {what} for this "
            f"model's context parallelism of {ranks.cp}"
        )
    if wanted and layout == "bshd":
        raise UnsupportedError("layout: got 'bshd' with context parallelism, expected 'thd' or 'nested'")
    if wanted and any(length % ranks.align for length in batch.padded_lengths):
        raise InvalidInputError(
            f"batch: its padded lengths are {list(batch.padded_lengths)}, expected multiples of {ranks.align}; make "
            f"it with align={ranks.align}, twice tensor times context parallelism"
        )


def _check_positions(model: Any, batch: PackedBatch, ranks: Ranks) -> None:
    """What counts within each sequence by itself, a model of images or a rotary embedding, would lose others.

    Over context parallelism a collective of two numbers for each sequence: a rank that refused alone would leave the
    others waiting, and what one holds of a sequence may count up by itself and still not go on from the other's.
    """
    if takes_images(model):
        if batch.position_ids.ndim > 1:
            return
    elif getattr(language_model(model), "position_embedding_type", None) not in ("rope", "yarn"):
        return
    if batch.position_ids.ndim > 1:
        raise UnsupportedError("batch: its position_ids are for mrope, the model has other rotary embeddings")
    row, counted = ramp(batch.padded_lengths, batch.position_ids.device)
    if batch.shard_of is not None:
        row, counted = cut(torch.stack([row, counted], 1), batch).unbind(1)
    # Rotary embeddings are relative: any shift will do, if it is the same for all tokens of a sequence.
    shift = batch.position_ids - counted
    # Of each sequence the largest, and the smallest times −1: one collective finds both.
    most = shift.new_zeros(2, len(batch.padded_lengths)).scatter_reduce(
        1, row.expand(2, -1), torch.stack([shift, -shift]), "amax", include_self=False
    )
    if batch.shard_of is not None:
        all_reduce_max(most, ranks.cp_group)
    if not torch.equal(most[0], -most[1]):
        raise UnsupportedError(
            "batch: its position_ids do not count up by one within each sequence, and this model's rotary embeddings "
            "do; leave position_ids out"
        )


@dataclass(frozen=True, slots=True)
class McoreForward:
    """The `ForwardFn` of a Megatron model: scores [T] of this rank's tokens in batch order, whatever the layout.

    A model of images takes `multi_modal_inputs`: its forward's own keywords (`pixel_values`, `image_grid_thw`, ...), of
    all sequences of the batch in their order, also over context parallelism.

    Nothing about the model is changed between calls, so there is nothing to undo. Every rank of the model's groups
    calls it alike; data-parallel ranks have batches of their own.

    Attributes:
        model: wrapped or not; any pipeline stage.
        layout: "thd", "nested" (the same: a jagged tensor's values are that row) or "bshd".
        backend: name of a backend; None chooses at each call.
    """

    model: nn.Module
    layout: str = "thd"
    backend: str | None = None

    def __call__(
        self,
        batch: PackedBatch,
        *,
        temperature: Tensor | float = 1.0,
        entropy: bool = True,
        entropy_grad: bool = True,
        loss_fn: Callable[[TokenLogProbs, Tensor], Tensor] | None = None,
        keep_bytes: int = 0,
        multi_modal_inputs: Mapping[str, Any] | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        stats: Sequence[str] = (),
        labels: Tensor | None = None,
        mtp: bool = False,
    ) -> Any:
        """As `logitless.ForwardFn`; a stage that is not the last returns its raw tensor, a value model `values`.

        With `mtp`, the batch's labels also train the model's multi-token prediction heads, at temperature 1 and with
        the weight of its configuration, whatever `labels` are given to be scored: Megatron adds the gradients to those
        of what is returned. Without, those heads do not run.
        """
        inner = language_model(self.model)
        ranks = Ranks.of(inner)
        _check_batch(batch, self.layout, ranks)
        plain: dict[str, Any] = {"entropy": entropy, "entropy_grad": entropy_grad, "keep_bytes": keep_bytes}
        plain |= {"top_k": top_k, "top_p": top_p, "stats": stats}
        if batch.shard_of is not None and batch.shard_of[2] == "contiguous":
            if loss_fn is not None:
                raise UnsupportedError(
                    "loss_fn: got one for a contiguous shard, whose tokens other ranks score too; shard it zigzag"
                )
            swap = Exchange.of(batch, ranks.cp_group)
            of_tokens = {n: swap.inward(n, x) for n, x in (("temperature", temperature), ("labels", labels))}
            out = self(swap.run, **of_tokens, multi_modal_inputs=multi_modal_inputs, mtp=mtp, **plain)
            return swap.outward(out) if is_last_stage(self.model) else out
        _check_positions(self.model, batch, ranks)
        run = _arranged(batch, self.layout, ranks, bool(inner.config.sequence_parallel), inner.config.fp8)
        inputs = _inputs(self.model, run, batch, multi_modal_inputs)
        if not is_last_stage(self.model):
            return self.model(**inputs)
        places = _places(batch, run)
        if is_value_model(self.model):
            for name, asked_for in {"loss_fn": loss_fn, "stats": stats, "top_k": top_k, "top_p": top_p}.items():
                if asked_for:
                    raise InvalidInputError(
                        f"{name}: got some for a value model, which has no distribution; use its values"
                    )
            with without_prediction(inner), balance_of(inner) as balance:
                values = self.model(**inputs)
            return CausalLMOutputForPPO(values=_home(values.squeeze(-1).t(), places), aux_loss=balance.loss())
        asked = Asked(
            _grid(run, run.batch.labels).t() if labels is None else _grid_of_labels(run, batch, places, labels),
            _grid_of_temperature(run, batch, places, temperature),
            loss_fn=None if loss_fn is None else _by_batch_index(loss_fn, places, run),
            backend=self.backend,
            **plain,
        )
        return self._scored(inputs, run, places, asked, mtp)

    def _scored(
        self, inputs: dict[str, Any], run: Arrangement, places: Tensor, asked: Asked, mtp: bool
    ) -> CausalLMOutputForPPO:
        inner = language_model(self.model)
        transform, vocab_size = examined(self.model, self.backend), vocab_size_of(self.model)

        def scored(hidden: Tensor, output_layer: Any, weight: Tensor | None) -> Scored:
            return score(hidden, output_layer, weight, transform, vocab_size, asked)

        ahead = None
        if mtp:
            if not depth_of(inner):
                raise InvalidInputError("mtp: got True for a model without multi-token prediction layers")
            ahead = Ahead(inner, transform, vocab_size, self.backend)
            further = _grid(run, run.batch.labels)
            inputs |= {"labels": further, "loss_mask": (further != IGNORE_INDEX).float()}
        with balance_of(inner) as balance:
            found: Scored = run_scored(self.model, inputs, scored, ahead=ahead)
        return CausalLMOutputForPPO(
            _home(found.log_probs, places),
            None if found.entropy is None else _home(found.entropy, places),
            loss=found.loss,
            aux_loss=balance.loss(),
            stats=None if found.stats is None else {name: _home(x, places) for name, x in found.stats.items()},
        )


# --- between the batch's order and the grid that the model runs ----------------------------------------------------


def _arranged(batch: PackedBatch, layout: str, ranks: Ranks, sequence_parallel: bool, fp8: Any) -> Arrangement:
    if batch.shard_of is not None:
        if not sum(batch.padded_lengths):
            whole = Arrangement(replace(batch, shard_of=None), "thd", ranks).occupied().batch
            batch = whole.shard(ranks.cp_rank, ranks.cp)
        return Arrangement(batch, "thd", ranks)
    if layout == "bshd":
        return arrange(batch, "bshd", ranks, sequence_parallel=sequence_parallel).occupied()
    return arrange(batch, "thd", ranks, fp8=bool(fp8)).occupied()


def _inputs(
    model: Any, run: Arrangement, batch: PackedBatch, multi_modal_inputs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Keywords of the model's forward."""
    if takes_images(model):
        return batch_inputs(model, run, batch, multi_modal_inputs)
    if multi_modal_inputs:
        raise UnsupportedError(
            f"multi_modal_inputs: got {', '.join(multi_modal_inputs)} for a {type(unwrapped(model)).__qualname__}, "
            "expected a model around a language_model whose forward names pixel_values"
        )
    inputs = {
        "input_ids": _grid(run, run.batch.input_ids),
        "position_ids": _positions(model, run),
        "attention_mask": None,
    }
    return inputs if run.params is None else {**inputs, "packed_seq_params": run.params}


def _has_axes(model: Any) -> bool:
    """Whether its positions are mrope's, of time, height and width."""
    return getattr(language_model(model), "position_embedding_type", None) == "mrope"


def _positions(model: Any, run: Arrangement) -> Tensor:
    """[b, s]; of mrope [3, b, s], over context parallelism of every rank's tokens, as attention cuts their angles."""
    batch = run.batch
    if not _has_axes(model):
        return _grid(run, batch.position_ids)
    axes = batch.position_ids.expand(3, -1) if batch.position_ids.ndim == 1 else batch.position_ids[-3:]
    if batch.shard_of is None:
        return _grid(run, axes)
    whole: Tensor = batch.gather(axes.t(), run.ranks.cp_group).t()
    return whole.unsqueeze(1)


def _grid(run: Arrangement, x: Tensor) -> Tensor:
    """[..., T'] of the arranged batch, or [..., P] of a shard of it, as [..., b, s]."""
    return x.reshape(*x.shape[:-1], *run.shape)


def _places(batch: PackedBatch, run: Arrangement) -> Tensor:
    """[T] where each of the batch's tokens stands in the flattened [s, b] grid."""
    b, s = run.shape
    if batch.shard_of is not None:
        return torch.arange(batch.input_ids.shape[0], device=batch.input_ids.device)
    row, _ = ramp(batch.padded_lengths, batch.input_ids.device)
    shift = (run.batch.cu_seqlens_padded - batch.cu_seqlens_padded).long()[row]
    place = torch.arange(row.shape[0], device=row.device) + shift
    return place if b == 1 else (place % s) * b + place // s


def _home(x: Tensor, places: Tensor) -> Tensor:
    """[s, b, ...] to [T, ...], the batch's own order."""
    return x.flatten(0, 1).index_select(0, places)


def _grid_of(run: Arrangement, places: Tensor, x: Tensor, fill: float) -> Tensor:
    """[T, ...] in the batch's order to [s, b, ...], the way back."""
    b, s = run.shape
    return x.new_full((s * b, *x.shape[1:]), fill).index_copy(0, places, x).view(s, b, *x.shape[1:])


def _grid_of_labels(run: Arrangement, batch: PackedBatch, places: Tensor, labels: Tensor) -> Tensor:
    expected = batch.labels.shape[0]
    if not isinstance(labels, Tensor) or labels.ndim not in (1, 2) or labels.shape[0] != expected:
        got = f"shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__qualname__
        raise InvalidInputError(f"labels: got {got}, expected a tensor ({expected},) or ({expected}, K) in batch order")
    return _grid_of(run, places, labels, IGNORE_INDEX)


def _grid_of_temperature(
    run: Arrangement, batch: PackedBatch, places: Tensor, temperature: Tensor | float
) -> Tensor | float:
    if not isinstance(temperature, Tensor) or temperature.ndim == 0:
        return temperature
    if temperature.shape != batch.labels.shape:
        raise InvalidInputError(
            f"temperature: got shape {tuple(temperature.shape)}, expected a number or {tuple(batch.labels.shape)}"
        )
    return _grid_of(run, places, temperature, 1.0)


def _by_batch_index(
    loss_fn: Callable[[TokenLogProbs, Tensor], Tensor], places: Tensor, run: Arrangement
) -> Callable[[TokenLogProbs, Tensor], Tensor]:
    """The caller's loss, given indices of batch order in place of the grid's."""
    b, s = run.shape
    home = places.new_zeros(s * b).index_copy(0, places, torch.arange(places.shape[0], device=places.device))

    def by_batch_index(scores: TokenLogProbs, index: Tensor) -> Tensor:
        return loss_fn(scores, home.index_select(0, index))

    return by_batch_index


def make_forward(model: nn.Module, layout: str = "thd", backend: str | None = None) -> McoreForward:
    """The `ForwardFn` of a Megatron model; call it on every rank.

    A last stage that predicts tokens is examined here: what it does to its logits is identified, and scores of eight
    tokens are checked against its own logits.

    Args:
        model: a Megatron GPTModel or HybridModel, or a wrapper of one.
        layout: "thd" runs one packed row, "nested" is the same; "bshd" runs rows aligned left.
        backend: name of a backend; None chooses at each call.

    Raises:
        InvalidInputError: another layout.
        UnsupportedError: the head is not understood, rows were asked of a model in fp8, or mrope of Megatron's own over
            context parallelism.
    """
    if layout not in ("thd", "bshd", "nested"):
        raise InvalidInputError(f"layout: got {layout!r}, expected 'thd', 'bshd' or 'nested'")
    if layout == "bshd" and getattr(language_model(model).config, "fp8", None):
        raise UnsupportedError("layout: got 'bshd' for a model in fp8, expected 'thd' or 'nested'")
    rotary = getattr(language_model(model), "rotary_pos_emb", None)
    cut_as_one = _has_axes(model) and not takes_images(model) and not isinstance(rotary, MultimodalRotary)
    if cut_as_one and Ranks.of(language_model(model)).cp > 1:
        raise UnsupportedError(
            f"rotary_pos_emb: got {type(rotary).__qualname__} with context parallelism, for which it cuts packed "
            "sequences as one; give the model logitless_mcore.mrope.MultimodalRotary, with use_mrope of that module"
        )
    if is_last_stage(model) and not is_value_model(model):
        examined(model, backend)
    return McoreForward(model, layout, backend)
