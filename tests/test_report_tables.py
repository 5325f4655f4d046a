"""Runs side by side: equal losses are seen to be equal, and nothing that failed or is missing is passed over."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from finished_runs import environment, records, result, routed, run_folder, staged
from rich.console import Console

from scaling_lab.errors import ConfigError, PlanError, WorkerError
from scaling_lab.report.agreement import agreements
from scaling_lab.report.console import open_console, show_table
from scaling_lab.report.runs import Run, load_results
from scaling_lab.report.tables import caption, cells, columns, csv_text, markdown, remarks, write_sweep

LOSSES = (5.5, 5.0, 4.5, 4.0, 3.5, 3.0)


def run(name: str, found: dict | None, problem: str = "") -> Run:
    return Run(Path(f"/sweep/{name}"), found, problem)


def titles(runs: list[Run]) -> list[str]:
    return [column.title for column in columns(runs)]


def column(runs: list[Run], title: str) -> list[str]:
    place = titles(runs).index(title)
    return [row[place] for row in cells(runs)]


def same_loss(*results: dict | None) -> list[str]:
    return column([run(str(index), found) for index, found in enumerate(results)], "same loss")


def test_losses_equal_to_rounding_are_said_to_be_equal() -> None:
    off = 1 + 9e-6
    other = result({"sharding": "data", "backend": "torch"}, records=records(tuple(loss * off for loss in LOSSES)))
    assert same_loss(result(), other) == ["reference", "yes, all 6 steps"]


def test_losses_that_drift_later_are_equal_for_as_long_as_they_are() -> None:
    other = result({"sharding": "data"}, records=records((5.5, 5.0, 4.5, 4.0, 3.5 * (1 + 1e-4), 3.0)))
    assert same_loss(result(), other) == ["reference", "first 4 of 6 steps"]


def test_losses_that_differ_from_the_start_are_said_to_differ_and_by_how_much() -> None:
    other = result({"sharding": "data"}, records=records((5.5 * (1 + 2e-5), *LOSSES[1:])))
    assert same_loss(result(), other) == ["reference", "NO, from step 1 (up to 2.0e-05)"]


def test_a_gradient_norm_that_differs_is_enough() -> None:
    told = records()
    step = next(record for record in told if record.get("step") == 2)
    step["grad_norm"] *= 1.01
    assert same_loss(result(), result({"sharding": "data"}, records=told)) == ["reference", "NO, from step 2 (up to 1.0e-02)"]


@pytest.mark.parametrize("key", ["workload.seed", "workload.global_batch", "model.mlp", "data.seed"])
def test_runs_of_different_tasks_are_not_compared(key: str) -> None:
    sizes = {"workload.seed": 1, "workload.global_batch": 32, "model.mlp": 512, "data.seed": 1}
    assert same_loss(result(), result({key: sizes[key]})) == ["reference", "reference"]


def test_runs_that_must_learn_the_same_are_compared() -> None:
    free = [{"workload.accumulation": 2}, {"workload.remat": "full"}, {"workload.untimed_steps": 1}, {"mesh.hosts": 2}]
    free.append({"workload.context": {"strategy": "ring", "zigzag": False}})
    assert same_loss(result(), *map(result, free)) == ["reference", *["yes, all 6 steps"] * 5]


def test_corpora_that_differ_are_not_compared() -> None:
    told = [{**record, "corpus": {"sha256": "other"}} if record["kind"] == "done" else record for record in records()]
    assert same_loss(result(), result(records=told)) == ["reference", "reference"]


def test_results_of_a_lab_that_knew_fewer_keys_are_compared() -> None:
    old = result()
    keys = (
        "data.pack",
        "data.document_end",
        "workload.context",
        "workload.loss_chunks",
        "model.vocab_multiple",
        "model.latent",
    )
    for group, _, key in (name.partition(".") for name in keys):
        del old["experiment"][group][key]
    told = [{**r, "corpus": {**r["corpus"], "documents": 7}} if r["kind"] == "done" else r for r in records()]
    assert same_loss(old, result({"sharding": "data"}, records=told)) == ["reference", "yes, all 6 steps"]


def test_a_held_out_corpus_that_differs_is_not_compared() -> None:
    told = [
        {**r, "corpus": {**r["corpus"], "validation": {"sha256": "other"}}} if r["kind"] == "done" else r for r in records()
    ]
    assert same_loss(result(), result(records=told)) == ["reference", "reference"]


@pytest.mark.parametrize("key", ["compute", "params", "reduce"])
def test_losses_of_narrow_dtypes_are_not_judged_but_their_distance_is_told(key: str) -> None:
    narrow = {f"workload.precision.{key}": "bfloat16"}
    apart = records((5.5 * (1 + 2.1e-4), *LOSSES[1:]))
    told = [result(narrow), result({**narrow, "sharding": "data"}, records=apart), result({**narrow, "backend": "torch"})]
    assert same_loss(*told) == ["reference", "bfloat16: up to 2.1e-04 apart", "bfloat16: equal"]
    (line,) = remarks([run(str(index), found) for index, found in enumerate(told)])
    assert line.endswith("Where not all is float32, only the largest difference is told.")
    assert "float32" not in remarks([run("0", result()), run("1", result({"sharding": "data"}))])[0]


def test_the_reference_is_the_first_run_that_is_ok() -> None:
    failed = result(error=WorkerError("killed"))
    assert same_loss(failed, None, result(), result({"sharding": "data"})) == ["-", "-", "reference", "yes, all 6 steps"]


def test_a_loss_that_is_no_number_agrees_with_nothing() -> None:
    other = result({"sharding": "data"}, records=records((5.5, float("nan"), *LOSSES[2:])))
    (_, agreement) = agreements([result(), other])
    assert agreement is not None
    assert not agreement.is_equal
    assert agreement.equal_steps == 1


def test_a_row_has_the_numbers_of_its_run() -> None:
    alone = [run("0", result())]
    (row,) = cells(alone)
    expected = {
        "backend": "jax",
        "table": "fsdp_tensor",
        "mesh": "fsdp 4 x tensor 2",
        "status": "ok",
        "loss": "3.000000",
        "grad norm": "1.50000",
        "val. loss": "3.250000",
        "same loss": "reference",
        "tokens/s": "16,384",
        "step": "250 ms",
        "MFU": "50 %",
        "memory/device": "1000 B",
        "compile": "4 s",
    }
    assert dict(zip(titles(alone), row, strict=True)) == expected


def test_a_mixture_among_the_runs_adds_what_routers_report() -> None:
    both = [run("0", result()), run("1", result({"model": "tiny_moe"}, records=routed(records())))]
    (dense, mixture), shown = cells(both), titles(both)
    assert shown[-2:] == ["balance", "dropped"]
    assert (dense[-2:], mixture[-2:]) == (["-", "-"], ["4.6000", "1.07 %"])


def test_a_pipeline_among_the_runs_adds_its_bubble_beside_the_planned_one() -> None:
    pipeline = {"sharding": "pipeline"}
    found = [result(), result(pipeline, records=staged(records())), result(pipeline)]
    runs = [run(str(index), one) for index, one in enumerate(found)]
    assert titles(runs)[-2:] == ["bubble", "planned bubble"]
    assert [row[-2:] for row in cells(runs)] == [["-", "-"], ["45 %", "20 %"], ["-", "20 %"]]


def test_the_caption_says_that_devices_are_simulated_only_where_they_are() -> None:
    real = result(environment=environment(simulated=False))
    assert caption([run("0", real)]) == "1 run of tiny"
    assert "; on simulated devices that share one processor" in caption([run("0", result())])
    assert "; 1 of them on simulated devices" in caption([run("0", real), run("1", result())])


def test_what_failed_is_infeasible_or_missing_is_in_the_table_with_its_reason() -> None:
    infeasible = result(plan=None, records=(), error=PlanError("50257 over 8"), peak=None)
    runs = [
        run("0", result()),
        run("1", infeasible),
        run("2", result(error=WorkerError("killed"))),
        run("3", None, "it has not ended"),
    ]
    assert column(runs, "status") == ["ok", "infeasible", "failed", "no result"]
    assert column(runs, "loss")[1] == "-"
    assert remarks(runs) == ["1 (infeasible): 50257 over 8", "2 (failed): killed", "3 (no result): it has not ended"]


def test_on_a_console_that_is_a_file_the_table_is_whole_and_plain() -> None:
    file = io.StringIO()
    both = [run("0", result()), run("1", result({"sharding": "data", "backend": "torch"}))]
    show_table(open_console(file), both)
    lines = file.getvalue().splitlines()
    assert all(title in lines[2] for title in titles(both))
    assert lines[4].startswith("torch")
    assert "yes, all 6 steps" in lines[4]
    assert "\x1b" not in file.getvalue()


def test_on_a_narrow_terminal_no_digit_of_a_loss_is_cut() -> None:
    file = io.StringIO()
    show_table(Console(file=file, force_terminal=True, width=60, _environ={"TERM": "xterm"}), [run("0", result())])
    assert "3.000000    1.50000   3.250000  reference" in file.getvalue()


def test_results_are_found_under_runs_and_sweeps_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("10-jax-data", "2-jax-fsdp", "1-torch-data"):
        run_folder(tmp_path / "sweep" / name)
    runs = load_results([tmp_path / "sweep"])
    assert [found.folder.name for found in runs] == ["1-torch-data", "2-jax-fsdp", "10-jax-data"]
    assert runs[0].result == result()
    one = tmp_path / "sweep" / "2-jax-fsdp"
    assert load_results([one, one / "result.json", tmp_path]) == [runs[1], runs[0], runs[2]]


def test_a_run_without_a_result_is_listed_and_an_unreadable_one_too(tmp_path: Path) -> None:
    for name, text in (("1", None), ("2", "{torn"), ("3", "[]")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "records.jsonl").write_text("")
        if text is not None:
            (folder / "result.json").write_text(text)
    (tmp_path / "no run at all").mkdir()
    runs = load_results([tmp_path])
    assert [found.status for found in runs] == ["no result"] * 3
    assert "killed" in runs[0].reason
    assert "cannot be read" in runs[1].reason
    assert "not a result of this lab" in runs[2].reason


def test_folders_that_vanish_while_they_are_looked_for_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0-jax", "1-gone", "2-jax"):
        run_folder(tmp_path / name)
    read, scan = Path.read_text, os.scandir

    def vanishing_read(path: Path, *arguments: str) -> str:
        if path.parent.name == "1-gone":
            shutil.rmtree(path.parent, ignore_errors=True)
        return read(path, *arguments)

    def vanishing_scan(path: str) -> Any:
        if str(path).endswith("2-jax"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return scan(path)

    monkeypatch.setattr(Path, "read_text", vanishing_read)
    monkeypatch.setattr(os, "scandir", vanishing_scan)
    assert [found.folder.name for found in load_results([tmp_path])] == ["0-jax"]


def test_a_folder_that_may_not_be_read_is_listed_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0-jax", "1-locked"):
        run_folder(tmp_path / name)
    scan = os.scandir

    def locked(path: str) -> Any:  # tests may run as root, whom no permission stops
        if str(path).endswith("1-locked"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", locked)
    runs = load_results([tmp_path])
    assert [(found.folder.name, found.status) for found in runs] == [("0-jax", "ok"), ("1-locked", "no result")]
    assert remarks(runs) == ["1-locked (no result): the folder cannot be read: Permission denied"]


def test_a_path_that_is_wrong_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such path: .*nowhere"):
        load_results([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="no run under"):
        load_results([tmp_path])


def sweep_of(key: str, *values: object) -> list[Run]:
    return [run(f"{place}-jax", result({key: value})) for place, value in enumerate(values)]


@pytest.mark.parametrize(
    ("key", "values", "shown"),
    [
        ("workload.accumulation", (1, 2, 4), ["1", "2", "4"]),
        ("workload.optimizer.lr", (1e-3, 1e-8), ["0.001", "1e-08"]),
        ("workload.optimizer.clip", (None, 1.0), ["-", "1.0"]),
        ("backend.attention", ("fused", "plain"), ["fused", "plain"]),
        ("mesh.hosts", (None, 2), ["-", "2"]),
        ("data.ragged", (False, True), ["false", "true"]),
        ("sharding.activations.residual_sequence", ([], ["tensor"]), ["[]", "[tensor]"]),
        ("model.layers", (4, 2), ["4", "2"]),
    ],
)
def test_what_was_swept_has_a_column(key: str, values: tuple[object, ...], shown: list[str]) -> None:
    runs = sweep_of(key, *values)
    assert titles(runs)[:5] == ["backend", "table", "mesh", key, "status"]
    assert column(runs, key) == shown
    assert f"| {key} |" in markdown(runs)
    rows = list(csv.DictReader(csv_text(runs, Path("/sweep")).splitlines()))
    assert [row[key] for row in rows] == ["" if text == "-" else text for text in shown]


@pytest.mark.parametrize(
    "choices",
    [{"backend": "torch"}, {"sharding": "zero2"}, {"mesh.devices": 4}, {"sharding": "fsdp", "mesh.fsdp": 4, "mesh.data": 2}],
)
def test_what_follows_from_the_backend_the_table_or_the_mesh_has_no_column_of_its_own(choices: dict[str, Any]) -> None:
    runs = [run("0", result()), run("1", result(choices))]
    assert titles(runs)[:4] == ["backend", "table", "mesh", "status"]


@pytest.mark.parametrize(("key", "value"), [("backend.compile", True), ("backend.attention", "plain")])
def test_what_was_asked_of_one_backend_beside_its_presets_values_is_shown(key: str, value: object) -> None:
    runs = [run("0", result()), run("1", result({"backend": "torch", key: value}))]
    assert titles(runs)[3] == key
    assert column(sweep_of("backend.scan_layers", True, False), "backend.scan_layers") == ["true", "false"]


def test_models_are_told_apart_by_their_name_and_not_by_each_of_their_sizes() -> None:
    other = result({"model": "tiny_gpt2", "workload.sequence": 64})
    runs = [run("0", result({"workload.sequence": 64})), run("1", other)]
    assert titles(runs)[:5] == ["backend", "table", "mesh", "model.name", "status"]


def test_a_row_changed_under_the_same_name_of_a_table_is_shown_all_the_same() -> None:
    changed = result({"sharding.activations.residual_sequence": ["tensor"]})
    runs = [run("0", result({"sharding": "data"})), run("1", result()), run("2", changed)]
    assert column(runs, "sharding.activations.residual_sequence") == ["[]", "[]", "[tensor]"]


def test_a_key_that_an_older_lab_did_not_know_is_no_difference_where_it_is_off() -> None:
    old = result()
    del old["experiment"]["data"]["pack"]
    assert "data.pack" not in titles([run("0", old), run("1", result({"sharding": "data"}))])
    assert column([run("0", old), run("1", result({"data.pack": True}))], "data.pack") == ["-", "true"]


def test_on_the_console_four_keys_have_columns_and_the_others_are_named() -> None:
    keys = ("workload.seed", "workload.remat", "workload.accumulation", "data.seed", "data.shuffle", "backend.attention")
    other = result(dict(zip(keys, (1, "full", 2, 1, False, "plain"), strict=True)))
    runs = [run("0", result()), run("1", other)]
    assert [title for title in titles(runs) if "." in title and title != "val. loss"] == [
        "workload.accumulation",
        "workload.seed",
        "workload.remat",
        "data.seed",
    ]
    assert "These keys differ too: data.shuffle, backend.attention." in remarks(runs)
    assert csv_text(runs, Path("/sweep")).splitlines()[0].count("data.shuffle,backend.attention,") == 1


def test_runs_that_look_alike_or_lie_in_several_folders_are_named() -> None:
    alike = [run("0-jax", result()), run("1-jax", result())]
    assert column(alike, "run") == ["0-jax", "1-jax"]
    apart = [run("0-jax", result()), Run(Path("/sweep/deep/er/0-jax"), result({"sharding": "data"}))]
    assert column(apart, "run") == ["0-jax", "deep/er/0-jax"]
    failed = Run(Path("/sweep/deep/er/1-jax"), None, "it has not ended")
    assert column([*apart, failed], "run")[2] == "deep/er/1-jax"
    assert remarks([*apart, failed])[-1] == "deep/er/1-jax (no result): it has not ended"
    assert "run" not in titles([run("0-jax", result()), run("1-torch", result({"backend": "torch"}))])


def test_a_table_wider_than_plain_lines_usually_are_is_still_whole() -> None:
    keys = {"workload.optimizer.warmup_steps": 3, "workload.optimizer.schedule": "linear", "workload.optimizer.b2": 0.5}
    file = io.StringIO()
    show_table(open_console(file), [run("0", result()), Run(Path("/sweep/a/b/c"), result({**keys, "data.seed": 1}))])
    lines = file.getvalue().splitlines()
    assert len(lines) == 5
    assert len(lines[2]) > 200
    assert all(key in lines[2] for key in keys)
    assert "…" not in file.getvalue()


def test_a_sweep_is_written_with_every_metric_at_full_precision(tmp_path: Path) -> None:
    run_folder(tmp_path / "0-jax")
    run_folder(tmp_path / "1-jax", sharding="data")
    csv_path, md_path = write_sweep(tmp_path, load_results([tmp_path]))
    assert (csv_path.name, md_path.name) == ("sweep.csv", "sweep.md")
    first, second = csv.DictReader(csv_path.read_text().splitlines())
    assert (first["run"], first["status"], first["simulated"]) == ("0-jax", "ok", "True")
    assert json.loads(first["mfu_causal"]) == result()["measured"]["mfu_causal"]
    assert (second["sharding"], second["agreeing_steps"], second["largest_difference"]) == ("data", "6", "0.0")
    text = md_path.read_text()
    assert "simulated devices" in text.splitlines()[0]
    assert "| jax | data | data 8 | ok | 3.000000 | 1.50000 | 3.250000 | yes, all 6 steps | 16,384 |" in text


def test_markdown_survives_a_bar_and_a_line_break_in_a_message() -> None:
    text = markdown([run("0", result(error=WorkerError("a | b\nsecond line")))])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert "0 (failed): a | b  \nsecond line" in text
