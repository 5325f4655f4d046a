"""What a person sees while the lab works: the plan, the progress, the table at the end. Owns the console itself.

Plain on anything but a terminal: no control characters, no colour, lines as long as they need to be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console, RenderableType
from rich.measure import Measurement

from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Plan
from scaling_lab.report import tables
from scaling_lab.report.decisions import decisions
from scaling_lab.report.progress import Progress
from scaling_lab.report.runs import Run
from scaling_lab.report.summary import failure_text, summary
from scaling_lab.results.metrics import Result, Scale

#: Columns where the output is no terminal and nobody's window limits them.
PLAIN_WIDTH = 200

#: Columns that no table needs.
WIDEST = 2_000


class LastingConsole(Console):
    """A console whose reader may leave, as `| head` does: the job goes on without showing anything."""

    def on_broken_pipe(self) -> None:
        """Called by rich, whose own answer is to end the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def open_console(file: TextIO | None = None) -> Console:
    """The console for a file (default: standard output)."""
    file = sys.stdout if file is None else file
    if file is None:  # standard output was closed before the start
        return LastingConsole(quiet=True)
    if hasattr(file, "reconfigure"):
        file.reconfigure(errors="replace")  # a name may hold what the terminal's encoding does not
    if file.isatty():
        return LastingConsole(file=file, highlight=False)
    return LastingConsole(file=file, highlight=False, force_terminal=False, no_color=True, color_system=None, width=PLAIN_WIDTH)


def show_plan(console: Console, experiment: Experiment, plan: Plan) -> None:
    """What was decided, before anything starts."""
    _print(console, decisions(experiment, plan))
    console.print()


def show_progress(console: Console, experiment: Experiment, scale: Scale) -> Progress:
    """The progress of a job, to be fed with its records."""
    return Progress(console, experiment, scale)


def show_result(console: Console, result: Result, folder: Path) -> None:
    """The table of a finished run, or the one message of one that did not finish."""
    if result["status"] == "ok":
        console.print()
        _print(console, summary(result, folder))
    else:
        console.print(failure_text(result, folder), markup=False, soft_wrap=True)


def show_table(console: Console, runs: Sequence[Run]) -> None:
    """Several runs side by side, and what they say together."""
    console.print()
    view = tables.table(runs)
    _print(_wide_enough(console, view), view)
    for line in tables.remarks(runs):
        console.print(line, markup=False, soft_wrap=True)


def _wide_enough(console: Console, content: RenderableType) -> Console:
    """On a narrow terminal, whole lines that wrap are read more easily than cells with cut numbers."""
    natural = Measurement.get(console, console.options.update(width=WIDEST), content).maximum
    if natural <= console.width:
        return console
    return LastingConsole(file=console.file, width=natural, highlight=False, force_terminal=console.is_terminal)


def _print(console: Console, content: RenderableType) -> None:
    """Print, without the blanks that fill a terminal's lines."""
    with console.capture() as captured:
        console.print(content)
    try:
        console.file.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))
        console.file.flush()
    except BrokenPipeError:
        console.on_broken_pipe()
