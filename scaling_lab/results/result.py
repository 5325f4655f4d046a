"""result.json: experiment, plan, evidence and environment as one dict. Owns their order and what stands for the unknown.

Must not start, measure or print anything: the same arguments give the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scaling_lab.config import to_plain
from scaling_lab.errors import LabError
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.pipeline import PipelineSplit
from scaling_lab.plan.plan import Plan
from scaling_lab.predict.peak import DevicePeak
from scaling_lab.predict.peak import to_plain as plain_peak
from scaling_lab.results import metrics
from scaling_lab.results.measured import measured
from scaling_lab.results.records import Record
from scaling_lab.results.schema import SCHEMA_VERSION

#: Keys of `measured` that are a metric of the rest.
DERIVED = ("tokens_per_s", "tokens_per_s_per_device", "mfu", "mfu_causal", "model_flops_per_s_per_device")

_RATES = ("step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu")


@dataclass(frozen=True)
class Facts:
    """What the coordinator knows when a job has ended, however it ended.

    experiment: a plain dict where the config was refused; plan: None where planning was; error: None if all went well
    environment: as `results.environment` gathers it; records: those of process 0, and the `done` record of every process
    wall_time_s: from the shell's start to now; coordinator_startup_s: from the shell's start to the start of the workers
    peak_measurement_s: what measuring this machine's peak took, or reading it
    tracking: what `Tracker.finish` returns; rematerializations: as `partitioner.rematerializations` counts them
    """

    run_id: str
    experiment: Experiment | Mapping[str, Any]
    plan: Plan | None
    environment: Mapping[str, Any]
    records: Sequence[Record] = field(default_factory=tuple)
    error: BaseException | None = None
    wall_time_s: float | None = None
    coordinator_startup_s: float | None = None
    peak_measurement_s: float | None = None
    peak: DevicePeak | None = None
    tracking: Mapping[str, Any] | None = None
    rematerializations: int | None = None


def build(facts: Facts) -> dict[str, Any]:
    """The result, schema_version 1: every key is there, unknown is None. See `schema` for its form."""
    experiment = to_plain(facts.experiment) if isinstance(facts.experiment, Experiment) else dict(facts.experiment)
    result: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "run_id": facts.run_id,
        "status": _status(facts.error),
        "error": _error(facts.error),
        "experiment": experiment,
        "environment": {**facts.environment, "peak": plain_peak(facts.peak) if facts.peak else None},
        "plan": plan_summary(facts.plan),
        "predicted": _predicted(facts.plan),
        "compiled": {**_compiled(), "involuntary_rematerializations": facts.rematerializations},
        "measured": measured(
            facts.records,
            wall_time_s=facts.wall_time_s,
            coordinator_startup_s=facts.coordinator_startup_s,
            peak_measurement_s=facts.peak_measurement_s,
        ),
        "tracking": dict(facts.tracking) if facts.tracking else None,
    }
    found = metrics.values(result)
    result["measured"] |= {name: found[name] for name in DERIVED}
    return result


def _status(error: BaseException | None) -> str:
    if error is None:
        return "ok"
    return error.status if isinstance(error, LabError) else "failed"


def _error(error: BaseException | None) -> dict[str, str] | None:
    if error is None:
        return None
    if isinstance(error, LabError):
        return {"kind": error.kind, "message": str(error)}
    if isinstance(error, KeyboardInterrupt):
        return {"kind": getattr(error, "kind", "interrupted"), "message": str(error) or "interrupted"}
    return {"kind": "internal", "message": f"{type(error).__name__}: {error}"}


def plan_summary(plan: Plan | None) -> dict[str, Any]:
    """The plan's numbers; plan.json has the rest. Every value is null (or {}) where there is no plan."""
    if plan is None:
        names = ("parameters", "flops_per_token", "devices", "hosts", "mesh", "roles", "crossing_axes", "pipeline")
        return {**dict.fromkeys(names), "bytes_per_device": {"total": None}}
    return {
        "parameters": plan.parameter_count,
        "flops_per_token": plan.flops_per_token,
        "flops_per_token_causal": plan.flops_per_token_causal,
        "devices": plan.mesh.devices,
        "hosts": plan.mesh.hosts,
        "processes": plan.processes,
        "mesh": dict(plan.mesh.axes),
        "mesh_chosen": list(plan.mesh.chosen),
        "roles": {axis: list(roles) for axis, roles in plan.roles.items()},
        "crossing_axes": list(plan.mesh.crossing_axes()),
        "pipeline": _pipeline(plan.pipeline),
        "bytes_per_device": dict(plan.bytes_per_device),
    }


def _pipeline(split: PipelineSplit) -> dict[str, Any] | None:
    """None where there is one stage. bubble_share: see `plan.pipeline`."""
    if split.stages == 1:
        return None
    names = ("stages", "virtual_stages", "microbatches", "schedule", "bubble_share")
    return {name: getattr(split, name) for name in names}


def _predicted(plan: Plan | None) -> dict[str, Any]:
    needed = {"total": None} if plan is None else dict(plan.bytes_per_device)
    return {**dict.fromkeys(_RATES), "bytes_per_device": needed, "collectives": None, "breakdown": None}


def _compiled() -> dict[str, Any]:
    names = ("target", "compile_time_s", "flops_per_step_per_device")
    return {**dict.fromkeys(names), "bytes_per_device": {"total": None}, "collectives": None}
