"""Several runs side by side: on the console, as sweep.csv and as sweep.md. Reads results; computes no metric."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from scaling_lab.errors import ConfigError
from scaling_lab.report.agreement import TOLERANCE, Agreement, agreements
from scaling_lab.report.units import count, decimal, percent, seconds, size
from scaling_lab.results import folder as names
from scaling_lab.results.folder import write_whole
from scaling_lab.results.metrics import METRICS, Result, at, values

#: Files by which a folder is known as a run's, also when it has no result.
MARKS = (names.RESULT, names.RECORDS, names.PLAN, names.EXPERIMENT)

NO_RESULT = "no result"


@dataclass(frozen=True)
class Run:
    """One run as found on disk. result: None where there is none; problem: why."""

    folder: Path
    result: Result | None
    problem: str = ""

    @property
    def status(self) -> str:
        """`ok`, `failed`, `infeasible` or `no result`."""
        return NO_RESULT if self.result is None else self.result["status"]

    @property
    def reason(self) -> str:
        """Why it is not ok: the whole message; empty where it is."""
        if self.result is None:
            return self.problem
        return at(self.result, "error.message") or ""


def load_results(paths: Sequence[Path]) -> list[Run]:
    """The runs under these paths (run folders, sweep folders or result.json files), each once, in the order of their names.

    Raises ConfigError for a path that does not exist, and where there is no run at all.
    """
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise ConfigError(f"no such path: {', '.join(missing)}. Give run folders or sweep folders.")
    folders: dict[Path, None] = {}
    for path in paths:
        found = {path.parent} if path.is_file() else {mark.parent for name in MARKS for mark in path.rglob(name)}
        folders.update(dict.fromkeys(sorted((folder.absolute() for folder in found), key=_natural)))
    if not folders:
        raise ConfigError(f"no run under {', '.join(map(str, paths))}: a run folder holds {names.RESULT} or {names.RECORDS}.")
    return [_load(folder) for folder in folders]


def _natural(path: Path) -> list[Any]:
    """Sorts 2-x before 10-x."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", str(path))]


def _load(folder: Path) -> Run:
    try:
        result = json.loads((folder / names.RESULT).read_text())
    except FileNotFoundError:
        return Run(folder, None, "it has not ended, or was killed before it could write one")
    except (OSError, ValueError) as error:
        return Run(folder, None, f"{names.RESULT} cannot be read: {error}")
    if not isinstance(result, dict) or "schema_version" not in result:
        return Run(folder, None, f"{names.RESULT} is not a result of this lab")
    return Run(folder, result)


@dataclass(frozen=True)
class Column:
    """One column of the table. of: the text of a run's result, its metrics and how its losses agree."""

    title: str
    of: Callable[[Result, dict[str, Any], Agreement | None], str]
    is_number: bool = True


def _mesh(result: Result) -> str:
    sizes = at(result, "plan.mesh") or {}
    return " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or ("1 device" if sizes else "-")


COLUMNS = (
    Column("backend", lambda result, found, agreement: at(result, "experiment.backend.name") or "-", False),
    Column("table", lambda result, found, agreement: at(result, "experiment.sharding.name") or "-", False),
    Column("mesh", lambda result, found, agreement: _mesh(result), False),
    Column("status", lambda result, found, agreement: result["status"], False),
    Column("loss", lambda result, found, agreement: decimal(found["loss"])),
    Column("grad norm", lambda result, found, agreement: decimal(found["grad_norm"], 5)),
    Column("val. loss", lambda result, found, agreement: decimal(found["validation_loss"])),
    Column("same loss", lambda result, found, agreement: "-" if agreement is None else agreement.words, False),
    Column("tokens/s", lambda result, found, agreement: count(found["tokens_per_s"])),
    Column("step", lambda result, found, agreement: seconds(found["step_time_s"])),
    Column("MFU", lambda result, found, agreement: percent(found["mfu"])),
    Column("memory/device", lambda result, found, agreement: size(found["memory_bytes_per_device"])),
    Column("compile", lambda result, found, agreement: "none" if found["compile_s"] == 0 else seconds(found["compile_s"])),
)


