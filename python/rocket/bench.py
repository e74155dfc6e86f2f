"""rocket bench: how fast a fuel decodes on this machine, beside what the memory could do."""

import contextlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from rocket import _core
from rocket.bench_host import host
from rocket.boosters import (
    BOOSTERS_HELP,
    DENSE_HELP,
    SPLIT_HELP,
    WAIT_HELP,
    WAIT_SECONDS,
    Group,
    follow,
    joined,
)
from rocket.console import Notes, write_data
from rocket.engine import Engine, Stream
from rocket.errors import UsageError, one_line
from rocket.expert_options import (
    BANK_HELP,
    BANK_WORDS,
    GIB_HELP,
    MAP_HELP,
    SLAB_HELP,
    SLOTS_HELP,
    ExpertCache,
)
from rocket.fuel import random_fuel, resolve
from rocket.loading import load_engine, own_options
from rocket.options import (
    KV_HELP,
    MAX_CHUNK,
    PRECISIONS,
    PREFILL_HELP,
    check_computing,
    check_integer,
    check_real,
    flag,
    integer,
    number,
    string,
)
from rocket.prompt import context_for
from rocket.report import Experts, alone, boosters_part, format_bytes, format_rate

GREEDY_WARMUP_STEPS = 4
OWN_OPTIONS = {"--prefill-chunk": "--chunk", "--max-context": "--tokens, --streams"}


@dataclass(frozen=True)
class Pair:
    """A read rate and a decode rate, measured one right after the other: shared machines swing."""

    read_gb_s: float | None
    read_error: str | None  # why there is no read rate
    prefill_tok_s: float
    decode_tok_s: float
    step_us: float  # mean over the steps, each a token of every stream

    def fraction(self, token_bytes: int) -> float | None:
        return token_bytes * self.decode_tok_s / (self.read_gb_s * 1e9) if self.read_gb_s else None


def _timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Bench:
    def __init__(self, engine: Engine, prompt: int, tokens: int, streams: int, read_seconds: float) -> None:
        self.engine = engine
        self.tokens = tokens
        self.streams = streams
        self.read_seconds = read_seconds
        ids = np.random.default_rng(0).integers(0, engine.info["vocab"], prompt)
        self.prompt: list[int] = ids.tolist()
        self.greedy = _core.SamplingParams()

    def _prefill(self, stream: Stream) -> None:
        self.first = stream.prompt(self.prompt, self.greedy)

    def _decode(self, stream: Stream, steps: int) -> None:
        with contextlib.ExitStack() as stack:
            streams = [stream, *(stack.enter_context(stream.fork()) for _ in range(self.streams - 1))]
            # Different tokens, so that the streams do not choose the same experts.
            vocabulary = self.engine.info["vocab"]
            tokens = [(self.first + 7919 * i) % vocabulary for i in range(self.streams)]
            self.seconds = _timed(lambda: self._steps(streams, tokens, steps))

    def _steps(self, streams: list[Stream], tokens: list[int], steps: int) -> None:
        if len(streams) == 1:
            token = tokens[0]
            for _ in range(steps):
                token = streams[0].decode(token, self.greedy)
            return
        numbers, sampling = [stream.number for stream in streams], [self.greedy] * len(streams)
        for _ in range(steps):
            tokens = self.engine.core.decode_batch(numbers, tokens, sampling)

    def warm_up(self) -> None:
        with self.engine.open() as stream:
            self._prefill(stream)
            self._decode(stream, min(self.tokens, GREEDY_WARMUP_STEPS))

    def _read_rate(self) -> tuple[float | None, str | None]:
        """Of the memory that the weights lie in, or why there is none: perhaps no room for it beside them."""
        try:
            if self.engine.info["backend"] == "cuda":
                rate = _core.device_read_rate_gb_s(self.read_seconds)
                return rate, "no device to measure was found" if rate is None else None
            return _core.read_rate_gb_s(threads=self.engine.info["threads"], seconds=self.read_seconds), None
        except (_core.Error, MemoryError) as error:
            return None, one_line(str(error)) or type(error).__name__

    def pair(self) -> Pair:
        rate, error = self._read_rate()
        with self.engine.open() as stream:
            prefill = _timed(lambda: self._prefill(stream))
            self._decode(stream, self.tokens)
        return Pair(
            read_gb_s=rate,
            read_error=error,
            prefill_tok_s=len(self.prompt) / prefill,
            decode_tok_s=self.streams * self.tokens / self.seconds,
            step_us=1e6 * self.seconds / self.tokens,
        )


