"""Hints to a cache of experts on a GPU, from a host bank that has all experts or those without a slot: the
same bits as the resident engine, fewer misses where they are right, and each of them accounted for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import EXACT
from rocket import InputError, _core
from test_expert_hints import SPARKLER, TOKENS, Future, balanced, decode, scenario

pytestmark = pytest.mark.gpu


def engine(**options: Any) -> _core.CoreEngine:
    sizes = {"threads": 2, "max_context": 160, "max_rows": 64, "max_streams": 6}
    return _core.CoreEngine(str(SPARKLER), backend="cuda", **{**sizes, **EXACT, **options})


@pytest.fixture(scope="module")
def future(tmp_path_factory: pytest.TempPathFactory) -> Future:
    file = tmp_path_factory.mktemp("trace") / "routing"
    core = engine()
    tokens, logits = decode(core, None, file)
    core.unload()
    trace = _core.read_trace(str(file))
    assert len(trace["ids"]) == TOKENS
    return Future(tokens, logits, list(trace["layers"]), np.asarray(trace["ids"]))


@pytest.mark.parametrize("bank", ["yes", "exclusive"])
@pytest.mark.parametrize("slots", [4, 5, 28, 40, 84])
def test_the_future_from_a_trace(future: Future, slots: int, bank: str) -> None:
    options: dict[str, Any] = {"expert_slots": slots, "expert_bank": bank}
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
        assert hints["wasted_bytes"] == hints["wasted"] * slot_bytes
        assert (hints["late"], hints["on_their_way"]) == (0, 0)
    if slots < 56:  # less than two tokens' experts: there is no room ahead for all
        return
    # A slot for each hinted expert, beside those of the token before.
    assert found["waiting"]["expert_misses"] < plain["expert_misses"]
    assert found["waiting"]["expert_hints"]["useful"] > 0


@pytest.mark.parametrize("bank", ["yes", "exclusive"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hints_at_random(seed: int, bank: str) -> None:
    core = engine()
    wanted = scenario(core, seed, False)
    core.unload()
    for options in ({"expert_slots": 4}, {"expert_slots": 30}, {"layer_slots": [4, 5, 6, 23, 4, 9, 4]}):
        core = engine(expert_bank=bank, **options)
        logits, tokens = scenario(core, seed, True)
        assert balanced(core.stats()["expert_hints"])
        core.unload()
        assert tokens == wanted[1]
        for ours, theirs in zip(logits, wanted[0], strict=True):
            assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_what_takes_none(tmp_path: Path) -> None:
    _core.FuelSlab(str(SPARKLER), str(tmp_path)).write()
    core = engine(expert_slots=20, expert_slab=str(tmp_path), expert_bank="no")
    layer = core.stats()["expert_layers"][0][0]
    assert not core.hint(layer, [0, 1])
    core.unload()
    core = engine(expert_slots=20)
    with pytest.raises(InputError, match="hint: expected an expert from 0 to 23, found 24"):
        core.hint(layer, [24])
    assert core.hint(layer, [])
    core.unload()
