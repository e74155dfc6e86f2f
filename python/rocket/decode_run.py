"""One run of rocket-decode, after its options are known to be sound."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rocket import _core
from rocket.boosters import Group
from rocket.chat import ChatTemplate, ends_inside_thinking
from rocket.console import Notes, write_data
from rocket.engine import Engine, Stream
from rocket.errors import EXIT_INTERRUPTED, CliError, UsageError
from rocket.expert_options import ExpertCache, check_trace_place
from rocket.failures import fuel_error, plan_error
from rocket.fuel import DEFAULT_FUEL, eos_ids, resolve, sampling_of
from rocket.loading import load_engine
from rocket.options import check_output_place
from rocket.output import LogitsWriter
from rocket.prompt import Prompt, check_ids, check_text, context_for
from rocket.report import (
    Experts,
    Stage,
    Timing,
    alone,
    boosters_part,
    closing_line,
    diagnostics_table,
    finite,
    mean_entropy,
    profile_table,
)
from rocket.slot_stats import Windows
from rocket.tokenizer import Tokenizer

# Short and small: it is measured at the end of every run that reports it, beside a loaded model.
READ_RATE_SECONDS = 0.3
READ_RATE_BYTES = 256 << 20


@dataclass(frozen=True)
class DecodeOptions:
    """The options of rocket-decode, checked. None stands for "not given"."""

    prompt: Prompt = field(default_factory=Prompt)
    fuel: str | None = None
    chat: bool = False
    tokens: int = 128
    sampling: str = "greedy"
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    ignore_eos: bool = False
    backend: str = "auto"
    prefill_precision: str = "auto"
    kv_dtype: str = "auto"
    threads: int = 0
    max_context: int | None = None
    prefill_chunk: int = 0
    experts: ExpertCache = field(default_factory=ExpertCache)
    boosters: Group = field(default_factory=Group)
    stats: float | None = None
    trace_out: str | None = None
    json: bool = False
    profile: bool = False
    diagnostics: bool = False
    quiet: bool = False

    def engine_arguments(self) -> dict[str, Any]:
        """Of Engine, on every booster."""
        return {
            "backend": self.backend,
            "prefill_precision": self.prefill_precision,
            "kv_dtype": self.kv_dtype,
            "max_rows": self.prefill_chunk,
            **self.boosters.arguments(self.threads),
            **self.experts.arguments(),
        }


@dataclass
class Run:
    """What a run has produced so far."""

    ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: str = "length"
    interrupted: bool = False
    timing: Timing = field(default_factory=Timing)
    experts: Experts = field(default_factory=Experts)  # of the whole run
    decode_experts: Experts = field(default_factory=Experts)
    profiles: dict[str, list[Stage]] = field(default_factory=dict)
    layers: list[tuple[float, float]] = field(default_factory=list)
    boosters: list[dict[str, Any]] = field(default_factory=list)  # of several


class Decoder:
    """Prompt in, text out."""

    def __init__(self, options: DecodeOptions, logits: LogitsWriter | None) -> None:
        self.options = options
        self.logits = logits
        self.notes = Notes(options.quiet)
        self.choices: list[str] = []  # said once the fuel is loaded: an error stands alone
        self.folder = self._fuel()
        self.config = _core.read_config(str(self.folder))
        self.tokenizer = self._tokenizer()
        self.opening = ""  # what the chat template opens the answer with
        self.ids = self._prompt_ids()
        check_ids(self.ids, self.config["vocab_size"])
        self.context = context_for(len(self.ids), options.tokens, options.max_context, self.config)
        if options.max_context is None:
            self.choices.append(f"context: {self.context} tokens, the prompt's and --tokens (--max-context)")
        self.sampling = self._sampling()
        self.ends = frozenset() if options.ignore_eos else frozenset(eos_ids(self.folder))
        self.run = Run()
        self._stream_text = self.tokenizer.stream() if self.tokenizer else None

    def _fuel(self) -> Path:
        if self.options.fuel is None:
            self.choices.append(f"fuel: {DEFAULT_FUEL}, the one that ships (--fuel)")
        return resolve(DEFAULT_FUEL if self.options.fuel is None else self.options.fuel)

    def _tokenizer(self) -> Tokenizer | None:
        if self.options.prompt.ids is not None and not (self.folder / "tokenizer.json").exists():
            self.choices.append("text: the fuel has no tokenizer.json; token ids are printed instead")
            return None
        return Tokenizer(self.folder)

    def _prompt_ids(self) -> list[int]:
        prompt = self.options.prompt
        if prompt.ids is not None:
            return prompt.ids
        assert prompt.text is not None
        assert self.tokenizer is not None
        check_text(prompt.text, "prompt", self.config["max_position_embeddings"])
        if self.options.chat:
            template = ChatTemplate(self.folder)
            messages = [{"role": "user", "content": prompt.text}]
            self.opening = template.generation_prompt(messages)
            ids = self.tokenizer.encode(template.render(messages), add_special_tokens=False)
            if not ids:
                raise fuel_error(
                    f"{template.file}: expected a chat template that writes a prompt, found no tokens",
                    "correct the template, or give a plain prompt without --chat",
                )
            return ids
        ids = self.tokenizer.encode(prompt.text)
        if not ids:
            raise UsageError("the prompt is empty: it has no tokens", "give a longer prompt")
        return ids

    def _sampling(self) -> _core.SamplingParams:
        o = self.options
        temperature, top_k, top_p, min_p = 0.0, 0, 1.0, 0.0
        if o.sampling == "fuel":
            found = sampling_of(self.folder)
            temperature, top_k, top_p, min_p = found.temperature, found.top_k, found.top_p, found.min_p
        elif o.temperature is None and not (o.top_k is None and o.top_p is None and o.min_p is None):
            temperature = 1.0
            self.choices.append("sampling: temperature 1, since --top-k, --top-p or --min-p is given")
        temperature = o.temperature if o.temperature is not None else temperature
        top_k = o.top_k if o.top_k is not None else top_k
        top_p = o.top_p if o.top_p is not None else top_p
        min_p = o.min_p if o.min_p is not None else min_p
        if o.sampling == "fuel":
            self.choices.append(
                f"sampling: temperature {temperature:g}, top-k {top_k}, top-p {top_p:g}, min-p {min_p:g} "
                "(generation_config.json)"
            )
        return _core.SamplingParams(temperature, top_k, top_p, min_p, o.seed)

    def execute(self) -> int:
        o = self.options
        start = time.perf_counter()
        engine = load_engine(
            self.folder,
            self.notes,
            max_context=self.context,
            max_streams=1,
            **o.engine_arguments(),
        )
        with engine, self._naming_trace():
            self.run.timing.load_s = time.perf_counter() - start
            self._check_delivered(engine.info["max_context"])
            if o.trace_out is not None:
                engine.start_trace(o.trace_out)
            self.notes.choices(self.choices + engine.info["choices"])
            if o.diagnostics:
                engine.core.set_diagnostics(True)
            self.windows = Windows(engine, o.stats, self.notes)
            try:
                self._generate(engine)
            except KeyboardInterrupt:
                self.run.interrupted = True
                self.run.finish = "interrupted"
            engine.stop_trace()
            self.windows.close()
            self._finish(engine)
        return EXIT_INTERRUPTED if self.run.interrupted else 0

    @contextlib.contextmanager
    def _naming_trace(self) -> Iterator[None]:
        try:
            yield
        except _core.DeviceError as error:
            name = f"trace {self.options.trace_out}: "
            if self.options.trace_out is None or not str(error).startswith(name):
                raise
            raise CliError(f"--trace-out {str(error).removeprefix('trace ')}", error.hint) from error

    def _check_delivered(self, context: int) -> None:
        if context < self.context:
            raise plan_error(
                f"context: {self.context} tokens are needed, and the engine has room for {context}",
                f"shorten the prompt and --tokens to {context} together",
            )

    def _generate(self, engine: Engine) -> None:
        run, core = self.run, engine.core
        with engine.open() as stream:
            start = Experts.from_stats(core.stats())
            try:
                token = self._prefill(engine, stream)
                after_prompt = Experts.from_stats(core.stats())
                try:
                    if self.options.tokens:
                        self._decode(engine, stream, token)
                finally:
                    run.decode_experts = Experts.from_stats(core.stats()) - after_prompt
            finally:
                stats = core.stats()
                run.experts = Experts.from_stats(stats) - start
                run.boosters = stats.get("boosters", [])
            if self.options.diagnostics:
                run.layers = core.diagnostics()

    def _prefill(self, engine: Engine, stream: Stream) -> int:
        timing, core = self.run.timing, engine.core
        chunk = self.options.prefill_chunk or engine.info["max_rows"]
        if self.options.profile:
            core.set_profile(True)
        start = time.perf_counter()
        if self.logits is not None:
            rows = min(chunk, engine.info["max_logits_rows"])
            for i in range(0, len(self.ids), rows):
                self.logits.append(stream.feed_logits(self.ids[i : i + rows], rows))
                self.windows.tick()
        elif self.windows.on:
            for i in range(0, len(self.ids), chunk):
                stream.feed(self.ids[i : i + chunk], chunk)
                self.windows.tick()
        else:
            stream.feed(self.ids, chunk)
        token = stream.sample(self.sampling) if self.options.tokens else -1
        timing.prefill_s = time.perf_counter() - start
        timing.prefill_tokens = len(self.ids)
        if self.options.profile:
            self.run.profiles["prefill"] = core.profile()
            core.set_profile(True)
        return token

    def _decode(self, engine: Engine, stream: Stream, token: int) -> None:
        timing, left = self.run.timing, self.options.tokens
        start = time.perf_counter()
        try:
            while True:
                self._emit(token)
                left -= 1
                if token in self.ends:
                    self.run.finish = "stop"
                    break
                if not left:
                    break
                before = time.perf_counter()
                token = stream.decode(token, self.sampling)
                timing.steps_s.append(time.perf_counter() - before)
                self.windows.tick()
                if self.logits is not None:
                    self.logits.append(engine.core.last_logits())
        finally:
            timing.decode_s = time.perf_counter() - start if timing.steps_s else 0.0
            if self.options.profile and timing.steps_s:
                self.run.profiles["decode"] = engine.core.profile()

    def _emit(self, token: int) -> None:
        self.run.ids.append(token)
        if self._stream_text is None:
            piece = str(token) if len(self.run.ids) == 1 else f",{token}"
        else:
            piece = self._stream_text.push(token)
        self._print(piece)

    def _print(self, piece: str) -> None:
        if piece:
            self.run.pieces.append(piece)
            if not self.options.json:
                write_data(piece)

    def _finish(self, engine: Engine) -> None:
        run, o = self.run, self.options
        if self._stream_text is not None:
            self._print(self._stream_text.finish())
        if not o.json and run.pieces and not run.pieces[-1].endswith("\n"):
            write_data("\n")
        limit = self._read_limit(engine)
        if o.json:
            write_data(json.dumps(self._as_json(engine, limit), ensure_ascii=False, allow_nan=False) + "\n")
        if o.profile:
            self._say_profile()
        if run.layers:
            self.notes.always(diagnostics_table(run.layers, engine.info["topk"]))
        if self._cut_in_thinking():
            more = "; --tokens allows more" if run.finish == "length" else ""
            self.notes.say(f"the answer was cut inside <think>, after {len(run.ids)} tokens{more}")
        bounded = bool(engine.info["expert_store"])
        fraction = self._fraction(engine, limit)
        line = closing_line(len(run.ids), run.timing, run.decode_experts, fraction, bounded)
        self.notes.say(line + boosters_part(run.boosters))

    def _cut_in_thinking(self) -> bool:
        if self.tokenizer is None or not self.run.ids or self.run.interrupted:
            return False
        return ends_inside_thinking(self.opening + self.tokenizer.decode(self.run.ids, skip_special=False))

    def _say_profile(self) -> None:
        run = self.run
        titles = {
            "prefill": (f"prefill, {run.timing.prefill_tokens} tok", 1),
            "decode": (f"decode, a step of {len(run.timing.steps_s)}", len(run.timing.steps_s)),
        }
        for phase, stages in run.profiles.items():
            title, steps = titles[phase]
            self.notes.always(profile_table(title, stages, steps) + "\n")

    def _read_limit(self, engine: Engine) -> float | None:
        """GB/s at which the memory of the weights is read, measured only where it is reported."""
        if self.options.quiet and not self.options.json:
            return None
        if self.run.interrupted or not self.run.timing.steps_s:
            return None
        if engine.info["backend"] == "cuda":
            with contextlib.suppress(_core.Error):
                return _core.device_read_rate_gb_s(READ_RATE_SECONDS)
            return None
        size = min(READ_RATE_BYTES, _core.memory_available()[0] // 4)
        if size < READ_RATE_BYTES // 8:  # would fit in caches
            return None
        try:
            return _core.read_rate_gb_s(size, engine.info["threads"], READ_RATE_SECONDS)
        except (_core.Error, MemoryError):  # the run itself is done: a figure beside it must not fail it
            return None

    def _fraction(self, engine: Engine, limit: float | None) -> float | None:
        """None also above 1: the weights fit the cache, and the memory's rate is no limit."""
        rate = self.run.timing.decode_tok_s
        share = engine.info["token_bytes"] * rate / (limit * 1e9) if limit and rate else None
        return share if share is not None and share <= 1 else None

    def _as_json(self, engine: Engine, limit: float | None) -> dict[str, Any]:
        run, info = self.run, engine.info
        result: dict[str, Any] = {
            "fuel": str(self.folder),
            "backend": info["backend"],
            "device": info["device"],
            "prompt_ids": self.ids,
            "token_ids": run.ids,
            "text": "".join(run.pieces) if self.tokenizer else None,
            "finish_reason": run.finish,
            "timing": run.timing.as_json(),
            "bytes": {
                "per_token": info["token_bytes"],
                "read_limit_gb_s": limit,
                "fraction_of_limit": self._fraction(engine, limit),
            },
            "experts": {
                **run.experts.as_json(),  # of prompt and decoding together
                "prefill": (run.experts - run.decode_experts).counts(),
                "decode": run.decode_experts.counts(),  # as the closing line has them
                "slots": info["slots"],
                "slot_bytes": info["slot_bytes"],
                "store": info["expert_store"] or None,
                "bank_bytes": info["bank_bytes"],
                "requested": {"slots": info["slots_requested"], "bytes": info["cache_bytes_requested"]}
                if info["slots_requested"]
                else None,
            },
            "boosters": run.boosters or [alone(info)],
            "seed": self.options.seed,
        }
        if self.options.profile:
            result["profile"] = {
                phase: [{"stage": name, "ms": ms, "of_which": part} for name, ms, part in stages]
                for phase, stages in run.profiles.items()
            }
        if run.layers:
            result["diagnostics"] = {
                "stream_mean_rms": [finite(rms) for rms, _ in run.layers],
                "router_entropy": [finite(entropy) if entropy >= 0 else None for _, entropy in run.layers],
                "mean_router_entropy": finite(mean_entropy(run.layers)),
            }
        return result


def decode(
    options: DecodeOptions, logits_out: str | None, inputs: Mapping[str, str | int | None] | None = None
) -> int:
    """Runs, and writes the logits' file whole or not at all. ``inputs`` are files that must outlive it."""
    with contextlib.ExitStack() as stack:
        fuel = resolve(options.fuel or DEFAULT_FUEL) if logits_out or options.trace_out else None
        if logits_out is not None:
            check_output_place("--logits-out", logits_out, fuel, inputs or {})
        if options.trace_out is not None:
            assert fuel is not None
            check_trace_place(options.trace_out, fuel, {**(inputs or {}), "--logits-out": logits_out})
        logits = stack.enter_context(LogitsWriter(logits_out, "--logits-out")) if logits_out else None
        return Decoder(options, logits).execute()
