"""A bound model over packed batches: what `logitless.make_forward` returns for Hugging Face models.

"thd" and "nested" run one row of all tokens. transformers' attention tells the sequences of such a row apart by
positions that restart, if no attention_mask is given and no cache is filled; families differ, so a model is refused
unless two packed sequences score as each does alone.

Shape suffixes: B sequences, S columns, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from logitless import PackedBatch, TokenLogProbs
from logitless.errors import InvalidInputError, UnsupportedError
from logitless.packing import PaddedBatch
from logitless_hf.binding import bind, unbind
from logitless_hf.outputs import CausalLMOutputForPPO
from logitless_hf.probe import probe_tokens, undisturbed

__all__ = ["PackedForward", "make_forward"]

def _check_batch(batch: Any, multi_modal_inputs: Mapping[str, Any] | None) -> None:
    if not isinstance(batch, PackedBatch):
        raise InvalidInputError(f"batch: got {type(batch).__qualname__}, expected a logitless.PackedBatch")
    if batch.shard_of is not None:
        raise UnsupportedError("batch: is a shard; logitless-hf runs whole batches, so call shard() on none of them")
    if multi_modal_inputs:
        raise UnsupportedError(f"multi_modal_inputs: got {', '.join(multi_modal_inputs)}; only text is served yet")


def _one_row(batch: PackedBatch) -> PaddedBatch:
    """All tokens in one row; the mask is true everywhere and must not reach the model."""
    ids = batch.input_ids.unsqueeze(0)
    index = torch.arange(ids.shape[1], device=ids.device)
    labels, positions = batch.labels.unsqueeze(0), batch.position_ids.unsqueeze(-2)
    return PaddedBatch(ids, torch.ones_like(ids, dtype=torch.bool), positions, labels, index)


@dataclass(frozen=True, slots=True)
class PackedForward:
    """The `ForwardFn` of a bound model: scores [T] in batch order, whatever the layout that it runs."""

    model: nn.Module
    layout: str

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
    ) -> CausalLMOutputForPPO:
        """As `logitless.ForwardFn`; `loss_fn` gets indices of batch order, and has no use for `keep_bytes`."""
        _check_batch(batch, multi_modal_inputs)
        rows = batch.to_padded() if self.layout == "bshd" else _one_row(batch)
        mask = {"attention_mask": rows.attention_mask.long()} if self.layout == "bshd" else {}
        if isinstance(temperature, Tensor) and temperature.ndim:
            temperature = rows.to_rows(temperature, 1.0)

        def by_packed_index(scores: TokenLogProbs, index: Tensor) -> Tensor:
            assert loss_fn is not None
            return loss_fn(scores, rows.packed_index(index))

        out: CausalLMOutputForPPO = self.model(
            input_ids=rows.input_ids,
            position_ids=rows.position_ids,
            shift_labels=rows.labels,
            use_cache=False,
            return_log_probs=True,
            temperature=temperature,
            entropy=entropy,
            entropy_grad=entropy_grad,
            loss_fn=None if loss_fn is None else by_packed_index,
            keep_bytes=keep_bytes,
            **mask,
        )
        for name in ("log_probs", "entropy"):
            scores = getattr(out, name)
            if scores is not None:
                setattr(out, name, rows.to_packed(scores))
        return out


@torch.no_grad()
def _check_packing(model: nn.Module) -> None:
    """Refuse a model whose packed sequences see one another."""
    forward, tokens = PackedForward(model, "thd"), probe_tokens(model).flatten()
    parts = [tokens[:5], tokens[5:]]
    with undisturbed(model):
        for module in model.modules():
            module.training = False
        together = forward(PackedBatch.from_sequences(parts)).log_probs
        alone = [forward(PackedBatch.from_sequences([part])).log_probs for part in parts]
    assert together is not None
    worst = float((together - torch.cat([x for x in alone if x is not None])).abs().max())
    tolerance = 1e-3 + 32 * torch.finfo(next(model.parameters()).dtype).eps
    if not worst <= tolerance:
        raise UnsupportedError(
            f"{type(model).__qualname__}: two sequences packed in one row score {worst:.3g} nats off what each scores "
            f"alone, so its attention does not tell them apart by position_ids; use layout='bshd'"
        )


def make_forward(model: nn.Module, layout: str, backend: str | None) -> PackedForward:
    """Bind the model and return it as a `ForwardFn` over `PackedBatch`es; `logitless_hf.unbind` undoes it.

    Args:
        model: a transformers causal language model, or a PeftModel.
        layout: "thd" runs one row without padding; "nested" is the same, since a jagged tensor's values are that row;
            "bshd" runs right-padded rows.
        backend: name of a backend; None chooses at each call.

    Raises:
        InvalidInputError: another layout.
        UnsupportedError: the head is not understood, or packed sequences would see one another.
    """
    if layout not in ("thd", "bshd", "nested"):
        raise InvalidInputError(f"layout: got {layout!r}, expected 'thd', 'bshd' or 'nested'")
    bind(model, backend)
    if layout != "bshd":
        try:
            _check_packing(model)
        except UnsupportedError:
            unbind(model)
            raise
    return PackedForward(model, layout)
