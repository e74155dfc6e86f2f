"""Hints to the cache of experts, with the future from a trace and at random: the same bits as experts in
place, fewer misses where they are right, and each of them accounted for."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import EXACT
from rocket import InputError, _core

SPARKLER = Path(__file__).parents[1] / "fuels" / "sparkler"
GREEDY = _core.SamplingParams()
PROMPT = list(b"The engine reads what it needs, ")
TOKENS = 40
PATIENCE_S = 20.0


def engine(fuel: Path = SPARKLER, **options: Any) -> _core.CoreEngine:
    return _core.CoreEngine(
        str(fuel), backend="cpu", threads=2, max_context=160, max_rows=64, max_streams=6, **EXACT, **options
    )


def balanced(hints: dict[str, int]) -> bool:
    parts = ("useful", "late", "wasted", "on_their_way", "there")
    return hints["taken"] == sum(hints[part] for part in parts)


@dataclass
class Future:
    """A decode run with experts in place, and what each of its tokens took in each layer."""

    tokens: list[int]
    logits: np.ndarray
    layers: list[int]
    experts: np.ndarray  # [tokens, layers, topk]


@pytest.fixture(scope="module")
def future(tmp_path_factory: pytest.TempPathFactory) -> Future:
    file = tmp_path_factory.mktemp("trace") / "routing"
    core = engine()
    tokens, logits = decode(core, None, file)
    core.unload()
    trace = _core.read_trace(str(file))
    assert len(trace["ids"]) == TOKENS
    return Future(tokens, logits, list(trace["layers"]), np.asarray(trace["ids"]))


def decode(
    core: _core.CoreEngine, future: Future | None, trace: Path | None = None, wait: bool = False
) -> tuple[list[int], np.ndarray]:
    """The prompt, then tokens; before each but the first, hints of all that it will take (what the prompt
    used keeps its slots until the next step begins). ``wait``: until they are there."""
    stream = core.open()
    tokens = [core.prompt(stream, PROMPT, GREEDY)]
    logits = [core.last_logits()]
    if trace is not None:
        core.start_trace(str(trace))
    for step in range(TOKENS):
        if future is not None and step > 0:
            for layer, experts in zip(future.layers, future.experts[step].tolist(), strict=True):
                assert core.hint(layer, experts)
            if wait:
                land(core, future.layers[0])
        tokens.append(core.decode(stream, tokens[-1], GREEDY))
        logits.append(core.last_logits())
        assert balanced(core.stats()["expert_hints"])
    if trace is not None:
        assert core.stop_trace() == TOKENS
    core.close(stream)
    return tokens, np.concatenate(logits)


def land(core: _core.CoreEngine, layer: int) -> None:
    """Returns when what was hinted is there. A hint of nothing gives slots to what still waits for one."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        core.hint(layer, [])
        if core.stats()["expert_hints"]["on_their_way"] == 0:
            core.hint(layer, [])
            if core.stats()["expert_hints"]["on_their_way"] == 0:
                return
    raise AssertionError("hinted experts do not come")


@pytest.fixture(scope="module")
def slab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slab")
    _core.FuelSlab(str(SPARKLER), str(folder)).write()
    return folder


@pytest.mark.parametrize("store", ["checkpoint", "slab"])
@pytest.mark.parametrize("slots", [4, 5, 28, 40, 84, 168])
def test_the_future_from_a_trace(future: Future, slab: Path, slots: int, store: str) -> None:
    options: dict[str, Any] = {"expert_slots": slots}
    if store == "slab":
        options["expert_slab"] = str(slab)
    found: dict[str, dict[str, Any]] = {}
    for way in ("without", "with", "waiting"):
        core = engine(**options)
        tokens, logits = decode(core, None if way == "without" else future, wait=way == "waiting")
        assert tokens == future.tokens
        assert np.array_equal(logits.view(np.uint32), future.logits.view(np.uint32))
        found[way] = core.stats()
        core.unload()
    plain = found["without"]
    assert set(plain["expert_hints"].values()) == {0}
    slot_bytes = plain["streamed_bytes"] // plain["expert_misses"]
    for way in ("with", "waiting"):
        stats, hints = found[way], found[way]["expert_hints"]
        asked = ("expert_hits", "expert_misses")
        assert sum(stats[name] for name in asked) == sum(plain[name] for name in asked)
        assert stats["streamed_bytes"] == stats["expert_misses"] * slot_bytes
        assert hints["useful_bytes"] == hints["useful"] * slot_bytes
        assert hints["late_bytes"] == hints["late"] * slot_bytes
        assert hints["wasted_bytes"] <= hints["wasted"] * slot_bytes
        assert hints["useful"] + hints["late"] > 0
    if slots < 56:  # less than two tokens' experts: there is no room ahead for all
        return
    # A slot for each hinted expert, beside those of the token before: nothing is left to demand.
    before = misses_before_hints(options)
    assert plain["expert_misses"] > before
    assert found["waiting"]["expert_misses"] == before
    assert found["waiting"]["expert_hints"]["late"] == 0
    assert found["waiting"]["expert_hints"]["wasted"] == 0
    assert found["with"]["expert_misses"] <= plain["expert_misses"]


