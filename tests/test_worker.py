"""The timed loop: its order of work, its clock and its records, around a session whose device is a thread that sleeps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from experiments import CONF, FOUND, experiment
from timed_session import Device, Session

from scaling_lab import worker
from scaling_lab.backends.contract import Job
from scaling_lab.backends.rows import stored_batch
from scaling_lab.data import open_source
from scaling_lab.errors import ConfigError, WorkerError
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.plan import make_plan


def job_of(process: int = 0, **keys: Any) -> Job:
    """One device, 4 rows of 8 synthetic tokens, 4 steps of which 1 is untimed, no evaluation."""
    asked = experiment(
        **{
            "data.source": "synthetic",
            "mesh.devices": 1,
            "workload.global_batch": 4,
            "workload.sequence": 8,
            "workload.steps": 4,
            "workload.untimed_steps": 1,
            "workload.evaluation": {"every": 0, "batches": None},
            **keys,
        }
    )
    return Job(asked, make_plan(asked, FOUND), process, "127.0.0.1:1")


def source_of(job: Job) -> Any:
    return open_source(job.experiment.data, job.experiment.model.vocab, job.experiment.workload.sequence, None)


def run(job: Job, session: Session, started: float | None = None) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    worker.run(job, source_of(job), lambda job: session, records.append, time.time() if started is None else started)
    return records


def of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def test_one_step_is_kept_in_flight_on_an_asynchronous_device():
    session = Session(job := job_of(), Device(0.01))
    run(job, session)
    expected = ["prepare", "step 1", "step 2", "result 1", "step 3", "result 2", "step 4", "result 3", "result 4", "close"]
    assert session.calls == expected


def test_nothing_is_in_flight_where_a_step_returns_when_it_is_done():
    session = Session(job := job_of())
    run(job, session)
    steps = [call for step in range(1, 5) for call in (f"step {step}", f"result {step}")]
    assert session.calls == ["prepare", *steps, "close"]


def test_evaluation_waits_for_the_steps_before_it_and_the_steps_after_it_wait_for_it():
    session = Session(job := job_of(**{"workload.evaluation": {"every": 2, "batches": 1}}), Device(0.01))
    run(job, session)
    middle = session.calls[session.calls.index("step 2") : session.calls.index("step 4")]
    assert middle == ["step 2", "result 1", "result 2", "evaluate", "result evaluation", "step 3"]


@pytest.mark.parametrize(("every", "steps", "expected"), [(0, 4, []), (2, 4, [2, 4]), (3, 4, [3, 4]), (10, 4, [4])])
def test_evaluation_comes_every_so_many_steps_and_at_the_end(every, steps, expected):
    job = job_of(**{"workload.steps": steps, "workload.evaluation": {"every": every, "batches": 1}})
    assert [record["step"] for record in of_kind(run(job, Session(job)), "evaluation")] == expected


@pytest.mark.parametrize("evaluation", [{"every": 0, "batches": None}, {"every": 2, "batches": 3}])
@pytest.mark.parametrize("device_s", [None, 0.02])
def test_the_parts_add_up_to_the_wall_time_and_the_step_times_to_their_parts(evaluation, device_s):
    job = job_of(**{"workload.evaluation": evaluation})
    started = time.time() - 0.5  # the process began half a second ago
    records = run(job, Session(job, device_s and Device(device_s)), started)
    done, steps = records[-1], of_kind(records, "step")
    parts = done["time_parts_s"]
    assert tuple(parts) == worker.PARTS
    assert sum(parts.values()) == pytest.approx(done["wall_time_s"], rel=1e-6)
    assert done["wall_time_s"] == pytest.approx(time.time() - started, abs=0.2)
    assert sum(s["step_time_s"] for s in steps if s["timed"]) == pytest.approx(parts["timed_steps"])
    assert sum(s["step_time_s"] for s in steps if not s["timed"]) == pytest.approx(parts["untimed_steps"])
    assert sum(e["time_s"] for e in of_kind(records, "evaluation")) == pytest.approx(parts["evaluation"])
    assert parts["compile"] == pytest.approx(0.015)
    assert parts["startup"] >= 0.5


def test_a_steps_time_is_the_devices_and_not_the_dispatchs():
    job = job_of(**{"workload.steps": 10})
    times = sorted(record["step_time_s"] for record in of_kind(run(job, Session(job, Device(0.05))), "step"))
    assert sum(times) >= 10 * 0.05
    assert times[len(times) // 2] > 0.03, "half of the steps show only their enqueueing"


def test_a_step_record_counts_tokens_by_the_global_batch_and_valid_ones_apart():
    job = job_of(**{"workload.accumulation": 2})
    steps = of_kind(run(job, Session(job)), "step")
    assert [s["step"] for s in steps] == [1, 2, 3, 4]
    assert [s["timed"] for s in steps] == [False, True, True, True]
    assert [s["tokens"] for s in steps] == [32] * 4  # 4 rows x 8 tokens, whatever the accumulation
    assert [s["tokens_seen"] for s in steps] == [32, 64, 96, 128]
    assert [s["valid_tokens"] for s in steps] == [7] * 4
    assert all(s["loss"] == 2.0 and s["lr"] == 0.5 and s["cpu_time_s"] >= 0 for s in steps)


@pytest.mark.parametrize("process", [0, 1])
def test_every_process_tells_its_own_processor_time_of_a_timed_step(process):
    job = job_of(process, backend="torch", **{"mesh.devices": 4})
    records = run(job, Session(job))
    timed = [s["cpu_time_s"] for s in of_kind(records, "step") if s["timed"]]
    assert len(timed) == 3
    assert records[-1]["cpu_time_per_step_s"] == sorted(timed)[1]


def test_a_step_record_has_what_routers_report_and_only_where_they_do():
    class Mixture(Session):
        def step(self, batch):
            pending = super().step(batch)
            pending.values |= {"balance_loss": 1.5, "z_loss": 2.5, "dropped_tokens": 3.0}
            return pending

    names = {"balance_loss", "z_loss", "dropped_tokens"}
    steps = of_kind(run(job := job_of(), Mixture(job)), "step")
    assert all(s["balance_loss"] == 1.5 and s["z_loss"] == 2.5 and s["dropped_tokens"] == 3 for s in steps)
    assert not any(names & s.keys() for s in of_kind(run(job, Session(job)), "step"))


def test_validation_loss_weighs_every_token_alike():
    job = job_of(**{"data.ragged": True, "workload.evaluation": {"every": 4, "batches": 3}})
    session = Session(job)
    [record] = of_kind(run(job, session), "evaluation")
    labels = source_of(job).validation_rows(0, range(12), 12).labels  # the 3 batches of 4 rows, as one
    assert record["tokens"] == int((labels >= 0).sum())
    assert record["loss"] == pytest.approx(labels[labels >= 0].mean())
    means = [batch.labels[batch.labels >= 0].mean() for batch in session.evaluated]
    assert record["loss"] != pytest.approx(np.mean(means)), "rows of equal length would hide a mean of means"


@pytest.mark.parametrize("batches", [1, 2, None])
def test_the_same_rows_are_held_out_for_every_accumulation(tmp_path, batches):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(1, 101)) * 2)
    # Tokens 150 to 199 hold 49 labels in 7 rows of 8, the last one short: a batch of 4 rows, and one of 3.
    keys = {"data.source": "text", "data.path": str(path), "data.validation_fraction": 0.25}
    keys |= {"workload.evaluation": {"every": 4, "batches": batches}, "workload.steps": 2, "workload.untimed_steps": 0}
    told = {}
    for accumulation in (1, 2, 4):
        session = Session(job := job_of(**keys, **{"workload.accumulation": accumulation}))
        [record] = of_kind(run(job, session), "evaluation")
        read = np.concatenate([batch.tokens.reshape(-1, 8) for batch in session.evaluated])
        held = read[(read != 0).any(axis=1)]
        told[accumulation] = (record["tokens"], record["loss"], record["batches"], held.tolist())
        assert all(batch.tokens.shape == (1, 4 // accumulation, 8) for batch in session.evaluated)
        assert all((batch.labels >= 0).any() for batch in session.evaluated), "nothing past the end is computed"
    assert told[1] == told[2] == told[4]
    assert told[1][0] == (32 if batches == 1 else 49)


def test_validation_covers_the_whole_split_where_no_number_of_batches_is_given(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    data = {"data.source": "text", "data.path": str(path), "data.validation_fraction": 0.5}
    job = job_of(**data, **{"workload.evaluation": {"every": 4, "batches": None}})
    [record] = of_kind(run(job, Session(job)), "evaluation")
    # Tokens 50 to 99 hold 49 labels, 51 to 99: 2 batches of 4 rows x 8, the second one filled up with ignored rows.
    assert (record["tokens"], record["batches"]) == (49, 2)
    assert record["loss"] == pytest.approx(75.0)


def test_a_validation_split_that_is_not_there_is_refused_before_anything_is_built():
    job = job_of(**{"data.validation_fraction": 0.0, "workload.evaluation": {"every": 2, "batches": 1}})
    session = Session(job)
    with pytest.raises(ConfigError, match=r"workload.evaluation.every=2, but data.source=synthetic has no validation split"):
        run(job, session)
    assert session.calls == []


def test_microbatches_are_consecutive_parts_of_the_global_batch():
    job = job_of(**{"workload.accumulation": 2})
    session = Session(job)
    run(job, session)
    rows = source_of(job).train_rows(1, range(4), 4)
    np.testing.assert_array_equal(session.batches[1].tokens, rows.tokens.reshape(2, 2, 8))
    np.testing.assert_array_equal(session.batches[1].labels, rows.labels.reshape(2, 2, 8))


TABLES = sorted(path.stem for path in (CONF / "sharding").glob("*.yaml"))


@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("table", TABLES)
def test_the_processes_of_every_layout_read_each_sample_of_a_batch_and_none_that_is_not_in_it(table, backend):
    keys = {"mesh.devices": None, "workload.global_batch": 16, "workload.accumulation": 2, "data.record_samples": True}
    first = job_of(sharding=table, backend=backend, **keys)
    session = Session(first)
    recorded = [set(s["samples"]) for s in of_kind(run(first, session), "step")]
    assert [len(samples) for samples in recorded] == [16] * 4
    assert len(set().union(*recorded)) == 64, "no sample comes twice"
    read: list[bytes] = []
    for process in range(first.plan.processes):
        job = Job(first.experiment, first.plan, process, first.address)
        batch = worker._batch(job, source_of(job), 1)
        assert batch.tokens.shape == (2, len(job.rows), 8)
        read += [row.tobytes() for row in batch.tokens.reshape(-1, 8)]
    whole = source_of(first).train_rows(0, range(16), 16)
    assert set(read) == {row.tobytes() for row in stored_batch(first, whole.tokens, whole.labels, None).tokens}
    assert recorded[0] == set(whole.samples.tolist())


@pytest.mark.parametrize(("process", "asked", "given"), [(0, True, True), (1, True, False), (0, False, False)])
def test_only_process_0_works_out_the_sample_ids_and_only_if_asked(process, asked, given):
    job = job_of(process, backend="torch", **{"mesh.devices": 4, "data.record_samples": asked})
    assert ["samples" in record for record in of_kind(run(job, Session(job)), "step")] == [given] * 4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_recorded_and_ends_the_run_naming_the_step(value):
    job = job_of()
    records: list[dict[str, Any]] = []
    with pytest.raises(WorkerError, match=rf"loss is {value} at step 2\. Try a smaller workload.optimizer.lr") as caught:
        worker.run(job, source_of(job), lambda job: Session(job, None, {2: value}), records.append, time.time())
    assert caught.value.kind == "diverged"
    assert [s["step"] for s in of_kind(records, "step")] == [1, 2]


def test_a_weight_that_lies_otherwise_than_planned_ends_the_run_naming_both_layouts():
    job = job_of(backend="torch", **{"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.devices": 4})
    session = Session(job)
    name = next(n for n, layout in session.found.items() if "fsdp" in layout.axes and "tensor" in layout.axes)
    planned, rank = session.found[name], len(session.found[name].dims)
    session.found = {**session.found, name: Layout(((),) * rank)}
    with pytest.raises(WorkerError, match="weights do not lie as planned") as caught:
        run(job, session)
    assert caught.value.kind == "layout"
    assert f"{name}: planned {worker._words(planned)}, found [{', '.join(['whole'] * rank)}]" in str(caught.value)


def test_the_order_of_axes_within_a_dim_is_the_backends():
    job = job_of(backend="torch", **{"mesh.fsdp": 2, "mesh.tensor": 2, "mesh.devices": 4})
    planned = job.plan.parameters[0].weights
    name = job.plan.parameters[0].parameter.name
    turned = {p.parameter.name: p.weights for p in job.plan.parameters} | {
        name: Layout(tuple(tuple(reversed(axes)) for axes in planned.dims))
    }
    assert worker.layout_differences(job.plan, turned) == []


def test_a_weight_that_is_missing_or_not_in_the_plan_is_a_difference():
    job = job_of()
    found = {p.parameter.name: p.weights for p in job.plan.parameters}
    name = next(iter(found))
    found["extra"] = found.pop(name)
    lines = worker.layout_differences(job.plan, found)
    assert lines[0].startswith(f"{name}: planned ")
    assert lines[1] == "extra: found, but not in the plan"


def test_a_second_compilation_of_the_step_is_an_error():
    session = Session(job := job_of())
    session.compiled = 2
    with pytest.raises(WorkerError, match="compiled 2 times, not once") as caught:
        run(job, session)
    assert caught.value.kind == "recompiled"


def test_a_job_of_no_steps_prepares_and_ends():
    session = Session(job := job_of(**{"workload.steps": 0, "workload.untimed_steps": 0}))
    records = run(job, session)
    assert session.calls == ["prepare", "close"]
    assert records[-1]["kind"] == "done"


def test_the_last_record_says_what_the_coordinator_needs():
    session = Session(job := job_of())
    done = run(job, session)[-1]
    assert done["layouts"] == {n: [list(axes) for axes in layout.dims] for n, layout in session.found.items()}
    assert done["layouts_equal_plan"] is True
    assert done["corpus"]["source"] == "synthetic"
    assert done["compilations"] == 1
    assert done["resident_bytes"] > 10 * 2**20
