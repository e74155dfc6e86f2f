"""rocket trace: routing traces, and caches of experts that they are replayed through."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rocket.accounting import Account
from rocket.console import Notes, write_data
from rocket.errors import UsageError
from rocket.fuel_account import load_account
from rocket.options import (
    check_choice,
    check_integer,
    check_output_name,
    check_output_place,
    flag,
    integer,
    string,
)
from rocket.output import AtomicFile
from rocket.plan import spread
from rocket.report import counted, format_bytes
from rocket.routing import CacheRun, Routing, run_cache
from rocket.routing_file import read_any_routing, read_routing
from rocket.slot_limits import SlotLimits, cut_from
from rocket.slot_map import read_slot_map, slot_map_text
from rocket.trace_figures import BUSY, figures
from rocket.trace_fit import Fitted, fit_and_judge
from rocket.trace_plot import plot as picture

POLICIES = ("lru", "lfu", "lfru", "belady")
MAX_SLOT_BYTES = 1 << 40

TraceFile = Annotated[str, typer.Argument(metavar="FILE", help="A routing trace, compact or JSON lines.")]
Experts = Annotated[
    int | None, integer("Experts a layer, which JSON lines do not say. [default: highest id + 1]")
]
Fuel = Annotated[
    str | None, string("NAME|DIR", "The model: the numbers of its MoE layers, its experts, their bytes.")
]
AsJson = Annotated[bool, flag("--json", "Print one JSON object.")]


def _read(file: str, experts: int | None, fuel: str | None) -> tuple[Routing, Account | None]:
    if experts is not None:
        check_integer("--experts", experts, 1, 1 << 16)
    if experts is not None and fuel is not None:
        raise UsageError("expected one of --experts, --fuel, found both", "the fuel says how many there are")
    account = load_account(fuel)[1] if fuel is not None else None
    routing = read_any_routing(file, "trace", experts) if account is None else _of_fuel(file, account)
    if routing.torn_bytes:
        Notes().say(f"{routing.name}: its last row is not whole ({routing.torn_bytes} bytes), and left out")
    return routing, account


def _of_fuel(file: str, account: Account) -> Routing:
    arch = account.arch
    routing = read_routing(file, arch.moe_layers, arch.n_routed_experts, arch.num_experts_per_tok, "trace")
    layers = tuple(arch.moe_layer_ids)
    if routing.layer_ids not in (None, layers):
        raise UsageError(
            f"trace {file}: expected the fuel's MoE layers, from {layers[0]} to {layers[-1]}, "
            f"found from {routing.layer_names[0]} to {routing.layer_names[-1]}",
            "name the fuel that the trace is of",
        )
    return replace(routing, layer_ids=layers)


def _about(routing: Routing) -> dict[str, Any]:
    return {
        "trace": routing.name,
        "tokens": routing.tokens,
        "steps": len(routing.ends),
        "experts": routing.experts,
        "top_k": routing.topk,
        "fuel_fingerprint": f"{routing.fingerprint:016x}" if routing.fingerprint else None,
    }


def _title(routing: Routing) -> str:
    steps = len(routing.ends)
    tokens = counted(routing.tokens, "token") + (
        f" in {counted(steps, 'step')}" if steps < routing.tokens else ""
    )
    layers = f"{counted(routing.layers, 'MoE layer')} of {counted(routing.experts, 'expert')}"
    return f"trace     {routing.name}: {tokens}, {layers}, top-{routing.topk}"


def _print_json(value: dict[str, Any]) -> None:
    write_data(json.dumps(value, ensure_ascii=False) + "\n")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


# --- show -------------------------------------------------------------------------------------------------


def show(
    file: TraceFile,
    plot: Annotated[
        str | None, string("SVG", "Draw how often each expert was taken, into this file.")
    ] = None,
    fuel: Fuel = None,
    experts: Experts = None,
    as_json: AsJson = False,
) -> int:
    """How evenly experts are taken, and how much neighbouring tokens have in common.

    Entropy is that of the experts' shares of all choices; spread is 2^entropy over the number of experts, 1
    where all are taken equally often. Overlap is the share of a token's experts that the token before it
    took, too.
    """
    if plot is not None:
        check_output_name("--plot", plot)
        if Path(plot).suffix.lower() != ".svg":
            raise UsageError(
                f"--plot: expected a name that ends in .svg, found {plot}", "the picture is an SVG"
            )
        check_output_place("--plot", plot, None, {"the trace": file})
    routing, _ = _read(file, experts, fuel)
    rows = figures(routing)
    if plot is not None:
        with AtomicFile(plot, "--plot") as out:
            out.write(picture(routing, [row.entropy_bits for row in rows]).encode())
    if as_json:
        _print_json({**_about(routing), "layers": [vars(row) for row in rows]})
        return 0
    head = f"{'layer':>5}{'entropy':>11}{'spread':>9}{'used':>7}{'overlap':>10}{f'busiest 1/{BUSY}':>14}"
    lines = [_title(routing), "", head]
    for row in rows:
        lines.append(
            f"{row.layer:>5}{row.entropy_bits:>6.2f} bits{_percent(row.spread):>9}{row.used:>7}"
            f"{_percent(row.overlap):>10}{_percent(row.busiest_share):>14}"
        )
    write_data("\n".join(lines) + "\n")
    return 0


# --- replay -----------------------------------------------------------------------------------------------


def _slot_bytes(given: int | None, account: Account | None) -> int | None:
    if given is not None:
        return check_integer("--slot-bytes", given, 1, MAX_SLOT_BYTES)
    return account.slot_bytes if account is not None else None


def _budgets(
    slots: int | None, slot_map: str | None, equal: bool, routing: Routing
) -> tuple[int, ...] | None:
    """Slots of each layer; None: one order of eviction for all of them."""
    if (slots is None) == (slot_map is None):
        found = "neither" if slots is None else "both"
        raise UsageError(f"expected one of --slots, --slot-map, found {found}", "for instance --slots 512")
    if slot_map is not None:
        return _mapped(slot_map, equal, routing)
    assert slots is not None
    check_integer("--slots", slots, 1)
    if not equal:
        _limits(routing).total("--slots", slots)
        return None
    return spread(_limits(routing).shared_out("--slots", slots), [routing.experts] * routing.layers)


def _limits(routing: Routing) -> SlotLimits:
    return SlotLimits((routing.experts,) * routing.layers, routing.topk)


def _mapped(path: str, equal: bool, routing: Routing) -> tuple[int, ...]:
    if equal:
        raise UsageError("expected one of --equal, --slot-map, found both", "a slot map has its own shares")
    budgets = read_slot_map(path, routing.layer_names)
    _limits(routing).of_map(f"--slot-map {path}", budgets, routing.layer_names)
    return budgets


def replay(
    file: TraceFile,
    slots: Annotated[int | None, integer("Slots for all layers together, in one order of eviction.")] = None,
    slot_map: Annotated[
        str | None, string("FILE", "JSON: slots of each MoE layer, counted from 0 if the trace names none.")
    ] = None,
    equal: Annotated[
        bool, flag("--equal", "Share --slots out evenly: a budget and an order a layer.")
    ] = False,
    policy: Annotated[str, string("|".join(POLICIES), "Which expert makes way.")] = "lru",
    slot_bytes: Annotated[int | None, integer("Bytes of an expert, to count what is streamed.", "B")] = None,
    fuel: Fuel = None,
    experts: Experts = None,
    as_json: AsJson = False,
) -> int:
    """Decode a trace through an empty cache of experts: the engine's own, without the bytes.

    Counts are of distinct experts of a step. lfru is the least frequently used of late; belady knows the
    future and shows the fewest misses there can be.
    """
    check_choice("--policy", policy, POLICIES)
    routing, account = _read(file, experts, fuel)
    budgets = _budgets(slots, slot_map, equal, routing)
    asked = sum(budgets) if slots is None and budgets is not None else slots or 0
    size = _slot_bytes(slot_bytes, account)
    run = run_cache(
        routing.ids, routing.ends, routing.experts, slots=slots or 0, layer_slots=budgets or (), policy=policy
    )
    if as_json:
        _print_json(_replay_json(routing, run, budgets, policy, size, asked))
    else:
        write_data("\n".join(_replay_lines(routing, run, budgets, policy, size, asked)) + "\n")
    return 0


def _layer_rows(routing: Routing, run: CacheRun, budgets: tuple[int, ...] | None) -> list[dict[str, Any]]:
    rows = []
    for index, layer in enumerate(routing.layer_names):
        lookups, misses = int(run.lookups[:, index].sum()), int(run.misses[:, index].sum())
        rows.append(
            {
                "layer": layer,
                "slots": None if budgets is None else min(budgets[index], routing.experts),
                "hits": lookups - misses,
                "misses": misses,
                "evictions": int(run.evictions[index]),
                "hit_rate": (lookups - misses) / lookups,
                "misses_a_token": misses / routing.tokens,
            }
        )
    return rows


def _replay_json(
    routing: Routing,
    run: CacheRun,
    budgets: tuple[int, ...] | None,
    policy: str,
    size: int | None,
    asked: int,
) -> dict[str, Any]:
    misses = int(run.misses.sum())
    return {
        **_about(routing),
        "policy": policy,
        "slots": run.slots,
        "slots_requested": asked,
        "hit_rate": run.hit_rate,
        "hits": int(run.lookups.sum()) - misses,
        "misses": misses,
        "evictions": int(run.evictions.sum()),
        "misses_a_token": misses / routing.tokens,
        "slot_bytes": size,
        "bytes_a_token": None if size is None else size * misses / routing.tokens,
        "layers": _layer_rows(routing, run, budgets),
    }


def _replay_lines(
    routing: Routing,
    run: CacheRun,
    budgets: tuple[int, ...] | None,
    policy: str,
    size: int | None,
    asked: int,
) -> list[str]:
    order = "one order for all layers" if budgets is None else "a budget for each layer"
    all_of_them = routing.layers * routing.experts
    cut = ", one for every expert" if run.slots == all_of_them else ""
    misses, lookups = int(run.misses.sum()) / routing.tokens, int(run.lookups.sum()) / routing.tokens
    streamed = "" if size is None else f", {format_bytes(size * misses)}"
    lines = [
        _title(routing),
        f"cache     {counted(run.slots, 'slot')}{cut}, {order}, {policy}, empty at first"
        + cut_from(asked, run.slots),
        f"hit rate  {_percent(run.hit_rate)}; a token misses {misses:.2f} of {lookups:.2f} experts{streamed}",
        "",
        f"{'layer':>5}{'slots':>8}{'hit rate':>11}{'misses a token':>17}{'evictions':>12}",
    ]
    for row in _layer_rows(routing, run, budgets):
        count = "-" if row["slots"] is None else row["slots"]
        lines.append(
            f"{row['layer']:>5}{count:>8}{_percent(row['hit_rate']):>11}{row['misses_a_token']:>17.2f}"
            f"{row['evictions']:>12,}"
        )
    return lines


# --- fit --------------------------------------------------------------------------------------------------


def fit(
    file: TraceFile,
    slots: Annotated[int, integer("Slots to share out over all layers.")],
    out: Annotated[str | None, string("FILE", "Write the slot map here.")] = None,
    fuel: Fuel = None,
    experts: Experts = None,
    as_json: AsJson = False,
) -> int:
    """Share slots out over the layers by what each further slot gains on the first half of a trace.

    The second half judges: the fitted budgets beside an equal share and one order for all layers, least
    recently used.
    """
    check_integer("--slots", slots, 1)
    if out is not None:
        check_output_name("--out", out)
        check_output_place("--out", out, None, {"the trace": file})
    routing, _ = _read(file, experts, fuel)
    if len(routing.ends) < 2:
        raise UsageError(
            f"trace {file}: expected at least 2 steps, found 1", "one half is fitted to and the other judges"
        )
    asked, slots = slots, _limits(routing).shared_out("--slots", slots)
    with Notes().progress("measuring hits", "slots") as progress:
        fitted = fit_and_judge(routing, slots, progress)
    if out is not None:
        with AtomicFile(out, "--out") as target:
            target.write(slot_map_text(dict(zip(routing.layer_names, fitted.slots, strict=True))).encode())
    if fitted.held_out["fitted"].hit_rate < fitted.held_out["equal"].hit_rate:
        Notes().say("note: the second half does better with an equal share; a longer trace may tell more")
    if as_json:
        _print_json(_fit_json(routing, slots, asked, fitted))
    else:
        write_data("\n".join(_fit_lines(routing, slots, asked, fitted)) + "\n")
    return 0


def _rates(run: CacheRun, index: int) -> float:
    return 1 - int(run.misses[:, index].sum()) / int(run.lookups[:, index].sum())


def _fit_json(routing: Routing, slots: int, asked: int, fitted: Fitted) -> dict[str, Any]:
    held_out = routing.tokens - fitted.cut.tokens
    return {
        **_about(routing),
        "slots": slots,
        "slots_requested": asked,
        "per_layer": {
            str(layer): count for layer, count in zip(routing.layer_names, fitted.slots, strict=True)
        },
        "fitted_tokens": fitted.cut.tokens,
        "held_out_tokens": held_out,
        "held_out": {
            name: {"hit_rate": run.hit_rate, "misses_a_token": int(run.misses.sum()) / held_out}
            for name, run in fitted.held_out.items()
        },
    }


def _fit_lines(routing: Routing, slots: int, asked: int, fitted: Fitted) -> list[str]:
    held_out = routing.tokens - fitted.cut.tokens
    names = {"fitted": "fitted budgets", "equal": "an equal share", "one_order": "one order for all"}
    lines = [
        _title(routing),
        f"slots     {slots:,}, fitted to {counted(fitted.cut.tokens, 'token')}{cut_from(asked, slots)}",
        "",
        f"on the other {held_out:,}{'hit rate':>15}{'misses a token':>17}",
    ]
    for name, run in fitted.held_out.items():
        misses = int(run.misses.sum()) / held_out
        lines.append(f"{names[name]:<20}{_percent(run.hit_rate):>12}{misses:>17.2f}")
    lines += ["", f"{'layer':>5}{'slots':>8}{'hit rate':>11}{'equal share':>14}"]
    runs = fitted.held_out
    for index, (layer, count) in enumerate(zip(routing.layer_names, fitted.slots, strict=True)):
        fit_rate, even = _rates(runs["fitted"], index), _rates(runs["equal"], index)
        lines.append(f"{layer:>5}{count:>8}{_percent(fit_rate):>11}{_percent(even):>14}")
    return lines


def register(app: typer.Typer) -> None:
    trace = typer.Typer(help="Routing traces, and caches of experts that they are replayed through.")
    trace.command("show")(show)
    trace.command("replay")(replay)
    trace.command("fit")(fit)
    app.add_typer(trace, name="trace")
