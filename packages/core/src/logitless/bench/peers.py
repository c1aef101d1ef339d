"""Other libraries' functions, at their defaults, each imported by the submodule that holds it.

A package whose own import drags in a trainer or a serving stack has its parents replaced by empty modules, in this
process only.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from logitless.bench.candidates import Candidate, Scorer, full_logits, scored
from logitless.bench.inputs import Inputs
from logitless.errors import InvalidInputError

__all__ = ["PEERS", "Peer", "chosen_peers", "dist_version", "peer_candidates", "why_not"]

Scores = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Peer:
    """One function to compare with.

    Attributes:
        label: what the results call it.
        dist: the distribution that holds it.
        load: imports it; raises where it cannot be had.
        limit: the products that its forward and backward take.
        outputs: as `Candidate.outputs`.
        gpu: whether it needs an NVIDIA GPU.
    """

    label: str
    dist: str
    load: Callable[[], Scorer]
    limit: str
    outputs: str = "both"
    gpu: bool = False


def _bare(*names: str) -> None:
    """Puts empty packages in the place of these, so that their submodules import without what they import."""
    root = names[0]
    if root in sys.modules:
        return
    spec = importlib.util.find_spec(root)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {root!r}", name=root)
    folder = Path(next(iter(spec.submodule_search_locations)))
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module


def _compiled() -> Scorer:
    compiled: Scorer = torch.compile(full_logits, dynamic=False)
    return compiled


def _trl() -> Scorer:
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    if importlib.util.find_spec("datasets") is None:  # the backward imports one helper from the trainer's
        helpers = types.ModuleType("trl.trainer.utils")
        helpers.maybe_gather_lm_head_ctx = lambda *args: contextlib.nullcontext()  # type: ignore[attr-defined]
        sys.modules.setdefault("trl.trainer", types.ModuleType("trl.trainer"))
        sys.modules.setdefault("trl.trainer.utils", helpers)

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scores:
        out = function.apply(hidden, weight, None, labels, 1.0, 8192, None, 1.0, ("entropy",))
        return out[0], out[1]

    return run


def _liger() -> Scorer:
    module = importlib.import_module("liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90")
    function = module.LigerFusedScaledCrossEntropySM90Function

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scores:
        loss, entropy = function.apply(hidden, weight, labels, 1.0, -100, 1, True)
        return -loss, entropy

    return run


def _verl_triton() -> Scorer:
    _bare("verl", "verl.utils", "verl.utils.kernel")
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy").linear_cross_entropy

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scores:
        log_probs, entropy = function(hidden, weight, labels, 1.0, "none", None)
        return log_probs, entropy

    return run


def _verl_torch() -> Scorer:
    _bare("verl", "verl.utils", "verl.utils.kernel")
    function = importlib.import_module("verl.utils.experimental.torch_functional").FusedLinearForPPOFunction

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scores:
        log_probs, entropy = function.apply(hidden, weight, labels)
        return log_probs, entropy

    return run


def _cut_cross_entropy() -> Scorer:
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scores:
        return -function(hidden, weight, labels, reduction="none"), None

    return run


def _quack() -> Scorer:
    function = importlib.import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scores:
        return function(hidden, weight, labels, reduction="sum"), None

    return run


PEERS = {
    "eager": Peer("full logits, eager", "torch", lambda: full_logits, "6NDV"),
    "compiled": Peer("full logits, compiled", "torch", _compiled, "6NDV"),
    "trl": Peer("TRL chunked", "trl", _trl, "8NDV"),
    "liger": Peer("Liger SM90", "liger-kernel", _liger, "8NDV", gpu=True),
    "verl": Peer("verl Triton", "verl", _verl_triton, "8NDV", gpu=True),
    "verl-torch": Peer("verl torch", "verl", _verl_torch, "8NDV"),
    "cce": Peer("cut-cross-entropy", "cut-cross-entropy", _cut_cross_entropy, "8NDV", "log-prob", gpu=True),
    "quack": Peer("quack", "quack-kernels", _quack, "6NDV", "loss", gpu=True),
}


def chosen_peers(names: str) -> dict[str, Peer]:
    """The peers of a comma-separated list, "all" or "none"."""
    if names in ("all", "none"):
        return dict(PEERS) if names == "all" else {}
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in PEERS:
            raise InvalidInputError(f"--peers: got {name!r}, expected all, none, or some of {', '.join(PEERS)}")
    return {name: PEERS[name] for name in dict.fromkeys(wanted)}


def dist_version(dist: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(dist)
    except PackageNotFoundError:
        return None


def why_not(error: BaseException) -> str:
    """One line of an exception."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def peer_candidates(inputs: Inputs, peers: dict[str, Peer]) -> tuple[list[Candidate], dict[str, str]]:
    """Those that can be imported here, and of the others the reason."""
    found: list[Candidate] = []
    not_run: dict[str, str] = {}
    for name, peer in peers.items():
        if dist_version(peer.dist) is None:
            not_run[peer.label] = f"not installed; pip install {peer.dist}"
        elif peer.gpu and inputs.hidden.device.type != "cuda":
            not_run[peer.label] = f"it needs an NVIDIA GPU, and this run is on {inputs.hidden.device.type}"
        else:
            try:
                scorer = peer.load()
            except Exception as error:  # whatever another package's import raises is its reason
                not_run[peer.label] = why_not(error)
                continue
            kind = "logits" if peer.dist == "torch" else "peer"
            more = {"traceable": name != "compiled"}
            found += scored(inputs, peer.label, kind, scorer, peer.limit, peer.outputs, **more)
    return found, not_run
