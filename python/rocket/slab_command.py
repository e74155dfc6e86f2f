"""rocket fuel slab: all experts of a fuel in one file, as a cache of experts reads them best."""

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from rocket.console import Notes
from rocket.errors import CliError, UsageError, naming
from rocket.fuel import resolve
from rocket.options import check_output_place, flag
from rocket.report import counted, format_bytes

PART = ".part"  # what the file is called until it is whole


def room(path: Path) -> int:
    """Bytes that may still be written into a folder that may not exist yet; a half-written slab makes way."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    disk = os.statvfs(folder)
    left = 0
    with contextlib.suppress(OSError):
        left = path.with_name(path.name + PART).stat().st_blocks * 512
    return disk.f_bavail * disk.f_frsize + left


def check_room(path: Path, needs: int) -> None:
    has = room(path)
    if has < needs:
        raise CliError(
            f"{path}: the slab needs {format_bytes(needs)} ({needs} bytes), and the disk has "
            f"{format_bytes(has)} ({has} bytes)",
            f"make room for {format_bytes(needs - has)} more, or give a folder on another disk",
        )


def slab(
    fuel: Annotated[str, typer.Argument(metavar="NAME|DIR", help="The fuel: a name or a folder.")],
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The slab's folder; made if it is not there.")],
    verify: Annotated[
        bool, flag("--verify", "Hold every byte of a slab that is there against the fuel.")
    ] = False,
    quiet: Annotated[bool, flag("--quiet", "Nothing on standard error but errors.")] = False,
) -> int:
    """Write all routed experts into one file, from which --expert-slab fills a cache of experts.

    In DIR/experts.slab each expert is one piece, aligned for reads past the page cache, with a checksum. A
    slab of this fuel that is already there stays as it is. Whether it is of this fuel is told by names and
    shapes, global scales and some pieces of each expert; --verify compares all bytes.
    """
    if not folder:
        raise UsageError("DIR: expected a folder, found nothing", "give the folder that the slab shall be in")
    with naming(f"DIR: cannot use {folder}", "give a folder"):
        if Path(folder).exists() and not Path(folder).is_dir():
            raise UsageError(f"DIR: expected a folder, found the file {folder}", "give a folder")
    from rocket import _core

    weights = resolve(fuel)
    check_output_place("DIR", str(Path(folder) / "experts.slab"), weights, {})
    notes = Notes(quiet)
    found = _core.FuelSlab(str(weights), folder)
    about = f"{found.path}: {counted(found.experts, 'expert')} of {counted(found.layers, 'MoE layer')}"
    size = format_bytes(found.file_bytes)
    if found.written():
        if verify:
            with notes.progress("verifying") as progress:
                found.verify(progress)
            notes.say(f"{about}, {size}, agree with the fuel, byte for byte")
        else:
            notes.say(f"{about}, {size}, are there already; --verify holds them against the fuel")
        return 0
    if verify:
        raise CliError(f"{found.path}: no slab is there to verify", "leave --verify out to write one")
    check_room(Path(found.path), found.file_bytes)
    with notes.progress("writing") as progress:
        found.write(progress)
    notes.say(f"{about}, {size}, written")
    return 0
