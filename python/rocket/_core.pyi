"""The C++ engine, bound with pybind11. Everything here is thin: no weight and no hidden state passes through
Python."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__version__: str
cuda_built: bool

class Error(Exception):
    """Base of all typed errors. ``str(e)`` is one line; ``e.hint`` says what to do (may be empty)."""

    hint: str

class FuelError(Error): ...
class PlanError(Error): ...
class InputError(Error): ...
class DeviceError(Error): ...

class Row:
    """One row of a step. ``embedding`` (float32 ``[H]``) stands in for ``token``."""

    def __init__(
        self,
        token: int = -1,
        stream: int = 0,
        *,
        position: int = -1,
        wants_logits: bool = False,
        checkpoint: bool = False,
        prefill: bool = False,
        embedding: npt.NDArray[np.float32] | None = None,
    ) -> None: ...

class SamplingParams:
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    def __init__(
        self, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 0
    ) -> None: ...

class Fabric:
    """What joins the boosters of a run (src/fabric/fabric.h)."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def library(self) -> str: ...
    @property
    def failed(self) -> bool: ...
    @property
    def rank0_knows(self) -> bool: ...
    def gather(self, mine: bytes, what: str) -> list[bytes]:
        """At rank 0 a message of each rank, elsewhere nothing. ``what`` is what rank 0 waits for."""
    def tell(self, message: bytes) -> None:
        """From rank 0 to all others, who hear it."""
    def hear(self, what: str) -> bytes: ...
    def fail(self, message: str, hint: str) -> None:
        """Ends the run of all ranks; never raises."""

    def leave(self) -> None:
        """The end: nothing can be called after it but abort."""

    def abort(self, status: int) -> None:
        """Ends the processes of all ranks, this one with them."""

def mpi_fabric(limit_seconds: float) -> Fabric:
    """The ranks that an MPI launcher started; the same object in every call. Starts MPI."""

