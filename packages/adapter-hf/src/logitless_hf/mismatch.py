"""A picture of how far a trainer's log-probs are from the rollout engine's; the numbers are `logitless.mismatch`'s."""

from __future__ import annotations

import importlib.util
import math
from os import PathLike
from typing import IO

import torch
from torch import Tensor

from logitless.errors import NotFoundError
from logitless.mismatch import RATIO_INTERVAL, Mismatch, rollout_mismatch

__all__ = ["can_plot", "plot_mismatch"]

_BINS = 101


def can_plot() -> bool:
    """Whether matplotlib, the extra `plot`, is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@torch.no_grad()
def plot_mismatch(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    target: str | PathLike[str] | IO[bytes],
    mask: Tensor | None = None,
    *,
    of: Mismatch | None = None,
) -> Mismatch:
    """Draw both log-probs against each other, and the spread of their differences, as a PNG.

    Args:
        log_probs, rollout_log_probs, mask: as in `logitless.mismatch.rollout_mismatch`.
        target: a path, or a binary file that is open for writing.
        of: the statistics to print above, if the tensors are but a sample; by default the tensors' own.

    Returns:
        The statistics that are printed.

    Raises:
        NotFoundError: matplotlib is not installed.
        InvalidInputError, InputTypeError: as in `rollout_mismatch`.
    """
    if not can_plot():
        raise NotFoundError("plot_mismatch needs matplotlib, which is not installed: pip install 'logitless-hf[plot]'")
    from matplotlib.figure import Figure

    found = rollout_mismatch(log_probs, rollout_log_probs, mask)
    of = found if of is None else of
    ours, theirs = (x.detach().double().cpu().flatten() for x in (log_probs, rollout_log_probs))
    if mask is not None:
        counted = (mask != 0).cpu().flatten()
        ours, theirs = ours[counted], theirs[counted]
    delta = ours - theirs
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(theirs.numpy(), ours.numpy(), ".", markersize=3, alpha=0.5)
    left.axline((0, 0), slope=1, color="grey", linewidth=0.7)
    left.set(xlabel="log-prob of the rollout engine (nats)", ylabel="log-prob here (nats)", title=f"{of.tokens} tokens")
    bounds = [math.log(ratio) for ratio in RATIO_INTERVAL]
    reach = max(2 * bounds[1], 1.05 * found.max_abs_delta)
    right.hist(delta.numpy(), bins=_BINS, range=(-reach, reach), log=bool(len(delta)))
    for bound, ratio in zip(bounds, RATIO_INTERVAL, strict=True):
        right.axvline(bound, color="C3", linestyle="--", linewidth=1, label=f"ratio {ratio}")
    right.set(xlabel="Δ = log-prob here − rollout's (nats)", ylabel="tokens")
    right.set_title(
        f"mean |Δ| {of.mean_abs_delta:.2e}, max |Δ| {of.max_abs_delta:.2e}, KL {of.kl:.2e} nats\n"
        f"{of.share_outside:.2%} of ratios outside [{RATIO_INTERVAL[0]}, {RATIO_INTERVAL[1]}]",
        fontsize="medium",
    )
    right.legend(loc="upper right")  # "best" looks at every point, and matplotlib warns of it
    figure.savefig(target, format="png", dpi=120)
    return of
