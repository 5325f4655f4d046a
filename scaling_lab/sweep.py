"""Hydra's hook at the start of a sweep: remembers the sweep's folder, whatever launcher runs the jobs. Owns nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback

#: Folders of the sweeps that this process has started, the newest last.
folders: list[Path] = []


class SweepHook(Callback):
    """Named on Hydra's command line by `scaling-lab run -m`, so that no YAML file has to."""

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Called by Hydra in the launching process, before the first job."""
        folders.append(Path(config.hydra.sweep.dir).absolute())
