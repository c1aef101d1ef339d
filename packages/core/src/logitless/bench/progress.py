"""A bar on stderr, if that is a terminal, for what takes minutes.

It is drawn when it is told of a step and by no thread of its own, so that nothing runs beside what is being timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Step", "progress_bar"]

Step = Callable[[str, int, int], None]
"""What is going on, how many are done, of how many."""


@contextmanager
def progress_bar(name: str) -> Iterator[Step]:
    """Within the block, a bar that says where the work of this name stands; nothing is left of it afterwards."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(name, total=None)

        def step(what: str, done: int, total: int) -> None:
            progress.update(task, description=f"{name}: {what}", completed=done, total=total, refresh=True)

        yield step
