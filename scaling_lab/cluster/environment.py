"""The environment variables of a worker: what the plan needs, merged with what the user has set. Starts nothing.

Order, later wins: the lab's defaults, the user's environment, what the plan fixes (platform, number of devices),
`backend.environment`. XLA_FLAGS is merged flag by flag in the order: lab, `backend.xla_flags`, the user's, the plan's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from scaling_lab.cluster.found import visible_gpus
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Plan

DEVICE_COUNT = "--xla_force_host_platform_device_count"
#: +13 % on a CPU train step (speed_notes.md), but a jaxlib that does not know it aborts: only where it was tried.
CPU_FUSION, CPU_FUSION_JAXLIB = "--xla_cpu_experimental_ynn_fusion_type=dot,reduce", "0.10."

#: One flag as XLA reads it: up to the next blank, unless its value is quoted. Kept as written, quotes included.
FLAG = re.compile(r"""-[^\s=]+(?:=(?:'[^']*'|"[^"]*"|\S*))?""")


def worker_environment(experiment: Experiment, plan: Plan, present: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a worker that differ from `present` (default: this process's environment) or that the plan fixes."""
    return _merge(experiment, plan, os.environ if present is None else present)[0]


def conflicts(experiment: Experiment, plan: Plan, present: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each setting of the user that another one overrides."""
    return _merge(experiment, plan, os.environ if present is None else present)[1]


def host_devices(plan: Plan, host: int) -> dict[str, str]:
    """What narrows one host's processes to that host's real devices."""
    if plan.platform != "gpu":
        return {}
    per_host = plan.mesh.devices_per_host
    visible = visible_gpus(Path("/"), os.environ)
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[host * per_host : (host + 1) * per_host])}


def _merge(experiment: Experiment, plan: Plan, present: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    defaults, fixed = (_jax if experiment.backend.name == "jax" else _torch)(plan)
    defaults["GLIBC_TUNABLES"] = ":".join(f"glibc.malloc.{tunable}" for tunable in _allocator(experiment, plan))
    changes = {name: value for name, value in defaults.items() if name not in present}
    said = [
        f"{name}={present[name]} in the environment is overridden: the plan needs {value!r}"
        for name, value in fixed.items()
        if present.get(name, value) != value
    ]
    changes |= {**_no_proxy(present), **fixed}
    if experiment.backend.name == "jax":
        changes["XLA_FLAGS"], overridden = _xla_flags(experiment, plan, present.get("XLA_FLAGS", ""))
        said += overridden
    for name, value in experiment.backend.environment.items():
        if present.get(name, value) != value:
            said.append(f"{name}={present[name]} in the environment is overridden by backend.environment: {value!r}")
    return {**changes, **experiment.backend.environment}, said


#: gRPC, by which JAX's processes meet, would send even the loopback's connections through a proxy.
LOOPBACK = ("127.0.0.1", "localhost")


def _no_proxy(present: Mapping[str, str]) -> dict[str, str]:
    """The loopback added to what the user wants to reach without a proxy, where there is a proxy at all."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy") for name in present):
        return {}
    names = [name for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy") if name in present] or ["no_proxy"]
    return {name: ",".join(dict.fromkeys([*filter(None, present.get(name, "").split(",")), *LOOPBACK])) for name in names}


def _allocator(experiment: Experiment, plan: Plan) -> list[str]:
    """What glibc's allocator is told; it reads this at process start only.

    Huge pages: +18 % on a JAX CPU step. torch asks for each activation anew: memory that is neither mapped for one tensor nor
    given back when it is freed saves its page faults, +15 % on its CPU step (8 layers x 512, 2,048 tokens, 2 cores).
    """
    keep = ["mmap_threshold=4294967296", "trim_threshold=17179869184"]
    return ["hugetlb=1", *(keep if experiment.backend.name == "torch" and plan.platform == "cpu" else ())]


def _jax(plan: Plan) -> tuple[dict[str, str], dict[str, str]]:
    """Defaults, and what the plan fixes. Naming the platform saves probing for others, and refuses a silent fallback."""
    platforms = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
    # JAX's preemption service would swallow the SIGTERM that ends a process.
    return {"JAX_ENABLE_PREEMPTION_SERVICE": "false"}, {"JAX_PLATFORMS": platforms[plan.platform]}


def _torch(plan: Plan) -> tuple[dict[str, str], dict[str, str]]:
    """The machine's cores are shared by its ranks. gloo binds the loopback: all processes are on this machine."""
    cores = len(os.sched_getaffinity(0))
    threads = str(max(1, cores // plan.processes))
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**dict.fromkeys(names, threads), "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}, {}


def _xla_flags(experiment: Experiment, plan: Plan, users: str) -> tuple[str, list[str]]:
    """The merged flags: one value per flag, the later source wins; and a sentence for each overridden value."""
    layers = [("the lab", _lab_flags(plan)), ("backend.xla_flags", list(experiment.backend.xla_flags))]
    layers.append(("XLA_FLAGS in the environment", _split(users)))
    if plan.platform == "cpu":
        layers.append(("the plan", [f"{DEVICE_COUNT}={plan.devices_per_process}"]))
    flags: dict[str, tuple[str, str]] = {}
    said = []
    for source, texts in layers:
        for text in texts:
            name = text.partition("=")[0]
            source_before, before = flags.pop(name, (source, text))
            if before != text:
                said.append(f"{before} ({source_before}) is overridden by {text} ({source})")
            flags[name] = (source, text)
    return " ".join(text for _, text in flags.values()), said


def _lab_flags(plan: Plan) -> list[str]:
    tried = metadata.version("jaxlib").startswith(CPU_FUSION_JAXLIB)
    return [CPU_FUSION] if plan.platform == "cpu" and tried else []


def _split(users: str) -> list[str]:
    """The user's flags; a text that does not begin with a dash names a file of flags, as XLA reads it."""
    users = users.strip()
    if users and not users.startswith("-") and Path(users).is_file():
        users = Path(users).read_text()
    return FLAG.findall(users)
