"""How the mesh gets its sizes: those that the config gives, the rest by the `auto` rule. Owns no sharding decision."""

from __future__ import annotations

import math

from scaling_lab.errors import PlanError
from scaling_lab.plan.experiment import MeshConfig
from scaling_lab.plan.mesh import Mesh
from scaling_lab.plan.rules import Rules

#: Axes that get 2 devices each when the table names them and their size is left open; the rest goes to fsdp or data.
PAIRED = ("tensor", "context", "expert", "pipeline")


def resolve(config: MeshConfig, rules: Rules, found_devices: int) -> Mesh:
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
    mesh = Mesh(tuple((axis, {**given, **chosen}[axis]) for axis in config.order), config.hosts, opened)
    _check_devices(config, mesh, devices)
    if devices is None and _takes_rest(opened, rules):
        _check_found(mesh, given, found_devices)
    _check_hosts(mesh)
    return mesh


def _asked_devices(config: MeshConfig) -> int | None:
    """How many devices the config asks for, if it says."""
    if config.devices is None and config.devices_per_host is not None:
        return config.devices_per_host * config.hosts
    return config.devices


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
    if config.devices is not None and config.devices_per_host is not None:
        product = config.devices_per_host * config.hosts
        if product != config.devices:
            raise PlanError(
                f"mesh.hosts={config.hosts} x mesh.devices_per_host={config.devices_per_host} is {product} devices, but "
                f"mesh.devices={config.devices}. Set mesh.devices=null."
            )
    if devices is None or mesh.devices == devices:
        return
    asked, change = f"mesh.devices={devices}", f"mesh.devices={mesh.devices}"
    if config.devices_per_host is not None:
        asked = f"mesh.hosts={config.hosts} x mesh.devices_per_host={config.devices_per_host} = {devices}"
        change = f"{change} mesh.devices_per_host=null"
    raise PlanError(
        f"mesh `{config.name}` is {_product(mesh)} = {mesh.devices} devices, but {asked}. "
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


def _check_hosts(mesh: Mesh) -> None:
    """Every host holds as many devices, and whole lines of the inner axes with an even part of one: no ragged cut."""
    if mesh.devices % mesh.hosts:
        hosts = _hosts_that_cut(mesh)
        raise PlanError(f"mesh.hosts={mesh.hosts} cannot share {mesh.devices} devices evenly ({_product(mesh)}). Set {hosts}.")
    axis = _ragged_axis(mesh, mesh.devices_per_host)
    if axis:
        raise PlanError(
            f"mesh.hosts={mesh.hosts}: hosts of {mesh.devices_per_host} devices cut axis {axis} raggedly ({_product(mesh)}, "
            f"innermost last). Set {_hosts_that_cut(mesh)}."
        )


def _hosts_that_cut(mesh: Mesh) -> str:
    """The numbers of hosts nearest to the asked one that cut the mesh evenly."""
    even = [n for n in range(1, min(mesh.devices, 2 * mesh.hosts) + 1) if mesh.devices % n == 0]
    fitting = [n for n in even if _ragged_axis(mesh, mesh.devices // n) is None]
    below = max((n for n in fitting if n < mesh.hosts), default=None)
    above = min((n for n in fitting if n > mesh.hosts), default=None)
    return " or ".join(f"mesh.hosts={n}" for n in (below, above) if n)


def _ragged_axis(mesh: Mesh, per_host: int) -> str | None:
    """The axis that a cut every `per_host` devices leaves in uneven parts, if any."""
    inner = 1
    for axis, size in reversed(mesh.axes):
        if per_host <= inner:
            return None
        line = inner * size
        if per_host % line and line % per_host:
            return axis
        inner = line
    return None


def _product(mesh: Mesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.axes if size > 1) or "every axis 1"
