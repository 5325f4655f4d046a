"""Real runs of the lab for the benchmarks: the command that a person types, in a process of its own, and the result.json it leaves."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scaling_lab.report.runs import load_results

QUIET = {"tracking": "disabled"}


def run(**keys):
    """The result of one run; its message ends this script where it fails. A dot in a key is written as two underscores."""
    with tempfile.TemporaryDirectory() as folder:
        _lab(["run"], keys | {"hydra__run__dir": f"{folder}/run"})
        return json.loads(Path(folder, "run", "result.json").read_text())


def train(backend, model, sequence, steps, *, rows=1, untimed=1, **keys):
    """The result of a run on synthetic tokens without evaluation. model: its sizes; keys as for `run`, where it lies among them."""
    sizes = {f"model__{name}": size for name, size in model.items()}
    workload = {"sequence": sequence, "global_batch": rows, "steps": steps, "untimed_steps": untimed, "evaluation__every": 0}
    return run(
        backend=backend, data="synthetic", **sizes, **{f"workload__{name}": value for name, value in workload.items()}, **keys
    )


def resident_over(result, short):
    """Bytes of a device that a run had resident at most over what another one had."""
    return (result["measured"]["resident_bytes"] - short["measured"]["resident_bytes"]) / result["plan"]["devices"]


def sweep(*words, **keys):
    """The results of a sweep, in its order, also of jobs that failed."""
    with tempfile.TemporaryDirectory() as folder:
        _lab(["run", "-m", *words], keys | {"hydra__sweep__dir": f"{folder}/sweep"}, accepted=(0, 1))
        return [found.result for found in load_results([Path(folder, "sweep")])]


def _lab(words, keys, accepted=(0,)):
    written = [f"{key.replace('__', '.')}={value}" for key, value in (QUIET | keys).items()]
    command = [sys.executable, "-m", "scaling_lab", *words, *written]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode not in accepted:
        sys.exit(f"{' '.join(command[2:])}\n{done.stderr[-3000:]}")


def machine(result):
    """The machine and the versions of a result, in words."""
    cpu, versions = result["environment"]["cpu"], result["environment"]["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("jax", "torch") if versions.get(name))
    return f"{cpu['model']}, {cpu['usable_cores']} cores, Python {result['environment']['python']}, {named}"
