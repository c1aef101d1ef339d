"""What packages exchange: results, the plugin protocols, and the flat problem that a backend solves.

Shape suffixes: N tokens, n scored tokens (n <= N), D hidden size, V vocab rows of this rank, r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from logitless.packing import PackedBatch

__all__ = [
    "PROTOCOL",
    "STATS",
    "Adapter",
    "Backend",
    "CausalLMOutputForPPO",
    "ForwardFn",
    "Forwarded",
    "Gradients",
    "Needs",
    "PolicyResult",
    "Problem",
    "Request",
    "TokenLogProbs",
    "TokenLoss",
]

STATS = {"sum_sq_probs": False, "mean_logit": False, "is_argmax": True, "is_kept": True}
"""Names of further statistics, and whether each is of a label (then bool) or of the distribution."""

PROTOCOL = 1
"""Version of the contract between core and its plugins; a plugin states the one that it was written for."""


@dataclass(frozen=True, slots=True)
class TokenLogProbs:
    """Scores of tokens, in nats: float32, or float64 for float64 inputs, shaped like the labels.

    Of labels [..., K], `entropy` is [...], the distribution's. `stats` are those that were asked for, by name.
    """

    log_probs: Tensor
    entropy: Tensor | None
    stats: Mapping[str, Tensor] | None = None


@runtime_checkable
class CausalLMOutputForPPO(Protocol):
    """What a bound model returns; each adapter has one concrete class of this name."""

    @property
    def log_probs(self) -> Tensor | None: ...
    @property
    def entropy(self) -> Tensor | None: ...
    @property
    def values(self) -> Tensor | None: ...
    @property
    def loss(self) -> Tensor | None: ...
    @property
    def logits(self) -> Any:
        """None, always: they are never held."""
        ...

    @property
    def past_key_values(self) -> Any: ...
    @property
    def hidden_states(self) -> Any: ...
    @property
    def attentions(self) -> Any: ...
    @property
    def aux_loss(self) -> Tensor | None: ...
    @property
    def stats(self) -> Mapping[str, Tensor] | None: ...


@dataclass(frozen=True, slots=True)
class Request:
    """What a call asks for, without its tensors: enough for a backend to say whether it can serve.

    While `torch.compile` traces, sizes may be symbolic: `supports` is then asked with sizes of 0 and any LoRA rank as
    1, so its answer must not depend on them; `kept_shape` always gets them.
    """

    device: torch.device
    hidden_dtype: torch.dtype
    weight_dtype: torch.dtype
    n_tokens: int
    hidden_size: int
    vocab_rows: int  # rows of this rank's weight, padding included
    bias: bool = False
    softcap: bool = False
    lora_rank: int = 0  # 0: no LoRA pair
    per_token_temperature: bool = False
    entropy: bool = True
    entropy_grad: bool = True
    needs_grad: bool = True
    grad_buffer: bool = False
    group_size: int = 1  # ranks that share the vocabulary
    policy_loss: bool = False  # single pass: forward and backward in one
    ref_dtypes: tuple[torch.dtype, torch.dtype] | None = None  # of a divergence: the reference's hidden and weight
    workspace_bytes: int = 512 << 20
    validate: bool = True
    kept_set: bool = False  # scores over the tokens that top_k or top_p keeps
    several_labels: bool = False  # labels are [N, K]
    stats: tuple[str, ...] = ()  # more statistics of each token
    best: bool = False  # `top_k_log_probs`

    @property
    def features(self) -> frozenset[str]:
        """What a backend must name in its `features` to be asked at all."""
        asked = {
            "kept_set": self.kept_set,
            "several_labels": self.several_labels,
            "stats": bool(self.stats),
            "top_k_log_probs": self.best,
        }
        return frozenset(name for name, present in asked.items() if present)


@dataclass(slots=True)
class Problem:
    """One call's inputs: flat, checked, and not to be written.

    Not frozen, which would set each field by a call of its own while the device waits.

    `live` holds the ascending indices of the tokens to score, or None for all N. `dead` is given instead when
    nothing may be compacted (`validate=False`): a mask of the tokens whose hidden state must be read as zero, so
    that garbage in it reaches neither an output nor a gradient.

    `live_count` comes only to a backend whose `speculates` is True: the problem is stated as if all N tokens were live,
    before the host knows; labels may then hold anything. Where it holds less than N, the result is thrown away, so a
    kernel may leave at once; `settle`, which a forward may call once its first kernels are launched, ends the call.

    With `top_k` or `top_p`, what is scored is the distribution over the tokens that `logitless.reference.keep` keeps;
    a label that is not among them is scored as if it alone were added. Labels [N, K] are K tokens to score for each
    hidden state; labels of which nothing is wanted are some valid token there, and their upstream gradient is 0.
    """

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    lora_u: Tensor | None  # [N, r]
    lora_b: Tensor | None  # [V, r]
    labels: Tensor  # [N] or [N, K] int64, global vocab ids; anything at tokens that are not live
    temperature: Tensor | float  # [N] in the accumulation dtype, or one number
    scale: float
    softcap: float | None
    vocab_start: int  # global id of row 0
    vocab_valid: int  # rows of this rank that are real; the rest are padding
    vocab_size: int  # real rows over all ranks
    live: Tensor | None  # [n] int64
    dead: Tensor | None  # [N] bool
    workspace_bytes: int
    group: Any = None  # the torch.distributed group whose ranks share the vocabulary
    reduce_hidden_grad: bool = True  # sum d_hidden and d_lora_u over the group
    live_count: Tensor | None = None  # [] int64, on the device
    settle: Callable[[], None] | None = None  # waits until the host knows, and raises if some token is not live
    last: bool = False  # of a backward: no other will read what was kept, so it may be overwritten
    top_k: int | None = None  # less than vocab_size
    top_p: float | None = None  # less than 1
    stats: tuple[str, ...] = ()  # names of STATS


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A backend's forward: scores of the n live tokens, and what its own backward wants back."""

    log_probs: Tensor  # [n] or [n, K], float32, or float64 for float64 inputs
    entropy: Tensor | None  # [n], same dtype
    stats: Tensor  # [4, n], or [4 + K, n] with a kept set or several labels, same dtype; opaque to core
    kept: Tensor  # [kept_shape] uint8; opaque to core
    extras: Tensor | None = None  # [rows, n], same dtype: each of `Problem.stats` a row, or K where it is of a label


