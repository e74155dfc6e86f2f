"""The commands over a scripted stand-in for the engine: what a real model cannot be made to do at will."""

import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cli_tools import FAKE, check_error, environment, run_fake, run_rocket, tree
from fake_core import log_prob
from rocket.random_fuel import make_fuel


@pytest.fixture(scope="module")
def fuel(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_fuel(tmp_path_factory.mktemp("fuel") / "tiny"))


def special(fuel: str, name: str) -> int:
    vocab = json.loads((Path(fuel) / "tokenizer.json").read_text())["added_tokens"]
    return next(token["id"] for token in vocab if token["content"] == name)


def decode(fuel: str, *arguments: str, script: dict | None = None, stdin: bytes = b""):
    return run_fake("decode", "--fuel", fuel, *arguments, script=script, stdin=stdin)


def start(fuel: str, *arguments: str, script: dict, **more) -> subprocess.Popen:
    env = environment(FAKE_CORE=json.dumps(script))
    command = [sys.executable, str(FAKE), "decode", "--fuel", fuel, *arguments]
    return subprocess.Popen(command, env=env, **more)


def test_text_goes_out_character_by_character(fuel: str) -> None:
    script = {"script": list("é😀!".encode()), "step_seconds": 0.05}
    with start(
        fuel, "--prompt", "x", "--tokens", "7", "--quiet", script=script, stdout=subprocess.PIPE
    ) as run:
        pieces = []
        while data := os.read(run.stdout.fileno(), 100):
            pieces.append(data)
    assert run.returncode == 0
    assert b"".join(pieces).decode() == "é😀!\n"
    assert len(pieces) > 1  # it did not wait for the end
    for piece in pieces:
        piece.decode()  # never a part of a character


def test_unfinished_characters_at_the_end(fuel: str) -> None:
    result = decode(fuel, "--prompt", "x", "--tokens", "3", script={"script": [65, 0xE2, 0x82]})
    assert result.out == "A\N{REPLACEMENT CHARACTER}\n"


def test_the_end_token_stops_and_is_not_text(fuel: str) -> None:
    script = {"script": [65, 66, special(fuel, "<|user|>"), 67]}
    arguments = ("--prompt", "x", "--tokens", "4", "--json", "--quiet")
    stopped = json.loads(decode(fuel, *arguments, script=script).out)
    assert (stopped["text"], stopped["finish_reason"]) == ("AB", "stop")
    assert stopped["token_ids"] == script["script"][:3]
    going = json.loads(decode(fuel, *arguments, "--ignore-eos", script=script).out)
    assert (going["text"], going["finish_reason"]) == ("ABC", "length")
    assert going["token_ids"] == script["script"]


def test_newline_at_the_end_of_the_text(fuel: str) -> None:
    assert decode(fuel, "--prompt", "x", "--tokens", "1", script={"script": [65]}).out == "A\n"
    assert decode(fuel, "--prompt", "x", "--tokens", "2", script={"script": [65, 10]}).out == "A\n"


def test_no_tokens_feeds_the_prompt_only(fuel: str, tmp_path: Path) -> None:
    file = tmp_path / "l"
    result = decode(fuel, "--prompt-ids", "1,2,3", "--tokens", "0", "--logits-out", str(file))
    assert (result.status, result.out) == (0, "")
    assert load_file(file)["logits"].shape == (3, 1024)
    assert "| prefill 3 tok," in result.err


def test_every_fed_token_has_a_row_of_logits(fuel: str, tmp_path: Path) -> None:
    file = tmp_path / "l"
    script = {"script": [65, 66, 67]}
    arguments = (
        "--prompt-ids",
        "1,2,3,4,5",
        "--tokens",
        "3",
        "--prefill-chunk",
        "2",
        "--logits-out",
        str(file),
    )
    assert decode(fuel, *arguments, script=script).status == 0
    logits = load_file(file)["logits"]
    assert logits.shape == (7, 1024)
    expected = [[log_prob(token, t) for t in range(1024)] for token in (1, 2, 3, 4, 5, 65, 66)]
    assert np.allclose(logits, expected, atol=1e-5)
    assert tree(tmp_path) == ["l"]


