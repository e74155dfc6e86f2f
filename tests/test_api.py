"""The Python package: an engine, its streams and its errors."""

from pathlib import Path

import numpy as np
import pytest

import rocket
from rocket import Engine, Error, FuelError, InputError, PlanError, Row, SamplingParams
from rocket.random_fuel import make_fuel

PROMPT = [72, 101, 108, 108, 111, 32, 119]


@pytest.fixture(scope="module")
def fuel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fuel(tmp_path_factory.mktemp("fuel") / "tiny")


@pytest.fixture(scope="module")
def engine(fuel: Path):
    with Engine(fuel, backend="cpu") as engine:
        yield engine


def test_names() -> None:
    for name in rocket.__all__:
        assert getattr(rocket, name) is not None
    assert set(rocket.__all__) <= set(dir(rocket))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rocket.nothing
    for kind in (FuelError, PlanError, InputError, rocket.DeviceError):
        assert issubclass(kind, Error)
    assert rocket.__version__


def test_generate_is_greedy_over_the_logits(engine: Engine) -> None:
    tokens = list(engine.generate(PROMPT, tokens=8, stop=()))
    logits = engine.logits(PROMPT + tokens)
    assert logits.shape == (len(PROMPT) + 8, engine.info["vocab"])
    assert logits.dtype == np.float32
    assert tokens == logits[len(PROMPT) - 1 : -1].argmax(1).tolist()


def test_generate_stops(engine: Engine) -> None:
    tokens = list(engine.generate(PROMPT, tokens=8, stop=()))
    assert list(engine.generate(PROMPT, tokens=8, stop=tokens[3:4])) == tokens[: tokens.index(tokens[3]) + 1]
    assert list(engine.generate(PROMPT, tokens=0)) == []
    assert list(engine.generate(PROMPT, tokens=8, stop=(), chunk=2)) == tokens


def test_a_seed_draws_the_same_tokens(engine: Engine) -> None:
    def draw(seed: int) -> list[int]:
        return list(engine.generate(PROMPT, tokens=12, temperature=1.0, seed=seed, stop=()))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_generation_that_is_dropped_closes_its_stream(engine: Engine) -> None:
    for _ in range(3 * engine.info["max_streams"]):
        tokens = engine.generate(PROMPT, tokens=4, stop=())
        next(tokens)
        tokens.close()


def test_streams(engine: Engine) -> None:
    greedy = SamplingParams()
    with engine.open() as stream:
        stream.feed(PROMPT)
        first = stream.sample(greedy)
        assert stream.position == len(PROMPT)
        with stream.fork() as other:
            assert other.decode(first, greedy) == stream.decode(first, greedy)
            assert other.position == stream.position == len(PROMPT) + 1
        stream.truncate(len(PROMPT))
        assert stream.position == len(PROMPT)
        stream.close()
        stream.close()


def test_steps(engine: Engine) -> None:
    whole = engine.logits(PROMPT)
    with engine.open() as stream:
        rows = [Row(token, stream.number, wants_logits=i % 2 == 0) for i, token in enumerate(PROMPT)]
        logits, places = engine.step(rows)
    assert places == [0, 2, 4, 6]
    assert np.array_equal(logits, whole[::2])


def test_text(engine: Engine) -> None:
    ids = engine.tokenizer.encode("The capital")
    assert engine.tokenizer.decode(ids) == "The capital"
    assert engine.eos_ids


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda e: e.generate([]), InputError, "the prompt is empty"),
        (lambda e: e.generate([1], tokens=-1), InputError, "expected 0 or more, found -1"),
        (lambda e: e.generate([1], temperature=float("nan")), InputError, "temperature"),
        (lambda e: e.generate([1], top_p=0.0), InputError, "top_p"),
        (lambda e: list(e.generate([10**6])), InputError, "1000000"),
        (lambda e: list(e.generate([-1])), InputError, "-1"),
        (lambda e: e.logits([1] * (e.info["max_context"] + 1)), PlanError, "context"),
        (lambda e: e.step([Row(1, 999)]), InputError, "stream"),
    ],
)
def test_wrong_calls_are_typed_errors(engine: Engine, call, kind: type[Error], words: str) -> None:
    with pytest.raises(kind, match=words):
        call(engine)
    assert len(list(engine.generate(PROMPT, tokens=2, stop=()))) == 2  # and the engine goes on


def test_wrong_fuels_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(FuelError, match="no such directory") as caught:
        Engine(tmp_path / "none")
    assert caught.value.hint
    with pytest.raises(FuelError, match=r"config\.json"):
        Engine(tmp_path)


def test_a_closed_engine_says_so(fuel: Path) -> None:
    engine = Engine(fuel, backend="cpu", max_context=64)
    tokens = engine.generate(PROMPT, tokens=4, stop=())
    next(tokens)
    engine.close()
    engine.close()
    tokens.close()
    with pytest.raises(InputError, match="closed"):
        engine.logits(PROMPT)


def test_loading_reports_progress_and_can_be_stopped(fuel: Path) -> None:
    seen: list[tuple[int, int]] = []
    with Engine(fuel, backend="cpu", progress=lambda done, total: seen.append((done, total))):
        pass
    assert seen
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        Engine(fuel, backend="cpu", progress=stop)
