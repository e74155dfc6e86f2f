"""Sharing experts out to boosters."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_tools import skewed_ids, small_account
from rocket.errors import UsageError
from rocket.routing import Routing
from rocket.split import WAYS, expected_on, expected_uniform, make_split, sizes
from rocket.split_command import build
from rocket.split_file import SplitFile, read_split


@st.composite
def splits(draw: st.DrawFn):
    experts = draw(st.integers(1, 24))
    layers, boosters = draw(st.integers(0, 4)), draw(st.integers(1, experts))
    topk = draw(st.integers(1, min(4, experts)))
    ids = skewed_ids(draw(st.integers(1, 12)), layers, experts, topk, draw(st.integers(0, 99)))
    return Routing(ids, experts), layers, boosters, draw(st.sampled_from(WAYS))


@given(splits())
@settings(deadline=None, max_examples=150)
def test_every_expert_has_one_owner_and_boosters_balance(case) -> None:
    routing, layers, boosters, by = case
    owners = make_split(routing.experts, layers, boosters, by, routing)
    assert owners.shape == (layers, routing.experts)
    assert ((owners >= 0) & (owners < boosters)).all()
    counts = np.array([np.bincount(row, minlength=boosters) for row in owners]).reshape(layers, boosters)
    if layers:
        assert (counts.max(axis=1) - counts.min(axis=1) <= 1).all()
        assert np.ptp(counts.sum(axis=0)) <= 1
        assert [sizes(routing.experts, boosters, layer) for layer in range(layers)] == counts.tolist()
    assert np.array_equal(owners, make_split(routing.experts, layers, boosters, by, routing))


def test_by_id_is_runs() -> None:
    assert make_split(7, 2, 3, "id").tolist() == [[0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 2, 2]]


def test_by_load_is_more_even_than_by_id() -> None:
    routing = Routing(skewed_ids(200, 4, 24, 4), 24)
    by_id, by_load = (
        expected_on(routing, make_split(24, 4, 4, by, routing), 4).load_imbalance for by in ("id", "load")
    )
    assert by_load < 1.05
    assert by_load < by_id


def test_by_coactivation_finds_groups() -> None:
    """Experts in three groups that never mix, scattered over the ids."""
    rng = np.random.default_rng(1)
    group = rng.permutation(np.repeat(np.arange(3), 5))
    ids = np.empty((90, 2, 3), np.int32)
    for token in range(90):
        for layer in range(2):
            members = np.flatnonzero(group == rng.integers(3))
            ids[token, layer] = np.sort(rng.choice(members, 3, replace=False))
    routing = Routing(ids, 15)
    owners = make_split(15, 2, 3, "coactivation", routing)
    for row in owners:
        assert len({(g, int(b)) for g, b in zip(group.tolist(), row, strict=True)}) == 3
    # One booster is visited in each layer, and two of three times it is not the token's home.
    assert expected_on(routing, owners, 3).hidden_rows == pytest.approx(2 * 2 / 3)
    by_id = make_split(15, 2, 3, "id")
    assert expected_on(routing, owners, 3).hidden_rows < expected_on(routing, by_id, 3).hidden_rows


def test_expected_on_a_trace_by_hand() -> None:
    ids = np.array([[[0, 1]], [[0, 2]], [[0, 1]], [[1, 3]]], np.int32)
    owners = np.array([[0, 0, 1, 1]], np.int32)
    expected = expected_on(Routing(ids, 4), owners, 2)
    assert expected.load_imbalance == 6 / 4  # 6 of 8 rows on booster 0
    assert expected.step_imbalance == (2 + 1 + 2 + 1) / 4
    assert expected.hidden_rows == (1 + 2 + 1 + 2) / 4 / 2
    assert expected.expert_rows == 1
    assert expected.rows == expected.hidden_rows + 1


@pytest.mark.parametrize(("experts", "boosters", "topk"), [(6, 2, 2), (7, 3, 3), (5, 5, 2), (6, 1, 4)])
def test_expected_uniform_against_every_set(experts: int, boosters: int, topk: int) -> None:
    sets = np.array(list(combinations(range(experts), topk)), np.int32)[:, None, :]
    owners = make_split(experts, 1, boosters, "id")
    counted, exact = (
        expected_on(Routing(sets, experts), owners, boosters),
        expected_uniform(experts, 1, topk, boosters),
    )
    assert exact.load_imbalance == pytest.approx(counted.load_imbalance)
    assert exact.step_imbalance == pytest.approx(counted.step_imbalance)
    assert exact.hidden_rows == pytest.approx(counted.hidden_rows)
    assert exact.expert_rows == pytest.approx(counted.expert_rows)


def test_file_round_trip_and_bytes(tmp_path: Path) -> None:
    account = small_account()
    split = build("a fuel", account, 3, "id", None)
    assert sum(split.bytes_of_booster) == account.slot_bytes * 10 * 4
    assert sum(split.experts_of_booster) == 40
    file = tmp_path / "split.json"
    file.write_text(split.text())
    assert read_split(str(file), account, 3) == split
    assert read_split(str(file), account, None).owners.tolist() == make_split(10, 4, 3, "id").tolist()
    assert split.text() == SplitFile.model_validate_json(file.read_bytes()).text()


def change(split: SplitFile, **fields: object) -> str:
    return json.dumps({**json.loads(split.text()), **fields})


def test_order_of_keys_does_not_matter(tmp_path: Path) -> None:
    account = small_account()
    split = build("a fuel", account, 3, "id", None)

    def backwards(value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {key: backwards(value[key]) for key in reversed(value)}

    file = tmp_path / "split.json"
    file.write_text(json.dumps(backwards(split.model_dump())))
    assert read_split(str(file), account, 3).owners.tolist() == split.owners.tolist()


def test_wrong_files(tmp_path: Path) -> None:
    account = small_account()
    split = build("a fuel", account, 2, "id", None)
    owner, e = split.owner, split.expected.model_dump()
    other = small_account(experts=12)
    cases = [
        (change(split), account, 3, ("boosters", "expected 3", "found 2")),
        (change(split), other, 2, ("fuel.experts", "expected 12", "found 10", "a fuel")),
        (change(split, format="rocket-split-9"), account, 2, ("format", "rocket-split-1", "rocket-split-9")),
        (change(split, colour="red"), account, 2, ("colour", "unknown field", "red")),
        (change(split, boosters="2"), account, 2, ("boosters", "whole number", '"2"')),
        (change(split, boosters=0), account, None, ("boosters", "at least 1", "0")),
        (change(split, owner={}), account, 2, ("owner", "[2, 3, 4, 5]")),
        (change(split, owner={**owner, "3": [0]}), account, 2, ("owner.3", "each of 10 experts", "1")),
        (change(split, owner={**owner, "3": [0] * 9 + [2]}), account, 2, ("owner.3", "from 0 to 1", "2")),
        (change(split, owner={**owner, "3": [0] * 9 + [1]}), account, 2, ("owner.3", "within one", "[9, 1]")),
        (change(split, boosters=10**9), account, None, ("boosters", "at most 10", "1000000000")),
        (change(split, experts_of_booster=[40]), account, 2, ("experts_of_booster", "[20, 20]", "[40]")),
        (change(split, experts_of_booster=[19, 21]), account, 2, ("experts_of_booster", "[20, 20]")),
        (change(split, bytes_of_booster=[1, 2]), account, 2, ("bytes_of_booster", "[1, 2]")),
        (change(split, bytes_of_booster=[]), account, 2, ("bytes_of_booster", "[]")),
        (change(split, expected={**e, "load_imbalance": 0.9}), account, 2, ("load_imbalance", "at least 1")),
        (change(split, expected={**e, "step_imbalance": -1.0}), account, 2, ("step_imbalance", "at least 1")),
        (
            change(split, expected={**e, "expert_rows_a_token": -1.0}),
            account,
            2,
            ("expert_rows", "at least"),
        ),
        (change(split, expected={**e, "cross_booster_rows_a_token": 1.0}), account, 2, ("the sum of both",)),
        (split.text().replace('"by"', '"boosters": 2, "by"'), account, 2, ("field once", '"boosters" twice')),
        ("{", account, 2, ("broken JSON",)),
        ("[]", account, 2, ("object", "[]")),
    ]
    for text, fuel, boosters, words in cases:
        file = tmp_path / "split.json"
        file.write_text(text)
        with pytest.raises(UsageError) as error:
            read_split(str(file), fuel, boosters)
        message = str(error.value)
        assert message.startswith(f"--split {file}: ")
        assert "\n" not in message
        for word in words:
            assert word in message, message


@pytest.mark.parametrize(("boosters", "by", "words"), [
    (0, "id", ("--boosters", "1 to 10", "found 0")),
    (11, "id", ("--boosters", "1 to 10", "found 11")),
    (2, "load", ("--by load", "--trace", "none")),
    (2, "colour", ("--by", "id, load, coactivation", "'colour'")),
])  # fmt: skip
def test_wrong_requests(boosters: int, by: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        make_split(10, 4, boosters, by)
    for word in words:
        assert word in str(error.value)
