"""rocket-decode with a real engine, on a random fuel and on the one that ships."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cli_tools import Result, environment, run_decode, run_rocket, tree
from rocket import Engine
from rocket.random_fuel import make_fuel

TEXT = "The capital of France is"
README = Path(__file__).parents[1] / "README.md"


@pytest.fixture(scope="module")
def fuel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fuel(tmp_path_factory.mktemp("fuel") / "tiny")


def decode(fuel: Path, *arguments: str, **more) -> Result:
    return run_decode("--fuel", str(fuel), "--backend", "cpu", *arguments, **more)


def as_json(fuel: Path, *arguments: str) -> dict:
    result = decode(fuel, "--json", "--quiet", *arguments)
    assert (result.status, result.err) == (0, ""), result.err
    assert result.out.count("\n") == 1
    return json.loads(result.out)


def test_text_is_what_the_engine_generates(fuel: Path) -> None:
    with Engine(fuel, backend="cpu") as engine:
        ids = engine.tokenizer.encode(TEXT)
        tokens = list(engine.generate(ids, tokens=20))
        text = engine.tokenizer.decode(tokens)
    result = decode(fuel, "--tokens", "20", "--prompt", TEXT)
    assert result.status == 0
    assert result.out.removesuffix("\n") == text.removesuffix("\n")
    whole = as_json(fuel, "--tokens", "20", "--prompt", TEXT)
    assert (whole["prompt_ids"], whole["token_ids"], whole["text"]) == (ids, tokens, text)


def test_the_last_line_sums_up(fuel: Path) -> None:
    result = decode(fuel, "--tokens", "20", "--prompt-ids", "1,2,3", "--ignore-eos")
    last = result.err.splitlines()[-1]
    assert last.startswith("20 tok, ")
    assert "tok/s" in last
    assert "| prefill 3 tok, " in last
    assert re.search(r"\| experts \d+\.\d % hit, \S+ \S+/tok in decode \| \d+ % of read limit$", last)


def test_prompts_from_anywhere_are_the_same(fuel: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_text(TEXT + "\n")
    expected = decode(fuel, "--tokens", "5", "--quiet", "--prompt", TEXT)
    assert decode(fuel, "--tokens", "5", "--quiet", "--prompt-file", str(file)) == expected
    assert decode(fuel, "--tokens", "5", "--quiet", stdin=TEXT.encode() + b"\n") == expected
    ids = as_json(fuel, "--tokens", "0", "--prompt", TEXT)["prompt_ids"]
    assert decode(fuel, "--tokens", "5", "--quiet", "--prompt-ids", ",".join(map(str, ids))) == expected


def test_json(fuel: Path) -> None:
    whole = as_json(fuel, "--tokens", "12", "--prompt-ids", "5,6,7", "--ignore-eos", "--seed", "3")
    assert set(whole) == {
        "fuel",
        "backend",
        "device",
        "prompt_ids",
        "token_ids",
        "text",
        "finish_reason",
        "timing",
        "bytes",
        "experts",
        "seed",
        "boosters",
    }
    assert set(whole["timing"]) == {
        "load_s",
        "prefill_s",
        "prefill_tok_s",
        "decode_s",
        "decode_tok_s",
        "step_ms",
    }
    assert set(whole["experts"]) == {
        "hits",
        "misses",
        "evictions",
        "hit_rate",
        "streamed_bytes",
        "fetch_gb_s",
        "hints",
        "layers",
        "slots",
        "slot_bytes",
        "store",
        "bank_bytes",
        "requested",
        "prefill",
        "decode",
    }
    parts = [whole["experts"][phase] for phase in ("prefill", "decode")]
    for name in ("hits", "misses", "evictions", "streamed_bytes"):
        assert sum(part[name] for part in parts) == whole["experts"][name]
    assert whole["experts"]["store"] is None  # used in place
    assert (whole["backend"], whole["finish_reason"], whole["seed"]) == ("cpu", "length", 3)
    assert len(whole["token_ids"]) == 12
    assert whole["bytes"]["read_limit_gb_s"] > 0
    assert whole["bytes"]["fraction_of_limit"] > 0
    config = json.loads((fuel / "config.json").read_text())["text_config"]
    moe = config["mlp_layer_types"].count("sparse")
    used = whole["experts"]["hits"] + whole["experts"]["misses"]
    # Each decode step uses top-k experts in each MoE layer; the prompt's step at least that.
    assert used >= 12 * moe * config["num_experts_per_tok"]


def test_logits(fuel: Path, tmp_path: Path) -> None:
    file = tmp_path / "l.safetensors"
    whole = as_json(fuel, "--tokens", "6", "--prompt-ids", "5,6,7", "--ignore-eos", "--logits-out", str(file))
    logits = load_file(file)["logits"]
    with Engine(fuel, backend="cpu") as engine:
        expected = engine.logits(whole["prompt_ids"] + whole["token_ids"][:-1])
    assert np.array_equal(logits, expected)
    assert logits[2:].argmax(1).tolist() == whole["token_ids"]
    assert tree(tmp_path) == ["l.safetensors"]


def test_options_that_must_not_change_the_tokens(fuel: Path) -> None:
    common = ("--tokens", "16", "--prompt", TEXT * 4, "--ignore-eos")
    expected = as_json(fuel, *common)["token_ids"]
    for more in (
        ("--prefill-chunk", "3"),
        ("--threads", "1"),
        ("--max-context", "4096"),
        ("--profile",),
        ("--diagnostics",),
        ("--seed", "9"),
    ):
        result = decode(fuel, "--json", *common, *more)
        assert json.loads(result.out)["token_ids"] == expected, more


def test_sampling(fuel: Path) -> None:
    common = ("--tokens", "16", "--prompt", TEXT, "--ignore-eos")
    greedy = as_json(fuel, *common)["token_ids"]
    assert as_json(fuel, *common, "--temperature", "0", "--seed", "1")["token_ids"] == greedy
    assert as_json(fuel, *common, "--temperature", "1", "--top-k", "1")["token_ids"] == greedy
    hot = [as_json(fuel, *common, "--temperature", "1.5", "--seed", s)["token_ids"] for s in "112"]
    assert hot[0] == hot[1] != hot[2]


def test_profile_and_diagnostics(fuel: Path) -> None:
    arguments = ("--tokens", "4", "--prompt", TEXT, "--ignore-eos", "--profile", "--diagnostics")
    result = decode(fuel, *arguments)
    assert result.status == 0
    assert "prefill, " in result.err
    assert "decode, a step of 3" in result.err
    assert "router entropy, mean over 5 MoE layers" in result.err
    whole = json.loads(decode(fuel, *arguments, "--json").out)
    assert len(whole["diagnostics"]["stream_mean_rms"]) == 8
    assert all(rms > 0 for rms in whole["diagnostics"]["stream_mean_rms"])
    assert 0 < whole["diagnostics"]["mean_router_entropy"] <= np.log(4) + 1e-6
    shares = [_share_of_stages(whole)]
    # Nothing large is left out. What interrupts the program between two stages is no stage's: one of several
    # runs has to show it.
    while shares[-1] <= 0.5 and len(shares) < 6:
        shares.append(_share_of_stages(json.loads(decode(fuel, *arguments, "--json").out)))
    assert shares[-1] > 0.5, shares


def _share_of_stages(whole: dict[str, Any]) -> float:
    """Of the time of the decode steps. Nothing is counted twice: it is never more than all of it."""
    total = sum(s["ms"] for s in whole["profile"]["decode"] if not s["of_which"])
    share = total / (whole["timing"]["decode_s"] * 1000)
    assert 0 < share <= 1
    return share


def test_the_fuel_that_ships_is_the_default() -> None:
    """The README's first command and its transcript, token for token."""
    result = run_decode("--tokens", "20", "--prompt", "The capital of France is")
    assert result.status == 0
    assert result.err.startswith("fuel: sparkler, the one that ships (--fuel)\n")
    shown = re.search(r"```text\n(The capital of France is.*?)\n```", README.read_text(), re.DOTALL)
    assert shown
    assert "The capital of France is" + result.out == shown[1] + "\n"
    named = run_decode("--fuel", "sparkler", "--tokens", "20", "--prompt", "The capital of France is")
    assert named.out == result.out


