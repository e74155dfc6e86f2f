"""rocket score: how likely a text is to a fuel, token by token, and how much two runs differ."""

import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import typer

from rocket import _core
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
from rocket.checked import shown
from rocket.console import Notes, write_data
from rocket.engine import Engine
from rocket.errors import CliError, UsageError
from rocket.expert_options import (
    BANK_HELP,
    BANK_WORDS,
    GIB_HELP,
    MAP_HELP,
    SLAB_HELP,
    SLOTS_HELP,
    ExpertCache,
)
from rocket.fuel import resolve
from rocket.loading import load_engine, own_options
from rocket.options import (
    KV_HELP,
    PRECISIONS,
    PREFILL_HELP,
    check_computing,
    check_integer,
    check_output_name,
    check_output_place,
    flag,
    integer,
    number,
    string,
)
from rocket.output import AtomicFile
from rocket.score_file import Comparison, ScoreWriter
from rocket.score_reader import ScoreReader
from rocket.score_run import Scorer, windows
from rocket.text_ids import TextIds, ids_of_file, ids_of_text
from rocket.tokenizer import Tokenizer


@dataclass(frozen=True)
class ScoreOptions:
    """The options of rocket score, checked."""

    fuel: str
    text: str | None
    ids: str | None
    against: str | None
    out: str | None
    json: bool
    max_context: int | None
    chunk: int
    backend: str
    prefill_precision: str
    kv_dtype: str
    threads: int
    experts: ExpertCache
    boosters: Group
    quiet: bool

    def engine_arguments(self) -> dict[str, Any]:
        """Of Engine, on every booster."""
        return {
            "backend": self.backend,
            "prefill_precision": self.prefill_precision,
            "kv_dtype": self.kv_dtype,
            "max_context": self.max_context or 0,
            "max_rows": self.chunk,
            "max_streams": 1,
            **self.boosters.arguments(self.threads),
            **self.experts.arguments(),
        }


@contextlib.contextmanager
def _output(out: str | None, as_json: bool) -> Iterator[BinaryIO | None]:
    """Where the rows go: a file that appears when whole, or standard output, again only when whole."""
    if out is not None:
        with AtomicFile(out, "--out") as target:
            yield target.file
    elif as_json:
        with tempfile.TemporaryFile() as spool:
            yield spool
            spool.seek(0)
            while data := spool.read(1 << 20):
                write_data(data)
    else:
        yield None


def _load_text(folder: Path, o: ScoreOptions) -> TextIds:
    if o.text is not None and o.ids is None:
        return ids_of_text(o.text, Tokenizer(folder))
    if o.ids is not None and o.text is None:
        return ids_of_file(o.ids)
    found = "both" if o.text is not None else "neither"
    raise UsageError(f"expected --text FILE or --ids FILE, found {found}", "give one of them")


def _check_text(text: TextIds, config: dict[str, Any], asked: int | None) -> None:
    vocab, limit = config["vocab_size"], config["max_position_embeddings"]
    if len(text.ids) + len(text.opening) < 2:
        raise CliError("expected at least 2 tokens, found 1: nothing stands before it", "give a longer text")
    outside = np.flatnonzero((text.ids < 0) | (text.ids >= vocab))
    if outside.size:
        place = int(outside[0])
        raise CliError(
            f"token id {text.ids[place]} at place {place + 1}: the fuel's vocabulary is 0 to {vocab - 1}",
            "check the ids, or give the text with --text",
        )
    low = len(text.opening) + 2
    if asked is not None and not low <= asked <= limit:
        raise CliError(
            f"--max-context: expected {low} to {limit}, found {asked}", f"use --max-context {limit}"
        )


def _compare_heads(ours: dict[str, Any], other: ScoreReader, notes: Notes) -> None:
    theirs, where = other.head, f"--against {other.path}"
    if (theirs.tokens, theirs.sha256) != (ours["tokens"], ours["sha256"]):
        raise CliError(
            f"{where}: expected a run over the same {ours['tokens']} tokens, "
            f"found {theirs.tokens} tokens that differ",
            "score the same text with both fuels; they must have the same tokenizer",
        )
    cut = sum(1 for _ in windows(theirs.tokens, len(theirs.opening), theirs.max_context))
    if theirs.windows != cut:
        raise CliError(
            f"{where}: windows: expected {cut}, as its tokens and max_context give, found {theirs.windows}",
            "write it again with: rocket score FUEL --text FILE --out FILE",
        )
    if theirs.opening != ours["opening"]:
        notes.say(
            f"note: other tokens stand before the text: {shown(ours['opening'])} here, "
            f"{shown(theirs.opening)} there"
        )
    if theirs.max_context != ours["max_context"]:
        notes.say(
            f"note: the runs cut the text differently: max_context {ours['max_context']} here, "
            f"{theirs.max_context} there"
        )


def _summary_lines(summary: dict[str, Any]) -> list[str]:
    def show(key: str, digits: int) -> str:
        return "-" if summary[key] is None else f"{summary[key]:.{digits}f}"

    windows, room = summary["windows"], summary["max_context"]
    how = "one window" if windows == 1 else f"{windows} windows of {room} tokens that overlap by half"
    lines = [
        f"tokens              {summary['tokens']}, {summary['scored']} scored in {how}",
        f"mean log p          {show('mean_log_prob', 6)} nats",
        f"perplexity          {show('perplexity', 4)}",
    ]
    if summary["bits_per_byte"] is not None:
        lines.append(f"bits a byte         {show('bits_per_byte', 6)}")
    if summary["not_finite"]:
        lines.append(f"not finite          {summary['not_finite']} tokens")
    lines.append(f"top-1               {100 * summary['top1']:.2f} %")
    lines.append(f"time                {summary['seconds']:.1f} s")
    return lines


