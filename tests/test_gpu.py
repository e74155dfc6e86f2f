"""The CUDA engine on the trained fuel: the CPU's tokens, bits that no neighbour changes, what BF16 costs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backends import EXACT
from cli_tools import run_rocket
from rocket import _core
from rocket.fuel import resolve
from rocket.tokenizer import Tokenizer

pytestmark = pytest.mark.gpu

FUEL = Path(resolve("sparkler"))
GREEDY = _core.SamplingParams()
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "The capital of Japan is",
    "import os\n",
    "class Point:\n    def __init__(self, x, y):\n",
    "It is a truth universally acknowledged, that",
    "for i in range(10):\n    print(",
    "The language of Brazil is",
    "def add(a, b):\n    ",
    "Return the",
    "In the beginning",
    "try:\n    value = int(text)\nexcept",
    "The population of",
    'def test_empty(self):\n    self.assertEqual("',
    "Raises ValueError if",
    "# Copyright",
    "with open(path) as f:\n",
    "A list of",
    "The following example shows how to",
    "x = [1, 2, 3]\ny =",
]

# A logit whose greatest rivals are this near may go either way when sums run in another order (in standard
# deviations of the row's logits, what the goldens allow).
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer(FUEL)
    return [tokenizer.encode(text) for text in PROMPTS]


def open_engine(backend: str, **options: object) -> _core.CoreEngine:
    sizes = {"max_context": 640, "max_rows": 256, "max_streams": 40, "threads": 0}
    return _core.CoreEngine(str(FUEL), backend=backend, **{**sizes, **options})


@pytest.fixture(scope="module")
def cpu() -> Iterator[_core.CoreEngine]:
    engine = open_engine("cpu")
    yield engine
    engine.unload()


@pytest.fixture(scope="module")
def exact() -> Iterator[_core.CoreEngine]:
    engine = open_engine("cuda", **EXACT)
    yield engine
    engine.unload()


@pytest.fixture(scope="module")
def rounded() -> Iterator[_core.CoreEngine]:
    """As it is by default: BF16 prompts and latents."""
    engine = open_engine("cuda")
    yield engine
    engine.unload()


def generate(engine: _core.CoreEngine, prompt: list[int], tokens: int) -> list[int]:
    stream = engine.open()
    out = [engine.prompt(stream, prompt, GREEDY)]
    while len(out) < tokens:
        out.append(engine.decode(stream, out[-1], GREEDY))
    engine.close(stream)
    return out


def margin(engine: _core.CoreEngine, ids: list[int]) -> float:
    """Between the two largest logits after these tokens, in standard deviations."""
    stream = engine.open()
    engine.feed(stream, ids)
    logits = engine.last_logits()[-1].astype(np.float64)
    engine.close(stream)
    best, second = np.sort(logits)[-1:-3:-1]
    return (best - second) / logits.std()


def test_it_is_the_device_that_computes(exact: _core.CoreEngine, rounded: _core.CoreEngine) -> None:
    assert exact.info()["backend"] == rounded.info()["backend"] == "cuda"
    assert (exact.info()["prefill_precision"], exact.info()["kv_dtype"]) == ("f32", "f32")
    assert (rounded.info()["prefill_precision"], rounded.info()["kv_dtype"]) == ("bf16", "bf16")


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_greedy_tokens_are_the_cpus(
    cpu: _core.CoreEngine, exact: _core.CoreEngine, prompts: list[list[int]], number: int
) -> None:
    prompt = prompts[number]
    expected = generate(cpu, prompt, 256)
    ties, begin = 0, 0
    while begin < 256:  # behind a near tie it goes on from the CPU's token
        found = generate(exact, prompt + expected[:begin], 256 - begin)
        at = next((i for i in range(begin, 256) if found[i - begin] != expected[i]), 256)
        if at < 256:
            gap = margin(cpu, prompt + expected[:at])
            assert gap < NEAR_TIE, (
                f"token {at}: expected {expected[at]}, found {found[at - begin]}; the margin is {gap:.1e}"
            )
            ties += 1
        begin = at + 1
    assert ties <= 1


def test_the_same_tokens_twice(rounded: _core.CoreEngine, prompts: list[list[int]]) -> None:
    assert generate(rounded, prompts[1], 500) == generate(rounded, prompts[1], 500)


def logits_of(engine: _core.CoreEngine, rows: list[_core.Row]) -> np.ndarray:
    return engine.step(rows)[0].copy()


def test_decode_rows_have_the_same_bits_whatever_shares_the_step(
    rounded: _core.CoreEngine, prompts: list[list[int]]
) -> None:
    """One to sixteen decode rows, and prompt rows in the same step, with BF16 prefill on."""
    streams = [rounded.open() for _ in range(17)]
    for stream, prompt in zip(streams, prompts, strict=False):
        rounded.feed(stream, prompt)
    alone = []
    for i, stream in enumerate(streams[:16]):
        fork = rounded.fork(stream)
        alone.append(logits_of(rounded, [_core.Row(10 + i, fork, wants_logits=True)])[0])
        rounded.close(fork)
    for count in range(1, 17):
        forks = [rounded.fork(stream) for stream in streams[:count]]
        rows = [_core.Row(10 + i, fork, wants_logits=True) for i, fork in enumerate(forks)]
        for i, found in enumerate(logits_of(rounded, rows)):
            assert found.tobytes() == alone[i].tobytes(), f"row {i} of {count}"
        for fork in forks:
            rounded.close(fork)
    forks = [rounded.fork(stream) for stream in streams[:5]]
    extra = rounded.open()
    prompt_rows = [_core.Row(t, extra, wants_logits=True, prefill=True) for t in (prompts[5] * 9)[:40]]
    decode_rows = [_core.Row(10 + i, fork, wants_logits=True) for i, fork in enumerate(forks)]
    found = logits_of(rounded, decode_rows[:2] + prompt_rows + decode_rows[2:])
    for i, at in enumerate([0, 1, 42, 43, 44]):
        assert found[at].tobytes() == alone[i].tobytes(), f"decode row {i} beside a prompt"
    for stream in [*forks, extra, *streams]:
        rounded.close(stream)


def test_recorded_steps_are_those_issued_call_by_call(
    exact: _core.CoreEngine, prompts: list[list[int]]
) -> None:
    graph = generate(exact, prompts[0], 64)
    exact.set_profile(True)
    assert generate(exact, prompts[0], 64) == graph
    stages = exact.profile()
    exact.set_profile(False)
    assert all(ms >= 0 for _, ms, _ in stages)
    assert sum(ms for _, ms, part in stages if not part) > 0
    assert generate(exact, prompts[0], 64) == graph


def test_a_kind_of_step_is_recorded_once(prompts: list[list[int]]) -> None:
    """Whatever the length, the stream and the position: each number of rows has one record."""
    engine = open_engine("cuda")
    try:
        streams = []
        for prompt in prompts[:3]:
            streams.append(engine.open())
            engine.feed(streams[-1], prompt)
        before = engine.stats()
        for count, steps in ((1, 20), (3, 20), (1, 20)):
            for step in range(steps):
                turned = streams[step % 3 :] + streams[: step % 3]
                engine.decode_batch(turned[:count], [5 + step] * count, [GREEDY] * count)
            engine.close(streams.pop())  # and another one in its place
            streams.append(engine.open())
            engine.feed(streams[-1], (prompts[4] * 9)[:100])  # too many rows to be recorded
        after = engine.stats()
        assert after["steps_recorded"] - before["steps_recorded"] == 2
        # The first step of each number of rows is issued call by call.
        assert after["steps_replayed"] - before["steps_replayed"] == 20 + 20 + 20 - 2
    finally:
        engine.unload()


def test_the_score_gate_as_a_command(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("".join(PROMPTS) * 4)
    scores = tmp_path / "scores.json"
    score = ("score", "sparkler", "--text", str(text))
    on_cpu = run_rocket(*score, "--backend", "cpu", "--out", str(scores))
    assert on_cpu.status == 0, on_cpu.err
    gate = run_rocket(*score, "--backend", "cuda", "--against", str(scores))
    assert gate.status == 0, gate.out + gate.err


def test_drawn_tokens_are_the_cpus(
    cpu: _core.CoreEngine, exact: _core.CoreEngine, prompts: list[list[int]]
) -> None:
    settings = [
        _core.SamplingParams(temperature=0.8, seed=5),
        _core.SamplingParams(temperature=1.0, top_k=20, seed=6),
        _core.SamplingParams(temperature=1.2, top_p=0.9, seed=7),
        _core.SamplingParams(temperature=0.7, min_p=0.05, top_k=100, top_p=0.95, seed=8),
    ]
    differ = 0
    for sampling in settings:
        stream, other = cpu.open(), exact.open()
        token = cpu.prompt(stream, prompts[0], sampling)
        assert exact.prompt(other, prompts[0], sampling) == token
        for _ in range(64):
            expected = cpu.decode(stream, token, sampling)
            differ += exact.decode(other, token, sampling) != expected
            token = expected
        cpu.close(stream)
        exact.close(other)
    # A draw falls within the rounding of a threshold about once in 10^4.
    assert differ <= 1


def test_what_bf16_costs(cpu: _core.CoreEngine, rounded: _core.CoreEngine, prompts: list[list[int]]) -> None:
    """Teacher-forced: prompts on tensor cores and latents in BF16 against the CPU's float32."""
    changes = []
    for prompt in prompts:
        ids = prompt + generate(cpu, prompt, 200)
        fed, targets = ids[:-1], ids[1:]
        scores = []
        for engine in (cpu, rounded):
            stream = engine.open()
            scores.append(engine.score(stream, fed, targets)[0])
            engine.close(stream)
        changes.append(np.abs(scores[0] - scores[1]))
    change = np.concatenate(changes)
    assert change.mean() <= 0.01
    assert change.max() <= 1.0


