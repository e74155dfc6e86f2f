"""The engine's typed errors, raised from Python. The C++ module is loaded only when one is needed."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocket._core import DeviceError, FuelError, InputError, PlanError


def fuel_error(message: str, hint: str) -> "FuelError":
    from rocket._core import FuelError

    error = FuelError(message)
    error.hint = hint
    return error


def input_error(message: str, hint: str) -> "InputError":
    from rocket._core import InputError

    error = InputError(message)
    error.hint = hint
    return error


def plan_error(message: str, hint: str) -> "PlanError":
    from rocket._core import PlanError

    error = PlanError(message)
    error.hint = hint
    return error


def device_error(message: str, hint: str) -> "DeviceError":
    from rocket._core import DeviceError

    error = DeviceError(message)
    error.hint = hint
    return error


def refuse_hollow(folder: Path) -> None:
    """Throws FuelError if a fuel has names and shapes but no data: what is amiss before anything else."""
    from rocket import _core

    try:
        hollow = any(file["sparse"] for file in _core.read_headers(str(folder)))
    except _core.FuelError:  # no weights at all, or broken ones: the caller knows better what to say
        return
    if hollow:
        raise fuel_error(
            f"{folder}: this fuel is hollow: its files have names and shapes but no data",
            "it serves for accounting and planning; decode from the real checkpoint",
        )
