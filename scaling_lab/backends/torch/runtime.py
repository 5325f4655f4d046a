"""Joins the processes of a job, finds the device and checks it against the plan; the only reader of the environment here.

Owns process-wide torch state (threads, the process group, the device mesh). Must not know models or weights.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import shutil
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scaling_lab.backends.contract import Job
from scaling_lab.errors import WorkerError
from scaling_lab.plan.plan import Plan


@dataclass(frozen=True)
class World:
    """What this process joined: its device, the mesh of all devices (axes larger than 1; None on a single device)."""

    device: torch.device
    mesh: DeviceMesh | None
    owns_group: bool


def join(job: Job) -> World:
    """Take this process's device and meet the others. Raises WorkerError where the devices are not those planned."""
    device = _device(job)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // job.plan.mesh.devices_per_host)
    torch.set_num_threads(threads)
    if job.experiment.backend.compile:
        _import_compiler(device, threads)
    if job.plan.mesh.devices == 1:
        return World(device, None, owns_group=False)
    owns_group = not dist.is_initialized()
    if owns_group:
        _initialize(job, device)
    if (dist.get_world_size(), dist.get_rank()) != (job.plan.processes, job.process):
        raise WorkerError(
            f"this is process {job.process} of {job.plan.processes}, but the process group that it is in already has it as "
            f"{dist.get_rank()} of {dist.get_world_size()}."
        )
    real = [(name, size) for name, size in job.plan.mesh.axes if size > 1]
    names, sizes = zip(*real, strict=True)
    return World(device, _device_mesh(device.type, sizes, names), owns_group)


def leave(world: World) -> None:
    """Leave the process group, if this job made it."""
    if world.owns_group and dist.is_initialized():
        _device_mesh.cache_clear()
        dist.destroy_process_group()


def mesh_of_copies(world: World) -> DeviceMesh:
    """All devices, each with a copy of the whole, as `fully_shard` takes them: a dim of copies, and one of size 1 that stores."""
    assert world.mesh is not None
    return _device_mesh(world.device.type, (world.mesh.size(), 1), ("copies", "whole"))


def device_facts(world: World) -> dict[str, Any]:
    """What this process runs on, with the versions of the libraries used."""
    on_gpu = world.device.type == "cuda"
    return {
        "platform": "gpu" if on_gpu else "cpu",
        "kind": torch.cuda.get_device_name(world.device) if on_gpu else "cpu",
        "count": 1,
        "asynchronous": on_gpu,
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
    }


@functools.cache
def _device_mesh(kind: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Kept as long as the process group: every mesh makes groups of its own, which cost threads and sockets."""
    return dist.init_device_mesh(kind, sizes, mesh_dim_names=names)


def _device(job: Job) -> torch.device:
    plan = job.plan
    if plan.platform == "cpu":
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if plan.platform != "gpu" or found == 0:
        raise WorkerError(
            f"the plan is for platform {plan.platform}, but torch {torch.__version__} finds {found} GPUs. Set "
            f"hardware.platform=cpu, or install a torch build for this machine's GPUs."
        )
    index = job.process % plan.mesh.devices_per_host
    if index >= found:
        raise WorkerError(
            f"the mesh puts {plan.mesh.devices_per_host} devices on a host, but torch finds {found}. Set mesh.devices="
            f"{found * plan.mesh.hosts}."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.cuda.reset_peak_memory_stats(device)  # a job's peak must not hold that of one before it
    return device


def _initialize(job: Job, device: torch.device) -> None:
    limit = job.experiment.cluster.startup_limit_s
    if job.plan.mesh.hosts == 1:
        # gloo resolves the host's own name otherwise, which may lead nowhere in a container.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{job.address}",
            world_size=job.plan.processes,
            rank=job.process,
            timeout=datetime.timedelta(seconds=max(limit, job.experiment.cluster.step_limit_s)),
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"process {job.process} of {job.plan.processes} could not join the others at {job.address} within {limit:g} s "
            f"(cluster.startup_limit_s): {error}"
        ) from error


def _import_compiler(device: torch.device, threads: int) -> None:
    """torch.compile writes C++ on CPU; without a compiler of that it fails late and at length."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))  # 1: no pool of processes beside each rank
    names = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if device.type == "cpu" and not any(shutil.which(name) for name in names):
        raise WorkerError(
            "backend.compile=true needs a C++ compiler on CPU, and none was found (g++, clang++ or the environment's CXX). "
            "Install one, or set backend.compile=false."
        )
    with warnings.catch_warnings():
        # torch 2.13's compiler still imports what torch itself has deprecated.
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")
    # Its tracer looks at the gradients of whatever it meets.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    # And it makes an instance of a function that sends gradients to other processes.
    warnings.filterwarnings(
        "ignore", "<class 'torch.autograd.function.Function'> should not be instantiated", DeprecationWarning
    )


def check_planned(plan: Plan) -> None:
    """Refuse what only this backend cannot do: one process drives one device."""
    if plan.devices_per_process != 1:
        raise WorkerError(
            f"the plan gives a process {plan.devices_per_process} devices, but torch drives one each: set "
            "backend.processes=per_device."
        )
