"""Hydra's errors in words of the lab: what to write instead, ready to paste into a shell."""

from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from scaling_lab.explain import as_override, explain


def could_not(override: str) -> str:
    return f"Could not override '{override.partition('=')[0]}'.\nTo append to your config use +{override}"


def unreadable(*overrides: str) -> str:
    """The message for overrides that Hydra's own parser refuses."""
    with pytest.raises(HydraException) as caught:
        OverridesParser.create().parse_overrides(list(overrides))
    return explain(str(caught.value), overrides)


@pytest.mark.parametrize(
    ("override", "written"),
    [
        ("backend.environment={FOO: bar}", "+backend.environment.FOO=bar"),
        ("backend.environment={A: 1.10, B: true}", """'+backend.environment.A="1.10"' '+backend.environment.B="true"'"""),
        ("backend.environment.FOO=1", """'+backend.environment.FOO="1"'"""),
        ("sharding.gradients={embed: [data]}", "'+sharding.gradients.embed=[data]'"),
        ("sharding.gradients.embed=[data]", "'+sharding.gradients.embed=[data]'"),
        ("sharding.gradients={embed: []}", "'+sharding.gradients.embed=[]'"),
    ],
)
def test_new_keys_are_written_with_a_plus_where_they_may_have_any_name(override: str, written: str) -> None:
    assert explain(could_not(override)).endswith(f"Write {written}")


@pytest.mark.parametrize("override", ["backend.environment=[a]", "backend.environment={A: , B: {", "backend.environment=x"])
def test_what_is_no_group_of_keys_is_answered_with_the_form_of_one(override: str) -> None:
    assert (
        explain(could_not(override)) == "backend.environment: a group of keys; write +backend.environment.NAME=VALUE for each."
    )


@pytest.mark.parametrize("override", ["sharding.gradients.embd=[data]", "sharding.gradients={embd: [data]}"])
def test_a_row_that_no_table_has_is_answered_with_the_nearest_one(override: str) -> None:
    assert explain(could_not(override)) == "sharding.gradients.embd: unknown key (did you mean sharding.gradients.embed?)"


def test_a_key_of_a_group_with_fixed_keys_is_still_answered_with_the_nearest_one() -> None:
    assert explain(could_not("model.layrs=3")) == "model.layrs: unknown key (did you mean model.layers?)"


@pytest.mark.parametrize(
    ("override", "written"),
    [
        ("backend.xla_flags=[--xla_x=1]", """'backend.xla_flags=["--xla_x=1"]'"""),
        ("backend.xla_flags=--xla_x=1", """'backend.xla_flags=["--xla_x=1"]'"""),
        ("backend.xla_flags=[--xla_x=a,b, --xla_y=2]", """'backend.xla_flags=["--xla_x=a,b","--xla_y=2"]'"""),
        ("data.path=x=1", """'data.path="x=1"'"""),
        ("backend.environment.FOO=a=b", """'+backend.environment.FOO="a=b"'"""),
        ("+backend.environment.FOO=a=b", """'+backend.environment.FOO="a=b"'"""),
        ("backend.environment={FOO: a=b}", """'+backend.environment.FOO="a=b"'"""),
    ],
)
def test_a_value_that_holds_an_equals_sign_is_shown_with_its_quotes(override: str, written: str) -> None:
    message = unreadable("model.layers=3", override)
    assert message.startswith(f"cannot read the override {override!r}: a value that holds = needs quotes.")
    assert message.endswith(f"Write {written}")
    OverridesParser.create().parse_overrides(shlex.split(written))


def test_a_quoted_equals_sign_is_not_blamed() -> None:
    assert "needs quotes" not in unreadable('data.path="x=1"', "sharding.weights.embed=[a")


@pytest.mark.parametrize("value", ["bar", "1", "true", "null", "a b", "1.10", "it's", None, True, 3, 1e-8, ["a", "b"], []])
def test_values_are_read_back_as_they_were_written(value: object) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"key={as_override(value)}"])
    assert override.value() == value
