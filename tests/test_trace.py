"""rocket trace: figures, replays and fits, and compact traces beside JSON lines."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import fuel_tools
import plan_tools
from cli_tools import tree
from fuel_tools import Rocket
from plan_tools import EXPERTS, MOE_LAYERS, TOPK, skewed_ids, write_trace
from rocket import _core
from rocket.errors import UsageError
from rocket.routing import Routing, run_cache
from rocket.routing_file import read_any_routing, read_routing
from rocket.trace_fit import Cut, fit, hit_curves

rocket = fuel_tools.rocket  # a fixture
tiny = plan_tools.tiny
POLICIES = ("lru", "lfu", "lfru", "belady")


def write_compact(
    file: Path, ids: np.ndarray, experts: int, rows_of_steps: list[int] | None = None, streams: int = 1
) -> Path:
    """A trace as an engine records it: layers named from 3 on, streams in turn."""
    layers = [3 + layer for layer in range(ids.shape[1])]
    writer = _core.TraceWriter(
        str(file), layers=layers, experts=experts, topk=ids.shape[2], fingerprint=0xABCDEF
    )
    row = 0
    for count in rows_of_steps or [1] * len(ids):
        writer.step([((row + i) % streams, row + i, count > 1) for i in range(count)], ids[row : row + count])
        row += count
    writer.close()
    return file


@pytest.fixture
def lines(tmp_path: Path) -> str:
    return str(write_trace(tmp_path / "lines.jsonl", skewed_ids(60, 4, 24, 4)))


# --- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [9, 300])
def test_compact_and_lines_say_the_same(tmp_path: Path, experts: int) -> None:
    ids = skewed_ids(30, 3, experts, 4)
    compact = write_compact(tmp_path / "trace", ids[:, :, ::-1].copy(), experts)  # in any order
    assert compact.stat().st_size == 36 + 3 * 2 + 30 * (17 + 3 * 4 * (1 if experts <= 256 else 2))
    read = read_any_routing(compact, "trace")
    assert np.array_equal(read.ids, ids)
    assert (read.experts, read.layer_ids, read.fingerprint) == (experts, (3, 4, 5), 0xABCDEF)
    assert np.array_equal(read_routing(compact, 3, experts, 4).ids, ids)
    lines = read_any_routing(write_trace(tmp_path / "lines", ids), "trace", experts)
    assert np.array_equal(lines.ids, ids)
    assert lines.layer_names == (0, 1, 2)


def test_steps_and_streams_are_kept(tmp_path: Path) -> None:
    ids = skewed_ids(9, 2, 8, 2)
    read = read_any_routing(write_compact(tmp_path / "trace", ids, 8, [5, 1, 3], streams=2), "trace")
    assert read.ends.tolist() == [5, 6, 9]
    assert read.stream is not None
    assert read.stream.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]


def test_a_torn_row_is_left_out_and_damage_refused(rocket: Rocket, tmp_path: Path) -> None:
    file = write_compact(tmp_path / "trace", skewed_ids(5, 2, 8, 2), 8)
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    assert rocket("trace", "show", str(file)) == 0
    assert "trace: 4 tokens, 2 MoE layers" in rocket.out
    assert "last row is not whole (18 bytes)" in rocket.err
    file.write_bytes(whole[:-30] + bytes([whole[-30] ^ 1]) + whole[-29:])
    rocket.fails(2, str(file), "row 3", "checksum", arguments=("trace", "show", str(file)))
    file.write_bytes(whole[:40])
    rocket.fails(2, str(file), "found none", arguments=("trace", "show", str(file)))
    file.write_bytes(whole[:20])
    rocket.fails(2, str(file), "header", "32 bytes, found 20", arguments=("trace", "show", str(file)))


@pytest.mark.parametrize(
    ("shape", "words"),
    [((3, 8, 2), ("MoE layers", "3", "found 2")), ((2, 9, 2), ("experts", "9")), ((2, 8, 3), ("top-k", "3"))],
)
def test_a_compact_trace_of_another_model(
    tmp_path: Path, shape: tuple[int, int, int], words: tuple[str, ...]
) -> None:
    file = write_compact(tmp_path / "trace", skewed_ids(5, 2, 8, 2), 8)
    with pytest.raises(UsageError) as error:
        read_routing(file, *shape)
    for word in words:
        assert word in str(error.value)


def test_other_commands_take_compact_traces(rocket: Rocket, tiny: str, tmp_path: Path) -> None:
    ids = skewed_ids(41, MOE_LAYERS, EXPERTS, TOPK)
    lines, compact = write_trace(tmp_path / "a", ids), write_compact(tmp_path / "b", ids, EXPERTS)
    steps = []
    for file in (lines, compact):
        assert rocket("plan", tiny, "--trace", str(file), "--expert-slots", "40", "--json") == 0
        step = json.loads(rocket.out)["step"]
        del step["hit_rate_source"]
        steps.append(step)
        assert rocket("bytes", tiny, "--trace", str(file), "--json") == 0
    assert steps[0] == steps[1]


# --- show -------------------------------------------------------------------------------------------------


def test_figures_by_hand(rocket: Rocket, tmp_path: Path) -> None:
    ids = np.array([[[0, 1], [0, 1]], [[2, 3], [0, 1]], [[0, 3], [0, 2]], [[1, 2], [0, 3]]], np.int32)
    file = str(write_trace(tmp_path / "trace", ids))
    assert rocket("trace", "show", file, "--experts", "16", "--json") == 0
    shown = json.loads(rocket.out)
    assert (shown["tokens"], shown["steps"], shown["experts"], shown["top_k"]) == (4, 4, 16, 2)
    even, skewed = shown["layers"]
    assert (even["layer"], even["entropy_bits"], even["used"]) == (0, 2, 4)
    assert even["spread"] == 4 / 16
    assert even["overlap"] == pytest.approx((0 + 1 + 0) / 3 / 2)
    assert even["busiest_share"] == 4 / 8  # the busiest 2 of 16
    shares = (4 / 8, 2 / 8, 1 / 8, 1 / 8)
    assert skewed["entropy_bits"] == pytest.approx(-sum(p * math.log2(p) for p in shares))
    assert skewed["overlap"] == pytest.approx((2 + 1 + 1) / 3 / 2)
    assert skewed["busiest_share"] == 6 / 8


def test_neighbours_are_those_of_one_stream(rocket: Rocket, tmp_path: Path) -> None:
    ids = np.array([[[0, 1]], [[2, 3]], [[0, 1]], [[2, 3]]], np.int32)
    for streams, overlap in ((1, 0), (2, 1)):
        file = write_compact(tmp_path / "trace", ids, 4, [2, 2], streams)
        assert rocket("trace", "show", str(file), "--json") == 0
        assert json.loads(rocket.out)["layers"][0]["overlap"] == overlap


def test_one_token_has_no_neighbours(rocket: Rocket, tmp_path: Path) -> None:
    file = write_trace(tmp_path / "trace", np.array([[[1]]], np.int32))
    assert rocket("trace", "show", str(file), "--json") == 0
    assert json.loads(rocket.out)["layers"][0]["overlap"] is None
    assert rocket("trace", "show", str(file)) == 0


def test_plot_is_a_picture(rocket: Rocket, lines: str, tmp_path: Path) -> None:
    file = tmp_path / "picture.svg"
    assert rocket("trace", "show", lines, "--plot", str(file)) == 0
    root = ElementTree.fromstring(file.read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    colours = {rect.get("fill") for rect in root if rect.tag.endswith("rect")}
    taken = sum(np.unique(read_any_routing(lines, "trace").ids[:, layer]).size for layer in range(4))
    assert len([rect for rect in root if rect.tag.endswith("rect")]) == 1 + taken + 4
    assert "#08306b" in colours  # the busiest are as dark as it gets
    assert "lines.jsonl: 60 tokens" in "".join(root.itertext())


# --- replay -----------------------------------------------------------------------------------------------


def replayed(rocket: Rocket, *arguments: str) -> dict:
    assert rocket("trace", "replay", *arguments, "--json") == 0
    return json.loads(rocket.out)


@pytest.mark.parametrize("policy", POLICIES)
def test_replay_adds_up(rocket: Rocket, lines: str, policy: str) -> None:
    out = replayed(rocket, lines, "--slots", "40", "--policy", policy, "--slot-bytes", "1000")
    assert (out["policy"], out["slots"], out["hits"] + out["misses"]) == (policy, 40, 60 * 4 * 4)
    assert out["hit_rate"] == pytest.approx(out["hits"] / (60 * 16))
    assert out["misses_a_token"] == out["misses"] / 60
    assert out["bytes_a_token"] == 1000 * out["misses"] / 60
    assert [layer["layer"] for layer in out["layers"]] == [0, 1, 2, 3]
    for field in ("hits", "misses", "evictions"):
        assert sum(layer[field] for layer in out["layers"]) == out[field]
    assert out["misses"] - out["evictions"] == 40
    best = replayed(rocket, lines, "--slots", "40", "--policy", "belady")
    assert best["misses"] <= out["misses"]


def test_budgets(rocket: Rocket, lines: str, tmp_path: Path) -> None:
    equal = replayed(rocket, lines, "--slots", "43", "--equal")
    assert [layer["slots"] for layer in equal["layers"]] == [11, 11, 11, 10]
    file = tmp_path / "map.json"
    slots = {"0": 11, "1": 11, "2": 11, "3": 10}
    for content in ({"per_layer": slots}, slots):
        file.write_text(json.dumps(content))
        assert replayed(rocket, lines, "--slot-map", str(file)) == equal
    ids = read_any_routing(lines, "trace").ids
    for layer in range(4):  # layers do not touch each other
        alone = run_cache(ids[:, [layer]], np.arange(1, 61), 24, slots=int(slots[str(layer)]))
        assert equal["layers"][layer]["hit_rate"] == pytest.approx(alone.hit_rate)


def test_more_slots_than_experts_are_cut(rocket: Rocket, lines: str) -> None:
    assert rocket("trace", "replay", lines, "--slots", "1000") == 0
    assert "96 slots, one for every expert, one order for all layers, lru" in rocket.out


def test_a_step_counts_an_expert_once(rocket: Rocket, tmp_path: Path) -> None:
    ids = skewed_ids(40, 2, 12, 3)
    file = write_compact(tmp_path / "trace", ids, 12, [20, 1, 1, 18])
    out = replayed(rocket, str(file), "--slots", "8")
    steps = (ids[:20], ids[20:21], ids[21:22], ids[22:])
    distinct = sum(len(np.unique(step[:, layer])) for step in steps for layer in range(2))
    assert (out["steps"], out["hits"] + out["misses"]) == (4, distinct)
    assert [layer["layer"] for layer in out["layers"]] == [3, 4]
    assert out["fuel_fingerprint"] == "0000000000abcdef"
    (tmp_path / "map").write_text('{"per_layer": {"3": 4, "4": 4}}')
    assert replayed(rocket, str(file), "--slot-map", str(tmp_path / "map"))["slots"] == 8


def test_bytes_of_a_fuel(rocket: Rocket, tiny: str, tmp_path: Path, lines: str) -> None:
    file = write_trace(tmp_path / "trace", skewed_ids(41, MOE_LAYERS, EXPERTS, TOPK))
    out = replayed(rocket, str(file), "--slots", "40", "--fuel", tiny)
    assert out["bytes_a_token"] == pytest.approx(out["slot_bytes"] * out["misses_a_token"])
    assert rocket("trace", "replay", str(file), "--slots", "40", "--fuel", tiny) == 0
    assert f"of {TOPK * MOE_LAYERS:.2f} experts, " in rocket.out
    assert [layer["layer"] for layer in out["layers"]] == [3, 4, 5, 6, 7]
    rocket.fails(
        2, "line 1", "5 lists", arguments=("trace", "replay", lines, "--slots", "40", "--fuel", tiny)
    )
    both = ("trace", "show", str(file), "--fuel", tiny, "--experts", "16")
    rocket.fails(2, "--experts, --fuel", "both", arguments=both)
    ids = skewed_ids(9, MOE_LAYERS, EXPERTS, TOPK)
    shifted = _core.TraceWriter(
        str(tmp_path / "shifted"), layers=[0, 1, 2, 3, 4], experts=EXPERTS, topk=TOPK, fingerprint=0
    )
    shifted.step([(0, i, False) for i in range(9)], ids)
    shifted.close()
    named = ("trace", "show", str(tmp_path / "shifted"), "--fuel", tiny)
    rocket.fails(2, "from 3 to 7", "found from 0 to 4", arguments=named)


def test_a_fitted_map_is_one_for_the_plan(rocket: Rocket, tiny: str, tmp_path: Path) -> None:
    file = str(write_trace(tmp_path / "trace", skewed_ids(41, MOE_LAYERS, EXPERTS, TOPK)))
    out = str(tmp_path / "map.json")
    assert rocket("trace", "fit", file, "--slots", "40", "--fuel", tiny, "--out", out) == 0
    slots = json.loads(Path(out).read_text())["per_layer"]
    assert list(slots) == ["3", "4", "5", "6", "7"]
    assert rocket("plan", tiny, "--slot-map", out, "--json") == 0
    assert json.loads(rocket.out)["slots_of_layer"] == slots


# --- fit --------------------------------------------------------------------------------------------------


def stationary(tokens: int = 300) -> np.ndarray:
    """The first layer keeps to six experts, the others take all of theirs evenly."""
    rng = np.random.default_rng(5)
    ids = np.sort(rng.permuted(np.tile(np.arange(24), (tokens, 3, 1)), axis=2)[:, :, :4], axis=2)
    ids[:, 0] = np.sort(rng.permuted(np.tile(np.arange(6), (tokens, 1)), axis=1)[:, :4], axis=1)
    return ids.astype(np.int32)


def test_fit_beats_an_equal_share_where_layers_differ(rocket: Rocket, tmp_path: Path) -> None:
    file, out = str(write_trace(tmp_path / "trace", stationary())), tmp_path / "map.json"
    assert rocket("trace", "fit", file, "--slots", "36", "--out", str(out), "--json") == 0
    fitted = json.loads(rocket.out)
    assert rocket.err == ""
    assert json.loads(out.read_text()) == {"per_layer": fitted["per_layer"]}
    assert (fitted["per_layer"]["0"], sum(fitted["per_layer"].values())) == (6, 36)
    assert (fitted["fitted_tokens"], fitted["held_out_tokens"]) == (150, 150)
    rates = {name: run["hit_rate"] for name, run in fitted["held_out"].items()}
    assert rates["fitted"] > rates["equal"] + 0.03
    assert replayed(rocket, file, "--slot-map", str(out))["slots"] == 36


def test_fit_takes_the_best_shares() -> None:
    """Against every way to share out the slots."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        gains = -np.sort(-rng.integers(0, 20, (3, 6)), axis=1)
        curves = np.concatenate([np.full((3, 2), -1), np.zeros((3, 1), int), gains.cumsum(axis=1)], axis=1)
        for slots in range(6, 25):
            shares = fit(curves, 2, slots)
            assert sum(shares) == slots
            found = sum(curves[layer][count] for layer, count in enumerate(shares))
            best = max(
                curves[0][a] + curves[1][b] + curves[2][slots - a - b]
                for a in range(2, 9)
                for b in range(2, 9)
                if 2 <= slots - a - b <= 8
            )
            assert found == best


