"""Reading traces, and replaying them through least-recently-used caches."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan_tools import skewed_ids, write_trace
from rocket.errors import UsageError
from rocket.routing import Routing, replay, run_cache
from rocket.routing_file import read_routing


class NaiveLru:
    """One layer: a table of (expert, last use) and the rules in their plainest form."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.last_use: dict[int, int] = {}
        self.clock = 0

    def step(self, ids: list[int]) -> int:
        """Distinct experts, no more than there are slots; gives the number of hits."""
        hits = [i for i in ids if i in self.last_use]
        for i in sorted(set(ids) - set(hits)):
            if len(self.last_use) >= self.slots:
                others = [e for e in self.last_use if e not in ids]
                del self.last_use[min(others, key=self.last_use.__getitem__)]
            self.last_use[i] = self.clock
        for i in sorted(ids):
            self.clock += 1
            self.last_use[i] = self.clock
        return len(hits)


steps = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3, unique=True), min_size=1, max_size=40)


@given(st.integers(3, 10), steps)
def test_cache_against_a_naive_one(slots: int, steps: list[list[int]]) -> None:
    naive = NaiveLru(slots)
    ids = np.array(steps, np.int32)[:, None]
    run = run_cache(ids, np.arange(1, len(steps) + 1), 10, layer_slots=[slots])
    assert (run.lookups - run.misses)[:, 0].tolist() == [naive.step(step) for step in steps]


def test_steps_of_many_rows_fetch_an_expert_once() -> None:
    ids = np.array([[[0, 1]], [[2, 3]], [[1, 4]], [[0, 4]]], np.int32)
    run = run_cache(ids, np.array([3, 4]), 5, layer_slots=[2])
    # Five experts through two slots, in waves: 0 1, 2 3, 4. The last ones stay: 3 and 4.
    assert (run.lookups[:, 0].tolist(), run.misses[:, 0].tolist()) == ([5, 2], [5, 1])
    assert run.evictions.tolist() == [4]


def test_replay_counts() -> None:
    ids = np.array([[[0, 1]], [[0, 2]], [[1, 3]], [[0, 1]]], np.int32)
    # With 3 slots: 2 misses; 0 hits; 1 hits, 3 pushes 0 out (2 is younger); 0 misses, 1 hits.
    result = replay(Routing(ids, 4), [[3]])
    assert (result.steps, result.hits, result.misses) == (4, 3, 5)
    assert result.hit_rate == 3 / 8
    assert (result.slowest_lookups, result.slowest_misses) == (8, 5)


def test_steps_of_several_streams_count_an_expert_once() -> None:
    ids = np.array([[[0, 1]], [[2, 3]], [[0, 1]], [[4, 5]], [[6, 7]]], np.int32)
    routing = Routing(ids, 8)
    assert [step[:, 0].tolist() for step in routing.steps(2)] == [[[0, 1], [0, 1]], [[2, 3], [4, 5]]]
    result = replay(routing, [[8]], streams=2)
    assert (result.steps, result.lookups, result.misses) == (2, 6, 6)


def test_every_expert_in_a_slot_misses_only_once() -> None:
    ids = skewed_ids(60, 3, 12, 4)
    result = replay(Routing(ids, 12), [[12] * 3])
    assert result.misses == sum(len(np.unique(ids[:, layer])) for layer in range(3))


def test_boosters_share_the_misses() -> None:
    ids = skewed_ids(60, 3, 12, 4)
    owners = [[e % 2 for e in range(12)]] * 3
    one, two = replay(Routing(ids, 12), [[12] * 3]), replay(Routing(ids, 12), [[6] * 3] * 2, 1, owners)
    assert (two.hits, two.misses) == (one.hits, one.misses)
    assert one.misses / 2 <= two.slowest_misses <= one.misses
    counts = [[sum(e % 2 == b for e in layer) for b in (0, 1)] for token in ids for layer in token]
    assert two.slowest_lookups == sum(map(max, counts))


def test_round_trip(tmp_path: Path) -> None:
    ids = skewed_ids(7, 2, 9, 3)
    read = read_routing(write_trace(tmp_path / "trace", ids), 2, 9, 3)
    assert np.array_equal(read.ids, ids)
    fitted, judged = read.halves()
    assert (fitted.tokens, judged.tokens) == (3, 4)
    assert read.loads().sum() == 7 * 2 * 3
    assert read.loads()[1, 4] == np.count_nonzero(ids[:, 1] == 4)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ("expected a line a token", "none")),
        ("{", ("line 2", "broken JSON")),
        ("[]", ("line 2", "object", "[]")),
        ('{"tok": 1}', ("line 2", "layers", "2 lists", "null")),
        ('{"tok": -1, "layers": [[0], [1]]}', ("tok", "at least 0", "-1")),
        ('{"tok": 1.5, "layers": []}', ("tok", "whole number", "1.5")),
        ('{"tok": 1, "layers": [[0, 1]]}', ("layers", "2 lists", "found 1")),
        ('{"tok": 1, "layers": [[0, 1], [2]]}', ("layers[1]", "2 expert ids", "[2]")),
        ('{"tok": 1, "layers": [[0, 1], [2, 9]]}', ("layers[1]", "from 0 to 8", "9")),
        ('{"tok": 1, "layers": [[0, 1], [2, true]]}', ("layers[1]", "true")),
        ('{"tok": 1, "layers": [[0, 1], [2, 2]]}', ("layers[1]", "distinct", "[2, 2]")),
        ('{"tok": 1, "layers": [[0, 1], [2, 3]], "who": 3}', ("who", "tok, layers", "unknown field")),
    ],
)
def test_wrong_traces(tmp_path: Path, line: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "trace"
    file.write_text('{"tok": 1, "layers": [[0, 1], [2, 3]]}\n' * bool(line) + line + "\n")
    with pytest.raises(UsageError) as error:
        read_routing(file, 2, 9, 2)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"--trace {file}")
    for word in words:
        assert word in message
