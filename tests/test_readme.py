"""The README names every preset and every key, so that whoever adds one says there what it is for."""

from __future__ import annotations

import re

import pytest
from experiments import CONF, GROUPS

from scaling_lab.config import valid_keys

README = (CONF.parent / "README.md").read_text()
KEYS = README.partition("\n## Keys\n")[2].partition("\n## ")[0]
#: Words in code, where `a.{b,c}` is both `b` and `c`.
WORDS = {word for code in re.findall(r"`([^`]+)`", KEYS) for word in re.findall(r"\w+", code)}


@pytest.mark.parametrize("group", [*GROUPS, "experiment"])
def test_every_preset_is_in_the_table_of_choices(group: str) -> None:
    row = next(line for line in KEYS.splitlines() if line.startswith(f"| `{group}` |"))
    assert sorted(re.findall(r"`([\w.]+)`", row)[1:]) == sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def leaves(path: tuple[str, ...] = ()) -> list[str]:
    below = valid_keys(path)
    return [leaf for key in below for leaf in leaves((*path, key))] if below else [".".join(path)]


@pytest.mark.parametrize("key", [key for key in leaves() if not key.startswith("model.rope_scaling.")])
def test_every_key_is_in_the_table_of_keys(key: str) -> None:
    name = key.rpartition(".")[2]
    assert name in WORDS or name in ("name", "source", "family"), f"README.md, Keys: {key} is missing"


def test_every_table_is_in_the_catalogue() -> None:
    catalogue = README.partition("The catalogue: ")[2].partition(".")[0]
    assert sorted(re.findall(r"`(\w+)`", catalogue)) == sorted(path.stem for path in (CONF / "sharding").glob("*.yaml"))


def test_the_verbs_of_the_usage_are_those_of_the_readme() -> None:
    from scaling_lab.__main__ import USAGE

    verbs = README.partition("\n## Verbs\n")[2].partition("\n## ")[0]
    told = {line.split()[0] for line in USAGE.splitlines() if re.match(r"  \w", line)}
    assert set(re.findall(r"^\| `(\w+)", verbs, re.MULTILINE)) == told
