"""A pool of torch processes with one process group, for tests: torch is imported once, then every rank is forked.

    with TorchPool(8) as pool:
        result = pool.run(plain(backend="torch", sharding="fsdp"), batches, want=("weights", "gradients"))

A rank that raises, ends or hangs ends the pool's processes, and `run` raises with its traceback; the next `run` starts new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from scaling_lab.backends.contract import Job
from scaling_lab.backends.rows import local_batch
from scaling_lab.config import experiment_from
from scaling_lab.plan.plan import Found, make_plan

#: A global batch: int32 tokens and labels [global_batch, sequence].
GlobalBatch = tuple[np.ndarray, np.ndarray]


class TorchPoolError(Exception):
    """A rank raised, ended or made no progress; the message holds its traceback."""


class TorchPool:
    """`size` ranks that wait for experiments. Use as a context: nothing is left behind."""

    def __init__(self, size: int, *, limit_s: float = 120.0):
        self.size, self.limit_s = size, limit_s
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> TorchPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, experiment: dict[str, Any], batches: Sequence[GlobalBatch], *, want: Sequence[str] = (), call: Any = None
    ) -> dict[str, Any]:
        """Train on `batches`, one step each, and return `losses`, `grad_norms`, `layouts`, `digests` (one dict per rank) of the session.

        want: also `weights` after the last step, and/or `gradients` (with `metrics`) of the first batch before any step
        call: a module-level function of (session, job, batches) to run instead; its result of each rank is returned as `results`
        An experiment on one device runs on rank 0 alone, without the group.
        """
        task = (experiment, list(batches), tuple(want), call)
        answers = self._ask(task)
        if call is not None:
            return {"results": answers}
        digests = [answer.pop("digests") for answer in answers if answer is not None]
        return {**answers[0], "digests": digests}

    def close(self) -> None:
        """End every rank."""
        for _, connection in self._ranks:
            connection.close()
        for process, _ in self._ranks:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []
        if self._folder:
            self._folder.cleanup()
            self._folder = None

    def _ask(self, task: Any) -> list[Any]:
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send(task)
        try:
            return self._answers()
        except BaseException:
            for process, _ in self._ranks:
                process.kill()
            self.close()
            raise

    def _answers(self) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks)}
        answers: list[Any] = [None] * self.size
        deadline = time.monotonic() + self.limit_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TorchPoolError(f"no answer from ranks {sorted(waiting.values())} within {self.limit_s:g} s")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[arg-type]
                answers[rank] = self._receive(rank, connection)
        return answers

    def _receive(self, rank: int, connection: Any) -> Any:
        try:
            failed, answer = connection.recv()
        except EOFError:
            process = self._ranks[rank][0]
            process.join(5)
            raise TorchPoolError(f"rank {rank} ended with exit code {process.exitcode}") from None
        if failed:
            raise TorchPoolError(f"rank {rank} raised:\n{answer}")
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["scaling_lab.backends.torch.train", "scaling_lab.backends.torch.pipeline"])
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    """A rank: join the group, then answer tasks until the pool closes its end."""
    import torch.distributed as dist

    warnings.simplefilter("error")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        try:
            connection.send((False, _run(rank, size, *task)))
        except BaseException:
            connection.send((True, traceback.format_exc()))
            return


def _run(rank: int, size: int, plain: dict[str, Any], batches: list[GlobalBatch], want: tuple[str, ...], call: Any) -> Any:
    from scaling_lab.backends.torch.train import open_session

    experiment = experiment_from(plain)
    plan = make_plan(experiment, Found("cpu", size, True, 24 << 30))
    if plan.mesh.devices not in (1, size):
        raise ValueError(f"a pool of {size} ranks cannot run a mesh of {plan.mesh.devices} devices")
    if plan.mesh.devices == 1 and rank:
        return None
    job = Job(experiment, plan, rank, "")
    session = open_session(job)
    try:
        return call(session, job, batches) if call else _train(session, job, batches, want, rank)
    finally:
        session.close()


def _train(session: Any, job: Job, batches: list[GlobalBatch], want: tuple[str, ...], rank: int) -> dict[str, Any]:
    """All ranks call the same; only rank 0 sends whole arrays back."""
    answer: dict[str, Any] = {}
    if "gradients" in want:
        answer["metrics"], answer["gradients"] = session.gradients(local_batch(job, *batches[0]))
    results = [session.step(local_batch(job, *batch)).result() for batch in batches]
    answer["losses"] = [result["loss"] for result in results]
    answer["grad_norms"] = [result["grad_norm"] for result in results]
    answer["layouts"] = session.layouts()
    if "weights" in want:
        answer["weights"] = session.weights()
    if rank:
        answer = {}
    answer["digests"] = session.replica_digests()
    return answer
