"""Several runs side by side: on the console, as sweep.csv and as sweep.md. Reads results; computes no metric."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from scaling_lab.report.agreement import TOLERANCE, Agreement, agreements
from scaling_lab.report.differences import different_keys, value_text
from scaling_lab.report.runs import Run
from scaling_lab.report.units import UNKNOWN, count, decimal, percent, plural, seconds, size
from scaling_lab.results.folder import write_whole
from scaling_lab.results.metrics import METRICS, Result, at, values

#: So many of the keys in which runs differ have a column on the console; the others are named below it.
MOST_KEYS = 4


@dataclass(frozen=True)
class Row:
    """A run with its metrics and how its losses agree. name: of its folder, as far as it tells it from the others."""

    run: Run
    result: Result
    found: dict[str, Any]
    agreement: Agreement | None
    name: str


@dataclass(frozen=True)
class Column:
    """One column of the table: its title, and its text for a row."""

    title: str
    of: Callable[[Row], str]
    is_number: bool = True


def _mesh(result: Result) -> str:
    sizes = at(result, "plan.mesh") or {}
    return " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or ("1 device" if sizes else UNKNOWN)


def _compile(found: dict[str, Any]) -> str:
    return "none" if found["compile_s"] == 0 else seconds(found["compile_s"])


RUN = Column("run", lambda row: row.name, False)
STATUS = Column("status", lambda row: row.run.status, False)

#: What every run is known by.
IDENTITY = (
    Column("backend", lambda row: at(row.result, "experiment.backend.name") or UNKNOWN, False),
    Column("table", lambda row: at(row.result, "experiment.sharding.name") or UNKNOWN, False),
    Column("mesh", lambda row: _mesh(row.result), False),
)

#: How it went.
OUTCOME = (
    STATUS,
    Column("loss", lambda row: decimal(row.found["loss"])),
    Column("grad norm", lambda row: decimal(row.found["grad_norm"], 5)),
    Column("val. loss", lambda row: decimal(row.found["validation_loss"])),
    Column("same loss", lambda row: UNKNOWN if row.agreement is None else row.agreement.words, False),
    Column("tokens/s", lambda row: count(row.found["tokens_per_s"])),
    Column("step", lambda row: seconds(row.found["step_time_s"])),
    Column("MFU", lambda row: percent(row.found["mfu"])),
    Column("memory/device", lambda row: size(row.found["memory_bytes_per_device"])),
    Column("compile", lambda row: _compile(row.found)),
)

#: Of runs among which there are mixtures of experts.
ROUTERS = (
    Column("balance", lambda row: decimal(row.found["balance_loss"], 4)),
    Column("dropped", lambda row: percent(row.found["dropped_fraction"])),
)

#: Of runs among which there are pipelines.
STAGES = (
    Column("bubble", lambda row: percent(row.found["bubble_share"])),
    Column("planned bubble", lambda row: percent(row.found["planned_bubble_share"])),
)


def columns(runs: Sequence[Run]) -> list[Column]:
    """The columns that these runs need: what was asked differently of them, and their folders where that is not enough."""
    keys = different_keys([run.result for run in runs])[:MOST_KEYS]
    identity = [*IDENTITY, *(_of_key(key) for key in keys)]
    routers = ROUTERS if any(at(run.result or {}, "measured.balance_loss") for run in runs) else ()
    stages = STAGES if any(at(run.result or {}, "plan.pipeline") for run in runs) else ()
    return [*([RUN] if _need_names(runs, identity) else []), *identity, *OUTCOME, *routers, *stages]


def _of_key(key: str) -> Column:
    return Column(key, lambda row: value_text(row.result, key), False)


def _need_names(runs: Sequence[Run], identity: Sequence[Column]) -> bool:
    """Whether the folders must be named: they lie in several, a run has no result, or two look alike."""
    if len({run.folder.parent for run in runs}) > 1 or any(run.result is None for run in runs):
        return True
    looks = Counter(tuple(column.of(row) for column in identity) for row in _rows(runs))
    return max(looks.values(), default=1) > 1


def _names(runs: Sequence[Run]) -> list[str]:
    """Each run's folder, from the folder on that holds them all."""
    common = os.path.commonpath([run.folder.parent for run in runs]) if runs else ""
    return [str(run.folder.relative_to(common)) for run in runs]


