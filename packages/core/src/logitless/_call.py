"""One call of the op, checked and flattened: what both directions, and the single pass, start from.

Shape suffixes: N tokens, n live tokens, K labels of a token, D hidden size, V vocab rows of this rank, r LoRA rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from logitless._live import Live, SomeIgnored
from logitless._registry import BACKENDS, choose_backend, load, requested_backend
from logitless._transforms import refuse_transforms
from logitless._validate import check_call, check_kept
from logitless.collectives import Agreement, debugging, group_facts, resolve_group
from logitless.errors import InputTypeError
from logitless.head import LMHead
from logitless.types import Backend, Problem, Request

__all__ = ["FIRST_ONLY", "Call", "make_call", "spread"]

FIRST_ONLY = (
    "logitless gives first derivatives only: got a backward through the backward (create_graph=True), expected "
    "one pass; take second derivatives from logitless.reference"
)


Found = TypeVar("Found")


@dataclass(slots=True)
class Call:
    """What both ops take, in the order of their schemas; not frozen, for the reason that `Problem` gives."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    lora_u: Tensor | None  # [N, r]
    lora_b: Tensor | None  # [V, r]
    labels: Tensor  # [N] or [N, K] int64
    temperature: Tensor | None  # [N]; None: temperature_value
    temperature_value: float
    scale: float
    softcap: float | None
    vocab_start: int
    vocab_size: int
    ignore_index: int
    workspace_bytes: int
    validate: bool
    backend: str
    group: str  # name of the process group that shares the vocabulary; "": none
    reduce_hidden_grad: bool
    top_k: int | None = None
    top_p: float | None = None

    @property
    def args(self) -> list[Any]:
        """The fields in order, as the ops take them."""
        return [getattr(self, name) for name in _FIELDS]

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        return (self.hidden, self.weight, self.bias, self.lora_u, self.lora_b)

    @property
    def plugin(self) -> Backend:
        backend: Backend = load(BACKENDS, self.backend)
        return backend

    @property
    def accumulation_dtype(self) -> torch.dtype:
        return torch.promote_types(torch.promote_types(self.hidden.dtype, self.weight.dtype), torch.float32)

    def request(self, entropy: bool, entropy_grad: bool, stats: tuple[str, ...] = ()) -> Request:
        return Request(
            device=self.hidden.device,
            hidden_dtype=self.hidden.dtype,
            weight_dtype=self.weight.dtype,
            n_tokens=self.hidden.shape[0],
            hidden_size=self.hidden.shape[1],
            vocab_rows=self.weight.shape[0],
            bias=self.bias is not None,
            softcap=self.softcap is not None,
            lora_rank=0 if self.lora_b is None else self.lora_b.shape[1],
            per_token_temperature=self.temperature is not None,
            entropy=entropy,
            entropy_grad=entropy_grad,
            workspace_bytes=self.workspace_bytes,
            validate=self.validate,
            group_size=1 if self.process_group is None else self.process_group.size(),
            kept_set=self.truncated,
            several_labels=self.labels.ndim == 2,
            stats=stats,
        )

    @property
    def truncated(self) -> bool:
        """Whether the scores are those of a kept set."""
        return self.top_k is not None or self.top_p is not None

    @property
    def stats_rows(self) -> int:
        """Numbers of each token that the backend's forward leaves for its backward."""
        if self.labels.ndim == 2:
            return 4 + self.labels.shape[1]
        return 5 if self.truncated else 4

    def kept_shape(
        self, entropy: bool, entropy_grad: bool, keep_bytes: int, stats: Sequence[str] = ()
    ) -> tuple[int, ...]:
        if not keep_bytes:
            return (0,)
        return self.plugin.kept_shape(self.request(entropy, entropy_grad, tuple(stats)), keep_bytes)

    @property
    def process_group(self) -> Any:
        return resolve_group(self.group) if self.group else None

    def live(self, op: str, **more: object) -> Live:
        """Which tokens are live, asked now and read later; of a group, every rank must ask the same.

        Where nothing may be copied to the host (`validate=False` on a GPU), the ranks are not compared.
        """
        agreement = None
        if self.group and (self.validate or not self.hidden.is_cuda or debugging()):
            group = self.process_group
            if group.size() > 1:
                span = (self.vocab_start, self.vocab_start + self.weight.shape[0])
                agreement = Agreement(group, {"op": op, **self.facts, **more}, span, self.vocab_size)
        return Live(self.labels, self.temperature, self.ignore_index, self.vocab_size, self.validate, agreement)

    def solved(self, live: Live, solve: Callable[[Problem], Found], stats: tuple[str, ...] = ()) -> Found:
        """What `solve` makes of the problem: before the host knows, as if every token were live, or of those.

        The wait comes last: what is done before it, the device's work hides. A `solve` that cannot put it off settles
        it earlier.
        """
        if live.on_device is not None and getattr(self.plugin, "speculates", False):
            found: Found | None = None
            with suppress(SomeIgnored):
                found = solve(self.problem(None, live, stats=stats))
                live.settle()
                return found
            del found  # its memory first
        return solve(self.problem(live.indices, stats=stats))

    @property
    def facts(self) -> dict[str, object]:
        """What every rank of a group must have in common; what is said of it depends on its values alone."""
        return {
            "labels' shape": tuple(self.labels.shape),
            "hidden's shape": tuple(self.hidden.shape),
            "hidden's dtype": self.hidden.dtype,
            "weight's dtype": self.weight.dtype,
            "bias, LoRA rank": (self.bias is not None, 0 if self.lora_b is None else self.lora_b.shape[1]),
            "vocab_size": self.vocab_size,
            "scale, softcap": (self.scale, self.softcap),
            "temperature": "one for each token" if self.temperature is not None else self.temperature_value,
            "ignore_index": self.ignore_index,
            "workspace_bytes": self.workspace_bytes,
            "validate": self.validate,
            "reduce_hidden_grad": self.reduce_hidden_grad,
            "top_k, top_p": (self.top_k, self.top_p),
            "backend": self.backend,
        }

    def problem(
        self,
        live: Tensor | None,
        ahead: Live | None = None,
        *,
        last: bool = False,
        stats: tuple[str, ...] = (),
    ) -> Problem:
        """What the backend solves, for the live tokens' indices [n]; None: all, or `ahead` of what they are."""
        labels, dead = self.labels, None if self.validate else self.labels == self.ignore_index
        if not self.validate:
            labels = labels.clamp(0, self.vocab_size - 1)
        elif labels.ndim == 2:
            labels = labels.masked_fill(labels == self.ignore_index, 0)
        if dead is not None and dead.ndim == 2:
            dead = dead.all(1)
        temperature: Tensor | float = self.temperature_value
        if self.temperature is not None:
            temperature = self.temperature if dead is None else self.temperature.masked_fill(dead, 1.0)
        return Problem(
            hidden=self.hidden,
            weight=self.weight,
            bias=self.bias,
            lora_u=self.lora_u,
            lora_b=self.lora_b,
            labels=labels,
            temperature=temperature,
            scale=self.scale,
            softcap=self.softcap,
            vocab_start=self.vocab_start,
            vocab_valid=max(0, min(self.weight.shape[0], self.vocab_size - self.vocab_start)),
            vocab_size=self.vocab_size,
            live=live,
            dead=dead,
            workspace_bytes=self.workspace_bytes,
            group=self.process_group,
            reduce_hidden_grad=self.reduce_hidden_grad,
            live_count=None if ahead is None else ahead.on_device,
            settle=None if ahead is None else ahead.settle,
            last=last,
            top_k=self.top_k,
            top_p=self.top_p,
            stats=stats,
        )

    def unchecked(self, *values: Tensor | None, index: Tensor | None = None) -> list[Tensor | None]:
        """What `validate=False` promises: exactly 0 where ignored, NaN where the label is no token.

        `values` are those of all tokens, or of the tokens in `index`; empty ones are left alone. Of a token of several
        labels, what is not of a label is NaN where one of them is no token, and 0 where all are ignored.
        """
        labels = self.labels if index is None else self.labels[index]
        bad, ignored = labels.clamp(0, self.vocab_size - 1) != labels, labels == self.ignore_index

        def told(x: Tensor) -> Tensor:
            if x.ndim == labels.ndim:
                return x.masked_fill(bad, float("nan")).masked_fill_(ignored, 0.0)
            return x.masked_fill((bad & ~ignored).any(1), float("nan")).masked_fill_(ignored.all(1), 0.0)

        return [told(x) if x is not None and x.shape[0] else x for x in values]


