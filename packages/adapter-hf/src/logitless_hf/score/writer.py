"""The output, safe from interruption at any moment.

A run keeps its work in the folder `OUTPUT.parts`: `manifest.json` says what the run is, and each part holds the scores
of `records_per_part` consecutive records. A part is written under another name and renamed once it is on the disk, so
it is there whole or not at all; parts do not depend on how many ranks share the work. At the end the parts are merged
in order into the output, which is renamed into place in the same way, and only then removed.

Parts are JSONL whatever the output is. Float32 scores are written with nine significant digits, which give the same
float32 back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logitless.errors import InvalidInputError

__all__ = ["Output", "Row", "row"]

Row = dict[str, Any]

_MERGE_TOKENS = 1 << 18  # tokens to a Parquet row group: a few tens of MB while it is put together


def row(
    record: int,
    token_ids: list[int],
    tokens: list[str | None],
    log_probs: list[float],
    entropy: list[float],
    *,
    double: bool,
) -> Row:
    """One record's scores, in nats; `double` keeps float64 whole, else nine digits carry float32."""
    if not double:
        log_probs = [float(f"{value:.9g}") for value in log_probs]
        entropy = [float(f"{value:.9g}") for value in entropy]
    return {
        "record": record,
        "token_ids": token_ids,
        "tokens": tokens,
        "log_probs": log_probs,
        "entropy": entropy,
        "sum_log_prob": math.fsum(log_probs),
        "mean_entropy": math.fsum(entropy) / len(entropy),
    }


class Output:
    """An output file, its metadata, and the parts of the run that makes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta_path = path.with_name(path.name + ".meta.json")
        self.folder = path.with_name(path.name + ".parts")
        self._manifest = self.folder / "manifest.json"

    def refuse_existing(self, *, resume: bool, overwrite: bool) -> None:
        """Raise if there is something here that the user has not said what to do with."""
        if resume or overwrite:
            return
        if self._has_parts():
            raise InvalidInputError(
                f"--output: {self.folder} holds an unfinished run; give --resume to go on with it, or --overwrite to "
                "begin anew"
            )
        if self.path.exists():
            raise InvalidInputError(f"--output: {self.path} exists; give --overwrite to replace it, or another name")

    def is_complete(self) -> bool:
        """Whether the output is there and no run is under way."""
        return self.path.exists() and not self.folder.exists()

    def begin(self, manifest: dict[str, Any], *, overwrite: bool) -> None:
        """Make the folder of parts, or go on with the one that is there; raise if it is of another run."""
        if overwrite:
            self._remove_parts()
        try:
            self.folder.mkdir(exist_ok=True)
            if not self._has_parts():  # nothing to lose: a run that failed before its first part, or a new one
                _write_atomically(self._manifest, json.dumps(manifest, indent=2) + "\n")
            elif not self._manifest.exists():
                raise InvalidInputError(
                    f"--resume: {self.folder} holds parts but no manifest.json, so no run can be told; "
                    "begin anew with --overwrite"
                )
        except OSError as error:
            raise InvalidInputError(
                f"--output: {self.path.parent} cannot be written to ({error}); choose another folder"
            ) from error
        refuse_other_run(self._read_manifest(), manifest, self.folder)

    def has_part(self, part: int) -> bool:
        """Whether the part is there, whole."""
        return self._part(part).exists()

    def write_part(self, part: int, rows: list[Row]) -> None:
        """Write a part's rows, all or none."""
        _write_atomically(self._part(part), "".join(json.dumps(row) + "\n" for row in rows))

    def merge(self, parts: int, metadata: dict[str, Any], *, double: bool) -> None:
        """Put the parts together in order, the output in place, and the parts away."""
        target = self.path.with_name(self.path.name + ".tmp")
        if self.path.suffix == ".parquet":
            self._merge_parquet(target, parts, metadata, double)
        else:
            with target.open("w", encoding="utf-8") as file:
                for part in range(parts):
                    file.write(self._part(part).read_text(encoding="utf-8"))
                file.flush()
                os.fsync(file.fileno())
            _write_atomically(self.meta_path, json.dumps(metadata, indent=2) + "\n")
        target.replace(self.path)
        self._remove_parts()

    def metadata(self) -> dict[str, Any] | None:
        """What a finished output says about itself; None if it is not one of ours."""
        try:
            if self.path.suffix == ".parquet":
                import pyarrow.parquet as pq

                raw = (pq.read_schema(self.path).metadata or {})[b"logitless_score"]
            else:
                raw = self.meta_path.read_bytes()
            found: dict[str, Any] = json.loads(raw)
        except (OSError, KeyError, ValueError):  # pyarrow's errors derive from ValueError
            return None
        return found

    def _merge_parquet(self, target: Path, parts: int, metadata: dict[str, Any], double: bool) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        scores = pa.list_(pa.float64() if double else pa.float32())
        schema = pa.schema(
            {
                "record": pa.int64(),
                "token_ids": pa.list_(pa.int64()),
                "tokens": pa.list_(pa.string()),
                "log_probs": scores,
                "entropy": scores,
                "sum_log_prob": pa.float64(),
                "mean_entropy": pa.float64(),
            },
            metadata={"logitless_score": json.dumps(metadata)},
        )
        with pq.ParquetWriter(target, schema) as writer:
            for rows in self._row_groups(parts):
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        with target.open("rb") as file:
            os.fsync(file.fileno())

    def _row_groups(self, parts: int) -> Iterator[list[Row]]:
        rows: list[Row] = []
        tokens = 0
        for part in range(parts):
            with self._part(part).open(encoding="utf-8") as file:
                for line in file:
                    rows.append(json.loads(line))
                    tokens += len(rows[-1]["token_ids"])
                    if tokens >= _MERGE_TOKENS:
                        yield rows
                        rows, tokens = [], 0
        if rows:
            yield rows

    def _has_parts(self) -> bool:
        return any(self.folder.glob("part-*.jsonl"))

    def _part(self, part: int) -> Path:
        return self.folder / f"part-{part:09d}.jsonl"

    def _read_manifest(self) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads(self._manifest.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"{self._manifest} cannot be read ({error}); begin anew with --overwrite"
            ) from error
        return manifest

    def _remove_parts(self) -> None:
        """The manifest goes last, so that what an interrupted removal leaves is still a run that can be resumed."""
        if not self.folder.exists():
            return
        for file in [*self.folder.glob("part-*.jsonl"), *self.folder.glob("*.tmp"), self._manifest]:
            file.unlink(missing_ok=True)
        try:
            self.folder.rmdir()
        except OSError as error:
            raise InvalidInputError(
                f"{self.folder} holds files that are not of this tool and were left alone ({error}); move them away"
            ) from error


def refuse_other_run(there: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Raise, naming each difference, if a run that is there is not the one that is wanted."""
    before, now = _flat(there), _flat(wanted)
    changes = [
        f"{name} was {json.dumps(before.get(name))} and is now {json.dumps(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if changes:
        raise InvalidInputError(
            f"--resume: {where} is of another run: {'; '.join(changes)}. Run as before, or begin anew with --overwrite"
        )


def _flat(nested: dict[str, Any], front: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{front}{name}.")
        else:
            flat[front + name] = value
    return flat


def _write_atomically(path: Path, text: str) -> None:
    """Another process sees the whole text or what was there before; the name holds the process, as ranks share it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
