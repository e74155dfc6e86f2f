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


# Fixtures of a module that load fuels and remember what came out of them.
LOADED = ("loaded", "golden", "fuel")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("xdist"):  # with --dist loadgroup one worker has all tests of a fuel
        for item in items:
            chosen = getattr(item, "callspec", None)
            of = [f"{name} {chosen.indices[name]}" for name in LOADED if chosen and name in chosen.indices]
            if of:
                item.add_marker(pytest.mark.xdist_group(f"{item.path.name} {of[0]}"))
    for mark, missing in (("gpu", missing_gpu), ("mpi", missing_mpi)):
        marked = [item for item in items if item.get_closest_marker(mark)]
        reason = missing() if marked else None
        if reason is not None and os.environ.get(f"ROCKET_TEST_{mark.upper()}") == "required":
            raise pytest.UsageError(reason)
        for item in marked if reason is not None else ():
            item.add_marker(pytest.mark.skip(reason=reason))
