"""Experts on a GPU from a slab, without a host bank: the resident engine's bits for every size of cache,
recorded steps and steps issued call by call; and what goes wrong with the disk meanwhile, which ends the run
with file and expert."""

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import EXACT
from cli_tools import check_error, run_decode
from golden_fuels import CASES
from rocket import DeviceError, Engine, FuelError, InputError, _core
from test_expert_cache import GREEDY, SPARKLER, scenario, slots_of
from test_gpu_experts import decode_json

pytestmark = pytest.mark.gpu

SLAB = "experts.slab"
STORE = re.compile(r"slab, (io_uring|preads), (O_DIRECT|buffered), no bank")


def engine(fuel: Path, **options: Any) -> _core.CoreEngine:
    sizes = {"threads": 2, "max_context": 160, "max_rows": 64, "max_streams": 6}
    return _core.CoreEngine(str(fuel), backend="cuda", **{**sizes, **options})


def same(found: tuple[list[np.ndarray], list[int]], wanted: tuple[list[np.ndarray], list[int]]) -> None:
    assert found[1] == wanted[1]
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.fixture(scope="module")
def slab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of sparkler."""
    folder = tmp_path_factory.mktemp("slab")
    _core.FuelSlab(str(SPARKLER), str(folder)).write()
    return folder


@pytest.fixture
def own_slab(slab: Path, tmp_path: Path) -> Path:
    """That a test may damage."""
    return Path(shutil.copytree(slab, tmp_path / "slab"))


@pytest.mark.parametrize("precision", [dict(EXACT), {}], ids=["exact", "rounded"])
@pytest.mark.parametrize("case", [*CASES, None], ids=lambda case: case.name if case else "sparkler")
def test_bits_are_those_of_the_resident_engine(
    case: Any, precision: dict[str, Any], fuel_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuel = case.build(fuel_dir) if case else SPARKLER
    core = engine(fuel, **precision)
    info, wanted = core.info(), scenario(core, 7)
    core.unload()
    _core.FuelSlab(str(fuel), str(tmp_path)).write()
    for size in ("smallest", "one more", "25 %", "50 %"):
        slots = slots_of(size, info)
        behind = {"expert_slots": slots, "expert_slab": str(tmp_path)}
        core = engine(fuel, expert_bank="yes", **behind, **precision)
        assert core.info()["expert_store"] == "host bank"
        for _ in range(2):
            same(scenario(core, 7), wanted)
        with_bank = core.stats()
        core.unload()
        for uring in ("1", "0"):
            monkeypatch.setenv("ROCKET_IO_URING", uring)
            core = engine(fuel, expert_bank="no", **behind, **precision)
            assert STORE.fullmatch(core.info()["expert_store"])
            assert (core.info()["slots"], core.info()["slots_requested"]) == (slots, slots)
            same(scenario(core, 7), wanted)
            same(scenario(core, 7), wanted)  # recorded, from a cache that is warm
            stats = core.stats()
            core.unload()
            assert stats["expert_evictions"] == stats["expert_misses"] - slots
            assert stats["fetch_seconds"] > 0
            for name in ("expert_layers", "streamed_bytes"):
                assert stats[name] == with_bank[name]


def test_bits_with_a_slot_map(slab: Path) -> None:
    core = engine(SPARKLER, **EXACT)
    info, wanted = core.info(), scenario(core, 7)
    core.unload()
    budgets = [min(info["experts"], info["topk"] + layer) for layer in range(info["moe_layers"])]
    core = engine(SPARKLER, layer_slots=budgets, expert_slab=str(slab), expert_bank="no", **EXACT)
    for _ in range(2):
        same(scenario(core, 7), wanted)
    core.unload()


def test_issued_call_by_call(slab: Path, tmp_path: Path) -> None:
    """A trace keeps steps from being recorded: the host looks at the misses of each."""
    tokens, counted = [], []
    for trace in (None, tmp_path / "trace"):
        core = engine(SPARKLER, expert_slots=8, expert_slab=str(slab), expert_bank="no")
        if trace:
            core.start_trace(str(trace))
        tokens.append(scenario(core, 7)[1] + scenario(core, 7)[1])
        counted.append(core.stats()["expert_layers"])
        core.unload()
    assert tokens[0] == tokens[1]
    assert counted[0] == counted[1]


# --- what goes wrong --------------------------------------------------------------------------------------


def runs(core: _core.CoreEngine, steps: int = 6) -> int:
    """A stream whose steps are recorded by now."""
    stream = core.open()
    core.feed(stream, [5, 6, 7])
    for token in range(20, 20 + steps):
        core.decode(stream, token, GREEDY)
    return stream


def fails(core: _core.CoreEngine, stream: int, kind: type[Exception], pattern: str) -> None:
    with pytest.raises(kind, match=pattern) as error:
        for token in range(40, 120):
            core.decode(stream, token, GREEDY)
    assert getattr(error.value, "hint", "")
    with pytest.raises(InputError, match="a step failed half-way"):
        core.decode(stream, 1, GREEDY)
    with pytest.raises(kind, match=pattern):  # what the cache holds is not known any more
        core.feed(core.open(), [5, 6, 7])
    core.unload()


@pytest.mark.parametrize("uring", ["0", "1"])
@pytest.mark.parametrize("change", ["shrinks", "written to"])
@pytest.mark.parametrize("steps", [1, 6], ids=["call by call", "recorded"])
def test_a_slab_that_changes(
    own_slab: Path, change: str, uring: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROCKET_IO_URING", uring)
    core = engine(SPARKLER, expert_slots=4, expert_slab=str(own_slab), expert_bank="no")
    stream = runs(core, steps - 1)
    time.sleep(0.02)  # files have the time of the kernel's last tick
    file = own_slab / SLAB
    if change == "shrinks":
        os.truncate(file, file.stat().st_size // 8)
    else:
        with file.open("r+b") as open_file:
            open_file.seek(-5000, os.SEEK_END)
            open_file.write(b"\x55")
    words = "in use" if change == "shrinks" else "(changed while in use|do not agree with their checksum)"
    begin = time.monotonic()
    fails(core, stream, FuelError, rf"^expert \d+ of layer \d+: .*experts\.slab: .*{words}")
    assert time.monotonic() - begin < 20  # no wait until a limit


@pytest.mark.parametrize("uring", ["0", "1"])
def test_a_disk_that_takes_too_long(slab: Path, uring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit that no disk keeps."""
    monkeypatch.setenv("ROCKET_IO_URING", uring)
    monkeypatch.setenv("ROCKET_EXPERT_READ_SECONDS", "1e-9")
    core = engine(SPARKLER, expert_slots=4, expert_slab=str(slab), expert_bank="no")
    pattern = r"^expert \d+ of layer \d+: .*experts\.slab: the disk gave nothing for 1e-09 s"
    for _ in range(2):
        with pytest.raises(DeviceError, match=pattern):
            core.feed(core.open(), [5, 6, 7])
    core.unload()


