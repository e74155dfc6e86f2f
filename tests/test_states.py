"""A stream's tokens and states do not depend on how it got there: chunks, batch neighbours, forks, snapshots,
checkpoints, truncation. All is compared, bit for bit, with streams that get one token a step, and no more."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from backends import EXACT, with_backends
from fuel_files import read_headers, read_tensor
from golden_fuels import CASES, Case
from rocket import _core
from rocket._core import Row

MAX_CONTEXT = 160
MAX_ROWS = 128
MAX_STREAMS = 12


class Plain:
    """The naive model: a stream of its own, one token a step; what came out is remembered.

    A stream stays open where it ended, and goes on from there when a longer run begins alike."""

    OPEN = 16

    def __init__(self, fuel: Path, names: list[str], backend: str) -> None:
        self.engine = _core.CoreEngine(
            str(fuel),
            backend=backend,
            threads=1,
            max_context=MAX_CONTEXT,
            max_rows=8,
            max_streams=self.OPEN + 2,
            **EXACT,
        )
        self.names = names
        self._logits: dict[tuple[int, ...], np.ndarray] = {}
        self._states: dict[tuple[int, ...], dict[str, np.ndarray]] = {}
        self._open: dict[tuple[int, ...], int] = {}  # tokens -> stream, the longest unused first

    def _run(self, ids: tuple[int, ...]) -> int:
        """A stream that has had these tokens and no others."""
        past = max((known for known in self._open if ids[: len(known)] == known), key=len, default=None)
        stream = self.engine.open() if past is None else self._open.pop(past)
        for i in range(len(past or ()), len(ids)):
            logits, _ = self.engine.step([Row(ids[i], stream, wants_logits=True)])
            self._logits[ids[: i + 1]] = logits[0].copy()
        self._open[ids] = stream
        if len(self._open) > self.OPEN:
            self.engine.close(self._open.pop(next(iter(self._open))))
        return stream

    def logits(self, ids: list[int], begin: int = 0) -> np.ndarray:
        """After each token from index `begin` on."""
        if tuple(ids) not in self._logits:
            self._run(tuple(ids))
        return np.stack([self._logits[tuple(ids[: i + 1])] for i in range(begin, len(ids))])

    def states(self, ids: list[int]) -> dict[str, np.ndarray]:
        if tuple(ids) not in self._states:
            self._states[tuple(ids)] = states(self.engine, self._run(tuple(ids)), self.names)
        return self._states[tuple(ids)]


def states(engine: _core.CoreEngine, stream: int, names: list[str]) -> dict[str, np.ndarray]:
    return {name: np.array(engine.state(stream, name)).ravel() for name in names}


def same(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    assert found.shape == expected.shape, what
    assert np.isfinite(expected).all(), what
    if found.tobytes() != expected.tobytes():
        differ = found.view(np.uint32) != expected.view(np.uint32)
        worst = float(np.abs(found.astype(np.float64) - expected).max())
        raise AssertionError(f"{what}: {differ.sum()} of {found.size} values differ, by up to {worst:.2e}")


@dataclasses.dataclass
class Bench:
    case: Case
    fuel: Path
    engine: _core.CoreEngine
    plain: Plain

    def tokens(self, n: int, seed: int = 0) -> list[int]:
        raw = np.random.PCG64(1000 + seed).random_raw(n)
        return [int(x) % self.case.shape.vocab_size for x in raw]

    def run(self, parts: list[tuple[int, list[int], list[int]]], checkpoint: bool = False) -> None:
        """One step. A part is a stream, its tokens so far, and those it gets. All logits are checked."""
        rows = [Row(t, s, wants_logits=True, checkpoint=checkpoint) for s, _, new in parts for t in new]
        logits, wanted = self.engine.step(rows)
        assert list(wanted) == list(range(len(rows)))
        first = 0
        for stream, past, new in parts:
            expected = self.plain.logits(past + new, len(past))
            same(logits[first : first + len(new)], expected, f"stream {stream} at {len(past)} + {len(new)}")
            first += len(new)

    def check(self, stream: int, ids: list[int]) -> None:
        """The stream stands where a plain run of `ids` stands."""
        assert self.engine.position(stream) == len(ids)
        found, expected = states(self.engine, stream, self.plain.names), self.plain.states(ids)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            same(value, expected[name], f"{name} at {len(ids)}")

    def check_on(self, stream: int, ids: list[int], more: int = 5) -> None:
        """And so does what follows, over a pool border. Moves the stream."""
        self.check(stream, ids)
        for token in self.tokens(more, len(ids)):
            self.run([(stream, ids, [token])])
            ids = [*ids, token]
        self.check(stream, ids)


def state_names(case: Case) -> list[str]:
    names = []
    for i in range(case.shape.num_hidden_layers):
        if case.shape.is_kda(i):
            names += [f"kda/{i}", f"conv/{i}"]
        else:
            names += [f"latent/{i}"] + [f"pooled/{i}"] * case.shape.indexer_full(i)
    return names


@pytest.fixture(scope="module", params=with_backends(CASES))
def loaded(request: pytest.FixtureRequest, fuel_dir: Path) -> Iterator[Bench]:
    case: Case = request.param[0]
    backend: str = request.param[1]
    fuel = case.build(fuel_dir)
    engine = _core.CoreEngine(
        str(fuel),
        backend=backend,
        threads=2,
        max_context=MAX_CONTEXT,
        max_rows=MAX_ROWS,
        max_streams=MAX_STREAMS,
        **EXACT,
    )
    plain = Plain(fuel, state_names(case), backend)
    yield Bench(case, fuel, engine, plain)
    engine.unload()
    plain.engine.unload()


def clear(engine: _core.CoreEngine) -> None:
    for stream in range(MAX_STREAMS):
        try:
            engine.close(stream)
        except _core.InputError:
            continue  # was not open
    for name in engine.snapshots():
        engine.drop_snapshot(name)


@pytest.fixture
def bench(loaded: Bench) -> Iterator[Bench]:
    """With no stream or snapshot left over from an earlier test."""
    clear(loaded.engine)
    yield loaded
    clear(loaded.engine)


@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("chunk", [1, 3, 7, 64, 100])
def test_chunks(bench: Bench, chunk: int, prefill: bool) -> None:
    ids = bench.tokens(100)
    expected = bench.plain.logits(ids)
    stream = bench.engine.open()
    for begin in range(0, len(ids), chunk):
        part = ids[begin : begin + chunk]
        logits, _ = bench.engine.step([Row(t, stream, wants_logits=True, prefill=prefill) for t in part])
        same(logits, expected[begin : begin + chunk], f"positions from {begin}")
    bench.check_on(stream, ids)


@pytest.mark.parametrize("chunk", [0, 1, 3, 7, 64])
def test_feed(bench: Bench, chunk: int) -> None:
    ids = bench.tokens(100)
    stream = bench.engine.open()
    logits = bench.engine.feed(stream, ids, logits="all", chunk=chunk)
    assert logits is not None
    same(logits, bench.plain.logits(ids), "feed")
    bench.check_on(stream, ids)
    assert bench.engine.feed(bench.engine.open(), ids, chunk=chunk) is None
    same(bench.engine.last_logits(), bench.plain.logits(ids, len(ids) - 1), "the last row of feed")


def test_only_the_wanted_rows_give_logits(bench: Bench) -> None:
    ids = bench.tokens(20)
    stream = bench.engine.open()
    logits, rows = bench.engine.step([Row(t, stream, wants_logits=i % 3 == 1) for i, t in enumerate(ids)])
    assert list(rows) == list(range(1, 20, 3))
    same(logits, bench.plain.logits(ids)[1::3], "every third row")
    logits, rows = bench.engine.step([Row(5, stream)])
    assert (len(logits), list(rows)) == (0, [])
    bench.check(stream, [*ids, 5])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_batches_of_streams_of_different_lengths(bench: Bench, count: int) -> None:
    """Prompts of some streams beside decode rows of others, then all decode together."""
    pool, topk = bench.case.shape.index_kpool, bench.case.shape.index_topk
    prompt = [topk + pool, 1, topk - 1, 63, 2 * pool + 1][:count]
    ids = [bench.tokens(150, seed) for seed in range(count)]
    streams = [bench.engine.open() for _ in range(count)]
    at = [0] * count
    for turn in range(35):
        parts = []
        for s in range(count):
            n = 1 if at[s] >= prompt[s] else min(prompt[s] - at[s], (turn * 5 + s * 3) % 20 + s + 1)
            parts.append((streams[s], ids[s][: at[s]], ids[s][at[s] : at[s] + n]))
            at[s] += n
        bench.run(parts if turn % 2 else parts[::-1])
    for s in range(count):
        bench.check(streams[s], ids[s][: at[s]])


@pytest.mark.parametrize("length", [1, 4, 33, 66])
def test_fork(bench: Bench, length: int) -> None:
    ids = bench.tokens(length)
    stream = bench.engine.open()
    bench.engine.feed(stream, ids)
    child = bench.engine.fork(stream)
    assert child != stream
    left, right = bench.tokens(9, 1), bench.tokens(9, 2)
    bench.run([(stream, ids, left), (child, ids, right)])
    bench.check(stream, ids + left)
    bench.engine.close(stream)
    bench.check_on(child, ids + right)


@pytest.mark.parametrize("length", [1, 4, 33, 66])
def test_snapshots(bench: Bench, length: int, tmp_path: Path) -> None:
    ids, more = bench.tokens(length), bench.tokens(7, 1)
    stream = bench.engine.open()
    bench.engine.feed(stream, ids)
    bench.engine.snapshot(stream, "here")
    bench.run([(stream, ids, more)])
    assert bench.engine.snapshots() == ["here"]
    bench.engine.close(stream)  # snapshots outlive their stream
    first, second = bench.engine.restore("here"), bench.engine.restore("here")
    bench.check_on(first, ids)
    bench.check_on(second, ids)

    file = tmp_path / "snapshot"
    bench.engine.save_snapshot("here", str(file))
    bench.engine.drop_snapshot("here")
    assert bench.engine.snapshots() == []
    with pytest.raises(_core.InputError, match="here"):
        bench.engine.restore("here")
    bench.engine.load_snapshot("again", str(file))
    assert bench.engine.snapshots() == ["again"]
    bench.check_on(bench.engine.restore("again"), ids)


def test_a_snapshot_file_serves_another_engine(bench: Bench, tmp_path: Path) -> None:
    ids = bench.tokens(45)
    stream = bench.engine.open()
    bench.engine.feed(stream, ids)
    bench.engine.snapshot(stream, "s")
    bench.engine.save_snapshot("s", str(tmp_path / "snapshot"))
    other = bench.plain.engine
    other.load_snapshot("from a file", str(tmp_path / "snapshot"))
    restored = other.restore("from a file")
    found, expected = states(other, restored, bench.plain.names), bench.plain.states(ids)
    for name, value in found.items():
        same(value, expected[name], name)
    other.close(restored)
    other.drop_snapshot("from a file")


@pytest.mark.parametrize("damage", ["short", "flipped", "empty", "text"])
def test_a_damaged_snapshot_file_is_refused(bench: Bench, tmp_path: Path, damage: str) -> None:
    stream = bench.engine.open()
    bench.engine.feed(stream, bench.tokens(9))
    bench.engine.snapshot(stream, "s")
    file = tmp_path / "snapshot"
    bench.engine.save_snapshot("s", str(file))
    raw = bytearray(file.read_bytes())
    raw[0] ^= 0xFF
    file.write_bytes(
        {"short": bytes(file.read_bytes()[:-1]), "flipped": bytes(raw), "empty": b"", "text": b"hi\n"}[damage]
    )
    with pytest.raises(_core.Error, match="snapshot"):
        bench.engine.load_snapshot("t", str(file))
    assert bench.engine.snapshots() == ["s"]
    bench.check_on(stream, bench.tokens(9))


@pytest.mark.parametrize("length", [0, 1, 3, 31, 34, 63])
def test_commit_after_each_row(bench: Bench, length: int) -> None:
    """A draft's verification: k + 1 rows with checkpoints, of which a part is kept."""
    past, draft = bench.tokens(length), bench.tokens(6, 1)
    for kept in range(len(draft) + 1):
        stream = bench.engine.open()
        if past:
            bench.engine.feed(stream, past)
        bench.run([(stream, past, draft)], checkpoint=True)
        bench.engine.commit(stream, kept)
        bench.check_on(stream, past + draft[:kept])
        bench.engine.close(stream)


