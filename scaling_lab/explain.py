"""Turns the text of a Hydra or OmegaConf error into one message with the nearest valid key. Knows their texts, not their code."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

import yaml

from scaling_lab.config import takes, valid_keys
from scaling_lab.models.parameters import ACTIVATION_AXES, WEIGHT_AXES
from scaling_lab.plan.rules import nearest

#: The rows of a sharding table: keys that the config's types do not list.
_ROWS = {
    "sharding.activations": ACTIVATION_AXES,
    **dict.fromkeys(("sharding.weights", "sharding.gradients", "sharding.optimizer"), WEIGHT_AXES),
}

#: Text that the command line gives as it is; and a value that holds a `=` outside of quotes.
BARE = re.compile(r"[A-Za-z_][\w./-]*")
LOOSE_EQUALS = re.compile(r"""(?:[^'"=]|'[^']*'|"[^"]*")*=""")


def explain(text: str, overrides: Sequence[str] = ()) -> str:
    """One message: what was asked, and what the nearest valid key or choice is. Unknown texts are passed on whole.

    overrides: those of the command line, since some texts do not say which one they are about
    """
    if found := re.search(r"Could not override '([^']+)'(?:.*use \+([^\n]*))?", text, re.DOTALL):
        return _new_keys(found[1], (found[2] or "").partition("=")[2]) or _unknown_key(found[1])
    if re.search(r"no viable alternative|mismatched input|extraneous input", text):
        for override in overrides:
            key, _, value = override.partition("=")
            if not key.startswith("-") and LOOSE_EQUALS.match(value):
                fault = f"cannot read the override {override!r}: a value that holds = needs quotes."
                return f"{fault} {_new_keys(key.lstrip('+'), value) or f'Write {_quoted(key, value)}'}"
    if found := re.search(r"Could not find '([^']+)'", text):
        listed = re.search(r"Available options in '[^']+':\n((?:\t[^\t\n=]*\n)*)", text)
        return _unknown_choice(found[1], listed[1].replace("\t", "").split() if listed else [])
    if found := re.search(r"Key '([^']+)' is not in struct\s+full_key: (\S+)", text):
        return _unknown_key(found[2])
    if found := re.search(r"Error parsing override '([^']*)'\s+(.*)", text):
        return f"cannot read the override {found[1]!r}: {found[2]}. Overrides are KEY=VALUE; quote values that hold , {{ or spaces."
    if found := re.search(r"Error merging override ([^\s=]+)=(\S*)", text):
        return f"{found[1]}={found[2]}: this value does not fit there; `scaling-lab run --cfg job` shows the form of each key."
    if "Config group override must be a string" in text:
        return "a config group is chosen by name, GROUP=NAME, such as model=tiny; it cannot be null or a mapping."
    lines = [line for line in text.splitlines() if line.strip() and "hydra.cc" not in line]
    return "\n".join(lines)


def as_override(value: Any) -> str:
    """A value as Hydra's command line reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, str) and BARE.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value)


def _quoted(key: str, value: str) -> str:
    """The override as a shell and Hydra read it; where the key takes a list, as one."""
    value = value.strip()
    if not value.startswith("[") and not takes(tuple, key.lstrip("+").split(".")):
        return shlex.quote(f"{key}={as_override(value)}")
    inner = value.removeprefix("[").removesuffix("]").strip()
    items = re.split(r",\s*(?=-)" if inner.startswith("-") else r",\s*", inner)  # a flag's value may hold commas
    return shlex.quote(f"{key}={as_override([item.strip(chr(34) + chr(39)) for item in items])}")


def _new_keys(key: str, value: str) -> str | None:
    """How to add keys to a group that may hold more than it does: Hydra wants a plus. None where the group is fixed."""
    path = key.split(".")
    if not (takes(dict, path) or takes(dict, path[:-1])):
        return None
    try:
        given = yaml.load(value, yaml.BaseLoader)  # texts, as written: 1.10 stays 1.10
    except yaml.YAMLError:
        given = None
    if not takes(dict, path):
        given = {path.pop(): given}
    if not isinstance(given, dict) or not given or None in given.values():
        return f"{key}: a group of keys; write +{key}.NAME=VALUE for each."
    rows = _ROWS.get(".".join(path))
    if unknown := [name for name in given if rows and name not in rows]:
        return _unknown_key(".".join([*path, unknown[0]]))
    added = [shlex.quote(f"+{'.'.join(path)}.{name}={as_override(one)}") for name, one in given.items()]
    return f"{key}: Hydra adds new keys to a group only if told so. Write {' '.join(added)}"


def _unknown_key(key: str) -> str:
    parents, name = key.split(".")[:-1], key.split(".")[-1]
    for depth, parent in enumerate(parents):
        if parent not in valid_keys(parents[:depth]):
            parents, name = parents[:depth], parent
            break
    choices = valid_keys(parents) or list(_ROWS.get(".".join(parents), ()))
    if parents[:1] == ["hydra"] or not choices:
        return f"{key}: unknown key"
    where = ".".join([*parents, name])
    if where == key:
        return f"{key}: unknown key{_dotted(nearest(name, choices), parents)}"
    return f"{key}: unknown key; {where} is not a key{nearest(name, choices)}"


def _dotted(hint: str, parents: list[str]) -> str:
    """The hint with the nearest key written out from the top."""
    return re.sub(r"did you mean (\S+?)\?", lambda m: f"did you mean {'.'.join([*parents, m[1]])}?", hint)


def _unknown_choice(option: str, choices: list[str]) -> str:
    group, _, name = option.rpartition("/")
    if not choices:
        return f"{option!r} is not a config file or group{nearest(option, valid_keys([]))}"
    return f"{group}={name}: there is no such choice{nearest(name, choices)}"
