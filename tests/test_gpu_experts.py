"""A bounded cache of experts on the device: the resident engine's bits for every size, the counters of the
replayed trace, recorded steps and steps issued call by call alike."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import EXACT
from cli_tools import check_error, run_decode, run_rocket
from golden_fuels import CASES
from rocket import PlanError, _core
from rocket.architecture import read_architecture
from rocket.plan import stream_state_bytes
from rocket.random_fuel import make_fuel
from rocket.random_fuel_shape import FuelOptions, Shape
from rocket.routing_file import read_any_routing
from test_expert_cache import GREEDY, SPARKLER, moe_layers, scenario, slots_of

pytestmark = pytest.mark.gpu

PRECISIONS: dict[str, dict[str, Any]] = {"exact": dict(EXACT), "rounded": {}}


def engine(fuel: Path, precision: str, **options: Any) -> _core.CoreEngine:
    sizes = {"threads": 2, "max_context": 160, "max_rows": 64, "max_streams": 6}
    return _core.CoreEngine(str(fuel), backend="cuda", **{**sizes, **PRECISIONS[precision], **options})


@dataclass
class Resident:
    fuel: Path
    precision: str
    info: dict[str, Any]
    logits: list[np.ndarray]
    tokens: list[int]

    def engine(self, **options: Any) -> _core.CoreEngine:
        return engine(self.fuel, self.precision, **options)

    def same(self, found: tuple[list[np.ndarray], list[int]]) -> None:
        logits, tokens = found
        assert tokens == self.tokens
        assert len(logits) == len(self.logits)
        for ours, theirs in zip(logits, self.logits, strict=True):
            assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.fixture(scope="module", params=[*CASES, None], ids=lambda case: case.name if case else "sparkler")
def fuel(request: pytest.FixtureRequest, fuel_dir: Path) -> Path:
    return request.param.build(fuel_dir) if request.param else SPARKLER


@pytest.fixture(scope="module", params=list(PRECISIONS))
def resident(request: pytest.FixtureRequest, fuel: Path) -> Resident:
    core = engine(fuel, request.param)
    logits, tokens = scenario(core, 7)
    info = core.info()
    core.unload()
    assert info["backend"] == "cuda"
    assert info["expert_store"] == ""
    return Resident(fuel, request.param, info, logits, tokens)


@pytest.mark.parametrize("size", ["smallest", "one more", "25 %", "50 %"])
def test_bits_are_those_of_the_resident_engine(resident: Resident, size: str) -> None:
    slots = slots_of(size, resident.info)
    core = resident.engine(expert_slots=slots)
    info = core.info()
    assert (info["slots"], info["slots_requested"], info["expert_store"]) == (slots, slots, "host bank")
    resident.same(scenario(core, 7))
    resident.same(scenario(core, 7))  # from a cache that is warm
    stats = core.stats()
    assert stats["expert_misses"] > 0
    assert stats["expert_evictions"] == stats["expert_misses"] - slots
    assert stats["streamed_bytes"] > 0
    assert stats["fetch_seconds"] > 0
    layers = stats["expert_layers"]
    assert [layer for layer, *_ in layers] == moe_layers(resident.fuel)
    for column, name in enumerate(("expert_hits", "expert_misses", "expert_evictions"), 1):
        assert sum(layer[column] for layer in layers) == stats[name]
    core.unload()


def test_bits_with_a_slot_map(resident: Resident) -> None:
    count, topk, experts = (resident.info[name] for name in ("moe_layers", "topk", "experts"))
    budgets = [min(experts, topk + layer) for layer in range(count)]
    core = resident.engine(layer_slots=budgets)
    assert core.info()["slots"] == sum(budgets)
    assert core.info()["expert_store"] == "host bank"
    resident.same(scenario(core, 7))
    resident.same(scenario(core, 7))
    core.unload()


@pytest.mark.parametrize("size", ["smallest", "one more", "25 %", "50 %", "all but one"])
def test_bits_with_exclusive_tiers(resident: Resident, size: str) -> None:
    """What a slot does not hold lies in the host's memory, and nowhere else."""
    info = resident.info
    experts = info["moe_layers"] * info["experts"]
    slots = experts - 1 if size == "all but one" else slots_of(size, info)
    core = resident.engine(expert_slots=slots, expert_bank="exclusive")
    found = core.info()
    assert (found["slots"], found["expert_store"]) == (slots, "host bank, exclusive")
    assert found["bank_bytes"] == (experts - slots) * found["slot_bytes"]
    for _ in range(3):  # call by call, recorded, and from what that left
        resident.same(scenario(core, 7))
    stats = core.stats()  # every slot is full from the start
    assert stats["expert_evictions"] == stats["expert_misses"]
    assert stats["expert_misses"] > 0 or size == "all but one"
    core.unload()


