"""The text of a manifest: read within bounds, and changed in single values with all else left as it is.

A manifest may come from anywhere. Its YAML is walked once as events, before anything is built from it, so
that what would take long, overflow or never end is refused in one line.
"""

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocket.checked import parse_yaml
from rocket.errors import UsageError, naming
from rocket.inputs import READ_HINT, open_file

MAX_BYTES = 1 << 20
MAX_DEPTH = 16
MAX_NODES = 20_000
MAX_DIGITS = 40
_NUMBER = re.compile(r"[-+]?[.0-9][-+0-9A-Fa-fxo_.:]*")
_HINT = "correct the file"

Value = int | float | str | bool


def read_bytes(path: Path, option: str) -> bytes:
    """A regular file of at most MAX_BYTES. Throws CliError."""
    if path.exists() and not path.is_dir() and not path.is_file():
        raise UsageError(f"{path}: expected a regular file, found a device or a pipe", "give a file")
    with open_file(str(path), option) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UsageError(f"{path}: expected a regular file, found a device or a pipe", "give a file")
        with naming(f"{option}: cannot read {path}", READ_HINT):
            data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(f"{path}: expected a manifest of at most {MAX_BYTES >> 20} MiB, found more", _HINT)
    return data


def load(data: bytes, where: str) -> Any:
    """The value of a manifest's YAML. Throws UsageError."""
    if len(data) > MAX_BYTES:
        raise UsageError(f"{where}: expected a manifest of at most {MAX_BYTES >> 20} MiB, found more", _HINT)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: expected UTF-8 text, found byte 0x{data[error.start]:02x} at {error.start}",
            "convert it to UTF-8",
        ) from None
    if "\0" in text:
        raise UsageError(
            f"{where}: expected UTF-8 text, found a zero byte at {data.index(0)}", "convert it to UTF-8"
        )
    _walk(text, where)
    try:
        return parse_yaml(data, where)
    except (OverflowError, RecursionError, TypeError) as error:
        raise UsageError(f"{where}: broken YAML: {error}", _HINT) from None


class _Bounds:
    """What was seen of a document. Aliases are refused where it is parsed, so nothing counts twice."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.depth = 0
        self.nodes = 0

    def refuse(self, event: Any, problem: str) -> UsageError:
        return UsageError(f"{self.where}: line {event.start_mark.line + 1}: {problem}", _HINT)

    def count(self, event: Any) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise self.refuse(event, f"expected at most {MAX_NODES} values, found more")

    def start(self, event: Any) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.refuse(event, f"expected at most {MAX_DEPTH} levels, found more")
        self.count(event)

    def scalar(self, event: Any) -> None:
        self.count(event)
        if not event.style and len(event.value) > MAX_DIGITS and _NUMBER.fullmatch(event.value):
            size = len(event.value)
            raise self.refuse(event, f"expected a number of at most {MAX_DIGITS} digits, found {size}")


def _walk(text: str, where: str) -> None:
    from ruamel.yaml import YAML, events
    from ruamel.yaml.error import YAMLError

    bounds = _Bounds(where)
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            if getattr(event, "tag", None) is not None:
                raise bounds.refuse(event, f"expected a plain value, found one with a tag ({event.tag})")
            if isinstance(event, events.AliasEvent):
                return  # parse_yaml refuses it
            if isinstance(event, events.ScalarEvent):
                bounds.scalar(event)
            elif isinstance(event, events.CollectionStartEvent):
                bounds.start(event)
            elif isinstance(event, events.CollectionEndEvent):
                bounds.depth -= 1
    except YAMLError:
        return  # parse_yaml says where and what


# --- single values ----------------------------------------------------------------------------------------


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
