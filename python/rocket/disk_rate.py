"""How fast a disk reads and writes a large file, past the page cache where the file system allows."""

import contextlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BLOCK = 4 << 20
READERS = 8  # requests in flight: a fast disk needs several


@dataclass(frozen=True)
class DiskRates:
    read_gb_s: float
    write_gb_s: float
    direct: bool  # past the page cache


def _open(path: Path, flags: int, direct: bool) -> int:
    return os.open(path, flags | (os.O_DIRECT if direct else 0))


def can_bypass_cache(path: Path) -> bool:
    """Whether the file system takes O_DIRECT."""
    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        os.close(_open(path, os.O_RDWR, True))
    except OSError:
        return False
    return True


@contextmanager
def _opened(path: Path, flags: int, direct: bool) -> Iterator[int]:
    handle = _open(path, flags, direct)
    try:
        yield handle
    finally:
        os.close(handle)


def _write(path: Path, blocks: int, direct: bool) -> float:
    """Seconds until everything is on the disk."""
    with contextlib.closing(mmap.mmap(-1, BLOCK)) as block:  # aligned as O_DIRECT wants it
        block.write(os.urandom(BLOCK))  # no file system makes less of it
        with _opened(path, os.O_WRONLY, direct) as handle:
            start = time.perf_counter()
            for i in range(blocks):
                os.pwrite(handle, block, i * BLOCK)
            os.fsync(handle)
            return time.perf_counter() - start


def _forget(path: Path) -> None:
    """Drops the file from the page cache, as far as the system does as it is told."""
    with _opened(path, os.O_RDONLY, False) as handle:
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path, blocks: int, direct: bool) -> float:
    """Seconds to read everything once, with several requests in flight."""

    def take(reader: int) -> None:
        with contextlib.closing(mmap.mmap(-1, BLOCK)) as buffer:
            for i in range(reader, blocks, READERS):
                got = os.preadv(handle, [buffer], i * BLOCK)
                if got != BLOCK:
                    raise OSError(None, f"a read of {BLOCK} bytes gave {got}", str(path))

    if not direct:
        _forget(path)
    with _opened(path, os.O_RDONLY, direct) as handle, ThreadPoolExecutor(READERS) as pool:
        start = time.perf_counter()
        for _ in pool.map(take, range(READERS)):
            pass
        return time.perf_counter() - start


def disk_rates(folder: Path, size: int, seconds: float) -> DiskRates:
    """Writes a file of about `size` bytes, reads it for about `seconds`, and removes it."""
    blocks = max(1, size // BLOCK)
    handle, name = tempfile.mkstemp(prefix=".rocket-disk-", dir=folder)
    path = Path(name)
    try:
        os.close(handle)
        direct = can_bypass_cache(path)
        written = _write(path, blocks, direct)
        passes: list[float] = []
        while not passes or sum(passes) < seconds:
            passes.append(_read(path, blocks, direct))
    finally:
        path.unlink(missing_ok=True)
    whole = blocks * BLOCK / 1e9
    return DiskRates(whole / statistics.median(passes), whole / written, direct)
