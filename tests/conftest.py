"""Fixtures that several test files share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fuel_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where random fuels of this session lie, each made once."""
    return tmp_path_factory.mktemp("fuels")