def cells(runs: Sequence[Run]) -> list[list[str]]:
    """The rows of the table, a text for each of COLUMNS."""
    found = agreements([run.result for run in runs])
    return [_row(run, agreement) for run, agreement in zip(runs, found, strict=True)]


def _row(run: Run, agreement: Agreement | None) -> list[str]:
    if run.result is None:
        known = {"backend": run.folder.name, "status": NO_RESULT}
        return [known.get(column.title, "-") for column in COLUMNS]
    found = values(run.result)
    return [column.of(run.result, found, agreement) for column in COLUMNS]


def table(runs: Sequence[Run]) -> Table:
    """The runs side by side, ready to print."""
    view = Table(title=caption(runs), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        view.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=column.is_number)
    for row in cells(runs):
        view.add_row(*row)
    return view


def caption(runs: Sequence[Run]) -> str:
    """How many runs of what; and that devices are simulated, where they are."""
    results = [run.result for run in runs if run.result is not None]
    models = ", ".join(dict.fromkeys(str(at(result, "experiment.model.name")) for result in results))
    simulated = [bool(at(result, "environment.simulated")) for result in results]
    text = f"{len(runs)} run{'' if len(runs) == 1 else 's'}" + (f" of {models}" if models else "")
    if not any(simulated):
        return text
    some = "" if all(simulated) else f"{sum(simulated)} of them "
    return f"{text}; {some}on simulated devices that share one processor: compare losses, not speeds, with real ones"


def remarks(runs: Sequence[Run]) -> list[str]:
    """What the table has no room for: what `same loss` means, and why runs have no numbers."""
    found = [agreement for agreement in agreements([run.result for run in runs]) if agreement]
    lines = []
    if any(not agreement.is_reference for agreement in found):
        lines.append(
            f"same loss: loss and gradient norm of each step against the first run of the same model, workload and data, "
            f"to {TOLERANCE:g} relative."
        )
    if any(not agreement.is_reference and agreement.dtype != "float32" for agreement in found):
        lines[-1] += " Where not all is float32, only the largest difference is told."
    for run in runs:
        if run.status != "ok":
            lines.append(f"{run.folder.name} ({run.status}): {run.reason}")
    return lines


def write_sweep(folder: Path, runs: Sequence[Run]) -> tuple[Path, Path]:
    """Write sweep.csv (every metric, full precision, units in the names) and sweep.md (the table). Gives their paths."""
    csv_path, md_path = folder / "sweep.csv", folder / "sweep.md"
    write_whole(csv_path, csv_text(runs, folder))
    write_whole(md_path, markdown(runs))
    return csv_path, md_path


def csv_text(runs: Sequence[Run], folder: Path) -> str:
    """One line a run: who it is, every metric, how its losses agree."""
    identity = ("run", "backend", "sharding", "mesh", "devices", "simulated", "status", "error")
    agreement_names = ("agreeing_steps", "compared_steps", "largest_difference")
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*identity, *(metric.name for metric in METRICS), *agreement_names])
    for run, agreement in zip(runs, agreements([run.result for run in runs]), strict=True):
        result = run.result or {}
        facts = ("experiment.backend.name", "experiment.sharding.name", None, "plan.devices", "environment.simulated")
        known = [_mesh(result) if path is None else at(result, path) for path in facts]
        found = values(result)
        agrees = (agreement.equal_steps, agreement.steps, agreement.largest) if agreement else (None, None, None)
        writer.writerow([_within(run.folder, folder), *known, run.status, run.reason, *found.values(), *agrees])
    return file.getvalue()


def markdown(runs: Sequence[Run]) -> str:
    """The table as Markdown, with its caption and remarks."""
    lines = [caption(runs), "", "| " + " | ".join(column.title for column in COLUMNS) + " |"]
    lines.append("|" + "|".join("--:" if column.is_number else "---" for column in COLUMNS) + "|")
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells(runs)]
    for line in remarks(runs):
        lines += ["", line.replace("\n", "  \n")]
    return "\n".join(lines) + "\n"


def _within(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
