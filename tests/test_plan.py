"""The whole plan: bytes, batch, processes, refusals whose advice works, and its JSON."""

import json
import re

import pytest
from experiments import FOUND, experiment

from scaling_lab.config import plan_from, to_plain
from scaling_lab.errors import ConfigError, LabError, PlanError
from scaling_lab.plan.layout import Layout
from scaling_lab.plan.plan import Found, make_plan

#: No machine: memory is unknown, so that only sizes are refused.
ENDLESS = Found("cpu", 8, True, None)


def plan(found=FOUND, **choices):
    return make_plan(experiment(**choices), found)


def refusal(error=PlanError, found=ENDLESS, **choices):
    with pytest.raises(LabError) as caught:
        plan(found, **choices)
    assert type(caught.value) is error, caught.value
    return str(caught.value)


def followed(message, found=ENDLESS, **choices):
    """A plan for each `set KEY=A or B` of the message: the first values together, and the last values together."""
    advice = re.findall(r"[sS]et ([\w.]+=\w+(?: or (?:[\w.]+=)?\d+)*)", message)
    assert advice, message
    for pick in (0, -1):
        keys = {}
        for sentence in advice:
            options = re.split(r" or ", sentence)
            key = (options[pick] if "=" in options[pick] else options[0]).split("=")[0]
            value = options[pick].split("=")[-1]
            keys[key] = None if value == "null" else int(value) if value.isdigit() else value
        plan(found, **{**choices, **keys})
    return advice


# -- layouts of parameters ------------------------------------------------------------------------------------------------


def test_a_parameter_is_stored_over_fsdp_and_tensor_and_computed_over_tensor():
    planned = {p.parameter.name: p for p in plan(sharding="fsdp_tensor").parameters}
    query = planned["layers.attention.query"]  # (layers, embed, heads, head_dim)
    assert query.weights == query.gradients == query.optimizer == Layout(((), ("fsdp",), ("tensor",), ()))
    assert query.compute == Layout(((), (), ("tensor",), ()))
    assert (query.fsdp_axes, query.sum_axes) == (("fsdp",), ("fsdp",))


def test_zero1_and_zero2_split_what_their_names_say():
    for table, gradients in (("zero1", ()), ("zero2", ("data",))):
        up = {p.parameter.name: p for p in plan(sharding=table).parameters}["layers.mlp.up"]
        assert up.weights == up.compute == Layout(((), (), ()))
        assert up.gradients.dims[1] == gradients
        assert up.optimizer.dims[1] == ("data",)
        assert (up.fsdp_axes, up.sum_axes) == ((), ("data",))


def test_gradients_are_summed_over_every_axis_that_divides_the_tokens():
    planned = {p.parameter.name: p for p in plan(sharding="fsdp_tensor_sequence", mesh="data2_fsdp2_tensor2").parameters}
    assert planned["layers.mlp.up"].sum_axes == ("data", "fsdp")
    # a norm works on each device's own part of the sequence: its gradient is summed over tensor too
    assert planned["final_norm.scale"].sum_axes == ("data", "fsdp", "tensor")
    planned = {p.parameter.name: p for p in plan(sharding="fsdp_tensor", mesh="data2_fsdp2_tensor2").parameters}
    assert planned["final_norm.scale"].sum_axes == ("data", "fsdp")


# -- bytes ------------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_single_device_are_sixteen_a_parameter_and_the_activations():
    found = plan(sharding="single").bytes_per_device
    assert found["parameters"] == found["gradients"] == 4 * 853_120
    assert found["optimizer"] == 2 * 4 * 853_120
    assert found["gathered"] == 0
    # 16 rows x 256 tokens; a layer keeps 2 x 128 of the residual stream, 2 x 128 of norms, 128 queries, 2 x 64 keys and values,
    # 128 of attention output, 3 x 384 of the mlp: 2,048 values; 4 layers; logits and their gradient 2 x 256.
    assert found["activations"] == 4 * (16 * 256) * (4 * 2048 + 2 * 256)
    assert found["total"] == sum(size for part, size in found.items() if part != "total")


def test_bytes_fall_with_the_devices_that_store_in_parts():
    whole, parts = plan(sharding="data").bytes_per_device, plan(sharding="fsdp").bytes_per_device
    for part in ("parameters", "gradients", "optimizer"):
        assert parts[part] * 8 == whole[part]  # every parameter of tiny has an embed dim
    # gathered at once: one layer, 2 x 128 x 128 + 2 x 128 x 64 + 3 x 128 x 384 + 2 x 128 = 196,864; embedding, head, last norm
    assert parts["gathered"] == 4 * (196_864 + 2 * 256 * 128 + 128)
    assert parts["activations"] == whole["activations"] == plan(sharding="single").bytes_per_device["activations"] // 8


