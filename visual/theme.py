"""Colours, glyphs, fonts and sizes: the only place that knows what things look like."""

from __future__ import annotations

import unicodedata
from decimal import Decimal
from typing import NamedTuple


class Palette(NamedTuple):
    """One colour scheme.  Hues are of Okabe and Ito's colour-blind safe set; each is doubled by a shape or a dash."""

    paper: str  # behind everything
    panel: str  # behind a box
    ink: str  # text
    dim: str  # secondary text, at least 4.5:1 on paper
    edge: str  # lines of the tree
    rule: str  # hairlines between boxes
    value_low: str  # colour of the lowest log value
    value_high: str  # colour of log value 0
    outline: str  # around a node
    accepted: str
    accepted_soft: str
    accepted_ink: str  # the check mark on an accepted node
    own: str  # the target's own token: bonus or correction
    own_soft: str
    own_ink: str  # text in that colour, at least 4.5:1 on paper
    rejected: str
    rejected_ink: str  # the cross on a rejected node
    cut: str
    focus: str


LIGHT = Palette(
    paper="#ffffff", panel="#f6f7f9", ink="#1c2430", dim="#5b6675", edge="#a9b2be", rule="#dfe3e8",
    value_low="#e6eaf0", value_high="#5f7391", outline="#5f6d80",
    accepted="#0072b2", accepted_soft="#d9ebf7", accepted_ink="#ffffff",
    own="#d55e00", own_soft="#fde6d3", own_ink="#a84a00",
    rejected="#2b3038", rejected_ink="#ffffff", cut="#b4bcc7", focus="#0072b2",
)  # fmt: skip
DARK = Palette(
    paper="#0f141b", panel="#171e28", ink="#e6eaf0", dim="#9aa6b5", edge="#56626f", rule="#2a3440",
    value_low="#253040", value_high="#b9c6d8", outline="#8a97a8",
    accepted="#56b4e9", accepted_soft="#12394f", accepted_ink="#06131c",
    own="#f09a3e", own_soft="#47290f", own_ink="#f3ad62",
    rejected="#05070a", rejected_ink="#f2f4f7", cut="#4c5764", focus="#56b4e9",
)  # fmt: skip
PALETTES: dict[str, Palette] = {"light": LIGHT, "dark": DARK}

# Series of a chart: a hue (Okabe and Ito's, the grey and near-black of the palettes) doubled by a pattern of Plotly's.
SERIES = (
    ("#0072b2", ""), ("#56b4e9", "/"), ("#d55e00", ""), ("#cc79a7", "\\"), ("#009e73", ""), ("#e69f00", "x"),
    ("#9aa6b5", ""), ("#5b6675", "."),
)  # fmt: skip

SANS = 'system-ui, -apple-system, "Segoe UI", "Source Sans Pro", "DejaVu Sans", Arial, sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", "Liberation Mono", monospace'

LABEL_CELLS = 12  # a label's width in monospace cells, so that it ends before the next confidence


class Sizes(NamedTuple):
    """Pixels of the tree; its axes are in pixels too, so that labels keep their size whatever the tree's."""

    column: int = 164  # from one layer to the next
    row: int = 24  # above the line of a row that holds a kept node
    cut_row: int = 16  # above the line of a row of cut nodes only
    stub: int = 9  # more room under a row from which a stub hangs
    bus: int = 15  # from a node to the vertical part of its edges
    left: int = 22
    top: int = 26
    right: int = 104  # room for the last label
    bottom: int = 22
    node: int = 15  # diameters
    cut_node: int = 7
    label_font: int = 11
    cut_font: int = 9
    number_font: int = 9
    unfold_limit: int = 40  # with at most so many drafted nodes the cut ones are drawn, not folded into stubs
    floor: float = -6.5  # log values at or below this have the lowest colour


SIZES = Sizes()

_GLYPHS = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\u00a0": "⍽", "\u007f": "␡", "\u2028": "⏎", "\u2029": "¶"}


