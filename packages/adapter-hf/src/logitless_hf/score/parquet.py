"""Scores as a Parquet file; pyarrow, the extra `score`, is imported when one is written or read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["ROLLOUT_COLUMNS", "check", "metadata", "write"]

Row = dict[str, Any]

ROLLOUT_COLUMNS = ("rollout_log_probs", "rollout_delta")
_KEY = b"logitless_score"
_GROUP_TOKENS = 1 << 18  # tokens to a row group: a few tens of MB while it is put together


def write(target: Path, rows: Iterable[Row], about: dict[str, Any], *, double: bool, rollout: bool) -> None:
    """All rows, with `about` in the schema's metadata; on the disk when this returns."""
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
            **({name: pa.list_(pa.float64()) for name in ROLLOUT_COLUMNS} if rollout else {}),
        },
        metadata={_KEY: json.dumps(about)},
    )
    with pq.ParquetWriter(target, schema, write_page_checksum=True) as writer:
        for group in _row_groups(rows):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
    with target.open("rb") as file:
        os.fsync(file.fileno())


def metadata(path: Path) -> Any:
    """What `write` was told about the file; KeyError, OSError or ValueError if it is none of ours."""
    import pyarrow.parquet as pq

    return json.loads((pq.read_schema(path).metadata or {})[_KEY])


def check(path: Path, records: int) -> None:
    """OSError or ValueError if the file does not hold so many rows, or not as they were written."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        found = sum(batch.num_rows for batch in file.iter_batches())
    if found != records:
        raise ValueError(f"it holds {found} records")


def _row_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    tokens = 0
    for row in rows:
        group.append(row)
        tokens += len(row["token_ids"])
        if tokens >= _GROUP_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group
