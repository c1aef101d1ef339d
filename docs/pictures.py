"""Draws the pictures of layouts.md from batches that `PackedBatch` made; run it to write docs/pictures/*.svg.

A card of its own colour lies under each picture, and the colours follow the reader's light or dark scheme, so that text
can be read whatever the page's background is. No meaning is in a colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import torch

from logitless import PackedBatch

CELL, HIGH = 34, 26  # of one token
STYLE = """
.card{fill:#fff;stroke:#d0d4da}text{fill:#1a1c1f;font:13px system-ui,sans-serif}.n{font-size:12px}
.t{text-anchor:middle}.a{fill:#cfe3ff}.b{fill:#ffe2bd}.c{fill:#d5f0d2}.o{fill:#f1f2f4;stroke-dasharray:3 2}
rect{stroke:#6b7078}line,path{stroke:#6b7078;fill:none}
@media(prefers-color-scheme:dark){.card{fill:#1b1e23;stroke:#3a3f46}text{fill:#e9ebee}.a{fill:#1f4478}.b{fill:#6a4312}
.c{fill:#245a2d}.o{fill:#2b2f35}rect{stroke:#8d939c}line,path{stroke:#8d939c}}
"""

Cell = tuple[str, str]  # what is written, and the class of its colour


class Drawing:
    """Boxes and words, and how large they are together."""

    def __init__(self, title: str, description: str) -> None:
        self.parts: list[str] = []
        self.title, self.description = title, description
        self.width = self.height = 0.0

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(words)}</text>')
        self._reach(x + (0 if "t" in style else 7.2 * len(words)), y)

    def box(self, x: float, y: float, width: float, height: float, style: str, words: str = "") -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{style}"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + 4.5, words, "t")
        self._reach(x + width, y + height)

    def row(self, x: float, y: float, cells: Sequence[Cell]) -> None:
        for i, (words, style) in enumerate(cells):
            self.box(x + i * CELL, y, CELL, HIGH, style, words)

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" marker-end="url(#head)"/>')

    def borders(self, x: float, y: float, at: Sequence[int]) -> None:
        """Ticks under a row, numbered by position."""
        for place in at:
            self.parts.append(f'<line x1="{x + place * CELL:g}" y1="{y:g}" x2="{x + place * CELL:g}" y2="{y + 6:g}"/>')
            self.text(x + place * CELL, y + 19, str(place), "t n")

    def svg(self) -> str:
        width, height = self.width + 20, self.height + 18
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'role="img"><title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>'
            f"<style>{STYLE}</style>"
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'orient="auto"><path d="M0 0L8 4L0 8"/></marker></defs>'
            f'<rect class="card" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="8"/>'
            + "\n".join(self.parts)
            + "</svg>\n"
        )

    def _reach(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)


# --- three sequences, and their tokens' names ------------------------------------------------------------------------

SEQUENCES = [[11, 12, 13, 14], [21, 22, 23, 24, 25, 26], [31, 32, 33]]
PROMPTS = [2, 3, 1]


def batch(align: int = 1) -> PackedBatch:
    """The three, of which the completions are scored."""
    masks = [[int(t >= prompt) for t in range(len(ids))] for ids, prompt in zip(SEQUENCES, PROMPTS, strict=True)]
    return PackedBatch.from_sequences(SEQUENCES, loss_mask=masks, align=align)


def token(number: int) -> Cell:
    """a1 for 11, and a dashed cell for padding (0) and for ignored labels."""
    if number <= 0:
        return ("–" if number == 0 else "·", "o")
    letter = "abc"[number // 10 - 1]
    return (f"{letter}{number % 10}", letter)


def tokens(numbers: torch.Tensor) -> list[Cell]:
    """Each token's cell."""
    return [token(number) for number in numbers.tolist()]


# --- the pictures ---------------------------------------------------------------------------------------------------


def layouts() -> str:
    """The three sequences in each layout."""
    drawing = Drawing(
        "Three sequences padded, nested and packed",
        "Sequences a, b and c of 4, 6 and 3 tokens: as rows of six with padding, as rows of their own lengths, and one "
        "after another in a row of 13.",
    )
    drawing.text(16, 26, "padded, input_ids [3, 6]")
    drawing.text(300, 26, "nested, [3, j]")
    for i, ids in enumerate(SEQUENCES):
        drawing.row(16, 38 + i * HIGH, [token(0)] * (6 - len(ids)) + [token(x) for x in ids])
        drawing.row(300, 38 + i * HIGH, [token(x) for x in ids])
    packed = batch()
    drawing.text(16, 150, "packed (thd), [13]")
    drawing.row(16, 160, tokens(packed.input_ids))
    drawing.borders(16, 160 + HIGH, packed.cu_seqlens.tolist())
    drawing.text(16 + 13 * CELL + 18, 205, "cu_seqlens", "n")
    return drawing.svg()


def labels() -> str:
    """What each token predicts."""
    drawing = Drawing(
        "What each token of a packed batch predicts",
        "Below each token stands its label, the next token of the same sequence; at prompts and at a sequence's last "
        "token stands nothing.",
    )
    packed = batch()
    ids = tokens(packed.input_ids)
    positions = [(str(x), style) for x, (_, style) in zip(packed.position_ids.tolist(), ids, strict=True)]
    rows = (("input_ids", ids), ("position_ids", positions), ("labels", tokens(packed.labels)))
    for i, (name, cells) in enumerate(rows):
        drawing.text(16, 34 + i * 36, name)
        drawing.row(110, 16 + i * 36, cells)
    drawing.text(110, 140, "· is ignore_index: the label would be a prompt's token, or the sequence ends", "n")
    return drawing.svg()


def zigzag() -> str:
    """The shards of two context-parallel ranks."""
    drawing = Drawing(
        "Context parallelism by zigzag",
        "Each sequence, padded to a multiple of four, is cut in four chunks; rank 0 has the first and the last, rank 1 "
        "the two between.",
    )
    packed = batch(align=4)
    shards = [packed.shard(rank, 2) for rank in (0, 1)]
    owner = torch.zeros(packed.input_ids.shape[0], dtype=torch.int64)
    places = torch.arange(1, packed.input_ids.shape[0] + 1)
    for rank in (0, 1):
        numbered = PackedBatch.from_sequences(list(places.split(list(packed.padded_lengths))))
        owner[numbered.shard(rank, 2).input_ids - 1] = rank
    drawing.text(16, 26, "the batch, made with align=4, and the rank that has each token")
    drawing.row(16, 38, tokens(packed.input_ids))
    drawing.row(16, 38 + HIGH, [(str(rank), "o") for rank in owner.tolist()])
    drawing.borders(16, 38 + 2 * HIGH, packed.cu_seqlens_padded.tolist())
    drawing.text(16 + 16 * CELL + 18, 109, "cu_seqlens_padded", "n")
    for rank, shard in enumerate(shards):
        y = 140 + rank * 84
        drawing.text(16, y, f"rank {rank}: input_ids, labels")
        drawing.row(16, y + 10, tokens(shard.input_ids))
        drawing.row(16, y + 10 + HIGH, tokens(shard.labels))
    return drawing.svg()


def tensor_parallel() -> str:
    """Two shards of the vocabulary."""
    drawing = Drawing(
        "A vocabulary over two ranks",
        "Each rank has all hidden states and half of the vocab rows; four numbers of each token are gathered, and "
        "every rank folds them into the same scores.",
    )
    for rank, style in enumerate("ab"):
        y = 40 + rank * 130
        drawing.text(16, y - 12, f"rank {rank}")
        drawing.box(16, y, 104, 80, "c", "hidden [N, D]")
        drawing.text(125, y + 45, "×")
        drawing.box(138, y, 184, 80, style, ("rows 0 … V/2 − 1" if rank == 0 else "rows V/2 … V − 1"))
        drawing.arrow(330, y + 40, 372, y + 40)
        drawing.box(378, y + 10, 130, 60, style, "M, R, T, z  [4, N]")
        drawing.arrow(516, y + 40, 558, y + 40 + (40 if rank == 0 else -40))
    drawing.box(564, 90, 96, 110, "o", "all-gather")
    drawing.arrow(668, 145, 706, 145)
    drawing.box(712, 105, 150, 80, "c", "log_probs, entropy")
    drawing.text(712, 206, "the same bits on both ranks", "n")
    drawing.text(16, 278, "backward: d_weight stays with its rows; d_hidden is a sum over the ranks", "n")
    return drawing.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "layouts": layouts,
    "labels": labels,
    "zigzag": zigzag,
    "tensor-parallel": tensor_parallel,
}

if __name__ == "__main__":
    folder = Path(__file__).parent / "pictures"
    folder.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw())
