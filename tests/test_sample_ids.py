"""Which samples the processes of a job read: together each batch once, whatever the table, the mesh and the backend."""

from pathlib import Path

import pytest
from experiments import CONF, FOUND, experiment

from scaling_lab.backends.contract import Job
from scaling_lab.data import open_source
from scaling_lab.plan.plan import make_plan

TABLES = sorted(path.stem for path in Path(CONF / "sharding").glob("*.yaml"))


@pytest.fixture(scope="module")
def source():
    asked = experiment(data="synthetic")
    return open_source(asked.data, asked.model.vocab, asked.workload.sequence)


def ids_of(job, source, step):
    """Sample ids that a process reads in a step, by row of the global batch."""
    split = job.plan.batch
    rows = [m * split.microbatch + row for m in range(split.accumulation) for row in job.rows]
    read = source.train_rows(step, rows, split.accumulation * split.microbatch)
    return dict(zip(rows, read.samples.tolist(), strict=True))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("table", TABLES)
def test_every_batch_is_read_whole_and_each_sample_once(table, backend, accumulation, source):
    mesh = "data2_fsdp4" if table == "hsdp" else "auto"
    asked = experiment(sharding=table, backend=backend, mesh=mesh, **{"workload.accumulation": accumulation})
    plan = make_plan(asked, FOUND)
    whole = source.train_rows(3, range(16), 16).samples.tolist()
    assert len(set(whole)) == 16
    found: dict[int, int] = {}
    readers: dict[int, int] = {}
    for process in range(plan.processes):
        for row, sample in ids_of(Job(asked, plan, process, ""), source, 3).items():
            assert found.setdefault(row, sample) == sample, "processes that share rows read the same samples"
            readers[row] = readers.get(row, 0) + 1
    assert [found[row] for row in range(16)] == whole
    # A row is read by one process of each group that computes it together: all processes / parts of the batch.
    copies = max(1, plan.processes // plan.batch.parts)
    assert set(readers.values()) == {copies}
