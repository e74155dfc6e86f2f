"""What a fuel's bytes are for and what a step reads of them, as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

from rocket.accounting import (
    GIB,
    Account,
    State,
    expected_union,
    trace_popularity_union,
    trace_union,
)
from rocket.inventory import Bucket
from rocket.report import counted
from rocket.routing import Routing

STEP_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MIB = 1 << 20
Row = tuple[str, int | None, int]  # label, layers, bytes


def resident_rows(account: Account) -> list[Row]:
    """What every token reads, in the order in which data flow."""
    a = account.arch
    rows: list[Row] = [("embed + lm_head", None, account[Bucket.EMBED].stored + account[Bucket.HEAD].stored)]
    if a.kda_layers:
        rows.append(("KDA attention", a.kda_layers, account[Bucket.KDA].stored))
    small = "routers, hyper-connections, norms" if a.hc_mult else "routers, norms"
    return [
        *rows,
        ("sparse-MLA attention", a.mla_layers, account[Bucket.MLA].stored),
        ("dense MLP", a.dense_layers, account[Bucket.DENSE_MLP].stored),
        ("shared experts", a.moe_layers, account[Bucket.SHARED].stored),
        (small, a.num_hidden_layers, account[Bucket.SMALL].stored),
    ]


def disk_rows(account: Account) -> list[Row]:
    """What lies on disk beside the resident weights."""
    a = account.arch
    rows: list[Row] = [("all routed experts", a.moe_layers, account.expert_bytes)]
    drafts = account.draft_layers
    if drafts:
        experts = account[Bucket.DRAFT_EXPERTS].stored
        rows.append(("draft layer", drafts, account[Bucket.DRAFT].stored + experts))
        rows.append(("  of which routed experts", drafts, experts))
    if account[Bucket.VISION].tensors:
        rows.append(("vision tower", a.vision.depth if a.vision else None, account[Bucket.VISION].stored))
    for label, count in (
        ("activation scales, not read", account[Bucket.UNUSED].stored),
        ("other tensors", account[Bucket.OTHER].stored),
        ("headers", account.header_bytes),
    ):
        if count:
            rows.append((label, None, count))
    return rows


def step_rows(account: Account, trace: Routing | None) -> list[dict[str, Any]]:
    """What steps of several rows read: distinct experts of a layer, and bytes with one embedding row each."""
    a = account.arch
    out = []
    for rows in STEP_ROWS:
        union = expected_union(a.n_routed_experts, a.num_experts_per_tok, rows)
        entry: dict[str, Any] = {
            "rows": rows,
            "uniform": _step(account, rows, dict.fromkeys(account.experts, union)),
        }
        if trace is not None:
            entry["trace_apart"] = _by_trace(
                account, rows, trace_popularity_union(trace.ids, a.n_routed_experts, rows)
            )
            entry["trace_in_order"] = None
            if trace.tokens >= rows:
                entry["trace_in_order"] = _by_trace(account, rows, trace_union(trace.ids, rows))
        out.append(entry)
    return out


def _by_trace(account: Account, rows: int, union: Sequence[float]) -> dict[str, float]:
    return _step(account, rows, dict(zip(sorted(account.experts), union, strict=True)))


def _step(account: Account, rows: int, used: dict[int, float]) -> dict[str, float]:
    experts = sum(used.values()) / len(used) if used else 0.0
    return {"experts_per_layer": experts, "bytes": round(account.step_bytes(rows, used))}


def as_json(account: Account, state: State, context: int, trace: Routing | None) -> dict[str, Any]:
    a = account.arch
    buckets = {
        bucket.value: {"tensors": count.tensors, "bytes": count.stored, "parameters": count.parameters}
        for bucket, count in account.buckets.items()
    }
    return {
        "chemistry": a.chemistry,
        "hollow": account.hollow,
        "layers": {
            "all": a.num_hidden_layers,
            "kda": a.kda_layers,
            "sparse_mla": a.mla_layers,
            "indexer": a.indexer_layers,
            "dense_mlp": a.dense_layers,
            "moe": a.moe_layers,
            "draft": account.draft_layers,
        },
        "experts_per_layer": a.n_routed_experts,
        "experts_per_token": a.num_experts_per_tok,
        "parameters": account.parameters,
        "trunk_parameters": account.trunk_parameters,
        "active_parameters": account.active_parameters,
        "buckets": buckets,
        "header_bytes": account.header_bytes,
        "file_bytes": account.file_bytes,
        "files": account.file_count,
        "resident_bytes": account.resident_bytes,
        "resident_loaded_bytes": account.resident_loaded_bytes,
        "routed_expert_bytes": account.expert_bytes,
        "slot_bytes": account.slot_bytes,
        "routed_token_bytes": account.routed_token_bytes,
        "token_bytes_full_table": account.token_bytes_full_table,
        "token_bytes_touched": account.token_bytes_touched,
        "draft_token_bytes": account.draft_token_bytes,
        "state": {
            "kv_dtype": state.kv_dtype,
            "stream_bytes": state.stream_bytes,
            "token_bytes": state.token_bytes,
            "context": context,
            "bytes_at_context": state.bytes_at(context),
            "traffic": state.traffic(context),
            "traffic_bytes": state.traffic_bytes(context),
        },
        "steps": step_rows(account, trace),
    }


# --- the table --------------------------------------------------------------------------------------------

_LABEL, _LAYERS, _SIZE = 36, 6, 9


def _line(label: str, layers: int | None, size: str, note: str = "") -> str:
    shown = "" if layers is None else str(layers)
    return f"{label:<{_LABEL}}{shown:>{_LAYERS}}{size:>{_SIZE}}   {note}".rstrip()


class Unit:
    """GiB, or MiB for fuels that would show as zeros."""

    def __init__(self, largest: int) -> None:
        self.name, self.size = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)

    def show(self, count: float) -> str:
        return f"{count / self.size:.2f}"

    def title(self, text: str) -> str:
        return f"{text:<{_LABEL}}{'layers':>{_LAYERS}}{self.name:>{_SIZE}}"


def _plain(count: int) -> str:
    return f"{count:,}"


def weight_lines(account: Account, unit: Unit) -> list[str]:
    """The weights that a token reads."""
    a = account.arch
    lines = [unit.title("weights that a token reads")]
    lines += [_line(label, layers, unit.show(count)) for label, layers, count in resident_rows(account)]
    lines.append(_line("resident subtotal", None, unit.show(account.resident_bytes)))
    routed = f"routed experts, top-{a.num_experts_per_tok} of {a.n_routed_experts}"
    lines.append(_line(routed, a.moe_layers, unit.show(account.routed_token_bytes)))
    whole = account.token_bytes_full_table
    lines.append(_line("per-token weight traffic", None, unit.show(whole), "full-table count"))
    note = "touched count: one embedding row"
    if whole == account.token_bytes_touched:
        note = "touched count: the embedding is the head as well"
    return [*lines, _line("", None, unit.show(account.token_bytes_touched), note)]


def disk_lines(account: Account, unit: Unit) -> list[str]:
    a = account.arch
    lines = [unit.title("on disk" if account.file_count else "on disk, by the manifest")]
    slots = f"{_plain(a.moe_layers * a.n_routed_experts)} slots of {account.slot_bytes / MIB:.2f} MiB"
    lines.append(_line("resident weights", a.num_hidden_layers, unit.show(account.resident_bytes)))
    draft = f"a draft step reads {unit.show(account.draft_token_bytes)} of it, and lm_head"
    notes = {"all routed experts": slots, "draft layer": draft}
    for label, layers, count in disk_rows(account):
        lines.append(_line(label, layers, unit.show(count), notes.get(label, "")))
    whole = account.file_bytes or account.tensor_bytes
    count = account.file_count
    files = counted(count, "file") if count else ""
    files += ", hollow: names and shapes without data" if account.hollow else ""
    return [*lines, _line("all", None, unit.show(whole), files)]


def state_lines(account: Account, state: State, context: int) -> list[str]:
    a = account.arch
    traffic = state.traffic(context)

    def line(label: str, layers: int, kept: str, read: int, write: int) -> str:
        return f"{label:<{_LABEL}}{layers:>{_LAYERS}}{kept:>14}{read / MIB:>12.2f}{write / MIB:>12.2f}"

    head = f"state of a stream, {state.kv_dtype} latents"
    columns = f"{'layers':>{_LAYERS}}{'bytes':>14}{'MiB read':>12}{'MiB written':>12}"
    lines = [f"{head:<{_LABEL}}{columns}   a token at {_plain(context)}"]
    if a.kda_layers:
        matrix, tail = _plain(state.kda_matrix_bytes), _plain(state.conv_tail_bytes)
        lines.append(line("KDA matrices", a.kda_layers, matrix, traffic["kda_read"], traffic["kda_write"]))
        lines.append(line("conv tails", a.kda_layers, tail, traffic["conv_read"], traffic["conv_write"]))
    latent = f"{_plain(a.mla_layers * state.latent_row_bytes)} /tok"
    lines.append(line("latent KV", a.mla_layers, latent, traffic["latent_read"], traffic["latent_write"]))
    pooled = f"{_plain(round(a.indexer_layers * state.pooled_row_bytes / a.index_kpool))} /tok"
    lines.append(
        line("indexer keys", a.indexer_layers, pooled, traffic["indexer_read"], traffic["indexer_write"])
    )
    read = sum(count for part, count in traffic.items() if part.endswith("read"))
    write = sum(count for part, count in traffic.items() if part.endswith("write"))
    kept = f"{state.bytes_at(context) / MIB:,.0f} MiB"
    return [*lines, line("all", a.num_hidden_layers, kept, read, write)]


def step_lines(account: Account, unit: Unit, trace: Routing | None) -> list[str]:
    """Steps of M rows, such as drafts to verify or a batch."""
    columns = [("uniform", "uniform routing")]
    if trace is not None:
        columns += [("trace_apart", "trace, rows apart"), ("trace_in_order", "trace, rows in order")]
    head = f"{'rows':>4}" + "".join(f"{title:>24}" for _, title in columns)
    units = f"{'':>4}" + f"{'experts a layer':>16}{unit.name:>8}" * len(columns)
    lines = ["a step of M rows reads (touched count)", head, units]
    for entry in step_rows(account, trace):
        line = f"{entry['rows']:>4}"
        for key, _ in columns:
            step = entry[key]
            line += (
                f"{'-':>16}{'-':>8}"
                if step is None
                else f"{step['experts_per_layer']:>16.1f}{unit.show(step['bytes']):>8}"
            )
        lines.append(line)
    return lines


def heading(account: Account, name: str, origin: str) -> str:
    a = account.arch
    kinds = f"{a.kda_layers} KDA, " if a.kda_layers else ""
    count = account.trunk_parameters
    size = f"{count / 1e9:.1f} B parameters" if count >= 1e8 else f"{count / 1e6:.2f} M parameters"
    return (
        f"{name}: {a.chemistry}, {a.num_hidden_layers} layers ({kinds}{a.mla_layers} sparse MLA; "
        f"{a.dense_layers} dense, {a.moe_layers} MoE), {size}\n{origin}"
    )


def report(
    account: Account, name: str, origin: str, state: State, context: int, trace: Routing | None = None
) -> str:
    unit = Unit(account.tensor_bytes)
    parts = [
        heading(account, name, origin),
        "\n".join(weight_lines(account, unit)),
        "\n".join(disk_lines(account, unit)),
        "\n".join(state_lines(account, state, context)),
        "\n".join(step_lines(account, unit, trace)),
    ]
    return "\n\n".join(parts) + "\n"
