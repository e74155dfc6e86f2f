"""Files that appear whole or not at all, and whose place is checked before the work starts."""

import contextlib
import json
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from rocket.errors import CliError, naming, reason_of

ROOM_HINT = "make room, or give a file on another disk"


class AtomicFile:
    """Writes to a file without a name in the target's folder, which gets one on success and takes its place.

    So nothing unfinished is left behind by whatever ends the process. Where a file system has no such files,
    it has a temporary name. It is made at once, so a target that cannot be written is an error before any
    work is done. A target that is no regular file (/dev/null, a pipe) is written directly: renaming would
    replace the device.
    """

    def __init__(self, path: str | Path, option: str) -> None:
        self.target = Path(os.path.realpath(path))
        self.option = option
        self._temporary: Path | None = None
        self.is_regular = False  # a file that appears at the end, not a device or a pipe
        self.file = self._open(Path(path))

    def _open(self, given: Path) -> BinaryIO:
        try:
            if self.target.is_dir():
                raise IsADirectoryError(None, "it is a directory", None)
            mode = 0o666 & ~_umask()
            if self.target.exists():
                found = self.target.stat().st_mode
                if not stat.S_ISREG(found):
                    return self.target.open("wb")
                if not os.access(self.target, os.W_OK):
                    raise PermissionError(None, "permission denied", None)
                mode = stat.S_IMODE(found)
            handle = self._nameless()
            if handle is None:
                handle, name = tempfile.mkstemp(
                    prefix=f".{self.target.name}.", suffix=".tmp", dir=self.target.parent
                )
                self._temporary = Path(name)
            self.is_regular = True
            os.fchmod(handle, mode)
            return os.fdopen(handle, "w+b")
        except OSError as error:
            reason = reason_of(error)
            raise CliError(
                f"{self.option}: cannot write {given}: {reason}",
                "give a file in a folder that exists and is yours",
            ) from error

    def _nameless(self) -> int | None:
        try:
            handle = os.open(self.target.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except (
            AttributeError,
            OSError,
        ):  # there are none; mkstemp says what else is wrong
            return None
        if Path(_name_of(handle)).exists():
            return handle
        os.close(handle)  # without /proc it could not get a name
        return None

    def _name(self) -> None:
        """Gives the nameless file a temporary name."""
        self.file.flush()  # may run out of space
        folder = os.open(self.target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            while True:
                name = f".{self.target.name}.{secrets.token_hex(4)}.tmp"
                self._temporary = self.target.parent / name
                try:
                    # With a folder's descriptor os.link follows the link that /proc has of the file.
                    os.link(_name_of(self.file.fileno()), name, dst_dir_fd=folder, follow_symlinks=True)
                    return
                except FileExistsError:
                    self._temporary = None
                except OSError:  # it may not be linked here
                    self._temporary = None
                    self._copy()
                    return
        finally:
            os.close(folder)

    def _copy(self) -> None:
        """Into a file with a temporary name."""
        mode = stat.S_IMODE(os.fstat(self.file.fileno()).st_mode)
        handle, name = tempfile.mkstemp(prefix=f".{self.target.name}.", suffix=".tmp", dir=self.target.parent)
        self._temporary = Path(name)
        with os.fdopen(handle, "wb") as copy:
            os.fchmod(handle, mode)
            self.file.seek(0)
            shutil.copyfileobj(self.file, copy)

    def write(self, data: bytes) -> None:
        with self.naming():
            self.file.write(data)

    def naming(self) -> AbstractContextManager[None]:
        """Says of an OSError that it was this file."""
        return naming(f"{self.option}: cannot write {self.target}", ROOM_HINT)

    def commit(self) -> None:
        try:
            with self.naming():
                if self.is_regular and self._temporary is None:
                    self._name()
                self.file.close()  # may still run out of space
                if self._temporary is not None:
                    self._temporary.replace(self.target)
                    self._temporary = None
        finally:
            with contextlib.suppress(OSError):
                self.file.close()  # what could not be written is not kept either
            self._remove()

    def discard(self) -> None:
        try:
            with contextlib.suppress(OSError):  # what could not be written is of no interest any more
                self.file.close()
        finally:
            self._remove()

    def _remove(self) -> None:
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None

    def __enter__(self) -> "AtomicFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()


def _name_of(handle: int) -> str:
    return f"/proc/self/fd/{handle}"


def _umask() -> int:
    value = os.umask(0)
    os.umask(value)
    return value


class LogitsWriter:
    """A safetensors file with one tensor, ``logits`` float32 [rows, vocab], whose rows come step by step.

    The number of rows is known only at the end, so room for the longest header is left at the start;
    safetensors headers may be padded with spaces.
    """

    HEADER_BYTES = 256

    def __init__(self, path: str | Path, option: str) -> None:
        self._out = AtomicFile(path, option)
        self._vocab = 0
        self._rows = 0
        self._discarded = False
        if self._out.file.seekable():
            self._out.file.write(bytes(8 + self.HEADER_BYTES))
        else:
            self._out.discard()
            raise CliError(
                f"{option}: {path} is a pipe, and the header is written last", "give a regular file"
            )

    def append(self, logits: npt.NDArray[np.float32]) -> None:
        rows, self._vocab = logits.shape
        with self._out.naming():
            self._out.file.write(np.ascontiguousarray(logits, dtype="<f4").tobytes())
        self._rows += rows  # only now: a Ctrl-C may come before

    def _header(self) -> bytes:
        shape = [self._rows, self._vocab]
        tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * self._rows * self._vocab]}
        text = json.dumps({"logits": tensor}, separators=(",", ":")).encode()
        return self.HEADER_BYTES.to_bytes(8, "little") + text.ljust(self.HEADER_BYTES)

    def discard(self) -> None:
        """Leaves no file behind."""
        self._discarded = True
        self._out.discard()

    def __enter__(self) -> "LogitsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or self._discarded or not self._rows:
            self._out.discard()
            return
        with self._out, self._out.naming():
            end = 8 + self.HEADER_BYTES + 4 * self._rows * self._vocab
            if self._out.is_regular:
                self._out.file.truncate(end)  # less what a Ctrl-C left of a row
            self._out.file.seek(0)
            self._out.file.write(self._header())
