"""A bounded cache of experts over the fuel's files: the same bits as experts in place for every size, the
hits of the replayed trace, and errors rather than wrong tokens when the files change."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import EXACT
from cli_tools import check_error, environment, run_decode, run_rocket
from golden_fuels import CASES
from rocket import Engine, FuelError, InputError, PlanError, _core
from rocket._core import Row
from rocket.report import format_bytes
from rocket.routing_file import read_any_routing

SPARKLER = Path(__file__).parents[1] / "fuels" / "sparkler"
LONG = "4090"  # of sparkler's 4096: some seconds
GREEDY = _core.SamplingParams()
SIZES = ("smallest", "one more", "25 %", "50 %", "all")


def engine(fuel: Path, **options: Any) -> _core.CoreEngine:
    return _core.CoreEngine(
        str(fuel), backend="cpu", threads=2, max_context=160, max_rows=64, max_streams=6, **EXACT, **options
    )


def moe_layers(fuel: Path) -> list[int]:
    return [layer for layer, routed in enumerate(_core.read_config(str(fuel))["is_moe"]) if routed]


def slots_of(size: str, info: dict[str, Any]) -> int:
    experts = info["moe_layers"] * info["experts"]
    return {
        "smallest": info["topk"],
        "one more": info["topk"] + 1,
        "25 %": max(info["topk"], experts // 4),
        "50 %": experts // 2,
        "all": experts,
    }[size]


def scenario(core: _core.CoreEngine, seed: int) -> tuple[list[np.ndarray], list[int]]:
    """Prompts in chunks of several sizes, batches, a fork, a mixed step, a rollback: logits and tokens."""
    rng = np.random.default_rng(seed)
    vocab = core.info()["vocab"]
    logits, tokens = [], []

    def some(count: int) -> list[int]:
        return rng.integers(0, vocab, count).tolist()

    streams = [core.open() for _ in range(3)]
    for stream, length, chunk in zip(streams, (50, 23, 9), (64, 7, 1), strict=True):
        logits.append(core.feed(stream, some(length), logits="all", chunk=chunk))
    streams.append(core.fork(streams[1]))
    last = some(4)
    for _ in range(6):
        last = core.decode_batch(streams, last, [GREEDY] * 4)
        logits.append(core.last_logits())
        tokens += last
    # Prompt rows of one stream beside decode rows of the others.
    rows = [Row(t, streams[0], wants_logits=True, prefill=True) for t in some(11)]
    rows += [Row(t, s, wants_logits=True) for s, t in zip(streams[1:], some(3), strict=True)]
    logits.append(core.step(rows)[0])
    core.truncate(streams[0], 40)
    for _ in range(5):
        tokens.append(core.decode(streams[0], some(1)[0], GREEDY))
        logits.append(core.last_logits())
    for stream in streams:
        core.close(stream)
    return logits, tokens


@dataclass
class Plain:
    fuel: Path
    info: dict[str, Any]
    logits: list[np.ndarray]
    tokens: list[int]


@pytest.fixture(scope="module", params=[*CASES, None], ids=lambda case: case.name if case else "sparkler")
def plain(request: pytest.FixtureRequest, fuel_dir: Path) -> Plain:
    """With experts in place."""
    fuel = request.param.build(fuel_dir) if request.param else SPARKLER
    core = engine(fuel)
    logits, tokens = scenario(core, 7)
    info = core.info()
    core.unload()
    assert info["expert_store"] == ""
    assert info["slots"] == info["moe_layers"] * info["experts"]
    return Plain(fuel, info, logits, tokens)


def same(found: tuple[list[np.ndarray], list[int]], plain: Plain) -> None:
    logits, tokens = found
    assert tokens == plain.tokens
    assert len(logits) == len(plain.logits)
    for ours, theirs in zip(logits, plain.logits, strict=True):
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("size", SIZES)
def test_bits_are_those_of_experts_in_place(plain: Plain, size: str) -> None:
    slots = slots_of(size, plain.info)
    core = engine(plain.fuel, expert_slots=slots)
    info = core.info()
    assert (info["slots"], info["slots_requested"], info["expert_store"]) == (slots, slots, "checkpoint")
    same(scenario(core, 7), plain)
    same(scenario(core, 7), plain)  # from a cache that is warm
    stats = core.stats()
    assert stats["expert_misses"] > 0
    if size == "all":
        assert stats["expert_evictions"] == 0
        assert stats["expert_misses"] <= slots
    else:
        assert stats["expert_evictions"] == stats["expert_misses"] - slots
    layers = stats["expert_layers"]
    assert [layer for layer, *_ in layers] == moe_layers(plain.fuel)
    for column, name in enumerate(("expert_hits", "expert_misses", "expert_evictions"), 1):
        assert sum(layer[column] for layer in layers) == stats[name]
    core.unload()


def test_bits_with_a_slot_map(plain: Plain) -> None:
    count, topk, experts = (plain.info[name] for name in ("moe_layers", "topk", "experts"))
    budgets = [min(experts, topk + layer) for layer in range(count)]
    core = engine(plain.fuel, layer_slots=budgets)
    assert core.info()["slots"] == sum(budgets)
    same(scenario(core, 7), plain)
    core.unload()


def test_the_trace_has_every_row_and_its_replay_the_same_hits(plain: Plain, tmp_path: Path) -> None:
    for size in ("25 %", "50 %"):
        slots, file = slots_of(size, plain.info), tmp_path / "trace"
        core = engine(plain.fuel, expert_slots=slots)
        core.start_trace(str(file))
        same(scenario(core, 7), plain)
        routing = read_any_routing(file, "trace")
        stats = core.stats()
        assert core.stop_trace() == len(routing.ids) == stats["rows"]
        assert len(routing.ends) == stats["steps"]
        assert list(routing.layer_ids) == moe_layers(plain.fuel)
        lookups, misses, evictions, delivered = _core.replay_routing(
            routing.ids, routing.ends, experts=routing.experts, topk=routing.topk, slots=slots
        )
        assert delivered == slots
        by_layer = [
            (int(lookups[:, i].sum() - misses[:, i].sum()), int(misses[:, i].sum()), evictions[i])
            for i in range(len(evictions))
        ]
        assert by_layer == [tuple(counts) for _, *counts in stats["expert_layers"]]
        core.unload()


def test_a_trace_is_what_the_router_chose(tmp_path: Path) -> None:
    core = engine(SPARKLER)  # experts in place: a trace needs no cache
    streams = [core.open(), core.open()]
    core.feed(streams[0], [5, 6, 7])
    core.set_record(True)
    core.start_trace(str(tmp_path / "trace"))
    chosen = []
    for rows in (
        [Row(9, streams[0]), Row(8, streams[1])],
        [Row(i, streams[1], prefill=True) for i in range(4)],
    ):
        core.step(rows)
        topk = core.info()["topk"]
        chosen.append(np.stack([ids.reshape(-1, topk) for ids in core.record()["expert_id"]], 1))
    # Readable while it is being written.
    trace = _core.read_trace(str(tmp_path / "trace"))
    assert np.array_equal(trace["ids"], np.concatenate(chosen))
    assert trace["step"].tolist() == [0, 0, 1, 1, 1, 1]
    assert trace["stream"].tolist() == [*streams, *[streams[1]] * 4]
    assert trace["position"].tolist() == [3, 0, 1, 2, 3, 4]
    assert trace["prefill"].tolist() == [0, 0, 1, 1, 1, 1]
    assert trace["torn_bytes"] == 0
    assert core.stop_trace() == 6
    core.step([Row(1, streams[0])])  # not traced any more
    assert len(_core.read_trace(str(tmp_path / "trace"))["ids"]) == 6
    assert core.stop_trace() == 0
    core.unload()


# --- files that change ------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SPARKLER, tmp_path / "fuel"))


@pytest.fixture
def running(copy: Path) -> Iterator[tuple[_core.CoreEngine, Path, int]]:
    """An engine that misses all the time, and a stream."""
    core = engine(copy, expert_slots=4)
    stream = core.open()
    core.feed(stream, [5, 6, 7])
    yield core, copy / "model.safetensors", stream
    core.unload()


def fails(core: _core.CoreEngine, stream: int, *words: str) -> None:
    with pytest.raises(FuelError) as error:
        for token in range(20, 60):
            core.decode(stream, token, GREEDY)
    message = str(error.value)
    assert re.search(r"^expert \d+ of layer \d+: .*model\.safetensors: ", message), message
    for word in words:
        assert word in message
    assert error.value.hint
    with pytest.raises(InputError, match="a step failed half-way"):
        core.decode(stream, 1, GREEDY)


def test_a_file_that_shrinks(running: tuple[_core.CoreEngine, Path, int]) -> None:
    core, file, stream = running
    os.truncate(file, file.stat().st_size // 8)
    fails(core, stream, "in use")
    other = core.open()
    with pytest.raises(FuelError, match="in use"):
        core.feed(other, [5, 6, 7])


def test_a_file_that_is_written_to(running: tuple[_core.CoreEngine, Path, int]) -> None:
    core, file, stream = running
    time.sleep(0.02)  # files have the time of the kernel's last tick
    with file.open("r+b") as open_file:
        open_file.seek(-1, os.SEEK_END)
        open_file.write(b"\x55")
    fails(core, stream, "changed while in use", "written after it was opened")


def test_a_file_that_is_replaced_is_still_read(
    running: tuple[_core.CoreEngine, Path, int], plain: Plain
) -> None:
    core, file, stream = running
    file.rename(file.with_suffix(".old"))
    file.write_bytes(b"another file")
    reference = engine(SPARKLER)
    other = reference.open()
    reference.feed(other, [5, 6, 7])
    for token in range(20, 40):
        assert core.decode(stream, token, GREEDY) == reference.decode(other, token, GREEDY)
    reference.unload()


def test_experts_that_stay_in_the_cache_need_no_file(copy: Path) -> None:
    core = engine(copy, expert_slots=10**6)
    stream = core.open()
    ids = list(range(3, 60))
    first = core.feed(stream, ids, logits="all")
    core.close(stream)
    os.truncate(copy / "model.safetensors", 1000)
    assert first is not None
    again = core.feed(core.open(), ids, logits="all")
    assert again is not None
    assert np.array_equal(first, again)
    core.unload()


@contextlib.contextmanager
def long_run(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """rocket-decode, once it has printed some tokens of very many."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from rocket.decode import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "--prompt-ids",
        "5,6,7",
        "--ignore-eos",
        "--tokens",
        LONG,
        *arguments,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), **pipes) as run:
        assert run.stdout is not None
        if not run.stdout.read(20):
            raise AssertionError(run.communicate()[1])
        yield run


