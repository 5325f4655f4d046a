"""The sharding table: what it refuses, what it fills in, and the parallelism that is read off it."""

import pytest
from experiments import CONF, FOUND, experiment

from scaling_lab.errors import ConfigError, PlanError
from scaling_lab.models import decoder
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.plan import make_plan
from scaling_lab.plan.roles import REPEATED, role_of, roles
from scaling_lab.plan.rules import rules_from

TABLES = sorted(path.stem for path in (CONF / "sharding").glob("*.yaml"))


def rules(table="fsdp_tensor", **changes):
    asked = experiment(sharding=table, **{f"sharding.{key}": value for key, value in changes.items()})
    return rules_from(asked.sharding, asked.mesh.order)


def refusal(table="fsdp_tensor", error=ConfigError, **changes):
    with pytest.raises(error) as caught:
        make_plan(experiment(sharding=table, **changes), FOUND)
    return str(caught.value)


def plan(table, mesh, **changes):
    return make_plan(experiment(sharding=table, mesh=mesh, **changes), FOUND)


def test_a_misspelt_mesh_axis_is_refused_with_the_nearest_one():
    message = refusal(**{"sharding.weights.embed": ["fdsp"]})
    assert "sharding.weights.embed: unknown mesh axis 'fdsp' (did you mean fsdp?)" in message


def test_a_misspelt_row_is_refused_with_the_nearest_one():
    message = refusal(**{"sharding.weights.embd": ["fsdp"]})
    assert "sharding.weights.embd: unknown logical axis (did you mean embed?)" in message


def test_a_row_of_activations_is_no_row_of_weights():
    assert "sharding.gradients.batch: unknown logical axis" in refusal(**{"sharding.gradients.batch": ["data"]})


def test_a_missing_row_is_refused_since_replication_is_a_decision():
    asked = experiment()
    del asked.sharding.weights["mlp"]
    with pytest.raises(ConfigError, match=r"sharding\.weights: missing mlp; write `\[\]`"):
        make_plan(asked, FOUND)


def test_axes_out_of_mesh_order_are_refused_with_the_order_to_write():
    message = refusal(**{"sharding.activations.batch": ["fsdp", "data"]})
    assert "sharding.activations.batch: [fsdp, data] is not in mesh order; write [data, fsdp]" in message
    assert plan("fsdp_tensor", "auto", **{"sharding.activations.batch": ["data", "fsdp"]})


def test_mesh_order_is_that_of_the_mesh_asked_for():
    order = ["pipeline", "fsdp", "data", "expert", "context", "tensor"]
    changes = {"mesh.order": order, "sharding.activations.batch": ["fsdp", "data"]}
    changes["sharding.activations.expert_batch"] = ["fsdp", "data"]
    assert plan("fsdp_tensor", "auto", **changes).mesh.names == tuple(order)


def test_an_axis_twice_in_one_row_is_refused():
    message = refusal(**{"sharding.activations.batch": ["data", "data"]})
    assert "[data, data] names a mesh axis twice; write [data]" in message


def test_every_fault_of_a_table_is_listed_at_once():
    message = refusal(**{"sharding.weights.embed": ["fdsp"], "sharding.weights.mpl": [], "sharding.optimizer.mlp": ["tensr"]})
    for words in ("fdsp", "mpl", "tensr", "fsdp_tensor"):
        assert words in message


def test_gradients_and_optimizer_inherit_the_rows_they_do_not_name():
    assert rules("fsdp_tensor").gradients == rules("fsdp_tensor").weights == rules("fsdp_tensor").optimizer
    zero2 = rules("zero2")
    assert zero2.weights["embed"] == ()
    assert zero2.gradients["embed"] == zero2.optimizer["embed"] == ("data",)
    zero1 = rules("zero1")
    assert (zero1.gradients["embed"], zero1.optimizer["embed"]) == ((), ("data",))


def test_an_axis_spent_on_two_dims_of_a_tensor_is_refused_for_every_tensor():
    message = refusal(error=PlanError, **{"sharding.weights.mlp": ["fsdp", "tensor"]})
    for name in ("layers.mlp.gate", "layers.mlp.up", "layers.mlp.down"):
        assert f"{name} (weights): fsdp splits two dims of layers/" in message
    assert "layers.attention.query" not in message


def test_an_axis_of_size_1_may_be_named_anywhere():
    found = plan("fsdp_tensor", "one", **{"sharding.weights.mlp": ["fsdp", "tensor"]})
    assert all(p.weights.axes == () for p in found.parameters)


