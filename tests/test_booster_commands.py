"""rocket score and rocket bench decode with several boosters."""

import json
import sys
from pathlib import Path

import pytest

from cli_tools import Result, check_error, run_rocket
from mpi_tools import run_ranks

pytestmark = pytest.mark.mpi

ROCKET = (sys.executable, "-c", "from rocket.cli import main; main()")
TEXT = (
    "Serbia is a country. Its capital is Belgrade.\nimport numpy as np\n\n\ndef mean(x):\n    return x\n" * 4
)


def ranks_of(ranks: int, *arguments: str) -> Result:
    return run_ranks([(ranks, (*ROCKET, *arguments, "--threads", "1"))])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text"
    file.write_text(TEXT)
    return file


@pytest.mark.parametrize("ranks", [2, 3])
def test_score_is_that_of_one_booster(ranks: int, text: Path, tmp_path: Path) -> None:
    options = ("score", "sparkler", "--text", str(text), "--max-context", "64")
    files = [tmp_path / "one", tmp_path / "several"]
    assert run_rocket(*options, "--out", str(files[0])).status == 0
    several = ranks_of(ranks, *options, "--boosters", str(ranks), "--out", str(files[1]), "--json")
    assert several.status == 0, several.err
    one, many = (json.loads(file.read_text()) for file in files)
    assert one["summary"]["scored"] > 100
    assert many["rows"] == one["rows"]
    assert json.loads(several.out)["summary"]["mean_log_prob"] == one["summary"]["mean_log_prob"]


def test_score_with_split_dense_weights(text: Path, tmp_path: Path) -> None:
    options = ("score", "sparkler", "--text", str(text), "--max-context", "64")
    file = tmp_path / "one"
    assert run_rocket(*options, "--out", str(file)).status == 0
    shared = ("--boosters", "2", "--split-dense")
    several = ranks_of(
        2, *options, *shared, "--against", str(file), "--json", "--out", str(tmp_path / "many")
    )
    assert several.status == 0, several.err
    found = json.loads(several.out)["summary"]["comparison"]
    assert found["max_abs_delta"] < 1e-3
    assert found["top1_agreement"] == 1


@pytest.mark.parametrize("dense", [(), ("--split-dense",)])
def test_bench_counts_what_a_booster_reads(dense: tuple[str, ...]) -> None:
    options = (
        "--prompt",
        "8",
        "--tokens",
        "4",
        "--pairs",
        "1",
        "--read-seconds",
        "0.02",
        "--json",
        "--quiet",
    )
    bench = ("bench", "decode", "--fuel", "sparkler", *options)
    one = json.loads(run_rocket(*bench).out)
    several = ranks_of(2, *bench, "--boosters", "2", "--streams", "2", *dense)
    assert (several.status, several.err) == (0, "")
    found = json.loads(several.out)
    assert [booster["rank"] for booster in found["boosters"]] == [0, 1]
    assert [booster["rank"] for booster in one["boosters"]] == [0]
    assert all(booster["rows_sent"] > 0 for booster in found["boosters"])
    assert found["token_bytes"] < (0.6 if dense else 0.95) * one["token_bytes"]


def test_what_is_refused(text: Path) -> None:
    score = ("score", "sparkler", "--text", str(text), "--quiet")
    check_error(ranks_of(2, *score), 2, "--boosters: expected 2, the ranks that were started, found none")
    check_error(
        ranks_of(2, *score, "--boosters", "3"), 2, "--boosters: expected as many ranks as boosters, 3"
    )
    check_error(ranks_of(2, *score, "--boosters", "2", "--chunk", "-1"), 2, "--chunk")
    check_error(
        ranks_of(2, "score", "nonsuch", "--text", str(text), "--boosters", "2"),
        1,
        "fuel nonsuch: no such directory",
        "no such",
    )
    bench = ("bench", "decode", "--boosters", "2", "--quiet")
    check_error(ranks_of(2, *bench), 2, "--fuel: expected a fuel for several boosters, found none")
