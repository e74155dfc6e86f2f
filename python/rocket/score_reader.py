"""Reading what ``rocket score --out`` wrote. All of it is checked; what is wrong is said in a line."""

import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rocket.checked import parse_json, shown, validate
from rocket.errors import CliError, UsageError
from rocket.inputs import open_file
from rocket.score_file import COLUMNS, FORMAT, Row

ROWS_BEGIN = b', "rows": ['  # ends the first line where rows have lines of their own
MAX_ID = 2**31 - 1
LEAST_LOG_PROB = -1e39  # no difference of two float32 is below
_HINT = "write it again with: rocket score FUEL --text FILE --out FILE"
_END = object()

Model = TypeVar("Model", bound=BaseModel)
Id = Annotated[int, Field(ge=0, le=MAX_ID)]
Seconds = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


def _count(least: int) -> Any:
    return Field(ge=least, description=f"a whole number of at least {least}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ScoreHead(_Strict):
    """What stands before the rows."""

    format: Literal["rocket-score-1"] = Field(description=FORMAT)
    fuel: str = Field(description="a text")
    backend: str = Field(description="a text")
    device: str = Field(description="a text")
    tokens: int = _count(1)
    opening: list[Id] = Field(description="a list of token ids")
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="64 hexadecimal digits")
    max_context: int = _count(1)
    windows: int = _count(1)
    columns: list[str] = Field(description="a list of texts")

    @model_validator(mode="after")
    def _hangs_together(self) -> "ScoreHead":
        if self.columns != COLUMNS:
            raise ValueError(f"columns: expected {shown(COLUMNS)}, found {shown(self.columns)}")
        least = len(self.opening) + 1
        if self.max_context < least:
            raise ValueError(
                f"max_context: expected at least {least}, since {least - 1} tokens stand before the text, "
                f"found {self.max_context}"
            )
        return self


class ScoreSummary(_Strict):
    """What stands behind the rows."""

    tokens: int = _count(1)
    max_context: int = _count(1)
    windows: int = _count(1)
    scored: int = _count(0)
    not_finite: int = _count(0)
    mean_log_prob: float | None = Field(description="a number or null")
    perplexity: float | None = Field(description="a number or null")
    bits_per_byte: float | None = Field(description="a number or null")
    top1: Share | None = Field(description="a number from 0 to 1, or null")
    seconds: Seconds = Field(description="a number of at least 0")
    comparison: dict[str, Any] | None = Field(None, description="an object")


class ScoreReader:
    """Another run's head at once, its rows one by one."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._where = f"--against {path}"
        self._file = open_file(path, "--against")
        self._whole: dict[str, Any] | None = None  # rows and summary, where rows have no lines of their own
        try:
            self.head = self._read_head()
        except BaseException:
            self._file.close()
            raise

    def _read_head(self) -> ScoreHead:
        first = self._file.readline()
        if first.rstrip().endswith(ROWS_BEGIN):
            fields = self._parse(first.rstrip().removesuffix(ROWS_BEGIN) + b"}")
        else:
            fields = self._parse(first + self._file.read())
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise self._broken(f"expected the JSON of rocket score (format {FORMAT})")
        if not first.rstrip().endswith(ROWS_BEGIN):
            self._whole = {name: fields.pop(name) for name in ("rows", "summary") if name in fields}
        return self._validated(ScoreHead, fields)

    def _broken(self, what: str) -> CliError:
        return CliError(f"{self._where}: {what}", _HINT)

    def _parse(self, data: bytes) -> Any:
        try:
            return parse_json(data, self._where)
        except UsageError as error:
            raise CliError(str(error), _HINT) from None

    def _validated(self, model: type[Model], fields: Any, inside: str = "") -> Model:
        try:
            return validate(model, fields, f"{self._where}: {inside}" if inside else self._where, _HINT)
        except UsageError as error:
            raise CliError(str(error), error.hint) from None

    def rows(self, ids: Iterable[int]) -> Iterator[Row]:
        """One for each token of the text. Throws CliError if they are not those of these tokens, and after
        the last one for whatever is wrong behind it."""
        lines = self._list() if self._whole is not None else self._lines()
        place = 0
        for token in ids:
            row = next(lines, _END)
            if row is _END:
                raise self._broken(f"rows: expected {self.head.tokens} rows, found {place}")
            yield self._row(row, place, token)
            place += 1
        if next(lines, _END) is not _END:
            raise self._broken(f"rows: expected {place} rows, found more")
        self._check_summary()

    def _list(self) -> Iterator[Any]:
        found = (self._whole or {}).get("rows", _END)
        if found is _END:
            raise self._broken("rows: missing; expected a list")
        if not isinstance(found, list):
            raise self._broken(f"rows: expected a list, found {shown(found)}")
        yield from found

    def _lines(self) -> Iterator[Any]:
        """The rows of lines. At their end ``_whole`` is what stands behind them."""
        comma = True
        for line in self._file:
            text = line.strip()
            if text.startswith(b"]"):
                rest = self._parse(b'{"rows": [' + text + self._file.read())
                self._whole = {name: value for name, value in rest.items() if name != "rows"}
                return
            if not comma:
                raise self._broken("broken JSON: expected a comma between rows, found none")
            comma = text.endswith(b",")
            yield self._parse(text.removesuffix(b","))
        raise self._broken("it ends in the middle of its rows")

    def _row(self, row: Any, place: int, token: int) -> Row:
        name = f"rows[{place}]"
        if not isinstance(row, list) or len(row) != len(COLUMNS):
            raise self._broken(f"{name}: expected rows of {len(COLUMNS)} values, found {shown(row)}")

        def check(column: int, right: bool, expected: str) -> None:
            if not right:
                raise self._broken(
                    f"{name}: {COLUMNS[column]}: expected {expected}, found {shown(row[column])}"
                )

        found, log_prob, rank, top = row
        check(0, _is_id(found) and found == token, f"{token}, the text's token there")
        if place == 0 and not self.head.opening:
            for column in (1, 2, 3):
                check(column, row[column] is None, "null, since nothing stands before this token")
            return found, None, None, None
        check(1, log_prob is None or _is_log_prob(log_prob), "a number of at most 0, or null")
        check(2, _is_id(rank), "a whole number of at least 0")
        check(3, _is_id(top), "a token id")
        return found, log_prob, rank, top

    def _check_summary(self) -> None:
        rest = dict(self._whole or {})
        if "summary" not in rest:
            raise self._broken("summary: missing; expected an object")
        summary = self._validated(ScoreSummary, rest.pop("summary"), "summary")
        for name in ("tokens", "max_context", "windows"):
            expected, found = getattr(self.head, name), getattr(summary, name)
            if found != expected:
                raise self._broken(f"summary: {name}: expected {expected}, as in the head, found {found}")
        rest.pop("rows", None)
        for name, value in rest.items():
            raise self._broken(f"{shown(name)}: unknown field behind the rows (its value is {shown(value)})")

    def close(self) -> None:
        self._file.close()


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ID


def _is_log_prob(value: Any) -> bool:
    # An integer may be too large to become a float, but compares with one; nan fails every comparison.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and LEAST_LOG_PROB <= value <= 0 and math.isfinite(value)
