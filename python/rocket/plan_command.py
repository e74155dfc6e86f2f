"""rocket plan: does it fit, with how many expert slots, and how fast can it be."""

import json
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from typing import Annotated, Any

import typer

from rocket import booster as boosters_module
from rocket.accounting import Account
from rocket.booster import GIB, Booster
from rocket.boosters import DENSE_HELP, check_shared
from rocket.console import write_data
from rocket.errors import CliError, UsageError
from rocket.fuel import known_fuels
from rocket.fuel_account import load_account, locate
from rocket.inventory import Bucket
from rocket.manifest import known_manifests
from rocket.options import MAX_CHUNK, check_choice, check_integer, check_real, flag, integer, number, string
from rocket.plan import DEFAULT_CONTEXT, OverBudgetError, Plan, Request, make_plan
from rocket.plan_remedies import Remedy, remedies, two_kinds
from rocket.plan_report import Report
from rocket.plan_time import miss_source, step_time
from rocket.report import format_bytes
from rocket.routing import Routing
from rocket.routing_file import read_routing
from rocket.slot_map import read_slot_map
from rocket.split_file import read_split

DEFAULT_BOOSTER = "gb10"


def _one_of(**given: Any) -> None:
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None]
    if len(named) > 1:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"expected one of {options}, found {' and '.join(named)}", "give one of them")


def _over_budget(error: OverBudgetError, fuel: str, booster: str, found: list[Remedy]) -> CliError:
    plan = error.plan
    parts = ", ".join(
        f"{name} {format_bytes(count)}"
        for name, count in (
            ("dense weights", plan.resident),
            (f"{plan.slot_count} expert slots", plan.cache),
            ("state", plan.state),
            ("workspace", plan.workspace),
            ("reserve", plan.reserve),
        )
    )
    which = "any one of these fits" if two_kinds(found) else "nothing but more memory fits"
    ways = " | ".join(remedy.text for remedy in found)
    return CliError(
        f"{fuel} on {booster}: required {format_bytes(plan.required)} ({parts}), "
        f"available {format_bytes(plan.memory)}",
        f"{which}: {ways}" if ways else "no booster is large enough: ask for less, or use a smaller fuel",
    )


def _over_budget_json(error: OverBudgetError, fuel: str, found: list[Remedy]) -> dict[str, Any]:
    plan = error.plan
    return {
        "fits": False,
        "fuel": fuel,
        "booster": plan.request.booster.id,
        "required_bytes": plan.required,
        "available_bytes": plan.memory,
        "remedies": [{"options": remedy.options, "instead_of": remedy.instead_of} for remedy in found],
    }


def _choices(plan: Plan, given: Request, booster: str | None) -> list[str]:
    """Each thing that no option said, on one line. ``booster``: why there is this one, if it was chosen."""
    account, limit = plan.account, plan.account.arch.max_position_embeddings
    lines = []
    if booster is not None:
        known = ", ".join(boosters_module.names())
        lines.append(f"booster: {plan.request.booster.id}, {booster} (--booster; known: {known})")
    if given.context is None:
        why = "" if plan.context == min(DEFAULT_CONTEXT, limit) else ", the longest that fits"
        lines.append(f"context: {plan.context:,} tokens{why} (--context; the model's limit is {limit:,})")
    if given.kv_dtype is None:
        lines.append(f"{plan.state_of.dtypes} (--kv-dtype)")
    if given.prefill_chunk is None:
        lines.append(f"prompts: {plan.request.prompt_rows} tokens at a time (--prefill-chunk)")
    if plan.slots and given.cache_bytes is None and given.slots is None and given.slot_map is None:
        why = "every expert" if plan.holds_all else "all that fit, shared out evenly over the layers"
        if plan.request.booster.unified_memory and not plan.holds_all:
            why += "; the page cache is left the reserve"
        lines.append(f"expert slots: {plan.slot_count:,}, {why} (--expert-slots)")
    if plan.slots and not plan.holds_all:
        source = miss_source(plan)
        bank = f"; the bank holds {source.bank_experts:,} experts" if source.bank_experts else ""
        lines.append(f"experts without a slot: from {source.text}{bank}")
    if plan.request.boosters > 1:
        shared = "as the split says" if given.owners is not None else "shared out by id (--split)"
        dense = (
            "heads, columns and their state split" if given.split_dense else "dense weights and state on each"
        )
        lines.append(f"boosters: {dense}, experts {shared}")
    for name, count in (
        ("draft layer", account[Bucket.DRAFT].stored + account[Bucket.DRAFT_EXPERTS].stored),
        ("vision tower", account[Bucket.VISION].stored),
    ):
        if count:
            lines.append(f"{name}: not loaded, {format_bytes(count)}")
    return lines


