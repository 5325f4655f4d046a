"""Joins the processes of a job, finds the devices and checks them against the plan; the only reader of the environment here.

Owns process-wide JAX state (platform, number of simulated devices, the process group). Must not know models or weights.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from scaling_lab.backends.contract import Job
from scaling_lab.errors import WorkerError
from scaling_lab.plan.plan import Plan


def join(job: Job) -> Mesh:
    """Meet the other processes and build the plan's mesh. Raises WorkerError where the devices are not those planned."""
    _configure(job.plan)
    jax.config.update("jax_use_shardy_partitioner", job.experiment.backend.partitioner == "shardy")
    if job.plan.processes > 1:
        _initialize(job)
    devices = _devices(job.plan)
    _check_own(job, devices)
    return mesh_of(job.plan, devices, explicit=job.experiment.backend.axis_types == "explicit")


def mesh_of(plan: Plan, devices: list[jax.Device], *, explicit: bool = False) -> Mesh:
    """The plan's mesh over these devices, row-major, every axis left to the partitioner between constraints, or `explicit`."""
    shape, kind = plan.mesh.shape, AxisType.Explicit if explicit else AxisType.Auto
    return Mesh(np.array(devices, dtype=object).reshape(shape), plan.mesh.names, axis_types=(kind,) * len(shape))


#: Libraries whose versions are told, those of them that a process has loaded.
LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "optax")


def leave(job: Job) -> None:
    """Leave the process group, if there is one."""
    if job.plan.processes > 1:
        jax.distributed.shutdown()


def device_facts(mesh: Mesh) -> dict[str, Any]:
    """What this process runs on, with the versions of the libraries used."""
    local = mesh.local_devices
    versions = {name: sys.modules[name].__version__ for name in LIBRARIES if name in sys.modules}
    return {"platform": local[0].platform, "kind": local[0].device_kind, "count": len(local), "versions": versions}


def peak_bytes(mesh: Mesh) -> int | None:
    """The most that any device of this process has held since the process began; None where the platform does not count."""
    stats = [device.memory_stats() for device in mesh.local_devices]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    return max(peaks) if peaks else None


def _configure(plan: Plan) -> None:
    """Ask for what the plan wants before JAX looks for devices; later it is too late, and `_devices` reports it."""
    if plan.platform != "cpu":
        return
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", plan.devices_per_process)
    except RuntimeError:  # the devices of this process exist already
        return


def _initialize(job: Job) -> None:
    limit = round(job.experiment.cluster.startup_limit_s)
    try:
        jax.distributed.initialize(
            coordinator_address=job.address,
            num_processes=job.plan.processes,
            process_id=job.process,
            local_device_ids=range(job.plan.devices_per_process),
            initialization_timeout=limit,
            shutdown_timeout_seconds=max(1, round(job.experiment.cluster.grace_s)),
        )
    except RuntimeError as error:
        raise WorkerError(
            f"process {job.process} of {job.plan.processes} could not join the others at {job.address} within {limit} s "
            f"(cluster.startup_limit_s): {error}"
        ) from error


def _devices(plan: Plan) -> list[jax.Device]:
    """The plan's devices in the order of its mesh: by process, then by number."""
    try:
        found = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    except RuntimeError as error:
        raise WorkerError(f"the plan is for platform {plan.platform}, but JAX finds no devices: {error}") from error
    platform = found[0].platform
    if platform != plan.platform:
        raise WorkerError(
            f"the plan is for platform {plan.platform}, but JAX found {platform} ({found[0].device_kind}). Set "
            f"hardware.platform={platform}, or install JAX for {plan.platform} (extras cuda, tpu) and unset JAX_PLATFORMS."
        )
    if len(found) < plan.mesh.devices:
        raise WorkerError(
            f"the mesh needs {plan.mesh.devices} devices, but JAX found {len(found)} in {plan.processes} process(es). Set "
            f"mesh.devices={len(found)}, or for simulated devices start the process with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={plan.devices_per_process}."
        )
    return found[: plan.mesh.devices]


def _check_own(job: Job, devices: list[jax.Device]) -> None:
    owners = {devices[index].process_index for index in job.devices}
    if owners != {jax.process_index()}:
        raise WorkerError(
            f"process {job.process} should drive devices {job.devices.start} to {job.devices.stop - 1} of the mesh, but they "
            f"belong to process(es) {sorted(owners)}: every process must find mesh.devices / mesh.hosts = "
            f"{job.plan.devices_per_process} devices."
        )
