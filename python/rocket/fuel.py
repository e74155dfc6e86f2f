"""Finding fuels by name, and the small files beside the weights."""

import contextlib
import difflib
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocket.failures import fuel_error, input_error
from rocket.inputs import read_regular
from rocket.tokenizer import LFS_MARK

CONFIG, MANIFEST = "config.json", "fuel.yaml"
DEFAULT_FUEL = "sparkler"  # ships with the package


def has(folder: Path, name: str) -> bool:
    """Whether there is anything of that name. What is there but cannot be read is an error, not absent."""
    return os.path.lexists(folder / name)


def search_path() -> list[Path]:
    """Folders that hold fuels, one folder each: $ROCKET_FUELS, the package's own, the source tree's."""
    given = [Path(part) for part in os.environ.get("ROCKET_FUELS", "").split(os.pathsep) if part]
    package = Path(__file__).parent
    source = Path(__file__).resolve().parents[2]
    return [*given, package / "fuels", source / "fuels"]


def folders_with(file: str) -> dict[str, Path]:
    """Name -> folder of everything on the search path that has such a file; the first of a name counts."""
    found: dict[str, Path] = {}
    for place in search_path():
        with contextlib.suppress(OSError):
            for folder in sorted(place.iterdir()):
                if has(folder, file):
                    found.setdefault(folder.name, folder)
    return found


def known_fuels() -> dict[str, Path]:
    """Name -> folder of every fuel with weights on the search path."""
    return folders_with(CONFIG)


def resolve(name: str) -> Path:
    """The folder of a fuel given as a directory or by name. Throws FuelError with the candidates."""
    if not name or "\0" in name:
        raise fuel_error(f"fuel {name!r}: expected a name or a directory", _known_hint(known_fuels()))
    path = Path(name)
    if path.is_dir():
        return path
    if path.exists():
        hint = f"did you mean its folder, {path.parent}?"
        raise fuel_error(f"fuel {name}: expected a directory, found a file", hint)
    fuels = known_fuels()
    if name in fuels:
        return fuels[name]
    for place in search_path():
        if has(place / name, MANIFEST):
            raise fuel_error(
                f"fuel {name}: {place / name} has its manifest, but not its weights (no config.json)",
                "download the weights, and give their directory",
            )
    close = difflib.get_close_matches(name, fuels, n=3) or _close_directories(path)
    hint = f"did you mean {' or '.join(close)}?" if close else _known_hint(fuels)
    raise fuel_error(f"fuel {name}: no such directory, and no fuel of that name", hint)


def _close_directories(path: Path) -> list[str]:
    with contextlib.suppress(OSError):
        names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
        return [str(path.parent / close) for close in difflib.get_close_matches(path.name, names, n=3)]
    return []


def _known_hint(fuels: dict[str, Path]) -> str:
    known = f"fuels with weights: {', '.join(fuels)}" if fuels else "no named fuel has weights here"
    if bare := sorted(set(folders_with(MANIFEST)) - set(fuels)):
        known += f" ({', '.join(bare)}: manifest only)"
    return f"{known}; or give the directory that holds config.json, or set ROCKET_FUELS to folders of fuels"


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file beside the weights; {} if there is no such file."""
    try:
        data = read_regular(file)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise fuel_error(f"{file}: {error.strerror}", "check the file and its permissions") from error
    if data.startswith(LFS_MARK):
        raise fuel_error(
            f"{file}: a Git LFS pointer of {len(data)} bytes, not the file itself",
            "run git lfs pull in the fuel's folder",
        )
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise fuel_error(f"{file}: broken JSON: {error}", "download the file again") from error
    if not isinstance(value, dict):
        raise fuel_error(
            f"{file}: expected a JSON object, found {type(value).__name__}", "download the file again"
        )
    return value


def eos_ids(folder: Path) -> list[int]:
    """Ids that end a text: generation_config.json's, else config.json's (top level, then text_config)."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    for file, source in (
        ("generation_config.json", read_json(folder / "generation_config.json")),
        ("config.json", config),
        ("config.json", text if isinstance(text, dict) else {}),
    ):
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise fuel_error(
                f"{folder / file}: eos_token_id: expected an integer or a list of integers, found {value!r}",
                "correct the file",
            )
        size = _vocabulary(config)
        outside = [i for i in ids if not 0 <= i < size]
        if outside:
            wanted = f"token ids from 0 to {size - 1}" if size < math.inf else "token ids of 0 or more"
            raise fuel_error(
                f"{folder / file}: eos_token_id: expected {wanted}, found {outside[0]}", "correct the file"
            )
        return ids
    return []


