"""Where Hugging Face weights are read from: a folder of safetensors, a model, or a state dict; and its configuration.

A folder needs no transformers: its config.json is read as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from logitless.errors import InputTypeError, InvalidInputError, NotFoundError
from logitless_mcore.experts import one_by_one

__all__ = ["HFSource", "open_source", "read_json"]

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as files say it
# What versions of transformers put before names that the checkpoints of vision-language models have without.
PREFIXES = {
    "model.language_model.": "model.",
    "model.visual.": "visual.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def _published(name: str) -> str:
    for prefix, instead in PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name


class HFSource:
    """Names and tensors of a checkpoint, read one by one.

    Attributes:
        where: what messages call it.
        config: its configuration as a dict, or None where only tensors were given.
    """

    def __init__(self, where: str, tensors: Mapping[str, Any], config: dict[str, Any] | None) -> None:
        self.where = where
        self.config = config
        self._tensors = tensors
        self._names = {_published(name): name for name in tensors}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def read(self, name: str) -> Tensor:
        """The whole tensor, detached; a DTensor is gathered, on all of its ranks."""
        tensor = self._tensors[self._names[name]]
        whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        return whole.detach()

    def blank(self, name: str) -> Tensor:
        """The tensor's shape and dtype, on the meta device; of a file, and of a DTensor, no values are read."""
        if isinstance(self._tensors, _Files):
            return self._tensors.blank(self._names[name])
        tensor = self._tensors[self._names[name]]
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def open_source(source: Any) -> HFSource:
    """A path, a Hugging Face model or a mapping of names to tensors, to read from.

    Raises:
        InputTypeError: it is none of these.
        InvalidInputError: the folder holds no safetensors, lacks one that its index names, or holds a tensor twice; or
            a file cannot be read.
        NotFoundError: safetensors is not installed.
    """
    if isinstance(source, (str, Path)):
        return _from_folder(Path(source))
    if isinstance(source, nn.Module):
        config: Any = getattr(source, "config", None)
        told = config.to_dict() if hasattr(config, "to_dict") else None
        return HFSource(f"the {type(source).__qualname__}", one_by_one(source.state_dict()), told)
    if isinstance(source, Mapping):
        return HFSource("the state dict", one_by_one(source), None)
    raise InputTypeError(
        f"source: got a {type(source).__qualname__}, expected a path, a Hugging Face model or a dict of tensors"
    )


class _Files(Mapping[str, Any]):
    """Tensors of safetensors files, each read when it is asked for."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files
        self._open: dict[Path, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, name: str) -> Any:
        with self._file_of(name) as file:
            return file.get_tensor(name)

    def blank(self, name: str) -> Tensor:
        """As `HFSource.blank`."""
        with self._file_of(name) as file:
            told = file.get_slice(name)
            dtype, shape = DTYPES.get(told.get_dtype()), told.get_shape()
        return torch.empty(shape, dtype=dtype, device="meta") if dtype is not None else self[name].to("meta")

    @contextmanager
    def _file_of(self, name: str) -> Iterator[Any]:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _opened(path)
        with _told(path):
            yield self._open[path]


def _unreadable(path: Path, why: object) -> InvalidInputError:
    return InvalidInputError(
        f"source: {path} cannot be read ({why}); expected it whole, as save_pretrained wrote it (one of some 130 bytes "
        "is git-lfs's pointer to the file: git lfs pull)"
    )


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Name the file that is at fault; safetensors' own words do not."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _opened(path: Path) -> Any:
    from safetensors import safe_open

    with _told(path):
        return safe_open(path, framework="pt", device="cpu")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON; `InvalidInputError` names the file."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(told, dict):
        raise _unreadable(path, f"it holds a {type(told).__name__}, not an object")
    return told


def _from_folder(folder: Path) -> HFSource:
    if find_spec("safetensors") is None:
        raise NotFoundError("reading a checkpoint needs safetensors: pip install safetensors")
    if not folder.is_dir():
        raise InvalidInputError(f"source: there is no folder {folder}; a model of the hub must be downloaded first")
    if (folder / INDEX).is_file():
        names: dict[str, str] = read_json(folder / INDEX).get("weight_map", {})
        files = {name: folder / file for name, file in names.items()}
        absent = sorted({str(path) for path in files.values() if not path.is_file()})
        if absent:
            raise InvalidInputError(f"source: {folder / INDEX} names files that are not there: {', '.join(absent)}")
    else:
        files = {}
        for path in sorted(folder.glob("*.safetensors")):
            with _opened(path) as opened:
                twice = files.keys() & set(opened.keys())
                if twice:
                    name = min(twice)
                    raise InvalidInputError(
                        f"source: {files[name]} and {path.name} both hold {name}, and no {INDEX} tells which is meant; "
                        "move the one that is not out of the folder"
                    )
                files |= dict.fromkeys(opened.keys(), path)
    if not files:
        raise InvalidInputError(f"source: {folder} holds no *.safetensors; save the model with save_pretrained")
    config = folder / "config.json"
    told = read_json(config) if config.is_file() else None
    return HFSource(str(folder), _Files(files), told)
