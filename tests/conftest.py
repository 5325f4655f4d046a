"""Here so that pytest puts this folder on the import path, and so that no test inherits what the backends' tests set for JAX."""

from pathlib import Path

import pytest

BACKENDS = Path(__file__).parent / "backends"


@pytest.fixture(autouse=True)
def own_environment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`backends/conftest.py` sets variables for the JAX of this process; jobs that other tests start must not see them."""
    if BACKENDS not in request.path.parents:
        for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
            monkeypatch.delenv(name, raising=False)
