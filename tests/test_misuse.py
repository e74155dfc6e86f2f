"""Misuse of the API: closed handles, other streams' logits, several threads, weights that are not finite."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from rocket import DeviceError, Engine, FuelError, InputError, PlanError, SamplingParams
from rocket.random_fuel import make_fuel


@pytest.fixture(scope="module")
def fuel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fuel(tmp_path_factory.mktemp("fuel") / "tiny")


@pytest.fixture
def engine(fuel: Path) -> Iterator[Engine]:
    with Engine(fuel, max_context=2000) as engine:
        yield engine


def test_a_closed_stream_reaches_no_other(engine: Engine) -> None:
    closed = engine.open()
    closed.close()
    other = engine.open()
    assert other.number == closed.number
    calls: list[Callable[[], object]] = [
        lambda: closed.feed([1]),
        lambda: closed.feed_logits([1]),
        lambda: closed.decode(1, SamplingParams()),
        lambda: closed.sample(SamplingParams()),
        lambda: closed.fork(),
        lambda: closed.truncate(0),
        lambda: closed.commit(0),
        lambda: closed.snapshot("x"),
        lambda: closed.position,
    ]
    for call in calls:
        with pytest.raises(InputError, match="the stream is closed"):
            call()
    assert other.position == 0


def test_a_stream_draws_from_its_own_logits(engine: Engine) -> None:
    a, b = engine.open(), engine.open()
    a.feed([1, 2, 3])
    own = a.sample(SamplingParams())
    b.feed([9, 8])
    with pytest.raises(InputError, match=r"no logits of stream"):
        a.sample(SamplingParams())
    assert own == next(iter(engine.generate([1, 2, 3], tokens=1)))


def test_threads_take_turns(engine: Engine) -> None:
    expected = list(engine.generate([1, 2], 200, stop=()))
    found: list[list[int]] = [[], [], []]

    def run(i: int) -> None:
        found[i] = list(engine.generate([1, 2], 200, stop=()))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 3


def test_closing_waits_for_the_call_in_progress(fuel: Path) -> None:
    engine = Engine(fuel)
    errors = []

    def run() -> None:
        try:
            list(engine.generate([1, 2], 5000, stop=()))
        except InputError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.1)
    engine.close()
    thread.join()
    assert errors == ["the engine is closed"]


def test_a_thread_at_the_end_of_the_program(fuel: Path) -> None:
    program = f"""
import threading, time
from rocket import Engine
engine = Engine({str(fuel)!r})
threading.Thread(target=lambda: list(engine.generate([1], 8000, stop=())), daemon=True).start()
time.sleep(0.1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["lm_head.weight", "down_proj.weight_scale", "self_attn.o_proj.weight"])
def test_weights_that_are_not_finite_give_no_tokens(tmp_path: Path, name: str) -> None:
    """A NaN anywhere on a token's way ends in an error, not in a token."""
    fuel = make_fuel(tmp_path / "nan")
    file = fuel / "model.safetensors"
    raw = bytearray(file.read_bytes())
    from rocket._core import read_headers

    hit = 0
    for tensor, dtype, _, offset, size in read_headers(str(fuel))[0]["tensors"]:
        if tensor.endswith(name):
            hit += 1
            raw[offset : offset + size] = (b"\x7f" if dtype == "F8_E4M3" else b"\xff") * size
    assert hit
    file.write_bytes(raw)
    with Engine(fuel) as engine, pytest.raises(FuelError, match=r"logits after token \d+ are not finite"):
        list(engine.generate([1, 2, 3], 4))


def test_a_snapshot_replaces_no_device(engine: Engine, tmp_path: Path) -> None:
    stream = engine.open()
    stream.feed([1, 2])
    stream.snapshot("x")
    for target in (Path("/dev/null"), tmp_path):
        with pytest.raises(DeviceError, match="expected a regular file"):
            engine.save_snapshot("x", target)
    assert Path("/dev/null").is_char_device()
    engine.save_snapshot("x", tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors")["tokens"].tolist() == [1, 2]


def test_a_snapshot_of_other_tokens_is_refused(engine: Engine, tmp_path: Path) -> None:
    stream = engine.open()
    stream.feed([1, 2])
    stream.snapshot("x")
    file = tmp_path / "x.safetensors"
    engine.save_snapshot("x", file)
    tensors = load_file(file)
    tensors["tokens"][0] = 10**6
    save_file(tensors, file)
    with pytest.raises(FuelError, match="cannot be"):
        engine.load_snapshot("y", file)


def test_more_tokens_than_the_context_holds(engine: Engine) -> None:
    with pytest.raises(PlanError, match="do not fit into 2000"):
        engine.generate([1], 10**9)


def test_absurd_thread_counts(fuel: Path) -> None:
    with pytest.raises(InputError, match="threads: expected 0"):
        Engine(fuel, threads=5000)


@pytest.mark.parametrize(
    ("field", "value"), [("scoring_func", "softmax"), ("topk_method", "greedy"), ("mhc", False)]
)
def test_a_config_that_asks_for_something_else(tmp_path: Path, field: str, value: object) -> None:
    import json

    fuel = make_fuel(tmp_path / "other")
    config = json.loads((fuel / "config.json").read_text())
    config["text_config"][field] = value
    (fuel / "config.json").write_text(json.dumps(config))
    with pytest.raises(FuelError, match=field):
        Engine(fuel)
