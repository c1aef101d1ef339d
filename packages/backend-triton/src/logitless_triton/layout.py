"""How large a kept buffer is, and how many column tiles one of a given length serves: arithmetic, without Triton."""

from __future__ import annotations

import torch

from logitless.types import Request
from logitless_triton.config import config_for, device_facts

__all__ = [
    "DIFFERENCES",
    "EXPONENTIALS",
    "NOTHING",
    "buffer_bytes",
    "bytes_per_row",
    "kept_length",
    "mode_of",
    "tiles_that_fit",
]

NOTHING, DIFFERENCES, EXPONENTIALS = 0, 1, 2
ALIGNMENT = 128  # bytes of slack between a buffer's two parts
GRAIN = 32  # lengths are multiples of it for DIFFERENCES, and half of it more for EXPONENTIALS


def buffer_bytes(tiles: int, n: int, width: int, item: int, mode: int) -> int:
    """What n rows of so many tiles take."""
    padded = (n + 15) // 16 * 16
    return n * tiles * width * item + 4 * padded * (tiles if mode == DIFFERENCES else 1) + ALIGNMENT


def bytes_per_row(columns: int, width: int, item: int) -> int:
    """What a row takes of a buffer that keeps the differences of all columns."""
    return (columns + width - 1) // width * (width * item + 4)


def mode_of(length: int) -> int:
    """What a buffer of that length holds."""
    if length == 0:
        return NOTHING
    return EXPONENTIALS if length % GRAIN else DIFFERENCES


def tiles_that_fit(length: int, n: int, width: int, item: int, mode: int, columns: int) -> int:
    """Column tiles of which a buffer can keep n rows."""
    if mode == NOTHING or n == 0:
        return 0
    fixed = buffer_bytes(0, n, width, item, mode)
    each = buffer_bytes(1, n, width, item, mode) - fixed
    return max(0, min((columns + width - 1) // width, (length - fixed) // each))


def _way(request: Request) -> int:
    """What to keep for a request."""
    plain = not (request.bias or request.softcap or request.lora_rank) and request.group_size == 1
    ranged = request.weight_dtype != torch.float16
    return EXPONENTIALS if plain and ranged and not request.entropy_grad else DIFFERENCES


def kept_length(request: Request, keep_bytes: int) -> int:
    """Bytes of the buffer: at most `keep_bytes`, and only whole column tiles."""
    dtype = torch.promote_types(request.hidden_dtype, request.weight_dtype)
    width = config_for(device_facts(request.device), dtype, request.hidden_size).forward.columns
    mode, n = _way(request), request.n_tokens
    tiles = tiles_that_fit(keep_bytes - GRAIN - GRAIN // 2, n, width, dtype.itemsize, mode, request.vocab_rows)
    if not tiles:
        return 0
    length = (buffer_bytes(tiles, n, width, dtype.itemsize, mode) + GRAIN - 1) // GRAIN * GRAIN
    return length + (GRAIN // 2 if mode == EXPONENTIALS else 0)
