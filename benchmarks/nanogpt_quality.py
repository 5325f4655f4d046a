"""Does the lab learn what a plain trainer learns: 2,000 steps of a GPT-2-like model against `reference_nanogpt.py`.

    python benchmarks/nanogpt_quality.py [--steps 2000] [--seeds 0 1] [--backends jax torch]

Same text (Python's own help topics), same sizes and schedule; scored at the end on the whole of the last tenth. The two draw
different weights and windows, so a difference between two seeds of the reference is printed beside.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    options = parser.parse_args()
    losses = {f"reference, seed {seed}": reference(options.steps, seed) for seed in options.seeds}
    for backend in options.backends:
        for seed in options.seeds:
            losses[f"lab {backend}, seed {seed}"] = lab(options.steps, backend, seed)
    first = next(iter(losses.values()))
    for name, loss in losses.items():
        print(f"{name:24s} {loss:.4f} nats per byte  {loss - first:+.4f}", flush=True)


def reference(steps, seed):
    command = [
        sys.executable,
        str(Path(__file__).with_name("reference_nanogpt.py")),
        "--steps",
        str(steps),
        "--seed",
        str(seed),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["val_loss"]


def lab(steps, backend, seed):
    """Validation loss after the last step of `experiment=nanogpt`."""
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "experiment": "nanogpt",
            "backend": backend,
            "tracking": "disabled",
            "workload.steps": steps,
            "workload.seed": seed,
            "data.seed": seed,
            "workload.evaluation": f"{{every: {steps}, batches: null}}",
            "hydra.run.dir": f"{folder}/run",
        }
        command = [sys.executable, "-m", "scaling_lab", "run", *(f"{key}={value}" for key, value in keys.items())]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.loads(Path(folder, "run", "result.json").read_text())
        return result["measured"]["evaluation"][-1]["loss"]


if __name__ == "__main__":
    main()
