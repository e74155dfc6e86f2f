"""What ``rocket plan`` prints."""

from dataclasses import dataclass
from typing import Any

from rocket.plan import Plan, exchange_by_context, exchange_by_slots
from rocket.plan_time import Ceiling, StepTime, ceilings, miss_source
from rocket.report import counted, format_bytes
from rocket.slot_limits import cut_from


@dataclass(frozen=True)
class Report:
    fuel: str
    plan: Plan
    step: StepTime
    choices: list[str]
    split: str | None = None  # the file
    booster_file: str | None = None  # of a profile that is not a shipped one

    # --- text ----------------------------------------------------------------------------------------------

    def text(self) -> str:
        parts = [self._head(), self._memory(), self._ceilings(), self._step(), self._exchange()]
        if self.choices:
            parts.append(["chosen automatically", *(f"  {choice}" for choice in self.choices)])
        return "\n\n".join("\n".join(part) for part in parts if part)

    def _head(self) -> list[str]:
        plan, arch = self.plan, self.plan.account.arch
        booster, count = plan.request.booster, plan.request.boosters
        experts = (
            f"{arch.moe_layers} MoE layers of {arch.n_routed_experts} experts, top-{arch.num_experts_per_tok}"
        )
        streams = counted(plan.request.streams, "stream")
        sizes = f"{booster.memory_gib.value:g} GiB, reads {booster.read_gb_s.value:g} GB/s"
        if self.booster_file is not None:
            sizes += f", from {self.booster_file}"
        return [
            f"fuel      {self.fuel}: {arch.chemistry}, {arch.num_hidden_layers} layers, {experts}",
            f"boosters  {count} x {booster.id} ({booster.name}): {sizes}",
            f"state     {streams} of {plan.context:,} tokens, {plan.state_of.dtypes}",
        ]

    def _memory(self) -> list[str]:
        plan = self.plan
        each = "each booster" if plan.request.boosters > 1 else "booster"
        rows = [
            ("resident", plan.resident, self._dense()),
            ("expert slots", plan.cache, self._slots()),
            ("state", plan.state, self._state()),
            ("workspace", plan.workspace, "activations, logits, tables"),
            ("reserve", plan.reserve, plan.request.booster.reserve_gib.note or ""),
            ("left", plan.left, ""),
            ("memory", plan.memory, plan.request.booster.memory_gib.note or ""),
        ]
        lines = [each]
        lines += [f"  {name:<14}{format_bytes(count):>12}  {note}".rstrip() for name, count, note in rows]
        if plan.request.cache_bytes is not None:
            asked, given = format_bytes(plan.request.cache_bytes), format_bytes(plan.cache)
            lines.append(f"expert cache: requested {asked}, delivered {given}")
        if cut := cut_from(plan.slots_requested or 0, plan.slot_count):
            lines.append(f"expert cache: {plan.slot_count:,} slots{cut}")
        return lines

    def _dense(self) -> str:
        if self.plan.each is self.plan.account:
            return "dense weights"
        return f"its share of {format_bytes(self.plan.account.resident_loaded_bytes)} dense weights"

    def _state(self) -> str:
        recurrent = self.plan.state_of.stream_bytes
        twice = f", recurrent state ({format_bytes(recurrent)}) twice for checkpoints" if recurrent else ""
        return f"{format_bytes(self.plan.stream_state)} a stream{twice}"

    def _slots(self) -> str:
        plan = self.plan
        if not plan.slots:
            return "no MoE layers"
        few, many = min(plan.slots), max(plan.slots)
        a_layer = f"{few}" if few == many else f"{few} to {many}"
        size = format_bytes(plan.slot_bytes)
        return f"{plan.slot_count:,} of {sum(plan.owned):,} x {size}, {a_layer} a MoE layer"

    def _ceilings(self) -> list[str]:
        lines = [f"{'ceiling of one stream':<44}{'tok/s':>7}"]
        for row in self._ceiling_rows():
            who = f"{row.label}, {counted(row.boosters, 'booster')}"
            lines.append(f"{who:<44}{row.tok_s:>7.1f}  {format_bytes(row.bytes_a_token)} a token")
        return lines

    def _ceiling_rows(self) -> list[Ceiling]:
        plan = self.plan
        each = plan.each if plan.each is not plan.account else None
        return ceilings(plan.account, plan.request.booster, plan.request.boosters, each)

    def _step(self) -> list[str]:
        step, plan = self.step, self.plan
        read = f"{counted(step.rows, 'row')}, {format_bytes(step.base_bytes)} read"
        lines = [f"step      {read}: {1000 * step.base_s:.2f} ms with every expert in a slot"]
        if plan.slots:
            miss = (
                f"{format_bytes(plan.slot_bytes)} from {miss_source(plan).text}: {1000 * step.miss_s:.3f} ms"
            )
            layer = f"{1000 * step.miss_s * len(plan.slots):.2f} ms for one in each MoE layer"
            misses = f"{step.misses:.1f} misses a step of {step.experts:.1f} experts"
            lines += [
                f"a miss    {miss}; {layer}",
                f"hit rate  {100 * step.hit_rate:.1f} % ({step.source}): {misses}",
            ]
            if plan.request.boosters > 1:
                lines.append(f"          {step.counted}")
        lines.append(f"in all    {1000 * step.seconds:.2f} ms, {step.tok_s:.1f} tok/s at most")
        return lines

    def _exchange(self) -> list[str]:
        plan = self.plan
        if not plan.slots:
            return []
        lines = [f"{'context':>11}{'slots that fit':>16}"]
        lines += [f"{row.context:>11,}{row.slots:>16,}" for row in exchange_by_context(plan)]
        lines += ["", f"{'slots':>11}{'longest context':>16}"]
        lines += [f"{row.slots:>11,}{row.context:>16,}" for row in exchange_by_slots(plan)]
        token = plan.state_of.token_bytes * plan.request.streams
        if token:
            worth = plan.slot_bytes / token
            lines.append(f"a slot weighs as much as {worth:,.{0 if worth >= 10 else 2}f} tokens of context")
        return lines

    # --- JSON ----------------------------------------------------------------------------------------------

    def json(self) -> dict[str, Any]:
        plan, step, arch = self.plan, self.step, self.plan.account.arch
        layers = dict(zip(map(str, arch.moe_layer_ids), plan.slots, strict=True))
        source = miss_source(plan)
        return {
            "fits": True,
            "fuel": self.fuel,
            "booster": plan.request.booster.id,
            "booster_file": self.booster_file,
            "boosters": plan.request.boosters,
            "split": self.split,
            "split_dense": plan.request.split_dense,
            "context_tokens": plan.context,
            "streams": plan.request.streams,
            "kv_dtype": plan.kv_dtype,
            "prefill_chunk": plan.request.prompt_rows,
            "each_booster_bytes": {
                "resident": plan.resident,
                "expert_slots": plan.cache,
                "state": plan.state,
                "workspace": plan.workspace,
                "reserve": plan.reserve,
                "left": plan.left,
                "memory": plan.memory,
            },
            "slots": plan.slot_count,
            "slots_requested": plan.slots_requested,
            "slots_of_layer": layers,
            "experts_owned": sum(plan.owned),
            "slot_bytes": plan.slot_bytes,
            "expert_cache_requested_bytes": plan.request.cache_bytes,
            "expert_cache_delivered_bytes": plan.cache,
            "stream_state_bytes": plan.stream_state,
            "stream_state_recurrent_bytes": plan.state_of.stream_bytes,
            "ceilings": [
                {
                    "count": row.label,
                    "boosters": row.boosters,
                    "bytes_a_token": row.bytes_a_token,
                    "tok_s": row.tok_s,
                    "streams": 1,
                }
                for row in self._ceiling_rows()
            ],
            "step": {
                "rows": step.rows,
                "base_bytes": step.base_bytes,
                "base_ms": 1000 * step.base_s,
                "experts": step.experts,
                "hit_rate": step.hit_rate,
                "hit_rate_source": step.source,
                "counted": step.counted if plan.request.boosters > 1 else None,
                "cold_start_misses": step.replayed.misses if step.replayed and plan.holds_all else None,
                "misses": step.misses,
                "miss_ms": 1000 * step.miss_s,
                "miss_a_layer_ms": 1000 * step.miss_s * len(plan.slots),
                "miss_source": source.text,
                "bank_experts": source.bank_experts,
                "ms": 1000 * step.seconds,
                "tok_s": step.tok_s,
            },
            "exchange_by_context": [vars(row) for row in exchange_by_context(plan)],
            "exchange_by_slots": [vars(row) for row in exchange_by_slots(plan)],
            "choices": self.choices,
        }
