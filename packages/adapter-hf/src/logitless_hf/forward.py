"""A bound model over packed batches: what `logitless.make_forward` returns for Hugging Face models.

"thd" and "nested" run one row of all tokens. Where the family takes it, attention is within each sequence (see
`attention`), and FlashAttention is told the borders; else transformers' attention may tell the sequences apart by
positions that restart, if no attention_mask is given and no cache is filled. Families differ, so it is tried out: a
model is refused unless two packed sequences score as each does alone.

Shape suffixes: B sequences, S columns, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from logitless import PackedBatch, TokenLogProbs
from logitless.errors import InvalidInputError, UnsupportedError
from logitless.packing import PaddedBatch
from logitless_hf.attention import FLASH, PACKED, attention_configs, implementations, packed_attention
from logitless_hf.binding import bind, unbind
from logitless_hf.outputs import CausalLMOutputForPPO
from logitless_hf.probe import probe_tokens, undisturbed

__all__ = ["PackedForward", "make_forward"]

Borders = Literal["packed", "flash", "positions"]
LONGEST_PROBE = 256  # tokens: a window or chunk that is longer is not tried out


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
    """The `ForwardFn` of a bound model: scores [T] in batch order, whatever the layout that it runs.

    Attributes:
        model: it is bound.
        layout: "thd", "nested" or "bshd".
        borders: what tells the sequences of one row apart: attention within each, FlashAttention's `cu_seq_lens`, or
            positions that restart. "bshd" has no use for it.
    """

    model: nn.Module
    layout: str
    borders: Borders = "positions"

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
        if isinstance(temperature, Tensor) and temperature.ndim:
            temperature = rows.to_rows(temperature, 1.0)

        def by_packed_index(scores: TokenLogProbs, index: Tensor) -> Tensor:
            assert loss_fn is not None
            return loss_fn(scores, rows.packed_index(index))

        with self._attention(batch):
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
                **self._mask(batch, rows),
            )
        for name in ("log_probs", "entropy"):
            scores = getattr(out, name)
            if scores is not None:
                setattr(out, name, rows.to_packed(scores))
        return out

    def _attention(self, batch: PackedBatch) -> Any:
        """The attention that the call runs with."""
        if self.layout == "bshd" or self.borders == "positions":
            return nullcontext()
        found = implementations(self.model)
        if not found <= (PACKED.keys() if self.borders == "packed" else FLASH):
            raise UnsupportedError(
                f"the model's attention implementation became {', '.join(sorted(found))} after make_forward; call "
                "make_forward again"
            )
        if self.borders == "flash" or not sum(batch.padded_lengths):  # with no token there is nothing to tell apart
            return nullcontext()
        return packed_attention(self.model, batch.padded_lengths)

    def _mask(self, batch: PackedBatch, rows: PaddedBatch) -> dict[str, Any]:
        """Keywords that tell the sequences apart."""
        if self.layout == "bshd":
            return {"attention_mask": rows.attention_mask.long()}
        if self.borders != "flash":
            return {}
        borders, longest = batch.cu_seqlens_padded, batch.max_seqlen
        return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}


def _probe(model: nn.Module) -> list[Tensor]:
    """Two sequences of different lengths, longer than the model's shortest window or chunk if that is affordable."""
    configs = [config.__dict__ for config in attention_configs(model)]
    reaches = [config.get(name) for config in configs for name in ("sliding_window", "attention_chunk_size")]
    local = min((reach for reach in reaches if isinstance(reach, int) and reach > 0), default=0)
    places = [config.get("max_position_embeddings") for config in configs]
    room = min((place for place in places if isinstance(place, int) and place > 0), default=LONGEST_PROBE)
    tokens = probe_tokens(model).flatten()
    short = min(local + 3 if local <= LONGEST_PROBE else 3, room)
    lengths = [min(short + 2, room), short]
    generator = torch.Generator().manual_seed(0)
    order = torch.randint(tokens.numel(), (sum(lengths),), generator=generator)
    return list(torch.split(tokens[order.to(tokens.device)], lengths))


@torch.no_grad()
def _fault(forward: PackedForward) -> float:
    """How far, in nats, scores of two packed sequences are off those of each alone, beyond rounding; 0 if not."""
    model, parts = forward.model, _probe(forward.model)
    with undisturbed(model):
        for module in model.modules():
            module.training = False
        together = forward(PackedBatch.from_sequences(parts)).log_probs
        rows = PackedForward(model, "bshd")
        alone = [rows(PackedBatch.from_sequences([part])).log_probs for part in parts]
        same = parts[0][:1].expand_as(parts[0])
        foreign = forward(PackedBatch.from_sequences([same, parts[1]])).log_probs
        own = forward(PackedBatch.from_sequences([parts[0], parts[1].roll(1)])).log_probs
    assert together is not None
    assert foreign is not None
    assert own is not None
    eps = torch.finfo(next(model.parameters()).dtype).eps
    worst = float((together - torch.cat([x for x in alone if x is not None])).abs().max())
    # Tiny or untrained weights hide it from a tolerance in nats, so: what does the other sequence's content do to the
    # second one's scores, against its own content? Nothing, but where rounding depends on all tokens (experts).
    begin = len(parts[0])
    moved, by_itself = (float((x - together)[begin:].abs().max()) for x in (foreign, own))
    leaks = moved > (1e-4 if eps < 1e-4 else 1e-3) * by_itself
    if not worst <= 1e-3 + 32 * eps or leaks:
        return max(worst, moved)
    return 0.0


def _packed(model: nn.Module, layout: str) -> PackedForward:
    """The first way of telling packed sequences apart that holds."""
    found = implementations(model)
    if found and found <= PACKED.keys():
        forward = PackedForward(model, layout, "packed")
        try:
            if not _fault(forward):
                return forward
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a family may stumble over a mask that is none; what it does by itself is tried next
            pass
    forward = PackedForward(model, layout, "flash" if found and found <= FLASH else "positions")
    worst = _fault(forward)
    if worst:
        raise UnsupportedError(
            f"{type(model).__qualname__}: two sequences packed in one row score {worst:.3g} nats off what each scores "
            f"alone, so its attention does not tell them apart by position_ids; use layout='bshd'"
        )
    chunks = [config.__dict__.get("attention_chunk_size") for config in attention_configs(model)]
    if any(isinstance(chunk, int) and chunk > LONGEST_PROBE for chunk in chunks):
        raise UnsupportedError(
            f"{type(model).__qualname__}: attends in chunks of more than {LONGEST_PROBE} tokens, and whether their "
            "borders count from each packed sequence's begin is not tried out; use layout='bshd'"
        )
    return forward


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
    if layout == "bshd":
        return PackedForward(model, layout)
    try:
        return _packed(model, layout)
    except BaseException:
        unbind(model)
        raise