def plan(
    fuel: Annotated[str, typer.Argument(metavar="FUEL", help="The model: a name or a directory.")],
    booster: Annotated[
        str | None, string("NAME|FILE", "A shipped profile, or one that rocket bench host wrote.")
    ] = None,
    boosters: Annotated[int | None, integer("Boosters that share the experts. [default: 1]")] = None,
    context: Annotated[int | None, integer("Tokens that each stream can hold.")] = None,
    streams: Annotated[int, integer("Streams that decode together.")] = 1,
    kv_dtype: Annotated[str | None, string("f32|bf16|fp8", "Of latents.")] = None,
    expert_cache_gib: Annotated[float | None, number("GiB of expert slots on each booster.", "G")] = None,
    expert_slots: Annotated[int | None, integer("Expert slots on each booster.")] = None,
    slot_map: Annotated[str | None, string("FILE", "JSON: the slots of each MoE layer.")] = None,
    prefill_chunk: Annotated[
        int | None, integer("Feed prompts N tokens at a time; the workspace is for these.")
    ] = None,
    hit_rate: Annotated[float | None, number("Share of experts that are found in a slot.", "H")] = None,
    trace: Annotated[str | None, string("FILE", "A routing trace to replay through the slots.")] = None,
    split: Annotated[str | None, string("FILE", "Which booster owns which expert (rocket split).")] = None,
    split_dense: Annotated[bool, flag("--split-dense", DENSE_HELP)] = False,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
) -> int:
    """Does a fuel fit a booster, with how many expert slots, and how fast can it be.

    Integer arithmetic on the headers of the weights: no device, no weights. Over budget the exit status is 1,
    and the hint names changes that do fit.
    """
    _one_of(expert_cache_gib=expert_cache_gib, expert_slots=expert_slots, slot_map=slot_map)
    _one_of(hit_rate=hit_rate, trace=trace)
    if expert_cache_gib is not None:
        check_real("--expert-cache-gib", expert_cache_gib, 0, 1 << 20, with_low=False)
    if hit_rate is not None:
        check_real("--hit-rate", hit_rate, 0, 1)
    if kv_dtype is not None:
        check_choice("--kv-dtype", kv_dtype, ("f32", "bf16", "fp8"))
    check_integer("--streams", streams, 1, 65536)
    if prefill_chunk is not None:
        check_integer("--prefill-chunk", prefill_chunk, 1, MAX_CHUNK)
    check_shared(boosters, split, split_dense)
    profile, why = _booster(booster, fuel)
    own = booster if booster not in boosters_module.names() else None
    name, account = load_account(fuel)
    shares = read_split(split, account, boosters) if split is not None else None
    request = Request(
        booster=profile,
        boosters=shares.boosters if shares else 1 if boosters is None else boosters,
        context=context,
        streams=streams,
        kv_dtype=kv_dtype,
        cache_bytes=None if expert_cache_gib is None else ceil(expert_cache_gib * GIB),
        slots=expert_slots,
        slot_map=read_slot_map(slot_map, account.arch.moe_layer_ids) if slot_map is not None else None,
        slot_map_file=slot_map or "",
        owners=shares.owners if shares else None,
        split_dense=split_dense,
        prefill_chunk=prefill_chunk,
    )
    routing = _routing(trace, account)
    try:
        made = make_plan(account, request)
    except OverBudgetError as error:
        found = remedies(account, request, lambda: _other_fuels(fuel))
        if as_json:
            write_data(json.dumps(_over_budget_json(error, name, found)) + "\n")
        raise _over_budget(error, name, own or profile.id, found) from None
    step = step_time(made, hit_rate=hit_rate, routing=routing)
    report = Report(name, made, step, _choices(made, request, why), split, own)
    write_data((json.dumps(report.json(), allow_nan=False) if as_json else report.text()) + "\n")
    return 0


def _booster(name: str | None, fuel: str) -> tuple[Booster, str | None]:
    """The booster asked for, or another and why."""
    if name is not None:
        return boosters_module.load(name), None
    manifest = locate(fuel).manifest
    if manifest is None:
        return boosters_module.load(DEFAULT_BOOSTER), "the usual one"
    named = manifest.manifest.serving_regime.single_stream_reference.booster
    return boosters_module.load(named), "the manifest's"


def _other_fuels(fuel: str) -> Iterator[tuple[str, Account]]:
    """Those known by name. One that is broken is no way out."""
    for name in sorted({*known_fuels(), *known_manifests()} - {fuel}):
        with suppress(Exception):
            yield name, load_account(name)[1]


def _routing(trace: str | None, account: Account) -> Routing | None:
    arch = account.arch
    if trace is None:
        return None
    return read_routing(trace, arch.moe_layers, arch.n_routed_experts, arch.num_experts_per_tok)


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)