def test_the_command_line_says_it(copy: Path, tmp_path: Path) -> None:
    """A run whose file shrinks: what was printed is right, then one line of error."""
    trace_out = tmp_path / "trace"
    with long_run(
        "--fuel", str(copy), "--expert-slots", "4", "--quiet", "--trace-out", str(trace_out)
    ) as run:
        os.truncate(copy / "model.safetensors", 100000)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert re.fullmatch(rb"error: expert \d+ of layer \d+: [^\n]+ in use: [^\n]+\n\nhint: [^\n]+\n", err), err
    trace = _core.read_trace(str(trace_out))
    assert trace["torn_bytes"] == 0
    assert len(trace["ids"]) > 3


# --- what is asked for and what is given ------------------------------------------------------------------


def test_the_smallest_cache_and_one_less(plain: Plain) -> None:
    topk, slot = plain.info["topk"], engine_slot_bytes(plain.fuel, plain.info["topk"])
    if topk > 1:
        with pytest.raises(PlanError, match=f"at least {topk} slots .*, found {topk - 1}") as error:
            engine(plain.fuel, expert_slots=topk - 1)
        assert f"--expert-slots to {topk}" in error.value.hint
    with pytest.raises(PlanError, match=f"{topk} slots .* which hold {topk - 1}$") as error:
        engine(plain.fuel, expert_cache_bytes=topk * slot - 1)
    found = re.search(r"--expert-cache-gib to ([0-9.]+)", error.value.hint)
    assert found
    gib = float(found[1])
    core = engine(plain.fuel, expert_cache_bytes=int(gib * 2**30))
    assert core.info()["slots"] == topk
    core.unload()


