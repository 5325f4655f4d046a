"""The mesh as a drawing in plain characters: devices at their coordinates, hosts cut by lines. Knows no experiment."""

from __future__ import annotations

from scaling_lab.plan.mesh import Mesh

#: How much is drawn of a big mesh: blocks (all outer axes together), rows and columns.
MOST_BLOCKS, MOST_ROWS, MOST_COLUMNS = 4, 16, 8


def draw_mesh(mesh: Mesh) -> str:
    """The mesh: its last axis larger than 1 runs to the right, the one before downwards; each place of the others is a block.

    A cell holds the device's row-major index. A line or bar between two devices is a border between hosts. What does not
    fit is cut and counted.
    """
    axes = mesh.real_axes
    if not axes:
        return "device 0"
    column_axis, row_axis, outer = axes[-1], (axes[-2] if len(axes) > 1 else None), axes[:-2]
    columns, rows = mesh.size(column_axis), mesh.size(row_axis) if row_axis else 1
    blocks = mesh.devices // (columns * rows)
    lines = []
    for block in range(min(blocks, MOST_BLOCKS)):
        first = block * rows * columns
        if outer:
            place = mesh.coordinates(first)
            lines.append(", ".join(f"{axis} {place[axis]}" for axis in outer))
        lines += _block(mesh, first, (row_axis, rows), (column_axis, columns))
    if blocks > MOST_BLOCKS:
        lines.append(f"... and {blocks - MOST_BLOCKS:,} more blocks like these over {', '.join(outer)}")
    return "\n".join(lines)


def _block(mesh: Mesh, first: int, row: tuple[str | None, int], column: tuple[str, int]) -> list[str]:
    (row_axis, rows), (column_axis, columns) = row, column
    shown_rows, shown_columns = min(rows, MOST_ROWS), min(columns, MOST_COLUMNS)
    grid = [[first + r * columns + c for c in range(shown_columns)] for r in range(shown_rows)]
    width = max(len(f"{column_axis} {shown_columns - 1}"), len(f"{grid[-1][-1]:,}")) + 2
    margin = len(f"{row_axis} {rows - 1}") + 2 if row_axis else 0
    border = " " * margin + "+" + "+".join("-" * width for _ in range(shown_columns)) + "+"
    lines = [" " * margin + " " + " ".join(f"{column_axis} {c}".center(width) for c in range(shown_columns)), border]
    for r, devices in enumerate(grid):
        if r and _hosts(mesh, devices) != _hosts(mesh, grid[r - 1]):
            lines.append(border)
        label = f"{row_axis} {r}".ljust(margin) if row_axis else ""
        new_host = not r or _hosts(mesh, devices) != _hosts(mesh, grid[r - 1])
        lines.append(label + _row(mesh, devices, width) + (f"  {_host_words(mesh, devices)}" if new_host else ""))
    if columns > shown_columns:
        lines[-1] += f"  ... {columns - shown_columns:,} more along {column_axis}"
    if rows > shown_rows:
        lines.append(" " * margin + f" ... {rows - shown_rows:,} more rows along {row_axis}")
    return [*lines, border]


def _row(mesh: Mesh, devices: list[int], width: int) -> str:
    text, last = "", None
    for device in devices:
        host = device // mesh.devices_per_host
        text += ("|" if last is None or host != last else " ") + f"{device:,}".center(width)
        last = host
    return text + "|"


def _hosts(mesh: Mesh, devices: list[int]) -> tuple[int, int]:
    return devices[0] // mesh.devices_per_host, devices[-1] // mesh.devices_per_host


def _host_words(mesh: Mesh, devices: list[int]) -> str:
    first, last = _hosts(mesh, devices)
    return f"host {first:,}" if first == last else f"hosts {first:,} to {last:,}"
