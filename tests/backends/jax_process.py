"""One process of a job of several, for `test_jax_processes`: INDEX ADDRESS TABLE writes what it computed to standard output."""

import json
import sys

import numpy as np
from cases import choices, ragged_batches
from experiments import FOUND, experiment

from scaling_lab.backends.contract import Job
from scaling_lab.backends.jax.train import open_session
from scaling_lab.backends.rows import local_batch
from scaling_lab.plan.plan import make_plan


def main(index: str, address: str, table: str) -> None:
    """Three steps on this process's rows."""
    hosts = {"mesh.hosts": 2, "cluster.startup_limit_s": 60.0}
    asked = experiment(**choices("llama", table, "jax", 2, mesh="auto", **hosts))
    job = Job(asked, make_plan(asked, FOUND), int(index), address)
    session = open_session(job)
    batches = [local_batch(job, tokens, labels) for tokens, labels in ragged_batches()]
    found = {
        "rows": job.rows,
        "devices": session.device_facts()["count"],
        "metrics": [session.step(batch).result() for batch in batches],
        "weights": {name: float(np.abs(value, dtype=np.float64).sum()) for name, value in session.weights().items()},
        "evaluation": session.evaluate(type(batches[0])(batches[0].tokens[:1], batches[0].labels[:1])).result(),
        "digests": session.replica_digests(),
        "compilations": session.compilations(),
    }
    session.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
