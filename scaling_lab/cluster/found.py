"""What this machine has: kind, number and memory of its devices. Reads files and asks `nvidia-smi`; imports no framework."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from scaling_lab.errors import LabError, PlanError
from scaling_lab.plan import auto
from scaling_lab.plan.experiment import MESH_AXES, Experiment
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.plan import Found
from scaling_lab.plan.rules import rules_from

#: Devices that a processor pretends to be where the mesh leaves their number open.
SIMULATED_DEVICES = 8

#: Google's PCI device ids -> JAX devices of one chip (v3, v4i, v4, v5p, v5e, v6e, 7x), as in jax/_src/hardware_utils.py.
TPU_DEVICES_PER_CHIP = {"0x0027": 2, "0x0056": 1, "0x005e": 1, "0x0062": 1, "0x0063": 1, "0x006f": 1, "0x0076": 2}

GPU_WORDS = "GPU (/dev/nvidia0 ..., narrowed by CUDA_VISIBLE_DEVICES)"
TPU_WORDS = "TPU (Google's PCI devices)"


def find(experiment: Experiment, root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> Found:
    """The devices that the experiment's `hardware.platform` may use; `auto` prefers TPUs, then GPUs, then the processor.

    On a processor any number of devices can be simulated, and each gets an equal share of the host's memory (that of the
    machine, or of the control group if that is less). Raises PlanError where the platform asked for is not here, or where
    the mesh needs more real devices than there are.
    """
    environment = os.environ if environment is None else environment
    platform = experiment.hardware.platform
    counts = {"tpu": 0, "gpu": 0}
    if platform in ("auto", "tpu"):
        counts["tpu"] = _tpus(root)
    if platform in ("auto", "gpu"):
        counts["gpu"] = len(visible_gpus(root, environment))
    if platform in counts and not counts[platform]:
        words = {"tpu": TPU_WORDS, "gpu": GPU_WORDS}[platform]
        raise PlanError(
            f"hardware.platform={platform} (hardware={experiment.hardware.name}), but no {words} was found on this machine. "
            f"Set hardware=this to use what it has, or hardware.platform=cpu to simulate devices on its processor."
        )
    chosen = next((name for name, count in counts.items() if count), "cpu")
    mesh = _mesh(experiment, counts.get(chosen, SIMULATED_DEVICES))
    if chosen == "cpu":
        devices = mesh.devices if mesh else SIMULATED_DEVICES
        memory = _given_memory(experiment) or host_memory_bytes(root) // devices
        return Found("cpu", SIMULATED_DEVICES, devices > 1, memory)
    _check_enough(mesh, chosen, counts[chosen])
    real_memory = _given_memory(experiment) or (_gpu_memory_bytes() if chosen == "gpu" else None)
    return Found(chosen, counts[chosen], False, real_memory)


def assume(experiment: Experiment) -> Found:
    """What a plan alone may count on: this machine's devices, or those of the hardware that the config names, here or not.

    Of hardware that is not here there are as many devices as the mesh asks for, else one host of it.
    """
    hardware = experiment.hardware
    if hardware.platform not in ("gpu", "tpu"):
        return find(experiment)
    given = [size for axis in MESH_AXES if (size := getattr(experiment.mesh, axis)) is not None]
    devices = experiment.mesh.devices or math.prod(given) or 1
    return Found(hardware.platform, max(devices, hardware.devices_per_host or 1), False, _given_memory(experiment))


def visible_gpus(root: Path, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that CUDA would show, as CUDA_VISIBLE_DEVICES names them: indices, or UUIDs where it says so."""
    count = sum(path.name[6:].isdigit() for path in (root / "dev").glob("nvidia[0-9]*"))
    if not count:
        return ()
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return tuple(str(index) for index in range(count))
    visible = []
    for name in (part.strip() for part in named.split(",")):
        is_index = name.lstrip("-").isdigit()
        if not name or (is_index and not 0 <= int(name) < count):
            break  # CUDA ignores everything from the first wrong entry on
        visible.append(name)
    return tuple(visible)


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this machine's processes may use together: its own, or the control group's limit if that is less."""
    line = next(line for line in (root / "proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    limits = [int(line.split()[1]) * 1024]
    for limit in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = root / limit
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def _tpus(root: Path) -> int:
    devices = 0
    for folder in (root / "sys/bus/pci/devices").glob("*"):
        vendor, device = (_word(folder / name) for name in ("vendor", "device"))
        if vendor == "0x1ae0":
            devices += TPU_DEVICES_PER_CHIP.get(device, 0)
    return devices


def _word(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _mesh(experiment: Experiment, found: int) -> Mesh | None:
    """The mesh that the plan will have; None where the config is at fault, which planning explains better."""
    if sorted(experiment.mesh.order) != sorted(MESH_AXES):
        return None
    try:
        rules = rules_from(experiment.sharding, experiment.mesh.order)
        return auto.resolve(experiment.mesh, rules, found, experiment.hardware.devices_per_host)
    except LabError:
        return None


def _check_enough(mesh: Mesh | None, platform: str, count: int) -> None:
    if mesh and mesh.devices > count:
        raise PlanError(
            f"the mesh has {mesh.devices} devices, but this machine has {count} of platform {platform}. Set "
            f"mesh.devices={count}, or hardware.platform=cpu to simulate devices on its processor."
        )


def _given_memory(experiment: Experiment) -> int | None:
    given = experiment.hardware.memory_gib
    return None if given is None else int(given * 2**30)


def _gpu_memory_bytes() -> int | None:
    """Memory of the smallest GPU, or None where `nvidia-smi` cannot say."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    query = [command, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        return min(int(line) for line in answer.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