@pytest.mark.parametrize(
    ("prefill_precision", "kv_dtype", "mean"), [("f32", "bf16", 0.005), ("bf16", "f32", 0.002)]
)
def test_what_each_rounding_costs(
    cpu: _core.CoreEngine, prompts: list[list[int]], prefill_precision: str, kv_dtype: str, mean: float
) -> None:
    engine = open_engine("cuda", prefill_precision=prefill_precision, kv_dtype=kv_dtype)
    try:
        changes = []
        for prompt in prompts:
            ids = prompt + generate(cpu, prompt, 100)
            scores = []
            for other in (cpu, engine):
                stream = other.open()
                scores.append(other.score(stream, ids[:-1], ids[1:])[0])
                other.close(stream)
            changes.append(np.abs(scores[0] - scores[1]))
        change = np.concatenate(changes)
        assert change.mean() <= mean
        assert change.max() <= 1.0
    finally:
        engine.unload()


def test_a_snapshot_goes_from_the_device_to_the_cpu(
    cpu: _core.CoreEngine, exact: _core.CoreEngine, prompts: list[list[int]], tmp_path: Path
) -> None:
    stream = exact.open()
    exact.feed(stream, prompts[4])
    exact.snapshot(stream, "s")
    exact.save_snapshot("s", str(tmp_path / "s"))
    cpu.load_snapshot("s", str(tmp_path / "s"))
    restored = cpu.restore("s")
    for name in ("kda/0", "conv/1", "latent/3", "pooled/3"):
        assert np.array_equal(exact.state(stream, name), cpu.state(restored, name)), name
    exact.close(stream)
    exact.drop_snapshot("s")
    cpu.close(restored)
    cpu.drop_snapshot("s")


def test_short_memory_is_refused_with_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCKET_DEVICE_MEMORY_LIMIT", "300M")
    with pytest.raises(_core.PlanError, match=r"needs .* GiB .*available 300.00 MiB \(ROCKET_DEVICE_MEMORY"):
        _core.CoreEngine(str(FUEL), backend="cuda", max_context=512, max_streams=1000)
