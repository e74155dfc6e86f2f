"""rocket bench host: what this machine's memory, link and disk can do, as a booster profile."""

import datetime
import json
import shutil
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Annotated, Any

from rocket import _core
from rocket.booster import GIB, OS_RESERVE_GIB, Booster, parse
from rocket.console import Notes, write_data
from rocket.disk_rate import DiskRates, disk_rates
from rocket.errors import CliError, UsageError, reason_of
from rocket.options import check_integer, check_output_name, check_real, flag, integer, number, string
from rocket.output import AtomicFile

DEVICE_RESERVE_GIB = 2.0  # for the driver's context and what the runtime asks for


@dataclass(frozen=True)
class Measured:
    """What was measured. Without an accelerator its place is taken by the CPU and its memory."""

    cpu: str
    threads: int
    memory_bytes: int
    memory_source: str
    read_gb_s: float
    copy_gb_s: float
    device: dict[str, Any] | None  # DeviceRates
    why_no_device: str
    disk: DiskRates
    disk_folder: Path
    disk_mib: int


def measure(folder: Path, mib: int, threads: int, seconds: float) -> Measured:
    memory, source = _core.memory_available()  # before buffers are taken
    device, why = _core.device_rates(seconds)
    return Measured(
        cpu=_core.cpu_name(),
        threads=threads or _core.cpus(),
        memory_bytes=memory,
        memory_source=source,
        read_gb_s=_core.read_rate_gb_s(threads=threads, seconds=seconds),
        copy_gb_s=_core.copy_rate_gb_s(threads=threads, seconds=seconds),
        device=device,
        why_no_device=why,
        disk=_disk(folder, mib, seconds),
        disk_folder=folder,
        disk_mib=mib,
    )


# --- the profile ------------------------------------------------------------------------------------------


def _os_reserve_gib(memory_gib: float) -> float:
    return min(OS_RESERVE_GIB, ceil(memory_gib * 25) / 100)


def _down(value: float) -> float:
    """To two decimals, never more than there is."""
    return int(value * 100) / 100


def _rate(value: float) -> float:
    """To four digits: no rate is steadier than that."""
    return float(f"{value:.4g}")


def _quantity(value: float, source: str, note: str) -> str:
    return f"{{value: {value:g}, source: {source}, note: {json.dumps(note, ensure_ascii=False)}}}"


def profile_fields(m: Measured, name: str) -> dict[str, str]:
    """Field -> YAML."""
    memory = _down(m.memory_bytes / GIB)
    unified = m.device is None or m.device["unified"]
    for_system = _quantity(_os_reserve_gib(memory), "derived", "for the operating system")
    available = _quantity(memory, "measured", f"{m.memory_source}, when this was measured")
    fields = {
        "id": name,
        "name": json.dumps(m.device["name"] if m.device else f"{m.cpu}, {m.threads} threads"),
        "unified_memory": "true" if unified else "false",
    }
    cpu = {
        "memory_gib": available,
        "reserve_gib": for_system,
        "read_gb_s": _quantity(_rate(m.read_gb_s), "measured", f"{m.threads} threads"),
        "copy_gb_s": _quantity(_rate(m.copy_gb_s), "measured", "bytes read and written"),
    }
    if m.device is None:
        return {**fields, **cpu, **_disk_fields(m)}
    rates = {
        "read_gb_s": _quantity(_rate(m.device["read_gb_s"]), "measured", "a kernel"),
        "copy_gb_s": _quantity(_rate(m.device["copy_gb_s"]), "measured", "bytes read and written"),
    }
    if unified:
        return {**fields, **cpu, **rates, **_disk_fields(m)}
    free = _down(m.device["free_bytes"] / GIB)
    reserve = min(DEVICE_RESERVE_GIB, _down(free / 8))
    return {
        **fields,
        "memory_gib": _quantity(free, "measured", "free on the device, when this was measured"),
        "reserve_gib": _quantity(reserve, "derived", "for the driver's context and the runtime"),
        **rates,
        "host_memory_gib": available,
        "host_reserve_gib": for_system,
        "link_gb_s": _quantity(_rate(m.device["pinned_to_gb_s"]), "measured", "pinned host memory"),
        "link_pageable_gb_s": _quantity(
            _rate(m.device["pageable_to_gb_s"]), "measured", "pageable host memory"
        ),
        **_disk_fields(m),
    }


def _disk_fields(m: Measured) -> dict[str, str]:
    how = "past the page cache" if m.disk.direct else "through the page cache, which may flatter it"
    return {
        "disk_read_gb_s": _quantity(_rate(m.disk.read_gb_s), "measured", how),
        "disk_write_gb_s": _quantity(_rate(m.disk.write_gb_s), "measured", how),
    }


def profile_text(m: Measured, name: str, day: str) -> str:
    lines = [f"# Measured by rocket bench host on {day}."]
    if m.device is None:
        lines.append(f"# Host to device: not measured: {m.why_no_device}.")
    lines += [f"{field}: {value}" for field, value in profile_fields(m, name).items()]
    return "\n".join(lines) + "\n"