def summarise(pairs: list[Pair], token_bytes: int, streams: int = 1) -> dict[str, Any]:
    """Medians over the pairs. The fraction is the median of the pairs' own, not of the medians."""
    rates = [p.read_gb_s for p in pairs if p.read_gb_s]
    # What a step of several streams reads depends on which experts they share: no rate and no share here.
    fractions = [f for p in pairs if streams == 1 and (f := p.fraction(token_bytes)) is not None]
    fraction = statistics.median(fractions) if fractions else None
    decode = statistics.median(p.decode_tok_s for p in pairs)
    return {
        "prefill_tok_s": statistics.median(p.prefill_tok_s for p in pairs),
        "decode_tok_s": decode,
        "step_us": statistics.median(p.step_us for p in pairs),
        "token_bytes": token_bytes,
        "decode_gb_s": token_bytes * decode / 1e9 if streams == 1 else None,
        "read_gb_s": statistics.median(rates) if rates else None,
        "read_error": next((p.read_error for p in pairs if p.read_error), None),
        # Above 1 the weights fit the cache, and the memory's rate is no limit.
        "fraction_of_read_rate": fraction if fraction is not None and fraction <= 1 else None,
    }


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [
        f"fuel       {result['fuel']}",
        f"device     {result['device']} ({result['backend']})",
        f"prefill    {format_rate(result['prefill_tok_s'])} tok/s, {result['prompt_tokens']} tokens",
        f"decode     {format_rate(result['decode_tok_s'])} tok/s, {result['decode_tokens']} tokens"
        + (f" for each of {result['streams']} streams" if result["streams"] > 1 else ""),
        f"a token    {format_bytes(result['token_bytes'])} of weights"
        + (f", {result['decode_gb_s']:.1f} GB/s" if result["decode_gb_s"] is not None else "")
        + (", on each booster" if len(result["boosters"]) > 1 else ""),
    ]
    if result["experts"] is not None:
        experts = result["experts"]
        speed = f", read at {experts['fetch_gb_s']:.2f} GB/s" if experts["fetch_gb_s"] else ""
        lines.append(
            f"experts    {100 * experts['hit_rate']:.1f} % hit, {format_bytes(experts['streamed_bytes'])} "
            f"streamed in all, "
            f"prefill and decode{speed}"
        )
    if len(result["boosters"]) > 1:
        lines.append(f"exchange   {boosters_part(result['boosters']).removeprefix(' | ')}")
    if result["fraction_of_read_rate"] is not None:
        share = f"{100 * result['fraction_of_read_rate']:.0f} % of this machine's read rate"
        lines.append(
            f"limit      {share}, {result['read_gb_s']:.1f} GB/s (median of {len(result['pairs'])} pairs)"
        )
    elif result["read_gb_s"] is not None and result["streams"] == 1:
        lines.append(
            f"limit      none: the weights fit the cache; memory reads {result['read_gb_s']:.1f} GB/s"
        )
    if result["read_error"] is not None:
        failed = sum(pair["read_error"] is not None for pair in result["pairs"])
        lines.append(
            f"read rate  not measured in {failed} of {len(result['pairs'])} pairs: {result['read_error']}"
        )
    return lines


def _fuel(fuel: str | None, preset: str | None, notes: Notes) -> Path:
    if fuel is not None and preset is not None:
        raise UsageError("expected --fuel or --preset, found both", "give one of them")
    if fuel is not None:
        return resolve(fuel)
    with notes.progress("making a random fuel") as progress:
        return random_fuel(preset or "bench", progress)


def _check_streams(streams: int, rows: int) -> None:
    if streams > rows:
        raise UsageError(
            f"--streams: expected at most {rows}, the rows of a step, found {streams}",
            f"give --chunk {streams} as well, or fewer streams",
        )


def _measure(bench: Bench, pairs: int) -> dict[str, Any]:
    core, info = bench.engine.core, bench.engine.info
    bench.warm_up()
    before = Experts.from_stats(core.stats())
    measured = [bench.pair() for _ in range(pairs)]
    stats = core.stats()
    used = Experts.from_stats(stats) - before
    return {
        "backend": info["backend"],
        "device": info["device"],
        "prompt_tokens": len(bench.prompt),
        "decode_tokens": bench.tokens,
        "streams": bench.streams,
        **summarise(measured, info["token_bytes"], bench.streams),
        "experts": {**used.as_json(), "slots": info["slots"], "slot_bytes": info["slot_bytes"]}
        if info["expert_store"]
        else None,
        "boosters": stats["boosters"] or [alone(info)],
        "pairs": [vars(pair) for pair in measured],
    }


