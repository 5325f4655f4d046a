"""Plain dict -> Experiment: strict, every fault at once, dotted keys and the nearest valid name."""

import json

import pytest
from experiments import experiment, plain

from scaling_lab.config import experiment_from, to_plain, valid_keys
from scaling_lab.errors import ConfigError
from scaling_lab.plan.experiment import Experiment


def refusal(**choices):
    with pytest.raises(ConfigError) as caught:
        experiment(**choices)
    return str(caught.value)


def test_an_experiment_survives_its_plain_form():
    asked = experiment(model="llama3_8b", sharding="zero2", data="tokens")
    assert experiment_from(to_plain(asked)) == asked
    assert experiment_from(json.loads(json.dumps(to_plain(asked)))) == asked


def test_the_plain_form_keeps_the_groups_and_keys_of_the_config():
    assert to_plain(experiment()) == plain()
    assert list(to_plain(experiment())) == list(plain())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model.layers", 0, "model.layers=0: must be greater than or equal to 1"),
        ("model.layers", 1.5, "model.layers=1.5: must be a valid integer"),
        ("model.layers", True, "model.layers=true: must be a valid integer"),
        ("model.layers", "4", "model.layers='4': must be a valid integer"),
        ("model.layers", None, "model.layers=null: must be a valid integer"),
        ("model.bias", "yes", "model.bias='yes': must be a valid boolean"),
        ("model.bias", 1, "model.bias=1: must be a valid boolean"),
        ("model.norm", "rmsnorm", "model.norm='rmsnorm': not one of the choices (did you mean rms?)"),
        ("model.norm", "batch", "(one of rms, layer)"),
        ("workload.optimizer.lr", float("nan"), "workload.optimizer.lr=NaN: must be a finite number"),
        ("workload.optimizer.lr", float("inf"), "workload.optimizer.lr=Infinity: must be a finite number"),
        ("workload.optimizer.lr", 0.0, "workload.optimizer.lr=0.0: must be greater than 0"),
        ("workload.optimizer.b2", 1.0, "workload.optimizer.b2=1.0: must be less than 1"),
        ("workload.optimizer", None, "workload.optimizer=null: must be a group of keys"),
        ("workload.precision.reduce", "float8", "(did you mean float32?)"),
        ("workload.seed", -1, "workload.seed=-1: must be greater than or equal to 0"),
        ("mesh.order", None, "mesh.order=null: must be a list"),
        ("mesh.fsdp", 0, "mesh.fsdp=0: must be greater than or equal to 1"),
        ("sharding.weights.embed", "fsdp", "sharding.weights.embed='fsdp': must be a list; write [fsdp]"),
        ("sharding.weights.embed", None, "sharding.weights.embed=null: must be a list; write []"),
        ("sharding.weights.embed", [1], "sharding.weights.embed.0=1: must be a valid string"),
        ("backend.environment", {"A": 1}, "backend.environment.A=1: must be a valid string"),
        ("model.rope_scaling", {"factr": 8.0}, "model.rope_scaling.factr: unknown key (did you mean factor?)"),
        ("workload.stepz", 3, "workload.stepz: unknown key (did you mean steps?)"),
        ("workload.optimizer.lrate", 3, "workload.optimizer.lrate: unknown key (did you mean"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_dotted_key(key, value, words):
    lines = refusal(**{key: value}).splitlines()
    assert lines[0] == "the config is wrong:"
    assert any(words in line for line in lines[1:]), lines
    assert "pydantic" not in "".join(lines)


def test_every_fault_is_listed_at_once():
    message = refusal(**{"model.layers": 0, "workload.stepz": 1, "data.source": "std"})
    assert len(message.splitlines()) == 4
    for words in ("model.layers=0", "did you mean steps?", "did you mean stdlib?"):
        assert words in message


def test_a_missing_key_and_a_missing_group_are_named():
    asked = plain()
    del asked["model"]["layers"], asked["tracking"]
    with pytest.raises(ConfigError) as caught:
        experiment_from(asked)
    assert "  model.layers: missing\n  tracking: missing" in str(caught.value)


def test_an_unknown_group_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"shardings: unknown key \(did you mean sharding\?\)"):
        experiment_from({**plain(), "shardings": {}})


def test_integers_serve_where_numbers_are_asked_for():
    assert experiment(**{"workload.optimizer.clip": 1}).workload.optimizer.clip == 1.0


def test_an_experiment_cannot_be_changed():
    with pytest.raises(AttributeError):
        experiment().workload.steps = 3  # type: ignore[misc]


def test_valid_keys_follow_the_groups():
    assert valid_keys([]) == list(Experiment.__annotations__)
    assert "lr" in valid_keys(["workload", "optimizer"])
    assert valid_keys(["model", "rope_scaling"]) == ["factor", "low_freq_factor", "high_freq_factor", "original_sequence"]
    assert valid_keys(["nothing"]) == valid_keys(["model", "layers"]) == []
