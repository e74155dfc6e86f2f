"""The engine's typed errors, raised from Python. The C++ module is loaded only when one is needed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rocket._core import FuelError, InputError, PlanError


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
