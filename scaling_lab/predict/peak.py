"""The peak that MFU is measured against: published for an accelerator, for a CPU the best matrix product measured here.

Owns the measurement's cache, one file per machine and set of libraries. The libraries run in processes of their own: this one
imports none of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Plan

#: Which module measures each library's matrix product; each prints one JSON line.
MEASURED_BY = {
    "numpy": "scaling_lab.predict.products",
    "jax": "scaling_lab.backends.jax.peak",
    "torch": "scaling_lab.backends.torch.peak",
}
LIMIT_S = 60.0


@dataclass(frozen=True)
class MachinePeak:
    """Best matrix-product FLOP/s of the whole processor in a dtype, and each library's own (None: it has no such product).

    load: how many other processes wanted a core while it was measured (1-minute load average before the start)
    """

    dtype: str
    flops_per_s: float
    library: str
    libraries: dict[str, float | None]
    measured_at: str
    load: float
    cache: str


@dataclass(frozen=True)
class DevicePeak:
    """Peak FLOP/s of one device. None is unknown.

    of_library_flops_per_s_per_device: what the backend's own library reached; source: in words, for tables
    """

    dtype: str
    flops_per_s_per_device: float | None
    of_library_flops_per_s_per_device: float | None
    source: str
    machine: MachinePeak | None


def device_peak(
    experiment: Experiment, plan: Plan, cache_folder: Path, say: Callable[[str], None] = lambda text: None
) -> DevicePeak:
    """The peak of one device in the compute dtype. A CPU's is the machine's, divided among the devices that share it.

    say: told before a measurement starts, which takes a few seconds and wants an idle machine
    """
    dtype = experiment.workload.precision.compute
    if plan.platform != "cpu":
        return _published(experiment, dtype)
    machine = machine_peak(cache_folder, dtype, say)
    if machine is None:
        return DevicePeak(dtype, None, None, "unknown: no library could multiply matrices", None)
    sharing = plan.mesh.devices if experiment.cluster.name == "local" else plan.mesh.devices_per_host
    own = machine.libraries.get(experiment.backend.name)
    source = f"best {dtype} matrix product on this machine ({machine.library})"
    source += f" / {sharing} devices that share it" if sharing > 1 else ""
    return DevicePeak(dtype, machine.flops_per_s / sharing, own and own / sharing, source, machine)


def _published(experiment: Experiment, dtype: str) -> DevicePeak:
    """The hardware's peak as its config gives it: 16-bit products by `peak_bf16_tflops`."""
    hardware = experiment.hardware
    key = "peak_f32_tflops" if dtype == "float32" else "peak_bf16_tflops"
    tflops = getattr(hardware, key)
    if tflops is None:
        return DevicePeak(dtype, None, None, f"unknown: hardware.{key} of `{hardware.name}` is null", None)
    return DevicePeak(dtype, tflops * 1e12, None, f"hardware `{hardware.name}`, {key}", None)


def machine_peak(
    cache_folder: Path, dtype: str, say: Callable[[str], None] = lambda text: None, load: float | None = None
) -> MachinePeak | None:
    """The machine's peak: from the cache, else measured once (a few seconds). None where no library could.

    One that was measured while others wanted the cores is measured again by the first run that finds the machine quiet.
    load: other work, default the 1-minute load average. Two runs that start together measure one after the other, so that
    neither disturbs the other. A folder that cannot be written costs only the cache.
    """
    path = cache_folder / f"peak-{dtype}-{_machine_digest()}.json"
    with _alone(cache_folder):
        load = os.getloadavg()[0] if load is None else load
        cached = _read(path)
        if cached is not None and (_quiet(load) <= _quiet(cached.load)):
            return cached
        say(f"measuring this machine's {dtype} matrix-product peak (once; kept in {path})")
        measured = _measure(dtype, str(path), load)
        if measured is not None:
            _write(path, measured)
        return measured


def _quiet(load: float) -> bool:
    """Whether less than half of the processor was wanted by others."""
    return load < len(os.sched_getaffinity(0)) / 2


def _measure(dtype: str, cache: str, load: float) -> MachinePeak | None:
    libraries = {library: _ask(module, dtype) for library, module in MEASURED_BY.items()}
    known = {library: rate for library, rate in libraries.items() if rate}
    if not known:
        return None
    best = max(known, key=lambda library: known[library])
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return MachinePeak(dtype, known[best], best, libraries, now, round(load, 2), cache)


def _ask(module: str, dtype: str) -> float | None:
    """FLOP/s as the measuring process prints it; None where the library is missing or fails."""
    root = str(Path(__file__).parents[2])
    code = "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_module(sys.argv.pop(2), run_name='__main__')"
    command = [sys.executable, "-P", "-c", code, root, module, dtype]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=True)
        return json.loads(done.stdout.splitlines()[-1])["flops_per_s"]
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, KeyError):
        return None


def _machine_digest() -> str:
    """What the measurement depends on: processor, cores that may be used, versions of the libraries."""
    facts = [cpu_model(), len(os.sched_getaffinity(0)), platform.python_version()]
    facts += [(library, _version(library)) for library in MEASURED_BY]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's name, as Linux knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One measurement at a time on this machine; without a writable folder nothing can be promised."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "peak.lock", "w")  # noqa: SIM115 - closed below, which also unlocks
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> MachinePeak | None:
    try:
        return MachinePeak(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, peak: MachinePeak) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(asdict(peak), indent=1) + "\n")
        os.replace(partial, path)


def to_plain(peak: DevicePeak) -> dict[str, Any]:
    """The peak as result.json keeps it under `environment.peak`."""
    return asdict(peak)
