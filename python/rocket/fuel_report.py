"""Manifests, formats and mismatches as text."""

from collections.abc import Sequence

from rocket.accounting import Account
from rocket.architecture import GLM5_NEXT
from rocket.bytes_report import Unit
from rocket.errors import one_line
from rocket.formats import FormatRow
from rocket.manifest import ByDtype, Manifest, ManifestFile, Number
from rocket.report import counted
from rocket.validate import Mismatch, Value, written

# What the engine runs; the others are counted and planned only.
ENGINES = {GLM5_NEXT: "glm5-moe-nvfp4-2b"}


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns two spaces apart, those in `right` aligned to the right; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            f"{cell:>{width}}" if i in right else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,g}" if value < 1e6 else f"{value:,.1f}"


def manifest_text(file: ManifestFile) -> str:
    """Everything that a manifest says, section by section."""
    m = file.manifest
    lines = [f"{m.id}: {one_line(m.name)}, {m.chemistry}", f"manifest {file.path}"]
    lines += [one_line(text) for text in (m.source, m.note) if text]
    for section in Manifest.model_fields:
        value = getattr(m, section)
        if hasattr(value, "model_fields_set"):
            lines += ["", section, *_section_lines(value)]
    return "\n".join(lines) + "\n"


def _section_lines(section: object) -> list[str]:
    rows: list[tuple[str, str, str]] = []

    def walk(prefix: str, value: object) -> None:
        if isinstance(value, Number):
            note = f": {one_line(value.note)}" if value.note else ""
            rows.append((prefix, _number(value.value), value.source + note))
        elif isinstance(value, ByDtype) or hasattr(value, "model_fields_set"):
            for name in type(value).model_fields:
                if (inner := getattr(value, name)) is not None:
                    walk(f"{prefix}.{name}" if prefix else name, inner)
        elif isinstance(value, dict):
            for name, inner in value.items():
                rows.append((f"{prefix}.{name}", str(inner), ""))
        elif isinstance(value, bool):
            rows.append((prefix, _shown(value), ""))
        elif value is not None:
            rows.append((prefix, _number(value) if isinstance(value, int) else one_line(str(value)), ""))

    walk("", section)
    width = max((len(name) for name, _, _ in rows), default=0)
    most = max((len(value) for _, value, _ in rows if len(value) <= 14), default=0)
    return [f"  {name:<{width}}  {value:<{most}}  {rest}".rstrip() for name, value, rest in rows]


def formats_text(account: Account, rows: Sequence[FormatRow], folder: str) -> str:
    """The weight formats of a checkpoint, and what the engine does with each at load."""
    unit = Unit(account.tensor_bytes)
    cells = [("part", "format", "weights", unit.name, "in memory", "at load")]
    for row in rows:
        loaded = "-" if row.loaded_bytes == 0 else unit.show(row.loaded_bytes)
        cells.append(
            (
                row.group,
                row.format_name,
                f"{row.weights:,}",
                unit.show(row.stored_bytes),
                loaded,
                row.treatment,
            )
        )
    engine = ENGINES.get(account.arch.chemistry)
    rule = f"engine {engine}" if engine else "no engine runs this chemistry; the rules of the common loader"
    state = ", hollow: names and shapes without data" if account.hollow else ""
    head = f"{folder}: {account.arch.chemistry}, {counted(account.file_count, 'file')}{state}; {rule}"
    return f"{head}\n\n{table(cells, right=(2, 3, 4))}\n"


def _shown(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else _number(value)


def mismatch_text(mismatches: Sequence[Mismatch]) -> str:
    cells = [("field", "recorded", "found", "ratio")]
    for m in mismatches:
        cells.append((m.field, _shown(m.recorded), _shown(written(m.found)), m.ratio))
    return table(cells, right=(1, 2, 3)) + "\n"
