"""How a call is cut: chunks of tokens, blocks of columns, and what a kept buffer holds; arithmetic, without Triton."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from logitless.types import Request
from logitless_triton.config import config_for, device_facts

__all__ = [
    "DIFFERENCES",
    "DZ",
    "EXPONENTIALS",
    "LOGITS",
    "NOTHING",
    "SAMPLE",
    "STEP",
    "Blocks",
    "buffer_bytes",
    "divergence_columns",
    "divergence_length",
    "held_rows",
    "kept_length",
    "mode_of",
    "partials_rows",
    "shortlist_length",
    "single_pass_chunk",
    "tiles_that_fit",
]

NOTHING, DIFFERENCES, EXPONENTIALS, LOGITS = 0, 1, 2, 3  # LOGITS: of a block of tokens, within a forward only
GRAIN = 32  # lengths are multiples of it for DIFFERENCES, and half of it more for EXPONENTIALS


def buffer_bytes(tiles: int, n: int, width: int, item: int, mode: int) -> int:
    """What n rows of so many tiles take."""
    padded = (n + 15) // 16 * 16
    return n * tiles * width * item + 4 * padded * (tiles if mode == DIFFERENCES else 1)


def _bytes_per_row(columns: int, width: int, item: int) -> int:
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
    """Bytes of the buffer: at most `keep_bytes`, only whole column tiles, and none where the forward holds logits."""
    if request.features:
        return 0
    dtype = torch.promote_types(request.hidden_dtype, request.weight_dtype)
    width = config_for(device_facts(request.device), dtype, request.hidden_size).forward.columns
    mode, n = _way(request), request.n_tokens
    tiles = tiles_that_fit(keep_bytes - GRAIN - GRAIN // 2, n, width, dtype.itemsize, mode, request.vocab_rows)
    if not tiles:
        return 0
    length = (buffer_bytes(tiles, n, width, dtype.itemsize, mode) + GRAIN - 1) // GRAIN * GRAIN
    return length + (GRAIN // 2 if mode == EXPONENTIALS else 0)


# What a divergence's dz is kept in, by the operands' dtype. The gradient that is multiplied in later rounds it again:
# in bfloat16, that of float16 is not seen, and in float16 it would be.
DZ = {torch.bfloat16: torch.float16, torch.float16: torch.float32, torch.float32: torch.float32}


def divergence_columns(length: int, n: int, columns: int, operand: torch.dtype) -> int:
    """Leading columns of which n rows of a divergence's dz fit a buffer: whole blocks, so that each row is aligned."""
    item = DZ[operand].itemsize
    return min((columns + COLUMNS - 1) // COLUMNS, length // (n * item * COLUMNS)) * COLUMNS if n else 0


def divergence_length(request: Request, keep_bytes: int) -> int:
    """Bytes of the buffer for a divergence's dz: at most `keep_bytes`."""
    n, operand = request.n_tokens, torch.promote_types(request.hidden_dtype, request.weight_dtype)
    return n * DZ[operand].itemsize * divergence_columns(keep_bytes, n, request.vocab_rows, operand)


CHUNK = 8192  # tokens whose partial statistics are held at a time
FEWEST = 256  # tokens of a chunk with kept columns: below, d_weight is read and written too often


def partials_rows(vocab_size: int, width: int, workspace_bytes: int) -> int:
    """Tokens whose partial statistics fit the workspace, a multiple of 16, at most `CHUNK`.

    Args:
        vocab_size: of all ranks, which must chunk alike.
        width: columns of a tile.
    """
    fit = workspace_bytes // (12 * max((vocab_size + width - 1) // width, 1))
    return max(16, min(CHUNK, fit) // 16 * 16)


def single_pass_chunk(
    n: int, vocab_size: int, width: int, operand: torch.dtype, workspace_bytes: int
) -> tuple[int, bool]:
    """Tokens of a single pass's chunk, a multiple of 16, and whether their columns are kept.

    Not in float16, whose scaled dz takes a block of its own beside what is kept. `vocab_size` is of all ranks.
    """
    most = partials_rows(vocab_size, width, workspace_bytes)
    fit = workspace_bytes // _bytes_per_row(vocab_size, width, operand.itemsize)
    if operand == torch.float16 or fit < min(FEWEST, n):
        return most, False
    most = min(most, max(16, fit // 128 * 128 if fit >= 128 else fit // 16 * 16))
    each = -(-n // max(1, -(-n // most)))  # chunks of nearly one size: as many as `most` makes of them
    return min(most, max(16, -(-each // 128) * 128)), True


SAMPLE = 4096  # logits of a token that are looked at to guess where its threshold lies
STEP = 2048  # logits that a program looks at together


def shortlist_length(columns: int) -> int:
    """Logits of a token that are set aside to be searched, a tenth of them; none where a sample would be them all."""
    return 0 if columns <= SAMPLE else (columns + 10 * STEP - 1) // (10 * STEP) * STEP


def held_rows(n: int, vocab_size: int, width: int, workspace_bytes: int, *, short: bool, best: int = 0) -> int:
    """Tokens whose logits, with what is found among them, fit the workspace; one at least, chunks of nearly one size.

    Args:
        vocab_size: of all ranks, which must chunk alike.
        short: whether each token has a short list.
        best: of a token, how many of its largest logits all ranks together hold.
    """
    tiles = (vocab_size + width - 1) // width
    row = tiles * (4 * width + 12 + 4) + 512  # logits, partial statistics, a list of tiles, and a token's numbers
    row += 4 * shortlist_length(tiles * width) if short else 0
    row += 64 * best  # ids and values, and both in order: 53 bytes of each, counted
    fit = max(1, min(CHUNK, (workspace_bytes - 16 * 12 * tiles) // row))
    grain = 128 if fit >= 128 else 16 if fit >= 16 else 1  # a tile's rows, and what addresses are aligned to
    most = fit // grain * grain
    each = -(-n // max(1, -(-n // most)))
    return min(most, max(1, -(-each // grain)) * grain)


COLUMNS = 128  # of a block, at least; and what is kept of a divergence comes in as many
PAIR = 2 * COLUMNS  # what a block's columns are a multiple of where they can: the products' tiles are as wide
MOST = 8192  # tokens that are cut into blocks only where the workspace is short
MARGIN = 1.014  # an estimate's error: of two that were nearer, the wider blocks were as fast or faster
BALANCE = 128  # operations of the tensor cores in the time of a byte of memory, about, on an H200


@dataclass(frozen=True, slots=True)
class Blocks:
    """How dz [n, V] is cut."""

    tokens: int
    columns: int

    @classmethod
    @lru_cache(maxsize=256)  # up to some milliseconds of the host, at each new number of tokens
    def plan(
        cls,
        n: int,
        columns: int,
        hidden_size: int,
        item: int,
        workspace_bytes: int,
        *,
        scaled: bool,
        multiprocessors: int,
        parts: int = 1,
    ) -> Blocks:
        """The blocks of dz, and of d_weight's fp32 tile where one is needed, that fit the workspace and cost least.

        Of those of as many tokens that cost nearly as little, the widest.

        Args:
            item: bytes of an element of dz, and of what is held beside it.
            scaled: dz is scaled, so that d_weight needs a tile in any case.
            parts: how many launches make a block's dz, each of some of its tokens.
        """
        whole = max(1, -(-columns // PAIR)) * PAIR

        def fitting(tokens: int) -> int:
            tile = 4 * hidden_size if scaled or tokens < n else 0
            return min(whole, workspace_bytes // (tokens * item + tile))

        tokens = max(1, n)
        if fitting(tokens) == whole:
            return cls(tokens, whole)
        found = []
        for count in range(1, 1 + -(-n // MOST)):
            tokens = n if count == 1 else -(-n // (count * COLUMNS)) * COLUMNS
            most = fitting(tokens) // PAIR * PAIR
            if most >= min(whole, 4 * PAIR):
                fewest = -(-whole // most)
                found += [cls(tokens, -(-whole // (PAIR * blocks)) * PAIR) for blocks in range(fewest, 2 * fewest + 1)]
        if found:
            costs = {blocks: blocks._cost(n, columns, hidden_size, multiprocessors, parts) for blocks in found}
            best = min(found, key=lambda blocks: costs[blocks])
            near = (b for b in found if b.tokens == best.tokens and costs[b] <= MARGIN * costs[best])
            return max(near, key=lambda blocks: blocks.columns)
        while fitting(tokens) < 4 * PAIR and tokens > 16:
            tokens = max(16, (tokens // 2 + 15) // 16 * 16)
        return cls(tokens, max(COLUMNS, fitting(tokens) // COLUMNS * COLUMNS))

    def _cost(self, n: int, columns: int, hidden_size: int, multiprocessors: int, parts: int) -> int:
        """Operations that the multiprocessors have time for while they make dz and its products.

        Tiles of 128×256 are taken up by all of them at a time, whether there are as many or not; blocks beyond the
        first read and write a sum in fp32.
        """
        turns = 0
        for tokens, rows in _split(n, self.tokens):
            for width, blocks in _split(columns, self.columns):
                part = -(-tokens // parts)
                dz = parts * _turns(part, width, multiprocessors) * hidden_size
                d_hidden = _turns(tokens, hidden_size, multiprocessors) * width
                d_weight = _turns(width, hidden_size, multiprocessors) * tokens
                turns += rows * blocks * (dz + d_hidden + d_weight)
        sums = n * (-(-columns // self.columns) - 1) + columns * (-(-n // self.tokens) - 1)
        return turns * multiprocessors * 2 * COLUMNS * PAIR + sums * 8 * hidden_size * BALANCE

    def of_tokens(self, n: int) -> list[tuple[int, int]]:
        return [(start, min(start + self.tokens, n)) for start in range(0, n, self.tokens)]

    def of_columns(self, start: int, stop: int) -> list[tuple[int, int]]:
        return [(first, min(first + self.columns, stop)) for first in range(start, stop, self.columns)]


def _split(total: int, size: int) -> list[tuple[int, int]]:
    """Sizes that a total is cut into, each with how often it occurs."""
    return [(each, times) for each, times in ((size, total // size), (total % size, 1)) if each and times]


def _turns(rows: int, columns: int, multiprocessors: int) -> int:
    """How often all multiprocessors take up a tile of a product, laid the better way."""
    down, across = (-(-rows // a) * -(-columns // b) for a, b in ((COLUMNS, PAIR), (PAIR, COLUMNS)))
    return -(-min(down, across) // multiprocessors)
