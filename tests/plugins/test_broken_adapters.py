"""Each check of the adapters' kit goes red on an adapter with the fault that it is for; acme's own passes them all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from acme_logprobs import AcmeAdapter, AcmeModel
from acme_logprobs.adapter import AcmeForward, CausalLMOutputForPPO

from logitless import PackedBatch
from logitless.testing import installed
from logitless.testing.adapter import AdapterConformance

Out = CausalLMOutputForPPO
CHECKS = [name for name, _ in inspect.getmembers(AdapterConformance, inspect.isfunction) if name.startswith("test_")]


class Broken(AcmeAdapter):
    """Acme's adapter with one fault."""

    name = "broken"


def calling(change: Callable[[AcmeForward, PackedBatch, dict[str, Any]], Out]) -> type[Broken]:
    """An adapter whose bound models answer calls otherwise."""

    class Forward(AcmeForward):
        def __call__(self, batch: PackedBatch, **options: Any) -> Out:
            return change(AcmeForward(self.model, self.backend), batch, options)

    class Fault(Broken):
        def make_forward(self, model: Any, layout: str, backend: str | None) -> AcmeForward:
            super().make_forward(model, layout, backend)
            return Forward(model, backend)

    return Fault


def answering(change: Callable[[Out, PackedBatch, dict[str, Any]], Out]) -> type[Broken]:
    """An adapter whose results are changed."""
    return calling(lambda forward, batch, options: change(forward(batch, **options), batch, options))


def scaled(out: Out, factor: float) -> Out:
    return out if out.log_probs is None else replace(out, log_probs=out.log_probs * factor)


class OfAnotherProtocol(Broken):
    protocol = 99


class TakesAnything(Broken):
    def supports(self, model: Any) -> str | None:
        return None


class RunsRowsForAnyLayout(Broken):
    def make_forward(self, model: Any, layout: str, backend: str | None) -> AcmeForward:
        return AcmeForward(model, backend)


class InspectsWithoutLooking(Broken):
    def inspect(self, path: str) -> Mapping[str, Any]:
        return {"understood": True}


class DrawsWhenItBinds(Broken):
    def make_forward(self, model: Any, layout: str, backend: str | None) -> AcmeForward:
        torch.rand(1)
        return super().make_forward(model, layout, backend)


def makes_logits(forward: AcmeForward, batch: PackedBatch, options: dict[str, Any]) -> Out:
    forward.model(batch.to_padded().input_ids)
    return forward(batch, **options)


def forgets_the_embedding(forward: AcmeForward, batch: PackedBatch, options: dict[str, Any]) -> Out:
    handle = forward.model.embed.register_forward_hook(lambda module, args, out: out.detach())
    try:
        return forward(batch, **options)
    finally:
        handle.remove()


def ignores(name: str) -> Callable[[AcmeForward, PackedBatch, dict[str, Any]], Out]:
    def change(forward: AcmeForward, batch: PackedBatch, options: dict[str, Any]) -> Out:
        return forward(batch, **{key: value for key, value in options.items() if key != name})

    return change


def counts_from_the_end(forward: AcmeForward, batch: PackedBatch, options: dict[str, Any]) -> Out:
    """The loss sees each of its tokens, at another's place."""
    loss_fn = options.pop("loss_fn", None)
    if loss_fn is not None:
        options["loss_fn"] = lambda scores, index: loss_fn(scores, index.flip(0))
    return forward(batch, **options)


def rolled_if_padded(out: Out, batch: PackedBatch, options: dict[str, Any]) -> Out:
    return replace(out, log_probs=out.log_probs.roll(1)) if batch.origin.kind == "padded" else out


def by_company(out: Out, batch: PackedBatch, options: dict[str, Any]) -> Out:
    return scaled(out, 1.001) if len(batch.lengths) > 1 else out


def by_kept(out: Out, batch: PackedBatch, options: dict[str, Any]) -> Out:
    return scaled(out, 1 - 1e-15 if options.get("keep_bytes") else 1.0)


def by_grad_mode(out: Out, batch: PackedBatch, options: dict[str, Any]) -> Out:
    return scaled(out, 1 - 1e-15 if torch.is_grad_enabled() else 1.0)