def test_an_axis_that_the_table_gives_no_work_is_refused_and_both_advices_plan():
    message = refusal("data", error=PlanError, mesh="fsdp8")
    assert "mesh.fsdp=8: the sharding table gives this axis no work" in message
    assert "Set mesh.fsdp=1, or name it in a row, such as sharding.activations.batch=[data,fsdp]." in message
    assert plan("data", "fsdp8", **{"mesh.fsdp": 1}).mesh.devices == 1
    assert plan("data", "fsdp8", **{"sharding.activations.batch": ["data", "fsdp"]}).batch.parts == 8


def test_fsdp_over_two_dims_of_a_parameter_is_refused():
    changes = {"sharding.weights.embed": ["data"], "sharding.weights.mlp": ["fsdp"], "mesh.data": 2, "mesh.fsdp": 2}
    message = refusal("fsdp", error=PlanError, **changes)
    assert "layers.mlp.up: fsdp axes store it over several dims" in message
    assert "put them all into one row" in message


@pytest.mark.parametrize("row", ["heads", "mlp", "vocab"])
def test_storing_over_an_axis_that_neither_computes_nor_divides_the_batch_is_refused(row):
    message = refusal("tensor", error=PlanError, **{f"sharding.activations.{row}": []})
    assert f"sharding.weights.{row} names tensor, sharding.activations.{row} does not" in message
    message = refusal("tensor", error=PlanError, **{f"sharding.weights.{row}": []})
    assert f"sharding.activations.{row} names tensor, sharding.weights.{row} does not" in message
    rows = ("heads", "kv_heads") if row == "heads" else (row,)
    assert plan("tensor", "auto", **{f"sharding.{column}.{name}": [] for column in ("weights", "activations") for name in rows})


def test_any_table_gets_stages_by_one_row():
    found = plan("data", "auto", **{"sharding.weights.layers": ["pipeline"], "mesh.pipeline": 2})
    assert found.roles["pipeline"] == ("pipeline", "repeated")


def test_a_sequence_split_inside_a_block_must_be_split_between_blocks_too_over_any_axis():
    changes = {"sharding.activations.batch": ["data"], "sharding.activations.sequence": ["fsdp"], "mesh.fsdp": 2}
    assert "write residual_sequence: [fsdp]" in refusal("fsdp", error=PlanError, **changes)
    both = {**changes, "sharding.activations.residual_sequence": ["fsdp"]}
    assert plan("fsdp", "auto", **both).roles["fsdp"] == ("fsdp",)


def test_gradients_may_not_be_split_less_than_weights():
    message = refusal("fsdp", error=PlanError, **{"sharding.gradients.embed": []})
    assert "sharding.gradients.embed drops fsdp, over which sharding.weights.embed is split; name it there too" in message


def test_state_may_not_be_split_over_an_axis_that_repeats_the_work():
    message = refusal("tensor", error=PlanError, **{"sharding.optimizer.embed": ["tensor"]})
    assert "tensor" in message


@pytest.mark.parametrize(
    ("table", "mesh", "expected"),
    [
        ("single", "auto", {}),
        ("data", "auto", {"data": ("data parallel",)}),
        ("zero1", "auto", {"data": ("data parallel",)}),
        ("zero2", "auto", {"data": ("data parallel",)}),
        ("fsdp", "auto", {"fsdp": ("fsdp",)}),
        ("hsdp", "data2_fsdp4", {"data": ("data parallel",), "fsdp": ("fsdp",)}),
        ("tensor", "auto", {"data": ("data parallel",), "tensor": ("tensor parallel", "repeated")}),
        ("tensor_sequence", "auto", {"data": ("data parallel",), "tensor": ("tensor parallel", "sequence parallel")}),
        ("fsdp_tensor", "auto", {"fsdp": ("fsdp",), "tensor": ("tensor parallel", "repeated")}),
        ("context", "auto", {"fsdp": ("fsdp",), "context": ("fsdp",)}),
        (
            "fsdp_tensor_context",
            "auto",
            {"fsdp": ("fsdp",), "context": ("fsdp",), "tensor": ("tensor parallel", "repeated")},
        ),
        (
            "fsdp_tensor_sequence",
            "data2_fsdp2_tensor2",
            {"data": ("data parallel",), "fsdp": ("fsdp",), "tensor": ("tensor parallel", "sequence parallel")},
        ),
    ],
)
def test_parallelism_is_read_off_the_table(table, mesh, expected):
    assert plan(table, mesh).roles == expected


