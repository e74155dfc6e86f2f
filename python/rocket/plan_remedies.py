"""What to change when a plan is over budget. Every remedy is a request that was planned and fits."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import ceil

from rocket import booster as boosters_module
from rocket.accounting import KV_DTYPES, Account
from rocket.booster import GIB, Booster, least_reserve_gib
from rocket.booster import MOST as MOST_GIB
from rocket.dense_split import sharers
from rocket.plan import (
    DEFAULT_CONTEXT,
    OverBudgetError,
    Request,
    fewest_slots,
    fits,
    longest_context,
    make_plan,
    owned_by_each,
)
from rocket.quantity import Quantity

MOST = 6  # a hint with more is not read
CHUNKS = (128, 64, 32, 16)  # of --prefill-chunk


@dataclass(frozen=True)
class Remedy:
    """Options to give, each with its value, and the request that they make. Three are no options:
    ``memory_gib`` and the ``reserve_gib`` that goes with it are fields of the booster's profile, ``fuel``
    takes the place of the fuel."""

    options: dict[str, str]
    request: Request
    instead_of: str | None = None  # options that have to go: they cannot stand beside these

    @property
    def text(self) -> str:
        words = [f"{option} {value}" for option, value in self.options.items() if option.startswith("-")]
        if "memory_gib" in self.options:
            words.append(("on " if words else "") + f"a booster with memory_gib {self.options['memory_gib']}")
        if "reserve_gib" in self.options:
            words.append(f"and reserve_gib {self.options['reserve_gib']}")
        if "fuel" in self.options:
            words.append(("with " if words else "") + f"the fuel {self.options['fuel']}")
        if self.instead_of is not None:
            words.append(f"instead of {self.instead_of}")
        return " ".join(words)

    @property
    def changes(self) -> set[str]:
        """What kind of remedy it is. A larger reserve comes with more memory, and is no change of its own."""
        return set(self.options) - {"reserve_gib"}


def remedies(
    account: Account, request: Request, fuels: Callable[[], Iterable[tuple[str, Account]]] = tuple
) -> list[Remedy]:
    """Ways out, the smallest changes first: two that differ in kind wherever there are two.

    `fuels`: other fuels by name. They are looked at where nothing but more memory helps this one.
    """
    found: list[Remedy] = []
    for more in (_single, _combined, _larger, partial(_other_fuel, fuels)):
        if not two_kinds(found):
            for remedy in more(account, request):
                if not any(_more_of(remedy, other) for other in found):
                    found.append(remedy)
    return [replace(remedy, instead_of=_instead_of(request, remedy)) for remedy in found[:MOST]]


def two_kinds(found: Iterable[Remedy]) -> bool:
    """Whether two remedies change different things, neither all that the other does and more."""
    kinds = [remedy.changes for remedy in found]
    return any(not (one <= other or other <= one) for one, other in combinations(kinds, 2))


def _instead_of(request: Request, remedy: Remedy) -> str | None:
    gone = []
    if request.owners is not None and remedy.request.owners is None:
        gone.append("--split")
    slots = _slots_option(request)
    others = "fuel" in remedy.options or ("--expert-slots" in remedy.options and slots != "--expert-slots")
    if slots is not None and others:
        gone.append(slots)
    return " and ".join(gone) or None


def _slots_option(request: Request) -> str | None:
    """The option that has said how many slots."""
    if request.slot_map is not None:
        return "--slot-map"
    if request.cache_bytes is not None:
        return "--expert-cache-gib"
    return "--expert-slots" if request.slots is not None else None


def _larger(account: Account, request: Request) -> Iterator[Remedy]:
    """More memory works wherever a profile can say how much, but cannot be had by an option."""
    yield from _more_memory(account, request, {})
    options, small = _smallest(account, request)
    if options:
        yield from _more_memory(account, small, options)


def _more_of(remedy: Remedy, other: Remedy) -> bool:
    """Whether a remedy gives up all that another does, and so offers nothing beside it."""
    return all(
        option in remedy.options and _gives_up(remedy, option) >= _gives_up(other, option)
        for option in other.changes
    )


def _gives_up(remedy: Remedy, option: str) -> float:
    request = remedy.request
    if option in ("--booster", "memory_gib"):
        return request.booster.memory_bytes
    if option == "--boosters":
        return request.boosters
    if option == "fuel":
        return 0
    if option == "--kv-dtype":
        return -KV_DTYPES[request.kv_dtype or "f32"]
    in_all = request.boosters if option in ("--expert-slots", "--expert-cache-gib") else 1
    return -float(remedy.options[option]) * in_all


def _single(account: Account, request: Request) -> Iterator[Remedy]:
    """One option changed."""
    yield from _fewer_slots(account, request)
    context = longest_context(account, request)
    if context:
        yield Remedy({"--context": str(context)}, replace(request, context=context))
    width = KV_DTYPES[request.kv_dtype or "f32"]
    for dtype, bytes_each in KV_DTYPES.items():
        narrower = replace(request, kv_dtype=dtype)
        if bytes_each < width and fits(account, narrower):
            yield Remedy({"--kv-dtype": dtype}, narrower)
            break
    streams = _most_streams(account, request)
    if streams:
        yield Remedy({"--streams": str(streams)}, replace(request, streams=streams))
    for rows in CHUNKS:
        smaller = replace(request, prefill_chunk=rows)
        if rows < request.prompt_rows and fits(account, smaller):
            yield Remedy({"--prefill-chunk": str(rows)}, smaller)
            break
    yield from _more_boosters(account, replace(request, owners=None))
    yield from _other_boosters(account, request)


def _fewer_slots(account: Account, request: Request) -> Iterator[Remedy]:
    if request.cache_bytes is None and request.slots is None and request.slot_map is None:
        return
    automatic = replace(request, cache_bytes=None, slots=None, slot_map=None)
    plan = fits(account, automatic)
    if plan is None:
        return
    if request.cache_bytes is not None:
        gib = plan.cache * 100 // GIB / 100
        smaller = replace(automatic, cache_bytes=int(gib * GIB))
        if fits(account, smaller):
            yield Remedy({"--expert-cache-gib": f"{gib:.2f}"}, smaller)
            return
    yield Remedy({"--expert-slots": str(plan.slot_count)}, replace(automatic, slots=plan.slot_count))


def _most_streams(account: Account, request: Request) -> int:
    low, high = 0, request.streams - 1
    while low < high:
        middle = (low + high + 1) // 2
        if fits(account, replace(request, streams=middle)):
            low = middle
        else:
            high = middle - 1
    return low


def _more_boosters(account: Account, request: Request) -> Iterator[Remedy]:
    """Each holds fewer experts then, and fewer of the slots that were asked for. More boosters need no more
    each, so one search is enough."""
    remedy = _fewest_boosters(account, request, lambda count: _on_boosters(request, count))
    if remedy is None:
        slots = _asked_in_all(account, request)
        if slots is not None:
            remedy = _fewest_boosters(
                account, request, lambda count: _with_slots(account, request, count, slots)
            )
    if remedy is not None:
        yield remedy


def _on_boosters(request: Request, count: int) -> Remedy:
    return Remedy({"--boosters": str(count)}, replace(request, boosters=count))


def _asked_in_all(account: Account, request: Request) -> int | None:
    """The slots that were asked for, on all boosters together."""
    if request.slot_map is not None:
        return request.boosters * sum(request.slot_map)
    if request.slots is not None:
        return request.boosters * request.slots
    if request.cache_bytes is not None:
        return request.boosters * (request.cache_bytes // account.slot_bytes)
    return None


def _with_slots(account: Account, request: Request, count: int, slots: int) -> Remedy:
    """So many boosters, each with its share of slots, as far as it has experts for them."""
    other = replace(request, boosters=count, cache_bytes=None, slots=None, slot_map=None)
    most = max(map(sum, owned_by_each(account, other)))
    each = min(most, max(fewest_slots(account, other), ceil(slots / count)))
    return Remedy({"--boosters": str(count), "--expert-slots": str(each)}, replace(other, slots=each))


def _fewest_boosters(account: Account, request: Request, of: Callable[[int], Remedy]) -> Remedy | None:
    low, high = request.boosters + 1, account.arch.n_routed_experts
    if request.split_dense:
        counts = [n for n in sharers(account.arch, account.cuts) if low <= n <= high]
        return next((of(n) for n in counts if fits(account, of(n).request)), None)
    if low > high or not fits(account, of(high).request):
        return None
    while low < high:
        middle = (low + high) // 2
        if fits(account, of(middle).request):
            high = middle
        else:
            low = middle + 1
    return of(low)


def _other_boosters(account: Account, request: Request) -> Iterator[Remedy]:
    """The smallest shipped profile that is enough. It may have less memory than one that keeps much back."""
    for booster in _shipped():
        other = replace(request, booster=booster)
        if fits(account, other):
            yield Remedy({"--booster": booster.id}, other)
            return


def _other_fuel(
    fuels: Callable[[], Iterable[tuple[str, Account]]], account: Account, request: Request
) -> Iterator[Remedy]:
    """The largest smaller fuel that fits. Slots and splits are those of the fuel that does not, and so is a
    booster that nobody named."""
    other = replace(request, owners=None, cache_bytes=None, slots=None, slot_map=None)
    options = {"--booster": request.booster.id} if request.booster in _shipped() else {}
    if request.owners is not None:
        options["--boosters"] = str(request.boosters)
    for name, fuel in sorted(fuels(), key=lambda row: -row[1].resident_loaded_bytes):
        if fuel.resident_loaded_bytes < account.resident_loaded_bytes and fits(fuel, other):
            yield Remedy({**options, "fuel": name}, other)
            return


def _shipped() -> list[Booster]:
    found = [boosters_module.load(name) for name in boosters_module.names()]
    return sorted(found, key=lambda booster: booster.memory_bytes)


def _usable(booster: Booster) -> int:
    return booster.memory_bytes - booster.reserve_bytes


def _smallest(account: Account, request: Request) -> tuple[dict[str, str], Request]:
    """The least that a request can be brought down to, its context apart, and the options that do it."""
    options: dict[str, str] = {}
    small = request
    if request.streams > 1:
        options["--streams"], small = "1", replace(small, streams=1)
    if request.kv_dtype != "fp8":
        options["--kv-dtype"], small = "fp8", replace(small, kv_dtype="fp8")
    automatic = replace(small, cache_bytes=None, slots=None, slot_map=None)
    if automatic != small:
        slots = fewest_slots(account, request)
        options["--expert-slots"], small = str(slots), replace(automatic, slots=slots)
    return options, small


def _combined(account: Account, request: Request) -> Iterator[Remedy]:
    """Everything smaller at once, here or on the smallest booster where that is enough."""
    options, small = _smallest(account, request)
    larger = [b for b in _shipped() if _usable(b) > _usable(request.booster)]
    wanted = request.context or DEFAULT_CONTEXT
    for booster in (request.booster, *larger):
        context = min(wanted, longest_context(account, replace(small, booster=booster)))
        if not context:
            continue
        named = {} if booster is request.booster else {"--booster": booster.id}
        final = replace(small, booster=booster, context=context)
        if fits(account, final):
            yield Remedy({**named, **options, "--context": str(context)}, final)
            if named:
                return


def _more_memory(account: Account, request: Request, options: dict[str, str]) -> Iterator[Remedy]:
    """The memory with which a request would fit, and the reserve where that has to grow with it."""
    booster = request.booster
    needed = (_required(account, request) - booster.reserve_bytes + 2) / GIB  # sizes in GiB lose a byte each
    memory = reserve = booster.reserve_gib.value
    while (more := _up(needed + reserve)) > memory:
        memory = more
        if booster.unified_memory:
            reserve = max(reserve, _up(least_reserve_gib(memory)))
    if memory > MOST_GIB:
        return
    found = {**options, "memory_gib": f"{memory:.2f}"}
    fields = booster.model_dump() | {"memory_gib": _derived(memory)}
    if reserve > booster.reserve_gib.value:
        found["reserve_gib"] = f"{reserve:.2f}"
        fields["reserve_gib"] = _derived(reserve)
    # Made anew, so that what the first one has worked out is not taken over.
    yield Remedy(found, replace(request, booster=Booster.model_validate(fields)))


def _up(gib: float) -> float:
    return ceil(gib * 100) / 100


def _derived(gib: float) -> Quantity:
    return Quantity(value=gib, source="derived")


def _required(account: Account, request: Request) -> int:
    try:
        return make_plan(account, request).required
    except OverBudgetError as error:
        return error.plan.required
