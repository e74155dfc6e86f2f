"""rocket score --against: what is wrong with a file is said in one line, and what differs in a note."""

import copy
import hashlib
import json
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli_tools import check_error, run_fake
from rocket.errors import CliError
from rocket.random_fuel import make_fuel
from rocket.score_file import COLUMNS, ScoreWriter
from rocket.score_reader import ScoreReader

IDS = [115, 111, 32, 7, 300, 7, 1023, 0, 8]
HEAD = {
    "fuel": "tiny",
    "backend": "cpu",
    "device": "a test",
    "tokens": len(IDS),
    "opening": [],
    "sha256": hashlib.sha256(np.array(IDS, "<i4").tobytes()).hexdigest(),
    "max_context": 16,
    "windows": 1,
}
SUMMARY = {
    **{name: HEAD[name] for name in ("tokens", "max_context", "windows")},
    **{"scored": 8, "not_finite": 1, "mean_log_prob": None, "perplexity": None, "bits_per_byte": None},
    **{"top1": 0.5, "seconds": 1},
}
ROWS = [(115, None, None, None), *((token, -1.5, 3, 7) for token in IDS[1:-1]), (IDS[-1], None, 0, 8)]


@pytest.fixture
def scores(tmp_path: Path) -> Path:
    file = tmp_path / "scores"
    with file.open("wb") as out:
        writer = ScoreWriter(out, HEAD)
        writer.write(ROWS)
        writer.finish(SUMMARY)
    return file


def read(file: Path) -> list:
    reader = ScoreReader(str(file))
    try:
        return list(reader.rows(IDS))
    finally:
        reader.close()


def test_whole_files_come_back(scores: Path) -> None:
    whole = json.loads(scores.read_text())
    assert read(scores) == ROWS
    for text in (json.dumps(whole), json.dumps(whole, indent=1), json.dumps(dict(reversed(whole.items())))):
        scores.write_text(text)
        assert read(scores) == ROWS
    scores.write_text(json.dumps(whole | {"summary": SUMMARY | {"comparison": {"against": "x"}}}))
    assert read(scores) == ROWS


