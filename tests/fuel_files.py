"""Reads the tensors of a fuel with nothing but numpy, checking each file's layout."""

import json
from pathlib import Path

import numpy as np

WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1}


def read_headers(fuel: Path) -> dict[str, tuple[Path, dict]]:
    """Every tensor's file and header entry; ``at`` is its offset in the file."""
    found: dict[str, tuple[Path, dict]] = {}
    for file in sorted(fuel.glob("*.safetensors")):
        raw = file.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8 : 8 + size])
        entries.pop("__metadata__")
        offset = 0
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            elements = int(np.prod(entry["shape"]))
            assert (begin, end - begin) == (offset, WIDTH[entry["dtype"]] * elements), name
            assert name not in found
            found[name] = (file, {**entry, "at": 8 + size + begin})
            offset = end
        assert len(raw) == 8 + size + offset
    return found


def read_tensor(fuel: Path, name: str) -> np.ndarray:
    """F32 and BF16 as float32, the rest as bytes."""
    file, entry = read_headers(fuel)[name]
    raw = file.read_bytes()[entry["at"] : entry["at"] + entry["data_offsets"][1] - entry["data_offsets"][0]]
    if entry["dtype"] == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view(np.float32).reshape(entry["shape"])
    return np.frombuffer(raw, {"F32": "<f4"}.get(entry["dtype"], np.uint8)).reshape(entry["shape"])