class CoreEngine:
    def __init__(
        self,
        fuel_dir: str,
        *,
        backend: str = "auto",
        threads: int = 0,
        max_context: int = 0,
        max_rows: int = 0,
        max_streams: int = 0,
        prefill_precision: str = "auto",
        kv_dtype: str = "auto",
        expert_cache_bytes: int = 0,
        expert_slots: int = 0,
        layer_slots: Sequence[int] = (),
        expert_slab: str = "",
        expert_bank: str = "auto",
        fabric: Fabric | None = None,
        owners: Sequence[Sequence[int]] = (),
        split_dense: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Loads a fuel. ``progress(done, total)`` gets bytes; an exception in it stops the load.

        At most one of the next three asks for a bounded cache of routed experts: its bytes, its slots, or the
        slots of each MoE layer. ``expert_slab`` is the folder of the fuel's slab, which then fills it;
        ``expert_bank`` says what a GPU has in the host's memory: "yes" all experts, "exclusive" those that no
        slot holds, "no" none, so that they stay in the slab; "auto" is the first that fits.
        ``fabric`` joins several boosters, ``owners[MoE layer][expert]`` says whose each expert is; with
        ``split_dense`` each has its share of the dense weights, too. Every rank loads with the same, and all
        ranks but 0 then ``follow()``."""

    def info(self) -> dict[str, Any]:
        """The fields of EngineInfo (src/runtime/engine.h)."""

    def open(self) -> int: ...
    def close(self, stream: int) -> None: ...
    def position(self, stream: int) -> int: ...
    def fork(self, stream: int) -> int: ...
    def step(self, rows: Sequence[Row]) -> tuple[npt.NDArray[np.float32], list[int]]:
        """Runs a step. Returns logits ``[n, vocab]`` of rows that wanted them (a copy) and their indices."""

    def feed(
        self, stream: int, ids: Sequence[int], *, logits: str = "last", chunk: int = 0
    ) -> npt.NDArray[np.float32] | None:
        """Feeds tokens in chunks of at most ``chunk`` (0: max_rows). ``logits``: "none", "last" (kept inside
        for ``sample``; nothing is returned) or "all" (returns ``[len(ids), vocab]``). Signals are looked at
        between chunks."""

    def score(
        self, stream: int, ids: Sequence[int], targets: Sequence[int], chunk: int = 0
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Feeds ``ids``; for each row the log-probability of ``targets[i]`` (float64), its rank (0 = best;
        ties count by lowest id) and the arg-max token. Memory does not grow with ``len(ids)``."""

    def sample(self, sampling: SamplingParams, counter: int, row: int = -1, stream: int = -1) -> int:
        """Draws from a row of the last step's logits (index into its list of rows; -1: the last).

        With ``stream``, from that stream's last row, which must have had logits in the last step.
        """

    def prompt(self, stream: int, ids: Sequence[int], sampling: SamplingParams, chunk: int = 0) -> int:
        """Feeds tokens and draws the next, in one call; the counter is the position of the drawn token."""

    def decode(self, stream: int, token: int, sampling: SamplingParams) -> int:
        """Feeds one token and draws the next; the counter is the position of the drawn token."""

    def decode_batch(
        self, streams: Sequence[int], tokens: Sequence[int], sampling: Sequence[SamplingParams]
    ) -> list[int]:
        """Feeds a token to each of several streams in one step, and draws the next of each."""

    def last_logits(self) -> npt.NDArray[np.float32]:
        """The last step's logits ``[n, vocab]`` (a copy)."""

    def commit(self, stream: int, rows: int) -> None: ...
    def snapshot(self, stream: int, name: str) -> None: ...
    def restore(self, name: str) -> int: ...
    def drop_snapshot(self, name: str) -> None: ...
    def snapshots(self) -> list[str]: ...
    def save_snapshot(self, name: str, file: str) -> None: ...
    def load_snapshot(self, name: str, file: str) -> None: ...
    def truncate(self, stream: int, position: int) -> None: ...
    def state(self, stream: int, name: str) -> npt.NDArray[np.float32]: ...
    def hint(self, layer: int, experts: Sequence[int]) -> bool:
        """Experts that a layer (the model's number) may take in its next step, the most likely first. False:
        no cache of experts that takes hints is there."""

    def stats(self) -> dict[str, Any]:
        """The fields of EngineStats; ``expert_layers`` as (layer, hits, misses, evictions), ``expert_hints``
        as a dict, ``boosters`` as dicts."""

    def start_trace(self, file: str) -> None:
        """Writes the routing of every row from here on to a compact trace."""

    def stop_trace(self) -> int:
        """Ends the trace; its rows."""

    def set_profile(self, on: bool) -> None: ...
    def profile(self) -> list[tuple[str, float, bool]]:
        """(stage, ms, of_which) of the steps since set_profile(True)."""

    def set_diagnostics(self, on: bool) -> None: ...
    def diagnostics(self) -> list[tuple[float, float]]:
        """(RMS of the stream mean, router entropy in nats or -1) of each layer."""

    def set_record(self, on: bool) -> None: ...
    def record(self) -> dict[str, list[npt.NDArray[Any]]]: ...
    def follow(self) -> None:
        """On a rank above 0: makes rank 0's calls until its engine is gone."""

    def unload(self) -> None:
        """Frees everything; the object can only be deleted after this."""

def read_headers(dir: str) -> list[dict[str, Any]]:
    """Checked safetensors headers of a checkpoint directory, one dict a file: ``file, bytes, sparse,
    tensors`` with tensors as ``(name, dtype, shape, offset, bytes)`` in file order. Reads no weights."""

class FuelSlab:
    """A fuel's experts in one file (src/experts/slab.h), in a folder. ``written()`` throws for a slab that is
    not this fuel's or not whole."""

    def __init__(self, fuel_dir: str, slab_dir: str) -> None: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def path(self) -> str: ...
    def written(self) -> bool: ...
    def write(self, progress: Callable[[int, int], None] | None = None) -> None: ...
    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Every byte with the fuel's. Throws FuelError."""

def read_config(dir: str) -> dict[str, Any]:
    """The fields of glm5::Config after all defaults are applied."""

TRACE_MAGIC: bytes

def replay_routing(
    ids: npt.NDArray[np.int32],
    step_ends: npt.NDArray[np.int64],
    *,
    experts: int,
    topk: int,
    slots: int = 0,
    layer_slots: Sequence[int] = (),
    owned: Sequence[int] = (),
    policy: str = "lru",
    many_rows: bool = True,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], list[int], int]:
    """Steps of routed rows through an empty ExpertCache (src/experts/cache.h): look-ups and misses ``[steps,
    layers]``, evictions of each layer, ids: ``[rows, layers, top-k]``, -1 is skipped. Without
    ``many_rows`` look-ups of many rows are as any."""

class TraceWriter:
    """A compact routing trace (src/experts/trace.h)."""

    def __init__(
        self, path: str, *, layers: Sequence[int], experts: int, topk: int, fingerprint: int = 0
    ) -> None: ...
    def step(self, rows: Sequence[tuple[int, int, bool]], ids: npt.NDArray[np.int32]) -> None:
        """rows: (stream, position, prefill); ids: ``[rows, layers, top-k]``."""

    def flush(self) -> None: ...
    def close(self) -> None: ...
    @property
    def rows(self) -> int: ...

def read_trace(path: str) -> dict[str, Any]:
    """All whole rows: ``layers, experts, topk, fingerprint, torn_bytes``, ids ``[rows, layers, top-k]``, and
    of each row ``step, stream, position, prefill``."""

def read_rate_gb_s(bytes: int = 0, threads: int = 0, seconds: float = 0.5) -> float:
    """This machine's streaming read rate in GB/s (10^9 bytes): the threads sum a buffer far larger than the
    caches."""

def copy_rate_gb_s(bytes: int = 0, threads: int = 0, seconds: float = 0.5) -> float:
    """The same for copying one half of such a buffer to the other; bytes read and written both count."""

def cuda_devices() -> tuple[list[str], str]:
    """Names of the CUDA devices, and why there are none."""

def device_read_rate_gb_s(seconds: float = 0.5) -> float | None:
    """Rate at which the first CUDA device reads its memory, or None where there is none."""

def device_rates(seconds: float = 0.5) -> tuple[dict[str, Any] | None, str]:
    """The fields of DeviceRates (src/runtime/device_rates.h), or None and why there is nothing to measure."""

def memory_available() -> tuple[int, str]: ...
def cpu_name() -> str: ...
def cpu_isa() -> str: ...
def cpus() -> int: ...
