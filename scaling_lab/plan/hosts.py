"""How many hosts a mesh is cut into, and that the cut is even. Knows counts only: no host by name, no axis's meaning."""

from __future__ import annotations

from dataclasses import replace

from scaling_lab.errors import PlanError
from scaling_lab.plan.experiment import MeshConfig
from scaling_lab.plan.mesh import Mesh, product


def cut(config: MeshConfig, mesh: Mesh, hardware_devices_per_host: int | None) -> Mesh:
    """The mesh on its hosts: `mesh.hosts` of them, or where that is null as many as devices per host make.

    These are `mesh.devices_per_host`, else the hardware's, rounded up to whole hosts; where neither is known, one host has
    them all. Raises PlanError where hosts would hold unequal or ragged parts of the mesh.
    """
    if config.hosts is not None:
        hosts, source = config.hosts, ""
    elif config.devices_per_host is not None:
        return _cut_by_size(mesh, config.devices_per_host)
    elif hardware_devices_per_host is not None:
        hosts = -(-mesh.devices // hardware_devices_per_host)
        source = f" (mesh.hosts=null: {mesh.devices} devices / hardware.devices_per_host={hardware_devices_per_host})"
    else:
        hosts, source = 1, ""
    mesh = replace(mesh, hosts=hosts)
    fault = _fault(mesh)
    if fault:
        # Fewer hosts than the hardware makes would have to hold more devices than it does.
        near = [n for n in _nearest(mesh, hosts) if not source or n > hosts]
        raise PlanError(f"mesh.hosts={hosts}{source}{fault}. Set {' or '.join(f'mesh.hosts={n}' for n in near)}.")
    return mesh


def _cut_by_size(mesh: Mesh, devices_per_host: int) -> Mesh:
    hosts, left = divmod(mesh.devices, devices_per_host)
    if hosts and not left and not _fault(found := replace(mesh, hosts=hosts)):
        return found
    sizes = [mesh.devices // n for n in _nearest(mesh, mesh.devices / devices_per_host)]
    raise PlanError(
        f"mesh.devices_per_host={devices_per_host} does not cut {product(mesh)} = {mesh.devices} (innermost last) into equal hosts. "
        f"Set {' or '.join(f'mesh.devices_per_host={size}' for size in sizes)}."
    )


def _fault(mesh: Mesh) -> str:
    """Why the hosts do not hold equal boxes of the mesh; empty where they do."""
    if mesh.devices % mesh.hosts:
        return f" cannot share {mesh.devices} devices evenly ({product(mesh)})"
    axis = _ragged_axis(mesh, mesh.devices_per_host)
    if axis:
        return f": hosts of {mesh.devices_per_host} devices cut axis {axis} raggedly ({product(mesh)}, innermost last)"
    return ""


def _nearest(mesh: Mesh, hosts: float) -> list[int]:
    """The numbers of hosts nearest to the asked one, below and above, that cut the mesh evenly."""
    even = [n for n in range(1, mesh.devices + 1) if mesh.devices % n == 0]
    fitting = [n for n in even if _ragged_axis(mesh, mesh.devices // n) is None]
    below = max((n for n in fitting if n < hosts), default=None)
    above = min((n for n in fitting if n > hosts), default=None)
    return [n for n in (below, above) if n]


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
