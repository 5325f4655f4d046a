"""What a backend must give the worker: a session that trains one experiment as its plan says. Framework-free types only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.plan import Plan


@dataclass(frozen=True)
class Job:
    """What one worker process is told. process: its index; address: host:port where the processes meet."""

    experiment: Experiment
    plan: Plan
    process: int
    address: str

    @property
    def devices(self) -> range:
        """Global indices (row-major in the mesh) of the devices that this process drives."""
        first = self.process * self.plan.devices_per_process
        return range(first, first + self.plan.devices_per_process)

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of a microbatch that this process reads: those of its devices, ascending, each once."""
        return tuple(sorted({row for d in self.devices for row in self.plan.batch.rows(self.plan.mesh, d)}))


@dataclass(frozen=True)
class Batch:
    """This process's part of one optimizer step (or, with accumulation 1, of one evaluation batch).

    tokens, labels: int32 [accumulation, local rows, sequence], the rows being `Job.rows` of each microbatch in that order;
    labels < 0 are ignored. Rows are whole, their tokens in the order of `plan.sequence`: a backend takes its devices' columns.
    """

    tokens: np.ndarray
    labels: np.ndarray
    #: Of packed rows, shaped alike: which of the row's documents a token belongs to, and its position in it.
    documents: np.ndarray | None = None
    positions: np.ndarray | None = None


class Pending(Protocol):
    """A step that was handed to the device."""

    def result(self) -> dict[str, float]:
        """Wait until the whole step is done, updated weights included.

        A train step gives `loss` (global sum over valid tokens / their count; 0 where none is valid), `grad_norm` (before
        clipping), `lr` and `valid_tokens`; an evaluation gives `loss_sum` and `valid_tokens`. Equal in every process.

        A train step of a model with experts also gives `balance_loss` and `z_loss` (`models.moe`; means over the rows of the global
        batch, before their coefficients, and not part of `loss`) and `dropped_tokens` (assignments without room, over all layers).

        A train step of a pipeline also gives, where the backend can tell, `bubble_share`: the share of the schedule's time in which
        a stage has nothing to do, the mean over stages; on simulated devices as if no two shared a core (`torch.bubble`).
        """
        ...


class Session(Protocol):
    """One experiment in one process. All processes of a job call the same methods in the same order."""

    def prepare(self, batch: Batch) -> float:
        """Build everything the first step needs (weights, optimizer, compiled program), without changing the weights.

        Returns seconds spent compiling (0 where there is nothing to compile ahead).
        """
        ...

    def step(self, batch: Batch) -> Pending:
        """One optimizer step: accumulate, reduce, clip, update. Dispatches and returns."""
        ...

    def prepare_evaluation(self, batch: Batch) -> float:
        """Build what `evaluate` needs, if it is not there yet. Returns seconds spent compiling."""
        ...

    def evaluate(self, batch: Batch) -> Pending:
        """Loss of one batch [1, local rows, sequence] with the present weights."""
        ...

    def compilations(self) -> int | None:
        """How often the train step has been compiled so far (JAX: size of its cache); None where that has no meaning."""
        ...

    def layouts(self) -> dict[str, Layout]:
        """The layout of each stored weight that really resulted (axes of size 1 left out), by parameter name."""
        ...

    def bytes_per_device(self) -> dict[str, int | None]:
        """Peak bytes of one device, by part, with `total`; None where the platform cannot say. Never a default number.

        CPU: parts that can be counted from live arrays and from the compiled program; resident memory is the worker's to add.
        """
        ...

    def device_facts(self) -> dict[str, Any]:
        """`platform` (cpu, gpu, tpu), `kind`, `count` (devices of this process), versions of the libraries used.

        `asynchronous`: false where `step` returns only when the device is done, so that a step in flight would gain nothing
        and blur its time; true if left out. The same in every process.
        """
        ...

    def gradients(self, batch: Batch) -> tuple[dict[str, float], Mapping[str, np.ndarray]]:
        """Metrics and the reduced gradient of the loss for each parameter, gathered to global shape. For tests and `verify`."""
        ...

    def weights(self) -> Mapping[str, np.ndarray]:
        """Every parameter gathered to its global shape, stacked over layers as the model describes it."""
        ...

    def replica_digests(self) -> dict[str, str]:
        """A digest of each local shard of this process, keyed `parameter|part`: equal keys in two processes must be equal."""
        ...

    def close(self) -> None:
        """Leave the process group. Nothing of the job may be left waiting."""
        ...


class Backend(Protocol):
    """What `scaling_lab.backends.NAME.train` must define at module level."""

    def open_session(self, job: Job) -> Session:
        """Join the other processes and check the devices found against the plan (WorkerError if they differ)."""
        ...
