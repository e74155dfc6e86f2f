"""Files that a user names on the command line, and those that lie in a fuel."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from rocket.errors import CliError, naming, reason_of


def open_file(path: str, option: str) -> BufferedReader:
    if not path:
        raise CliError(f"{option}: expected a file, found an empty name", "give the name of a file")
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(None, "it is a directory")
        return Path(path).open("rb")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise CliError(f"{option}: cannot read {path}: {reason}", "give a file that exists") from error


FILE_BYTES = 256_000_000  # of a file in a fuel, weights apart


def open_regular(path: str | Path) -> BufferedReader:
    """Opens a regular file. Devices and pipes may have no end, and opening a pipe may wait for a writer: they
    are refused. Throws OSError, or ValueError for a name with a zero byte."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "expected a regular file, found a device or a pipe", str(path))
        return os.fdopen(handle, "rb")
    except OSError:
        os.close(handle)
        raise


def read_regular(path: str | Path) -> bytes:
    """All of a regular file of at most FILE_BYTES. Throws as open_regular."""
    with open_regular(path) as file:
        data = file.read(FILE_BYTES + 1)
    if len(data) > FILE_BYTES:
        raise OSError(errno.EFBIG, f"expected at most {FILE_BYTES:,} bytes, found more", str(path))
    return data


READ_HINT = "check the file and the disk it is on"
MAX_BYTES = 128 << 20  # of a text that is read as a whole


def read_file(path: str, option: str) -> bytes:
    with open_file(path, option) as file, naming(f"{option}: cannot read {path}", READ_HINT):
        return file.read()


def read_text(file: BinaryIO, name: str) -> bytes:
    """All of a file or pipe that may have no end."""
    with naming(f"{name}: cannot read", READ_HINT):
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise CliError(
            f"{name}: too long: expected at most {MAX_BYTES >> 20} MiB, found more", "give less text"
        )
    return data


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
