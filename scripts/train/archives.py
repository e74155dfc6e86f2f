"""The files inside wheels, source archives and Debian packages, read without unpacking them to a disk.

What a package holds then does not depend on a file system: not on its order, its letter case, or where its
links lead.
"""

import io
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

Wanted = Callable[[str], bool]


def _from_tar(handle: tarfile.TarFile, wanted: Wanted) -> dict[str, bytes]:
    found = {}
    for member in handle:
        name = member.name.removeprefix("./")
        if member.isreg() and wanted(name) and (stream := handle.extractfile(member)):
            found[name] = stream.read()
    return found


def _debian_data(package: bytes) -> bytes:
    """The archive of files inside a .deb, which is an `ar` archive: a 60-byte header before each member."""
    at = 8
    while at + 60 <= len(package):
        name, size = package[at : at + 16].decode("ascii"), int(package[at + 48 : at + 58])
        if name.startswith("data.tar"):
            return package[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise ValueError("no data.tar in it")


def read_archive(path: Path, wanted: Wanted) -> dict[str, bytes]:
    """The wanted regular files by name, in the order of their names."""
    if path.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(path) as handle:
            names = [n for n in handle.namelist() if not n.endswith("/") and wanted(n)]
            found = {name: handle.read(name) for name in names}
    else:
        raw = path.read_bytes()
        if path.suffix == ".deb":
            raw = _debian_data(raw)
        with tarfile.open(fileobj=io.BytesIO(raw)) as handle:
            found = _from_tar(handle, wanted)
    return dict(sorted(found.items()))


def matches(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern of `*` (inside one folder) and `**/` (any folders, or none)."""
    parts = re.split(r"(\*\*/|\*)", pattern)
    known = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return re.fullmatch("".join(known.get(p) or re.escape(p) for p in parts), name) is not None
