"""What a call will do, said before it runs: tiles, chunks, what is kept and what is made again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from logitless.types import Request
from logitless_triton.config import Config, config_for, device_facts
from logitless_triton.layout import (
    DIFFERENCES,
    EXPONENTIALS,
    NOTHING,
    Blocks,
    held_rows,
    kept_length,
    mode_of,
    partials_rows,
    single_pass_chunk,
    tiles_that_fit,
)

__all__ = ["Plan", "plan"]

KINDS = {NOTHING: "nothing", DIFFERENCES: "differences", EXPONENTIALS: "exponentials"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How a call on one rank is cut; columns are vocab rows of the rank's weight, all taken for real ones."""

    tiles: Config
    forward_tokens: int  # whose partial statistics, and with `holds` logits, are held at a time; at a large k, fewer
    holds: bool  # for a kept set, several labels, further statistics or the most likely tokens
    kept: str  # "nothing", "differences" (both gradients), "exponentials" (entropy_grad=False)
    kept_bytes: int
    kept_columns: int
    columns: int
    block_tokens: int  # of a block of dz that the backward makes again
    block_columns: int
    blocks: int  # of columns that are made again
    single_pass_tokens: int  # of a chunk of linear_policy_loss
    single_pass_keeps: bool

    def __str__(self) -> str:
        def shape(rows: int, columns: int, depth: int) -> str:
            return f"{rows}×{columns}×{depth}"

        forward, dz = self.tiles.forward, self.tiles.dz
        again = "nothing is made again"
        if self.blocks:
            again = f"the logits are made again in {self.blocks} block(s) of {self.block_columns:,} columns"
            again += f" by {self.block_tokens:,} tokens"
        kept = "keeps nothing"
        if self.holds:
            kept = "holds their logits, and " + kept
        if self.kept_columns:
            share = f"{self.kept_columns:,} of {self.columns:,} columns"
            kept = f"keeps {self.kept} of {share} ({self.kept_bytes / 2**20:,.0f} MiB)"
        keeps = "its logits made once" if self.single_pass_keeps else "its logits made twice"
        return "\n".join(
            [
                f"forward: tiles {shape(forward.rows, forward.columns, forward.depth)}, {forward.per_sm} on each"
                f" multiprocessor, {self.forward_tokens:,} tokens at a time; {kept}",
                f"backward: {again}, tiles {shape(dz.rows, dz.columns, dz.depth)}",
                f"single pass: chunks of {self.single_pass_tokens:,} tokens, {keeps}",
            ]
        )


def plan(request: Request, keep_bytes: int = 0) -> Plan:
    """The plan of a request, from the arithmetic that the call itself uses."""
    operand = torch.promote_types(request.hidden_dtype, request.weight_dtype)
    device = device_facts(request.device)
    tiles = config_for(device, operand, request.hidden_size)
    tiles = tiles.holding if request.kept_set or request.best else tiles
    width, n, columns = tiles.forward.columns, request.n_tokens, request.vocab_rows
    length = kept_length(request, keep_bytes) if keep_bytes else 0
    mode = mode_of(length)
    kept = min(columns, width * tiles_that_fit(length, n, width, operand.itemsize, mode, columns))
    blocks = Blocks.plan(
        *(n, columns - kept, request.hidden_size, operand.itemsize, request.workspace_bytes),
        scaled=operand == torch.float16,
        multiprocessors=device.multiprocessors,
    )
    vocab_size = columns * request.group_size
    chunk, keeps = single_pass_chunk(n, vocab_size, width, operand, request.workspace_bytes)
    rows = partials_rows(vocab_size, width, request.workspace_bytes)
    if request.features:
        short = request.best or (request.kept_set and request.group_size == 1)
        rows = held_rows(n, vocab_size, width, request.workspace_bytes, short=short)
    if request.kept_set:
        chunk, keeps = rows, False
    return Plan(
        tiles=tiles,
        forward_tokens=min(n, rows),
        holds=bool(request.features),
        kept=KINDS[mode],
        kept_bytes=length,
        kept_columns=kept,
        columns=columns,
        block_tokens=min(blocks.tokens, n),
        block_columns=min(blocks.columns, columns - kept),
        blocks=len(blocks.of_columns(kept, columns)),
        single_pass_tokens=min(chunk, n),
        single_pass_keeps=keeps,
    )
