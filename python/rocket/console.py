"""Standard error for people, standard output for data."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rocket.errors import ReaderGoneError, StdoutError, one_line

Progress = Callable[[int, int], None]


class Notes:
    """Lines on standard error, unless quiet."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet

    def say(self, line: str) -> None:
        if not self.quiet:
            self.always(one_line(line))

    def always(self, text: str) -> None:
        sys.stderr.buffer.write(text.encode("utf-8", "backslashreplace") + b"\n")
        sys.stderr.buffer.flush()

    def choices(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)

    @contextmanager
    def progress(self, label: str, unit: str = "bytes") -> Iterator[Progress | None]:
        """A bar on a terminal; elsewhere nothing. Gives a function that takes what is done and in all."""
        if self.quiet or not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        count = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
        columns = ("{task.description}", BarColumn(), count, TimeRemainingColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def write_data(data: str | bytes) -> None:
    """To standard output at once; text as UTF-8, whatever the locale says."""
    try:
        sys.stdout.buffer.write(data if isinstance(data, bytes) else data.encode("utf-8", "replace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise ReaderGoneError from None
    except OSError as error:
        raise StdoutError(error) from error
