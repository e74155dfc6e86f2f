"""How fast a plan can be: what a step must read over the rates at which a booster reads it.

These are limits, not forecasts: kernels that read at less than the streaming rate, launches and exchanges
between boosters come on top.
"""

from dataclasses import dataclass

from rocket.accounting import Account, expected_union
from rocket.booster import Booster
from rocket.errors import UsageError
from rocket.plan import Plan
from rocket.routing import Replay, Routing, replay
from rocket.split import make_split


@dataclass(frozen=True)
class Ceiling:
    """Decoded tokens a second if reading the weights were all there is to do."""

    label: str
    boosters: int
    bytes_a_token: int  # that each booster reads
    tok_s: float


def ceilings(account: Account, booster: Booster, boosters: int, each: Account | None = None) -> list[Ceiling]:
    """For one booster and for all. The full-table count is what sums over a checkpoint give. ``each``: a
    booster's share of the dense weights, if they are split as far as they can be."""
    full, touched = account.token_bytes_full_table, account.token_bytes_touched
    dense = touched - account.routed_token_bytes

    def row(label: str, count: int, read: int) -> Ceiling:
        return Ceiling(label, count, read, booster.read_bytes_s / read)

    rows = [row("full table", 1, full), row("touched", 1, touched)]
    if boosters > 1:
        replicated = dense + account.routed_token_bytes // boosters
        rows += [
            row("full table, all weights split", boosters, full // boosters),
            row("touched, all weights split", boosters, touched // boosters),
            row("touched, experts split", boosters, replicated),
        ]
        if each is not None:
            own = each.token_bytes_touched - each.routed_token_bytes + account.routed_token_bytes // boosters
            rows.append(row("touched, with --split-dense", boosters, own))
    return rows


@dataclass(frozen=True)
class StepTime:
    """A decode step of one row a stream. The hit rate is that of all boosters together; experts and misses
    are those of the booster with most to do where a trace is replayed, else an even share."""

    rows: int
    hit_rate: float
    source: str  # of the hit rate
    experts: float  # distinct experts that the booster reads, over all layers
    misses: float  # of these
    base_bytes: float
    base_s: float  # with every expert in a slot
    miss_s: float  # for each miss
    replayed: Replay | None = None

    @property
    def counted(self) -> str:
        """What the figures count where there are several boosters."""
        share = "an even share" if self.replayed is None else "each layer's busiest booster"
        return f"hit rate of all boosters together, experts and misses of {share}"

    @property
    def seconds(self) -> float:
        return self.base_s + self.misses * self.miss_s

    @property
    def tok_s(self) -> float:
        return self.rows / self.seconds


@dataclass(frozen=True)
class MissSource:
    """Where an expert without a slot comes from: a bank in host memory, the disk for what is not there. A
    bank that has no room for all holds those without a slot, which trade places with what makes way."""

    bank_experts: int
    owned_experts: int
    slots: int
    seconds: float  # for one expert

    @property
    def exclusive(self) -> bool:
        """The bank holds the experts without a slot, and no others."""
        return 0 < self.bank_experts == self.owned_experts - self.slots

    @property
    def text(self) -> str:
        if self.owned_experts == 0:
            return "no experts"
        if self.bank_experts >= self.owned_experts:
            return "host memory, over the link"
        if self.exclusive:
            return "host memory, over the link, which holds just these"
        if self.bank_experts == 0:
            return "the disk"
        share = 100 * self.bank_experts / self.owned_experts
        return f"host memory, over the link, for {share:.0f} % of the experts, and the disk for the rest"


def miss_source(plan: Plan) -> MissSource:
    booster, owned, slot = plan.request.booster, sum(plan.owned), plan.slot_bytes
    if not owned:
        return MissSource(0, 0, 0, 0.0)
    bank, others = min(owned, booster.bank_bytes // slot), owned - plan.slot_count
    if 0 < others <= bank < owned:
        return MissSource(others, owned, plan.slot_count, slot / booster.link_bytes_s)
    from_bank = bank / owned
    seconds = (1 - from_bank) * slot / booster.disk_bytes_s
    if bank:
        seconds += from_bank * slot / booster.link_bytes_s
    return MissSource(bank, owned, plan.slot_count, seconds)


def _replayed(plan: Plan, routing: Routing) -> Replay:
    arch, boosters = plan.account.arch, plan.request.boosters
    owners = plan.request.owners
    if owners is None:
        owners = make_split(arch.n_routed_experts, arch.moe_layers, boosters, "id")
    return replay(routing, plan.slots_of_each(), plan.request.streams, owners.tolist())


def step_time(
    plan: Plan,
    *,
    hit_rate: float | None = None,
    routing: Routing | None = None,
) -> StepTime:
    """A step at a hit rate, or at the one of a trace replayed through the plan's slots from empty ones; by
    default at what uniform routing gives."""
    account, rows = plan.account, plan.request.streams
    arch, boosters = account.arch, plan.request.boosters
    replayed = None
    if routing is not None:
        if routing.tokens < rows:
            raise UsageError(
                f"--trace: expected at least {rows} tokens (one a stream), found {routing.tokens}",
                "give a longer trace, or fewer streams",
            )
        replayed = _replayed(plan, routing)
        experts = replayed.slowest_lookups / replayed.steps
        misses = replayed.slowest_misses / replayed.steps
        rate, source = replayed.hit_rate, f"{routing.name} replayed from empty slots, least recently used"
        if plan.holds_all:  # no step misses once the slots are filled
            rate, misses = 1.0, 0.0
            source = f"every expert has a slot; {routing.name} fills {replayed.misses:,} of them once"
    else:
        union = expected_union(arch.n_routed_experts, arch.num_experts_per_tok, rows)
        experts = union * arch.moe_layers / boosters
        rate, source = _assumed_rate(plan, hit_rate)
        misses = (1 - rate) * experts
    traffic = rows * sum(plan.state_of.traffic(plan.context - 1).values())
    dense = plan.each.resident_bytes - plan.each.embed_untouched_bytes(rows)
    a_layer = experts / arch.moe_layers if arch.moe_layers else 0.0
    base = dense + account.routed_bytes(dict.fromkeys(account.experts, a_layer)) + traffic
    return StepTime(
        rows=rows,
        hit_rate=rate,
        source=source,
        experts=experts,
        misses=misses,
        base_bytes=base,
        base_s=base / plan.request.booster.read_bytes_s,
        miss_s=miss_source(plan).seconds,
        replayed=replayed,
    )


def _assumed_rate(plan: Plan, hit_rate: float | None) -> tuple[float, str]:
    if hit_rate is not None:
        return hit_rate, "--hit-rate"
    if plan.holds_all:
        return 1.0, "every expert has a slot"
    return plan.slot_count / sum(plan.owned), "slots / experts, as if routing were uniform"
