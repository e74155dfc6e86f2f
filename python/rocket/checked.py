"""Files that are checked against a pydantic model. What is wrong with one is said in a line: field, value,
what is allowed. Nothing of a wrong file is used."""

import codecs
import difflib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from rocket.errors import UsageError, naming, reason_of
from rocket.inputs import READ_HINT, open_regular

Model = TypeVar("Model", bound=BaseModel)
MAX_BYTES = 1 << 20  # of a file that is read whole
MAX_DEPTH = 16  # of lists and objects in each other
MAX_VALUES = 20_000
MAX_DIGITS = 40  # of a number
_NUMBER = re.compile(r"[-+]?[.0-9][-+0-9A-Fa-fxo_.:]*")
_HINT = "correct the file"

_TYPES = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model": "an object",
}
_LIMITS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}


def open_named(path: str, option: str) -> BufferedReader:
    """Opens a regular file. What cannot be opened is a wrong option."""
    if not path:
        raise UsageError(f"{option}: expected a file, found an empty name", "give the name of a file")
    try:
        return open_regular(path)
    except (OSError, ValueError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else error
        raise UsageError(f"{option}: cannot read {path}: {reason}", "give a file that can be read") from error


def read_whole(path: str, option: str, limit: int = MAX_BYTES) -> bytes:
    with open_named(path, option) as file, naming(f"{option}: cannot read {path}", READ_HINT):
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UsageError(f"{option} {path}: expected at most {limit:,} bytes, found more", "is it this file?")
    return data


def _text(data: bytes, where: str) -> str:
    """UTF-8 alone: parsers that guess other encodings take binary files for text."""
    try:
        text = data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at {error.start}"
        raise UsageError(f"{where}: expected UTF-8 text, found {found}", "convert it to UTF-8") from None
    if "\0" in text:
        found = f"a binary file (a zero byte at {data.index(0)})"
        raise UsageError(f"{where}: expected UTF-8 text, found {found}", "give a text file")
    return text


def parse_yaml(data: bytes, where: str) -> Any:
    """The value of a YAML file. Its events are walked before anything is built from them, so that what would
    take long, overflow or never end is refused in one line."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    text = _text(data, where)
    try:
        walk = _Walk(where)
        for event in YAML(typ="safe", pure=True).parse(text):
            walk.see(event)
        value = YAML(typ="safe").load(text)
    except (YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UsageError(f"{where}: broken YAML{place}: {problem}", _HINT) from None
    _check_names(value, (), where)
    return value


class _Walk:
    """What was seen of a YAML document: fields and lists that are open, and how many values there were."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.open: list[_Open] = []
        self.values = 0

    def see(self, event: Any) -> None:
        from ruamel.yaml import events

        if isinstance(event, events.AliasEvent):
            self.refuse(event, f"expected no alias, found *{event.anchor}", "write it out")
        if isinstance(event, events.CollectionEndEvent):
            self.open.pop()
            self.done()
        elif isinstance(event, events.NodeEvent):
            self.node(event)

    def node(self, event: Any) -> None:
        from ruamel.yaml import events

        if event.tag is not None:
            self.refuse(event, f"expected a plain value, found one with a tag ({event.tag})")
        self.values += 1
        if self.values > MAX_VALUES:
            self.refuse(event, f"expected at most {MAX_VALUES:,} values, found more")
        if isinstance(event, events.ScalarEvent):
            self.scalar(event)
            return
        if self.open and self.open[-1].at_name:
            self.refuse(event, "expected a text as a field's name, found a list or an object")
        self.open.append(_Open(isinstance(event, events.MappingStartEvent)))
        if len(self.open) > MAX_DEPTH:
            self.refuse(event, f"expected at most {MAX_DEPTH} levels of nesting, found more")

    def scalar(self, event: Any) -> None:
        if not event.style and len(event.value) > MAX_DIGITS and _NUMBER.fullmatch(event.value):
            found = len(event.value)
            self.refuse(event, f"expected a number of at most {MAX_DIGITS} digits, found {found}")
        if self.open and self.open[-1].at_name:
            self.open[-1].name = event.value
        else:
            self.done()

    def done(self) -> None:
        """A value is complete."""
        if self.open:
            self.open[-1].name = None

    def refuse(self, event: Any, problem: str, hint: str = _HINT) -> NoReturn:
        names = tuple(part.name for part in self.open if part.name is not None)
        place = f"{_field(names)}: " if names else ""
        raise UsageError(f"{self.where}, line {event.start_mark.line + 1}: {place}{problem}", hint)


@dataclass
class _Open:
    """A mapping or a list that has begun, and the field of it whose value is due."""

    mapping: bool
    name: str | None = None

    @property
    def at_name(self) -> bool:
        return self.mapping and self.name is None


def _check_names(value: Any, place: tuple[int | str, ...], where: str) -> None:
    """YAML takes anything for a field's name: 7, true, null, a date. These files have texts alone."""
    if isinstance(value, list):
        for index, inner in enumerate(value):
            _check_names(inner, (*place, index), where)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                inside = f"{_field(place)}: " if place else ""
                raise UsageError(
                    f"{where}: {inside}expected a text as a field's name, found {shown(name)}",
                    "correct it, or put it in quotes",
                )
            _check_names(inner, (*place, name), where)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"expected each field once, found {shown(twice)} twice")
    return fields