_FIELDS = tuple(field.name for field in fields(Call))


def spread(values: Tensor, live: Tensor | None, n_tokens: int, dim: int = -1) -> Tensor:
    """The n live tokens along `dim` to all N, 0 elsewhere."""
    if live is None:
        return values
    shape = list(values.shape)
    shape[dim] = n_tokens
    return values.new_zeros(shape).index_copy_(dim, live, values)


def _resolve(requested: str | None, **asked: Any) -> str:
    requested = requested_backend(requested)
    chosen = choose_backend(Request(**asked), requested)
    return requested or chosen.name


# A ContextVar, the environment and entry points cannot be traced; while compiling, the choice is made once. This is
# all that torch.compiler.assume_constant_result does, but for importing torch._dynamo, and with it triton, right here.
_resolve._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _single_pair(head: LMHead, n_tokens: int) -> tuple[Tensor | None, Tensor | None]:
    """LoRA pairs as one: `Σ u·Bᵀ` is the product of the concatenated ranks."""
    if not head.lora:
        return None, None
    us = [u.reshape(n_tokens, u.shape[-1]) for u, _ in head.lora]
    bs = [b for _, b in head.lora]
    return (us[0], bs[0]) if len(us) == 1 else (torch.cat(us, dim=-1), torch.cat(bs, dim=-1))


