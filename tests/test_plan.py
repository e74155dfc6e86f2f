"""Plans: what fits, what is left, what to change."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plan_tools import booster_of, skewed_ids, small_account
from rocket import booster as boosters
from rocket import fuel_account
from rocket._core import CoreEngine
from rocket.accounting import State
from rocket.architecture import GLM5_NEXT, GLM_MOE_DSA
from rocket.errors import UsageError
from rocket.plan import (
    OverBudgetError,
    Request,
    exchange_by_context,
    exchange_by_slots,
    fewest_slots,
    fits,
    longest_context,
    make_plan,
    owned_by_each,
    spread,
    stream_state_bytes,
    workspace_bytes,
)
from rocket.plan_remedies import remedies, two_kinds
from rocket.plan_time import MissSource, ceilings, miss_source, step_time
from rocket.random_fuel import make_fuel
from rocket.random_fuel_shape import FuelOptions, Shape
from rocket.routing import Routing, replay
from rocket.split import make_split

MIB = 1 << 20


@st.composite
def requests(draw: st.DrawFn):
    """A small fuel and any request for it that is no nonsense, on boosters from too small to ample."""
    chemistry = draw(st.sampled_from([GLM5_NEXT, GLM_MOE_DSA]))
    account = small_account(chemistry, draw(st.sampled_from([3, 10, 16])), draw(st.sampled_from([0, 2, 6])))
    arch = account.arch
    count = draw(st.integers(1, arch.n_routed_experts))
    request = Request(
        booster=booster_of(draw(st.integers(2 * MIB, 12 * MIB)), draw(st.integers(0, MIB))),
        boosters=count,
        context=draw(st.none() | st.integers(1, 4096)),
        streams=draw(st.integers(1, 20)),
        kv_dtype=draw(st.sampled_from([None, "f32", "bf16", "fp8"])),
    )
    if draw(st.booleans()):
        by = draw(st.integers(0, 3))
        owners = make_split(arch.n_routed_experts, arch.moe_layers, count, "id")
        request = replace(request, owners=owners[:, ::-1] if by == 0 else owners)
    kind = draw(st.sampled_from(["auto", "slots", "bytes"]))
    if arch.moe_layers == 0 or kind == "auto":
        return account, request
    owned = max(owned_by_each(account, request), key=sum)
    slots = draw(st.integers(fewest_slots(account, request), sum(owned)))
    if kind == "slots":
        return account, replace(request, slots=slots)
    spare = draw(st.integers(0, account.slot_bytes - 1))
    return account, replace(request, cache_bytes=slots * account.slot_bytes + spare)


@given(requests())
@settings(deadline=None, max_examples=150)
def test_plans_keep_their_budget_and_waste_no_slot(case) -> None:
    account, request = case
    slot, layers = account.slot_bytes, account.arch.moe_layers
    plan = fits(account, request)
    if plan is None:
        with pytest.raises(OverBudgetError) as error:
            make_plan(account, request)
        assert error.value.plan.required > request.booster.memory_bytes
        return
    assert plan.left >= 0
    assert plan.resident + plan.cache + plan.state + plan.workspace + plan.reserve + plan.left == plan.memory
    assert plan.memory <= request.booster.memory_gib.value * 2**30
    assert len(plan.slots) == len(plan.owned) == layers
    assert plan.slot_count >= min(3, max(plan.owned, default=0))
    assert all(slots <= owned for slots, owned in zip(plan.slots, plan.owned, strict=True))
    if request.slots is None and request.cache_bytes is None:
        assert plan.left < slot or plan.holds_all or not layers
    elif request.slots is not None:
        assert plan.slot_count == request.slots
    else:
        assert plan.cache <= request.cache_bytes
        assert request.cache_bytes - plan.cache < slot or plan.holds_all
    if request.context is not None:
        assert plan.context == request.context
    # No booster comes to hold more than the one that the plan is for.
    for each in plan.slots_of_each():
        assert sum(each) <= plan.slot_count


SMALLEST = small_account(GLM5_NEXT, 3, 6, layers=1)


def bare(request: Request) -> Request:
    """For another fuel: without what is said of this one's experts."""
    return replace(request, owners=None, cache_bytes=None, slots=None)


