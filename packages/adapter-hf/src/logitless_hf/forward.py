"""A bound model over packed batches: what `logitless.make_forward` returns for Hugging Face models.

"thd" and "nested" run one row of all tokens. Where the family takes it, attention is within each sequence (see
`attention`), and FlashAttention is told the borders; else transformers' attention may tell the sequences apart by
positions that restart, if no attention_mask is given and no cache is filled. Families differ, so it is tried out: a
model is refused unless packed sequences score as each does alone and, by their gradients, none sees another.

Shape suffixes: B sequences, S columns, T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from logitless import PackedBatch, TokenLogProbs
from logitless.errors import InvalidInputError, LogitlessError, UnsupportedError
from logitless.packing import PaddedBatch
from logitless_hf.attention import FLASH, PACKED, attention_configs, implementations, packed_attention
from logitless_hf.binding import bind, binding_of, unbind
from logitless_hf.labels import IGNORE_INDEX
from logitless_hf.outputs import CausalLMOutputForPPO
from logitless_hf.probe import probe_tokens, set_mode, undisturbed
from logitless_hf.recurrent import recurrent_layers
from logitless_hf.scoring import Uncast

__all__ = ["PackedForward", "make_forward"]

Borders = Literal["packed", "flash", "positions"]
# What a call is made of besides media, and which media keywords have a value for each token.
OWN_KEYWORDS = {
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels", "temperature"),
    *("entropy", "entropy_grad", "loss_fn", "keep_bytes", "return_log_probs", "use_cache", "past_key_values", "cache"),
    *("top_k", "top_p", "stats"),
}
OF_TOKENS = {"token_type_ids", "mm_token_type_ids"}
INSTEAD = "; use layout='bshd'"
SOFTENED = 64.0  # a temperature at which no token is so certain that it has no gradient
LONGEST_PROBE = 256  # tokens: a window or chunk that is longer is not tried out


def _check(batch: Any, temperature: Tensor | float, multi_modal_inputs: Mapping[str, Any] | None) -> None:
    if not isinstance(batch, PackedBatch):
        raise InvalidInputError(f"batch: got {type(batch).__qualname__}, expected a logitless.PackedBatch")
    if batch.shard_of is not None:
        raise UnsupportedError("batch: is a shard; logitless-hf runs whole batches, so call shard() on none of them")
    tokens = tuple(batch.labels.shape)
    if isinstance(temperature, Tensor) and temperature.ndim and temperature.shape != tokens:
        raise InvalidInputError(
            f"temperature: got shape {tuple(temperature.shape)}, expected {tokens}, one for each packed token "
            "(batch.pack brings a [B, S] one, or one for each sequence, into batch order), or a number"
        )
    taken = sorted(OWN_KEYWORDS.intersection(multi_modal_inputs or ()))
    if taken:
        raise InvalidInputError(f"multi_modal_inputs: got {', '.join(taken)}, which the batch and this call determine")


def _checked(labels: Tensor, batch: PackedBatch) -> Tensor:
    """Labels that stand in place of the batch's own."""
    expected = batch.labels.shape[0]
    if not isinstance(labels, Tensor) or labels.ndim not in (1, 2) or labels.shape[0] != expected:
        got = f"shape {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__qualname__
        raise InvalidInputError(f"labels: got {got}, expected a tensor ({expected},) or ({expected}, K) in batch order")
    return labels


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
        own_positions: the family numbers its positions itself, in a way that is not the batch's.
    """

    model: nn.Module
    layout: str
    borders: Borders = "positions"
    own_positions: bool = False

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
    ) -> CausalLMOutputForPPO:
        """As `logitless.ForwardFn`; `loss_fn` gets indices of batch order, and has no use for `keep_bytes`.

        Args:
            multi_modal_inputs: the family's own keywords (`pixel_values`, `image_grid_thw`, ...), images in the order
                of the batch's sequences; `token_type_ids` and `mm_token_type_ids` are [T], in batch order.
        """
        _check(batch, temperature, multi_modal_inputs)
        if not any(map(binding_of, self.model.modules())):
            raise _refused(self.model, "it was unbound after make_forward, so it gives logits; call make_forward again")
        rows = batch.to_padded() if self.layout == "bshd" else _one_row(batch)
        media = self._media(batch, rows, multi_modal_inputs or {})
        if isinstance(temperature, Tensor) and temperature.ndim:
            temperature = rows.to_rows(temperature, 1.0)

        def by_packed_index(scores: TokenLogProbs, index: Tensor) -> Tensor:
            assert loss_fn is not None
            return loss_fn(scores, rows.packed_index(index))

        with self._attention(batch), self._told_if_too_long(rows):
            out: CausalLMOutputForPPO = self.model(
                input_ids=rows.input_ids,
                **({} if self.own_positions else {"position_ids": rows.position_ids}),
                shift_labels=rows.labels if labels is None else rows.to_rows(_checked(labels, batch), IGNORE_INDEX),
                use_cache=False,
                return_log_probs=True,
                temperature=Uncast(temperature),
                entropy=entropy,
                entropy_grad=entropy_grad,
                loss_fn=None if loss_fn is None else by_packed_index,
                keep_bytes=keep_bytes,
                top_k=top_k,
                top_p=top_p,
                stats=stats,
                **self._mask(batch, rows),
                **media,
            )
        for name in ("log_probs", "entropy", "values"):
            scores = out.get(name)  # type: ignore[no-untyped-call]  # not the attribute: see `for_ddp`
            if scores is not None:
                setattr(out, name, rows.to_packed(scores))
        if out.stats is not None:
            out.stats = {name: rows.to_packed(x) for name, x in out.stats.items()}
        return out

    def _media(self, batch: PackedBatch, rows: PaddedBatch, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Keywords of images and the like, as the rows need them."""
        if self.layout != "bshd" and self.borders == "positions" and batch.position_ids.shape[:-1] == (3,):
            raise InvalidInputError(
                "batch.position_ids: got [3, T], which tells no sequences apart for this attention; give [4, T], each "
                "token's place in its sequence first, or load the model with attn_implementation='sdpa'"
            )
        if inputs and batch.position_ids.ndim == 1:
            axes = next((m for m in self.model.modules() if hasattr(m, "get_rope_index")), None)
            if axes is not None:
                raise InvalidInputError(
                    "batch.position_ids: got [T], expected [3, T] for a model whose images have positions of three "
                    f"axes; make them by {type(axes).__qualname__}.get_rope_index, and give them to PackedBatch"
                )
        return {name: rows.to_rows(x, 0) if name in OF_TOKENS and x is not None else x for name, x in inputs.items()}

    @contextmanager
    def _told_if_too_long(self, rows: PaddedBatch) -> Iterator[None]:
        """Some families keep a table of positions that is as long as a row may be, and stumble over a longer one."""
        try:
            yield
        except (IndexError, RuntimeError) as error:
            length, longest = rows.input_ids.shape[1], _room(self.model)
            plain = not isinstance(error, (LogitlessError, torch.OutOfMemoryError))
            if plain and self.borders == "positions" and longest is not None and length > longest:
                name = type(self.model).__qualname__
                raise UnsupportedError(
                    f"batch: {length} tokens in one row, more than {longest}, which is what {name} has positions for "
                    f"({error}); make batches of at most that many tokens, or use layout='bshd'"
                ) from error
            raise

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