def test_an_answer_cut_while_thinking_says_so(fuel: str) -> None:
    think, close = special(fuel, "<think>"), special(fuel, "</think>")
    said = "the answer was cut inside <think>"
    assert said in decode(fuel, "--prompt", "x", "--chat", "--tokens", "2").err
    assert said not in decode(fuel, "--prompt", "x", "--tokens", "2").err
    assert said in decode(fuel, "--prompt", "x", "--tokens", "2", script={"script": [think, 65]}).err
    done = decode(fuel, "--prompt", "x", "--chat", "--tokens", "3", script={"script": [65, close, 66]})
    assert said not in done.err
    assert done.out == "A</think>B\n"
    early = decode(fuel, "--prompt", "x", "--chat", script={"script": [65, special(fuel, "<|user|>")]})
    assert said in early.err


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}aaaa{% endfor %}{% endfor %}",
            "at most 16 MiB",
        ),
        ("{# nothing #}", "found no tokens"),
    ],
)
def test_templates_are_to_blame_for_what_they_write(tmp_path: Path, template: str, words: str) -> None:
    made = make_fuel(tmp_path / "f")
    (made / "chat_template.jinja").write_text(template)
    check_error(decode(str(made), "--prompt", "x", "--chat"), 1, "chat_template.jinja: expected", words)


def test_chat_renders_the_template(fuel: str) -> None:
    result = json.loads(decode(fuel, "--prompt", "a", "--chat", "--tokens", "1", "--json", "--quiet").out)
    names = ("[gMASK]", "<sop>", "<|user|>", None, "<|assistant|>", "<think>")
    assert result["prompt_ids"] == [97 if n is None else special(fuel, n) for n in names]


def test_profile_and_diagnostics(fuel: str) -> None:
    script = {
        "profile": [["KDA, 6 layers", 3.0, False], ["MoE, 5 layers", 9.0, False], ["streaming", 6.0, True]],
        "diagnostics": [[0.5, -1.0], [1.5, 1.25]],
    }
    arguments = ("--prompt", "x", "--tokens", "4", "--profile", "--diagnostics", "--quiet")
    result = decode(fuel, *arguments, script=script)
    assert result.out == "AAAA\n"
    lines = [line.split() for line in result.err.splitlines()]
    assert ["MoE,", "5", "layers", "3.000", "75.0", "%"] in lines  # of three decode steps
    assert ["of", "which", "streaming", "2.000"] in lines
    assert ["sum", "4.000"] in lines
    assert ["1", "1.5", "1.2500"] in lines
    assert "router entropy, mean over 1 MoE layers: 1.2500 nats; ln 8 = 2.0794" in result.err
    whole = json.loads(decode(fuel, *arguments, "--json", script=script).out)
    assert whole["profile"]["decode"][2] == {"stage": "streaming", "ms": 6.0, "of_which": True}
    assert whole["diagnostics"] == {
        "stream_mean_rms": [0.5, 1.5],
        "router_entropy": [None, 1.25],
        "mean_router_entropy": 1.25,
    }


def test_automatic_choices_are_said_one_a_line(fuel: str) -> None:
    script = {"choices": ["backend: cpu, as no GPU was found", "slots: 16, all experts"]}
    result = decode(fuel, "--prompt", "x", "--tokens", "2", script=script)
    context = "context: 3 tokens, the prompt's and --tokens (--max-context)"
    assert result.err.splitlines()[:3] == [context, *script["choices"]]
    assert len(result.err.splitlines()) == 4  # and the closing line
    assert decode(fuel, "--prompt", "x", "--tokens", "2", "--quiet", script=script).err == ""


