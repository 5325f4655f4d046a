"""Hydra's hook at the start of a sweep: gives the sweep a folder of its own, whatever launcher runs the jobs, and remembers it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

#: Folders of the sweeps that this process has started, the newest last.
folders: list[Path] = []


class SweepHook(Callback):
    """Named on Hydra's command line by `scaling-lab run -m`, so that no YAML file has to."""

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Called by Hydra in the launching process, before the first job."""
        asked = config.hydra.sweep.dir
        if not names(typed(config.hydra.overrides.hydra), "hydra.sweep.dir"):
            with contextlib.suppress(OSError):  # Hydra meets it again, and its error is shown
                _move(config, asked)
        folders.append(Path(config.hydra.sweep.dir).absolute())


def typed(overrides: Any) -> list[str]:
    """Overrides as they were typed: Hydra keeps them in a config, where `${...}` in one would be looked up."""
    plain: Any = OmegaConf.to_container(overrides, resolve=False)
    return plain


def names(overrides: Iterable[str], key: str) -> bool:
    """Whether Hydra's command line gives this key a value, by itself or with the group above it."""
    given = {override.partition("=")[0].lstrip("+") for override in overrides}
    return bool(given & {key, key.rpartition(".")[0]})


def _move(config: Any, asked: str) -> None:
    """Make the default folder, or `-2`, `-3` and so on where another sweep began in the same second."""
    for number in itertools.count(1):
        folder = asked if number == 1 else f"{asked}-{number}"
        try:
            Path(folder).mkdir(parents=True)
        except FileExistsError:
            continue
        config.hydra.sweep.dir = folder
        quoted = folder.replace("'", "\\'")
        # Each job's config is composed anew, from these overrides.
        config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{quoted}'")
        return
