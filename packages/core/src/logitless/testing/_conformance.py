"""What the conformance checks share: settings, the choice of parameters, and running a call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from torch import Tensor

from logitless import _registry
from logitless.errors import UnsupportedError
from logitless.policy import linear_policy_loss
from logitless.testing._kit import Kit
from logitless.testing.cases import cases
from logitless.testing.example import Example, Results, random_example
from logitless.testing.memory import poisoned
from logitless.testing.tolerance import check_results
from logitless.types import TokenLogProbs

__all__ = ["FEATURES", "OPTIONS", "ConformanceChecks", "bias_of", "entropy_of"]

T = TypeVar("T")

FEATURES = {"bias", "softcap", "lora", "per_token_temperature", "grad_buffer", "unvalidated", "policy_loss"}
"""What `BackendConformance.refuses` may name; "unvalidated" is validate=False. What is served besides is read off the
backend's own `features`."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.37},
    "negative-scale": {"scale": -1.5},
    "softcap": {"softcap": 3.0},
    "scale-softcap-temperature": {"scale": 1.7, "softcap": 4.0, "temperature": 0.7},
    "padded-vocab": {"vocab_size": 131},
    "lora": {"lora": (3,)},
    "two-loras": {"lora": (2, 5), "bias": True, "scale": 0.8},
    "temperature": {"temperature": 0.7},
    "per-token-temperature": {"per_token_temperature": True},
    "all": {
        "bias": True,
        "scale": 1.3,
        "softcap": 5.0,
        "vocab_size": 131,
        "lora": (4,),
        "per_token_temperature": True,
    },
}


class ConformanceChecks(Kit, kit=True):
    """What the author of a backend sets, and what the checks share."""

    backend: ClassVar[str]
    """Name under which the backend is installed."""
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16)
    """Input dtypes that it serves; the checks run in each."""
    refuses: ClassVar[Collection[str]] = ()
    """Those of `FEATURES` that its `supports` refuses."""
    sizes: ClassVar[tuple[int, int, int]] = (13, 157, 24)
    """Tokens, vocab rows and hidden size of random inputs."""
    drawn: ClassVar[int] = 20
    """How many examples hypothesis draws for each property."""
    weight_factor: ClassVar[float] = 1.3
    """Floors that d_weight may take where the entropy has no gradient; 1.1 everywhere else."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if set(cls.refuses) - FEATURES:
            raise TypeError(f"{cls.__qualname__}.refuses: got {sorted(cls.refuses)}, expected some of {FEATURES}")

    def parameters(self) -> Mapping[str, tuple[Any, Any]]:
        """Each check runs in each dtype, and with each case or option where it asks for one."""
        return {
            "dtype": (self.dtypes, lambda dtype: str(dtype).removeprefix("torch.")),
            "case": (cases(), lambda case: case.id),
            "option": (tuple(OPTIONS), None),
        }

    def example(self, dtype: torch.dtype, tokens: int | tuple[int, ...] | None = None, **options: Any) -> Example:
        """Random inputs of this backend's sizes on its device."""
        count, vocab, hidden_size = self.sizes
        options = {"vocab": vocab, "hidden_size": hidden_size, "dtype": dtype, "device": self.device, **options}
        return random_example(count if tokens is None else tokens, **options)

    def supported(self, option: Mapping[str, Any]) -> dict[str, Any]:
        """The parts of an option that this backend does not refuse."""
        return {name: value for name, value in option.items() if name not in self.refuses}

    def attempt(self, asked: Collection[str], call: Callable[[], T]) -> T:
        """The call's result, where memory that is not written reads as NaN; what is refused must raise, and skips."""
        plugin = _registry.load(_registry.BACKENDS, self.backend)
        lacking = _registry.FEATURES.keys() - getattr(plugin, "features", frozenset())
        refused = sorted(set(asked) & (set(self.refuses) | lacking))
        if refused:
            try:
                call()
            except UnsupportedError:
                pytest.skip(f"refuses {', '.join(refused)}, and says so")
            pytest.fail(
                f"{', '.join(refused)}: the call was served, though `refuses` names it or `Backend.features` does not; "
                "mend these, or refuse it in `supports`"
            )
        with poisoned():
            return call()

    def run(self, example: Example, **options: Any) -> Results:
        """Forward and backward on the backend; where it refuses the call, checks that and skips."""
        return self.attempt(_asked(example, options), lambda: example.run(backend=self.backend, **options))

    def run_policy_loss(self, example: Example, **options: Any) -> tuple[Tensor, Results]:
        """`linear_policy_loss` with a loss that has the example's upstream gradients, and its backward."""
        fresh, g, e = example.fresh(), example.grad_log_probs.flatten(), example.grad_entropy.flatten()
        leaves = fresh.leaves()

        def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
            loss = g[index] * scores.log_probs
            return loss if scores.entropy is None else loss + e[index] * scores.entropy

        def call() -> tuple[Tensor, Results]:
            loss, scores = linear_policy_loss(
                fresh.hidden,
                fresh.head,
                fresh.labels,
                loss_fn,
                temperature=fresh.temperature,
                ignore_index=fresh.ignore_index,
                backend=self.backend,
                **options,
            )
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            return loss, Results(scores, dict(zip(leaves, grads, strict=True)))

        return self.attempt({"policy_loss", *_asked(example, options)}, call)

    def check(self, example: Example, **options: Any) -> Results:
        """`run`, held to the truth."""
        got = self.run(example, **options)
        check_results(got, example)
        return got


def _asked(example: Example, options: Mapping[str, Any]) -> set[str]:
    """What a call asks for, by the names of FEATURES and of `Backend.features`."""
    asked = {
        "unvalidated": not options.get("validate", True),
        "kept_set": "top_k" in options or "top_p" in options,
        "stats": bool(options.get("stats")),
    }
    return example.features | {name for name, present in asked.items() if present}


def entropy_of(out: TokenLogProbs) -> Tensor:
    """The entropy, which must be there."""
    if out.entropy is None:
        pytest.fail("out.entropy is None")
    return out.entropy


def bias_of(example: Example) -> Tensor:
    """The bias, which must be there."""
    if example.head.bias is None:
        pytest.fail("the example has no bias")
    return example.head.bias
