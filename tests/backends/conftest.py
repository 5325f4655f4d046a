"""Eight simulated devices on the processor for every test here: JAX reads both variables once, when it starts.

LLVM's optimisations are off: most of a test's time is compiling small programs that run for milliseconds. The partitioner and
XLA's own passes, which decide layouts and collectives, run as always.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from experiments import FOUND

from scaling_lab.config import experiment_from
from scaling_lab.plan.plan import make_plan

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


@pytest.fixture(scope="session")
def torch_ranks() -> Iterator[Any]:
    """A `torch_pool.TorchPool` of 8 gloo ranks, started once."""
    from torch_pool import TorchPool

    with TorchPool(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def torch_pool(torch_ranks: Any) -> Callable[..., Any]:
    """Runs an experiment over the ranks: (plain config, batches) -> `cases.Outcome`. Layouts and replicas are checked."""
    from cases import Outcome

    def run(config: dict[str, Any], batches: list[Any]) -> Outcome:
        found = torch_ranks.run(config, batches, want=("weights", "gradients"))
        replicas: dict[str, str] = {}
        for digests in found["digests"]:
            for part, digest in digests.items():
                assert replicas.setdefault(part, digest) == digest, f"replicas of {part} drifted apart"
        planned = make_plan(experiment_from(config), FOUND).parameters
        assert found["layouts"] == {p.parameter.name: p.weights for p in planned}
        return Outcome(found["losses"], found["grad_norms"], found["gradients"], found["weights"])

    return run
