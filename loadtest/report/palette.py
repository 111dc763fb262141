"""Colours, markers and dashes: one set per arm, the same in every chart.

The colours are Okabe and Ito's, safe for colour-blind readers, slightly darker for the light theme
and lighter for the dark one. Markers and dashes distinguish arms without colour.
"""

from __future__ import annotations

from dataclasses import dataclass

_LIGHT_ARMS = ("#0068a8", "#c94f00", "#007a57", "#a83f86", "#946800", "#4a7fb5", "#5b5f66")
_DARK_ARMS = ("#5cb3ee", "#ff9650", "#3ecb9f", "#e79bcd", "#efc14d", "#a9d3ff", "#bfc4cc")
NUM_COLOURS = len(_LIGHT_ARMS)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
_DASHES: tuple[tuple[int, tuple[float, ...]], ...] = (
    (0, ()),
    (0, (5, 1.6)),
    (0, (1.4, 1.4)),
    (0, (6, 1.6, 1.4, 1.6)),
)
# Colours of everything that belongs to no arm.
_LIGHT_ROLES = {"ink": "#1c2430", "muted": "#5a6675", "grid": "#dfe3e8", "page": "#ffffff"}
_DARK_ROLES = {"ink": "#e8ecf1", "muted": "#a3aebb", "grid": "#333c48", "page": "#14181e"}


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of a chart."""

    arms: tuple[str, ...]
    ink: str
    muted: str
    grid: str
    page: str

    def arm(self, index: int) -> str:
        return self.arms[index % NUM_COLOURS]


LIGHT = Palette(_LIGHT_ARMS, **_LIGHT_ROLES)
DARK = Palette(_DARK_ARMS, **_DARK_ROLES)
# Placeholder colours, replaced by CSS variables after drawing, so that one drawing serves the
# light and the dark theme.
SENTINEL = Palette(
    tuple(f"#fe01{index:02x}" for index in range(NUM_COLOURS)),
    **{role: f"#fe02{index:02x}" for index, role in enumerate(_LIGHT_ROLES)},
)


def variables(palette: Palette) -> dict[str, str]:
    """The palette as CSS variables."""
    arms = {f"--arm-{index}": colour for index, colour in enumerate(palette.arms)}
    return arms | {f"--{role}": getattr(palette, role) for role in _LIGHT_ROLES}


def marker(index: int) -> str:
    return _MARKERS[index % len(_MARKERS)]


def dash(index: int) -> tuple[int, tuple[float, ...]]:
    return _DASHES[index % len(_DASHES)]