def test_the_shipped_fuel_continues_code() -> None:
    result = run_decode("--tokens", "40", "--prompt", "def fibonacci(n):")
    assert result.status == 0
    first = result.out.split("\n\n\n")[0]
    assert "return fibonacci(n - 1) + fibonacci(n - 2)" in first
    ast.parse("def fibonacci(n):" + first)


def test_a_random_fuel_is_made_once(tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    code = "from rocket.cli import main; main()"
    few = ["bench", "decode", "--preset", "tiny", "--prompt", "4", "--tokens", "2", "--pairs", "1", "--json"]
    command = [sys.executable, "-c", code, *few, "--read-seconds", "0.01"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    runs = [subprocess.Popen(command, env=environment(**env), **pipes) for _ in range(2)]
    results = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], results
    made = list((tmp_path / "rocket" / "fuels").iterdir())
    assert len(made) == 1
    assert made[0].name.startswith("random-tiny-")
    before = made[0].stat().st_mtime_ns
    assert subprocess.run(command, env=environment(**env), capture_output=True, check=False).returncode == 0
    assert made[0].stat().st_mtime_ns == before


def test_version_and_help() -> None:
    version = run_decode("--version")
    assert version.status == 0
    assert version.out.startswith("rocket-decode ")
    assert run_rocket("--version").out.startswith("rocket ")
    text = run_decode("--help")
    assert (text.status, text.err) == (0, "")
    for option in ("--fuel", "--prompt-ids", "--logits-out", "--max-context"):
        assert option in text.out


def test_score_and_bench(fuel: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "t", tmp_path / "o.json"
    text.write_text("The capital of France is Paris.\nIt has many rivers.\n" * 8)
    score = ("score", str(fuel), "--text", str(text), "--backend", "cpu")
    first = run_rocket(*score, "--out", str(out))
    assert first.status == 0, first.err
    whole = json.loads(out.read_text())
    with Engine(fuel, backend="cpu") as engine:
        ids = [row[0] for row in whole["rows"]]
        assert ids == engine.tokenizer.encode(text.read_text())
        logits = engine.logits(ids).astype(np.float64)
    for i in range(1, len(ids)):
        row = logits[i - 1]
        expected = row[ids[i]] - row.max() - np.log(np.exp(row - row.max()).sum())
        assert whole["rows"][i][1] == pytest.approx(expected, abs=1e-9)
        assert whole["rows"][i][3] == row.argmax()
    same = run_rocket(*score, "--against", str(out))
    assert same.status == 0
    assert "mean |delta log p|  0.000000" in same.out
    windows = run_rocket(*score, "--against", str(out), "--max-context", "64")
    assert "windows of 64 tokens" in windows.out
    assert "note: the runs cut the text differently" in windows.err
    bench = run_rocket(
        "bench", "decode", "--fuel", str(fuel), "--pairs", "1", "--tokens", "8", "--read-seconds", "0.05"
    )
    assert bench.status == 0, bench.err
    assert "% of this machine's read rate" in bench.out