def test_bits_with_a_slot_map_and_exclusive_tiers(resident: Resident) -> None:
    count, topk, experts = (resident.info[name] for name in ("moe_layers", "topk", "experts"))
    budgets = [min(experts, topk + layer) for layer in range(count)]
    core = resident.engine(layer_slots=budgets, expert_bank="exclusive")
    for _ in range(3):
        resident.same(scenario(core, 7))
    stats = core.stats()
    assert stats["expert_evictions"] == stats["expert_misses"] > 0
    core.unload()


@pytest.mark.parametrize("bank", ["yes", "exclusive"])
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_bits_with_experts_of_many_pieces(fuel_dir: Path, precision: str, bank: str) -> None:
    """Experts above a megabyte: some are computed with while others are on their way."""
    fuel = fuel_dir / "large-experts"
    if not fuel.is_dir():
        make_fuel(fuel, FuelOptions(Shape(hidden_size=1024, moe_intermediate_size=704, num_hidden_layers=5)))
    core = engine(fuel, precision)
    info = core.info()
    resident = Resident(fuel, precision, info, *scenario(core, 7))
    core.unload()
    experts = info["moe_layers"] * info["experts"]
    for slots in (info["topk"], experts // 2, experts - 1):
        core = resident.engine(expert_slots=slots, expert_bank=bank)
        assert core.info()["slot_bytes"] > 1 << 20
        for _ in range(3):  # call by call, recorded, and from what that left
            resident.same(scenario(core, 7))
        assert core.stats()["expert_misses"] > 0
        core.unload()


def test_auto_is_exclusive_where_the_host_is_short(fuel_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuel = next(case for case in CASES if case.name == "groups").build(fuel_dir)
    core = engine(fuel, "exact", expert_slots=40)
    info, wanted = core.info(), scenario(core, 7)
    core.unload()
    assert info["expert_store"] == "host bank"
    assert info["dense_bytes"] < info["bank_bytes"] == info["expert_bytes"]
    monkeypatch.setenv("ROCKET_MEMORY_LIMIT", str((256 << 20) + info["bank_bytes"] - 1))
    core = engine(fuel, "exact", expert_slots=40)
    assert core.info()["expert_store"] == "host bank, exclusive"
    assert core.info()["bank_bytes"] == info["bank_bytes"] // 2
    assert any("as one of all needs" in choice for choice in core.info()["choices"])
    logits, tokens = scenario(core, 7)
    assert tokens == wanted[1]
    for ours, theirs in zip(logits, wanted[0], strict=True):
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    core.unload()
    with pytest.raises(PlanError, match=r"host memory: needs .*available .*40 slots hold") as error:
        engine(fuel, "exact", expert_slots=40, expert_bank="yes")
    assert "exclusive" in error.value.hint


def test_a_cache_that_holds_all_is_the_resident_engine(resident: Resident) -> None:
    experts = resident.info["moe_layers"] * resident.info["experts"]
    for asked in ({"expert_slots": experts}, {"expert_slots": experts + 5}):
        core = resident.engine(**asked)
        info = core.info()
        assert (info["slots"], info["slots_requested"]) == (experts, asked["expert_slots"])
        assert info["expert_store"] == ""
        assert any("loaded at the start" in choice for choice in info["choices"])
        resident.same(scenario(core, 7))
        stats = core.stats()
        assert stats["expert_hits"] > 0
        assert (stats["expert_misses"], stats["streamed_bytes"]) == (0, 0)
        core.unload()


def test_counters_are_those_of_the_replayed_trace(resident: Resident, tmp_path: Path) -> None:
    """With a trace steps are issued call by call, without one they are recorded: both count the same."""
    sizes = [{"slots": slots_of(size, resident.info)} for size in ("smallest", "25 %", "50 %")]
    topk, count = resident.info["topk"], resident.info["moe_layers"]
    sizes.append({"layer_slots": [min(resident.info["experts"], topk + 2 * i) for i in range(count)]})
    for size in sizes:
        options = {"expert_slots" if name == "slots" else name: value for name, value in size.items()}
        file = tmp_path / "trace"
        traced, recorded = resident.engine(**options), resident.engine(**options)
        traced.start_trace(str(file))
        for core in (traced, recorded):
            for _ in range(2):
                resident.same(scenario(core, 7))
        routing = read_any_routing(file, "trace")
        stats = traced.stats()
        assert traced.stop_trace() == len(routing.ids) == stats["rows"]
        # Where prompts are rounded, the scenario's step of both kinds of rows is two passes, looked up apart.
        assert len(routing.ends) == stats["steps"] + 2 * (resident.precision == "rounded")
        lookups, misses, evictions, _ = _core.replay_routing(
            routing.ids, routing.ends, experts=routing.experts, topk=routing.topk, **size
        )
        by_layer = [
            (int(lookups[:, i].sum() - misses[:, i].sum()), int(misses[:, i].sum()), evictions[i])
            for i in range(len(evictions))
        ]
        assert by_layer == [tuple(counts) for _, *counts in stats["expert_layers"]]
        assert recorded.stats()["expert_layers"] == stats["expert_layers"]
        assert recorded.stats()["streamed_bytes"] == stats["streamed_bytes"]
        traced.unload()
        recorded.unload()


def test_counters_are_the_cpus_where_the_routing_is(tmp_path: Path) -> None:
    counted = {}
    for backend in ("cpu", "cuda"):
        core = _core.CoreEngine(
            str(SPARKLER),
            backend=backend,
            max_context=160,
            max_rows=64,
            max_streams=6,
            expert_slots=30,
            **EXACT,
        )
        core.start_trace(str(tmp_path / backend))
        scenario(core, 7)
        core.stop_trace()
        routing = read_any_routing(tmp_path / backend, "trace")
        counted[backend] = (routing.ids, core.stats()["expert_layers"])
        core.unload()
    if not np.array_equal(counted["cpu"][0], counted["cuda"][0]):
        pytest.skip("NOT COMPARED: a router's choice was so near that CPU and GPU took different experts")
    assert counted["cuda"][1] == counted["cpu"][1]


@pytest.mark.parametrize("bank", ["yes", "exclusive"])
def test_a_cancelled_stream_leaves_the_cache_right(resident: Resident, bank: str) -> None:
    """Streams that come and go, in the smallest cache, against the resident engine."""
    cores = [resident.engine(), resident.engine(expert_slots=resident.info["topk"], expert_bank=bank)]
    rng = np.random.default_rng(3)
    vocab = resident.info["vocab"]
    streams: list[int] = []
    for _ in range(60):
        action = rng.integers(0, 4)
        if not streams or (action == 0 and len(streams) < 5):
            opened = {core.open() for core in cores}
            assert len(opened) == 1
            streams.append(opened.pop())
            ids = rng.integers(0, vocab, int(rng.integers(1, 40))).tolist()
            found = [core.feed(streams[-1], ids, logits="all", chunk=17) for core in cores]
        elif action == 1 and len(streams) > 1:
            gone = streams.pop(int(rng.integers(0, len(streams))))
            for core in cores:
                core.close(gone)
            continue
        elif action == 2 and len(streams) < 5:
            source = streams[int(rng.integers(0, len(streams)))]
            forked = {core.fork(source) for core in cores}
            assert len(forked) == 1
            streams.append(forked.pop())
            continue
        else:
            if min(160 - core.position(s) for core in cores for s in streams) < 2:
                for core in cores:
                    core.close(streams[0])
                streams.pop(0)
                continue
            last = rng.integers(0, vocab, len(streams)).tolist()
            tokens = [core.decode_batch(streams, last, [GREEDY] * len(streams)) for core in cores]
            assert tokens[0] == tokens[1]
            found = [core.last_logits() for core in cores]
        assert np.array_equal(found[0].view(np.uint32), found[1].view(np.uint32))
    for core in cores:
        core.unload()


# --- one memory -------------------------------------------------------------------------------------------


@pytest.fixture
def one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device's memory were the host's: experts are read where the host has them."""
    monkeypatch.setenv("ROCKET_ONE_MEMORY", "1")


@pytest.mark.parametrize("bank", ["auto", "yes", "exclusive"])
def test_one_memory_has_experts_once(resident: Resident, one_memory: None, tmp_path: Path, bank: str) -> None:
    slots, experts = resident.info["topk"], resident.info["moe_layers"] * resident.info["experts"]
    _core.FuelSlab(str(resident.fuel), str(tmp_path)).write()
    for more in ({}, {"expert_slab": str(tmp_path)}):
        core = resident.engine(expert_slots=slots, expert_bank=bank, **more)
        info = core.info()
        assert (info["slots"], info["slots_requested"], info["expert_store"]) == (experts, slots, "")
        assert any("lie there once and are read in place" in choice for choice in info["choices"])
        for _ in range(2):
            resident.same(scenario(core, 7))
        stats = core.stats()
        assert stats["expert_hits"] > 0
        assert (stats["expert_misses"], stats["streamed_bytes"]) == (0, 0)
        core.unload()


def test_one_memory_that_is_short(
    fuel_dir: Path, one_memory: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least that holds all experts in place is counted once; with less they stay in the slab."""
    fuel = next(case for case in CASES if case.name == "groups").build(fuel_dir)
    _core.FuelSlab(str(fuel), str(tmp_path)).write()
    options = {"expert_slots": 3, "expert_slab": str(tmp_path)}

    def fits(limit: int) -> bool:
        monkeypatch.setenv("ROCKET_MEMORY_LIMIT", str(limit))
        try:
            core = engine(fuel, "exact", expert_bank="yes", **options)
        except PlanError:
            return False
        core.unload()
        return True

    few, enough = 256 << 20, 1 << 30
    while enough - few > 1:
        limit = (few + enough) // 2
        few, enough = (few, limit) if fits(limit) else (limit, enough)
    monkeypatch.setenv("ROCKET_MEMORY_LIMIT", str(enough))
    core = engine(fuel, "exact", **options)
    info, wanted = core.info(), scenario(core, 7)
    core.unload()
    assert info["expert_store"] == ""
    assert info["bank_bytes"] == info["expert_bytes"]
    state = 6 * stream_state_bytes(read_architecture(fuel), info["kv_dtype"], 160)
    counted = info["dense_bytes"] + info["bank_bytes"] + info["workspace_bytes"] + state + (256 << 20)
    assert abs(enough - counted) < info["bank_bytes"] // 4
    monkeypatch.setenv("ROCKET_MEMORY_LIMIT", str(few))
    with pytest.raises(PlanError, match="routed experts in place") as error:
        engine(fuel, "exact", expert_bank="yes", **options)
    assert "one memory" in error.value.hint
    core = engine(fuel, "exact", **options)
    assert core.info()["expert_store"].startswith("slab, ")
    assert core.info()["slots"] == 3
    assert scenario(core, 7)[1] == wanted[1]
    core.unload()


# --- what is said -----------------------------------------------------------------------------------------


def decode_json(*arguments: str) -> tuple[dict[str, Any], str]:
    base = ("--backend", "cuda", "--prompt-ids", "5,6,7", "--tokens", "30", "--ignore-eos", "--json")
    result = run_decode(*base, *arguments)
    assert result.status == 0, result.err
    return json.loads(result.out), result.err


def test_figures_agree_with_the_replay(tmp_path: Path) -> None:
    slots, trace = "84", str(tmp_path / "trace")
    options = ("--expert-slots", slots, "--stats", "0.000001", "--prefill-chunk", "2")
    whole, err = decode_json(*options)
    traced, _ = decode_json(*options, "--trace-out", trace)
    assert whole["token_ids"] == traced["token_ids"] == decode_json("--prefill-chunk", "2")[0]["token_ids"]
    replay = run_rocket("trace", "replay", trace, "--slots", slots, "--json")
    assert replay.status == 0, replay.err
    replayed = json.loads(replay.out)
    for found in (whole, traced):
        experts = found["experts"]
        for name in ("hits", "misses", "evictions"):
            assert experts[name] == replayed[name]
        assert abs(experts["hit_rate"] - replayed["hit_rate"]) < 1e-12
    windows = re.findall(r"^SLOT_CACHE STATS window .* steps (\d+), hits (\d+), misses (\d+),", err, re.M)
    steps, hits, misses = (sum(map(int, column)) for column in zip(*windows, strict=True))
    assert (steps, hits, misses) == (31, whole["experts"]["hits"], whole["experts"]["misses"])
    assert re.search(r"expert cache: 84 slots, .*; all of them in a host bank, ", err)
    assert re.search(r"experts [0-9.]+ % hit, \d+ miss(es)?, \d+ evictions?, [0-9.]+ \w+/tok", err)


def test_a_size_beyond_all_experts_is_cut_and_said() -> None:
    plain, _ = decode_json()
    whole, err = decode_json("--expert-cache-gib", "56")
    assert whole["token_ids"] == plain["token_ids"]
    assert re.search(r"hold all 168 experts; cut from the 56.00 GiB .*loaded at the start", err)
    assert whole["experts"]["slots"] == 168
    assert whole["experts"]["requested"]["bytes"] == 56 << 30


def test_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    check_error(
        run_decode("--backend", "cuda", "--prompt-ids", "5", "--expert-slots", "3"),
        2,
        "--expert-slots: expected at least 4",
        "found 3",
    )
    monkeypatch.setenv("ROCKET_MEMORY_LIMIT", "257M")
    with pytest.raises(
        PlanError, match=r"memory: needs .*available 257.00 MiB \(ROCKET_MEMORY_LIMIT"
    ) as error:
        engine(SPARKLER, "exact", expert_slots=40)
    assert error.value.hint
