#!/usr/bin/env python3
"""What streaming of experts reaches on this machine, beside what its disk and rocket plan promise.

    scripts/bench_experts.py FUEL --slab DIR [--slots N] [--only disk slab bank hits all] [--out DIR]

Each run is a process of its own, so that its peak of memory is its own. A table comes line by line;
DIR/experts.json has all of it, and is written anew after every run. What fails does not stop the rest.

disk   Plain reads of the slab past the page cache, 4 MiB each, one and eight at a time.
slab   A bounded cache over the slab, no bank: steps of one stream and of eight, each of them new and of one
       random token, since a stream of random tokens soon takes the same experts again. Steps count once the
       cache is full, or after some seconds. Bytes over the seconds in which steps waited for them, beside
       the plain rate just before and after.
bank   On a GPU: loads with a bank of all experts and with an exclusive one, after the fuel's files were
       dropped from the page cache, beside plain reads of the largest. rocket plan has experts x slot bytes of
       host memory for a bank and nothing else; the engine refuses a load for less than "engine asks": the
       larger of bank and dense weights, and its reserve (src/experts/behind.h).
hits   A trained fuel decodes prompts greedily, one after another, with slots for 25 and 50 % of its experts,
       and writes a trace, which is then replayed through src/experts/cache.h with as many slots. Both caches
       begin empty. Prompts are fed token by token: each step has one row in both, and no look-up is one of
       many rows, which have a rule of their own. All steps count in both, the prompts' as well.
all    A cache with a slot for every expert, and no cache, in one process and in turn: the same greedy tokens.
       The first round fills the cache and does not count.

Peaks are VmHWM of /proc/self/status, with pages of mapped files and, in disk, slab and bank, up to 32 MiB of
this script's buffers. Whether the driver's pinned memory counts in it, and as what, is the driver's affair:
so beside it stand the most of RssAnon + RssShmem that was seen while loading, VmPin, and by how much the
memory that can be had (rocket._core.memory_available) fell, which other processes move as well.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import needs_engine  # noqa: F401  (what is missing ends the script here)

# isort: split
import numpy as np

from rocket import Engine, Error, SamplingParams, _core
from rocket.disk_rate import BLOCK, READERS
from rocket.errors import CliError
from rocket.fuel import resolve

GIB = 1 << 30
PAGE = mmap.PAGESIZE
PARTS = ("disk", "slab", "bank", "hits", "all")
STREAMS = (1, 8)  # new ones a step
FIRST_STEPS = 4  # that never count
ROUNDS = 8  # of each way in `all`, besides the first
CONTEXT = 256  # tokens that a stream may have
ENGINE_RESERVE = 256 << 20  # what the engine keeps for itself besides (engines/load.cpp)
GREEDY = SamplingParams()
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n",
    "The three primary colours are",
    "class Stack:\n    def __init__(self):\n",
    "A list is a sequence of",
    "def is_prime(n):\n    if n < 2:\n",
    "The chemical symbol of gold is",
    "Returns a new dictionary with",
    "for i in range(10):\n    print(",
    "The first month of the year is",
    "def read_lines(path):\n    with open(path) as f:\n",
    "Raises a ValueError if",
    "The opposite of hot is",
    "x = [a + b for a, b in",
    "Installation\n============\n\nTo install",
    "def reverse(text):\n    return",
    "A week has seven days:",
    "try:\n    value = int(text)\nexcept",
    "The largest planet is",
)


Found = dict[str, Any]
Lines = list[tuple[str, str]]  # of the table


def per_second(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e-9:.3f} GB/s"


def gib(value: float) -> str:
    return f"{value / GIB:.3f} GiB"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def over(value: float, other: float) -> float | None:
    return value / other if other else None


# --- the disk ---------------------------------------------------------------------------------------------


def forget(path: Path) -> None:
    """Drops a file from the page cache, as far as the system does as it is told."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # pages that are not on the disk yet are kept
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def cached_share(files: list[Path]) -> float | None:
    """What part of the files the page cache has, or None where the system does not say."""
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    there = pages = 0
    for path in files:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            data = np.frombuffer(mapped, np.uint8)
            found = np.zeros(-(-len(data) // PAGE), np.uint8)
            status = mincore(data.ctypes.data, len(data), found.ctypes.data)
            del data  # else the file stays mapped
        if status != 0:
            return None
        there += int((found & 1).sum())
        pages += len(found)
    return over(there, pages)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[int, bool]]:
    """For reading, and whether past the page cache."""
    try:
        handle, direct = os.open(path, os.O_RDONLY | os.O_DIRECT), True
    except OSError:  # not every file system has it
        forget(path)
        handle, direct = os.open(path, os.O_RDONLY), False
    try:
        yield handle, direct
    finally:
        os.close(handle)


def read_rate(path: Path, readers: int, seconds: float) -> tuple[float, bool]:
    """Bytes a second with so many reads under way, in order from a place that was drawn, and whether they
    went past the page cache."""
    block = min(BLOCK, path.stat().st_size // PAGE * PAGE)
    if not block:
        raise ValueError(f"{path}: too small to measure reads of it")
    pieces = path.stat().st_size // block
    numbers = itertools.count(random.randrange(pieces))
    with opened(path) as (handle, direct), ThreadPoolExecutor(readers) as pool:
        start = time.perf_counter()

        def take(_: int) -> int:
            done = 0
            with contextlib.closing(mmap.mmap(-1, block)) as buffer:  # aligned as O_DIRECT wants it
                while time.perf_counter() < start + seconds:
                    got = os.preadv(handle, [buffer], next(numbers) % pieces * block)
                    if got != block:
                        raise OSError(None, f"a read of {block} bytes gave {got}", str(path))
                    done += got
            return done

        return sum(pool.map(take, range(readers))) / (time.perf_counter() - start), direct


def plain(path: Path, seconds: float) -> Found:
    """One read at a time, then several; the better of the two counts."""
    one, direct = read_rate(path, 1, seconds)
    many, _ = read_rate(path, READERS, seconds)
    return {"one": one, "many": many, "best": max(one, many), "direct": direct}


def plain_mean(found: list[Found]) -> tuple[float, Lines]:
    """Of what was measured before and after something."""
    mean = statistics.mean(one["best"] for one in found)
    both = " and ".join(per_second(one["best"]) for one in found)
    how = "" if all(one["direct"] for one in found) else ", THROUGH THE PAGE CACHE"
    return mean, [("plain reads before and after", f"{both}, mean {per_second(mean)}{how}")]


# --- memory -----------------------------------------------------------------------------------------------

FIELDS = ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem", "VmPin")


def memory() -> dict[str, int]:
    """Bytes, as /proc/self/status has them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    all_of_them = dict(line.split(":", 1) for line in lines)
    return {name: 1024 * int(all_of_them[name].split()[0]) for name in FIELDS if name in all_of_them}


def memory_lines(found: dict[str, int]) -> Lines:
    parts = [f"{name} {gib(found[name])}" for name in FIELDS[2:] if name in found]
    return [("peak of host memory", f"VmHWM {gib(found['VmHWM'])}; at last {', '.join(parts)}")]


@contextlib.contextmanager
def watched_memory() -> Iterator[Found]:
    """The most of RssAnon + RssShmem meanwhile, and by how much the memory that can be had fell at most."""
    seen, stop = {"own": 0, "fell": 0}, threading.Event()
    first = _core.memory_available()[0]

    def look() -> None:
        now = memory()
        seen["own"] = max(seen["own"], now.get("RssAnon", 0) + now.get("RssShmem", 0))
        seen["fell"] = max(seen["fell"], first - _core.memory_available()[0])

    def watch() -> None:
        while not stop.wait(0.05):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
        look()


# --- runs, each in a process of its own: what was found, and its lines ------------------------------------


def load(work: Found, fuel: str = "", streams: int = 1, **more: Any) -> Engine:
    named = {"backend": work["backend"], "max_context": CONTEXT, "max_streams": streams}
    return Engine(fuel or work["fuel"], **named, **more)


def about(engine: Engine) -> Found:
    names = ("device", "backend", "choices", "slots", "slot_bytes", "moe_layers", "experts", "topk")
    names += ("expert_store", "bank_bytes", "expert_bytes", "dense_bytes")
    return {"info": {name: engine.info[name] for name in names}, "memory": memory()}


def run_write(work: Found) -> tuple[Found, Lines]:
    """The slab, if it is not there."""
    from rocket.slab_command import check_room

    slab = _core.FuelSlab(work["fuel"], work["slab"])
    there, start = slab.written(), time.perf_counter()
    if not there:
        check_room(Path(slab.path), slab.file_bytes)
        slab.write()
    seconds = time.perf_counter() - start
    forget(Path(slab.path))
    how = "was there already" if there else f"written in {seconds:.1f} s"
    found = {"there": there, "bytes": slab.file_bytes, "seconds": seconds, "path": slab.path}
    return found, [("slab", f"{gib(slab.file_bytes)}, {how}")]


def run_disk(work: Found) -> tuple[Found, Lines]:
    found = plain(Path(work["path"]), work["seconds"] / 4)
    how = "past the page cache" if found["direct"] else "THROUGH THE PAGE CACHE"
    lines = [("one read at a time", f"{per_second(found['one'])}, {how}")]
    return found, [*lines, (f"{READERS} at a time", per_second(found["many"]))]


def new_streams(core: _core.CoreEngine, tokens: list[int]) -> float:
    """Milliseconds of a step of streams that have seen nothing else."""
    numbers = [core.open() for _ in tokens]
    start = time.perf_counter()
    if len(tokens) == 1:
        core.decode(numbers[0], tokens[0], GREEDY)
    else:
        core.decode_batch(numbers, tokens, [GREEDY] * len(tokens))
    ms = 1000 * (time.perf_counter() - start)
    for number in numbers:
        core.close(number)
    return ms


def fill(core: _core.CoreEngine, work: Found, tokens: Iterator[int]) -> tuple[int, bool]:
    """Steps until the cache is full, or until it takes too long; and whether it is."""
    start, steps, full = time.perf_counter(), 0, False
    while steps < FIRST_STEPS or (
        not full and steps < 4 * work["steps"] and time.perf_counter() < start + 0.6 * work["seconds"]
    ):
        new_streams(core, list(itertools.islice(tokens, work["streams"])))
        full = core.stats()["expert_evictions"] > 0
        steps += 1
    return steps, full


def run_slab(work: Found) -> tuple[Found, Lines]:
    path, streams, limit = Path(work["path"]), work["streams"], work["seconds"]
    more = {"expert_slots": work["slots"], "expert_slab": work["slab"], "expert_bank": "no"}
    with load(work, streams=streams, **more) as engine:
        core, ms = engine.core, []
        tokens = itertools.cycle(np.random.default_rng(5).permutation(engine.info["vocab"]).tolist())
        first, full = fill(core, work, tokens)
        plain_before, before = plain(path, limit / 10), core.stats()
        while len(ms) < work["steps"] and (len(ms) < 4 or sum(ms) < 1000 * limit):
            ms.append(new_streams(core, list(itertools.islice(tokens, streams))))
        after, rates = core.stats(), [plain_before, plain(path, limit / 10)]
        of_engine = about(engine)
    names = ("expert_hits", "expert_misses", "streamed_bytes", "fetch_seconds")
    hits, misses, read, waited = counted = [after[name] - before[name] for name in names]
    info, steps, while_waiting = of_engine["info"], len(ms), over(read, waited)
    mean, plain_lines = plain_mean(rates)
    lines = [
        ("cache", f"{info['slots']} slots, {'full' if full else 'NOT FULL'} after {first} steps"),
        ("read with", info["expert_store"]),
        ("misses a step and layer", f"{misses / steps / info['moe_layers']:.2f}"),
        ("hit rate", percent(over(hits, hits + misses))),
        ("bytes a step", gib(read / steps)),
        ("a step", f"{statistics.median(ms):.2f} ms, median of {steps}"),
        ("from the slab, of time waited", per_second(while_waiting)),
        ("from the slab, of all time", per_second(read / sum(ms) * 1000)),
        *plain_lines,
        ("from the slab over plain", percent(while_waiting and while_waiting / mean)),
    ]
    found = {"streams": streams, "first_steps": first, "full": full, "ms": ms, "plain": rates}
    return {**of_engine, **found, **dict(zip(names, counted, strict=True))}, lines


def run_plan(work: Found) -> tuple[Found, Lines]:
    """What rocket plan has for a bank in this machine's host memory."""
    from rocket.bench_host import measure, profile_text
    from rocket.booster import parse
    from rocket.fuel_account import load_account
    from rocket.plan import Request, make_plan
    from rocket.plan_time import miss_source

    with tempfile.TemporaryDirectory(prefix="rocket-experts-", dir=work["out"]) as folder:
        profile = profile_text(measure(Path(folder), 64, 0, 0.05), "host", "today")
    booster = parse(profile.encode(), "this machine")
    request = Request(booster, context=CONTEXT, streams=max(STREAMS), slots=work["slots"])
    made = make_plan(load_account(work["fuel"])[1], request)
    source, experts = miss_source(made).text, sum(made.owned)
    of_all, exclusive = experts * made.slot_bytes, (experts - made.slot_count) * made.slot_bytes
    lines = [("an expert without a slot is from", source), ("bank of all, host memory", gib(of_all))]
    found = {"miss_source": source, "yes": of_all, "exclusive": exclusive, "profile": profile}
    return found, [*lines, ("exclusive bank, host memory", gib(exclusive))]


def run_bank(work: Found) -> tuple[Found, Lines]:
    files = [Path(work["fuel"]) / Path(f["file"]).name for f in _core.read_headers(work["fuel"])]
    largest = max(files, key=lambda file: file.stat().st_size)
    for file in files:
        forget(file)
    cached, rates = cached_share(files), [plain(largest, work["seconds"] / 10)]
    seen: list[tuple[float, int, int]] = []
    more = {"expert_slots": work["slots"], "expert_bank": work["bank"]}
    with watched_memory() as watched:
        start = time.perf_counter()
        engine = load(
            work, streams=max(STREAMS), progress=lambda *now: seen.append((time.perf_counter(), *now)), **more
        )
        seconds = time.perf_counter() - start
    with engine:
        of_engine = about(engine)
    rates.append(plain(largest, work["seconds"] / 10))
    info, peak = of_engine["info"], of_engine["memory"]["VmHWM"]
    read = info["expert_bytes"] + info["dense_bytes"]
    asks = max(info["bank_bytes"], info["dense_bytes"]) + ENGINE_RESERVE
    mean, plain_lines = plain_mean(rates)
    stages = phases(seen)
    lines = [
        ("cached before the load", percent(cached)),
        ("load", f"{seconds:.2f} s, {gib(read)}: {per_second(read / seconds)}"),
        *[
            ("  of which", f"{gib(size)} in {took:.2f} s: {per_second(over(size, took))}")
            for size, took in stages
        ],
        *plain_lines,
        ("load over plain", percent(read / seconds / mean)),
        ("bank", gib(info["bank_bytes"]) if info["bank_bytes"] else "NONE"),
        ("RssAnon + RssShmem, the most", gib(watched["own"])),
        ("memory that can be had fell by", gib(watched["fell"])),
        ("engine asks", f"{gib(asks)}: VmHWM {(peak - asks) / GIB:+.3f} GiB"),
    ]
    needs = work["planned"]
    if needs is None:
        lines.append(("plan", "FAILED, see above"))
    else:
        parts = (("VmHWM", peak), ("anon + shmem", watched["own"]), ("fall", watched["fell"]))
        more_than = ", ".join(f"{name} {(value - needs) / GIB:+.3f} GiB" for name, value in parts)
        lines.append(("plan", f"{gib(needs)}: {more_than}"))
    found = {"seconds": seconds, "cached": cached, "phases": stages, "plain": rates, "bytes": read}
    return {**of_engine, **found, **watched, "engine_asks": asks, "planned": needs}, lines


def phases(seen: list[tuple[float, int, int]]) -> list[tuple[int, float]]:
    """Bytes and seconds of a load's phases, dense weights and experts, each with a total of its own: from the
    first report of one, which may come before memory is taken, to the last."""
    out = []
    for _, group in itertools.groupby(seen, key=lambda report: report[2]):
        reports = list(group)
        out.append((reports[-1][1] - reports[0][1], reports[-1][0] - reports[0][0]))
    return out


def run_hits(work: Found) -> tuple[Found, Lines]:
    from rocket.routing import run_cache
    from rocket.routing_file import read_any_routing

    config, fuel = _core.read_config(work["trained"]), work["trained"]
    slots = sum(config["is_moe"]) * config["n_routed_experts"] * work["share"] // 100
    bank = {"expert_bank": "yes"} if work["backend"] == "cuda" else {}  # an exclusive one begins full
    with tempfile.TemporaryDirectory(prefix="rocket-experts-") as folder:
        trace = f"{folder}/routing"
        with load(work, fuel, expert_slots=slots, **bank) as engine:
            core = engine.core
            core.start_trace(trace)
            for text in PROMPTS:
                stream, token = core.open(), 0
                for given in engine.tokenizer.encode(text):
                    token = core.decode(stream, given, GREEDY)
                for _ in range(work["tokens"]):
                    token = core.decode(stream, token, GREEDY)
                core.close(stream)
            rows, stats, of_engine = core.stop_trace(), core.stats(), about(engine)
        routing = read_any_routing(trace, "trace")
        replayed = run_cache(routing.ids, routing.ends, routing.experts, slots=slots, policy="lru")
    lookups, misses = int(replayed.lookups.sum()), int(replayed.misses.sum())
    looked_up = stats["expert_hits"] + stats["expert_misses"]
    if looked_up != lookups:
        raise ValueError(f"the engine looked up {looked_up} experts, and its trace has {lookups}")
    ran, again = stats["expert_hits"] / lookups, replayed.hit_rate
    found = {"slots": slots, "rows": rows, "lookups": lookups, "hit_rate": ran, "replayed_hit_rate": again}
    found |= {"misses": stats["expert_misses"], "replayed_misses": misses}
    return {**of_engine, **found}, [
        ("slots", f"{slots}; {rows:,} tokens, {lookups:,} look-ups"),
        ("hit rate of the engine", f"{100 * ran:.2f} %, {found['misses']:,} misses"),
        ("hit rate of the replay", f"{100 * again:.2f} %, {misses:,} misses"),
        ("difference", f"{100 * (ran - again):+.3f} points"),
    ]


def greedy_round(core: _core.CoreEngine, steps: int) -> tuple[float, list[int]]:
    """Milliseconds a step of a new stream, and its tokens."""
    stream = core.open()
    tokens = [core.decode(stream, 7, GREEDY)]
    begin = time.perf_counter()
    for _ in range(steps):
        tokens.append(core.decode(stream, tokens[-1], GREEDY))
    ms = 1000 * (time.perf_counter() - begin) / steps
    core.close(stream)
    return ms, tokens


def run_all(work: Found) -> tuple[Found, Lines]:
    steps = min(work["steps"], CONTEXT - 1)
    with load(work) as without, load(work, expert_slots=work["experts"]) as cached:
        rounds: list[list[tuple[float, list[int]]]] = []
        before, end = {}, time.perf_counter() + 1.5 * work["seconds"]
        while len(rounds) <= 2 or (len(rounds) <= ROUNDS and time.perf_counter() < end):
            rounds.append([greedy_round(engine.core, steps) for engine in (without, cached)])
            before = before or cached.core.stats()
        misses = cached.core.stats()["expert_misses"] - before["expert_misses"]
        of_engine = about(cached)
    if any(one[1] != rounds[0][0][1] for pair in rounds for one in pair):
        raise ValueError("other tokens with a cache of all experts than without")
    ms = [[pair[i][0] for pair in rounds[1:]] for i in (0, 1)]
    none, all_of_them = map(statistics.median, ms)
    ratio = statistics.median(b / a for a, b in zip(*ms, strict=True))
    return {**of_engine, "steps": steps, "misses": misses, "ms": ms, "ratio": ratio}, [
        ("without a cache", f"{none:.3f} ms a step, median of {len(ms[0])} rounds of {steps}"),
        ("a slot for every expert", f"{all_of_them:.3f} ms a step, {misses} misses"),
        ("cache over none", f"{ratio:.4f}, median of {len(ms[0])} pairs"),
    ]


RUNS = {"write": run_write, "disk": run_disk, "slab": run_slab, "plan": run_plan}
RUNS |= {"bank": run_bank, "hits": run_hits, "all": run_all}


def take_part(work: Found) -> int:
    try:
        found, lines = RUNS[work["run"]](work)
    except (CliError, Error, OSError, ValueError) as error:
        print(f"{work['run']}: error: {error}", file=sys.stderr)
        return 1
    if "memory" in found:  # of an engine
        lines += memory_lines(found["memory"])
    print(json.dumps({"found": found, "lines": lines}))
    return 0


# --- all of them ------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, options: argparse.Namespace, work: Found) -> None:
        self.options, self.work = options, work
        self.found: dict[str, Found] = {}
        self.failed: dict[str, str] = {}

    @staticmethod
    def line(name: str, what: str, value: str) -> None:
        print(f"{name:<16} {what:<34} {value}", flush=True)

    def run(self, kind: str, name: str = "", **more: Any) -> Found | None:
        """A run and its lines. None, and a line that says why, if it failed."""
        name = name or kind
        print(f"{name} …", file=sys.stderr, flush=True)
        result, why = self._start({**self.work, **more, "run": kind})
        if result is None:
            self.failed[name] = why
            self.line(name, "FAILED", why)
        else:
            self.found[name] = result["found"]
            for what, value in result["lines"]:
                self.line(name, what, value)
        self.save()
        return result and result["found"]

    def _start(self, work: Found) -> tuple[Found | None, str]:
        command = [sys.executable, __file__, work["fuel"], "--one", json.dumps(work)]
        how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            done = subprocess.run(command, timeout=self.options.limit, check=False, **how)
        except subprocess.TimeoutExpired:
            return None, f"not done within {self.options.limit:g} s (--limit)"
        print(done.stderr, end="", file=sys.stderr, flush=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["nothing on standard error"]
            return None, f"status {done.returncode}: {last[0]}"
        return json.loads(done.stdout.splitlines()[-1]), ""

    def save(self) -> None:
        from rocket.output import AtomicFile

        result = {key: self.work[key] for key in ("fuel", "trained", "slots", "experts", "backend")}
        result |= {"command": sys.argv, "runs": self.found, "failed": self.failed}
        with AtomicFile(self.options.out / "experts.json", "--out") as file:
            file.write(json.dumps(result).encode() + b"\n")

    def all_parts(self) -> None:
        wanted = self.options.only
        if {"disk", "slab"} & set(wanted):
            self.slab_parts(wanted)
        if "bank" in wanted and self.work["backend"] != "cuda":
            self.line("bank", "SKIP", "only a GPU has a bank of experts")
        elif "bank" in wanted:
            planned = self.run("plan") or {}
            for bank in ("yes", "exclusive"):
                self.run("bank", f"bank {bank}", planned=planned.get(bank), bank=bank)
        if "hits" in wanted:
            for share in (25, 50):
                self.run("hits", f"hits {share} %", share=share)
        if "all" in wanted:
            self.run("all")

    def slab_parts(self, wanted: list[str]) -> None:
        written = self.run("write")
        if written is not None and "disk" in wanted:
            self.run("disk", path=written["path"])
        if written is not None and "slab" in wanted:
            for streams in STREAMS:
                self.run("slab", f"slab {streams} new", streams=streams, path=written["path"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("fuel", help="a name or a directory")
    parser.add_argument("--slab", type=Path, help="folder of its slab, written if it is not there")
    parser.add_argument("--slots", type=int, help="of the cache; by default for half of all experts")
    parser.add_argument("--steps", type=int, default=64, help="that count, at most")
    parser.add_argument("--tokens", type=int, default=64, help="after each prompt of hits")
    parser.add_argument("--seconds", type=float, default=10, help="about, for what is measured in a run")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a run")
    parser.add_argument("--trained", default="sparkler", help="the fuel of hits, a name or a directory")
    parser.add_argument("--backend", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path(), help="directory for experts.json")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a run, in a process of its own
    options = parser.parse_args()
    if not options.one and not options.slab and {"disk", "slab"} & set(options.only):
        parser.error("--slab: expected the folder of the slab, found none; --only leaves disk and slab out")
    return options


def main() -> int:
    options = arguments()
    if options.one:
        return take_part(json.loads(options.one))
    try:
        fuel = resolve(options.fuel).resolve()
        trained = str(resolve(options.trained).resolve()) if "hits" in options.only else ""
        config = _core.read_config(str(fuel))
    except (CliError, Error) as error:
        sys.exit(f"error: {error}")
    experts = sum(config["is_moe"]) * config["n_routed_experts"]
    backend = options.backend
    if backend == "auto":
        backend = "cuda" if _core.cuda_built and _core.cuda_devices()[0] else "cpu"
    options.out.mkdir(parents=True, exist_ok=True)
    work = {"fuel": str(fuel), "trained": trained, "backend": backend, "experts": experts}
    work |= {name: getattr(options, name) for name in ("steps", "tokens", "seconds")}
    work["slots"] = experts // 2 if options.slots is None else options.slots
    work["slab"] = str(options.slab.resolve()) if options.slab else ""
    work["out"] = str(options.out.resolve())
    bench = Bench(options, work)
    bench.all_parts()
    if bench.failed:
        print(f"failed: {', '.join(bench.failed)}", file=sys.stderr)
    return int(bool(bench.failed))


if __name__ == "__main__":
    sys.exit(main())
