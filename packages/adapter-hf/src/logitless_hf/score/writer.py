"""The output, safe from interruption at any moment and from other runs.

A run keeps its work in the folder `OUTPUT.parts`: `manifest.json` says what the run is, and each part holds the scores
of `records_per_part` consecutive records. A part is written under another name and renamed once it is on the disk, so
it is there whole or not at all; parts do not depend on how many ranks share the work. At the end the parts are merged
in order into the output, which is renamed into place in the same way, and only then removed.

Rank 0 holds a lock in the folder, so that no other run comes in. Where there are no locks, the newest run has the
folder: the manifest bears its id, and an older one that finds another's stops before it writes.

Parts are JSONL whatever the output is, and end with their own SHA-256. Float32 scores are written with nine significant
digits, which give the same float32 back.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from logitless.errors import InvalidInputError, LogitlessError
from logitless_hf.score import parquet
from logitless_hf.score.claim import hold
from logitless_hf.score.mismatch import REPORT_SUFFIXES, MismatchReport
from logitless_hf.score.parquet import ROLLOUT_COLUMNS, Row

__all__ = ["ROLLOUT_COLUMNS", "Output", "Row", "refuse_other_run", "row"]

_OURS = re.compile(
    r"lock|(manifest\.json|part-\d{9,}\.jsonl|merged|metadata|report)(\.\d+\.tmp)?"
)  # in the folder of parts


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
        self._reports = [path.with_name(path.name + suffix) for suffix in REPORT_SUFFIXES]
        self._targets = [path, *([] if path.suffix == ".parquet" else [self.meta_path]), *self._reports]
        self._lock: IO[bytes] | None = None
        self._run: dict[str, Any] = {}
        self._id: str | None = None  # of the run that this object began; None if it takes part in another's

    def check_paths(self, **reads: Path) -> None:
        """Raise if a path to be written is a link, no place for it, or one that is read; `reads` are by option."""
        for path in (*self._targets, self.folder):
            if path.is_symlink():
                raise InvalidInputError(
                    f"--output: {path} is a symbolic link, which would be replaced and not followed; "
                    "give the name of the file it points to"
                )
        for path in self._targets:
            if path.is_dir():
                raise InvalidInputError(f"--output: got {path}, which is a folder; expected a file's name")
        if self.folder.exists() and not self.folder.is_dir():
            raise InvalidInputError(
                f"--output: {self.folder} is a file, but a run keeps its work in a folder of that name; "
                "move it away, or choose another name"
            )
        for option, read in reads.items():
            for path in self._targets:
                if path.exists() and read.exists() and path.samefile(read):
                    raise InvalidInputError(
                        f"--output: got {self.path}, but {path}, which would be written, is the {option}; "
                        "choose another name"
                    )
            if read.resolve().is_relative_to(self.folder.resolve()):
                raise InvalidInputError(
                    f"--output: got {self.path}, but {self.folder}, where the run would keep its work, holds the "
                    f"{option}; choose another name"
                )

    def refuse_existing(self, *, resume: bool, overwrite: bool) -> None:
        """Raise if there is something here that the user has not said what to do with."""
        if overwrite:
            return
        if resume:
            if self.meta_path in self._targets and self.meta_path.exists() and self.metadata() is None:
                raise InvalidInputError(
                    f"--output: {self.meta_path}, where metadata would go, is not of this tool; "
                    "move it away, or give --overwrite to replace it"
                )
            return
        if self._has_parts():
            raise InvalidInputError(
                f"--output: {self.folder} holds an unfinished run; give --resume to go on with it, or --overwrite to "
                "begin anew"
            )
        for path in self._targets:
            if path.exists():
                raise InvalidInputError(f"--output: {path} exists; give --overwrite to replace it, or another name")

    def is_complete(self) -> bool:
        """Whether the output is there and no run is under way."""
        return self.path.exists() and not self._manifest.exists() and not self._has_parts()

    def check_whole(self, records: int) -> None:
        """Raise if the output is not as it was written, with so many records."""
        try:
            if self.path.suffix == ".parquet":
                parquet.check(self.path, records)
            elif (self.metadata() or {}).get("sha256") != _sha256_of_file(self.path):
                raise ValueError(f"its SHA-256 is not the one in {self.meta_path.name}")
        except (OSError, ValueError) as error:  # pyarrow's errors derive from them
            raise InvalidInputError(
                f"--resume: {self.path} is damaged ({error}), expected {records} records as they were scored; begin "
                "anew with --overwrite"
            ) from error

    def begin(self, run: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Claim the folder of parts until `close`, and make it or go on with it; raise if it is of another run."""
        try:
            self.folder.mkdir(exist_ok=True)
            self._lock = hold(self.folder / "lock")
            if self._lock is None:
                raise InvalidInputError(
                    f"--output: another run is at work in {self.folder}; wait until it ends or stop it, or choose "
                    "another name"
                )
            self.refuse_existing(resume=resume, overwrite=overwrite)  # again: until now nothing was held
            self._refuse_foreign_files()
            if overwrite:
                self._clear()
            elif self._manifest.exists():
                there = self._read_manifest()
                if resume:  # if not, there are no parts: it failed before the first, and stands in nobody's way
                    refuse_other_run(there["run"], run, self.folder)
            elif self._has_parts():
                raise InvalidInputError(
                    f"--resume: {self.folder} holds parts but no manifest.json, so no run can be told; "
                    "begin anew with --overwrite"
                )
            elif any(path.exists() for path in self._targets):
                refuse_other_run((self.metadata() or {}).get("run", {}), run, self.path)
            self._id = uuid4().hex
            self._write(self._manifest, json.dumps({"id": self._id, "run": run}, indent=2) + "\n")
        except OSError as error:
            raise InvalidInputError(
                f"--output: {self.path.parent} cannot be written to ({error}); choose another folder"
            ) from error
        self.join(run)

    def join(self, run: dict[str, Any]) -> None:
        """Take part in a run that another rank began."""
        self._run = run

    def close(self) -> None:
        """Give the claim up; parts, if there are any, stay."""
        if self._lock is None:
            return
        with suppress(OSError):  # what another run needs by now
            if self._manifest.exists():
                self._lock.close()
            else:  # the run is over: nothing of it need stay
                (self.folder / "lock").unlink()
                self._lock.close()
                self.folder.rmdir()
        self._lock.close()
        self._lock = None

    def tidy(self) -> None:
        """Remove the folder that a run which died in its very last steps left, unless another run is at work there."""
        if self.folder.is_dir():
            with suppress(OSError):  # it is in nobody's way
                self._lock = hold(self.folder / "lock")
            self.close()

    def has_part(self, part: int) -> bool:
        """Whether the part is there, whole."""
        return self._part(part).exists()

    def write_part(self, part: int, rows: list[Row]) -> None:
        """Write a part's rows, all or none."""
        self._refuse_takeover()
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        with self._writing():
            self._write(self._part(part), content + _seal(content))

    def merge(
        self,
        records: int,
        records_per_part: int,
        metadata: dict[str, Any],
        *,
        double: bool,
        report: MismatchReport | None = None,
        advance: Callable[[], None] | None = None,
    ) -> None:
        """Put the parts together in order, the output in place, and the parts away; raise if a record is lacking.

        `report` sees every row and is written beside the output; `advance` is called after each, for a progress bar.
        """
        with self._writing():
            self._refuse_takeover()
            target = self._temporary("merged")
            rows = _watched(self._merged(records, records_per_part), report, advance)
            if self.path.suffix == ".parquet":
                parquet.write(target, (row for _, row in rows), metadata, double=double, rollout=report is not None)
            else:
                digest = hashlib.sha256()
                with target.open("wb") as file:
                    for line, _ in rows:
                        file.write(line)
                        digest.update(line)
                    file.flush()
                    os.fsync(file.fileno())
                self._refuse_takeover()
                metadata = {**metadata, "sha256": digest.hexdigest()}
                self._write(self.meta_path, json.dumps(metadata, indent=2) + "\n", name="metadata")
            self._refuse_takeover()
            files = {} if report is None else report.files()
            for suffix, path in zip(REPORT_SUFFIXES, self._reports, strict=True):
                if suffix in files:
                    self._write(path, files[suffix], name="report")
                elif path.exists():
                    path.unlink()  # an earlier output's
            self._refuse_takeover()
            target.replace(self.path)
            self._clear()
            self.close()

    def metadata(self) -> dict[str, Any] | None:
        """What a finished output says about itself; None if it is not one of ours."""
        try:
            parquets = self.path.suffix == ".parquet"
            found = parquet.metadata(self.path) if parquets else json.loads(self.meta_path.read_bytes())
        except (OSError, KeyError, ValueError):  # pyarrow's errors derive from ValueError
            return None
        return found if isinstance(found, dict) and isinstance(found.get("run"), dict) else None

    def _merged(self, records: int, records_per_part: int) -> Iterator[tuple[bytes, Row]]:
        """All rows in order, each with its line; raise for a part that does not hold just its own records."""
        for part, first in enumerate(range(0, records, records_per_part)):
            expected = range(first, min(first + records_per_part, records))
            try:
                content = self._part(part).read_bytes()
                body = content[:-_SEAL_BYTES]
                if content[-_SEAL_BYTES:] != _seal(body):
                    raise ValueError("its SHA-256 is not the one at its end")
                lines = body.splitlines(keepends=True)
                rows: list[Row] = [json.loads(line) for line in lines]
                if [row["record"] for row in rows] != list(expected):
                    raise ValueError("it holds other records")
            except (OSError, ValueError) as error:
                raise InvalidInputError(
                    f"--output: the part {self._part(part)} is damaged ({error}); expected records {expected[0]} to "
                    f"{expected[-1]}. Remove this file, and give --resume to score them again"
                ) from error
            yield from zip(lines, rows, strict=True)

    def _has_parts(self) -> bool:
        return any(self.folder.glob("part-*.jsonl"))

    def _part(self, part: int) -> Path:
        return self.folder / f"part-{part:09d}.jsonl"

    def _read_manifest(self) -> dict[str, Any]:
        try:
            manifest = json.loads(self._manifest.read_text(encoding="utf-8"))
            if not (isinstance(manifest, dict) and {"id", "run"} <= manifest.keys()):
                raise ValueError("it is not of this tool")
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"{self._manifest} cannot be read ({error}); begin anew with --overwrite"
            ) from error
        return manifest

    def _refuse_takeover(self) -> None:
        """Raise if the folder is by now another run's; a rank that did not begin the run knows it by its options."""
        there = self._read_manifest()
        if there["run"] != self._run or self._id not in (None, there["id"]):
            raise LogitlessError(
                f"--output: another run has taken {self.folder} over, so this one stopped; let that one end, or "
                "stop it and give --resume or --overwrite"
            )

    def _refuse_foreign_files(self) -> None:
        foreign = sorted(file.name for file in self.folder.iterdir() if not _OURS.fullmatch(file.name))
        if foreign:
            raise InvalidInputError(
                f"--output: {self.folder} holds files that are not of this tool and were left alone "
                f"({', '.join(foreign[:3])}); move them away, or choose another name"
            )

    def _clear(self) -> None:
        """The manifest goes last, so that what an interrupted removal leaves is still a run that can be resumed."""
        for file in self.folder.iterdir():
            if _OURS.fullmatch(file.name) and file.name not in ("lock", self._manifest.name):
                file.unlink(missing_ok=True)
        self._manifest.unlink(missing_ok=True)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Say what to do where the disk is full or gone; a part is whole or not there, so none is lost by it."""
        try:
            yield
        except OSError as error:
            raise InvalidInputError(
                f"--output: {self.path.parent} cannot be written to any more ({error}); make room there, then give "
                "--resume to go on: the parts that were scored are kept"
            ) from error

    def _temporary(self, name: str) -> Path:
        """In the folder of parts, where it can be in nobody's way; it holds the process, as ranks share the folder."""
        return self.folder / f"{name}.{os.getpid()}.tmp"

    def _write(self, path: Path, content: str | bytes, name: str | None = None) -> None:
        """Another process sees the whole content or what was there before."""
        temporary = self._temporary(name or path.name)
        with temporary.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def _watched(
    rows: Iterator[tuple[bytes, Row]], report: MismatchReport | None, advance: Callable[[], None] | None
) -> Iterator[tuple[bytes, Row]]:
    for line, row in rows:
        if report is not None:
            report.see(row)
        yield line, row
        if advance is not None:
            advance()


def _seal(content: bytes) -> bytes:
    """The last line of a part."""
    return hashlib.sha256(content).hexdigest().encode() + b"\n"


_SEAL_BYTES = len(_seal(b""))


def _sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
