"""The engine as a Python object: streams of tokens, steps, logits."""

import atexit
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rocket import boosters as booster_group
from rocket._core import CoreEngine, Row, SamplingParams, read_config
from rocket.expert_options import GIB, MAX_CACHE_GIB, layer_slots
from rocket.failures import input_error, plan_error
from rocket.fuel import eos_ids, resolve
from rocket.tokenizer import Tokenizer

Logits = npt.NDArray[np.float32]

# Engines that are open. They are closed before the interpreter goes, so that a thread which still computes
# comes to its end in Python and is not torn out of the C++ below.
_open_engines: "weakref.WeakSet[Engine]" = weakref.WeakSet()


@atexit.register
def _close_engines() -> None:
    for engine in list(_open_engines):
        engine.close()
    booster_group.leave()


class Stream:
    """One sequence of tokens and its state in the engine. A context manager: it closes the stream."""

    def __init__(self, engine: "Engine", number: int) -> None:
        self.engine = engine
        self.number = number
        self._open = True

    @property
    def _open_number(self) -> int:
        """The stream's number in the engine. Numbers are used again, so a closed stream has none."""
        if not self._open:
            raise input_error("the stream is closed", "open another: engine.open()")
        return self.number

    @property
    def position(self) -> int:
        """Tokens fed so far."""
        return self.engine.core.position(self._open_number)

    def feed(self, ids: Sequence[int], chunk: int = 0) -> None:
        """Feeds tokens, at most ``chunk`` a step (0: as many as a step may have)."""
        self.engine.core.feed(self._open_number, ids, logits="last", chunk=chunk)

    def feed_logits(self, ids: Sequence[int], chunk: int = 0) -> Logits:
        """Feeds tokens and returns the logits after each, ``[len(ids), vocab]``."""
        logits = self.engine.core.feed(self._open_number, ids, logits="all", chunk=chunk)
        assert logits is not None
        return logits

    def sample(self, sampling: SamplingParams) -> int:
        """Draws the next token. The engine's last step must have been this stream's, with logits."""
        return self.engine.core.sample(sampling, self.position, stream=self._open_number)

    def prompt(self, ids: Sequence[int], sampling: SamplingParams, chunk: int = 0) -> int:
        """Feeds tokens and draws the next, with no other thread's step in between."""
        return self.engine.core.prompt(self._open_number, ids, sampling, chunk)

    def decode(self, token: int, sampling: SamplingParams) -> int:
        """Feeds a token and draws the next."""
        return self.engine.core.decode(self._open_number, token, sampling)

    def fork(self) -> "Stream":
        """A new stream with the same past."""
        return Stream(self.engine, self.engine.core.fork(self._open_number))

    def truncate(self, position: int) -> None:
        """Goes back to the first ``position`` tokens."""
        self.engine.core.truncate(self._open_number, position)

    def commit(self, rows: int) -> None:
        """After a step with checkpoints: keeps the first ``rows`` of the stream's rows."""
        self.engine.core.commit(self._open_number, rows)

    def snapshot(self, name: str) -> None:
        """Keeps the present state under a name, for ``Engine.restore`` and ``Engine.save_snapshot``."""
        self.engine.core.snapshot(self._open_number, name)

    def close(self) -> None:
        if self._open:
            self._open = False
            if not self.engine.closed:  # closing the engine closes its streams
                self.engine.core.close(self.number)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Engine:
    """A loaded fuel. A context manager: leaving it frees the memory.

    ``fuel`` is a directory or a name. ``backend`` is auto, cpu or cuda; 0 leaves a number to the engine.
    ``prefill_precision`` and ``kv_dtype`` (of the latent KV) are auto, f32 or bf16; the CPU computes in f32.
    One of ``expert_cache_gib``, ``expert_slots`` and ``slot_map`` (a file, or layer number -> slots) keeps
    routed experts in a cache of that size over the fuel's files, or over the slab in the folder
    ``expert_slab``, or on a GPU over the host's memory, where ``expert_bank`` has all (yes) or those that no
    slot holds (exclusive), or over the slab (no); auto is the first that fits. Without any all are in place
    or resident.
    ``boosters`` above 1 share the routed experts, as the file ``split`` says or by id, and with
    ``split_dense`` the heads, columns and rows of the dense weights: every rank that mpirun has started makes
    the same Engine, all but rank 0 call ``follow()``, rank 0 uses it as if it were alone. A booster that does
    not answer for ``booster_wait`` seconds ends it.
    ``progress`` is called with bytes done and in all while the weights are read. Throws FuelError, PlanError,
    DeviceError.
    """

    def __init__(
        self,
        fuel: str | Path,
        *,
        backend: str = "auto",
        threads: int = 0,
        max_context: int = 0,
        max_rows: int = 0,
        max_streams: int = 0,
        prefill_precision: str = "auto",
        kv_dtype: str = "auto",
        expert_cache_gib: float = 0.0,
        expert_slots: int = 0,
        slot_map: str | Path | Mapping[Any, int] | None = None,
        expert_slab: str | Path | None = None,
        expert_bank: str = "auto",
        boosters: int = 1,
        split: str | Path | None = None,
        split_dense: bool = False,
        booster_wait: float = booster_group.WAIT_SECONDS,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.folder = resolve(str(fuel))
        slots_of_layers: list[int] = []
        if slot_map is not None:
            moe = read_config(str(self.folder))["is_moe"]
            slots_of_layers = layer_slots(slot_map, [layer for layer, routed in enumerate(moe) if routed])
        if not 0 <= expert_cache_gib <= MAX_CACHE_GIB:
            raise input_error(
                f"expert_cache_gib: expected 0 (none) to {MAX_CACHE_GIB}, found {expert_cache_gib}",
                "leave it out to use experts in place",
            )
        shared = booster_group.arguments(self.folder, boosters, split, booster_wait, split_dense)
        self._core: CoreEngine | None = CoreEngine(
            str(self.folder),
            backend=backend,
            threads=threads,
            max_context=max_context,
            max_rows=max_rows,
            max_streams=max_streams,
            prefill_precision=prefill_precision,
            kv_dtype=kv_dtype,
            expert_cache_bytes=math.ceil(expert_cache_gib * GIB),
            expert_slots=expert_slots,
            layer_slots=slots_of_layers,
            expert_slab="" if expert_slab is None else str(expert_slab),
            expert_bank=expert_bank,
            progress=progress,
            **shared,
        )
        _open_engines.add(self)

    @property
    def core(self) -> CoreEngine:
        """The C++ engine below. Throws InputError on a rank that follows another."""
        if self.info["rank"] > 0:
            raise input_error(
                "boosters: expected follow() on a rank above 0, found another call",
                "let rank 0 use the engine, and all other ranks call follow()",
            )
        return self._loaded

    @property
    def _loaded(self) -> CoreEngine:
        if self._core is None:
            raise input_error("the engine is closed", "load the fuel again: Engine(fuel)")
        return self._core

    @property
    def closed(self) -> bool:
        return self._core is None

    @cached_property
    def info(self) -> dict[str, Any]:
        """Shapes, sizes, limits, automatic choices: the fields of EngineInfo (src/runtime/engine.h)."""
        return self._loaded.info()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.folder)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a text."""
        return frozenset(eos_ids(self.folder))

    @property
    def rank(self) -> int:
        """Among several boosters; 0 where there is one."""
        return self.info["rank"]

    def follow(self) -> None:
        """On a rank above 0: does what rank 0's engine does, until that is closed."""
        self._loaded.follow()

    def open(self) -> Stream:
        """A new, empty stream."""
        return Stream(self, self.core.open())

    def restore(self, name: str) -> Stream:
        """A new stream from a named snapshot."""
        return Stream(self, self.core.restore(name))

    def drop_snapshot(self, name: str) -> None:
        self.core.drop_snapshot(name)

    def save_snapshot(self, name: str, file: str | Path) -> None:
        """Writes a named snapshot to a file (safetensors)."""
        self.core.save_snapshot(name, str(file))

    def load_snapshot(self, name: str, file: str | Path) -> None:
        """Reads a snapshot of the same fuel from a file and keeps it under a name."""
        self.core.load_snapshot(name, str(file))

    def hint(self, layer: int, experts: Sequence[int]) -> bool:
        """Experts that a layer (the model's number) may take in its next step, the most likely first.

        Hints change how long a step waits for experts, and no result. A GPU takes them between steps only.
        False: no cache here takes any.
        """
        return self.core.hint(layer, experts)

    def start_trace(self, file: str | Path) -> None:
        """Writes the experts of every row from here on to a routing trace."""
        self.core.start_trace(str(file))

    def stop_trace(self) -> int:
        """Ends the trace; the number of its rows."""
        return self.core.stop_trace()

    def step(self, rows: Sequence[Row]) -> tuple[Logits, list[int]]:
        """Runs a step of any mix of streams. Returns logits of the rows that want them, and their indices."""
        return self.core.step(rows)

    def logits(self, ids: Sequence[int]) -> Logits:
        """Logits after each token of a sequence, ``[len(ids), vocab]``."""
        with self.open() as stream:
            return stream.feed_logits(ids)

    def generate(
        self,
        ids: Sequence[int],
        tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: Collection[int] | None = None,
        chunk: int = 0,
    ) -> Iterator[int]:
        """Yields up to ``tokens`` tokens that follow ``ids``; greedy unless ``temperature`` is above 0.

        A token of ``stop`` ends it and is yielded too; None stands for the fuel's own, () for never.
        """
        prompt = list(ids)
        if not prompt:
            raise input_error(
                "the prompt is empty: expected at least one token", "give at least one token id"
            )
        if tokens < 0:
            raise input_error(f"tokens: expected 0 or more, found {tokens}", "ask for 0 tokens or more")
        room = self.info["max_context"]
        if len(prompt) + max(tokens - 1, 0) > room:
            raise plan_error(
                f"context: the prompt's {len(prompt)} tokens and {tokens} more do not fit into {room}",
                "ask for fewer tokens, or load the engine with a larger max_context",
            )
        sampling = SamplingParams(temperature, top_k, top_p, min_p, seed)
        ends = self.eos_ids if stop is None else frozenset(stop)
        return self._generate(prompt, tokens, sampling, ends, chunk)

    def _generate(
        self, prompt: list[int], tokens: int, sampling: SamplingParams, ends: frozenset[int], chunk: int
    ) -> Iterator[int]:
        with self.open() as stream:
            if not tokens:
                stream.feed(prompt, chunk)
                return
            token = stream.prompt(prompt, sampling, chunk)
            for left in range(tokens, 0, -1):
                yield token
                if token in ends:
                    return
                if left > 1:
                    token = stream.decode(token, sampling)

    def close(self) -> None:
        if self._core is not None:
            self._core.unload()
            self._core = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
