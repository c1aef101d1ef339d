"""What the user asked for, checked before anything is read or loaded."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

import logitless
from logitless.errors import InvalidInputError, NotFoundError, UnsupportedError
from logitless_hf.score.writer import Output

__all__ = ["Options", "Sampling"]

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution of which log-probs are, by the names of a forward's options."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __str__(self) -> str:
        return " ".join(f"--{f.name.replace('_', '-')} {x}" for f in fields(self) if (x := getattr(self, f.name)))


class Options(BaseModel):
    """The options of `logitless score`; `check` says in full what is wrong with one."""

    model_config = ConfigDict(frozen=True)

    model: Path
    input: Path
    output: Path
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    backend: str | None = None
    dtype: str | None = None
    device: str | None = None
    rollout_logprobs: str | None = None
    max_tokens_per_batch: int = 8192
    records_per_part: int = 128
    join_timeout: int = Field(default=1800, ge=1)  # here, since it is used before `check`
    resume: bool = False
    overwrite: bool = False

    def check(self) -> None:
        """Raise for the first option that cannot be served."""
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise InvalidInputError(
                f"--temperature: got {self.temperature}, expected a finite number above 0 (1 scores the model as it is)"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InvalidInputError(f"--top-k: got {self.top_k}, expected 1 or more; leave it out to score over all")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidInputError(f"--top-p: got {self.top_p}, expected a number above 0 and at most 1")
        if self.rollout_logprobs not in (None, "raw", "processed"):
            raise InvalidInputError(
                f"--rollout-logprobs: got {self.rollout_logprobs!r}, expected raw (from before the temperature, top-k "
                "and top-p) or processed (of the distribution that was sampled from)"
            )
        for flag, value in (
            ("--max-tokens-per-batch", self.max_tokens_per_batch),
            ("--records-per-part", self.records_per_part),
        ):
            if value < 1:
                raise InvalidInputError(f"{flag}: got {value}, expected 1 or more")
        if self.resume and self.overwrite:
            raise InvalidInputError("got --resume and --overwrite: give one, to go on with a run or to begin it anew")
        self._check_output()
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise InvalidInputError(
                f"--dtype: got {self.dtype!r}, expected {', '.join(_DTYPES)}, or leave it out for the checkpoint's own"
            )
        self._check_backend()
        self.torch_device(0)

    def sampling(self) -> Sampling:
        """What is scored."""
        return Sampling(self.temperature, self.top_k, None if self.top_p == 1 else self.top_p)

    def rollout_sampling(self) -> Sampling | None:
        """The distribution whose log-probs the records carry; None if it cannot be told."""
        if self.rollout_logprobs == "raw" or self.sampling() == Sampling():
            return Sampling()
        return self.sampling() if self.rollout_logprobs == "processed" else None

    def torch_dtype(self) -> torch.dtype | None:
        """The dtype to load the model in; None for the checkpoint's own."""
        return None if self.dtype is None else _DTYPES[self.dtype]

    def torch_device(self, local_rank: int) -> torch.device:
        """The device to run on: by default this rank's GPU where there is one, else the CPU."""
        if self.device is None:
            return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        try:
            device = torch.device(self.device)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InvalidInputError(
                f"--device: got {self.device!r}, which cannot be used here ({reason}); "
                "expected cpu, or cuda on a machine with a GPU and a CUDA build of torch"
            ) from error
        if device.type == "meta":
            raise InvalidInputError("--device: got 'meta', which holds no numbers; expected cpu or cuda")
        return torch.device("cuda", local_rank) if device == torch.device("cuda") else device

    def that_shape_results(self) -> dict[str, Any]:
        """The options that a resumed run must share with the run it goes on with."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "backend": self.backend,
            "dtype": self.dtype,
            "device": self.torch_device(0).type,
            "rollout_logprobs": self.rollout_logprobs,
            "max_tokens_per_batch": self.max_tokens_per_batch,
            "records_per_part": self.records_per_part,
            "format": self.output.suffix,
        }

    def _check_output(self) -> None:
        if self.output.suffix not in (".jsonl", ".parquet"):
            raise InvalidInputError(f"--output: got {self.output}, expected a name that ends in .parquet or .jsonl")
        if self.output.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
            raise NotFoundError(
                f"--output: {self.output.name} needs pyarrow, which is not installed: "
                "pip install 'logitless-hf[score]', or choose a name that ends in .jsonl"
            )
        if not self.output.parent.is_dir():
            raise InvalidInputError(f"--output: the folder {self.output.parent} does not exist; make it first")
        Output(self.output).check_paths(input=self.input, model=self.model)

    def _check_backend(self) -> None:
        if self.backend is None:
            return
        statuses = logitless.backends()
        for status in statuses:
            if status.name == self.backend and not status.ok:
                raise UnsupportedError(
                    f"--backend: {self.backend!r} of {status.dist} cannot be loaded: {status.reason}"
                )
        names = sorted(status.name for status in statuses)
        if self.backend not in names:
            raise NotFoundError(
                f"--backend: got {self.backend!r}, expected one of those installed ({', '.join(names) or 'none'}); "
                "for the torch backend: pip install logitless-torch"
            )