@pytest.mark.parametrize("shipped", [True, False])
@given(case=requests())
@settings(deadline=None, max_examples=60)
def test_remedies_fit(shipped: bool, case) -> None:
    """With the shipped profiles to fall back on, all of which hold these small fuels, and without."""
    account, request = case
    if fits(account, request):
        return
    with nullcontext() if shipped else patch("rocket.plan_remedies._shipped", return_value=[]):
        found = remedies(account, request, lambda: [("smallest", SMALLEST)])
    assert two_kinds(found) or (not shipped and not fits(SMALLEST, bare(request)))
    for index, remedy in enumerate(found):
        for other in found[:index]:
            assert not set(other.options.items()) <= set(remedy.options.items())
        gone = ["--split"] * (request.owners is not None and remedy.request.owners is None)
        if request.cache_bytes is not None and remedy.request.cache_bytes is None:
            gone.append("--expert-cache-gib")
        if request.slots is not None and remedy.request.slots is None:
            gone.append("--expert-slots")
        assert (remedy.instead_of or "") == " and ".join(gone)
    assert len({remedy.text for remedy in found}) == len(found)
    for remedy in found:
        fuel = SMALLEST if "fuel" in remedy.options else account
        assert make_plan(fuel, remedy.request).left >= 0
        for option, value in remedy.options.items():
            said = {
                "fuel": "smallest",
                "--prefill-chunk": remedy.request.prefill_chunk,
                "--context": remedy.request.context,
                "--streams": remedy.request.streams,
                "--kv-dtype": remedy.request.kv_dtype,
                "--boosters": remedy.request.boosters,
                "--booster": remedy.request.booster.id,
                "--expert-slots": remedy.request.slots,
                "--expert-cache-gib": f"{(remedy.request.cache_bytes or 0) / 2**30:.2f}",
                "memory_gib": f"{remedy.request.booster.memory_gib.value:.2f}",
            }
            assert value == str(said[option])


@given(requests())
@settings(deadline=None, max_examples=60)
def test_exchange_of_context_for_slots(case) -> None:
    account, request = case
    plan = fits(account, request)
    if plan is None:
        return
    rows = exchange_by_context(plan)
    assert [row.context for row in rows] == sorted({row.context for row in rows})
    assert [row.slots for row in rows] == sorted((row.slots for row in rows), reverse=True)
    for row in exchange_by_slots(plan):
        asked = replace(request, slots=row.slots, cache_bytes=None)
        assert fits(account, replace(asked, context=row.context))
        page = State(account.arch).page_tokens
        if row.context < account.arch.max_position_embeddings:
            assert not fits(account, replace(asked, context=row.context + page))


def test_workspace_of_the_largest_step() -> None:
    """A piece of a prompt, or one row of each stream."""
    account, booster = small_account(), booster_of(512 * MIB)
    for chunk, streams, rows in (
        (None, 1, 256),
        (None, 300, 300),
        (16, 1, 16),
        (16, 40, 40),
        (512, 300, 512),
    ):
        request = Request(booster, context=64, streams=streams, prefill_chunk=chunk)
        assert make_plan(account, request).workspace == workspace_bytes(account.arch, 64, rows)


