"""What the conformance checks share: settings, the choice of parameters, and running a call."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from logitless.errors import UnsupportedError
from logitless.policy import linear_policy_loss
from logitless.testing._kit import Kit
from logitless.testing.cases import cases
from logitless.testing.example import Example, Results, random_example
from logitless.testing.tolerance import check_results
from logitless.types import TokenLogProbs

__all__ = ["FEATURES", "OPTIONS", "ConformanceChecks", "bias_of", "entropy_of"]

FEATURES = {"bias", "softcap", "lora", "per_token_temperature", "grad_buffer", "unvalidated", "policy_loss"}
"""What `BackendConformance.refuses` may name; "unvalidated" is validate=False."""

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

    def run(self, example: Example, **options: Any) -> Results:
        """Forward and backward on the backend; where it refuses the call, checks that and skips."""
        refused = example.features | ({"unvalidated"} if not options.get("validate", True) else set())
        refused &= set(self.refuses)
        if refused:
            with pytest.raises(UnsupportedError):
                example.score(backend=self.backend, **options)
            pytest.skip(f"refuses {', '.join(sorted(refused))}, and says so")
        return example.run(backend=self.backend, **options)

    def run_policy_loss(self, example: Example, **options: Any) -> tuple[Tensor, Results]:
        """`linear_policy_loss` with a loss that has the example's upstream gradients, and its backward."""
        refused = (example.features | {"policy_loss"}) & set(self.refuses)
        fresh, g, e = example.fresh(), example.grad_log_probs.flatten(), example.grad_entropy.flatten()

        def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
            loss = g[index] * scores.log_probs
            return loss if scores.entropy is None else loss + e[index] * scores.entropy

        def run() -> tuple[Tensor, TokenLogProbs]:
            return linear_policy_loss(
                fresh.hidden,
                fresh.head,
                fresh.labels,
                loss_fn,
                temperature=fresh.temperature,
                ignore_index=fresh.ignore_index,
                backend=self.backend,
                **options,
            )

        if refused:
            with pytest.raises(UnsupportedError):
                run()
            pytest.skip(f"refuses {', '.join(sorted(refused))}, and says so")
        loss, scores = run()
        leaves = fresh.leaves()
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        return loss, Results(scores, dict(zip(leaves, grads, strict=True)))

    def check(self, example: Example, **options: Any) -> Results:
        """`run`, held to the truth."""
        got = self.run(example, **options)
        check_results(got, example)
        return got


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