def test_the_json_object(fuel: str) -> None:
    arguments = ("--prompt-ids", "1,2", "--tokens", "5", "--json", "--seed", "7")
    result = json.loads(decode(fuel, *arguments, script={"step_seconds": 0.001}).out)
    assert result["fuel"] == fuel
    assert result["prompt_ids"] == [1, 2]
    assert result["experts"] == {
        "hits": 36,
        "misses": 4,
        "evictions": 4,
        "hit_rate": 0.9,
        "streamed_bytes": 4 << 20,
        "fetch_gb_s": None,
        "hints": {"taken": 0},
        "layers": [],
        "slots": 16,
        "slot_bytes": 1024,
        "store": None,
        "bank_bytes": 0,
        "requested": None,
        "prefill": {"hits": 0, "misses": 0, "evictions": 0, "hit_rate": None, "streamed_bytes": 0},
        "decode": {"hits": 36, "misses": 4, "evictions": 4, "hit_rate": 0.9, "streamed_bytes": 4 << 20},
    }
    (booster,) = result["boosters"]
    assert (booster["experts_owned"], booster["expert_bytes"], booster["rows_sent"]) == (16, 16384, 0)
    timing = result["timing"]
    assert timing["decode_tok_s"] == pytest.approx(4 / timing["decode_s"])
    assert timing["prefill_tok_s"] == pytest.approx(2 / timing["prefill_s"])
    assert timing["step_ms"]["min"] <= timing["step_ms"]["median"] <= timing["step_ms"]["max"]
    assert result["bytes"]["per_token"] == 10**6
    assert result["bytes"]["read_limit_gb_s"] == 10.0
    assert result["bytes"]["fraction_of_limit"] == pytest.approx(1e6 * timing["decode_tok_s"] / 10e9)
    assert result["seed"] == 7


def test_the_read_limit_is_left_out_where_it_is_none(fuel: str, tmp_path: Path) -> None:
    for script in ({"no_memory": True}, {"read_rate": 1e-9}):  # no memory to measure it; above 1
        file = tmp_path / "l"
        arguments = ("--prompt", "x", "--tokens", "3", "--logits-out", str(file))
        result = decode(fuel, *arguments, "--json", script=script)
        assert (result.status, json.loads(result.out)["bytes"]["fraction_of_limit"]) == (0, None)
        assert "read limit" not in result.err
        assert len(load_file(file)["logits"]) == 3
    bench = ("bench", "decode", "--fuel", fuel, "--pairs", "1", "--tokens", "4", "--prompt", "8")
    assert run_fake("rocket", *bench, script={"no_memory": True}).status == 0
    cached = run_fake("rocket", *bench, script={"read_rate": 1e-9})
    assert "limit      none: the weights fit the cache" in cached.out


def test_a_fuel_without_a_tokenizer_prints_ids(tmp_path: Path) -> None:
    fuel = make_fuel(tmp_path / "f")
    (fuel / "tokenizer.json").unlink()
    script = {"script": [65, 300]}
    result = decode(str(fuel), "--prompt-ids", "1", "--tokens", "3", script=script)
    assert result.out == "65,300,65\n"
    assert "no tokenizer.json" in result.err
    whole = decode(str(fuel), "--prompt-ids", "1", "--tokens", "3", "--json", "--quiet", script=script)
    assert json.loads(whole.out)["text"] is None
    check_error(decode(str(fuel), "--prompt", "x"), 1, "tokenizer.json", "not found")


def test_sampling_from_the_fuel_is_said(fuel: str) -> None:
    said = "sampling: temperature 1, top-k 0, top-p 0.95, min-p 0 (generation_config.json)"
    assert said in decode(fuel, "--prompt", "x", "--tokens", "1", "--sampling", "fuel").err
    changed = decode(fuel, "--prompt", "x", "--tokens", "1", "--sampling", "fuel", "--temperature", "0.5").err
    assert "temperature 0.5, top-k 0, top-p 0.95" in changed
    implied = decode(fuel, "--prompt", "x", "--tokens", "1", "--top-k", "5").err
    assert "sampling: temperature 1, since" in implied