def decode(
    context: typer.Context,
    fuel: Annotated[str | None, string("NAME|DIR", "The model: a name or a directory.")] = None,
    preset: Annotated[
        str | None, string("NAME", "A random fuel, made once: tiny, bench (default), …")
    ] = None,
    prompt: Annotated[int, integer("Tokens to prefill.")] = 256,
    tokens: Annotated[int, integer("Tokens to decode.")] = 64,
    pairs: Annotated[int, integer("Times that both rates are measured.")] = 5,
    read_seconds: Annotated[float, number("Seconds for each measurement of the read rate.")] = 0.5,
    streams: Annotated[int, integer("Streams that decode together, a row each in a step.")] = 1,
    backend: Annotated[str, string("auto|cpu|cuda", "What computes.")] = "auto",
    prefill_precision: Annotated[str, string(PRECISIONS, PREFILL_HELP)] = "auto",
    kv_dtype: Annotated[str, string(PRECISIONS, KV_HELP)] = "auto",
    chunk: Annotated[int, integer("Feed the prompt N tokens at a time; 0 is automatic.")] = 0,
    threads: Annotated[int, integer("CPU threads; 0 is all that may be used.")] = 0,
    expert_cache_gib: Annotated[float | None, number(GIB_HELP)] = None,
    expert_slots: Annotated[int | None, integer(SLOTS_HELP)] = None,
    slot_map: Annotated[str | None, string("FILE", MAP_HELP)] = None,
    expert_slab: Annotated[str | None, string("DIR", SLAB_HELP)] = None,
    expert_bank: Annotated[str, string(BANK_WORDS, BANK_HELP)] = "auto",
    boosters: Annotated[int | None, integer(BOOSTERS_HELP)] = None,
    split: Annotated[str | None, string("FILE", SPLIT_HELP)] = None,
    split_dense: Annotated[bool, flag("--split-dense", DENSE_HELP)] = False,
    booster_wait: Annotated[float, number(WAIT_HELP, "N")] = WAIT_SECONDS,
    as_json: Annotated[bool, flag("--json", "Print one JSON object.")] = False,
    quiet: Annotated[bool, flag("--quiet", "Nothing on standard error but errors.")] = False,
) -> int:
    """Tokens a second, and the share of this machine's streaming read rate that decoding reaches.

    The read rate and the decoding are measured in turn, and the share is the median over these pairs.
    """
    check_computing(backend, prefill_precision, kv_dtype)
    check_integer("--threads", threads, 0)
    experts = ExpertCache(expert_cache_gib, expert_slots, slot_map, expert_slab, expert_bank)
    experts.check()
    for option, value in (("--prompt", prompt), ("--tokens", tokens), ("--pairs", pairs)):
        check_integer(option, value, 1)
    check_integer("--streams", streams, 1, MAX_CHUNK)
    check_integer("--chunk", chunk, 0, MAX_CHUNK)
    check_real("--read-seconds", read_seconds, 0.01, 60)
    group = Group.of(boosters, split, split_dense, booster_wait)
    if group.count > 1 and fuel is None:
        raise UsageError(
            "--fuel: expected a fuel for several boosters, found none", "make one: scripts/make_fuel.py"
        )
    arguments = {
        "backend": backend,
        "prefill_precision": prefill_precision,
        "kv_dtype": kv_dtype,
        "max_context": prompt + tokens,
        "max_rows": chunk,
        "max_streams": streams,
        **group.arguments(threads),
        **experts.arguments(),
    }
    with joined(group.count, group.wait, context) as rank, own_options(OWN_OPTIONS):
        if rank and fuel is not None:
            return follow(fuel, arguments)
        notes = Notes(quiet)
        folder = _fuel(fuel, preset, notes)
        context_for(prompt, tokens, None, _core.read_config(str(folder)))
        with load_engine(folder, notes, **arguments) as engine:
            notes.choices(engine.info["choices"])
            _check_streams(streams, engine.info["max_rows"])
            result = {"fuel": str(folder)} | _measure(
                Bench(engine, prompt, tokens, streams, read_seconds), pairs
            )
    text = json.dumps(result, ensure_ascii=False) if as_json else "\n".join(_lines(result))
    write_data(text + "\n")
    return 0


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measure speed.")
    bench.command("decode")(decode)
    bench.command("host")(host)
    app.add_typer(bench, name="bench")