def test_unloading_and_loading_again(slab: Path) -> None:
    for _ in range(5):
        core = engine(SPARKLER, expert_slots=4, expert_slab=str(slab), expert_bank="no")
        runs(core)
        core.unload()


# --- what is said -----------------------------------------------------------------------------------------


def test_the_command_line(slab: Path) -> None:
    options = ("--expert-slots", "20", "--expert-slab", str(slab))
    found, err = decode_json(*options, "--expert-bank", "no")
    assert found["token_ids"] == decode_json()[0]["token_ids"]
    assert STORE.fullmatch(found["experts"]["store"])
    assert re.search(r"expert cache: 20 slots, .*; the others in the slab$", err, re.M)
    assert "host bank" not in err
    assert decode_json(*options)[0]["experts"]["store"] == "host bank"


def test_auto_leaves_them_on_the_disk_where_memory_is_short(
    fuel_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuel = next(case for case in CASES if case.name == "groups").build(fuel_dir)
    core = engine(fuel)
    info = core.info()
    core.unload()
    _core.FuelSlab(str(fuel), str(tmp_path)).write()
    slots = info["topk"]
    core = engine(fuel, expert_slots=slots, expert_slab=str(tmp_path), expert_bank="exclusive")
    bank = core.info()["bank_bytes"]
    core.unload()
    # Dense weights and staging fit beside the reserve, the bank of those without a slot does not.
    assert info["dense_bytes"] < bank < info["expert_bytes"]
    monkeypatch.setenv("ROCKET_MEMORY_LIMIT", str((256 << 20) + bank - 1))
    with Engine(fuel, backend="cuda", expert_slots=slots, expert_slab=tmp_path) as small:
        assert STORE.fullmatch(small.info["expert_store"])
        said = [choice for choice in small.info["choices"] if "as a host bank of them needs" in choice]
        assert len(said) == 1
        assert "ROCKET_MEMORY_LIMIT" in said[0]


def test_what_cannot_be(slab: Path) -> None:
    base = ("--backend", "cuda", "--prompt-ids", "5")
    check_error(
        run_decode(*base, "--expert-slots", "20", "--expert-bank", "no"), 2, "experts come from a slab"
    )
    check_error(run_decode(*base, "--expert-bank", "no"), 2, "--expert-bank", "--expert-slots")
    check_error(run_decode(*base, "--expert-slots", "20", "--expert-bank", "some"), 2, "--expert-bank")
    with pytest.raises(InputError, match="expected auto, yes, exclusive or no, found 'some'"):
        engine(SPARKLER, expert_slots=20, expert_slab=str(slab), expert_bank="some")
