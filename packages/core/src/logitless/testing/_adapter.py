"""What the checks of an adapter share: settings and hooks, batches, the truth from full logits, and its comparison.

Shape suffixes: T packed tokens, M true tokens, L tokens of one sequence, V vocab rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from logitless import _registry
from logitless.packing import IGNORE_INDEX, PackedBatch
from logitless.reference import scores_of
from logitless.testing._kit import Kit, expect, hook
from logitless.testing.memory import poisoned
from logitless.types import CausalLMOutputForPPO, ForwardFn, TokenLogProbs

__all__ = ["FIRST_ID", "LAYOUTS", "AdapterChecks", "entropy_of", "scores_in"]

LAYOUTS = ("thd", "bshd", "nested")
FIRST_ID = 3  # in many vocabularies padding and markers come first
Found = Mapping[str, Tensor | None]
"""Gradients by parameter."""


def scores_in(out: CausalLMOutputForPPO) -> Tensor:
    """The log_probs, which must be there."""
    if out.log_probs is None:
        pytest.fail("out.log_probs is None")
    return out.log_probs


def entropy_of(out: CausalLMOutputForPPO) -> Tensor:
    """The entropy, which must be there."""
    if out.entropy is None:
        pytest.fail("out.entropy is None")
    return out.entropy


class AdapterChecks(Kit, kit=True):
    """What the author of an adapter sets and defines, and what the checks share."""

    adapter: ClassVar[str]
    """Name under which the adapter is installed."""
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS
    """Those of "thd", "bshd" and "nested" that it serves."""
    backend: ClassVar[str | None] = None
    """Name of the backend to run with; None takes the best that is installed."""
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float64, torch.float32)
    """Dtypes in which the model is compared; the first is what checks of other things run in."""
    tolerances: ClassVar[Mapping[torch.dtype, float]] = {torch.float64: 1e-9, torch.float32: 2e-5}
    """How far scores may be off, times the largest logit above 1; gradients ten times that, relative to their norm."""
    lengths: ClassVar[tuple[int, ...]] = (7, 1, 12, 3)
    """Lengths of the sequences of a batch."""

    @hook
    @abstractmethod
    def make_model(self, dtype: torch.dtype) -> nn.Module:
        """A tiny model without dropout, the same at every call (torch's generator is seeded before).

        No other dimension of it should equal its vocabulary's size, which should exceed its hidden size: so logits
        are told from other tensors.
        """
        raise NotImplementedError

    @hook
    @abstractmethod
    def logits(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        """[L, V], by the forward of a model that is not bound, for one sequence [L]; differentiable."""
        raise NotImplementedError

    @hook
    def make_value_model(self, dtype: torch.dtype) -> nn.Module | None:
        """A tiny value model, or None where the adapter knows none."""
        return None

    @hook
    def values(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        """[L] by the forward of a value model that is not bound, for one sequence [L]."""
        raise NotImplementedError

    @hook
    def checkpoint(self, folder: Path) -> str | None:
        """Writes a checkpoint whose head the adapter understands and returns its path; None where it reads none."""
        return None

    def parameters(self) -> Mapping[str, tuple[Any, Any]]:
        """Each check runs in each layout and dtype, where it asks for one."""
        return {
            "layout": (self.layouts, None),
            "dtype": (self.dtypes, lambda dtype: str(dtype).removeprefix("torch.")),
        }

    # --- models and batches ---------------------------------------------------------------------------------------

    @property
    def plugin(self) -> Any:
        """The adapter, loaded as core does."""
        return _registry.load(_registry.ADAPTERS, self.adapter)

    def model(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A fresh model; always the same."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make_model(dtype or self.dtypes[0]).to(self.device)

    def value_model(self) -> nn.Module:
        """A fresh value model, always the same; skips the check where there is none."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.make_value_model(self.dtypes[0])
        if model is None:
            pytest.skip("make_value_model gives none")
        return model.to(self.device)

    def vocab_size(self, model: nn.Module) -> int:
        """V of the model's own logits."""
        with torch.no_grad():
            return self.logits(model, torch.tensor([FIRST_ID], device=self.device)).shape[-1]

    def sequences(self, vocab_size: int, lengths: Sequence[int] | None = None) -> list[Tensor]:
        """Random token ids."""
        noise = torch.Generator().manual_seed(1)
        return [
            torch.randint(FIRST_ID, vocab_size, (length,), generator=noise).to(self.device)
            for length in (self.lengths if lengths is None else lengths)
        ]

    def batch(self, layout: str, sequences: Sequence[Tensor], **options: Any) -> PackedBatch:
        """The sequences packed, from a nested tensor for the layout of that name."""
        if layout == "nested" and sequences:
            return PackedBatch.from_nested(torch.nested.nested_tensor(list(sequences), layout=torch.jagged), **options)
        return PackedBatch.from_sequences(sequences, **options)

    def masked(self, layout: str, sequences: Sequence[Tensor]) -> PackedBatch:
        """Padded to a multiple of 4, and every third token not scored."""
        masks = [torch.arange(len(x), device=self.device) % 3 != 2 for x in sequences]
        mask: Any = torch.nested.nested_tensor(masks, layout=torch.jagged) if layout == "nested" else masks
        return self.batch(layout, sequences, loss_mask=mask, align=4)

    def bind(self, model: nn.Module, layout: str) -> ForwardFn:
        """`make_forward` of the adapter."""
        bound: ForwardFn = self.plugin.make_forward(model, layout, self.backend)
        return bound

    def run(self, forward: ForwardFn, batch: PackedBatch, **options: Any) -> CausalLMOutputForPPO:
        """A call of a bound model; memory that it does not write reads as NaN."""
        with poisoned():
            out = forward(batch, **options)
        expect(isinstance(out, CausalLMOutputForPPO), f"got a {type(out).__qualname__}, not a CausalLMOutputForPPO")
        expect(out.logits is None, "out.logits is not None")
        return out

    # --- the truth ------------------------------------------------------------------------------------------------

    def truth(
        self, model: nn.Module, batch: PackedBatch, temperature: Tensor | float = 1.0
    ) -> tuple[TokenLogProbs, float]:
        """Scores [T] from the logits of each sequence alone, of a model that is not bound; and the largest |z/T|."""
        ids = batch.input_ids.index_select(0, batch.place_M)
        rows = [self.logits(model, x) for x in torch.split(ids, list(batch.lengths)) if len(x)]
        total = batch.input_ids.shape[0]
        if not rows:
            zeros = torch.zeros(total, dtype=torch.promote_types(self.dtypes[0], torch.float32), device=self.device)
            return TokenLogProbs(zeros, zeros), 1.0
        z_MV = torch.cat(rows)
        z_MV = z_MV.to(torch.promote_types(z_MV.dtype, torch.float32))
        if isinstance(temperature, Tensor):
            z_MV = z_MV / temperature.to(z_MV).index_select(0, batch.place_M).unsqueeze(1)
        else:
            z_MV = z_MV / temperature
        found = scores_of(z_MV, batch.labels.index_select(0, batch.place_M), IGNORE_INDEX)
        log_probs, entropy = (
            z_MV.new_zeros(total).index_copy(0, batch.place_M, x)
            for x in (found.log_probs, found.entropy)
            if x is not None
        )
        return TokenLogProbs(log_probs, entropy), max(1.0, float(z_MV.detach().abs().max()))

    def upstream(self, batch: PackedBatch, like: Tensor) -> tuple[Tensor, Tensor]:
        """Random gradients [T] of log_probs and entropy."""
        noise = torch.Generator().manual_seed(2)
        g, e = torch.randn(2, batch.input_ids.shape[0], generator=noise, dtype=torch.float64).to(like)
        return g, e

    def gradients(self, model: nn.Module, outputs: Sequence[Tensor], upstream: Sequence[Tensor | None]) -> Found:
        """Of every parameter that requires grad; the model's `.grad` fields are left alone."""
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with poisoned():
            found = torch.autograd.grad(outputs, list(named.values()), upstream, allow_unused=True)
        return dict(zip(named, found, strict=True))

    def check_scores(
        self, name: str, got: Tensor | None, want: Tensor | None, batch: PackedBatch, top: float = 1.0
    ) -> None:
        """Shape, dtype, exact zeros where ignored, and values within the tolerance."""
        if got is None or want is None:
            pytest.fail(f"{name} is None")
        expect(
            got.shape == batch.labels.shape,
            f"{name}: got shape {tuple(got.shape)}, expected labels', {batch.labels.shape}",
        )
        expect(got.dtype == want.dtype, f"{name}: got {got.dtype}, expected {want.dtype}")
        dead = got.detach()[batch.labels == IGNORE_INDEX]
        if dead.count_nonzero():
            pytest.fail(
                f"{name}: got {dead[dead != 0][0]:.9g} for an ignored token ({dead.count_nonzero()} of {dead.numel()} "
                "are not 0), expected exactly 0; a packed sequence's last token and its padding are ignored"
            )
        allowed = self.tolerances[want.dtype] * top
        off = (got - want).detach().abs()
        wrong = ~(off <= allowed)
        if wrong.any():
            at = int(wrong.nonzero()[0, 0])
            pytest.fail(f"{name}: token {at}: got {got[at]:.9g}, expected {want[at]:.9g}, allowed {allowed:.3g} off")

    def check_gradients(self, got: Found, want: Found, dtype: torch.dtype | None = None) -> None:
        """Of every parameter, in L2; the floor is for those that are zero but for rounding."""
        sizes = {name: float(grad.norm()) for name, grad in want.items() if grad is not None}
        floor = 1e-3 * max(sizes.values(), default=0.0)
        for name, right in want.items():
            mine = got[name]
            if right is None or mine is None:
                rest = right if mine is None else mine
                expect(rest is None or not rest.count_nonzero(), f"{name}: only one of the two has a gradient")
                continue
            error, allowed = (
                float((mine - right).norm()),
                10 * self.tolerances[dtype or self.dtypes[0]] * max(sizes[name], floor),
            )
            expect(error <= allowed, f"{name}: the gradient's L2 error is {error:.3g}, allowed {allowed:.3g}")
