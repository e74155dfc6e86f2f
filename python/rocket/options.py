"""Checks of option values. Each names the option, what it takes and what was found."""

import math
import re

from rocket.errors import UsageError

MAX_COUNT = 2**31 - 1
MAX_SEED = 2**64 - 1


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
            f"{option}: expected a number in {left}{low:g}, {high:g}{right}, found {value:g}",
            "see --help for the default",
        )
    return value


def parse_ids(option: str, text: str) -> list[int]:
    """Token ids separated by commas or white space."""
    ids = []
    for number, item in enumerate(re.split(r"\s*,\s*|\s+", text.strip())):
        if not re.fullmatch(r"[+-]?[0-9]{1,19}", item, re.ASCII):
            raise UsageError(
                f"{option}: expected token ids such as 1,5,9, found {item!r} at place {number + 1}",
                "separate whole numbers with commas",
            )
        if int(item) < 0:
            raise UsageError(
                f"{option}: expected token ids of 0 or more, found {int(item)} at place {number + 1}",
                "separate whole numbers with commas",
            )
        ids.append(int(item))
    return ids


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UsageError(
            f"{option}: expected one of {', '.join(choices)}, found {value!r}",
            f"for instance {option} {choices[0]}",
        )
    return value