def test_zero1_saves_optimizer_bytes_and_zero2_gradient_bytes_too():
    data, zero1, zero2 = (plan(sharding=table).bytes_per_device for table in ("data", "zero1", "zero2"))
    assert zero1["optimizer"] == zero2["optimizer"] == data["optimizer"] // 8
    assert zero1["gradients"] == data["gradients"]
    assert zero2["gradients"] == data["gradients"] // 8
    assert zero1["parameters"] == zero2["parameters"] == data["parameters"]


def test_bytes_follow_precision_optimizer_remat_and_accumulation():
    base = plan().bytes_per_device
    half = plan(**{"workload.precision.compute": "bfloat16"}).bytes_per_device
    assert half["parameters"] == base["parameters"]
    assert half["gathered"] * 2 == base["gathered"]
    assert plan(**{"workload.optimizer.name": "sgd"}).bytes_per_device["optimizer"] == 0
    momentum = {"workload.optimizer.name": "sgd", "workload.optimizer.momentum": 0.9}
    assert plan(**momentum).bytes_per_device["optimizer"] * 2 == base["optimizer"]
    assert plan(**{"workload.accumulation": 4}).bytes_per_device["activations"] * 4 == base["activations"]
    kept = [plan(**{"workload.remat": remat}).bytes_per_device["activations"] for remat in ("none", "dots", "full")]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3


def test_the_sequence_between_blocks_in_parts_saves_activations():
    whole, parts = plan(sharding="tensor").bytes_per_device, plan(sharding="tensor_sequence").bytes_per_device
    # tensor 2, data 4: half of 2 x 128 values of 4 layers for 4 rows x 256 tokens, in float32
    assert whole["activations"] - parts["activations"] == 4 * 4 * (4 * 256) * 128


# -- batch and processes ----------------------------------------------------------------------------------------------------


def test_a_batch_that_does_not_split_is_refused_with_the_nearest_sizes():
    message = refusal(**{"workload.global_batch": 18})
    assert "workload.accumulation=1 microbatches over 4 parts (fsdp 4): it must be a multiple of 4" in message
    assert "Set workload.global_batch=16 or 20." in message
    assert followed(message, **{"workload.global_batch": 18})
    assert "Set workload.global_batch=4." in refusal(**{"workload.global_batch": 3})
    assert "Set workload.global_batch=12 or 24." in refusal(**{"workload.accumulation": 3})


def test_one_process_a_host_for_jax_and_one_a_device_for_torch():
    jax, torch = plan(backend="jax", **{"mesh.hosts": 2}), plan(backend="torch", **{"mesh.hosts": 2})
    assert (jax.processes, jax.devices_per_process) == (2, 4)
    assert (torch.processes, torch.devices_per_process) == (8, 1)


# -- refusals ---------------------------------------------------------------------------------------------------------------


def test_fewer_key_value_heads_than_tensor_devices_are_refused_and_the_advice_plans():
    choices = {"sharding": "tensor", "mesh.tensor": 4}
    message = refusal(**choices)
    assert "kv_heads 2 over 4 (mesh.tensor=4): set model.kv_heads=4, or let mesh.tensor divide 2" in message
    for name in ("layers.attention.key", "layers.attention.value", "activation `keys and values`"):
        assert name in message
    followed(message, **choices)
    assert plan(**{**choices, "mesh.tensor": 2})


def test_the_vocabulary_of_gpt2_does_not_divide_and_the_advice_plans():
    choices = {"model": "gpt2_124m", "sharding": "tensor", "mesh.tensor": 4}  # 50257 = 29 x 1733
    message = refusal(**choices)
    assert (
        "vocab 50257 over 4 (mesh.tensor=4): set model.vocab=50260 or model.vocab_multiple=4, or let mesh.tensor divide 50257"
        in message
    )
    assert "embed.tokens, activation `logits`" in message
    followed(message, **choices)


def test_all_sizes_that_do_not_divide_are_listed_at_once():
    sizes = {"model.vocab": 257, "model.mlp": 101, "model.embed": 130, "workload.global_batch": 6, "workload.sequence": 37}
    message = refusal(sharding="fsdp_tensor_sequence", **sizes)
    for words in ("vocab 257 over 2", "mlp 101 over 2", "embed 130 over 4", "residual_sequence 37 over 2", "global_batch=6"):
        assert words in message
    assert "kv_heads" not in message
    followed(message, sharding="fsdp_tensor_sequence", **sizes)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor"),
    [(10, 5, 2), (6, 2, 4), (7, 1, 2), (12, 3, 2), (12, 2, 4), (9, 9, 8), (2, 2, 8), (15, 3, 4)],
)
def test_advice_on_heads_keeps_them_multiples_of_key_value_heads(heads, kv_heads, tensor):
    choices = {"sharding": "tensor", "model.heads": heads, "model.kv_heads": kv_heads, "mesh.tensor": tensor, "mesh.data": 1}
    followed(refusal(**choices), **choices)


