"""A model folder: what it holds, told apart from any other, and loaded from the disk alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from logitless.errors import InvalidInputError, UnsupportedError

__all__ = ["Checkpoint"]

_VOCABULARY = ("tokenizer.", "vocab", "merges", "spiece", "sentencepiece", "tekken")  # how such files are called
_MODELS = (".model", ".tiktoken")
_WHOLE = (".jinja", ".json", ".model", ".tiktoken", ".txt")  # hashed whole; the rest by samples
_WEIGHTS = (".bin", ".gguf", ".pt", ".pth", ".safetensors")
_SCORES = (".jsonl.meta.json", ".mismatch.json")  # beside an output, which may be put into the model's folder
_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16

_T = TypeVar("_T")


class Checkpoint:
    """A folder written by `save_pretrained`: its config at once, tokenizer and weights when asked for."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            kind = "is not a folder" if path.exists() else "does not exist"
            raise InvalidInputError(
                f"--model: got {path}, which {kind}; expected a local folder with config.json and weights "
                "(no model hub is ever contacted: download the model first and give its folder)"
            )
        if not (path / "config.json").is_file():
            raise InvalidInputError(
                f"--model: {path} holds no config.json; expected a folder that `save_pretrained` wrote"
            )
        from transformers import AutoConfig

        self.path = path
        self.config: Any = self._load("config", lambda: AutoConfig.from_pretrained(path, local_files_only=True))

    @cached_property
    def tokenizer(self) -> Any:
        """The folder's tokenizer; None if it has no file of one, where some versions of transformers make one up."""
        if not any(file.name.startswith(_VOCABULARY) or file.suffix in _MODELS for file in self.path.iterdir()):
            return None
        from transformers import AutoTokenizer

        return self._load("tokenizer", lambda: AutoTokenizer.from_pretrained(self.path, local_files_only=True))

    @property
    def vocab_size(self) -> int:
        """Token ids that the model has an embedding for."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int | None:
        """The longest sequence that the model takes; None where its config sets no limit."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    def fingerprint(self) -> str:
        """SHA-256 over the folder's files: small ones whole, weights by their size and evenly spread samples.

        Training changes every block of the weights, so the samples tell two checkpoints apart; reading hundreds of
        gigabytes to do so would not be worth it.
        """
        digest = hashlib.sha256()
        for file in sorted(self.path.iterdir()):
            if file.suffix not in _WHOLE + _WEIGHTS or file.name.endswith(_SCORES) or not file.is_file():
                continue
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as content:
                if file.suffix in _WHOLE or size <= _SAMPLES * _SAMPLE_BYTES:
                    digest.update(content.read())
                    continue
                for sample in range(_SAMPLES):
                    content.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(content.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    def load(self, dtype: torch.dtype | None, device: torch.device) -> Any:
        """The model in eval mode on `device`; weights that the folder lacks are an error, not random numbers."""
        from transformers import AutoModelForCausalLM

        def from_disk() -> tuple[Any, dict[str, Any]]:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.path, dtype=dtype or "auto", local_files_only=True, output_loading_info=True
            )
            return loaded[0], loaded[1]

        model, info = self._load("weights", from_disk)
        lacking = sorted(info["missing_keys"]) + sorted(str(key[0]) for key in info["mismatched_keys"])
        if lacking:
            raise InvalidInputError(
                f"--model: the weights in {self.path} lack {len(lacking)} tensors of {type(model).__name__} or have "
                f"them in another shape ({', '.join(lacking[:3])}, ...); expected a checkpoint of a whole causal model"
            )
        try:
            return model.to(device).eval().requires_grad_(False)
        except torch.OutOfMemoryError as error:
            raise UnsupportedError(f"the model does not fit on {device}; try --dtype bfloat16") from error

    def _load(self, part: str, load: Callable[[], _T]) -> _T:
        try:
            return load()
        except (
            Exception
        ) as error:  # transformers and the file formats behind it raise anything from OSError to KeyError
            reason = str(error).strip().splitlines()
            raise InvalidInputError(
                f"--model: the {part} in {self.path} cannot be read: {type(error).__name__}: "
                f"{reason[0] if reason else 'no reason given'}; expected a folder that `save_pretrained` wrote"
            ) from error
