"""Command-line tools: verbs of pufferl.py and protein.py."""

import shutil
import sys

# The look of all pages of curves: the colours of tools/watch.html.
DARK = {"template": "plotly_dark", "paper_bgcolor": "#131f2a", "plot_bgcolor": "#0c141c",
        "margin": {"t": 60, "b": 60}, "font": {"color": "#ecf2f6"},
        "colorway": ["#00bbcc", "#fabe3c", "#5ac878", "#e25454", "#a96fe8", "#ee8a3c"]}


def aligned(rows, right=()):
    """Yield the lines of a table, cut where the terminal ends.

    rows: the first has the titles. right: the titles of right-aligned columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in rows:
        cells = [cell.rjust(width) if title in right else cell.ljust(width)
                 for cell, width, title in zip(row, widths, rows[0], strict=True)]
        line = "  ".join(cells).rstrip()
        yield line if columns is None or len(line) <= columns else line[: columns - 1] + "…"