def test_optimizer_state_that_does_not_divide_is_refused_too():
    choices = {"sharding": "zero1", "model.embed": 132}
    message = refusal(**choices)
    assert "embed 132 over 8 (mesh.data=8): set model.embed=128 or 136" in message
    followed(message, **choices)


def test_a_sequence_is_never_advised_beyond_the_position_table():
    choices = {"model": "tiny_gpt2", "sharding": "tensor_sequence", "workload.sequence": 63, "model.max_sequence": 63}
    message = refusal(**choices)
    assert "set workload.sequence=62, or let" in message
    followed(message, **choices)


def test_memory_that_is_too_small_is_refused_with_a_workload_that_fits():
    choices = {"sharding": "data", "workload.global_batch": 64}
    small = Found("cpu", 8, True, 31 << 20)
    message = refusal(found=small, **choices)
    # 16 x 853,120 bytes = 13.0 MiB of state, 4 x 64 / 8 x 256 x 8,704 bytes = 68 MiB of activations; a quarter of them is 17
    assert "needs 81.0 MiB per device, hardware `this` has 31.0 MiB; the largest part is activations (68.0 MiB)." in message
    assert "Set workload.accumulation=4 workload.remat=none, which needs 30.0 MiB." in message
    assert plan(small, **choices, **{"workload.accumulation": 4})


def test_memory_that_no_workload_fits_is_refused_with_what_stores_less():
    message = refusal(found=Found("cpu", 8, True, 8 << 20), sharding="data")
    assert "No accumulation or remat makes it fit: use a table that stores more in parts (sharding=fsdp)" in message
    assert plan(Found("cpu", 8, True, 8 << 20), sharding="fsdp", **{"workload.accumulation": 2, "workload.remat": "full"})


def test_unknown_memory_refuses_nothing():
    assert plan(ENDLESS, model="llama3_405b", sharding="single").bytes_per_device["parameters"] == 4 * 405_853_388_800


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"model.kv_heads": 3}, "model.heads=4 is not a multiple of model.kv_heads=3. Set model.kv_heads=2."),
        ({"model.head_dim": 33}, "model.head_dim=33 is odd: rotary positions turn pairs. Set model.head_dim=34."),
        ({"model.max_sequence": 64}, "model.max_sequence=64 has no meaning with model.positions=rope."),
        ({"model.positions": "learned"}, "model.max_sequence is null: learned positions need"),
        ({"model": "tiny_gpt2"}, "workload.sequence=256 is longer than model.max_sequence=64. Set workload.sequence=64."),
        ({"workload.untimed_steps": 100}, "workload.untimed_steps=100 leaves none of workload.steps=100 to time."),
        ({"workload.steps": 1, "workload.untimed_steps": 1}, "Set workload.untimed_steps=0."),
        (
            {"backend.compile": True},
            "backend.compile=true is for backend=torch; jax has no use for it. Set backend.compile=null.",
        ),
        ({"backend": "torch", "backend.scan_layers": False}, "backend.scan_layers=false is for backend=jax"),
        ({"workload.optimizer.momentum": 0.9}, "workload.optimizer.momentum=0.9 is for workload.optimizer.name=sgd"),
    ],
)
def test_contradictions_are_wrong_requests_and_the_advice_plans(choices, words):
    message = refusal(ConfigError, **choices)
    assert words in message
    followed(message, **choices)


def test_rope_scaling_without_rotary_positions_is_a_wrong_request():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_sequence": 64}
    choices = {"model": "tiny_gpt2", "workload.sequence": 64, "model.rope_scaling": scaling}
    followed(refusal(ConfigError, **choices), **choices)


def test_contradictions_are_listed_together():
    message = refusal(ConfigError, **{"model.kv_heads": 3, "model.head_dim": 33, "workload.untimed_steps": 100})
    assert len(message.splitlines()) == 3


@pytest.mark.parametrize(
    "choices",
    [
        {"workload.sequence": 1},
        {"model.layers": 1},
        {"workload.steps": 0},
        {"workload.steps": 1, "workload.untimed_steps": 0},
        {"model": "tiny_gpt2", "sharding": "fsdp", "workload.sequence": 37, "model.vocab": 257, "model.layers": 3},
    ],
)
def test_small_and_odd_sizes_that_divide_are_planned(choices):
    assert plan(**choices).parameter_count > 0