def test_less_context_than_needed_is_an_error(fuel: str) -> None:
    result = decode(fuel, "--prompt-ids", "1,2", "--tokens", "9", script={"max_context": 10})
    check_error(result, 1, "11 tokens are needed", "room for 10")


# --- being stopped ---


def test_ctrl_c_keeps_what_was_printed(fuel: str, tmp_path: Path) -> None:
    script = {"script": [65, 66, 67, 68], "interrupt_at": 2}
    result = decode(
        fuel, "--prompt", "x", "--tokens", "100", "--logits-out", str(tmp_path / "l"), script=script
    )
    assert result.status == 130
    assert result.out in ("AB\n", "ABC\n")  # the signal is seen during the second step or after it
    assert "Traceback" not in result.err
    assert "| prefill 1 tok," in result.err
    assert len(load_file(tmp_path / "l")["logits"]) in (2, 3)  # the prompt's, and the steps that ended
    assert tree(tmp_path) == ["l"]


def test_ctrl_c_completes_the_json_object(fuel: str) -> None:
    result = decode(fuel, "--prompt", "x", "--json", script={"interrupt_at": 2})
    whole = json.loads(result.out)
    assert (result.status, whole["finish_reason"]) == (130, "interrupted")
    assert whole["text"] == "A" * len(whole["token_ids"])
    assert len(whole["token_ids"]) in (2, 3)


def test_ctrl_c_is_not_called_a_cut(fuel: str) -> None:
    result = decode(fuel, "--prompt", "x", "--chat", script={"interrupt_at": 2})
    assert (result.status, "the answer was cut" in result.err) == (130, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_leaves_no_file(fuel: str, tmp_path: Path, number: signal.Signals) -> None:
    arguments = ("--prompt", "x", "--tokens", "1000", "--logits-out", str(tmp_path / "l"))

    def listen() -> None:  # tests that run under nohup pass on that a hang-up is to be ignored
        signal.signal(number, signal.SIG_DFL)

    more = {"stdout": subprocess.PIPE, "preexec_fn": listen}
    with start(fuel, *arguments, script={"step_seconds": 0.02}, **more) as run:
        assert os.read(run.stdout.fileno(), 1) == b"A"
        opened = [str(link.readlink()) for link in Path(f"/proc/{run.pid}/fd").iterdir()]
        assert any(name.startswith(str(tmp_path)) for name in opened)
        run.send_signal(number)
        run.stdout.read()  # to its end: a reader that went away first would be another cause to stop
    assert run.returncode == 128 + number
    assert tree(tmp_path) == []


@pytest.mark.parametrize("command", ["decode", "rocket"])
def test_ctrl_c_while_modules_load(tmp_path: Path, command: str) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"from rocket.entry import {command}; {command}()"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environment(PYTHONPATH=path), **pipes) as run:
        assert run.stdout.readline() == b"loading\n"
        run.send_signal(signal.SIGINT)
        err = run.stderr.read()
    assert (run.returncode, err) == (130, b"")


def test_a_reader_that_goes_away(fuel: str) -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    arguments = ("--prompt", "x", "--tokens", "1000", "--quiet")
    with start(fuel, *arguments, script={"step_seconds": 0.001}, **pipes) as run:
        assert os.read(run.stdout.fileno(), 1) == b"A"
        run.stdout.close()
        err = run.stderr.read()
    assert (run.returncode, err) == (141, b"")


def in_a_shell(fuel: str, redirection: str) -> subprocess.CompletedProcess:
    command = f"{sys.executable} {FAKE} decode --fuel {fuel} --prompt x --tokens 3 {redirection}"
    return subprocess.run(
        command, shell=True, env=environment(), capture_output=True, check=False, timeout=60
    )


def test_a_disk_that_is_full(fuel: str) -> None:
    done = in_a_shell(fuel, "--quiet > /dev/full")
    message = b"error: standard output: cannot write: No space left on device\n\nhint: make room"
    assert (done.returncode, done.stderr[: len(message)]) == (1, message)
    done = in_a_shell(fuel, "--quiet --logits-out /dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: --logits-out: cannot write /dev/full: No space left on device\n")


