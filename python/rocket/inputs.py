"""Files that a user names on the command line."""

from io import BufferedReader
from pathlib import Path

from rocket.errors import CliError, describe_os_error


def open_file(path: str, option: str) -> BufferedReader:
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(None, "it is a directory")
        return Path(path).open("rb")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = (
            describe_os_error(OSError(error.errno, error.strerror)) if isinstance(error, OSError) else error
        )
        raise CliError(f"{option}: cannot read {path}: {reason}", "give a file that exists") from error


def read_file(path: str, option: str) -> bytes:
    with open_file(path, option) as file:
        return file.read()


def decode_text(data: bytes, name: str, offset: int = 0) -> str:
    """UTF-8 text. ``offset`` is where the data begin in what ``name`` names."""
    if b"\0" in data:
        found = f"a binary file (a zero byte at {offset + data.index(0)})"
        raise CliError(f"{name}: expected text, found {found}", "give a text file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at {offset + error.start}"
        raise CliError(f"{name}: expected UTF-8 text, found {found}", "convert it to UTF-8") from None
