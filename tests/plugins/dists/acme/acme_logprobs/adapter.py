"""An adapter for Acme's model: the trunk runs on padded rows, and the op takes its hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import logitless
from acme_logprobs.model import AcmeModel
from logitless import PackedBatch, TokenLogProbs
from logitless.errors import InvalidInputError, UnsupportedError


@dataclass
class CausalLMOutputForPPO:
    """What a bound model returns."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    loss: Tensor | None = None
    logits: None = None
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None
    aux_loss: None = None
    stats: Mapping[str, Tensor] | None = None


@dataclass
class AcmeForward:
    """A bound `AcmeModel`. Nothing about the model is changed, so there is nothing to undo."""

    model: AcmeModel
    backend: str | None

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
        if multi_modal_inputs:
            raise UnsupportedError(f"multi_modal_inputs: got {', '.join(multi_modal_inputs)}, acme takes text only")
        rows = batch.to_padded()  # [B, S]; its padding is on the right, where a causal model does not look
        hidden = self.model.trunk(rows.input_ids)
        if self.model.head.out_features == 1:
            return CausalLMOutputForPPO(values=rows.to_packed(self.model.head(hidden).squeeze(-1)))
        if isinstance(temperature, Tensor) and temperature.ndim:
            temperature = rows.to_rows(temperature, 1.0)
        options: dict[str, Any] = {"temperature": temperature, "backend": self.backend}
        options |= {"entropy": entropy, "entropy_grad": entropy_grad, "top_k": top_k, "top_p": top_p}
        scored = rows.labels if labels is None else rows.to_rows(labels, -100)
        call, loss = (hidden, self.model.head.weight, scored), None
        if loss_fn is None:
            out = logitless.linear_log_probs(*call, keep_bytes=keep_bytes, stats=stats, **options)
        elif stats:
            raise InvalidInputError(
                "stats: got some with a loss_fn, expected none: its single pass makes no statistics"
            )
        else:
            # The op counts tokens in rows, the caller in the packed batch.
            loss, out = logitless.linear_policy_loss(
                *call, lambda scores, index: loss_fn(scores, rows.packed_index(index)), **options
            )
        entropies = None if out.entropy is None else rows.to_packed(out.entropy)
        found = {name: rows.to_packed(x) for name, x in (out.stats or {}).items()}
        return CausalLMOutputForPPO(rows.to_packed(out.log_probs), entropies, loss=loss, stats=found or None)


class AcmeAdapter:
    """Binds `AcmeModel`."""

    name = "acme"
    protocol = 1

    def supports(self, model: Any) -> str | None:
        return None if isinstance(model, AcmeModel) else f"acme binds AcmeModel only, got a {type(model).__qualname__}"

    def make_forward(self, model: Any, layout: str, backend: str | None) -> AcmeForward:
        if layout != "bshd":
            raise UnsupportedError(f"layout: got {layout!r}, acme's models run padded rows, 'bshd'")
        return AcmeForward(model, backend)

    def inspect(self, path: str) -> Mapping[str, Any]:
        config = Path(path) / "acme.json"
        if not config.is_file():
            raise InvalidInputError(f"{path}: expected a folder with an acme.json")
        outputs = json.loads(config.read_text())["outputs"]
        return {"model": "AcmeModel", "outputs": outputs, "understood": outputs > 1, "reason": None}