def _vocabulary(config: dict[str, Any]) -> float:
    """The vocabulary's size, without bound where config.json does not say it."""
    text = config.get("text_config")
    for source in (text if isinstance(text, dict) else {}, config):
        if _is_count(source.get("vocab_size")):
            return source["vocab_size"]
    return math.inf


@dataclass(frozen=True)
class FuelSampling:
    """What generation_config.json asks for."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


def sampling_of(folder: Path) -> FuelSampling:
    file = folder / "generation_config.json"
    if not has(folder, file.name):
        raise fuel_error(
            f"--sampling fuel: {file} not found", "give --temperature and the like, or leave out --sampling"
        )
    values = read_json(file)

    def checked(key: str, default: Any, expected: str, right: Callable[[Any], bool]) -> Any:
        value = values.get(key)
        if value is None:
            return default
        if not right(value):
            option = "temperature" if key == "do_sample" else key.replace("_", "-")
            raise fuel_error(
                f"{file}: {key}: expected {expected}, found {_shown(value)}",
                f"correct the file, or leave out --sampling and give --{option} and the like",
            )
        return value

    samples = checked("do_sample", False, "true or false", lambda v: isinstance(v, bool))
    temperature = checked(
        "temperature", 1.0, "a number in [0, 100]", lambda v: _is_number(v) and 0 <= v <= 100
    )
    return FuelSampling(
        temperature=float(temperature) if samples else 0.0,
        top_k=checked("top_k", 0, "an integer from 0 to 2147483647", _is_count),
        top_p=float(checked("top_p", 1.0, "a number in (0, 1]", lambda v: _is_number(v) and 0 < v <= 1)),
        min_p=float(checked("min_p", 0.0, "a number in [0, 1)", lambda v: _is_number(v) and 0 <= v < 1)),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)  # nan fails every comparison


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"


def cache_dir() -> Path:
    """Rocket's folder in the user's cache. A relative XDG_CACHE_HOME does not count, by its specification."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return base / "rocket"


def random_fuel(preset: str = "tiny", progress: Callable[[int, int], None] | None = None) -> Path:
    """The folder of a random fuel, made in the user's cache on first use.

    It is made in a scratch folder and renamed, so that it is whole or absent. Of two processes that make it
    at once the second to finish throws its copy away; the contents are the same.
    """
    from rocket import __version__
    from rocket.random_fuel import counted_bytes, make_fuel
    from rocket.random_fuel_shape import PRESETS

    if preset not in PRESETS:
        raise input_error(f"preset {preset}: not known", f"known presets: {', '.join(PRESETS)}")
    options = PRESETS[preset]
    place = cache_dir() / "fuels"
    digest = hashlib.sha256(f"{__version__} {options}".encode()).hexdigest()[:8]
    final = place / f"random-{preset}-{digest}"
    if final.is_dir():
        return final
    try:
        place.mkdir(parents=True, exist_ok=True)
        _check_space(place, counted_bytes(options)["disk"])
        scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=place))
    except OSError as error:
        raise fuel_error(
            f"cannot make a random fuel in {place}: {error.strerror}",
            "set XDG_CACHE_HOME to a folder that you may write, or give --fuel",
        ) from error
    try:
        made = make_fuel(scratch / "fuel", options, progress=progress)
        try:
            made.rename(final)
        except OSError as error:
            if not final.is_dir():
                raise fuel_error(f"{final}: {error.strerror}", "remove it, or give --fuel") from error
    except OSError as error:
        raise fuel_error(
            f"cannot make a random fuel in {place}: {error.strerror or error}",
            "make room, set XDG_CACHE_HOME to another folder, or give --fuel",
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return final


def _check_space(place: Path, needed: int) -> None:
    free = shutil.disk_usage(place).free
    if free < needed:
        raise fuel_error(
            f"{place}: the fuel takes {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free",
            "make room, or set XDG_CACHE_HOME to a larger disk",
        )
