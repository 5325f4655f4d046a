"""Supervision with real processes around a toy backend: who failed, how it is told, and that nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
from experiments import FOUND, experiment
from faults.leftovers import MARK, marked

from scaling_lab.cluster import hosts, local
from scaling_lab.errors import WorkerError
from scaling_lab.plan.plan import Plan, make_plan

TOY = Path(__file__).parent / "faults/toy_host.py"
LIMIT_S = 30.0
OWN = uuid.uuid4().hex


def small(backend: str = "torch", **keys: Any) -> Any:
    """Four processes (one with jax) of 2 rows and 8 tokens, 6 steps."""
    return experiment(
        backend=backend,
        sharding="fsdp_tensor",
        **{
            "data.source": "synthetic",
            "mesh.devices": 4,
            "workload.global_batch": 4,
            "workload.sequence": 8,
            "workload.steps": 6,
            "workload.untimed_steps": 1,
            "workload.evaluation": {"every": 3, "batches": 2},
            "cluster.grace_s": 2.0,
            **keys,
        },
    )


class Job:
    """A toy job in a folder: its records as they come, and how it ended."""

    def __init__(self, folder: Path, faults: dict[Any, Any] | None = None, backend: str = "torch", **keys: Any):
        self.experiment = small(backend, **keys)
        self.plan: Plan = make_plan(self.experiment, FOUND)
        self.folder = folder
        self.command = (sys.executable, str(TOY), json.dumps(faults or {}), str(folder))
        self.records: list[dict[str, Any]] = []
        self.on_record: Any = lambda record: None

    def run(self) -> list[dict[str, Any]]:
        def take(record: dict[str, Any]) -> None:
            self.records.append(record)
            self.on_record(record)

        return local.run(self.experiment, self.plan, self.folder, take, self.command)

    def error(self) -> WorkerError:
        with pytest.raises(WorkerError) as caught:
            self.run()
        assert left() == [], "processes of the job are left"
        return caught.value

    def kinds(self) -> list[str]:
        return [record["kind"] for record in self.records]

    @property
    def pids(self) -> list[int]:
        return next(record["pids"] for record in self.records if record["kind"] == "processes")


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, OWN)


def left() -> list[psutil.Process]:
    """Processes of this file's jobs."""
    return marked(OWN)


def test_a_job_gives_a_done_record_for_each_process_in_order(tmp_path):
    done = Job(tmp_path).run()
    assert [record["process"] for record in done] == [0, 1, 2, 3]
    assert left() == []


