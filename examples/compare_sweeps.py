"""Draw the fronts of several sweeps: the best score for each cost.

    python protein.py breakout --sweep.name a --policy.hidden-size 64
    python protein.py breakout --sweep.name b --policy.hidden-size 256
    python -m examples.compare_sweeps experiments/sweep_breakout_a experiments/sweep_breakout_b

Writes fronts.html, which needs no network.
"""

import sys

import plotly.graph_objects

from tools.sweep.report import load_sweep

COLOURS = "teal", "crimson", "orange", "purple", "gray"


def draw_fronts(*folders):
    """Draw each sweep's trials as points, its front as a line; returns a figure."""
    figure = plotly.graph_objects.Figure()
    for folder, colour in zip(folders, COLOURS, strict=False):
        sweep, records, tuner = load_sweep(folder)
        trials = [record for record in records if record["score"] is not None]
        figure.add_scatter(x=[record["cost"] for record in trials],
                           y=[record["score"] for record in trials], mode="markers",
                           marker={"color": colour, "opacity": 0.4}, showlegend=False)
        _, scores, costs = zip(*tuner.front(), strict=True)
        figure.add_scatter(x=costs, y=scores, mode="lines", name=str(folder),
                           line={"color": colour, "shape": "hv"})
    figure.update_layout(xaxis={"title": sweep["asked"]["cost"], "type": "log"},
                         yaxis={"title": sweep["asked"]["metric"]})
    return figure


if __name__ == "__main__":
    draw_fronts(*sys.argv[1:]).write_html("fronts.html")
