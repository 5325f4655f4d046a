"""What a config asks, as frozen dataclasses: one field per key, in the groups of `conf/`. Owns no decisions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from scaling_lab.models.model import STRICT, Count, Model, Name, Positive, Size

Fraction = Annotated[float, Field(ge=0, le=1)]
#: A decay rate: 1 would never forget, and AdamW divides by 1 - rate.
Decay = Annotated[float, Field(ge=0, lt=1)]
DType = Literal["float32", "bfloat16", "float16"]
#: A sharding table's rows: logical axis -> mesh axes, outermost first.
Rows = dict[str, tuple[str, ...]]

MESH_AXES = ("pipeline", "data", "expert", "fsdp", "context", "tensor")


@dataclass(frozen=True, config=STRICT)
class MeshConfig:
    """Sizes of the mesh's axes. A null size is chosen by the `auto` rule; null devices: 8 simulated, or all found.

    hosts: null for as many as `devices_per_host`, else the hardware's, makes; one where neither is known
    """

    name: Name
    pipeline: Size | None
    data: Size | None
    expert: Size | None
    fsdp: Size | None
    context: Size | None
    tensor: Size | None
    devices: Size | None
    hosts: Size | None
    devices_per_host: Size | None
    order: tuple[str, ...]


@dataclass(frozen=True, config=STRICT)
class ShardingConfig:
    """The sharding table. `gradients` and `optimizer` hold only the rows that differ from `weights`."""

    name: Name
    weights: Rows
    activations: Rows
    gradients: Rows
    optimizer: Rows


@dataclass(frozen=True, config=STRICT)
class Precision:
    """params: storage and optimizer state; compute: products; reduce: gradient sums between devices."""

    params: DType
    compute: DType
    reduce: DType


@dataclass(frozen=True, config=STRICT)
class Optimizer:
    """lr is the peak; warmup_steps rises linearly from 0; final_lr_fraction x lr is where the schedule ends.

    b1, b2, eps: AdamW only; momentum: SGD only. clip: largest global gradient norm, null for none.
    """

    name: Literal["adamw", "sgd"]
    lr: Positive
    schedule: Literal["cosine", "linear", "constant"]
    warmup_steps: Count
    final_lr_fraction: Fraction
    b1: Decay
    b2: Decay
    eps: Positive
    momentum: Decay
    weight_decay: Annotated[float, Field(ge=0)]
    clip: Positive | None


@dataclass(frozen=True, config=STRICT)
class Evaluation:
    """Every how many optimizer steps (0: never) to evaluate, on how many batches of global_batch rows (null: all)."""

    every: Count
    batches: Size | None


@dataclass(frozen=True, config=STRICT)
class Context:
    """Where the table splits the sequence inside a block: how attention meets the other parts' keys and values, and the split.

    strategy: `gather` them all, pass them round a `ring`, or exchange tokens for heads by `all_to_all` (Ulysses)
    zigzag: parts of equal work under a causal mask (`all_to_all` has no use for it)
    """

    strategy: Literal["gather", "ring", "all_to_all"]
    zigzag: bool


@dataclass(frozen=True, config=STRICT)
class Pipeline:
    """Where the table splits the layers into stages: how microbatches of a device's rows go through them.

    schedule: `gpipe`, all forward passes before all backward ones; `1f1b`, by turns, so that fewer activations are held;
    `interleaved`, with virtual_stages chunks of layers on each stage, in torch by turns too
    microbatches: null for 4, 2 or 1 times the stages, the first that divides the rows
    virtual_stages: null for 2 if interleaved, else 1
    """

    schedule: Literal["gpipe", "1f1b", "interleaved"]
    microbatches: Size | None
    virtual_stages: Size | None


@dataclass(frozen=True, config=STRICT)
class Workload:
    """global_batch: rows per optimizer step; accumulation: microbatches it is split into; seed: of the parameters.

    loss_chunks: parts of a device's sequence whose logits are made and used one after the other, never kept; 1: all at once
    """

    name: Name
    global_batch: Size
    sequence: Size
    steps: Count
    untimed_steps: Count
    accumulation: Size
    seed: Count
    remat: Literal["none", "dots", "full"]
    loss_chunks: Size
    context: Context
    pipeline: Pipeline
    precision: Precision
    optimizer: Optimizer
    evaluation: Evaluation


@dataclass(frozen=True, config=STRICT)
class DataConfig:
    """Which tokens. A key that a source has no use for is null.

    path: file, folder or glob (`text`), or array of token ids (`tokens`); tokenizer: a tokenizer.json, null for bytes
    dtype: of a raw `tokens` file, null for .npy; validation_fraction: share held out at the end of the corpus
    validation_path: held-out data of its own, instead of a share of `path`
    seed: of the shuffled order; ragged: rows end early at pseudo-random lengths, the rest padded and ignored
    record_samples: write each step's sample ids to records.jsonl
    pack: tokens see only their own document; document_end: the id after which one ends (`tokens`, if packed)
    """

    source: Literal["synthetic", "stdlib", "english", "text", "tokens"]
    path: str | None
    validation_path: str | None
    tokenizer: str | None
    dtype: Literal["uint16", "uint32"] | None
    validation_fraction: Annotated[float, Field(ge=0, lt=1)]
    seed: Count
    shuffle: bool
    ragged: bool
    record_samples: bool
    pack: bool
    document_end: Count | None


@dataclass(frozen=True, config=STRICT)
class BackendConfig:
    """processes: how many worker processes a host gets. Keys below it belong to one backend and are null in the other.

    module (jax): the library whose modules hold the weights
    axis_types (jax): who decides where results lie between constraints, XLA's partitioner (`auto`) or types (`explicit`)
    scan_layers (jax): one scanned layer body instead of an unrolled stack; partitioner (jax): which of XLA's splits the program
    compile (torch): torch.compile each layer; reshard_after_forward (torch): FSDP frees a gathered layer until its backward pass
    data_parallel (torch): who sums the gradients of whole weights, `buckets` of the lab's, or where nothing is in parts torch
    itself: `ddp`, DistributedDataParallel, or `fully_shard`, FSDP2 on a mesh of copies
    attention: `fused` is the lab's or the library's fused kernel, `plain` is softmax written out
    """

    name: Literal["jax", "torch"]
    processes: Literal["per_host", "per_device"]
    attention: Literal["fused", "plain"]
    module: Literal["flax", "equinox"] | None
    axis_types: Literal["auto", "explicit"] | None
    scan_layers: bool | None
    partitioner: Literal["shardy", "gspmd"] | None
    compile: bool | None
    reshard_after_forward: bool | None
    data_parallel: Literal["buckets", "ddp", "fully_shard"] | None
    environment: dict[str, str]
    xla_flags: tuple[str, ...]


@dataclass(frozen=True, config=STRICT)
class HardwareConfig:
    """One kind of device. Units are in the names; null is unknown. platform `auto`: whatever this machine has.

    memory_gib: per device, 2^30 bytes; for CPU null means this machine's memory, shared by the devices on it
    peak_*_tflops: per device, dense, 10^12 FLOP/s; memory_gb_per_s: per device, 10^9 bytes/s
    link_gb_per_s: fast links (NVLink within a host, ICI within a slice), network_gb_per_s: what joins hosts or slices;
    both one way, per device, 10^9 bytes/s
    """

    name: Name
    platform: Literal["auto", "cpu", "gpu", "tpu"]
    memory_gib: Positive | None
    peak_bf16_tflops: Positive | None
    peak_f32_tflops: Positive | None
    memory_gb_per_s: Positive | None
    link_gb_per_s: Positive | None
    network_gb_per_s: Positive | None
    devices_per_host: Size | None
    topology: str | None


@dataclass(frozen=True, config=STRICT)
class ClusterConfig:
    """How processes start and are watched. Limits in seconds."""

    name: Literal["local"]
    startup_limit_s: Positive
    step_limit_s: Positive
    grace_s: Positive


@dataclass(frozen=True, config=STRICT)
class TrackingConfig:
    """Weights & Biases. group null: the sweep's folder name, if there is a sweep; run_name null: derived."""

    mode: Literal["offline", "online", "disabled"]
    project: str
    entity: str | None
    group: str | None
    run_name: str | None
    tags: tuple[str, ...]


@dataclass(frozen=True, config=STRICT)
class Experiment:
    """Everything the config asks. Resolved: no interpolation, no environment, nothing of Hydra."""

    model: Model
    mesh: MeshConfig
    sharding: ShardingConfig
    workload: Workload
    data: DataConfig
    backend: BackendConfig
    hardware: HardwareConfig
    cluster: ClusterConfig
    tracking: TrackingConfig