def _rows(runs: Sequence[Run]) -> list[Row]:
    found = agreements([run.result for run in runs])
    return [
        Row(run, run.result or {}, values(run.result or {}), agreement, name)
        for run, agreement, name in zip(runs, found, _names(runs), strict=True)
    ]


def cells(runs: Sequence[Run]) -> list[list[str]]:
    """The rows of the table, a text for each of `columns`."""
    shown = columns(runs)
    return [[_cell(column, row) for column in shown] for row in _rows(runs)]


def _cell(column: Column, row: Row) -> str:
    return column.of(row) if row.run.result is not None or column in (RUN, STATUS) else UNKNOWN


def table(runs: Sequence[Run]) -> Table:
    """The runs side by side, ready to print."""
    view = Table(title=caption(runs), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns(runs):
        view.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=column.is_number)
    for row in cells(runs):
        view.add_row(*row)
    return view


def caption(runs: Sequence[Run]) -> str:
    """How many runs of what; and that devices are simulated, where they are."""
    results = [run.result for run in runs if run.result is not None]
    models = ", ".join(dict.fromkeys(str(at(result, "experiment.model.name")) for result in results))
    simulated = [bool(at(result, "environment.simulated")) for result in results]
    text = plural(len(runs), "run") + (f" of {models}" if models else "")
    if not any(simulated):
        return text
    some = "" if all(simulated) else f"{sum(simulated)} of them "
    return f"{text}; {some}on simulated devices that share one processor: compare losses, not speeds, with real ones"


def remarks(runs: Sequence[Run]) -> list[str]:
    """What the table has no room for: what `same loss` means, more keys that differ, and why runs have no numbers."""
    found = [agreement for agreement in agreements([run.result for run in runs]) if agreement]
    lines = []
    if any(not agreement.is_reference for agreement in found):
        lines.append(
            f"same loss: loss and gradient norm of each step against the first run of the same model, workload and data, "
            f"to {TOLERANCE:g} relative."
        )
    if any(not agreement.is_reference and agreement.dtype != "float32" for agreement in found):
        lines[-1] += " Where not all is float32, only the largest difference is told."
    if more := different_keys([run.result for run in runs])[MOST_KEYS:]:
        lines.append(f"These keys differ too: {', '.join(more)}.")
    return lines + [f"{name} ({run.status}): {run.reason}" for run, name in zip(runs, _names(runs), strict=True) if run.reason]


def write_sweep(folder: Path, runs: Sequence[Run]) -> tuple[Path, Path]:
    """Write sweep.csv (every key that differs, every metric, full precision) and sweep.md (the table). Gives their paths."""
    csv_path, md_path = folder / "sweep.csv", folder / "sweep.md"
    write_whole(csv_path, csv_text(runs, folder))
    write_whole(md_path, markdown(runs))
    return csv_path, md_path


def csv_text(runs: Sequence[Run], folder: Path) -> str:
    """One line a run: who it is, what was asked differently of it, every metric, how its losses agree."""
    identity = ("run", "backend", "sharding", "mesh", "devices", "simulated", "status", "error")
    agreement_names = ("agreeing_steps", "compared_steps", "largest_difference")
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    keys = different_keys([run.result for run in runs])
    writer.writerow([*identity, *keys, *(metric.name for metric in METRICS), *agreement_names])
    for run, agreement in zip(runs, agreements([run.result for run in runs]), strict=True):
        result = run.result or {}
        facts = ("experiment.backend.name", "experiment.sharding.name", None, "plan.devices", "environment.simulated")
        known = [_mesh(result) if path is None else at(result, path) for path in facts]
        found = values(result)
        agrees = (agreement.equal_steps, agreement.steps, agreement.largest) if agreement else (None, None, None)
        asked = ["" if (text := value_text(result, key)) == UNKNOWN else text for key in keys]
        writer.writerow([_within(run.folder, folder), *known, run.status, run.reason, *asked, *found.values(), *agrees])
    return file.getvalue()


def markdown(runs: Sequence[Run]) -> str:
    """The table as Markdown, with its caption and remarks."""
    shown = columns(runs)
    lines = [caption(runs), "", "| " + " | ".join(column.title for column in shown) + " |"]
    lines.append("|" + "|".join("--:" if column.is_number else "---" for column in shown) + "|")
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells(runs)]
    for line in remarks(runs):
        lines += ["", line.replace("\n", "  \n")]
    return "\n".join(lines) + "\n"


def _within(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
