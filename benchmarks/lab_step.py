"""The lab's own train step for the benchmarks: composed from conf/ like any run, driven in this process without a coordinator."""

import json
import sys

import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from scaling_lab.__main__ import conf_folder
from scaling_lab.backends.contract import Job
from scaling_lab.backends.rows import local_batch
from scaling_lab.cluster.environment import worker_environment
from scaling_lab.config import experiment_from
from scaling_lab.plan.plan import Found, make_plan

SIZES = {
    "S": {"layers": 4, "embed": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "mlp": 688, "vocab": 8192},
    "tiny": {},  # as in conf/model/tiny.yaml
    "M": {"layers": 8, "embed": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "mlp": 1376, "vocab": 8192},
}


def planned(size, batch, sequence, devices, overrides):
    """Experiment and plan of a benchmark size on simulated devices."""
    sizes = {**SIZES[size], **({"layers": overrides.pop("layers")} if "layers" in overrides else {})}
    keys = {f"model.{name}": value for name, value in sizes.items()}
    keys |= {"workload.global_batch": batch, "workload.sequence": sequence, "data": "synthetic", "tracking": "disabled"}
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose("config", [f"{key}={value}" for key, value in (keys | overrides).items()])
    plain = OmegaConf.to_container(config, resolve=True)
    plain.pop("experiment", None)
    experiment = experiment_from(plain)
    return experiment, make_plan(experiment, Found("cpu", devices, devices > 1, None))


def open_lab(backend, size, batch, sequence, devices=1, **overrides):
    """A prepared session and its batch."""
    sharding = overrides.pop("sharding", "single" if devices == 1 else "data")
    experiment, plan = planned(size, batch, sequence, devices, {"backend": backend, "sharding": sharding, **overrides})
    job = Job(experiment, plan, 0, "127.0.0.1:0")
    if backend == "jax":
        from scaling_lab.backends.jax.train import open_session
    else:
        from scaling_lab.backends.torch.train import open_session
    rows = np.random.default_rng(0).integers(0, experiment.model.vocab, (batch, sequence + 1), dtype=np.int32)
    local = local_batch(job, rows[:, :-1], rows[:, 1:])
    session = open_session(job)
    compile_s = session.prepare(local)
    return session, local, compile_s


def environment(backend, devices=1):
    """What the lab sets for its workers, for a process that is about to be one."""
    overrides = {"backend": backend, "sharding": "single" if devices == 1 else "data"}
    return worker_environment(*planned("S", 8, 256, devices, overrides))


if __name__ == "__main__":
    print(json.dumps(environment(*sys.argv[1:2], *map(int, sys.argv[2:3]))))
