"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from backends import missing_gpu


@pytest.fixture(scope="session")
def fuel_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where random fuels of this session lie, each made once."""
    return tmp_path_factory.mktemp("fuels")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = missing_gpu()
    if missing is None:
        return
    skip = pytest.mark.skip(reason=missing)
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
