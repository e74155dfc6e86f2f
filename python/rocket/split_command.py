"""rocket split: which booster owns which routed expert."""

import hashlib
import json
from typing import Annotated

import typer

from rocket.accounting import Account
from rocket.bytes_report import Unit
from rocket.checked import open_named
from rocket.console import write_data
from rocket.errors import UsageError
from rocket.fuel_account import load_account, locate
from rocket.options import check_choice, check_output_name, check_output_place, flag, integer, string
from rocket.output import AtomicFile
from rocket.routing import Routing
from rocket.routing_file import read_routing
from rocket.split import WAYS, expected_on, expected_uniform, make_split
from rocket.split_file import (
    FORMAT,
    SplitExpected,
    SplitFile,
    SplitFuel,
    SplitTrace,
    bytes_of_booster,
)


def _trace(path: str, account: Account) -> tuple[Routing, Routing, SplitTrace]:
    """What to fit to, what to judge by, and what the file says of both."""
    arch = account.arch
    routing = read_routing(path, arch.moe_layers, arch.n_routed_experts, arch.num_experts_per_tok)
    if routing.tokens < 2:
        raise UsageError(
            f"--trace {path}: expected at least 2 tokens, found {routing.tokens}",
            "one half is fitted to and the other judges",
        )
    fitted, judged = routing.halves()
    with open_named(path, "--trace") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return (
        fitted,
        judged,
        SplitTrace(
            file=routing.name, sha256=digest, fitted_tokens=fitted.tokens, judged_tokens=judged.tokens
        ),
    )


def build(name: str, account: Account, boosters: int, by: str, trace: str | None) -> SplitFile:
    arch = account.arch
    fitted, judged, about = _trace(trace, account) if trace is not None else (None, None, None)
    owners = make_split(arch.n_routed_experts, arch.moe_layers, boosters, by, fitted)
    if judged is not None and about is not None:
        expected = expected_on(judged, owners, boosters)
        source = f"the last {about.judged_tokens} tokens of {about.file}, which nothing was fitted to"
    else:
        expected = expected_uniform(
            arch.n_routed_experts, arch.moe_layers, arch.num_experts_per_tok, boosters
        )
        source = "as if routing were uniform"
    counts = [int((owners == b).sum()) for b in range(boosters)]
    return SplitFile.model_validate(
        {
            "format": FORMAT,
            "fuel_id": name,
            "fuel": SplitFuel.of(account),
            "boosters": boosters,
            "by": by,
            "trace": about,
            "experts_of_booster": counts,
            "bytes_of_booster": bytes_of_booster(account, owners, boosters),
            "expected": SplitExpected.of(expected, source),
            "owner": {str(i): row.tolist() for i, row in zip(arch.moe_layer_ids, owners, strict=True)},
        }
    )


def _lines(split: SplitFile, account: Account) -> list[str]:
    layers = len(split.fuel.moe_layers)
    experts = f"{layers} MoE layers of {split.fuel.experts} experts, top-{split.fuel.top_k}"
    dense = account.resident_loaded_bytes
    unit = Unit(dense + max(split.bytes_of_booster))
    lines = [
        f"fuel      {split.fuel_id}: {experts}",
        f"split     {split.boosters} boosters, by {split.by}",
        "",
        f"{'booster':>7}{'experts':>9}{unit.name:>9}{'with dense':>12}",
    ]
    for b, (experts, count) in enumerate(zip(split.experts_of_booster, split.bytes_of_booster, strict=True)):
        lines.append(f"{b:>7}{experts:>9,}{unit.show(count):>9}{unit.show(count + dense):>12}")
    e = split.expected
    ways = f"{e.hidden_rows_a_token:.1f} hidden states out, {e.expert_rows_a_token:.1f} expert outputs back"
    return [
        *lines,
        "",
        f"expected ({e.source})",
        f"load imbalance      {e.load_imbalance:.3f}, a layer's busiest booster over an even share",
        f"step imbalance      {e.step_imbalance:.3f}, the same for a single token",
        f"cross-booster rows  {e.cross_booster_rows_a_token:.1f} a token: {ways}",
    ]


def split(
    fuel: Annotated[str, typer.Argument(metavar="FUEL", help="The model: a name or a directory.")],
    boosters: Annotated[int, integer("Boosters to share the experts.")],
    out: Annotated[str, string("FILE", "Where to write the split.")],
    by: Annotated[str, string("|".join(WAYS), "What decides who owns an expert.")] = "id",
    trace: Annotated[
        str | None, string("FILE", "A routing trace: its first half is fitted to, its second half judges.")
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print one JSON object: the split without its owners.")] = False,
) -> int:
    """Share the routed experts out to boosters.

    By id: runs of neighbours. By load: the busiest experts apart. By co-activation: experts that one token
    takes together on one booster, which spares hidden states that cross and costs balance.
    """
    check_choice("--by", by, WAYS)
    check_output_name("--out", out)
    source = locate(fuel)
    manifest = str(source.manifest.path) if source.manifest is not None else None
    check_output_place("--out", out, source.weights_dir, {"the fuel's manifest": manifest, "--trace": trace})
    name, account = load_account(fuel)
    if not account.arch.moe_layers:
        raise UsageError(f"fuel {name}: expected MoE layers, found none", "there is nothing to split")
    made = build(name, account, boosters, by, trace)
    with AtomicFile(out, "--out") as file:
        file.write(made.text().encode())
    text = (
        json.dumps(made.model_dump(exclude={"owner"}), ensure_ascii=False)
        if as_json
        else "\n".join(_lines(made, account))
    )
    write_data(text + "\n")
    return 0


def register(app: typer.Typer) -> None:
    app.command("split")(split)
