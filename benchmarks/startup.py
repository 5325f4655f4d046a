"""From the shell to the first finished step: the default JAX job against a bare script that compiles the same step.

    python benchmarks/startup.py [--rounds 5] [lab overrides such as model.layers=8]

The bare script imports jax, flax and optax, makes the very same step from a finished run's plan, compiles it and runs it once: no
Hydra, no plan, no data, no processes, no tracking, no console. The lab's run does everything that it does by default; only the
machine's peak is cached beforehand. The two alternate; the figure is the median difference of a round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import sys, jax, flax, optax
import numpy as np
from pathlib import Path
from scaling_lab.backends.contract import Batch, Job
from scaling_lab.backends.jax.train import open_session
from scaling_lab.config import plan_from
from scaling_lab.results.folder import read_experiment
folder = Path(sys.argv[1])
plan = plan_from((folder / "plan.json").read_text())
experiment = read_experiment(folder)
job = Job(experiment, plan, 0, "")
rows = np.zeros((plan.batch.accumulation, len(job.rows), experiment.workload.sequence), np.int32)
session = open_session(job)
print(session.step(Batch(rows, rows)).result()["loss"], flush=True)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        first, reference = lab(folder, "first", overrides)  # fills the caches of the corpus and of the peak
        rounds = [(bare(reference), lab(folder, str(k), overrides)[0]) for k in range(options.rounds)]
    print(f"first run {first:.2f} s; then, load {os.getloadavg()[0]:.1f}:")
    for name, times in zip(("bare script", "scaling-lab run"), zip(*rounds, strict=True), strict=True):
        print(f"  {name:16s} median {statistics.median(times):.2f} s   {' '.join(f'{t:.2f}' for t in times)}")
    print(f"  difference       median {statistics.median(b - a for a, b in rounds):.2f} s")


def bare(reference):
    """Seconds from starting the bare script to the loss of its first step."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    begin = time.time()
    with subprocess.Popen([sys.executable, "-c", BARE, str(reference)], env=env, stdout=subprocess.PIPE, text=True) as script:
        float(script.stdout.readline())
        return time.time() - begin


def lab(folder, name, overrides):
    """Seconds from starting the command to the record of its first step, and its run folder."""
    target = Path(folder, name)
    command = [sys.executable, "-m", "scaling_lab", "run", f"hydra.run.dir={target}", "workload.steps=6", *overrides]
    begin = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (target / "records.jsonl").read_text().splitlines()]
    return next(r["time"] for r in records if r["kind"] == "step") - begin, target


if __name__ == "__main__":
    main()
