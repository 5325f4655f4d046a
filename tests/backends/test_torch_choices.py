"""Choices that the torch backend offers over one table: each gives the numbers of one device, and is refused where it cannot."""

from unittest import mock

import pytest
from cases import differences, ragged_batches
from experiments import FOUND
from test_parity import config, reference

from scaling_lab.backends.rows import local_batch
from scaling_lab.config import experiment_from
from scaling_lab.errors import PlanError
from scaling_lab.plan.plan import make_plan

pytestmark = pytest.mark.xdist_group("torch_parity")

WHOLE = {"sharding.weights.embed": [], "mesh.context": 2}
CHOICES = {
    "DDP": ("data", {"backend.data_parallel": "ddp"}),
    "DDP with checkpoints": ("data", {"backend.data_parallel": "ddp", "workload.remat": "full"}),
    "FSDP of the whole": ("data", {"backend.data_parallel": "fully_shard"}),
    "FSDP of the whole, kept, over two axes": (
        "context",
        {"backend.data_parallel": "fully_shard", "backend.reshard_after_forward": False, **WHOLE},
    ),
    "FSDP that keeps what it gathered": ("fsdp", {"backend.reshard_after_forward": False}),
    "FSDP and tensor, kept": ("fsdp_tensor", {"backend.reshard_after_forward": False}),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_gives_the_numbers_of_one_device(name, accumulation, torch_pool):
    table, keys = CHOICES[name]
    outcome = torch_pool(config("llama", table, "torch", accumulation, **keys), ragged_batches())
    assert differences(outcome, reference("llama")) == []


@pytest.mark.parametrize("sums", ["ddp", "fully_shard"])
@pytest.mark.parametrize(
    ("table", "words"), [("zero1", "embed.tokens over data"), ("fsdp", "over fsdp"), ("tensor", "over tensor")]
)
def test_torchs_sums_are_refused_where_the_table_asks_for_parts(table, words, sums):
    asked = experiment_from(config("llama", table, "torch", **{"backend.data_parallel": sums}))
    with pytest.raises(PlanError, match=rf"{words}\. Set sharding=data, or backend.data_parallel=buckets"):
        make_plan(asked, FOUND)


def test_ddp_is_refused_where_sums_have_a_dtype_of_their_own():
    asked = config("llama", "data", "torch", **{"backend.data_parallel": "ddp", "workload.precision.reduce": "bfloat16"})
    with pytest.raises(PlanError, match=r"Set workload.precision.reduce=float32, backend.data_parallel=fully_shard or"):
        make_plan(experiment_from(asked), FOUND)


def sums(session, job, batches):
    """Runs on a rank: the sizes of what is summed in a step, but for that of its metrics, which comes last."""
    import torch.distributed as dist

    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed:
        session.step(local_batch(job, *batches[0])).result()
    return [call.args[0].numel() for call in summed.call_args_list[:-1]]


def test_fsdp_of_the_whole_sums_each_layer_once_a_step(torch_ranks):
    """Whatever the microbatches: a layer has 2 x 32 x 32 + 2 x 32 x 16 + 3 x 32 x 64 + 2 x 32 weights; embedding, head, last norm."""
    asked = config("llama", "data", "torch", 2, **{"backend.data_parallel": "fully_shard"})
    for found in torch_ranks.run(asked, ragged_batches(), call=sums)["results"]:
        assert found == [9_280, 9_280, 2 * 32 * 64 + 32]