def test_fit_looks_past_a_flat_stretch() -> None:
    curves = np.array([[-1, 0, 0, 0, 90], [-1, 0, 20, 30, 35]])
    assert fit(curves, 1, 5) == (4, 1)
    assert fit(curves, 1, 6) == (4, 2)


def test_curves_are_replays() -> None:
    routing = Routing(skewed_ids(50, 2, 10, 3), 10)
    cut = Cut.of(routing)
    assert (cut.steps, cut.tokens) == (25, 25)
    curves = hit_curves(routing, cut)
    assert (curves[:, :3] == -1).all()
    for slots in range(3, 11):
        run = run_cache(routing.ids[:25], np.arange(1, 26), 10, layer_slots=[slots, 3])
        assert curves[0, slots] == (run.lookups - run.misses)[:, 0].sum()
    assert (np.diff(curves[:, 3:]) >= 0).all()


def test_a_fit_that_does_not_hold_is_said(rocket: Rocket, tmp_path: Path) -> None:
    ids = stationary(200)
    ids[100:] = ids[100:, [1, 0, 2]]  # what the first half teaches is wrong in the second
    file = str(write_trace(tmp_path / "trace", ids))
    assert rocket("trace", "fit", file, "--slots", "36") == 0
    assert "does better with an equal share" in rocket.err
    assert "fitted budgets" in rocket.out