def test_only_process_0_tells_the_steps_and_each_is_told_once(tmp_path):
    job = Job(tmp_path)
    job.run()
    steps = [record["step"] for record in job.records if record["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [(record["step"], record["loss"]) for record in job.records if record["kind"] == "evaluation"] == [
        (3, 2.0),
        (6, 2.0),
    ]
    assert len(set(job.pids)) == 4


def test_one_process_per_host_is_started_where_the_backend_wants_so(tmp_path):
    done = Job(tmp_path, backend="jax", **{"mesh.hosts": 2}).run()
    assert [record["process"] for record in done] == [0, 1]
    assert (tmp_path / "worker-1.log").exists()


def test_a_process_that_raises_is_named_with_its_step_its_log_and_the_last_lines_of_it(tmp_path):
    error = Job(tmp_path, {2: {"how": "raise", "step": 3}}).error()
    assert "process 2 of 4 (pid " in str(error)
    assert "raised RuntimeError: the toy broke (in phase train after step 2)" in str(error)
    assert 'raise RuntimeError("the toy broke")' in str(error)
    assert str(tmp_path / "worker-2.log") in str(error)
    assert error.kind == "worker"


def test_an_error_that_explains_itself_is_shown_without_a_traceback_and_keeps_its_kind(tmp_path):
    error = Job(tmp_path, {1: {"how": "explain", "step": 1}}).error()
    assert str(error).startswith("data.path=/gone: no such file\n(process 1 of 4")
    assert "Traceback" not in str(error)
    assert error.kind == "config"


def test_a_process_that_exits_is_named_with_its_code(tmp_path):
    text = str(Job(tmp_path, {0: {"how": "exit", "step": 2}}).error())
    assert "process 0 of 4" in text
    assert "exited with code 7 in phase train after step 1" in text


def test_a_process_that_exits_with_code_0_before_it_is_done_has_failed(tmp_path):
    text = str(Job(tmp_path, {0: {"how": "quit", "step": 2}}, backend="jax").error())
    assert "process 0 of 1" in text
    assert "exited before its work was done" in text


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_a_process_that_crashes_is_named_with_its_signal_and_where_it_was(tmp_path, backend):
    text = str(Job(tmp_path, {0: {"how": "segv", "step": 2}}, backend=backend).error())
    assert "was killed by SIGSEGV in phase train after step 1" in text
    assert "in fault" in text.partition("where it was, innermost first")[2], "faulthandler shows the Python stack"


def test_the_cause_is_named_and_not_the_process_that_lost_its_connection(tmp_path):
    faults = {0: {"how": "closed", "step": 2}, 1: {"how": "abort", "step": 2}, 2: {"how": "closed", "step": 1}}
    text = str(Job(tmp_path, {**faults, 3: {"how": "raise", "step": 5}}).error())
    assert "process 3 of 4" in text
    assert "the toy broke" in text


def test_an_error_while_importing_the_backend_is_told(tmp_path):
    text = str(Job(tmp_path, {"import": True}).error())
    assert "ImportError: the toy cannot be imported" in text
    assert "in phase start" in text


def test_an_error_of_the_data_is_told_as_the_data_explains_it(tmp_path):
    gone = str(tmp_path / "gone.txt")
    error = Job(tmp_path, **{"data.source": "text", "data.path": gone}).error()
    assert f"data.path={gone}: no such file" in str(error)
    assert error.kind == "config"


def test_a_worker_that_cannot_start_at_all_is_told_with_its_log(tmp_path):
    job = Job(tmp_path)
    job.command = (sys.executable, "-c", "import sys; sys.exit('no such luck')")
    text = str(job.error())
    assert "exited with code 1" in text
    assert "no such luck" in text


def test_a_taken_port_means_another_start_and_not_a_failure(tmp_path):
    job = Job(tmp_path, {0: {"how": "address", "step": 1}}, backend="jax")
    assert len(job.run()) == 1
    assert [r["message"] for r in job.records if r["kind"] == "event"] == [
        "the port for the processes to meet was taken meanwhile; starting again with another"
    ]
    assert left() == []


def test_a_thread_that_would_hold_a_failing_process_does_not(tmp_path):
    began = time.monotonic()
    assert "the toy broke" in str(Job(tmp_path, {0: {"how": "thread", "step": 2}}, backend="jax").error())
    assert time.monotonic() - began < 10


def test_what_a_worker_started_itself_is_ended_with_it_even_if_it_ignores_sigterm(tmp_path):
    assert "the toy broke" in str(Job(tmp_path, {1: {"how": "children", "step": 2}}).error())


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    faults = {0: {"how": "stubborn", "step": 1}, 1: {"how": "raise", "step": 6}}
    began = time.monotonic()
    assert "process 1 of 4" in str(Job(tmp_path, faults, **{"workload.steps": 10**6, "cluster.grace_s": 0.5}).error())
    assert time.monotonic() - began < LIMIT_S


def test_a_process_without_progress_ends_the_job_and_its_log_shows_where_it_hangs(tmp_path):
    job = Job(tmp_path, {2: {"how": "hang", "step": 4}}, **{"cluster.step_limit_s": 2.0, "workload.steps": 10**7})
    error = job.error()
    assert "process 2 of 4" in str(error)
    assert "made no progress for" in str(error)
    assert "after step 3 (over cluster.step_limit_s=2)" in str(error)
    assert "in where_it_hangs" in str(error)
    assert error.kind == "stuck"


def test_of_a_deep_stack_the_innermost_frames_are_shown_and_the_time_in_fractions_of_a_second(tmp_path):
    job = Job(
        tmp_path, {0: {"how": "deep", "step": 4}}, backend="jax", **{"cluster.step_limit_s": 0.4, "workload.steps": 10**7}
    )
    error = str(job.error())
    assert re.search(r"made no progress for 0\.[4-9]\d s|made no progress for [1-9]\.\d\d s", error), error
    stack = error.partition("where it was, innermost first, from ")[2].splitlines()
    frames = [line.split()[-1] for line in stack[1:]]
    assert frames[frames.index("where_it_hangs") :][:3] == ["where_it_hangs", "called_deeply", "called_deeply"]
    assert frames[0] == "wait"
    assert len(frames) == 15


def test_a_job_that_does_not_reach_its_first_step_in_time_is_ended(tmp_path):
    error = Job(tmp_path, {0: {"how": "hang", "step": 1}}, backend="jax", **{"cluster.startup_limit_s": 3.0}).error()
    assert "no first step within cluster.startup_limit_s=3" in str(error)


def endless(tmp_path: Path, **keys: Any) -> Job:
    return Job(tmp_path, **{"workload.steps": 10**7, "workload.evaluation": {"every": 0, "batches": None}, **keys})


def at_step(job: Job, step: int, act: Any) -> None:
    """Do something to the running job once, when it has told this step."""
    acted: list[bool] = []

    def on_record(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["step"] >= step and "processes" in job.kinds() and not acted:
            acted.append(True)
            act(job)

    job.on_record = on_record


def test_a_process_killed_from_outside_is_named(tmp_path):
    job = endless(tmp_path)
    at_step(job, 5, lambda job: os.kill(job.pids[1], signal.SIGKILL))
    text = str(job.error())
    assert f"process 1 of 4 (pid {job.pids[1]}, host 0) was killed by SIGKILL" in text


def test_the_process_that_forked_the_others_takes_them_with_it(tmp_path):
    job = endless(tmp_path)
    at_step(job, 5, lambda job: os.kill(psutil.Process(job.pids[0]).ppid(), signal.SIGKILL))
    text = str(job.error())
    assert "the process of host 0 that started processes 0 to 3" in text
    assert "was killed by SIGKILL" in text


def test_a_stopped_process_is_found_by_its_silence(tmp_path):
    job = endless(tmp_path, **{"cluster.step_limit_s": 6.0})
    at_step(job, 5, lambda job: os.kill(job.pids[3], signal.SIGSTOP))
    error = job.error()
    assert "process 3 of 4" in str(error)
    assert "has been silent for" in str(error)
    assert error.kind == "stuck"


@pytest.mark.parametrize(
    ("number", "kind", "word"),
    [(signal.SIGINT, "interrupted", "interrupted"), (signal.SIGTERM, "preempted", "terminated by SIGTERM")],
)
def test_a_signal_at_the_coordinator_ends_the_job_and_the_handlers_are_put_back(tmp_path, number, kind, word):
    job = endless(tmp_path)
    before = signal.getsignal(number)
    at_step(job, 5, lambda job: signal.raise_signal(number))
    error = job.error()
    assert error.kind == kind
    assert str(error).startswith(f"{word} after step ")
    assert signal.getsignal(number) is before


def test_a_job_may_run_outside_the_main_thread(tmp_path):
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(Job(tmp_path).run()))
    thread.start()
    thread.join(LIMIT_S)
    assert len(results[0]) == 4


def test_an_error_of_the_record_writer_ends_the_job_too(tmp_path):
    job = endless(tmp_path)

    def fail(job: Job) -> None:
        raise OSError("disk full")

    at_step(job, 3, fail)
    with pytest.raises(OSError, match="disk full"):
        job.run()
    assert left() == []


def test_the_command_that_starts_a_worker_is_a_module_of_this_package():
    assert hosts.COMMAND[1:] == ("-m", "scaling_lab.cluster.host")
