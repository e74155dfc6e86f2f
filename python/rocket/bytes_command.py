"""rocket bytes: what a fuel's bytes are for, and what a token reads of them."""

import json
from typing import Annotated

import typer

from rocket.accounting import INDEX_DTYPE, KV_DTYPES, State
from rocket.bytes_report import as_json, report
from rocket.console import write_data
from rocket.fuel_account import locate
from rocket.options import check_choice, check_integer, flag, integer, string
from rocket.routing_file import read_routing

DEFAULT_CONTEXT = 32768


def run(name: str, as_object: bool, context: int | None, kv_dtype: str, trace_file: str | None) -> int:
    source = locate(name)
    account = source.account()
    a = account.arch
    if context is not None:
        check_integer("--context", context, 1, a.max_position_embeddings)
    context = context if context is not None else min(DEFAULT_CONTEXT, a.max_position_embeddings)
    state = State(a, kv_dtype, INDEX_DTYPE)
    trace = None
    if trace_file is not None:
        trace = read_routing(trace_file, a.moe_layers, a.n_routed_experts, a.num_experts_per_tok)
    if as_object:
        result = {"fuel": name, **as_json(account, state, context, trace)}
        write_data(json.dumps(result, ensure_ascii=False) + "\n")
    else:
        write_data(report(account, name, source.origin, state, context, trace))
    return 0


def bytes_of(
    fuel: Annotated[str, typer.Argument(metavar="NAME|DIR", help="The fuel: a name, a folder, a manifest.")],
    as_object: Annotated[bool, flag("--json", "Print one JSON object, in bytes.")] = False,
    context: Annotated[
        int | None, integer("Tokens before the decoded one, for the traffic of state; default 32768.")
    ] = None,
    kv_dtype: Annotated[str, string("f32|bf16|fp8", "Dtype of latents.")] = "f32",
    trace: Annotated[
        str | None, string("FILE", "A routing trace, for what steps of several rows read.")
    ] = None,
) -> int:
    """What a fuel's bytes are for, what a token reads, the traffic of its state, and steps of several rows.

    Reads headers only. A fuel without weights is counted from its manifest.
    """
    check_choice("--kv-dtype", kv_dtype, tuple(KV_DTYPES))
    return run(fuel, as_object, context, kv_dtype, trace)


def register(app: typer.Typer) -> None:
    app.command("bytes")(bytes_of)