def parse_json(data: bytes, where: str) -> Any:
    text = _text(data, where)
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        problem = str(error)
        if isinstance(error, RecursionError):
            problem = "expected less nesting of lists and objects"
        elif "int_max_str_digits" in problem:  # advice for programs
            problem = "expected no number of thousands of digits"
        raise UsageError(f"{where}: broken JSON: {problem}", "correct the file, or write it again") from None


def shown(value: Any) -> str:
    """A value as a file has it, on one line and not too long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # JSON has no such keys or nesting
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"


def validate(model: type[Model], value: Any, where: str, hint: str) -> Model:
    """The checked value. Throws UsageError about the first thing that is wrong."""
    if not isinstance(value, dict):
        raise UsageError(f"{where}: expected an object of fields, found {shown(value)}", hint)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        # An unknown field first: it is often the misspelt name of one that is missing.
        wrong = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")[0]
        raise UsageError(f"{where}: {_describe(wrong, model)}", hint) from None


def _field(place: tuple[int | str, ...]) -> str:
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _describe(error: Any, model: type[BaseModel]) -> str:
    kind, place, found = error["type"], error["loc"], error["input"]
    name = _field(place)
    if kind == "extra_forbidden":
        known = list(_owner(model, place[:-1]).model_fields)
        close = difflib.get_close_matches(str(place[-1]), known, n=1)
        allowed = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(known)}"
        return f"{name}: unknown field (its value is {shown(found)}); {allowed}"
    if kind == "missing":
        return f"{name}: missing; expected {_expected_of(model, place)}"
    if kind == "value_error":
        message = str(error["ctx"]["error"])
        return f"{name}: {message}" if name else message
    return f"{name}: expected {_expected(error, model)}, found {shown(found)}"


def _expected(error: Any, model: type[BaseModel]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return f"one of {context['expected']}"
    if kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return _expected_of(model, error["loc"]) if len(error["loc"]) == 1 else _limit(context)
    if kind == "finite_number":
        return "a finite number"
    if kind.startswith("string_pattern"):
        return f"a text like {context['pattern']}"
    return _TYPES.get(kind.split("_")[0], error["msg"])


def _limit(context: dict[str, Any]) -> str:
    return " and ".join(
        f"a number {word} {context[key]:g}" for key, word in _LIMITS.items() if key in context
    )


def _owner(model: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    """The model that holds the field at a place, as far as models nest."""
    for part in place:
        field = model.model_fields.get(str(part))
        inner = next(_models(field.annotation), None) if field else None
        if inner is None:
            break
        model = inner
    return model


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a type, perhaps an optional one, names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _expected_of(model: type[BaseModel], place: tuple[int | str, ...]) -> str:
    field = _owner(model, place[:-1]).model_fields.get(str(place[-1]))
    return (field.description if field else None) or "a value"