# --- what cannot be ---------------------------------------------------------------------------------------

WRONG: list[tuple[int, tuple[str, ...], tuple[str, ...]]] = [
    (2, ("show", "nowhere"), ("trace", "nowhere")),
    (2, ("show", "/dev/zero"), ("/dev/zero", "regular file")),
    (2, ("show", "empty"), ("empty", "a line a token")),
    (2, ("show", "object"), ("line 1", "layers", "null")),
    (2, ("show", "ragged"), ("line 2", "layers[0]", "2 expert ids")),
    (2, ("show", "broken"), ("line 1", "broken JSON")),
    (2, ("show", "LINES", "--experts", "3"), ("line 1", "from 0 to 2")),
    (2, ("show", "LINES", "--experts", "0"), ("--experts", "1", "found 0")),
    (2, ("show", "COMPACT", "--experts", "9"), ("experts", "9", "found 8")),
    (2, ("show", "LINES", "--plot", "out.png"), ("--plot", ".svg", "out.png")),
    (2, ("show", "LINES", "--plot", ""), ("--plot", "empty")),
    (1, ("show", "LINES", "--plot", "no/out.svg"), ("--plot", "no/out.svg")),
    (2, ("replay", "LINES"), ("--slots, --slot-map", "neither")),
    (2, ("replay", "LINES", "--slots", "40", "--slot-map", "x"), ("--slots, --slot-map", "both")),
    (2, ("replay", "LINES", "--slot-map", "x", "--equal"), ("--equal, --slot-map", "both")),
    (2, ("replay", "LINES", "--slots", "0"), ("--slots", "1", "found 0")),
    (2, ("replay", "LINES", "--slots", "3"), ("--slots: ", "at least 4 slots", "found 3")),
    (
        2,
        ("replay", "LINES", "--slots", "15", "--equal"),
        ("--slots: ", "at least 16 slots, 4 for each of 4", "15"),
    ),
    (2, ("replay", "LINES", "--slots", "40", "--policy", "fifo"), ("--policy", "belady", "'fifo'")),
    (2, ("replay", "LINES", "--slots", "40", "--slot-bytes", "0"), ("--slot-bytes", "found 0")),
    (2, ("replay", "LINES", "--slot-map", "few.json"), ("few.json", "1: missing")),
    (
        2,
        ("replay", "LINES", "--slot-map", "small.json"),
        ("small.json: layer 2: ", "at least 4 slots", "found 3"),
    ),
    (2, ("replay", "COMPACT", "--slot-map", "small.json"), ("small.json", "from 3 to 4", '"0"')),
    (2, ("fit", "LINES"), ("--slots",)),
    (
        2,
        ("fit", "LINES", "--slots", "15", "--out", "out"),
        ("--slots: ", "at least 16 slots, 4 for each", "found 15"),
    ),
    (2, ("fit", "LINES", "--slots", "40", "--out", "LINES"), ("--out", "the trace")),
    (2, ("fit", "one", "--slots", "2"), ("at least 2 steps", "found 1")),
    (1, ("fit", "LINES", "--slots", "40", "--out", "no/out"), ("--out", "no/out")),
]
FILES = {
    "empty": "\n",
    "object": "{}\n",
    "ragged": '{"tok": 1, "layers": [[0, 1]]}\n{"tok": 2, "layers": [[0]]}\n',
    "broken": "{",
    "one": '{"tok": 1, "layers": [[0, 1]]}\n',
    "few.json": '{"per_layer": {"0": 8}}',
    "small.json": '{"per_layer": {"0": 8, "1": 8, "2": 3, "3": 8}}',
}


@pytest.mark.parametrize(("status", "arguments", "words"), WRONG, ids=lambda value: str(value))
def test_wrong_input_writes_nothing(
    rocket: Rocket,
    lines: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    compact = write_compact(tmp_path / "compact", skewed_ids(9, 2, 8, 2), 8)
    before = {name: (tmp_path / name).read_bytes() for name in tree(tmp_path)}
    named = {"LINES": lines, "COMPACT": str(compact)}
    rocket.fails(status, *words, arguments=("trace", *(named.get(word, word) for word in arguments)))
    assert {name: (tmp_path / name).read_bytes() for name in tree(tmp_path)} == before
