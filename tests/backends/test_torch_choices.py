"""Choices that the torch backend offers over one table: each gives the numbers of one device, and is refused where it cannot."""

import pytest
from cases import differences, ragged_batches
from test_parity import config, reference
from torch_pool import TorchPoolError

pytestmark = pytest.mark.xdist_group("torch_parity")

CHOICES = {
    "DDP": ("data", {"backend.data_parallel": "ddp"}),
    "DDP with checkpoints": ("data", {"backend.data_parallel": "ddp", "workload.remat": "full"}),
    "FSDP that keeps what it gathered": ("fsdp", {"backend.reshard_after_forward": False}),
    "FSDP and tensor, kept": ("fsdp_tensor", {"backend.reshard_after_forward": False}),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_gives_the_numbers_of_one_device(name, accumulation, torch_pool):
    table, keys = CHOICES[name]
    outcome = torch_pool(config("llama", table, "torch", accumulation, **keys), ragged_batches())
    assert differences(outcome, reference("llama")) == []


@pytest.mark.parametrize("table", ["zero1", "fsdp", "tensor"])
def test_ddp_is_refused_where_the_table_asks_for_parts(table, torch_ranks):
    asked = config("llama", table, "torch", **{"backend.data_parallel": "ddp"})
    with pytest.raises(TorchPoolError, match=r"Set sharding=data, or backend.data_parallel=buckets"):
        torch_ranks.run(asked, [])
