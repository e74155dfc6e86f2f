"""The JSON of ``rocket score``: a head, one row a line, a summary. Written row by row.

    {"format": "rocket-score-1", …, "columns": ["id", "log_prob", "rank", "top"], "rows": [
    [464, null, null, null],
    [3139, -4.25, 12, 290]
    ], "summary": {…}}

A token that nothing stands before is not scored: its row has nulls. A log-probability that is not finite is
null too, but has a rank. Any JSON with the same content can be read back (score_reader.py); this layout is
read row by row.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from rocket.errors import naming

FORMAT = "rocket-score-1"
COLUMNS = ["id", "log_prob", "rank", "top"]

MEAN_LIMIT = 0.02  # nats; the gate for any change that may move the numbers
TOKEN_LIMIT = 1.0

Row = tuple[int, float | None, int | None, int | None]


class ScoreWriter:
    """``name`` is what an error calls the file."""

    def __init__(self, file: BinaryIO, head: dict[str, Any], name: str = "scores") -> None:
        self._name = name
        self._file = file
        self._separator = b"\n"
        text = json.dumps({"format": FORMAT, **head, "columns": COLUMNS}, ensure_ascii=False, allow_nan=False)
        self._put(text[:-1].encode() + b', "rows": [')

    def _put(self, data: bytes) -> None:
        with naming(f"{self._name}: cannot write", "make room, or give a file on another disk"):
            self._file.write(data)

    def write(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._put(self._separator + json.dumps(row, allow_nan=False).encode())
            self._separator = b",\n"

    def finish(self, summary: dict[str, Any]) -> None:
        text = json.dumps(summary, ensure_ascii=False, allow_nan=False)
        self._put(b'\n], "summary": ' + text.encode() + b"}\n")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass
class Comparison:
    """|log p - log p of another run|, token by token."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0
    largest_at: int | None = None
    over: int = 0  # tokens moved by more than TOKEN_LIMIT
    agreeing: int = 0  # tokens whose top-1 is the same
    broken: int = 0  # tokens that one side at least has no finite number for
    place: int = field(default=0, repr=False)

    def add(self, ours: Row, theirs: Row) -> None:
        place, self.place = self.place, self.place + 1
        if place == 0 and (ours[2] is None or theirs[2] is None):  # not scored: nothing stands before it
            return
        self.tokens += 1
        self.agreeing += ours[3] == theirs[3]
        if not (_is_finite(ours[1]) and _is_finite(theirs[1])):
            self.broken += 1
            return
        delta = abs(ours[1] - theirs[1])
        self.total += delta
        self.over += delta > TOKEN_LIMIT
        if delta > self.largest or self.largest_at is None:
            self.largest, self.largest_at = delta, place

    @property
    def mean(self) -> float:
        """Over the tokens that both have a number for; nan over none."""
        compared = self.tokens - self.broken
        return self.total / compared if compared else math.nan

    @property
    def passes(self) -> bool:
        return self.mean <= MEAN_LIMIT and self.over == 0 and self.broken == 0

    def as_json(self, path: str) -> dict[str, Any]:
        return {
            "against": path,
            "tokens": self.tokens,
            "mean_abs_delta": None if math.isnan(self.mean) else self.mean,
            "max_abs_delta": self.largest if self.largest_at is not None else None,
            "max_at": self.largest_at,
            "over_1_nat": self.over,
            "not_finite": self.broken,
            "top1_agreement": self.agreeing / self.tokens if self.tokens else None,
            "gate": {"mean_at_most": MEAN_LIMIT, "token_at_most": TOKEN_LIMIT, "passes": self.passes},
        }

    def lines(self, path: str) -> list[str]:
        verdict = "passes" if self.passes else "FAILS"
        where = f", token {self.largest_at}" if self.largest_at is not None else ""
        agreement = f"{100 * self.agreeing / self.tokens:.2f} %" if self.tokens else "-"
        compared, known = self.tokens - self.broken, self.largest_at is not None
        limits = f"mean at most {MEAN_LIMIT} nats, no token over {TOKEN_LIMIT:g} nat"
        return [
            f"against             {path}",
            f"mean |delta log p|  {f'{self.mean:.6f} nats' if known else '-'} over {compared} tokens",
            f"largest             {f'{self.largest:.6f} nats{where}' if known else '-'}",
            f"over 1 nat          {self.over} tokens",
            f"not finite          {self.broken} tokens",
            f"top-1 agreement     {agreement}",
            f"gate                {verdict}: {limits}",
        ]
