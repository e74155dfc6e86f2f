"""What is written down of a function, and parameters that many of them share."""

from typing import NamedTuple


class Function(NamedTuple):
    names: list[str]
    parameters: list[tuple[list[str], str]]
    returns: str
    descriptions: list[str]
    bodies: list[str]
    examples: list[str]


NUM = (["n", "number", "value", "n"], "int")
LST = (["items", "values", "numbers", "data"], "list[int]")
TXT = (["text", "string", "word", "s"], "str")
F = Function  # in tables