def engine_slot_bytes(fuel: Path, topk: int) -> int:
    core = engine(fuel, expert_slots=topk)
    slot: int = core.info()["slot_bytes"]
    core.unload()
    return slot


def test_arguments_that_cannot_be() -> None:
    for options in ({"expert_slots": -1}, {"expert_cache_bytes": -1}, {"layer_slots": [9]}):
        with pytest.raises(InputError, match="expected"):
            engine(SPARKLER, **options)
    with pytest.raises(InputError, match=r"expected one of a size, .* found 2"):
        engine(SPARKLER, expert_slots=9, expert_cache_bytes=1 << 30)
    for gib in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="expert_cache_gib: expected"):
            Engine(SPARKLER, backend="cpu", expert_cache_gib=gib)
    with pytest.raises(InputError, match="slot_map: expected the MoE layers"):
        Engine(SPARKLER, backend="cpu", slot_map={0: 4})
    with Engine(SPARKLER, backend="cpu", slot_map=dict.fromkeys(moe_layers(SPARKLER), 5)) as small:
        assert small.info["slots"] == 5 * small.info["moe_layers"]


def test_slots_beyond_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine(SPARKLER, expert_slots=10**6)
    info = core.info()
    core.unload()
    limit, step = (256 << 20) + info["dense_bytes"], info["slots"] * info["slot_bytes"] // 8
    hints = []
    while True:
        monkeypatch.setenv("ROCKET_MEMORY_LIMIT", str(limit))
        try:
            engine(SPARKLER, expert_slots=10**6).unload()
            break
        except PlanError as error:
            message, hint = str(error), error.hint
        hints.append(hint)
        assert re.search(r"needs .* expert slots .*, available", message)
        found = re.search(r"lower the expert cache to (\d+) slots \(--expert-slots\)", hints[-1])
        if found:
            engine(SPARKLER, expert_slots=int(found[1])).unload()  # as the hint says
        else:
            assert "no cache of experts fits" in hints[-1]
        limit += step
    assert "no cache" in hints[0]
    assert "no cache" not in hints[-1]


