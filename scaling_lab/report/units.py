"""Numbers as people read them. Owns units and digits; an unknown number is a dash, never a zero."""

from __future__ import annotations

UNKNOWN = "-"


def count(value: float | None) -> str:
    """A whole number with separators: 4,096."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def scaled(value: float | None, unit: str = "") -> str:
    """A large number with a decimal prefix: 6.88 M, 28.2 GFLOP/s."""
    if value is None:
        return UNKNOWN
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    power = 0
    while abs(value) >= 999.5 and power < len(prefixes) - 1:
        value, power = value / 1000, power + 1
    digits = f"{value:.3g}" if power or value != int(value) else f"{value:.0f}"
    return f"{digits} {prefixes[power]}{unit}".rstrip()


def size(value: float | None) -> str:
    """Bytes with a binary prefix: 1.50 MiB."""
    if value is None:
        return UNKNOWN
    for prefix, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(value) >= 2**power:
            return f"{value / 2**power:.2f} {prefix}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    """A duration: 12.3 ms, 4.56 s, 3 min 05 s."""
    if value is None:
        return UNKNOWN
    if value < 1:
        return f"{value * 1000:.3g} ms"
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def percent(fraction: float | None) -> str:
    """A fraction of 0 to 1 in per cent: 41.3 %."""
    return UNKNOWN if fraction is None else f"{fraction * 100:.3g} %"


def decimal(value: float | None, digits: int = 6) -> str:
    """A number with so many decimals; enough of them to see that two losses are equal."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def plural(number: int, word: str) -> str:
    """A number and its word: 1 device, 8 devices."""
    ending = "es" if word.endswith(("s", "ch")) else "s"
    return f"{number:,} {word}{'' if number == 1 else ending}"
