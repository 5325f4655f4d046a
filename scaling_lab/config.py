"""Plain dict -> frozen dataclasses and back. Owns the messages for a wrong key, type or value; knows nothing of Hydra."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any, get_origin

from pydantic import TypeAdapter, ValidationError

from scaling_lab.errors import ConfigError
from scaling_lab.plan.experiment import Experiment
from scaling_lab.plan.plan import Plan
from scaling_lab.plan.rules import nearest


@functools.cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def experiment_from(plain: dict[str, Any]) -> Experiment:
    """The experiment that a resolved config asks for. Raises ConfigError listing every fault with its dotted key."""
    try:
        return _adapter(Experiment).validate_json(json.dumps(plain, default=str), strict=True)
    except ValidationError as error:
        lines = [_fault(dict(fault), plain) for fault in error.errors()]
        raise ConfigError("the config is wrong:\n" + "\n".join(f"  {line}" for line in dict.fromkeys(lines))) from None


def plan_from(text: str) -> Plan:
    """The plan as `plan.json` holds it."""
    return _adapter(Plan).validate_json(text)


def to_plain(value: Any) -> Any:
    """A frozen dataclass as plain dicts, lists and scalars, in the order of its fields."""
    return _adapter(value.__class__).dump_python(value, mode="json")


def _fault(fault: dict[str, Any], plain: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{key}: unknown key{nearest(str(fault['loc'][-1]), valid_keys(fault['loc'][:-1]))}"
    if fault["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{key}: missing"
    message = fault["msg"].replace("Input should be", "must be").replace("an object", "a group of keys")
    message = message[0].lower() + message[1:]
    if fault["type"] == "literal_error":
        allowed = fault["ctx"]["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        message = f"not one of the choices{nearest(str(fault['input']), allowed)}"
    if fault["type"] == "string_type" and takes(dict, fault["loc"][:-1]):
        message += f"; write '+{key}={json.dumps(str(fault['input']))}'"
    if fault["type"] == "string_pattern_mismatch":
        message = "a name has letters, digits, and . _ + - after the first of them"
    if fault["type"] in ("list_type", "tuple_type"):
        message = f"must be a list; write [{fault['input'] or ''}]" if key.startswith("sharding.") else "must be a list"
    return f"{key}={_written(fault['input'])}: {message}"


def _written(value: Any) -> str:
    """A value as YAML writes it, strings in quotes."""
    return repr(value) if isinstance(value, str) else json.dumps(value, default=str)


def valid_keys(parents: Sequence[Any]) -> list[str]:
    """The keys that the config knows below a dotted path; none where the path is unknown or has no fixed keys."""
    return list(next((found for kind in _kinds(parents) if (found := getattr(kind, "__pydantic_fields__", {}))), ()))


def takes(container: type, path: Sequence[Any]) -> bool:
    """Whether the key at a dotted path takes a `dict` with keys of any name, or a list (`tuple`)."""
    return any(get_origin(kind) is container for kind in _kinds(path))


def _kinds(path: Sequence[Any]) -> list[Any]:
    """What may stand at a dotted path; nothing where it is unknown."""
    kinds: list[Any] = [Experiment]
    for part in path:
        fields: dict[str, Any] = next((kind.__pydantic_fields__ for kind in kinds if hasattr(kind, "__pydantic_fields__")), {})
        kinds = _alternatives(fields[part].annotation) if part in fields else []
    return kinds


def _alternatives(annotation: Any) -> list[Any]:
    return [annotation, *getattr(annotation, "__args__", ())]
