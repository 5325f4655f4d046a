"""Turns the text of a Hydra or OmegaConf error into one message with the nearest valid key. Knows their texts, not their code."""

from __future__ import annotations

import re

from scaling_lab.config import valid_keys
from scaling_lab.models.parameters import ACTIVATION_AXES, WEIGHT_AXES
from scaling_lab.plan.rules import nearest

#: The rows of a sharding table: keys that the config's types do not list.
_ROWS = {
    "sharding.activations": ACTIVATION_AXES,
    **dict.fromkeys(("sharding.weights", "sharding.gradients", "sharding.optimizer"), WEIGHT_AXES),
}


def explain(text: str) -> str:
    """One message: what was asked, and what the nearest valid key or choice is. Unknown texts are passed on whole."""
    if found := re.search(r"Could not override '([^']+)'", text):
        return _unknown_key(found[1])
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