def test_experts_are_kept_apart_and_the_dense_layers_are_data_parallel_over_their_axis():
    found = plan("fsdp_expert", "auto", model="tiny_moe")
    assert found.roles == {"expert": ("expert parallel", "data parallel"), "fsdp": ("fsdp",)}
    by_name = {p.parameter.name: p for p in found.parameters}
    experts, dense = by_name["layers.moe.up"], by_name["layers.attention.query"]
    assert (experts.compute.axes, experts.fsdp_axes, experts.sum_axes) == (("expert",), ("fsdp",), ("fsdp",))
    assert (dense.compute.axes, dense.fsdp_axes, dense.sum_axes) == ((), ("fsdp",), ("expert", "fsdp"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sharding.weights.experts": []}, "sharding.activations.experts names expert, sharding.weights.experts does not"),
        ({"sharding.activations.batch": ["data", "fsdp"]}, "name it in batch too"),
        ({"sharding.activations.expert_batch": ["data", "expert", "fsdp"]}, "write [data, fsdp]"),
        ({"mesh.expert": 8}, "experts 4 over 8 (mesh.expert=8): set model.moe.experts=8"),
    ],
)
def test_what_experts_cannot_do_is_refused_with_what_they_can(changes, words):
    assert words in refusal("fsdp_expert", error=PlanError, model="tiny_moe", **{"mesh.expert": 2, "mesh.fsdp": 1, **changes})


def test_a_row_that_the_model_does_not_use_gives_an_axis_no_work():
    message = refusal("single", error=PlanError, **{"sharding.activations.expert_batch": ["data"], "mesh.data": 2})
    assert "mesh.data=2: the sharding table gives this axis no work" in message


def test_every_shipped_table_is_read_above():
    assert TABLES == [
        "context",
        "data",
        "expert",
        "fsdp",
        "fsdp_expert",
        "fsdp_expert_tensor",
        "fsdp_tensor",
        "fsdp_tensor_context",
        "fsdp_tensor_sequence",
        "hsdp",
        "pipeline",
        "pipeline_context",
        "pipeline_fsdp",
        "pipeline_fsdp_tensor",
        "single",
        "tensor",
        "tensor_sequence",
        "zero1",
        "zero2",
    ]


def test_a_parameter_without_an_embed_dim_stays_whole_under_fsdp():
    asked = experiment(sharding="fsdp", model="tiny_gpt2", **{"workload.sequence": 64})
    whole = {p.parameter.name for p in make_plan(asked, FOUND).parameters if p.weights.axes == ()}
    assert whole == {f"layers.{name}_bias" for name in ("attention.query", "attention.key", "attention.value", "mlp.up")}
    rules_ = rules_from(asked.sharding, asked.mesh.order)
    bias = next(p for p in decoder.parameters(asked.model) if p.name == "layers.mlp.up_bias")
    assert role_of("fsdp", bias, rules_) == "data parallel"


def test_roles_of_one_parameter_differ_from_those_of_another():
    asked = experiment(sharding="fsdp_tensor")
    table = rules_from(asked.sharding, asked.mesh.order)
    mesh = make_plan(asked, FOUND).mesh
    found = {p.name: {axis: r[0] for axis, r in roles((p,), table, mesh).items()} for p in decoder.parameters(asked.model)}
    assert found["layers.mlp.up"] == {"fsdp": "fsdp", "tensor": "tensor parallel"}
    assert found["final_norm.scale"] == {"fsdp": "fsdp", "tensor": "repeated"}


def test_roles_come_in_one_order_whatever_parameter_a_model_begins_with():
    asked = experiment(sharding="fsdp_tensor")
    table = rules_from(asked.sharding, asked.mesh.order)
    mesh = make_plan(asked, FOUND).mesh
    parameters = decoder.parameters(asked.model)
    turned = roles(tuple(reversed(parameters)), table, mesh)
    assert turned == roles(parameters, table, mesh)
    assert turned["tensor"][-1] == REPEATED


def test_keys_and_values_may_stay_whole_where_the_queries_heads_are_split():
    changes = {"sharding.weights.kv_heads": [], "sharding.activations.kv_heads": [], "mesh.tensor": 4, "mesh.data": 2}
    found = plan("tensor", "auto", **changes)
    layouts = {p.parameter.name: p.weights for p in found.parameters}
    assert layouts["layers.attention.query"] == Layout(((), (), ("tensor",), ()))
    assert layouts["layers.attention.key"] == Layout(((), (), (), ()))
