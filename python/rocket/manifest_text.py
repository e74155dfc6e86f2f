"""The text of a manifest, changed in single values with all else left as it is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocket.errors import UsageError

Value = int | float | str | bool


@dataclass(frozen=True)
class Change:
    """A new value for a field. With a source, the field is a number with its provenance."""

    value: Value
    source: str | None = None


def _written(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _fields(node: Any) -> dict[str, tuple[Any, Any]]:
    return {key.value: (key, value) for key, value in node.value}


def changed(text: str, changes: Mapping[str, Change], where: str) -> str:
    """The text with other values at dotted places; every other character is kept. Throws UsageError."""
    from ruamel.yaml import YAML
    from ruamel.yaml.nodes import MappingNode

    if "\N{LINE SEPARATOR}" in text or "\N{NEXT LINE}" in text:
        raise UsageError(f"{where}: expected plain line ends for --fix, found others", "correct it by hand")
    _refuse_anchors(text, where)
    root = YAML(typ="safe", pure=True).compose(text)
    splices: list[tuple[int, int, str]] = []
    for place, change in changes.items():
        node = root
        for part in place.split("."):
            node = _fields(node)[part][1]
        if change.source is not None and isinstance(node, MappingNode):
            splices += _number_splices(text, node, change)
            continue
        new = _written(change.value)
        if change.source is not None:
            new = f"{{value: {new}, source: {change.source}}}"
        splices.append(_splice(node, new, f"{where}: {place}"))
    for start, end, new in sorted(splices, reverse=True):
        text = text[:start] + new + text[end:]
    return text


def _refuse_anchors(text: str, where: str) -> None:
    from ruamel.yaml import YAML

    for event in YAML(typ="safe", pure=True).parse(text):
        name = getattr(event, "anchor", None)
        if name is not None:
            raise UsageError(
                f"{where}: line {event.start_mark.line + 1}: --fix takes no anchors or aliases, found {name}",
                "write the values out, or correct the file by hand",
            )


def _splice(node: Any, new: str, place: str) -> tuple[int, int, str]:
    if getattr(node, "style", None) in ("|", ">"):
        raise UsageError(f"{place}: expected a value on one line, found a block", "correct it by hand")
    return node.start_mark.index, node.end_mark.index, new


def _number_splices(text: str, node: Any, change: Change) -> list[tuple[int, int, str]]:
    """For a number with its provenance. A missing source comes right behind the value."""
    fields = _fields(node)
    key, value = fields["value"]
    start, end = value.start_mark.index, value.end_mark.index
    if "source" in fields:
        source = fields["source"][1]
        place = (source.start_mark.index, source.end_mark.index, str(change.source))
        return [(start, end, _written(change.value)), place]
    if node.flow_style:
        return [(start, end, f"{_written(change.value)}, source: {change.source}")]
    line_end = re.compile(r"\r\n|\n|\r").search(text, end)
    indent = " " * key.start_mark.column
    newline = line_end.group() if line_end else "\n"
    at = line_end.start() if line_end else len(text)
    added = (at, at, f"{newline}{indent}source: {change.source}")
    return [(start, end, _written(change.value)), added]
