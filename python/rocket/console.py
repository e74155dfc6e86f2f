"""Standard error for people, standard output for data."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rocket.errors import one_line

Progress = Callable[[int, int], None]


class Notes:
    """Lines on standard error, unless quiet."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def say(self, line: str) -> None:
        if not self.quiet:
            self.always(line)

    def always(self, text: str) -> None:
        sys.stderr.buffer.write(text.encode("utf-8", "backslashreplace") + b"\n")
        sys.stderr.buffer.flush()

    def choices(self, lines: list[str]) -> None:
        for line in lines:
            self.say(one_line(line))

    @contextmanager
    def progress(self, label: str) -> Iterator[Progress | None]:
        """A bar for bytes on a terminal; elsewhere nothing."""
        if self.quiet or not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = ("{task.description}", BarColumn(), DownloadColumn(binary_units=True))
        with Progress(
            *columns,
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        ) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def write_data(text: str) -> None:
    """Text to standard output as UTF-8, at once, whatever the locale says."""
    sys.stdout.buffer.write(text.encode("utf-8", "replace"))
    sys.stdout.buffer.flush()