def never_zero(out: Out, batch: PackedBatch, options: dict[str, Any]) -> Out:
    return replace(out, log_probs=out.log_probs - 1e-12)


def larger_values(out: Out, batch: PackedBatch, options: dict[str, Any]) -> Out:
    return replace(out, values=None if out.values is None else 1.01 * out.values)


def adds_unwritten(out: Out, batch: PackedBatch, options: dict[str, Any]) -> Out:
    return replace(out, log_probs=out.log_probs + 0.0 * torch.empty_like(out.log_probs))


FAULTS: dict[str, tuple[type[Broken], dict[str, Any]]] = {
    "test_states_its_name_and_protocol": (OfAnotherProtocol, {}),
    "test_supports": (TakesAnything, {}),
    "test_layouts_that_it_does_not_serve_are_refused": (RunsRowsForAnyLayout, {}),
    "test_inspect": (InspectsWithoutLooking, {"tmp_path": None}),
    "test_the_model_stays_as_it_was": (DrawsWhenItBinds, {"layout": "bshd", "training": True}),
    "test_no_logits_are_made": (calling(makes_logits), {"layout": "bshd"}),
    "test_equals_full_logits": (calling(forgets_the_embedding), {"layout": "bshd", "dtype": torch.float64}),
    "test_temperature": (
        calling(ignores("temperature")),
        {"layout": "bshd", "dtype": torch.float32, "kind": "per-token"},
    ),
    "test_any_batch": (answering(rolled_if_padded), {"layout": "bshd"}),
    "test_each_sequence_alone": (answering(by_company), {"layout": "bshd"}),
    "test_entropy_is_optional": (calling(ignores("entropy")), {"layout": "bshd"}),
    "test_entropy_grad_is_optional": (calling(ignores("entropy_grad")), {"layout": "bshd"}),
    "test_loss_fn": (calling(counts_from_the_end), {"layout": "bshd"}),
    "test_keep_bytes": (answering(by_kept), {"layout": "bshd"}),
    "test_the_first_ratio_is_one": (answering(by_grad_mode), {"layout": "bshd"}),
    "test_ignored_tokens_are_exactly_zero": (answering(never_zero), {"layout": "bshd"}),
    "test_values": (answering(larger_values), {"layout": "bshd"}),
}


def run_check(check: str, adapter_class: type[AcmeAdapter], arguments: dict[str, Any], tmp_path: Path) -> None:
    class TestOne(AdapterConformance):
        adapter = adapter_class.name
        layouts: ClassVar = ("bshd",)

        def make_model(self, dtype: torch.dtype) -> AcmeModel:
            return AcmeModel(hidden_size=16, outputs=101).to(dtype)

        def logits(self, model: AcmeModel, input_ids: torch.Tensor) -> torch.Tensor:
            return model(input_ids.unsqueeze(0)).squeeze(0)

        def make_value_model(self, dtype: torch.dtype) -> AcmeModel:
            return AcmeModel(hidden_size=16, outputs=1).to(dtype)

        def values(self, model: AcmeModel, input_ids: torch.Tensor) -> torch.Tensor:
            return model(input_ids.unsqueeze(0)).flatten()

    given = {key: tmp_path if key == "tmp_path" else value for key, value in arguments.items()}
    with installed(adapter_class()):
        getattr(TestOne(), check)(**given)


def test_every_check_has_a_fault() -> None:
    assert sorted(FAULTS) == sorted(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_check_is_green_without_a_fault(check: str, tmp_path: Path) -> None:
    if check == "test_inspect":
        with pytest.raises(pytest.skip.Exception, match="checkpoint writes none"):
            run_check(check, Broken, FAULTS[check][1], tmp_path)
        return
    run_check(check, Broken, FAULTS[check][1], tmp_path)


@pytest.mark.parametrize("check", CHECKS)
def test_check_is_red_on_its_fault(check: str, tmp_path: Path) -> None:
    fault, arguments = FAULTS[check]
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_check(check, fault, arguments, tmp_path)


def test_unwritten_memory_that_is_read_is_seen(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="nan"):
        run_check("test_each_sequence_alone", answering(adds_unwritten), {"layout": "bshd"}, tmp_path)
