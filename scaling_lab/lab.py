"""The whole story in one screen: plan, evidence, result, report. Knows no Hydra, no jax, no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scaling_lab.cluster import environment as workers
from scaling_lab.cluster import folders, found, interrupts, local
from scaling_lab.config import experiment_from
from scaling_lab.data import check_request
from scaling_lab.errors import EXIT_DONE, EXIT_FAILED, ConfigError, LabError
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Plan, make_plan
from scaling_lab.predict.peak import device_peak
from scaling_lab.report import console as shown
from scaling_lab.report import tables
from scaling_lab.report.runs import load_results
from scaling_lab.results.environment import environment
from scaling_lab.results.folder import RunFolder
from scaling_lab.results.metrics import Scale
from scaling_lab.results.partitioner import rematerializations
from scaling_lab.results.result import Facts, build
from scaling_lab.results.tracker import Tracker

#: Which field of /proc/PID/stat is the process's start, in ticks since boot; the third is the first after its name (proc(5)).
STARTTIME = 22


@dataclass(frozen=True)
class Request:
    """One job as it was asked for. config: resolved and plain; sweep: the sweep's name; started: unix time.

    folder_named: whether somebody asked for this very folder; else a taken one gives way to the next free one
    """

    config: Mapping[str, Any]
    folder: Path
    command: str
    sweep: str | None = None
    started: float = field(default_factory=lambda: time.time())
    folder_named: bool = True


def run(request: Request) -> int:
    """Plan, start workers, train, measure; whatever happens ends in result.json. Raises LabError where it went wrong."""
    folder = RunFolder.create(request.folder, named=request.folder_named)
    facts: dict[str, Any] = {"run_id": _run_id(folder.path), "experiment": dict(request.config), "plan": None, "records": []}
    try:
        _carry_out(request, folder, facts)
    except BaseException as error:
        facts["error"] = error
        raise
    finally:
        with interrupts.held():
            result = _finish(request, folder, facts)
        folder.release()
        if result["status"] == "ok":
            shown.show_result(shown.open_console(), result, folder.path)
    return EXIT_DONE


def _run_id(folder: Path) -> str:
    """Unique, and telling."""
    return f"{folder.parent.name}-{folder.name}-{secrets.token_hex(3)}"


def _carry_out(request: Request, folder: RunFolder, facts: dict[str, Any]) -> None:
    """Fills `facts` as they come to be known, so that a failure loses none of them."""
    facts["experiment"] = experiment = experiment_from(dict(request.config))
    folder.write_experiment(experiment)
    check_request(experiment.data, experiment.workload.evaluation.every)
    facts["plan"] = plan = make_plan(experiment, found.find(experiment))
    folder.write_plan(plan)
    console = shown.open_console()
    shown.show_plan(console, experiment, plan)
    before_peak = time.time()
    facts["peak"] = peak = device_peak(experiment, plan, folders.cache_folder(), console.print)
    facts["peak_measurement_s"] = peak_s = time.time() - before_peak
    scale = _scale(experiment, plan, peak.flops_per_s_per_device)
    progress = shown.show_progress(console, experiment, scale)
    tracker = Tracker(experiment, plan, folder.path, run_id=facts["run_id"], sweep=request.sweep, scale=scale, say=progress.say)
    facts["tracker"] = tracker
    facts["coordinator_startup_s"] = time.time() - request.started - peak_s
    records = folder.open_records()

    def on_record(record: dict[str, Any]) -> None:
        records.append(record)
        facts["records"].append(record)
        tracker.record(record)
        progress.record(record)

    try:
        facts["records"] += local.run(experiment, plan, folder.path, on_record)  # the last word of every process
    finally:
        progress.close()
        records.close()


def _finish(request: Request, folder: RunFolder, facts: dict[str, Any]) -> dict[str, Any]:
    """Build and write the result, and end tracking with it."""
    tracker: Tracker | None = facts.pop("tracker", None)
    plan, experiment = facts["plan"], facts["experiment"]
    started_with = workers.worker_environment(experiment, plan) if plan else {}
    facts["environment"] = environment(
        command=request.command, worker_environment=started_with, plan=plan, records=facts["records"], folder=Path.cwd()
    )
    if isinstance(experiment, Experiment) and experiment.backend.name == "jax":
        facts["rematerializations"] = rematerializations(folder.path)
    facts["wall_time_s"] = time.time() - request.started
    result = build(Facts(**facts))
    if tracker:
        result["tracking"] = tracker.finish(exit_code=EXIT_DONE if result["status"] == "ok" else EXIT_FAILED, result=result)
    folder.write_result(result)
    return result


def _scale(experiment: Experiment, plan: Plan, peak: float | None) -> Scale:
    workload = experiment.workload
    return Scale(workload.global_batch * workload.sequence, plan.mesh.devices, plan.flops_per_token, peak)


def draw(config: Mapping[str, Any]) -> int:
    """Show what would be decided, also for hardware that is not here; start nothing, write nothing."""
    experiment = experiment_from(dict(config))
    check_request(experiment.data, experiment.workload.evaluation.every)
    plan = make_plan(experiment, found.assume(experiment))
    shown.show_plan(shown.open_console(), experiment, plan)
    return EXIT_DONE


def show(paths: Sequence[Path]) -> int:
    """The tables of finished runs, one after the other; where there are several, as in a sweep, then all in one."""
    runs = load_results(paths)
    for one in runs:
        if one.result is None:
            raise LabError(f"{one.folder}: {one.reason}")
        shown.show_result(shown.open_console(), one.result, one.folder)
    if len(runs) > 1:
        shown.show_table(shown.open_console(), runs)
    return EXIT_DONE


def report(paths: Sequence[Path]) -> int:
    """Runs and sweeps side by side."""
    shown.show_table(shown.open_console(), load_results(paths))
    return EXIT_DONE


def end_sweep(folder: Path) -> int:
    """The table of a sweep, on the console and in its folder. Infeasible jobs alone are no failure."""
    with contextlib.suppress(OSError):
        folder.rmdir()  # only an empty one goes: no job began, and why is told elsewhere
    try:
        runs = load_results([folder])
    except ConfigError:
        return EXIT_FAILED
    tables.write_sweep(folder, runs)
    shown.show_table(shown.open_console(), runs)
    return EXIT_FAILED if any(run.status not in ("ok", "infeasible") for run in runs) else EXIT_DONE


def process_started() -> float:
    """Unix time at which this process began, for what a run costs from the shell on.

    Its age on the clock that Linux dates processes by, since boot: the time of the boot itself is known to whole seconds only.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # the program's name may hold blanks
    began_s = int(fields[STARTTIME - 3]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
