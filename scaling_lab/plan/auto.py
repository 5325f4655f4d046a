"""How the mesh gets its sizes: those that the config gives, the rest by the `auto` rule. Owns no sharding decision."""

from __future__ import annotations

import math

from scaling_lab.errors import PlanError
from scaling_lab.plan import hosts
from scaling_lab.plan.experiment import MeshConfig
from scaling_lab.plan.mesh import Mesh, product
from scaling_lab.plan.rules import Rules

#: Axes that get 2 devices each when the table names them and their size is left open; the rest goes to fsdp or data.
PAIRED = ("tensor", "context", "expert", "pipeline")


def resolve(config: MeshConfig, rules: Rules, found_devices: int, hardware_devices_per_host: int | None = None) -> Mesh:
    """The mesh. `found_devices` is used where `mesh.devices` is null: the real devices, or 8 simulated ones.

    Sizes left null are chosen: 2 for each of tensor, context, expert and pipeline that the table names, the rest to fsdp
    if the table stores weights over it, else to data; 1 for every other axis. Where the table names no axis that takes a
    rest and the config asks for no number of devices, the mesh is smaller than what was found.
    Raises PlanError where the sizes do not make hosts x devices.
    """
    given = {axis: size for axis in config.order if (size := getattr(config, axis)) is not None}
    opened = tuple(axis for axis in config.order if axis not in given)
    devices = _asked_devices(config)
    chosen = _choose(given, opened, devices or max(found_devices, math.prod(given.values())), rules)
    mesh = Mesh(tuple((axis, {**given, **chosen}[axis]) for axis in config.order), 1, opened)
    _check_devices(config, mesh, devices)
    if devices is None and _takes_rest(opened, rules):
        _check_found(mesh, given, found_devices)
    return hosts.cut(config, mesh, hardware_devices_per_host)


def _asked_devices(config: MeshConfig) -> int | None:
    """How many devices the config asks for, if it says."""
    return _hosts_product(config) if config.devices is None else config.devices


def _hosts_product(config: MeshConfig) -> int | None:
    """hosts x devices per host, if the config gives both."""
    return None if config.hosts is None or config.devices_per_host is None else config.hosts * config.devices_per_host


def _takes_rest(opened: tuple[str, ...], rules: Rules) -> str | None:
    """The open axis that takes the devices left by the others."""
    stores = any("fsdp" in axes for axes in rules.weights.values())
    first = ("fsdp", "data") if stores else ("data", "fsdp")
    return next((axis for axis in first if axis in opened and axis in rules.used_axes), None)


def _choose(given: dict[str, int], opened: tuple[str, ...], devices: int, rules: Rules) -> dict[str, int]:
    """Sizes of the open axes; they may not multiply to `devices`, which is checked afterwards."""
    sizes = dict.fromkeys(opened, 1)
    left, odd = divmod(devices, math.prod(given.values()))
    if odd:
        return sizes
    for axis in PAIRED:
        if axis in opened and axis in rules.used_axes and left % 2 == 0:
            sizes[axis], left = 2, left // 2
    rest = _takes_rest(opened, rules)
    return {**sizes, rest: left} if rest else sizes


def _check_devices(config: MeshConfig, mesh: Mesh, devices: int | None) -> None:
    by_hosts = _hosts_product(config)
    if config.devices is not None and by_hosts not in (None, config.devices):
        raise PlanError(
            f"mesh.hosts={config.hosts} x mesh.devices_per_host={config.devices_per_host} is {by_hosts} devices, but "
            f"mesh.devices={config.devices}. Set mesh.devices=null."
        )
    if devices is None or mesh.devices == devices:
        return
    asked, change = f"mesh.devices={devices}", f"mesh.devices={mesh.devices}"
    if by_hosts is not None:
        asked = f"mesh.hosts={config.hosts} x mesh.devices_per_host={config.devices_per_host} = {devices}"
        change = f"{change} mesh.devices_per_host=null"
    raise PlanError(
        f"mesh `{config.name}` is {product(mesh)} = {mesh.devices} devices, but {asked}. "
        f"Set {change}, or choose sizes whose product is {devices}."
    )


def _check_found(mesh: Mesh, given: dict[str, int], found: int) -> None:
    """Devices that nobody asked to leave out must not be left out."""
    fixed = math.prod(given.values())
    if mesh.devices < found:
        sizes = " ".join(f"mesh.{axis}={size}" for axis, size in given.items() if size > 1)
        near = found // fixed * fixed
        raise PlanError(
            f"{sizes}: {fixed} does not divide {found}, the devices there are without mesh.devices. Set mesh.devices={near}."
        )