def test_exchange_is_exact_by_hand() -> None:
    """A booster with room for 60 slots to the byte; twice the context takes what its pages weigh."""
    account = small_account(GLM_MOE_DSA, 16)
    arch, slot = account.arch, account.slot_bytes
    fixed = account.resident_loaded_bytes + stream_state_bytes(arch, "f32", 64)
    memory = fixed + workspace_bytes(arch, 64) + 60 * slot
    plan = make_plan(account, Request(booster_of(memory), context=64))
    assert (plan.slot_count, plan.left) == (60, 0)
    more = State(arch).page_bytes + workspace_bytes(arch, 128) - workspace_bytes(arch, 64)
    twice = next(row for row in exchange_by_context(plan) if row.context == 128)
    assert twice.slots == 60 - -(-more // slot)
    assert twice.slots < 60


def test_context_that_was_left_open_gives_way() -> None:
    account = small_account()
    need = make_plan(account, Request(booster_of(64 * MIB), context=4096)).required
    tight = booster_of(
        need - make_plan(account, Request(booster_of(64 * MIB), context=4096)).cache - MIB // 16
    )
    plan = make_plan(account, Request(tight))
    assert plan.context < 4096
    assert plan.context == longest_context(account, Request(tight))
    with pytest.raises(OverBudgetError):
        make_plan(account, Request(tight, context=4096))


@given(st.integers(0, 200), st.lists(st.integers(0, 30), max_size=8))
def test_spread(total: int, caps: list[int]) -> None:
    slots = spread(total, caps)
    assert sum(slots) == min(total, sum(caps))
    assert all(0 <= slot <= cap for slot, cap in zip(slots, caps, strict=True))
    open_layers = [slot for slot, cap in zip(slots, caps, strict=True) if slot < cap]
    if open_layers:
        assert max(slots) - min(open_layers) <= 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"boosters": 0}, ("--boosters", "1 to 10", "found 0")),
        ({"boosters": 11}, ("--boosters", "1 to 10", "found 11")),
        ({"context": 0}, ("--context", "1 to 4096", "found 0")),
        ({"context": 4097}, ("--context", "1 to 4096", "found 4097")),
        ({"streams": 0}, ("--streams", "at least 1", "found 0")),
        ({"kv_dtype": "f64"}, ("--kv-dtype", "f32, bf16, fp8", "'f64'")),
        ({"slots": 2}, ("--expert-slots", "at least 3 slots", "found 2")),
        ({"cache_bytes": 1}, ("--expert-cache-gib", "at least", "3 slots", "hold 0")),
        ({"slot_map": (3, 10, 2, 10)}, ("--slot-map", "layer 4: ", "at least 3 slots", "found 2")),
    ],
)
def test_requests_out_of_range(changes: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        make_plan(small_account(), replace(Request(booster_of(64 * MIB)), **changes))
    for word in words:
        assert word in str(error.value)


def test_slot_map_is_taken_as_it_is() -> None:
    plan = make_plan(small_account(), replace(Request(booster_of(64 * MIB)), slot_map=(3, 10, 4, 5)))
    assert plan.slots == (3, 10, 4, 5)
    assert plan.left > plan.slot_bytes


def test_more_than_all_experts_is_cut() -> None:
    request = Request(booster_of(64 * MIB))
    for changes, asked in (({"slots": 41}, 41), ({"slot_map": (3, 10, 3, 11)}, 27)):
        plan = make_plan(small_account(), replace(request, **changes))
        assert plan.slots_requested == asked
        assert plan.slot_count == (40 if asked == 41 else 26)
        assert max(plan.slots) == 10


def test_fuel_without_experts() -> None:
    account = small_account(GLM5_NEXT, 10, 6)
    plan = make_plan(account, Request(booster_of(64 * MIB)))
    assert (plan.slots, plan.cache) == ((), 0)
    assert step_time(plan).seconds > 0
    with pytest.raises(UsageError, match="no MoE layers"):
        make_plan(account, Request(booster_of(64 * MIB), cache_bytes=MIB))


# --- beside the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "context", "shape"),
    [
        (256, 8192, Shape()),
        (16, 256, Shape()),
        (64, 4096, Shape(num_attention_heads=16, index_kpool=1, index_topk=256)),
        (256, 4096, Shape(hidden_size=256, moe_intermediate_size=112, num_experts_per_tok=8)),
        (128, 2048, Shape(linear_num_heads=8, linear_head_dim=32, intermediate_size=1000)),
    ],
    ids=["usual", "few rows", "many heads", "wide experts", "wide KDA"],
)
def test_workspace_and_state_bound_the_engines(tmp_path: Path, rows: int, context: int, shape: Shape) -> None:
    """What the plan sets aside is what the engine takes or more, but not wastefully so."""
    folder = make_fuel(tmp_path / "fuel", FuelOptions(shape))
    account = fuel_account.load_account(str(folder))[1]
    engine = CoreEngine(str(folder), threads=2, max_context=context, max_rows=rows, max_streams=1)
    info = engine.info()
    engine.unload()
    planned = workspace_bytes(account.arch, context, rows)
    assert info["workspace_bytes"] <= planned <= 2 * info["workspace_bytes"] + 8 * MIB
    state = State(account.arch)
    assert info["state_bytes_per_stream"] <= state.stream_bytes + 64 * 4 * account.arch.num_hidden_layers
    least = 2 * state.stream_bytes + context * state.token_bytes
    assert least <= stream_state_bytes(account.arch, "f32", context) <= least + state.page_bytes
    assert info["dense_bytes"] <= account.resident_loaded_bytes * 1.01 + MIB