@pytest.mark.parametrize("key", ["model.layers", "model.embed", "workload.global_batch", "workload.sequence"])
def test_sizes_beyond_any_machine_are_refused_not_crashed_on(key):
    assert "GiB" in refusal(found=FOUND, **{key: 2**62})


# -- plan.json --------------------------------------------------------------------------------------------------------------


def test_the_plan_survives_its_json():
    for table in ("fsdp_tensor", "zero1", "single"):
        made = plan(sharding=table, **{"mesh.hosts": 1})
        assert plan_from(json.dumps(to_plain(made))) == made


def test_planning_twice_gives_the_same_plan():
    assert json.dumps(to_plain(plan())) == json.dumps(to_plain(plan()))


def test_the_plan_carries_counts_and_flops():
    made = plan()
    assert made.parameter_count == 853_120
    # 6 x 820,352 + 12 x 4 x 4 x 32 x 256; half of the second term when causal
    assert made.flops_per_token == 4_922_112 + 1_572_864
    assert made.flops_per_token_causal == 4_922_112 + 786_432


MOE = {"model": "tiny_moe", "sharding": "fsdp_expert"}
LATENT = {"query_rank": None, "kv_rank": 32, "rope_dim": 16, "nope_dim": 32, "value_dim": 32}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.moe.experts_per_token": 5}, "Set model.moe.experts_per_token=4."),
        ({"model.moe.dense_layers": 4}, "leaves no layer of model.layers=4 with experts. Set model.moe.dense_layers=3"),
        ({"model.bias": True}, "experts have no biases. Set model.bias=false."),
        ({"model.moe.capacity_factor": 2.0}, "Set model.moe.capacity_factor=null, which drops none."),
        ({"model.latent": LATENT}, "Set model.kv_heads=4."),
        ({"model.latent": LATENT}, "Set model.head_dim=48."),
        ({"model.latent": {**LATENT, "rope_dim": 15}}, "Set model.latent.rope_dim=16."),
        ({"model.latent": LATENT, "model.qk_norm": True}, "Set model.qk_norm=false."),
    ],
)
def test_mixtures_and_latent_attention_that_contradict_themselves_are_wrong_requests(changes, words):
    assert words in refusal(ConfigError, **{**MOE, **changes})


def test_fsdp_of_whole_weights_computes_with_a_second_copy_of_a_layer():
    """As large as what FSDP gathers where it stores parts; on a single device there is nothing to hold."""
    whole = {"backend": "torch", "backend.data_parallel": "fully_shard"}
    fsdp, data, alone = (
        plan(sharding=table, **keys).bytes_per_device
        for table, keys in (("fsdp", {"backend": "torch"}), ("data", whole), ("single", whole))
    )
    assert (data["gathered"], alone["gathered"]) == (fsdp["gathered"], 0)


def test_experts_are_stored_once_over_their_axis_and_gathered_over_none():
    """tiny_moe has 4 x 4 experts of 3 x 128 x 192 = 1,179,648 parameters; over expert 2 each device keeps half of them."""
    one, two = (plan(**{**MOE, "mesh.fsdp": 1, "mesh.expert": n, "mesh.data": 2 // n}).bytes_per_device for n in (1, 2))
    assert one["parameters"] - two["parameters"] == 4 * 1_179_648 // 2
    assert (one["gathered"], two["gathered"]) == (0, 0)


def test_the_gathered_layer_is_the_larger_one_of_two_stacks():
    changes = {**MOE, "mesh.fsdp": 2, "mesh.expert": 1, "model.moe.dense_layers": 2}
    small, large = (plan(**changes, **{"model.mlp": mlp}).bytes_per_device["gathered"] for mlp in (64, 4096))
    # A dense layer of 3 x 128 x 4096 exceeds one with 4 experts of 3 x 128 x 192 by 786,432 elements; the router is 512 more.
    assert large - small == 4 * (3 * 128 * (4096 - 4 * 192) - 128 * 4)


@pytest.mark.parametrize("name", ["", "a/b", "../up", 'x"y', "$HOME", " "])
def test_a_name_that_could_not_be_a_folders_is_a_wrong_request(name):
    message = refusal(ConfigError, **{"sharding.name": name})
    assert "sharding.name=" in message
    assert "a name has letters, digits, and . _ + -" in message


def test_a_torch_process_for_several_devices_is_refused_while_planning():
    assert "Set backend.processes=per_device." in refusal(ConfigError, backend="torch", **{"backend.processes": "per_host"})