def _score(
    scorer: Scorer, head: dict[str, Any], file: BinaryIO | None, place_of_rows: str, other: ScoreReader | None
) -> tuple[dict[str, Any], Comparison | None]:
    """Runs; the rows go to the file as they come."""
    writer = ScoreWriter(file, head, place_of_rows) if file else None
    comparison = Comparison() if other else None
    theirs = other.rows(map(int, scorer.text.ids)) if other else iter(())
    start = time.perf_counter()
    for rows in scorer.blocks():
        if writer:
            writer.write(rows)
        if comparison:
            for row in rows:
                comparison.add(row, next(theirs))
    next(theirs, None)  # none is left, but what stands behind them is checked
    summary = {
        "tokens": head["tokens"],
        "max_context": head["max_context"],
        "windows": head["windows"],
        **scorer.summary(),
        "seconds": time.perf_counter() - start,
    }
    if comparison and other:
        summary["comparison"] = comparison.as_json(other.path)
    if writer:
        writer.finish(summary)
    return summary, comparison


def _head(engine: Engine, folder: Path, source: TextIds, scorer: Scorer) -> dict[str, Any]:
    return {
        "fuel": str(folder),
        "backend": engine.info["backend"],
        "device": engine.info["device"],
        "tokens": len(source.ids),
        "opening": source.opening,
        "sha256": hashlib.sha256(source.ids.astype("<i4").tobytes()).hexdigest(),
        "max_context": scorer.room,
        "windows": len(scorer.plan),
    }


def run(o: ScoreOptions) -> int:
    notes = Notes(o.quiet)
    folder = resolve(o.fuel)
    if o.out is not None:
        inputs = {
            "--text": o.text,
            "--ids": o.ids,
            "--against": o.against,
            "--slot-map": o.experts.slot_map,
            "--expert-slab": o.experts.slab_file,
            "--split": o.boosters.split,
        }
        check_output_place("--out", o.out, folder, inputs)
    config = _core.read_config(str(folder))
    source = _load_text(folder, o)
    _check_text(source, config, o.max_context)
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(contextlib.closing(ScoreReader(o.against))) if o.against else None
        file = stack.enter_context(_output(o.out, o.json))
        engine = load_engine(folder, notes, **o.engine_arguments())
        stack.enter_context(engine)
        notes.choices(engine.info["choices"])
        scorer = Scorer(engine, source, o.chunk, notes, strict=other is None)
        head = _head(engine, folder, source, scorer)
        if other:
            _compare_heads(head, other, notes)
        where = f"--out {o.out}" if o.out else f"a temporary file in {tempfile.gettempdir()}"
        summary, comparison = _score(scorer, head, file, where, other)
    if not o.json:
        lines = _summary_lines(summary)
        if comparison and o.against:
            lines += comparison.lines(o.against)
        write_data("\n".join(lines) + "\n")
    elif o.out is not None:
        write_data(json.dumps({**head, "summary": summary}, ensure_ascii=False, allow_nan=False) + "\n")
    return 0 if comparison is None or comparison.passes else 1


def score(
    context: typer.Context,
    fuel: Annotated[str, typer.Argument(metavar="FUEL", help="The model: a name or a directory.")],
    text: Annotated[str | None, string("FILE", "A UTF-8 text.")] = None,
    ids: Annotated[str | None, string("FILE", "Token ids in a text file.")] = None,
    against: Annotated[
        str | None,
        string("FILE", "Compare with another run's --out; status 1 if it fails."),
    ] = None,
    out: Annotated[str | None, string("FILE", "Write all rows to a file, as JSON.")] = None,
    as_json: Annotated[bool, flag("--json", "Print JSON: all rows, or with --out the summary.")] = False,
    max_context: Annotated[int | None, integer("Longer texts are scored in windows of N tokens.")] = None,
    chunk: Annotated[int, integer("Feed N tokens at a time; 0 is automatic.")] = 0,
    backend: Annotated[str, string("auto|cpu|cuda", "What computes.")] = "auto",
    prefill_precision: Annotated[str, string(PRECISIONS, PREFILL_HELP)] = "auto",
    kv_dtype: Annotated[str, string(PRECISIONS, KV_HELP)] = "auto",
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
    quiet: Annotated[bool, flag("--quiet", "Nothing on standard error but errors.")] = False,
) -> int:
    """Log-probability and rank of each token of a text, their mean, perplexity and bits a byte.

    A text longer than the context is scored in windows. The first scores what fits; each later one is fed
    half of that again, the tokens just before its own, without scoring them, and scores what then fits.
    With --against, status 1 means that the runs differ by more than the gate allows.
    """
    check_computing(backend, prefill_precision, kv_dtype)
    experts = ExpertCache(expert_cache_gib, expert_slots, slot_map, expert_slab, expert_bank)
    experts.check()
    check_integer("--threads", threads, 0)
    if out is not None:
        check_output_name("--out", out)
    check_integer("--chunk", chunk, 0, 65536)
    if max_context is not None:
        check_integer("--max-context", max_context, 2)
    options = ScoreOptions(
        fuel=fuel,
        text=text,
        ids=ids,
        against=against,
        out=out,
        json=as_json,
        max_context=max_context,
        chunk=chunk,
        backend=backend,
        prefill_precision=prefill_precision,
        kv_dtype=kv_dtype,
        threads=threads,
        experts=experts,
        boosters=Group.of(boosters, split, split_dense, booster_wait),
        quiet=quiet,
    )
    renamed = {"--prefill-chunk": "--chunk"}
    with joined(options.boosters.count, booster_wait, context) as rank, own_options(renamed):
        return follow(fuel, options.engine_arguments()) if rank else run(options)


def register(app: typer.Typer) -> None:
    app.command()(score)