def misses_before_hints(options: dict[str, Any]) -> int:
    core = engine(**options)
    stream = core.open()
    core.decode(stream, core.prompt(stream, PROMPT, GREEDY), GREEDY)
    misses = core.stats()["expert_misses"]
    core.unload()
    return misses


def scenario(core: _core.CoreEngine, seed: int, hints: bool) -> tuple[list[np.ndarray], list[int]]:
    """Streams that come, fork, go back and are given up at random, and steps that are refused. The hints are
    drawn from a generator of their own."""
    rng, guess = np.random.default_rng(seed), np.random.default_rng(seed + 1)
    info = core.info()
    layers = [layer for layer, *_ in core.stats()["expert_layers"]]
    streams: dict[int, int] = {}  # its last token
    logits, tokens = [], []

    def some(count: int) -> list[int]:
        return rng.integers(0, info["vocab"], count).tolist()

    for _ in range(60):
        for _ in range(guess.integers(0, 8) if hints else 0):
            experts = guess.integers(0, info["experts"], guess.integers(0, 9)).tolist()
            core.hint(int(guess.choice(layers)), experts)
        what = rng.choice(["open", "fork", "close", "truncate", "refused", *["decode"] * 6])
        some_stream = int(rng.choice(list(streams))) if streams else -1
        if what == "open" and len(streams) < 5:
            stream = core.open()
            core.feed(stream, some(int(rng.integers(1, 40))), chunk=int(rng.integers(1, 64)))
            streams[stream] = some(1)[0]
        elif what == "fork" and 0 < len(streams) < 5:
            streams[core.fork(some_stream)] = some(1)[0]
        elif what == "close" and streams:
            core.close(some_stream)
            del streams[some_stream]
        elif what == "truncate" and streams:
            core.truncate(some_stream, int(rng.integers(1, core.position(some_stream) + 1)))
        elif what == "refused" and streams:
            with pytest.raises(InputError):
                core.decode(some_stream, info["vocab"], GREEDY)
        elif streams:
            count = int(rng.integers(1, len(streams) + 1))
            chosen = [int(s) for s in rng.choice(list(streams), count, replace=False)]
            drawn = core.decode_batch(chosen, [streams[s] for s in chosen], [GREEDY] * count)
            streams.update(zip(chosen, drawn, strict=True))
            logits.append(core.last_logits())
            tokens += drawn
        if hints:
            assert balanced(core.stats()["expert_hints"])
    for stream in streams:
        core.close(stream)
    return logits, tokens


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hints_at_random(slab: Path, seed: int) -> None:
    core = engine()
    wanted = scenario(core, seed, False)
    core.unload()
    for options in ({"expert_slots": 4}, {"expert_slots": 30}, {"layer_slots": [4, 5, 6, 24, 4, 9, 4]}):
        core = engine(expert_slab=str(slab), **options)
        logits, tokens = scenario(core, seed, True)
        hints = core.stats()["expert_hints"]
        core.unload()
        assert tokens == wanted[1]
        for ours, theirs in zip(logits, wanted[0], strict=True):
            assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))
        assert hints["useful"] + hints["late"] > 0
        assert hints["wasted"] > 0


def test_hints_of_nothing_that_there_is() -> None:
    core = engine(expert_slots=8)
    layer = core.stats()["expert_layers"][0][0]
    for arguments in ((-1, [0]), (10**6, [0]), (layer, [-1]), (layer, [10**6])):
        with pytest.raises(InputError, match="hint: expected"):
            core.hint(*arguments)
    dense = _core.read_config(str(SPARKLER))["is_moe"].index(False)
    with pytest.raises(InputError, match="an MoE layer"):
        core.hint(dense, [0])
    core.unload()


def test_no_cache_takes_no_hints() -> None:
    core = engine()
    assert not core.hint(core.stats()["expert_layers"][0][0], [0, 1])
    assert set(core.stats()["expert_hints"].values()) == {0}
    core.unload()
