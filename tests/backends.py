"""Backends that the tests run on. Those of CUDA carry the mark gpu, and say why they are skipped."""

from typing import Any

import pytest

from rocket import _core

EXACT = {"prefill_precision": "f32", "kv_dtype": "f32"}  # as the CPU computes


def missing_gpu() -> str | None:
    """Why there is no GPU to test on."""
    if not _core.cuda_built:
        return "NOT RUN ON A GPU: this build has no CUDA support"
    return None if _core.cuda_devices()[0] else f"NOT RUN ON A GPU: {_core.cuda_devices()[1]}"


def with_backends(cases: list[Any]) -> list[Any]:
    """Each case with each backend, for pytest.fixture(params=...)."""
    return [
        pytest.param((case, backend), id=f"{case.name}-{backend}", marks=marks)
        for case in cases
        for backend, marks in (("cpu", ()), ("cuda", (pytest.mark.gpu,)))
    ]
