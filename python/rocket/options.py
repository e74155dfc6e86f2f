"""Options and checks of their values. A complaint names the option, what it takes and what was found."""

import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from rocket.errors import UsageError

MAX_COUNT = 2**31 - 1
MAX_SEED = 2**64 - 1
MAX_CHUNK = 65536  # of --prefill-chunk


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


def _integer(value: str | int) -> int:
    text = str(value)  # typer parses a default, too
    if not re.fullmatch(r"[+-]?[0-9]{1,40}", text, re.ASCII):
        raise typer.BadParameter(f"expected an integer, found {_shorten(text)}")
    return int(text)


def _number(value: str | float) -> float:
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter(f"expected a number, found {_shorten(str(value))}") from None


def string(metavar: str, help: str) -> Any:
    """An option that takes text."""
    return typer.Option(metavar=metavar, help=help)


def integer(help: str, metavar: str = "N") -> Any:
    return typer.Option(metavar=metavar, help=help, parser=_integer)


def number(help: str, metavar: str = "X") -> Any:
    return typer.Option(metavar=metavar, help=help, parser=_number)


def flag(name: str, help: str) -> Any:
    return typer.Option(name, help=help)


def check_integer(option: str, value: int, low: int, high: int = MAX_COUNT) -> int:
    if not low <= value <= high:
        raise UsageError(
            f"{option}: expected an integer from {low} to {high}, found {value}", "see --help for the default"
        )
    return value


def check_real(
    option: str,
    value: float,
    low: float,
    high: float,
    *,
    with_low: bool = True,
    with_high: bool = True,
) -> float:
    # Written so that nan fails every comparison.
    above = value >= low if with_low else value > low
    below = value <= high if with_high else value < high
    if not (above and below and math.isfinite(value)):
        left, right = "[("[not with_low], "])"[not with_high]
        raise UsageError(
            f"{option}: expected a number in {left}{low:g}, {high:.10g}{right}, found {value:g}",
            "see --help for the default",
        )
    return value


def check_output_name(option: str, path: str) -> None:
    """Throws UsageError for names that are no file of their own."""
    if not path:
        raise UsageError(f"{option}: expected a file, found an empty name", "give the name of a file")
    if path.endswith("/"):
        raise UsageError(f"{option}: expected a file, found the folder {path}", "give the name of a file")
    stdout = path in ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
    if stdout or (_is_regular(1) and _same_file(path, 1)):
        raise UsageError(
            f"{option}: expected a file, found {path}, which is standard output; that has its own use",
            "give the name of a file",
        )


def check_output_place(
    option: str, path: str, fuel: Path | None, inputs: Mapping[str, str | int | None]
) -> None:
    """Throws UsageError if writing there would damage the fuel or an input (a file, or a descriptor)."""
    for name, given in inputs.items():
        if given is not None and _same_file(path, given) and _is_regular(given):
            message = f"{option}: {path} is the file of {name}, and would be lost"
            raise UsageError(message, "give another file")
    if fuel is None:
        return
    place, folder = _real(path), _real(fuel)
    # A fuel's files may be links into a store elsewhere.
    if place.is_relative_to(folder) or any(_same_file(path, file) for file in _files(folder)):
        raise UsageError(
            f"{option}: {path} lies in the fuel {fuel}, which would be damaged", "give a file elsewhere"
        )


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _files(folder: Path) -> list[Path]:
    try:
        return [file for file in folder.iterdir() if file.is_file()]
    except OSError:
        return []


def _same_file(one: str, other: str | int | Path) -> bool:
    try:
        return os.path.samestat(os.stat(one), os.stat(other))  # noqa: PTH116  (one may be a descriptor)
    except (OSError, ValueError):
        return False


def _is_regular(given: str | int) -> bool:
    try:
        return stat.S_ISREG(os.stat(given).st_mode)  # noqa: PTH116  (it may be a descriptor)
    except (OSError, ValueError):
        return False


def parse_ids(option: str, text: str, below: int = 2**31) -> list[int]:
    """Token ids separated by commas or white space."""
    ids = []
    for number, item in enumerate(re.split(r"\s*,\s*|\s+", text.strip())):
        value = int(item) if re.fullmatch(r"[+-]?[0-9]{1,19}", item, re.ASCII) else None
        if value is None or not 0 <= value < below:
            raise UsageError(
                f"{option}: expected token ids such as 1,5,9, found {_shorten(item)} at place {number + 1}",
                f"separate whole numbers from 0 to {below - 1} with commas",
            )
        ids.append(value)
    return ids


PRECISIONS = "auto|f32|bf16"
PREFILL_HELP = "Arithmetic of prompts; auto is bf16 on CUDA, and the CPU has f32 only."
KV_HELP = "How latent KV is kept; auto is bf16 on CUDA, and the CPU has f32 only."


def check_computing(backend: str, prefill_precision: str, kv_dtype: str) -> None:
    """The options that say what computes, and how exactly."""
    check_choice("--backend", backend, ("auto", "cpu", "cuda"))
    check_choice("--prefill-precision", prefill_precision, ("auto", "f32", "bf16"))
    check_choice("--kv-dtype", kv_dtype, ("auto", "f32", "bf16"))


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UsageError(
            f"{option}: expected one of {', '.join(choices)}, found {_shorten(value)}",
            f"for instance {option} {choices[0]}",
        )
    return value