# --- trying it out --------------------------------------------------------------------------------------------------


def _room(model: nn.Module) -> int | None:
    """The longest sequence that the configs tell of."""
    places = [config.__dict__.get("max_position_embeddings") for config in attention_configs(model)]
    return min((place for place in places if isinstance(place, int) and place > 0), default=None)


def _probe(model: nn.Module) -> list[Tensor]:
    """Two sequences of different lengths, longer than the model's shortest window or chunk if that is affordable."""
    configs = [config.__dict__ for config in attention_configs(model)]
    reaches = [config.get(name) for config in configs for name in ("sliding_window", "attention_chunk_size")]
    local = min((reach for reach in reaches if isinstance(reach, int) and reach > 0), default=0)
    room = _room(model) or LONGEST_PROBE
    tokens = probe_tokens(model).flatten()
    short = min(local + 3 if local <= LONGEST_PROBE else 3, room)
    lengths = [min(short + 2, room), short]
    generator = torch.Generator().manual_seed(0)
    order = torch.randint(tokens.numel(), (sum(lengths),), generator=generator)
    return list(torch.split(tokens[order.to(tokens.device)], lengths))


def _tried(out: CausalLMOutputForPPO) -> Tensor:
    """What is compared: log-probabilities, or a value model's values."""
    found: Tensor | None = out["values"] if out.log_probs is None else out.log_probs
    assert found is not None
    return found


def _alone(model: nn.Module, tokens: Tensor) -> Tensor:
    """[L] scores of one sequence by the model's own way, and numbering of positions; 0 at its end."""
    labels = PackedBatch.from_sequences([tokens]).labels.unsqueeze(0)
    out: CausalLMOutputForPPO = model(
        input_ids=tokens.unsqueeze(0), shift_labels=labels, use_cache=False, return_log_probs=True, entropy=False
    )
    return _tried(out).squeeze(0)


def _scores(forward: PackedForward, parts: list[Tensor], temperature: float = 1.0) -> Tensor:
    out = forward(PackedBatch.from_sequences(parts), entropy=False, temperature=temperature)
    return _tried(out)