def test_commit_beside_other_streams(bench: Bench) -> None:
    """Several streams verify drafts in one step and keep different parts; then again, without closing."""
    ids = [bench.tokens(n, n) for n in (30, 2, 17)]
    streams = [bench.engine.open() for _ in ids]
    for stream, past in zip(streams, ids, strict=True):
        bench.engine.feed(stream, past)
    for turn in range(6):
        drafts = [bench.tokens(4, 10 * turn + s) for s in range(len(ids))]
        bench.run(list(zip(streams, ids, drafts, strict=True)), checkpoint=True)
        for s, stream in enumerate(streams):
            kept = (turn * 2 + s * 3) % 5
            bench.engine.commit(stream, kept)
            ids[s] = ids[s] + drafts[s][:kept]
    for stream, past in zip(streams, ids, strict=True):
        bench.check_on(stream, past)


def test_a_step_without_commit_keeps_all_rows(bench: Bench) -> None:
    past, draft = bench.tokens(10), bench.tokens(5, 1)
    stream = bench.engine.open()
    bench.engine.feed(stream, past)
    bench.run([(stream, past, draft)], checkpoint=True)
    bench.check_on(stream, past + draft)


def test_commit_of_what_was_not_kept_is_refused(bench: Bench) -> None:
    ids = bench.tokens(6)
    stream = bench.engine.open()
    bench.engine.step([Row(t, stream, checkpoint=i == 2) for i, t in enumerate(ids)])
    for rows in (2, -1, 7):
        with pytest.raises(_core.InputError):
            bench.engine.commit(stream, rows)
    bench.engine.commit(stream, 3)
    bench.check_on(stream, ids[:3])


