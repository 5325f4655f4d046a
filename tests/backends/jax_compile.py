"""Compiles the train step of each experiment given as a line of JSON (arguments of `experiments.plain`), on 32 simulated devices.

Writes a line for each: what its result would lie like, what a device is given, and how often each collective is called.
"""

import collections
import json
import re
import sys

from cases import ragged_batches
from experiments import experiment

from scaling_lab.backends.contract import Job
from scaling_lab.backends.jax.train import open_session
from scaling_lab.backends.rows import local_batch
from scaling_lab.plan.plan import Found, make_plan

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def main() -> None:
    """Every line of standard input."""
    for line in sys.stdin:
        asked = experiment(**json.loads(line))
        plan = make_plan(asked, Found("cpu", 32, True, 24 << 30))
        job = Job(asked, plan, 0, "127.0.0.1:0")
        session = open_session(job)
        tokens, labels = ragged_batches(rows=asked.workload.global_batch, sequence=asked.workload.sequence)[0]
        session.prepare(local_batch(job, tokens, labels))
        held = session.bytes_per_device()
        text = session._compiled.as_text()
        counts = collections.Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text))
        found = {
            "devices": plan.mesh.devices,
            "layouts": session.layouts() == {p.parameter.name: p.weights for p in plan.parameters},
            "held": {name: held[name] for name in ("parameters", "optimizer")},
            "collectives": counts,
        }
        session.close()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