# --- times ------------------------------------------------------------------------------------------------


def test_step_time_by_hand() -> None:
    account = small_account()
    booster = booster_of(64 * MIB)
    plan = make_plan(account, Request(booster, context=256, slots=20))
    step = step_time(plan, hit_rate=0.75)
    traffic = sum(State(account.arch).traffic(255).values())
    read = account.token_bytes_touched + traffic
    assert step.base_bytes == pytest.approx(read)
    assert step.experts == pytest.approx(4 * 3)
    assert step.misses == pytest.approx(3)
    assert step.miss_s == pytest.approx(account.slot_bytes / 20e9)
    assert step.seconds == pytest.approx(read / 100e9 + 3 * account.slot_bytes / 20e9)
    assert step.tok_s == pytest.approx(1 / step.seconds)


def test_assumed_hit_rates() -> None:
    account = small_account()
    half = make_plan(account, Request(booster_of(64 * MIB), slots=20))
    assert step_time(half).hit_rate == 0.5
    assert step_time(make_plan(account, Request(booster_of(64 * MIB)))).hit_rate == 1


def test_hit_rate_of_a_trace_is_the_replays() -> None:
    account = small_account()
    routing = Routing(skewed_ids(50, 4, 10, 3), 10)
    plan = make_plan(account, Request(booster_of(64 * MIB), slots=20))
    step = step_time(plan, routing=routing)
    direct = replay(routing, [plan.slots])
    assert step.hit_rate == direct.hit_rate
    assert step.misses == direct.misses / 50
    shared = step_time(make_plan(account, Request(booster_of(64 * MIB), boosters=2)), routing=routing)
    assert shared.misses < step.experts / 2
    with pytest.raises(UsageError, match="at least 60 tokens"):
        step_time(make_plan(account, Request(booster_of(64 * MIB), streams=60)), routing=routing)


def test_misses_come_from_the_bank_as_far_as_it_reaches() -> None:
    account = small_account()
    slot = account.slot_bytes

    def source(bank: int, slots: int) -> MissSource:
        booster = booster_of(64 * MIB, host_memory_gib=1 + bank * slot / 2**30 + 1e-9, host_reserve_gib=1)
        return miss_source(make_plan(account, Request(booster, slots=slots)))

    link, disk = slot / 20e9, slot / 2e9
    assert source(40, 20).seconds == pytest.approx(link)
    assert source(10, 20).seconds == pytest.approx(link / 4 + disk * 3 / 4)
    assert source(0, 20).seconds == pytest.approx(disk)
    for bank in (20, 39):  # as many as have no slot
        tiers = source(bank, 20)
        assert (tiers.exclusive, tiers.bank_experts, tiers.seconds) == (True, 20, pytest.approx(link))
    assert not source(19, 20).exclusive
    assert not source(40, 20).exclusive


def test_ceilings_of_one_and_several() -> None:
    account = small_account()
    rows = {(row.label, row.boosters): row for row in ceilings(account, booster_of(64 * MIB), 4)}
    full = rows["full table", 1]
    assert full.tok_s == pytest.approx(100e9 / account.token_bytes_full_table)
    assert rows["full table, all weights split", 4].tok_s == pytest.approx(4 * full.tok_s, rel=1e-4)
    experts = account.routed_token_bytes
    shared = account.token_bytes_touched - experts + experts // 4
    assert rows["touched, experts split", 4].bytes_a_token == shared


# --- shipped profiles -------------------------------------------------------------------------------------


def test_shipped_profiles() -> None:
    assert boosters.names() == ["gb10", "gb300", "h200", "rtx-5090"]
    for name in boosters.names():
        profile = boosters.load(name)
        assert profile.id == name
        assert profile.copy_gb_s.value <= profile.read_gb_s.value
        if profile.unified_memory:
            assert profile.reserve_gib.value >= boosters.OS_RESERVE_GIB
    gb10, h200, gb300 = (boosters.load(name) for name in ("gb10", "h200", "gb300"))
    assert (gb10.read_gb_s.value, gb10.memory_gib.value) == (238, 123.73)
    assert (h200.read_gb_s.value, h200.link_gb_s.value) == (4625, 55)
    assert (gb300.memory_gib.value, gb300.host_memory_gib.value) == (250.7, 494)
    assert 330 <= gb300.link_gb_s.value <= 350