@pytest.mark.parametrize("snapshots", [[], [0], [20], [1, 33, 60], [70]])
def test_truncate(bench: Bench, snapshots: list[int]) -> None:
    """To a snapshot, right after one, before any, and to where it stands."""
    ids = bench.tokens(70)
    for position in (70, 69, 61, 60, 34, 32, 5, 1, 0):
        stream = bench.engine.open()
        for begin, end in zip([0, *snapshots], [*snapshots, 70], strict=True):
            if begin < end:
                bench.engine.feed(stream, ids[begin:end])
            if end in snapshots:
                bench.engine.snapshot(stream, f"at {end}")
        bench.engine.truncate(stream, position)
        bench.check_on(stream, ids[:position])
        bench.engine.close(stream)
        for name in bench.engine.snapshots():
            bench.engine.drop_snapshot(name)


def embedding_table(fuel: Path) -> np.ndarray:
    (name,) = [n for n in read_headers(fuel) if n.endswith("embed_tokens.weight") and ".layers." not in n]
    if read_headers(fuel)[name][1]["dtype"] not in ("F32", "BF16"):
        pytest.skip("the embedding of this fuel is packed, and only the engine unpacks it")
    return np.ascontiguousarray(read_tensor(fuel, name), np.float32)


@pytest.mark.parametrize("chunk", [1, 40])
def test_embeddings_instead_of_tokens(bench: Bench, chunk: int) -> None:
    ids, table = bench.tokens(40), embedding_table(bench.fuel)
    stream = bench.engine.open()
    for begin in range(0, len(ids), chunk):
        rows = [
            Row(stream=stream, embedding=table[t]) if i % 3 else Row(t, stream)
            for i, t in enumerate(ids[begin : begin + chunk], begin)
        ]
        bench.engine.step(rows)
    bench.check_on(stream, ids)