def decode_json(*arguments: str) -> tuple[dict[str, Any], str]:
    result = run_decode("--prompt-ids", "5,6,7", "--tokens", "30", "--ignore-eos", "--json", *arguments)
    assert result.status == 0, result.err
    return json.loads(result.out), result.err


def test_a_size_beyond_all_experts_is_cut_and_said() -> None:
    plain, err = decode_json()
    assert "expert cache" not in err
    for command in ((), ("--expert-cache-gib", "56")):
        whole, err = decode_json(*command)
        assert whole["token_ids"] == plain["token_ids"]
    experts = whole["experts"]
    assert re.search(r"expert cache: 168 slots, .* hold all 168 experts; cut from the 56.00 GiB", err)
    assert experts["slots"] == 168
    assert experts["requested"]["bytes"] == 56 << 30
    assert experts["requested"]["slots"] == (56 << 30) // experts["slot_bytes"]


@pytest.mark.parametrize("share", [4, 2])
def test_figures_agree_with_the_replay(share: int, tmp_path: Path) -> None:
    slots, trace = str(168 // share), str(tmp_path / "trace")
    options = ("--expert-slots", slots, "--trace-out", trace, "--stats", "0.000001", "--prefill-chunk", "2")
    whole, err = decode_json(*options)
    assert whole["token_ids"] == decode_json()[0]["token_ids"]
    experts = whole["experts"]
    replay = run_rocket("trace", "replay", trace, "--slots", slots, "--json")
    assert replay.status == 0, replay.err
    replayed = json.loads(replay.out)
    for name in ("hits", "misses", "evictions"):
        assert experts[name] == replayed[name]
    assert abs(experts["hit_rate"] - replayed["hit_rate"]) < 1e-12
    for ours, theirs in zip(experts["layers"], replayed["layers"], strict=True):
        assert (ours["layer"], ours["hits"], ours["misses"]) == (
            theirs["layer"],
            theirs["hits"],
            theirs["misses"],
        )
    # The windows add up to the run: 2 steps of the prompt, 29 of one token.
    windows = re.findall(r"^SLOT_CACHE STATS window .* steps (\d+), hits (\d+), misses (\d+),", err, re.M)
    steps, hits, misses = (sum(map(int, column)) for column in zip(*windows, strict=True))
    assert len(windows) == 31
    assert (steps, hits, misses) == (31, experts["hits"], experts["misses"])
    # The closing line has the part of decoding.
    decode = experts["decode"]
    assert decode["misses"] < experts["misses"]
    assert decode["misses"] + experts["prefill"]["misses"] == experts["misses"]
    closing = f"experts {100 * decode['hit_rate']:.1f} % hit, {decode['misses']} misses, "
    closing += f"{decode['evictions']} evictions"
    assert f"| {closing}, {format_bytes(decode['streamed_bytes'] / 29)}/tok in decode" in err


def test_a_slot_map_from_a_file(tmp_path: Path) -> None:
    layers = moe_layers(SPARKLER)
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"per_layer": {str(layer): 4 + layer for layer in layers}}))
    whole, _ = decode_json("--slot-map", str(file))
    assert whole["token_ids"] == decode_json()[0]["token_ids"]
    assert whole["experts"]["slots"] == sum(4 + layer for layer in layers)
    file.write_text(json.dumps({"per_layer": {str(layer): 3 for layer in layers}}))
    result = run_decode("--prompt-ids", "5", "--slot-map", str(file))
    check_error(result, 2, f"--slot-map {file}: layer {layers[0]}: ", "at least 4 slots", "found 3")
    file.write_text(json.dumps({"99": 4}))
    check_error(run_decode("--prompt-ids", "5", "--slot-map", str(file)), 2, "--slot-map", "99")
    for slots in (-1, 10**23):
        file.write_text(json.dumps(dict.fromkeys(map(str, moe_layers(SPARKLER)), slots)))
        check_error(run_decode("--prompt-ids", "5", "--slot-map", str(file)), 2, str(file), f"found {slots}")
    file.write_text(json.dumps({"per_layer": {"1": 4}, "foo": 1}))
    check_error(run_decode("--prompt-ids", "5", "--slot-map", str(file)), 2, "per_layer alone", '"foo"')