# What is done to the text of a file, and what is said of it.
DAMAGES: dict[str, tuple[Callable[[str], str], str]] = {
    "format": (lambda t: t.replace("score-1", "score-2"), "expected the JSON of rocket score"),
    "field unknown": (lambda t: t.replace('"fuel"', '"feul"'), "feul: unknown field"),
    "field missing": (lambda t: t.replace('"backend": "cpu", ', ""), "backend: missing; expected a text"),
    "tokens as text": (
        lambda t: t.replace(": 9, ", ': "9", ', 1),
        'tokens: expected a whole number, found "9"',
    ),
    "sha256": (lambda t: t.replace('"sha256": "', '"sha256": "g'), "sha256: expected"),
    "opening": (lambda t: t.replace('"opening": []', '"opening": [-1]'), "opening[0]: expected"),
    "opening null": (lambda t: t.replace('"opening": []', '"opening": null'), "opening: expected a list"),
    "context": (lambda t: t.replace('"max_context": 16', '"max_context": 0'), "max_context: expected"),
    "context and opening": (
        lambda t: t.replace('"opening": []', f'"opening": {[1] * 16}'),
        "max_context: expected at least 17",
    ),
    "columns": (lambda t: t.replace('"rank", "top"', '"top", "rank"'), 'columns: expected ["id", "log_prob"'),
    "rows null": (lambda t: json.dumps(json.loads(t) | {"rows": None}), "rows: expected a list, found null"),
    "no rows": (
        lambda t: json.dumps({k: v for k, v in json.loads(t).items() if k != "rows"}),
        "rows: missing; expected a list",
    ),
    "row more": (lambda t: t.replace("\n[111", "\n[7, -1, 0, 7],\n[111", 1), "rows[1]: id: expected 111"),
    "row at the end": (lambda t: t.replace("\n], ", ",\n[7, -1, 0, 7]\n], "), "expected 9 rows, found more"),
    "row less": (lambda t: re.sub(r",\n[^\n]*\n\], ", "\n], ", t), "expected 9 rows, found 8"),
    "comma missing": (lambda t: t.replace("],\n[111", "]\n[111", 1), "expected a comma between rows"),
    "row short": (
        lambda t: t.replace("null, null, null", "null, null"),
        "rows[0]: expected rows of 4 values",
    ),
    "row no list": (lambda t: t.replace("[115, null, null, null]", "7"), "rows[0]: expected rows of 4"),
    "id": (lambda t: t.replace("[111", "[112", 1), "rows[1]: id: expected 111, the text's token"),
    "id as text": (lambda t: t.replace("[111", '["111"', 1), "rows[1]: id: expected 111"),
    "id as number": (lambda t: t.replace("[111", "[111.0", 1), "rows[1]: id: expected 111"),
    "unscored scored": (
        lambda t: t.replace("null, null, null", "-1, 0, 1"),
        "rows[0]: log_prob: expected null",
    ),
    "log_prob huge": (lambda t: second(t, 1, "-1" + "0" * 400), "rows[1]: log_prob: expected a number"),
    "log_prob huge float": (lambda t: second(t, 1, "-1e308"), "rows[1]: log_prob: expected a number"),
    "log_prob thousands of digits": (lambda t: second(t, 1, "1" * 5000), "thousands of digits"),
    "log_prob infinite": (lambda t: second(t, 1, "-Infinity"), "rows[1]: log_prob: expected a number"),
    "log_prob nan": (lambda t: second(t, 1, "NaN"), "rows[1]: log_prob: expected a number"),
    "log_prob positive": (lambda t: second(t, 1, "0.5"), "rows[1]: log_prob: expected a number of at most 0"),
    "log_prob true": (lambda t: second(t, 1, "true"), "rows[1]: log_prob: expected a number"),
    "log_prob text": (
        lambda t: second(t, 1, '"x"'),
        'rows[1]: log_prob: expected a number of at most 0, or null, found "x"',
    ),
    "rank": (lambda t: second(t, 2, "-1"), "rows[1]: rank: expected a whole number of at least 0, found -1"),
    "rank null": (lambda t: second(t, 2, "null"), "rows[1]: rank: expected a whole number"),
    "top": (lambda t: second(t, 3, "2147483648"), "rows[1]: top: expected a token id, found 2147483648"),
    "row broken": (lambda t: second(t, 3, "}"), "broken JSON"),
    "nested": (lambda t: second(t, 3, "[" * 99999), "broken JSON"),
    "no summary": (lambda t: t.split('], "summary"')[0] + "]}", "summary: missing; expected an object"),
    "summary null": (lambda t: t.split(' "summary"')[0] + ' "summary": null}', "summary: expected an object"),
    "summary's tokens": (
        lambda t: t.replace('"summary": {"tokens": 9', '"summary": {"tokens": 8'),
        "summary: tokens: expected 9",
    ),
    "summary's field": (lambda t: t.replace('"scored"', '"scord"'), "summary: scord: unknown field"),
    "summary's number": (lambda t: t.replace('"top1": ', '"top1": 1'), "summary: top1: expected"),
    "summary's huge": (
        lambda t: t.replace('"seconds": ', '"seconds": 1' + "0" * 400),
        "summary: seconds: expected",
    ),
    "more behind": (lambda t: t.rstrip()[:-1] + ', "x": 1}', '"x": unknown field behind the rows'),
    "text behind": (lambda t: f"{t}x", "broken JSON"),
    "cut": (lambda t: t[: t.index("[111")], "it ends in the middle of its rows"),
    "twice": (lambda t: t.replace('"fuel"', '"tokens": 9, "fuel"'), "expected each field once"),
    "no UTF-8": (lambda t: t.replace("[111", "[\udcff", 1), "expected UTF-8"),
}


def second(text: str, column: int, value: str) -> str:
    """The file with another value in the second row."""
    lines = text.split("\n")
    row = lines[2].strip("[],").split(", ")
    row[column] = value
    lines[2] = f"[{', '.join(row)}],"
    return "\n".join(lines)