def test_closed_streams(fuel: str) -> None:
    assert in_a_shell(fuel, "<&-").returncode == 0
    for more in ("", "--json", "--version", "--help"):
        done = in_a_shell(fuel, f"{more} --quiet >&-")
        message = b"error: standard output: cannot write: it is closed\n"
        assert (done.returncode, message in done.stderr) == (1, True), (more, done.stderr)
    assert in_a_shell(fuel, "2>&-").stdout == b"AAA\n"


def on_a_terminal(fuel: str, env: dict[str, str], *arguments: str) -> str:
    """What standard error shows when it is a terminal."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 4096):
                shown.extend(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    command = [sys.executable, str(FAKE), "decode", "--fuel", fuel, *arguments]
    subprocess.run(
        command, stderr=theirs, stdout=subprocess.PIPE, env=environment(**env), check=False, timeout=60
    )
    time.sleep(0.1)
    os.close(theirs)
    reader.join()
    os.close(ours)
    return shown.decode()


def test_colour_and_progress_on_terminals_only(fuel: str) -> None:
    plain = {"TERM": "xterm", "NO_COLOR": "1"}
    wrong, right = ("--prompt", "x", "--tokens", "-1"), ("--prompt", "x", "--tokens", "2")
    assert "\x1b[1;31merror:" in on_a_terminal(fuel, {"TERM": "xterm"}, *wrong)
    assert "\x1b[" not in on_a_terminal(fuel, plain, *wrong)
    assert "loading" in on_a_terminal(fuel, {"TERM": "xterm"}, *right)
    assert "\x1b[3" not in on_a_terminal(fuel, plain, *right)  # a bar moves the cursor, but has no colour
    assert "loading" not in on_a_terminal(fuel, {"TERM": "xterm"}, *right, "--quiet")
    assert "loading" not in decode(fuel, *right).err


# --- scores ---


def score(fuel: str, *arguments: str, script: dict | None = None):
    return run_fake("rocket", "score", fuel, *arguments, script=script)


@pytest.mark.parametrize("room", [4, 7, 100])
def test_scores_are_the_models_in_any_windows(fuel: str, tmp_path: Path, room: int) -> None:
    """This model looks one token back, so windows must not change a thing."""
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 1024, 23)]
    file = tmp_path / "ids"
    file.write_text(" ".join(map(str, ids)))
    result = score(fuel, "--ids", str(file), "--json", "--max-context", str(room))
    whole = json.loads(result.out)
    assert whole["rows"][0] == [ids[0], None, None, None]
    for i in range(1, len(ids)):
        expected = [log_prob(ids[i - 1], t) for t in range(1024)]
        of = expected[ids[i]]
        rank = sum(p > of or (p == of and t < ids[i]) for t, p in enumerate(expected))
        best = max(range(1024), key=lambda t: (expected[t], -t))
        token, value, found_rank, found_best = whole["rows"][i]
        assert (token, found_rank, found_best) == (ids[i], rank, best)
        assert value == pytest.approx(of, abs=1e-5)
    mean = sum(row[1] for row in whole["rows"][1:]) / 22
    assert whole["summary"]["mean_log_prob"] == pytest.approx(mean)
    assert whole["summary"]["perplexity"] == pytest.approx(math.exp(-mean))
    assert whole["summary"]["bits_per_byte"] is None
    assert whole["max_context"] == room


def test_bits_a_byte(fuel: str, tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("ééa")
    out = score(fuel, "--text", str(file), "--json").out
    whole = json.loads(out)
    total = sum(row[1] for row in whole["rows"][1:])
    assert [row[0] for row in whole["rows"]] == [0xC3, 0xA9, 0xC3, 0xA9, 0x61]
    # The first token is a part of the first character; the four bytes of the others are scored.
    assert whole["summary"]["bits_per_byte"] == pytest.approx(-total / math.log(2) / 4)


def test_the_gates_verdict_is_the_exit_status(fuel: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("some text\nof two lines\n")
    assert score(fuel, "--text", str(text), "--out", str(out)).status == 0
    against = ("--text", str(text), "--against", str(out))
    same = score(fuel, *against)
    assert same.status == 0
    assert "gate                passes" in same.out
    assert score(fuel, *against, script={"shift": 0.01}).status == 0
    moved = score(fuel, *against, script={"shift": 0.03})
    assert moved.status == 1
    assert "gate                FAILS" in moved.out
    assert "Traceback" not in moved.err
    summary = json.loads(score(fuel, *against, "--json", script={"shift": 1.5}).out)["summary"]
    assert summary["comparison"]["mean_abs_delta"] == pytest.approx(1.5)
    assert summary["comparison"]["over_1_nat"] == summary["scored"]


def test_log_probabilities_that_are_no_numbers(fuel: str, tmp_path: Path) -> None:
    text, out, fine = tmp_path / "text", tmp_path / "out.json", tmp_path / "fine.json"
    text.write_text("some text")
    broken = {"nan": True}
    check_error(
        score(fuel, "--text", str(text), "--out", str(out), script=broken), 1, "token 4 (id 116) is nan"
    )
    assert not out.exists()
    score(fuel, "--text", str(text), "--out", str(fine))
    failed = score(fuel, "--text", str(text), "--against", str(fine), "--out", str(out), script=broken)
    assert (failed.status, "gate                FAILS" in failed.out) == (1, True)
    # Broken here and there alike is broken.
    again = score(fuel, "--text", str(text), "--against", str(out), script=broken)
    assert (again.status, "not finite          1 tokens" in again.out) == (1, True)
    fine.write_text(re.sub(",\n\\[116.*(?=\n\\])", "", fine.read_text(), flags=re.DOTALL))
    check_error(score(fuel, "--text", str(text), "--against", str(fine)), 1, "expected 5 rows, found 4")


def test_runs_over_other_texts_are_not_compared(fuel: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("some text")
    score(fuel, "--text", str(text), "--out", str(out))
    text.write_text("some test")
    check_error(score(fuel, "--text", str(text), "--against", str(out)), 1, "tokens that differ")


def test_a_file_and_a_summary(fuel: str, tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("some text")
    result = json.loads(score(fuel, "--text", str(text), "--out", str(out), "--json").out)
    whole = json.loads(out.read_text())
    assert "rows" not in result
    assert result["summary"] == whole["summary"]


# --- bench ---


BENCH = ("bench", "decode", "--pairs", "3", "--tokens", "4", "--prompt", "8")


def test_bench(fuel: str) -> None:
    arguments = (*BENCH, "--fuel", fuel)
    result = run_fake("rocket", *arguments, "--json", script={"step_seconds": 0.001})
    whole = json.loads(result.out)
    assert len(whole["pairs"]) == 3
    assert whole["fraction_of_read_rate"] == pytest.approx(1e6 * whole["decode_tok_s"] / 10e9)
    assert whole["decode_gb_s"] == pytest.approx(1e6 * whole["decode_tok_s"] / 1e9)
    assert whole["step_us"] == pytest.approx(1e6 / whole["decode_tok_s"])
    assert whole["step_us"] >= 1000  # a step sleeps for a millisecond
    assert [pair["step_us"] for pair in whole["pairs"]] == [
        pytest.approx(1e6 / pair["decode_tok_s"]) for pair in whole["pairs"]
    ]
    assert whole["read_error"] is None
    text = run_fake("rocket", *arguments, script={"step_seconds": 0.001})
    assert "% of this machine's read rate, 10.0 GB/s (median of 3 pairs)" in text.out
    assert re.search(r"^a token    .* of weights, \d\.\d GB/s$", text.out, re.MULTILINE)
    assert "read rate  not" not in text.out


def test_bench_of_several_streams(fuel: str) -> None:
    """Streams share what a step reads, so one token's bytes times all tokens would be a rate of nothing."""
    arguments = (*BENCH, "--fuel", fuel, "--streams", "4")
    whole = json.loads(run_fake("rocket", *arguments, "--json", script={"step_seconds": 0.001}).out)
    assert (whole["streams"], whole["token_bytes"], whole["read_gb_s"]) == (4, 10**6, 10.0)
    assert whole["decode_gb_s"] is None  # else it could exceed what the memory does
    assert whole["fraction_of_read_rate"] is None
    assert whole["step_us"] >= 1000
    assert whole["decode_tok_s"] == pytest.approx(4e6 / whole["step_us"])
    text = run_fake("rocket", *arguments, script={"step_seconds": 0.001}).out
    assert "4 tokens for each of 4 streams" in text
    assert "GB/s" not in text


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ({"backend": "cuda", "no_memory": True}, "expected a buffer of at least 4 bytes, found room for 2"),
        ({"backend": "cuda", "no_device": True}, "no device to measure was found"),
        ({"no_memory": True}, "the system refused 256.00 MiB"),
    ],
)
def test_bench_says_why_there_is_no_read_rate(fuel: str, script: dict, words: str) -> None:
    arguments = (*BENCH, "--fuel", fuel)
    result = run_fake("rocket", *arguments, "--json", script=script)
    whole = json.loads(result.out)
    assert (result.status, whole["read_gb_s"], whole["fraction_of_read_rate"]) == (0, None, None)
    assert words in whole["read_error"]
    assert all(pair["read_gb_s"] is None and words in pair["read_error"] for pair in whole["pairs"])
    text = run_fake("rocket", *arguments, script=script).out
    said = [line for line in text.splitlines() if line.startswith("read rate  not measured in 3 of 3 pairs:")]
    assert len(said) == 1
    assert words in said[0]
    assert "limit" not in text