def _vocab_span(head: LMHead, rank: int, size: int) -> tuple[int, int]:
    """(vocab_start, vocab_size), with their defaults."""
    rows = head.weight.shape[0]
    start = rank * rows if head.vocab_start is None else head.vocab_start
    return start, rows * size if head.vocab_size is None else head.vocab_size


def make_call(
    hidden: Tensor,
    head: LMHead | Tensor,
    labels: Tensor,
    *,
    temperature: float | Tensor,
    entropy: bool,
    entropy_grad: bool,
    ignore_index: int,
    tp_group: Any,
    reduce_hidden_grad: bool,
    keep_bytes: int,
    workspace_bytes: int,
    validate: bool,
    backend: str | None,
    policy_loss: bool = False,
    ref_dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    stats: tuple[str, ...] = (),
    best: bool = False,
) -> tuple[Call, bool]:
    """The checked call on flat tensors, and whether any gradient is wanted; chooses the backend."""
    if isinstance(head, Tensor):
        head = LMHead(head)
    if not isinstance(head, LMHead):
        raise InputTypeError(f"head: got {type(head).__qualname__}, expected a [V, D] tensor or a logitless.LMHead")
    rank, size, group = (0, 1, "") if tp_group is None else group_facts(tp_group)
    flags = {
        "entropy": entropy,
        "entropy_grad": entropy_grad,
        "reduce_hidden_grad": reduce_hidden_grad,
        "validate": validate,
    }
    check_call(hidden, head, labels, temperature, ignore_index, keep_bytes, workspace_bytes, size, flags)
    refuse_transforms(hidden, head, policy_loss)
    vocab_start, vocab_size = _vocab_span(head, rank, size)
    top_k, top_p = check_kept(top_k, top_p, vocab_size)
    if head.scale == 0:  # every logit is equal, and equal ones are kept together
        top_k = top_p = None
    weight, device_type = head.weight, hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)  # which leaves float64 alone, as for torch's own functions
        hidden, weight = (x if x.dtype == torch.float64 else x.to(dtype) for x in (hidden, weight))
    tokens, several = hidden.shape[:-1], labels.ndim == hidden.ndim
    n_tokens = math.prod(tokens)
    lora_u, lora_b = _single_pair(head, n_tokens)
    trained = (hidden, weight, head.bias, lora_u, lora_b)
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained)
    tracing = torch.compiler.is_compiling()
    name = _resolve(
        backend,
        n_tokens=0 if tracing else n_tokens,
        hidden_size=0 if tracing else hidden.shape[-1],
        vocab_rows=0 if tracing else weight.shape[0],
        device=hidden.device,
        hidden_dtype=hidden.dtype,
        weight_dtype=weight.dtype,
        bias=head.bias is not None,
        softcap=head.softcap is not None,
        lora_rank=0 if lora_b is None else 1 if tracing else lora_b.shape[1],
        per_token_temperature=isinstance(temperature, Tensor),
        entropy=entropy,
        entropy_grad=entropy and entropy_grad and needs_grad,
        needs_grad=needs_grad,
        grad_buffer=head.grad_buffer is not None,
        group_size=size,
        policy_loss=policy_loss,
        ref_dtypes=ref_dtypes,
        validate=validate,
        kept_set=top_k is not None or top_p is not None,
        several_labels=several,
        stats=stats,
        best=best,
    )
    temperature_N = None
    if isinstance(temperature, Tensor):
        wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        temperature_N = temperature.to(wide).expand(tokens).reshape(-1)
    call = Call(
        hidden=hidden.reshape(n_tokens, hidden.shape[-1]),
        weight=weight,
        bias=head.bias,
        lora_u=lora_u,
        lora_b=lora_b,
        labels=labels.reshape(n_tokens, labels.shape[-1]).long() if several else labels.reshape(-1).long(),
        temperature=temperature_N,
        temperature_value=1.0 if isinstance(temperature, Tensor) else float(temperature),
        scale=float(head.scale),
        softcap=None if head.softcap is None else float(head.softcap),
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        ignore_index=ignore_index,
        workspace_bytes=workspace_bytes,
        validate=validate,
        backend=name,
        group=group,
        reduce_hidden_grad=reduce_hidden_grad,
        top_k=top_k,
        top_p=top_p,
    )
    return call, needs_grad