def test_embeddings_are_replayed(bench: Bench, tmp_path: Path) -> None:
    """Going back over rows that came as embeddings, also after a way through a file."""
    ids, table = bench.tokens(40), embedding_table(bench.fuel)
    stream = bench.engine.open()
    rows = [Row(stream=stream, embedding=table[t]) if i % 3 else Row(t, stream) for i, t in enumerate(ids)]
    bench.engine.step(rows)
    bench.engine.snapshot(stream, "s")
    bench.engine.save_snapshot("s", str(tmp_path / "snapshot"))
    bench.engine.load_snapshot("t", str(tmp_path / "snapshot"))
    restored = bench.engine.restore("t")
    for one, position in ((stream, 29), (restored, 33)):
        bench.engine.truncate(one, position)
        bench.check_on(one, ids[:position])


def test_a_step_that_cannot_be_changes_nothing(bench: Bench) -> None:
    ids, table = bench.tokens(21), embedding_table(bench.fuel)
    stream, other = bench.engine.open(), bench.engine.open()
    bench.engine.feed(stream, ids)
    vocab = bench.case.shape.vocab_size
    nan = table[1].copy()
    nan[3] = np.nan
    good = Row(1, stream)
    for rows in (
        [good, Row(vocab, stream)],
        [good, Row(-1, stream)],
        [good, Row(1, 99)],
        [good, Row(1, stream, position=20)],
        [Row(1, stream, position=22)],
        [good, Row(1, other), Row(2, stream)],
        [good, Row(stream=stream, embedding=nan)],
    ):
        with pytest.raises(_core.InputError):
            bench.engine.step(rows)
    for rows in ([good] * (MAX_ROWS + 1), [Row(t % vocab, other) for t in range(MAX_CONTEXT + 1)]):
        with pytest.raises(_core.PlanError):
            bench.engine.step(rows)
    bench.engine.step([Row(1, stream, position=21)])
    bench.check_on(stream, [*ids, 1])
    bench.check(other, [])


