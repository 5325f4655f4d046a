"""Where the lab keeps what outlives a run. Owns the reading of the environment for it; must not know what is kept there."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$SCALING_LAB_CACHE`, else `scaling_lab` in the user's cache folder (`$XDG_CACHE_HOME` or ~/.cache). Not created here."""
    if own := os.environ.get("SCALING_LAB_CACHE"):
        return Path(own).expanduser().absolute()
    # The XDG standard asks to ignore a relative path there.
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "scaling_lab"
