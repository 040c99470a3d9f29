"""A line chart as SVG, with both axes logarithmic or both linear."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 640, 400, 60
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b")

Line = Sequence[tuple[float, float]]


def draw(file: Path, title: str, x: str, y: str, lines: Mapping[str, Line], *, logarithmic: bool) -> None:
    """Write the lines, each by its name; `x` and `y` are the axes' labels. A dashed line's name starts with `~`."""
    points = [point for line in lines.values() for point in line]
    across = _Axis([each for each, _ in points], MARGIN, WIDTH - 20, logarithmic)
    up = _Axis([each for _, each in points], HEIGHT - MARGIN, 40, logarithmic)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 20, title, "middle"),
        _text(WIDTH / 2, HEIGHT - 12, x, "middle"),
        _text(8, 32, y, "start"),
        f'<path d="M{MARGIN},40V{HEIGHT - MARGIN}H{WIDTH - 20}" fill="none" stroke="black"/>',
    ]
    for value in sorted({each for each, _ in points}) if logarithmic else across.ticks():
        parts.append(_text(across(value), HEIGHT - MARGIN + 18, f"{value:.4g}", "middle"))
    for value in up.ticks():
        parts.append(_text(MARGIN - 6, up(value) + 4, f"{value:.3g}", "end"))
        parts.append(f'<path d="M{MARGIN},{up(value):.1f}H{WIDTH - 20}" stroke="#ddd"/>')
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        dash = ' stroke-dasharray="6 4"' if name.startswith("~") else ""
        path = " ".join(f"{across(a):.1f},{up(b):.1f}" for a, b in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(f'<g fill="{colour}">{_text(MARGIN + 12, 54 + 16 * number, name.lstrip("~"), "start")}</g>')
    file.write_text("\n".join([*parts, "</svg>", ""]))


class _Axis:
    """From values to places on paper."""

    def __init__(self, values: Sequence[float], start: float, end: float, logarithmic: bool) -> None:
        self.start, self.end, self.logarithmic = start, end, logarithmic
        low, high = self._scaled(min(values)), self._scaled(max(values))
        room = (high - low) * 0.05 or 1.0
        self.low, self.high = (low - room, high + room) if logarithmic else (min(0.0, low), high + room)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def __call__(self, value: float) -> float:
        return self.start + (self._scaled(value) - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return five values to write beside the axis."""
        steps = [self.low + (self.high - self.low) * i / 5 for i in range(6)]
        return [10**step for step in steps] if self.logarithmic else steps


def _text(x: float, y: float, text: str, anchor: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