# --- the report -------------------------------------------------------------------------------------------


def _device_lines(m: Measured) -> list[str]:
    if m.device is None:
        return [f"host to device   not measured: {m.why_no_device}"]
    d = m.device
    kind = "memory shared with the CPU" if d["unified"] else f"{d['free_bytes'] / GIB:.2f} GiB free"
    return [
        f"device           {d['name']}, {kind} of {d['total_bytes'] / GIB:.2f} GiB",
        f"device read      {d['read_gb_s']:.1f} GB/s",
        f"device copy      {d['copy_gb_s']:.1f} GB/s, bytes read and written",
        f"host to device   {d['pinned_to_gb_s']:.1f} GB/s pinned, {d['pageable_to_gb_s']:.1f} GB/s pageable",
        f"device to host   {d['pinned_from_gb_s']:.1f} GB/s pinned",
    ]


def report_lines(m: Measured, out: str) -> list[str]:
    how = "past the page cache" if m.disk.direct else "through the page cache: an upper limit"
    return [
        f"CPU              {m.cpu}, {m.threads} threads",
        f"memory           {m.memory_bytes / GIB:.2f} GiB available ({m.memory_source})",
        f"read             {m.read_gb_s:.1f} GB/s",
        f"copy             {m.copy_gb_s:.1f} GB/s, bytes read and written",
        *_device_lines(m),
        f"disk read        {m.disk.read_gb_s:.2f} GB/s, {how}, {m.disk_mib} MiB in {m.disk_folder}",
        f"disk write       {m.disk.write_gb_s:.2f} GB/s",
        f"profile          {out}",
    ]


def report_json(m: Measured, out: str, profile: Booster) -> dict[str, Any]:
    return {
        "cpu": m.cpu,
        "threads": m.threads,
        "memory_available_bytes": m.memory_bytes,
        "memory_source": m.memory_source,
        "read_gb_s": m.read_gb_s,
        "copy_gb_s": m.copy_gb_s,
        "device": m.device,
        "why_no_device": m.why_no_device or None,
        "disk": {**vars(m.disk), "folder": str(m.disk_folder), "mib": m.disk_mib},
        "profile_file": out,
        "profile": profile.model_dump(),
    }


def _cannot_use(folder: Path, error: OSError) -> CliError:
    reason = reason_of(error)
    return CliError(
        f"--disk: cannot use {folder}: {reason}", "give a folder that exists, is yours and has room"
    )


def _disk(folder: Path, mib: int, seconds: float) -> DiskRates:
    try:
        return disk_rates(folder, mib << 20, seconds)
    except OSError as error:
        raise _cannot_use(folder, error) from error


def _check_disk(folder: Path, mib: int) -> None:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _cannot_use(folder, error) from error
    if free < mib << 20:
        raise CliError(
            f"--disk: {folder}: expected {mib} MiB free for a file to read, found {free >> 20} MiB",
            "give --disk-mib a smaller number, or --disk another folder",
        )


def host(
    out: Annotated[str, string("FILE", "Where to write the booster profile.")] = "host.yaml",
    disk: Annotated[str, string("DIR", "A folder on the disk that holds fuels.")] = ".",
    disk_mib: Annotated[int, integer("Size of the file that is written and read there.")] = 512,
    threads: Annotated[int, integer("CPU threads; 0 is all that may be used.")] = 0,
    seconds: Annotated[float, number("Time for each measurement.")] = 0.5,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
    quiet: Annotated[bool, flag("--quiet", "Nothing on standard error but errors.")] = False,
) -> int:
    """Measure memory, the link to an accelerator, and the disk; write a booster profile for rocket plan.

    Nothing is taken from a data sheet: where there is no CUDA device, or no build for one, the profile is of
    the CPU and its memory, and says so.
    """
    check_integer("--disk-mib", disk_mib, 4, 1 << 20)
    check_integer("--threads", threads, 0)
    check_output_name("--out", out)
    check_real("--seconds", seconds, 0.01, 60)
    folder = Path(disk)
    _check_disk(folder, disk_mib)
    notes = Notes(quiet)
    with AtomicFile(out, "--out") as file:
        try:
            measured = measure(folder, disk_mib, threads, seconds)
        except _core.InputError as error:  # the engine knows how many threads this machine takes
            raise UsageError(f"--{error}", getattr(error, "hint", "") or "see --help") from error
        name = "host"
        text = profile_text(measured, name, datetime.date.today().isoformat())
        profile = parse(text.encode(), out)
        file.write(text.encode())
    if measured.device is None:
        notes.say(f"host to device: not measured: {measured.why_no_device}")
    text = (
        json.dumps(report_json(measured, out, profile), ensure_ascii=False, allow_nan=False)
        if as_json
        else "\n".join(report_lines(measured, out))
    )
    write_data(text + "\n")
    return 0
