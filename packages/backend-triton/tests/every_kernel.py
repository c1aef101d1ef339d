"""Runs every kernel on small shapes, for a tool that watches memory: nothing is compared here.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python every_kernel.py [bfloat16 …]
    compute-sanitizer --tool racecheck python every_kernel.py [bfloat16 …]

Without PyTorch's cache each tensor is an allocation of its own, so that a read beyond one is seen. Tokens, columns and
hidden sizes leave every tile ragged, with rows that TMA descriptors can read and rows that they cannot.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from logitless import TokenLogProbs, linear_policy_loss, top_k_log_probs
from logitless.testing.divergence import DIRECTIONS, random_divergence
from logitless.testing.example import random_example

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"bias": True, "lora": (3,), "softcap": 5.0, "vocab_size": 283, "per_token_temperature": True},
}
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {},
    "kept": {"keep_bytes": 1 << 24},
    "half kept": {"keep_bytes": 1 << 15},
    "kept exponentials": {"keep_bytes": 1 << 24, "entropy_grad": False},
    "unvalidated": {"validate": False},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.9},
    "both": {"top_k": 90, "top_p": 0.8, "stats": ("is_kept",)},
    "stats": {"stats": ("sum_sq_probs", "mean_logit", "is_argmax")},
}


def main() -> None:
    names = sys.argv[1:] or (["bfloat16", "float16", "float32"] if DEVICE == "cuda" else ["float32"])
    for dtype in (getattr(torch, name) for name in names):
        for hidden_size in (40, 23):
            options: dict[str, Any] = {"vocab": 300, "hidden_size": hidden_size, "dtype": dtype, "device": DEVICE}
            for head, more in HEADS.items():
                example = random_example(130, **options, **more).fresh()
                for asked in WAYS.values():
                    out = example.score(backend="triton", **asked)
                    example.pull(out)
                _single_pass(example)
                top_k_log_probs(example.hidden, example.head, 5, backend="triton")
                print(f"{dtype}, D {hidden_size}, {head} head", flush=True)
            for direction in DIRECTIONS:
                case = random_divergence(130, direction=direction, ref_hidden_size=16, **options)
                for keep_bytes in (0, 1 << 16, 1 << 24):
                    case.run(backend="triton", keep_bytes=keep_bytes)
        wide = random_example(130, vocab=5003, hidden_size=40, dtype=dtype, device=DEVICE)  # so many have a short list
        for asked in ({"top_k": 3000}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.5}):
            wide.score(backend="triton", **asked)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print("all kernels ran")


def _single_pass(example: Any) -> None:
    weights = torch.linspace(-1.0, 2.0, len(example.labels), device=DEVICE)

    def loss_fn(scores: TokenLogProbs, index: Tensor) -> Tensor:
        assert scores.entropy is not None
        return weights[index] * scores.log_probs + 0.1 * scores.entropy

    loss, _ = linear_policy_loss(
        example.hidden, example.head, example.labels, loss_fn, temperature=example.temperature, backend="triton"
    )
    loss.backward()


if __name__ == "__main__":
    main()