def test_a_trace_into_a_pipe_that_nobody_reads(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_error(run_decode("--prompt-ids", "5", "--trace-out", str(pipe)), 2, "--trace-out", "is a pipe")


@pytest.mark.parametrize(
    ("status", "arguments", "words"),
    [
        (2, ("--expert-slots", "0"), ("--expert-slots", "found 0")),
        (2, ("--expert-cache-gib", "0"), ("--expert-cache-gib", "found 0")),
        (2, ("--expert-cache-gib", "nan"), ("--expert-cache-gib", "found nan")),
        (2, ("--expert-slots", "9", "--expert-cache-gib", "1"), ("at most one", "--expert-slots")),
        (2, ("--stats", "0"), ("--stats", "found 0")),
        (2, ("--expert-slots", "-1"), ("--expert-slots", "found -1")),
        (2, ("--trace-out", "-"), ("--trace-out", "standard output")),
        (1, ("--trace-out", "no/such/folder"), ("--trace-out: cannot write",)),
        (2, ("--expert-slots", "3"), ("--expert-slots: expected at least 4 slots", "found 3")),
        (
            2,
            ("--expert-cache-gib", "0.0001"),
            ("--expert-cache-gib: expected at least 216.00 KiB, 4 slots", "hold 1"),
        ),
    ],
)
def test_what_cannot_be(status: int, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    check_error(run_decode("--prompt-ids", "5", *arguments), status, *words)


def test_a_trace_destroys_nothing(copy: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt"
    prompt.write_text("x")
    base = ("--fuel", str(copy), "--prompt-file", str(prompt), "--trace-out")
    for place, words in (
        (copy / "model.safetensors", "lies in the fuel"),
        (prompt, "is the file of --prompt-file"),
    ):
        before = place.read_bytes()
        check_error(run_decode(*base, str(place)), 2, "--trace-out", words)
        assert place.read_bytes() == before
    both = str(tmp_path / "both")
    check_error(run_decode(*base, both, "--logits-out", both), 2, "is the file of --logits-out")


def test_an_interrupted_run_leaves_a_trace_of_whole_rows(tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")
    with long_run("--trace-out", trace) as run:
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    found = _core.read_trace(trace)
    assert found["torn_bytes"] == 0
    assert found["position"].tolist() == list(range(len(found["ids"])))
    assert len(found["ids"]) > 3


def test_score_and_bench_take_the_cache(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x + 1\n")
    runs = [
        run_rocket("score", "sparkler", "--text", str(text), "--json", *more)
        for more in ((), ("--expert-slots", "20"))
    ]
    rows = [[line for line in run.out.splitlines() if "seconds" not in line] for run in runs]
    assert runs[1].status == 0
    assert "expert cache: 20 slots" in runs[1].err
    assert rows[0] == rows[1]
    bench = run_rocket(
        *("bench", "decode", "--fuel", "sparkler", "--prompt", "8", "--tokens", "8", "--pairs", "1"),
        *("--read-seconds", "0.01", "--expert-slots", "20", "--json"),
    )
    assert bench.status == 0, bench.err
    experts = json.loads(bench.out)["experts"]
    assert experts["slots"] == 20
    assert experts["misses"] > 0
