"""The plugin that core finds. Triton and its kernels are imported at the first call, never before."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import torch
from torch import Tensor

from logitless.types import Forwarded, Gradients, Needs, PolicyResult, Problem, Request, TokenLoss
from logitless_triton.config import device_facts
from logitless_triton.layout import divergence_length, kept_length

__all__ = ["TritonBackend"]

SERVED = (torch.bfloat16, torch.float16, torch.float32)


class TritonBackend:
    """Equals `logitless.reference` on NVIDIA GPUs of capability 8.0 and up, the logits in tiles on the chip only."""

    name = "triton"
    priority = 10
    protocol = 1
    speculates = True
    features = frozenset({"kept_set", "several_labels", "stats", "top_k_log_probs"})

    def supports(self, request: Request) -> str | None:
        """None, or why a request cannot be served: device, dtypes, or what is missing."""
        return _missing() or _device(request.device) or _dtypes(request)

    def kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        """Room for the leading vocab columns of all tokens, as many as `keep_bytes` allows."""
        return (kept_length(request, keep_bytes),)

    def explain(self, request: Request, keep_bytes: int = 0) -> str:
        """What a call will do, for people: `logitless_triton.plan`."""
        from logitless_triton.plan import plan

        return str(plan(request, keep_bytes))

    def forward(self, problem: Problem, *, entropy: bool, entropy_grad: bool, kept_shape: tuple[int, ...]) -> Forwarded:
        """`logitless_triton.forward.forward`, or where logits have to be held `logitless_triton.held.forward`."""
        from logitless_triton import held
        from logitless_triton.forward import forward

        if held.needs_logits(problem):
            return held.forward(problem, entropy=entropy)
        return forward(problem, entropy=entropy, entropy_grad=entropy_grad, kept_shape=kept_shape)

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
        """`logitless_triton.backward.backward`."""
        from logitless_triton.backward import backward

        return backward(problem, stats, kept, grad_log_probs, grad_entropy, needs, grad_buffer)

    def policy_loss(
        self, problem: Problem, *, entropy: bool, token_loss: TokenLoss, needs: Needs, grad_buffer: Tensor | None
    ) -> PolicyResult:
        """`logitless_triton.policy.policy_loss`."""
        from logitless_triton.policy import policy_loss

        return policy_loss(problem, entropy=entropy, token_loss=token_loss, needs=needs, grad_buffer=grad_buffer)

    def top_k_log_probs(self, problem: Problem, k: int) -> tuple[Tensor, Tensor]:
        """`logitless_triton.best.top_k_log_probs`."""
        from logitless_triton.best import top_k_log_probs

        return top_k_log_probs(problem, k)

    def kl_kept_shape(self, request: Request, keep_bytes: int) -> tuple[int, ...]:
        """Room for dz of the leading vocab columns of all tokens, as many as `keep_bytes` allows."""
        return (divergence_length(request, keep_bytes),)

    def kl_forward(
        self, student: Problem, teacher: Problem, *, direction: str, beta: float, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`logitless_triton.kl.kl_forward`."""
        from logitless_triton.kl import kl_forward

        return kl_forward(student, teacher, direction=direction, beta=beta, kept=kept)

    def kl_backward(
        self,
        student: Problem,
        teacher: Problem,
        stats: Tensor,
        grad: Tensor,
        needs: Needs,
        *,
        direction: str,
        beta: float,
        kept: Tensor | None = None,
    ) -> Gradients:
        """`logitless_triton.kl.kl_backward`."""
        from logitless_triton.kl import kl_backward

        return kl_backward(student, teacher, stats, grad, needs, direction=direction, beta=beta, kept=kept)

    def multiply_(self, gradient: Tensor, factor: Tensor) -> None:
        """`logitless_triton.rounding.multiply_`."""
        from logitless_triton.rounding import multiply_

        multiply_(gradient, factor)


def _missing() -> str | None:
    if "triton" not in sys.modules and find_spec("triton") is None:
        return "Triton is not installed; pip install 'triton>=3.5' (Linux only; PyTorch's CUDA builds bring it)"
    return None


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: decided where Triton reads it, when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def _device(device: torch.device) -> str | None:
    if device.type == "cpu":
        if interpreted():
            return None
        return (
            "it runs on NVIDIA GPUs, and hidden is on the CPU; move it, or take the torch backend (TRITON_INTERPRET=1, "
            "set before Triton is imported, runs the kernels in an interpreter, for tests)"
        )
    if device.type != "cuda" or torch.version.hip is not None:
        return f"it runs on NVIDIA GPUs, and hidden is on {'an AMD GPU' if torch.version.hip else device.type}"
    major, minor = device_facts(device).capability
    if major < 8:
        return f"it needs a GPU of capability 8.0 (Ampere) or newer, and {device} has {major}.{minor}"
    return None


def _dtypes(request: Request) -> str | None:
    reason = _pair(request.hidden_dtype, request.weight_dtype, request.device)
    if reason is None and request.ref_dtypes is not None:
        reason = _pair(*request.ref_dtypes, request.device)
        return reason and f"of the reference, {reason}"
    return reason


def _pair(hidden: torch.dtype, weight: torch.dtype, device: torch.device) -> str | None:
    for name, dtype in (("hidden", hidden), ("weight", weight)):
        if dtype not in SERVED:
            return f"{name} is {dtype}, and it serves bfloat16, float16 and float32; take the torch backend"
    if torch.promote_types(hidden, weight) != weight:
        return f"hidden is {hidden} and weight {weight}, whose whole it would have to copy; cast hidden to {weight}"
    if device.type == "cpu" and weight == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly; use float32 or float16 there"
    return None