def _visible(char: str) -> str:
    """A glyph for one character that draws nothing, or that changes how its neighbours are drawn."""
    code = ord(char)
    if char in _GLYPHS:
        return _GLYPHS[char]
    if code < 0x20:
        return chr(0x2400 + code)
    category = unicodedata.category(char)
    if category == "Cs":
        return "\ufffd"
    # Cf holds the bidi controls, which would turn the text around them, and the joiners; Zs the odd spaces.
    return f"⟨{code:04X}⟩" if category in ("Cc", "Cf", "Cn", "Co", "Zs", "Zl", "Zp") else char


def glyphs(text: str) -> str:
    """Text of one token with every invisible character made visible and bidirectional controls neutralised.

    >>> glyphs(" lamp\\n")
    '␣lamp⏎'
    """
    shown = "".join(map(_visible, text))
    if shown and unicodedata.combining(shown[0]):
        shown = "◌" + shown
    return shown or "∅"


def plain(text: str) -> str:
    """Running text: blanks and line ends stay what they are, all else that hides or turns text is made visible."""
    return "".join(char if char in " \n\t" else _visible(char) for char in text.replace("\r\n", "\n"))


def _cells(char: str) -> int:
    if unicodedata.combining(char) or "\ufe00" <= char <= "\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def label(text: str, cells: int = LABEL_CELLS) -> str:
    """`glyphs` cut to so many monospace cells, with an ellipsis where something was left out."""
    shown = glyphs(text)
    if len(shown) <= cells and shown.isascii():
        return shown
    if sum(map(_cells, shown)) <= cells:
        return isolate(shown[: 4 * cells])
    kept, used = "", 0
    for char in shown:
        used += _cells(char)
        if used > cells - 1 or len(kept) >= 3 * cells:
            break
        kept += char
    return isolate(kept + "…")


def isolate(text: str) -> str:
    """Right-to-left text in a directional isolate, so that the numbers beside it stay where they are."""
    if any(unicodedata.bidirectional(char) in ("R", "AL", "AN") for char in text):
        return f"\u2068{text}\u2069"
    return text


def escape(text: str) -> str:
    """For Plotly, which reads a few HTML tags and entities in every text."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def short(value: float) -> str:
    """A probability or a value in three or four characters: ``.83``, ``.042``, ``1e-4``."""
    if value >= 0.995:
        return "1.0"
    if value >= 0.0995:
        return f"{value:.2f}"[1:]
    if value >= 0.000995:
        return f"{value:.3f}"[1:]
    if value <= 0:
        return "0"
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def digits(value: float) -> str:
    """Three significant digits, written as a browser writes numbers: ``0.578``, ``0.0000093``, ``9.3e-7``."""
    text = f"{value:.3g}"
    if value == 0 or value >= 1e-6:
        return format(Decimal(text), "f")
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}"


def probability(value: float) -> str:
    """Four decimals, or three significant digits of what would be 0.000x."""
    return f"{value:.4f}" if value >= 0.001 or value == 0 else digits(value)


def count(number: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def ink_on(color: str) -> str:
    """Black or white, whichever reads better on ``#rrggbb``; `player.js` does the same."""
    red, green, blue = bytes.fromhex(color[1:])
    return "#0f141b" if 299 * red + 587 * green + 114 * blue > 120_000 else "#ffffff"


def css_variables() -> str:
    """The palettes as custom properties: light by default, dark under ``.dark`` or, standalone, as the system asks."""

    def block(palette: Palette) -> str:
        return "".join(f"--e2-{key.replace('_', '-')}:{value};" for key, value in palette._asdict().items())

    fonts = f"--e2-sans:{SANS};--e2-mono:{MONO};"
    return (
        f".e2,.e2-standalone{{{fonts}{block(LIGHT)}color-scheme:light}}\n"
        f".dark .e2,.dark.e2-standalone{{{block(DARK)}color-scheme:dark}}\n"
        f"@media (prefers-color-scheme:dark){{.e2-standalone,.e2-standalone .e2{{{block(DARK)}color-scheme:dark}}}}\n"
    )