@dataclass(frozen=True, slots=True)
class Needs:
    """Which gradients are asked for; a backend does no work for the others."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lora_u: bool = False
    lora_b: bool = False


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients in their inputs' shapes and dtypes; None where none was asked for."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    lora_u: Tensor | None = None
    lora_b: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """A backend's single pass: scores of the n live tokens, and the gradients of the summed token losses."""

    log_probs: Tensor  # [n]
    entropy: Tensor | None  # [n]
    gradients: Gradients


class TokenLoss(Protocol):
    """The caller's loss, as a backend sees it: scores of a range of live tokens in, upstream gradients out."""

    def __call__(self, log_probs: Tensor, entropy: Tensor | None, tokens: range) -> tuple[Tensor, Tensor | None] | None:
        """Gradients [m] of log_probs and entropy (None: none is wanted), or None if no gradient is to be made."""
        ...


class Backend(Protocol):
    """Solves a `Problem`; equals `logitless.reference` within the project's precision contract.

    The functions are plain: autograd, custom ops, validation, ignored tokens and the choice of backend are core's.

    Some attributes may be left out. `features`: a frozenset of those of "kept_set", "several_labels", "stats" and
    "top_k_log_probs" that it serves; a request for another never reaches `supports`. With "top_k_log_probs",
    `top_k_log_probs(problem, k)` gives ids [n, k] int64 and log-probs [n, k] of the largest logits, of equal ones the
    lowest id first; the problem's labels are of no use. `speculates = True`: `forward`, `policy_loss` and `kl_forward`
    may be called before the host knows whether all tokens are live (`Problem.live_count`); `token_loss`, which waits
    until it does, raises if not, and until it has returned no `grad_buffer` is written. `multiply_(gradient, factor)`:
    multiplies a gradient in place by a factor [] on the device, at no cost where that is 1. For `linear_kl`, of two
    problems with the same tokens and vocab rows: `kl_forward(student, teacher, *, direction, beta)` gives the
    divergences [n] and statistics [5, n] (opaque to core), `kl_backward(student, teacher, stats, grad, needs, *,
    direction, beta)` the student's `Gradients` for upstream [n]. With `kl_kept_shape(request, keep_bytes)` besides, as
    `kept_shape`, both are also given `kept=`, a uint8 buffer of that shape, unless it is empty: `kl_forward` writes all
    of it, `kl_backward` reads it.
    """

    @property
    def name(self) -> str: ...
    @property
    def priority(self) -> int:
        """The highest that supports a request is chosen when nobody names one."""
        ...

    @property
    def protocol(self) -> int: ...

    def supports(self, request: Request) -> str | None:
        """None if the request can be served, else a sentence that the user reads."""
        ...

    def kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        """Shape of the uint8 buffer that `forward` returns as `kept`: at most `keep_bytes` elements."""
        ...

    def forward(self, problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]) -> Forwarded:
        """Scores; `entropy_grad=False` says that no gradient of the entropy will come. It changes no bit of them."""
        ...

    def backward(
        self,
        problem: Problem,
        stats: Tensor,
        kept: Tensor,
        grad_log_probs: Tensor,
        grad_entropy: Tensor | None,
        needs: Needs,
        grad_buffer: Tensor | None,
    ) -> Gradients:
        """Gradients for upstream [n] gradients; with `grad_buffer` [V, D] float32, d_weight is added into it."""
        ...

    def policy_loss(
        self, problem: Problem, *, entropy: bool, token_loss: TokenLoss, needs: Needs, grad_buffer: Tensor | None
    ) -> PolicyResult:
        """Forward, loss and backward over chunks of live tokens; `token_loss` is called once for each, in order.

        Gradients of float16 inputs come in float32: the upstream gradient (a GradScaler's, say) is multiplied in
        later, and what fp16 had rounded to zero by then would be lost.
        """
        ...


class ForwardFn(Protocol):
    """A model bound for training: this rank's tokens in, their scores out.

    `top_k`, `top_p` and `stats` are `linear_log_probs`'s. `labels` [T] or [T, K] stand in place of the batch's own, in
    its order and already shifted; log_probs, and statistics of a label, are then of their shape.
    """

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
    ) -> CausalLMOutputForPPO: ...


class Adapter(Protocol):
    """Binds the models of one framework."""

    @property
    def name(self) -> str: ...
    @property
    def protocol(self) -> int: ...

    def supports(self, model: Any) -> str | None:
        """None if this adapter knows the model, else a sentence that the user reads."""
        ...

    def make_forward(self, model: Any, layout: str, backend: str | None) -> ForwardFn: ...

    def inspect(self, path: str) -> Mapping[str, Any]:
        """The verdict on a checkpoint's head, as names and values to print."""
        ...
