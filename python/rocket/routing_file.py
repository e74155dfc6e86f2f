"""Reading routing traces: the compact files that an engine records (src/experts/trace.h), and JSON lines, one
a decoded token: ``{"tok": n, "layers": [[expert ids of the first MoE layer], …]}``.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rocket.checked import open_named, parse_json, shown
from rocket.errors import UsageError
from rocket.routing import Ids, Routing

MAX_LINE = 16 << 20
MAX_EXPERTS = 1 << 16
MAGIC = b"RKTROUTE"
_HINT = 'a trace has a line a token: {"tok": n, "layers": [[ids of the first MoE layer], …]}'


@dataclass(frozen=True)
class _Shape:
    """What every row of a trace must have."""

    layers: int
    experts: int
    topk: int
    hint: str

    @staticmethod
    def of_model(layers: int, experts: int, topk: int) -> "_Shape":
        of = f"of a model with {layers} MoE layers of {experts} experts, top-{topk}"
        return _Shape(layers, experts, topk, f"give a trace {of}")


def read_routing(path: str | Path, layers: int, experts: int, topk: int, option: str = "--trace") -> Routing:
    """Reads a trace of a model with so many MoE layers, experts in each, and experts a token."""
    shape = _Shape.of_model(layers, experts, topk)
    if not _is_compact(path, option):
        return Routing(_read_lines(path, option, shape, experts), experts, Path(path).name)
    routing = _read_compact(path, option)
    for what, expected, found in (
        ("MoE layers", layers, routing.layers),
        ("experts", experts, routing.experts),
        ("top-k", topk, routing.topk),
    ):
        if expected != found:
            raise UsageError(f"{option} {path}: {what}: expected {expected}, found {found}", shape.hint)
    return routing


def read_any_routing(path: str | Path, option: str, experts: int | None = None) -> Routing:
    """Reads a trace of whatever model. JSON lines do not say how many experts a layer has: it is ``experts``,
    by default one more than the highest id."""
    if not _is_compact(path, option):
        ids = _read_lines(path, option, None, experts)
        return Routing(ids, experts or int(ids.max()) + 1, Path(path).name)
    routing = _read_compact(path, option)
    if experts not in (None, routing.experts):
        raise UsageError(
            f"{option} {path}: experts: expected {experts} (--experts), found {routing.experts}",
            "leave out --experts: the trace says it",
        )
    return routing


def _is_compact(path: str | Path, option: str) -> bool:
    with open_named(str(path), option) as file:
        return file.read(len(MAGIC)) == MAGIC


def _read_compact(path: str | Path, option: str) -> Routing:
    from rocket._core import InputError, read_trace

    try:
        trace = read_trace(str(path))
    except InputError as error:
        raise UsageError(
            f"{option} {path}: {str(error).removeprefix(f'trace {path}: ')}", error.hint
        ) from None
    step = trace["step"]
    if not len(step):
        raise UsageError(f"{option} {path}: expected a row a token, found none", "record a run that decodes")
    ends = np.append(np.flatnonzero(np.diff(step)) + 1, len(step))
    return Routing(
        ids=trace["ids"],
        experts=trace["experts"],
        name=Path(path).name,
        layer_ids=tuple(trace["layers"]),
        step_ends=ends,
        stream=trace["stream"],
        fingerprint=trace["fingerprint"],
        torn_bytes=trace["torn_bytes"],
    )


def _read_lines(path: str | Path, option: str, shape: _Shape | None, experts: int | None) -> Ids:
    """Tokens [tokens, layers, top-k]. Without a shape the first line gives it."""
    rows: list[Ids] = []
    with open_named(str(path), option) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if not line.strip():
                continue
            where = f"{option} {path}, line {number}"
            if len(line) > MAX_LINE:
                raise UsageError(f"{where}: expected at most {MAX_LINE:,} bytes, found more", _HINT)
            value = parse_json(line, where)
            if shape is None:
                shape = _first_shape(value, where, experts)
            fits = b"true" not in line and b"false" not in line and _fits(value, shape)
            rows.append(np.array(value["layers"] if fits else _row(value, where, shape), np.int32))
    if not rows or shape is None:
        raise UsageError(f"{option} {path}: expected a line a token, found none", _HINT)
    return np.stack(rows).reshape(len(rows), shape.layers, shape.topk)


def _first_shape(value: Any, where: str, experts: int | None) -> _Shape:
    layers = value.get("layers") if isinstance(value, dict) else None
    if not isinstance(layers, list) or not layers or not isinstance(layers[0], list) or not layers[0]:
        raise UsageError(
            f"{where}: layers: expected a list of ids for each MoE layer, found {shown(layers)}", _HINT
        )
    like = f"{len(layers)} MoE layers and {len(layers[0])} ids in each"
    hint = f"every line has what the first has: {like}"
    return _Shape(len(layers), experts or MAX_EXPERTS, len(layers[0]), hint)


def _fits(value: Any, shape: _Shape) -> bool:
    """Quickly, whether a line is right; numpy takes booleans among numbers for numbers."""
    if not isinstance(value, dict) or sorted(value) != ["layers", "tok"]:
        return False
    if not isinstance(value["tok"], int) or value["tok"] < 0:
        return False
    try:
        ids = np.array(value["layers"])
    except ValueError:  # ragged
        return False
    if ids.dtype.kind != "i" or ids.shape != (shape.layers, shape.topk):
        return False
    ids.sort(axis=1)
    return bool((ids >= 0).all() and (ids < shape.experts).all() and (np.diff(ids, axis=1) > 0).all())


def _row(value: Any, where: str, shape: _Shape) -> list[list[int]]:
    """A line's layers, looked at number by number. Throws UsageError about the first that is wrong."""
    layers, experts, topk = shape.layers, shape.experts, shape.topk

    def fail(field: str, expected: str, found: Any) -> None:
        text = found if isinstance(found, str) else shown(found)
        raise UsageError(f"{where}: {field}: expected {expected}, found {text}", shape.hint)

    if not isinstance(value, dict):
        fail("the line", "an object with tok and layers", value)
    for field in value:
        if field not in ("tok", "layers"):
            fail(field, "one of tok, layers", "an unknown field")
    tok = value.get("tok")
    if isinstance(tok, bool) or not isinstance(tok, int) or tok < 0:
        fail("tok", "a whole number of at least 0", tok)
    given = value.get("layers")
    if not isinstance(given, list):
        fail("layers", f"{layers} lists, one a MoE layer", given)
    if len(given) != layers:
        fail("layers", f"{layers} lists, one a MoE layer", f"{len(given)}")
    for index, ids in enumerate(given):
        if not isinstance(ids, list) or len(ids) != topk:
            fail(f"layers[{index}]", f"{topk} expert ids", ids)
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < experts:
                fail(f"layers[{index}]", f"expert ids from 0 to {experts - 1}", i)
        if len(set(ids)) != topk:
            fail(f"layers[{index}]", "distinct expert ids", ids)
    return given
