"""Eight simulated devices on the processor for every test here: JAX reads both variables once, when it starts.

LLVM's optimisations are off: most of a test's time is compiling small programs that run for milliseconds. The partitioner and
XLA's own passes, which decide layouts and collectives, run as always.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


@pytest.fixture(scope="session")
def torch_ranks() -> Iterator[Any]:
    """A `torch_pool.TorchPool` of 8 gloo ranks, started once."""
    from torch_pool import TorchPool

    with TorchPool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def torch_pair() -> Iterator[Any]:
    """A pool of 2, for what is compiled: every rank compiles for itself, and keeps what it has compiled."""
    from torch_pool import TorchPool

    with TorchPool(2, limit_s=500) as pool:
        yield pool


@pytest.fixture(scope="session")
def torch_pool(torch_ranks: Any) -> Callable[..., Any]:
    """Runs an experiment over the ranks: (plain config, batches) -> `cases.Outcome`. Layouts and replicas are checked."""
    from cases import outcome_over

    return partial(outcome_over, torch_ranks)
