"""What the command line makes of an error: one line, a blank line, a hint, and an exit status.

Status 2 means that the command line itself is wrong whatever the fuel: an unknown option, a value out of
range, two prompts. Status 1 is any other failure. 130 is Ctrl-C, 141 a reader of standard output that went
away.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import typer

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class CliError(Exception):
    """A failure found by the command line itself."""

    status = EXIT_FAILURE

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(CliError):
    """The command line cannot be right."""

    status = EXIT_USAGE


class StdoutError(CliError):
    """Standard output takes no more."""

    def __init__(self, error: OSError) -> None:
        closed = error.errno == errno.EBADF
        reason = "it is closed" if closed else error.strerror or str(error)
        hint = "redirect it to a file or to /dev/null" if closed else "make room, or redirect it elsewhere"
        super().__init__(f"standard output: cannot write: {reason}", hint)


class ReaderGoneError(Exception):
    """Whatever reads standard output has closed it. Typer has its own way with a BrokenPipeError."""


# Typer brings its own copy of click in some releases and uses the package in others; either way this is the
# base class of its complaints about the command line.
_ParseError: type[Exception] = typer.BadParameter.__mro__[1]

_HINTS = {
    "FuelError": "check the path of the fuel, and that its download is complete",
    "PlanError": "ask for less: a shorter context, fewer tokens",
    "InputError": "see --help for what the options take",
    "DeviceError": "try --backend cpu",
}


def one_line(text: str) -> str:
    """The text on one line, with control characters (a terminal obeys them) made visible."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in words)


def print_error(message: str, hint: str) -> None:
    label, hint_label = "error:", "hint:"
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        label, hint_label = f"\x1b[1;31m{label}\x1b[0m", f"\x1b[36m{hint_label}\x1b[0m"
    text = f"{label} {one_line(message)}\n\n{hint_label} {one_line(hint)}\n"
    sys.stderr.flush()
    sys.stderr.buffer.write(text.encode("utf-8", "backslashreplace"))
    sys.stderr.buffer.flush()


def reason_of(error: OSError) -> str:
    return error.strerror or (str(error.args[-1]) if error.args else type(error).__name__)


@contextmanager
def naming(what: str, hint: str) -> Iterator[None]:
    """Says of an OSError what was being done, and to which file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CliError(f"{what}: {reason_of(error)}", hint) from error


def describe_os_error(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ": reading or writing a file"
    return f"{error.strerror or error}{where}"


def explain(error: BaseException) -> tuple[str, str, int]:
    """Message, hint and exit status of an error."""
    kind = type(error)
    if isinstance(error, CliError):
        return str(error), error.hint, error.status
    if isinstance(error, _ParseError):
        message = error.format_message()  # type: ignore[attr-defined]
        return message, "see --help for the options and what they take", EXIT_USAGE
    if kind.__module__.split(".")[0] == "rocket":  # a typed error of the engine or of the package
        return str(error), getattr(error, "hint", "") or _HINTS.get(kind.__name__, "see --help"), EXIT_FAILURE
    if isinstance(error, MemoryError):
        return (
            "out of memory",
            "close other programs, or ask for less: a shorter context, a smaller chunk of the prompt",
            EXIT_FAILURE,
        )
    if isinstance(error, OSError):
        return describe_os_error(error), "check the path, its permissions and the space left", EXIT_FAILURE
    if isinstance(error, ImportError) and "_core" in str(error):
        return f"the C++ module is missing: {error}", "build it with: pip install .", EXIT_FAILURE
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "a signal ended it", "start it again", EXIT_INTERRUPTED
    message = f"internal fault: {kind.__name__}: {error}"
    return message, "this is a defect of Rocket; ROCKET_TRACEBACK=1 shows where it happened", EXIT_FAILURE


def _silence_stdout() -> None:
    # What is still buffered would raise again at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush_stdout() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StdoutError(error) from error


def _stdout_fails() -> bool:
    """Whether it takes no more. Long text goes past its buffer, which may then be empty."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"")
    except OSError:
        return True
    return False


def run_command(
    command: Callable[[], int | None], speaks: Callable[[str, str], bool] = lambda message, hint: True
) -> int:
    """Runs a command and turns whatever it raises into a message and an exit status. ``speaks`` gets message
    and hint, and says whether they are for this process to print."""
    try:
        try:
            status = command() or 0
        except typer.Exit as stop:
            status = stop.exit_code
        _flush_stdout()
        return status
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except (ReaderGoneError, BrokenPipeError):
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and _stdout_fails():
            error = StdoutError(error)  # typer's own text
        if isinstance(error, StdoutError | OSError):
            _silence_stdout()
        if os.environ.get("ROCKET_TRACEBACK"):
            traceback.print_exc()
        message, hint, status = explain(error)
        if speaks(message, hint):
            print_error(message, hint)
        return status


def _open_closed_streams() -> None:
    # Python has None for a standard stream that was closed by whatever started it. Its descriptor is taken,
    # lest another file gets the number; that of standard output cannot be written, so that lost output is an
    # error.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            access = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            setattr(sys, name, os.fdopen(os.open(os.devnull, access), mode))


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    # As an exception, so that half-written files are removed on the way out.
    sys.exit(128 + number)


def run_command_line(
    build: Callable[[], typer.Typer],
    name: str,
    speaks: Callable[[str, str], bool] = lambda message, hint: True,
    leave: Callable[[int], None] = lambda status: None,
) -> NoReturn:
    """The main() of a console script. ``leave`` is called with the status before the process ends."""
    _open_closed_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has it ignored
            signal.signal(number, _terminate)
    try:
        status = run_command(lambda: build()(prog_name=name, standalone_mode=False), speaks)
    except KeyboardInterrupt:  # while another error was being said
        status = EXIT_INTERRUPTED
    except SystemExit as stop:  # a signal's
        status = stop.code if isinstance(stop.code, int) else EXIT_FAILURE
    leave(status)
    sys.exit(status)