class Mix(RuleBasedStateMachine):
    """Random operations, against a model that is a list of tokens for each stream and snapshot."""

    bench: Bench
    directory: Path

    def __init__(self) -> None:
        super().__init__()
        clear(self.bench.engine)
        self.streams: dict[int, list[int]] = {}
        self.saved: dict[str, list[int]] = {}
        self.count = 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.streams)), label="stream")

    def pick_saved(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.saved)), label="snapshot")

    def fresh_name(self) -> str:
        self.count += 1
        return f"s{self.count}"

    def draw_parts(self, data: st.DataObject, most: int) -> list[tuple[int, list[int], list[int]]]:
        chosen = data.draw(
            st.lists(st.sampled_from(sorted(self.streams)), min_size=1, max_size=5, unique=True)
        )
        parts = []
        for stream in chosen:
            past = self.streams[stream]
            room = min(most, MAX_CONTEXT - 5 - len(past))
            if room > 0:
                n, seed = data.draw(st.tuples(st.integers(1, room), st.integers(0, 3)), label="rows, seed")
                parts.append((stream, past, self.bench.tokens(n, seed)))
        return parts

    @precondition(lambda self: len(self.streams) < MAX_STREAMS)
    @rule(length=st.sampled_from([0, 30, 62, 100]))
    def open(self, length: int) -> None:
        stream = self.bench.engine.open()
        assert stream not in self.streams
        self.streams[stream] = self.bench.tokens(length)
        if length:
            self.bench.engine.feed(stream, self.streams[stream], chunk=24)

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), most=st.sampled_from([1, 4, 25]))
    def step(self, data: st.DataObject, most: int) -> None:
        parts = self.draw_parts(data, most)
        if parts:
            self.bench.run(parts)
        for stream, past, new in parts:
            self.streams[stream] = past + new

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def verify(self, data: st.DataObject) -> None:
        parts = self.draw_parts(data, 6)
        if parts:
            self.bench.run(parts, checkpoint=True)
        for stream, past, new in parts:
            kept = data.draw(st.integers(0, len(new)), label="kept")
            self.bench.engine.commit(stream, kept)
            self.streams[stream] = past + new[:kept]

    @precondition(lambda self: 0 < len(self.streams) < MAX_STREAMS)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        stream = self.pick(data)
        child = self.bench.engine.fork(stream)
        assert child not in self.streams
        self.streams[child] = self.streams[stream]

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        stream = self.pick(data)
        self.bench.engine.close(stream)
        del self.streams[stream]

    @precondition(lambda self: self.streams and len(self.saved) < 6)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        stream, name = self.pick(data), self.fresh_name()
        self.bench.engine.snapshot(stream, name)
        self.saved[name] = self.streams[stream]

    @precondition(lambda self: self.saved and len(self.streams) < MAX_STREAMS)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        name = self.pick_saved(data)
        stream = self.bench.engine.restore(name)
        assert stream not in self.streams
        self.streams[stream] = self.saved[name]

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = self.pick_saved(data)
        self.bench.engine.drop_snapshot(name)
        del self.saved[name]

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def through_a_file(self, data: st.DataObject) -> None:
        name, again = self.pick_saved(data), self.fresh_name()
        self.bench.engine.save_snapshot(name, str(self.directory / "snapshot"))
        self.bench.engine.drop_snapshot(name)
        self.bench.engine.load_snapshot(again, str(self.directory / "snapshot"))
        self.saved[again] = self.saved.pop(name)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        stream = self.pick(data)
        position = data.draw(st.integers(0, len(self.streams[stream])), label="position")
        self.bench.engine.truncate(stream, position)
        self.streams[stream] = self.streams[stream][:position]

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        stream = self.pick(data)
        self.bench.check(stream, self.streams[stream])

    def teardown(self) -> None:
        assert sorted(self.bench.engine.snapshots()) == sorted(self.saved)
        for stream, ids in self.streams.items():
            self.bench.check_on(stream, ids)
        clear(self.bench.engine)


def test_random_mixes(bench: Bench, tmp_path: Path) -> None:
    machine = type("Mix", (Mix,), {"bench": bench, "directory": tmp_path})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
