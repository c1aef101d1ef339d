"""Where Hugging Face weights are written: a folder of safetensors, whose files get their names once all are whole.

A save that fails, on any rank, so leaves a checkpoint that was there before as it was.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from logitless.errors import CollectiveError
from logitless_mcore.hf_source import INDEX

__all__ = ["HFTarget", "agree"]

UNFINISHED = ".unfinished"


class HFTarget:
    """One pipeline stage's files; what goes wrong is kept for `agree`, since other ranks wait for this one meanwhile.

    Attributes:
        index: the file of each tensor.
        total: bytes of all tensors.
        error: what went wrong first; nothing more is written then.
    """

    def __init__(self, folder: Path, stage: int, file_bytes: int) -> None:
        self.index: dict[str, str] = {}
        self.total = 0
        self.error: Exception | None = None
        self._folder, self._stage, self._file_bytes = folder, stage, file_bytes
        self._held: dict[str, Tensor] = {}
        self._size = 0

    def put(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; a file is written when it would grow beyond `file_bytes`."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._size + nbytes > self._file_bytes:
            self.flush()
        if self.error is None:
            self._held[name] = tensor.cpu().contiguous()
        self._size += nbytes
        self.total += nbytes

    def flush(self) -> None:
        """Write what has been taken."""
        from safetensors.torch import save_file

        held, self._held, self._size = self._held, {}, 0
        if not held or self.error is not None:
            return
        file = f"model-{self._stage + 1:05}-{len(set(self.index.values())) + 1:05}.safetensors"
        try:
            save_file(held, self._folder / (file + UNFINISHED), metadata={"format": "pt"})
        except Exception as error:  # of the disk or of safetensors: the ranks that wait are told
            self.error = error
        self.index.update(dict.fromkeys(held, file))

    def publish(self) -> None:
        """Give the files their names."""
        try:
            for file in sorted(set(self.index.values())):
                os.replace(self._folder / (file + UNFINISHED), self._folder / file)
        except OSError as error:
            self.error = error

    def discard(self) -> None:
        """Remove what has not got its name."""
        for file in set(self.index.values()):
            (self._folder / (file + UNFINISHED)).unlink(missing_ok=True)

    def write_index(self, stages: list[tuple[dict[str, str], int]], config: Any) -> None:
        """Which file holds a tensor, of all stages' `index` and `total`; and the configuration, if there is one."""
        whole = {name: file for names, _ in stages for name, file in names.items()}
        told = {"metadata": {"total_size": sum(nbytes for _, nbytes in stages)}, "weight_map": whole}
        try:
            (self._folder / INDEX).write_text(json.dumps(told, indent=2, sort_keys=True) + "\n")
            if config is not None:
                config.save_pretrained(self._folder)
        except Exception as error:  # as above; what a configuration's own method raises is not known
            self.error = error


def agree(error: Exception | None) -> None:
    """Raise on every rank if one has failed, there its own error; no rank goes on before all have come here."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = [f"rank {rank} ({said})" for rank, said in enumerate(told) if said is not None]
    if failed:
        raise CollectiveError(f"save_hf_weights: {failed[0]} could not write; nothing of this save is to be loaded")