ONLY_LINES = ("comma missing", "cut", "more behind")  # of rows that have lines of their own


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (kind, layout)
        for kind in DAMAGES
        for layout in ("lines", "whole")
        if layout == "lines" or kind not in ONLY_LINES
    ],
)
def test_damaged_scores(scores: Path, kind: str, layout: str) -> None:
    damage, words = DAMAGES[kind]
    before = scores.read_text()
    text = damage(before)
    assert text != before
    if layout == "whole":
        text = text.replace("\n", " ")
    scores.write_text(text, errors="surrogateescape")
    with pytest.raises(CliError) as caught:
        read(scores)
    assert str(caught.value).startswith(f"--against {scores}: ")
    assert words in str(caught.value)
    assert "rocket score" in caught.value.hint


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([10**400, -(10**400)]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
PLACES = [
    *((name,) for name in (*HEAD, "format", "columns", "rows", "summary")),
    *(("summary", name) for name in SUMMARY),
    *(("rows", row) for row in (0, 1, 8)),
    *(("rows", row, column) for row in (0, 1, 8) for column in range(4)),
    ("opening", 0),
]


@settings(deadline=None, max_examples=300)
@given(place=st.sampled_from(PLACES), value=JSON, remove=st.booleans())
def test_anything_anywhere(place: tuple, value: object, remove: bool) -> None:
    """A file is read, or refused in one line; no value is a fault of the reader."""
    whole: Any = {"format": "rocket-score-1", **HEAD, "opening": [3], "columns": COLUMNS}
    whole = copy.deepcopy(whole | {"rows": [list(row) for row in ROWS], "summary": SUMMARY})
    whole["rows"][0] = [115, -2.0, 1, 7]
    of = whole
    for part in place[:-1]:
        of = of[part]
    if remove:
        del of[place[-1]]
    else:
        of[place[-1]] = value
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scores"
        file.write_text(json.dumps(whole))
        try:
            found, refused = read(file), ""
        except CliError as error:
            found, refused = [], str(error)
        assert not refused or refused.startswith(f"--against {file}: ")
    if not refused:
        assert [row[0] for row in found] == IDS
        assert all(row[1] is None or math.isfinite(row[1]) for row in found)


# --- the command ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fuel(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_fuel(tmp_path_factory.mktemp("fuel") / "tiny"))


def against(fuel: str, scores: Path):
    ids = scores.parent / "ids"
    ids.write_text(" ".join(map(str, IDS)))
    return run_fake(
        "rocket", "score", fuel, "--ids", str(ids), "--max-context", "16", "--against", str(scores)
    )


COMMAND: dict[str, tuple[Callable[[str], str], str]] = {
    **{
        kind: DAMAGES[kind] for kind in ("rows null", "log_prob huge", "id", "row at the end", "summary null")
    },
    "fewer tokens": (
        lambda t: t.replace(": 9, ", ": 8, ", 1),
        "the same 9 tokens, found 8 tokens that differ",
    ),
    "windows": (lambda t: t.replace('"windows": 1', '"windows": 3'), "windows: expected 1"),
}


@pytest.mark.parametrize("kind", COMMAND)
def test_the_command_refuses_them(fuel: str, scores: Path, kind: str) -> None:
    damage, words = COMMAND[kind]
    scores.write_text(damage(scores.read_text()))
    result = against(fuel, scores)
    result.err = "error: " + result.err.partition("error: ")[2]  # after what was chosen
    check_error(result, 1, f"--against {scores}: ", words)


def test_runs_that_differ_in_one_thing(fuel: str, scores: Path) -> None:
    """What differs is said, and nothing that does not."""
    text = scores.read_text()
    assert "note" not in against(fuel, scores).err
    scores.write_text(text.replace('"max_context": 16', '"max_context": 17'))
    said = against(fuel, scores).err
    assert "note: the runs cut the text differently: max_context 16 here, 17 there\n" in said
    assert "stand before" not in said
    begun = text.replace("[115, null, null, null]", "[115, -2, 0, 115]")
    scores.write_text(begun.replace('"opening": []', '"opening": [5]'))
    said = against(fuel, scores).err
    assert "note: other tokens stand before the text: [] here, [5] there\n" in said
    assert "differently" not in said