def test_more_streams_than_a_step_has_rows(fuel: str) -> None:
    """The hint is an option of this command, not of rocket-decode, and what it says does work."""
    arguments = (*BENCH, "--fuel", fuel, "--streams", "100")
    result = run_fake("rocket", *arguments, "--quiet")
    check_error(result, 2, "--streams: expected at most 64, the rows of a step, found 100")
    hint = result.err.split("hint: ")[1]
    assert "--chunk 100" in hint
    assert run_fake("rocket", *arguments, "--chunk", "100", "--quiet").status == 0
    check_error(run_fake("rocket", *BENCH, "--streams", "65537"), 2, "--streams", "from 1 to 65536")


@pytest.mark.parametrize("command", [("bench", "decode", "--fuel"), ("score",)])
def test_hints_name_the_commands_own_options(fuel: str, tmp_path: Path, command: tuple[str, ...]) -> None:
    text = tmp_path / "text"
    text.write_text("some text")
    more = ("--text", str(text)) if command == ("score",) else ()
    refused = {"refuses": ["no room", "lower --max-context or --prefill-chunk, or free memory"]}
    result = run_fake("rocket", *command, fuel, *more, script=refused)
    check_error(result, 1, "no room")
    known = run_fake("rocket", *command[:2], "--help").out
    named = re.findall("--[a-z-]+", result.err.split("hint: ")[1])
    assert "--chunk" in named
    assert [option for option in named if not re.search(rf"{option}\b(?!-)", known)] == []


def test_bench_needs_no_text(tmp_path: Path) -> None:
    """So it does without what only texts need, or with what is left of it."""
    folder = make_fuel(tmp_path / "tiny")
    small = ("--pairs", "1", "--tokens", "2", "--prompt", "4", "--read-seconds", "0.01", "--backend", "cpu")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        file = folder / name
        data = file.read_bytes()
        for left in (data[: len(data) // 2], None):
            file.unlink()
            if left is not None:
                file.write_bytes(left)
            result = run_rocket("bench", "decode", "--fuel", str(folder), *small, "--quiet", "--json")
            assert (result.status, result.err) == (0, ""), (name, left is None)
            assert json.loads(result.out)["decode_tok_s"] > 0
