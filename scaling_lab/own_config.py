"""A config of one's own, that `--config-path` and `--config-name` point Hydra at, such as a run folder's experiment.yaml.

Owns the path that Hydra is told, and the message for a preset where values are written out. Composes nothing itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from scaling_lab.config import valid_keys
from scaling_lab.errors import ConfigError
from scaling_lab.explain import as_override
from scaling_lab.plan.rules import nearest

PATH_FLAGS, NAME_FLAGS = ("--config-path", "-cp"), ("--config-name", "-cn")


def with_absolute_path(arguments: Sequence[str]) -> list[str]:
    """The arguments, the folder of `--config-path` absolute where it exists: Hydra would look for it inside this package."""
    changed = list(arguments)
    for place, flag, value in _values(arguments, PATH_FLAGS):
        if Path(value).is_dir():
            changed[place] = flag + str(Path(value).absolute())
    return changed


def check_presets(arguments: Sequence[str], presets: Path) -> None:
    """Raise ConfigError for `GROUP=NAME` where the config has no such choice but values. presets: the shipped groups."""
    file = _file(arguments, presets)
    written = _written_out(file)
    for argument in arguments:
        group, given, choice = argument.partition("=")
        group = group.lstrip("+")
        if given and group in written:
            raise ConfigError(
                f"{group}={choice}: {file} has no presets to choose from, its values are written out. "
                f"{_advice(group, choice, written[group], presets)}"
            )


def _file(arguments: Sequence[str], presets: Path) -> Path:
    folder = [value for _, _, value in _values(arguments, PATH_FLAGS)] or [str(presets)]
    name = [value for _, _, value in _values(arguments, NAME_FLAGS)] or ["config"]
    return Path(folder[-1], name[-1].removesuffix(".yaml") + ".yaml")


def _values(arguments: Sequence[str], flags: tuple[str, ...]) -> Iterator[tuple[int, str, str]]:
    """Each value that a flag is given: its place, what stands before it there, and itself. Both `--flag X` and `--flag=X`."""
    for place, argument in enumerate(arguments):
        name, given, value = argument.partition("=")
        if name in flags and given:
            yield place, f"{name}=", value
        elif place and arguments[place - 1] in flags:
            yield place, "", argument


def _written_out(file: Path) -> dict[str, dict[str, Any]]:
    """The groups whose values the file holds itself; none where it cannot be read, which Hydra explains."""
    try:
        plain = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if not isinstance(plain, dict):
        return {}
    entries = [entry for entry in plain.get("defaults") or [] if isinstance(entry, dict)]
    chosen = {str(key).split()[-1].lstrip("/") for entry in entries for key in entry}
    written = {key: plain[key] for key in valid_keys([]) if isinstance(plain.get(key), dict) and key not in chosen}
    # What an experiment preset chooses are presets of the other groups.
    return {**written, "experiment": {}} if written and "experiment" not in chosen else written


def _advice(group: str, choice: str, values: dict[str, Any], presets: Path) -> str:
    """The keys that make the group what the preset is, ready to paste."""
    preset = presets / group / f"{choice}.yaml"
    if not values:
        return "Set one by one the keys that it sets."
    if not re.fullmatch(r"[\w.-]+", choice) or not preset.is_file():
        names = sorted(path.stem for path in (presets / group).glob("*.yaml"))
        hint = "" if "," in choice else nearest(choice, names)
        return f"Set its keys one by one, such as {group}.{next(iter(values))}=VALUE{hint}."
    wanted, present = _leaves(group, yaml.safe_load(preset.read_text())), _leaves(group, values)
    changed = [
        f"{'' if key in present else '+'}{key}={as_override(value)}"
        for key, value in wanted.items()
        if key not in present or present[key] != value
    ]
    changed += [f"~{key}" for key in present if key not in wanted]
    if not changed:
        return f"They are those of {group}={choice} already: leave it out."
    return f"Set instead: {' '.join(map(shlex.quote, changed))}"


def _leaves(key: str, value: Any) -> dict[str, Any]:
    """Dotted keys; a group without keys has none."""
    if not isinstance(value, dict):
        return {key: value}
    return {name: leaf for inner, below in value.items() for name, leaf in _leaves(f"{key}.{inner}", below).items()}
