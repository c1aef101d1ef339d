"""Conformance checks of how an adapter binds: what it takes and refuses, and that it leaves the model as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logitless import _registry
from logitless.errors import LogitlessError
from logitless.packing import IGNORE_INDEX
from logitless.testing._adapter import FIRST_ID, LAYOUTS, AdapterChecks, entropy_of, scores_in
from logitless.testing._kit import expect, same
from logitless.testing.memory import LogitsGuard
from logitless.types import PROTOCOL

__all__ = ["BindingChecks"]


class _Unknown(nn.Module):
    """A model that no adapter knows."""

    def forward(self, x: Tensor) -> Tensor:
        """Nothing."""
        return x


class BindingChecks(AdapterChecks, kit=True):
    """What binding does."""

    def test_states_its_name_and_protocol(self) -> None:
        """Core loads it, under the name that it calls itself."""
        statuses = [status for status in _registry.adapters() if status.name == self.adapter]
        expect(len(statuses) == 1 and statuses[0].ok, f"core does not load it: {statuses}")
        expect(self.plugin.name == self.adapter, f"it calls itself {self.plugin.name!r}, expected {self.adapter!r}")
        expect(self.plugin.protocol == PROTOCOL, f"protocol: got {self.plugin.protocol}, expected {PROTOCOL}")

    def test_supports(self) -> None:
        """None for its own models; for anything else a sentence."""
        reason = self.plugin.supports(self.model())
        expect(reason is None, f"it refuses the model of make_model: {reason}")
        for other in (_Unknown(), nn.Linear(2, 2), "a path", None, object()):
            reason = self.plugin.supports(other)
            told = isinstance(reason, str) and reason.strip()
            expect(told, f"supports({other!r}): got {reason!r}, expected a sentence that says why not")

    def test_layouts_that_it_does_not_serve_are_refused(self) -> None:
        """At binding, not with wrong numbers at a call; and the model stays as it was."""
        model = self.model()
        kind = type(model)
        for layout in ("sbhd", *(layout for layout in LAYOUTS if layout not in self.layouts)):
            with pytest.raises(LogitlessError, match=layout):
                self.bind(model, layout)
            expect(type(model) is kind, f"a refused layout, {layout}, left the model bound")

    def test_inspect(self, tmp_path: Path) -> None:
        """Of a checkpoint, names and values that JSON takes; of a path that is none, an error of logitless."""
        with pytest.raises(LogitlessError):
            self.plugin.inspect(str(tmp_path / "nothing-here"))
        path = self.checkpoint(tmp_path)
        if path is None:
            pytest.skip("checkpoint writes none")
        verdict = self.plugin.inspect(path)
        expect(isinstance(verdict, Mapping) and verdict, f"inspect: got {verdict!r}, expected names and values")
        expect(all(isinstance(name, str) for name in verdict), f"inspect: got {list(verdict)}, expected names")
        expect(verdict.get("understood") is True, f"inspect: got {dict(verdict)}, expected understood=True")
        json.dumps(dict(verdict))

    def _state(self, model: nn.Module) -> dict[str, Any]:
        """All that binding and calling must leave alone, by name."""
        found: dict[str, Any] = {"RNG": torch.get_rng_state()}
        for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
            for name, tensor in named:
                found[f"{kind} {name}"] = tensor.detach().clone()
                found[f"requires_grad of {name}"] = tensor.requires_grad
                found[f"gradient of {name}"] = None if tensor.grad is None else tensor.grad.clone()
        found |= {f"state_dict's {name}": x.clone() for name, x in model.state_dict().items() if isinstance(x, Tensor)}
        found |= {f"mode of {name or 'the model'}": module.training for name, module in model.named_modules()}
        return found

    @pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
    def test_the_model_stays_as_it_was(self, layout: str, training: bool) -> None:
        """Binding and a call leave parameters, buffers, gradients, modes and the RNG alone, and its forward's bits."""
        model = self.model()
        model.train(training)
        vocab_size = self.vocab_size(model)
        sequences = self.sequences(vocab_size)
        for i, parameter in enumerate(model.parameters()):
            if i % 2:
                parameter.grad = torch.full_like(parameter, 0.5)
        ids = torch.arange(FIRST_ID, FIRST_ID + 5, device=self.device)
        logits = self.logits(model, ids).detach().clone()
        before = self._state(model)
        forward = self.bind(model, layout)
        for what in ("binding", "a call"):
            if what == "a call":
                with torch.no_grad():
                    forward(self.batch(layout, sequences))
            after = self._state(model)
            expect(after.keys() == before.keys(), f"{what} added or took {sorted(after.keys() ^ before.keys())}")
            for name, value in before.items():
                kept = same(value, after[name]) if isinstance(value, Tensor) else value == after[name]
                expect(kept, f"{what} changed the {name}")
            expect(same(self.logits(model, ids), logits), f"after {what}, the model's own forward gives other logits")

    def test_no_logits_are_made(self, layout: str) -> None:
        """Neither forward nor backward makes a tensor of tokens by vocabulary outside of the op."""
        model = self.model()
        vocab_size = self.vocab_size(model)
        expect(vocab_size >= 32, f"the model has {vocab_size} vocab rows, expected at least 32")
        lengths = [8] * (vocab_size // 8 - 1)  # as many tokens as vocab rows would make hidden states look like logits
        batch = self.batch(layout, self.sequences(vocab_size, lengths))
        live = int((batch.labels != IGNORE_INDEX).sum())
        forward = self.bind(model, layout)
        with LogitsGuard(live, vocab_size):
            out = forward(batch)
            torch.autograd.backward((scores_in(out), entropy_of(out)), self.upstream(batch, scores_in(out)))
