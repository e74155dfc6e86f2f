"""Loading a fuel for a command."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rocket import _core
from rocket.console import Notes
from rocket.engine import Engine
from rocket.errors import CliError, UsageError

# What the engine calls a number, and the option that it comes from.
_OPTIONS = {
    "threads": "--threads",
    "backend": "--backend",
    "prefill-precision": "--prefill-precision",
    "kv-dtype": "--kv-dtype",
    "expert bank": "--expert-bank",
    "expert slab": "--expert-slab",
}


def _option(name: str, numbers: Mapping[str, Any]) -> str:
    """Empty: it is no option's."""
    if name in ("expert cache", "slot map"):
        if numbers.get("slot_map") is not None:
            return f"--slot-map {numbers['slot_map']}"
        return "--expert-slots" if numbers.get("expert_slots") else "--expert-cache-gib"
    return _OPTIONS.get(name, "")


@contextmanager
def named_options(numbers: Mapping[str, Any]) -> Iterator[None]:
    """A number that the engine refuses, on this machine or for this fuel, is a wrong command line: says so
    of the option. ``numbers`` are the Engine's arguments."""
    try:
        yield
    except (_core.InputError, _core.PlanError) as error:
        name, _, rest = str(error).partition(": ")
        option = _option(name, numbers)
        if isinstance(error, _core.PlanError) and not (option and rest.startswith(("expected", "layer"))):
            raise
        message = f"{option}: {rest}" if option else str(error)
        raise UsageError(message, getattr(error, "hint", "") or "see --help") from error
    except (_core.FuelError, _core.DeviceError) as error:
        slab = numbers.get("expert_slab")
        if slab and str(error).startswith(str(slab)):
            raise CliError(f"--expert-slab: {error}", error.hint) from error
        if str(error).startswith("backend "):
            raise CliError(f"--{error}", error.hint) from error
        raise


@contextmanager
def own_options(names: Mapping[str, str]) -> Iterator[None]:
    """The engine's hints name options of rocket-decode: names a command's own instead."""
    try:
        yield
    except (_core.Error, CliError) as error:
        for theirs, own in names.items():
            error.hint = error.hint.replace(theirs, own)
        raise


def load_engine(folder: Path, notes: Notes, **numbers: Any) -> Engine:
    """Loads with progress shown."""
    with named_options(numbers), notes.progress("loading") as progress:
        return Engine(folder, progress=progress, **numbers)
