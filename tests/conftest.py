"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest

from backends import missing_gpu
from mpi_tools import missing_mpi


@pytest.fixture(scope="session")
def fuel_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where random fuels of this session lie, each made once."""
    return tmp_path_factory.mktemp("fuels")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for mark, missing in (("gpu", missing_gpu), ("mpi", missing_mpi)):
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = missing() if marked else None
        if reason is not None and os.environ.get(f"ROCKET_TEST_{mark.upper()}") == "required":
            raise pytest.UsageError(reason)
        for item in marked if reason is not None else ():
            item.add_marker(pytest.mark.skip(reason=reason))