def _foreign_gradient(forward: PackedForward, parts: list[Tensor]) -> float:
    """Largest gradient of the second of three sequences' scores for a token of another one, relative to its own.

    It is 0 to the bit where no token sees another sequence, and no weight is so small that it hides one that does. It
    is infinite if a gradient is NaN; a model that has no backward gives 0.
    """
    leaves: list[Tensor] = []

    def leaf(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    embeddings: Any = forward.model.get_input_embeddings()  # type: ignore[operator]
    hook = embeddings.register_forward_hook(leaf)
    first, second = parts
    begin, end = len(first), len(first) + len(second)
    try:
        with torch.enable_grad():
            scores = _scores(forward, [first, second, first], SOFTENED)[begin:end].sum()
            grads = torch.autograd.grad(scores, leaves, allow_unused=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a kernel for inference only
        return 0.0
    finally:
        hook.remove()
    worst = 0.0
    for grad in grads:
        size = torch.empty(0) if grad is None else grad.abs().amax(-1)
        if size.shape == (1, end + begin):
            sizes = list(torch.split(size.squeeze(0), [begin, end - begin, begin]))
        elif size.ndim == 2 and size.shape[0] == 3:  # rows
            sizes = list(size)
        else:
            continue
        before, own, after = (float(part.max()) for part in sizes)
        if not math.isfinite(before + own + after):
            return math.inf
        worst = max(worst, max(before, after) / own if own else 0.0)
    return worst


@torch.no_grad()
def _fault(forward: PackedForward) -> str | None:
    """What is wrong with the scores of sequences packed (or padded) together, against those of each alone."""
    model = forward.model
    with undisturbed(model):
        parts = _probe(model)  # in here, since gradients take no tensors that were made in the caller's inference_mode
        set_mode(model, training=False)
        together = _scores(forward, parts)
        alone = torch.cat([_alone(model, part) for part in parts])
        same = parts[0][:1].expand_as(parts[0])
        foreign, own = (_scores(forward, other) for other in ([same, parts[1]], [parts[0], parts[1].roll(1)]))
        seen = _foreign_gradient(forward, parts)
    eps = torch.finfo(next(model.parameters()).dtype).eps
    off = (together - alone).abs()
    begin, bearable = len(parts[0]), 1e-3 + 32 * eps
    # Rounding depends on all tokens where there are experts.
    moved, by_itself = (float((x - together)[begin:].abs().max()) for x in (foreign, own))
    leaks = moved > (1e-4 if eps < 1e-4 else 1e-3) * by_itself or seen > 0
    worst = float(off.max())
    if not leaks and worst <= bearable:
        return None
    if seen == math.inf:
        return "gradients are NaN" + (" where rows are padded" if forward.layout == "bshd" else "")
    if forward.layout == "bshd":
        return f"two sequences in rows padded on the right score {worst:.3g} nats off what each scores alone"
    if not leaks and not float(off[:begin].max()) <= bearable:
        return f"its positions do not count from 0 as those of packed sequences do: scores are {worst:.3g} nats off"
    return (
        f"two sequences packed in one row score {max(worst, moved):.3g} nats off what each scores alone, so its "
        "attention does not tell them apart by position_ids"
    )


def _refused(model: nn.Module, why: str) -> UnsupportedError:
    return UnsupportedError(f"{type(model).__qualname__}: {why}")


def _padded(model: nn.Module) -> PackedForward:
    """Rows, with the batch's positions if these are the family's own, else with those that it makes itself."""
    forward = PackedForward(model, "bshd")
    why = _fault(forward)
    if why:
        forward = PackedForward(model, "bshd", own_positions=True)
        why = _fault(forward)
    if why:
        raise _refused(model, f"{why}; layout='thd' has no padding")
    return forward


def _packed(model: nn.Module, layout: str) -> PackedForward:
    """The first way of telling packed sequences apart that holds."""
    found, tried = implementations(model), ""
    if found <= PACKED.keys() and (found or recurrent_layers(model)):
        forward = PackedForward(model, layout, "packed")
        try:
            why = _fault(forward)
        except torch.OutOfMemoryError:
            raise
        except LogitlessError as error:
            why = str(error).removesuffix(INSTEAD)
        except Exception as error:  # a family may stumble over a mask that is none
            why = f"{type(error).__name__} ({error})"
        if not why:
            return forward
        tried = f" (nor by attention within each sequence: {why})"
    forward = PackedForward(model, layout, "flash" if found and found <= FLASH else "positions")
    why = _fault(forward)
    if why:
        raise _refused(model, f"{why}{tried}{INSTEAD}")
    chunks = [config.__dict__.get("attention_chunk_size") for config in attention_configs(model)]
    if any(isinstance(chunk, int) and chunk > LONGEST_PROBE for chunk in chunks):
        raise _refused(
            model,
            f"attends in chunks of more than {LONGEST_PROBE} tokens, and whether their borders count from each packed "
            "sequence's begin is not tried out; use layout='bshd'",
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
    try:
        return _padded(model) if layout == "bshd" else _packed(model, layout)
    except BaseException:
        unbind(model)
        raise
