"""Report a sweep: one HTML file that needs no network.

    python protein.py report experiments/sweep_breakout      # front, effects, best settings

It is made of [(title, text, plotly figure)]. To add a figure, edit `sweep_figures`.
"""

import html
import re
from pathlib import Path

import numpy as np

from errors import require
from protein import Protein, front_of
from tools import DARK
from tools.sweep.trials import (
    DECIDING,
    Ledger,
    as_options,
    observe_record,
    read_json,
    short,
    used,
)


def load_sweep(folder):
    """Return (sweep.json, the finished trials, a Protein that observed them)."""
    folder = Path(folder)
    require((folder / "sweep.json").exists(), f"{folder}: there is no sweep (sweep.json) in it. "
            "python pufferl.py plot compares runs.")
    content = read_json(folder / "sweep.json")
    records = list(Ledger(folder).results().values())
    terms = content["asked"]
    tuner = Protein(search_space=content["space"], num_trials=max(1, len(records)),
                    metric=terms["metric"], goal=terms["goal"])
    for record in records:
        observe_record(tuner, record)
    return content, records, tuner


def marginal_effects(tuner, points=24, samples=48):
    """Return {setting: (values, mean score (points,), sd (points,))}.

    The predicted score, averaged over `samples` tried configurations with this setting changed
    (partial dependence).
    """
    done = np.array([o.unit for o in tuner.observations if not o.failed])
    base = done[np.linspace(0, len(done) - 1, min(samples, len(done))).astype(int)]
    effects = {}
    for k, setting in enumerate(tuner.space.settings):
        grid = np.linspace(0, 1, points)
        if 0 < setting.levels <= points:
            grid = (np.arange(setting.levels) + 0.5) / setting.levels
        units = np.repeat(base[None], len(grid), axis=0)
        units[:, :, k] = grid[:, None]
        score, sd, _, _, _ = tuner.predict(tuner.space.snap(units.reshape(-1, len(tuner.space))))
        score, sd = (value.reshape(len(grid), -1).mean(1) for value in (score, sd))
        effects[setting.name] = [setting.from_unit(u) for u in grid], tuner.sign * score, sd
    return effects


def sweep_figures(content, records, tuner):
    """Draw [(title, text, figure)] of what load_sweep returns."""
    terms = content["asked"]
    good = [r for r in records if r["status"] != "failed"]
    if not good:
        return []
    text = ["<br>".join([f"trial {r['trial']} ({r['status']})",
                         f"score {short(r['score'])}, cost {short(r['cost'])}",
                         *(f"{name} = {short(value)}" for name, value in r["settings"].items())])
            for r in good]
    figures = [against_cost(terms, good, text, tuner), curves_of_trials(terms, good, text)]
    if len(good) >= 4:
        figures.append(stars(terms, good, text, tuner))
    if len(good) >= enough(tuner):
        tuner.fit()
        effects = marginal_effects(tuner)
        figures += [importance(effects), effects_of_settings(effects, good, text, tuner)]
    return figures


# of the colours of tools/watch.html, as DARK is
CYAN, GOLD, GREY = "#00bbcc", "#fabe3c", "#93a7b6"


def new_figure(**layout):
    """Return an empty figure. plotly is needed for the report only."""
    import plotly.graph_objects as go

    return go.Figure().update_layout(**layout)


def against_cost(terms, good, text, tuner):
    cost, score, number = ([r[key] for r in good] for key in ("cost", "score", "trial"))
    front = front_of([tuner.sign * s for s in score], cost)
    symbols = ["circle" if r["status"] == "done" else "triangle-down" for r in good]
    figure = new_figure(xaxis_type="log", xaxis_title=terms["cost"], yaxis_title=terms["metric"],
                        legend={"orientation": "h", "y": 1.12})
    figure.add_scatter(x=cost, y=score, mode="markers", name="trials", text=text, hoverinfo="text",
                       customdata=number, meta="trials",
                       marker={"color": number, "colorscale": "Viridis", "size": 8,
                               "symbol": symbols, "colorbar": {"title": "trial"}})
    figure.add_scatter(x=[cost[i] for i in front], y=[score[i] for i in front], mode="lines",
                       line_shape="hv", name="front", line={"color": GOLD}, hoverinfo="skip")
    return ("Score against cost", "Each point is a trial (triangles: stopped early); the line is "
            "the front.", figure)


def curves_of_trials(terms, good, text):
    figure = new_figure(xaxis_type="log", xaxis_title=terms["cost"], yaxis_title=terms["metric"])
    for r, words in zip(good, text, strict=True):
        figure.add_scatter(x=[c for _, _, c in r["curve"]], y=[s for _, s, _ in r["curve"]],
                           mode="lines+markers", name=f"{r['trial']}", text=words,
                           hoverinfo="text", marker={"size": 4}, line={"width": 1})
    return "Curves", "The points of each trial that the model learns from.", figure


def tried_values(setting, good):
    """Return a setting's values in trials, categories as text."""
    values = [r["settings"][setting.name] for r in good]
    return [str(value) for value in values] if setting.categorical else values


def stars(terms, good, text, tuner):
    settings = tuner.space.settings
    values = {s.name: tried_values(s, good) for s in settings}
    axes = {s.name: "log" if s.row.axis == "log" else "-" for s in settings}
    first, score = settings[0].name, [r["score"] for r in good]
    buttons = [{"label": name, "method": "update",
                "args": [{"y": [values[name]]},
                         {"scene.yaxis.title.text": name, "scene.yaxis.type": axis}]}
               for name, axis in axes.items()]
    scene = {"xaxis": {"title": {"text": terms["cost"]}, "type": "log"},
             "yaxis": {"title": {"text": first}, "type": axes[first]},
             "zaxis": {"title": {"text": terms["metric"]}}}
    figure = new_figure(scene=scene, height=600, updatemenus=[
        {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1}])
    figure.add_scatter3d(x=[r["cost"] for r in good], y=values[first], z=score, mode="markers",
                         text=text, hoverinfo="text",
                         marker={"color": score, "colorscale": "Viridis", "showscale": True,
                                 "size": 5})
    return ("Stars", "Each star is a trial, over its cost, its score and the setting of the menu; "
            "drag to turn it.", figure)


def enough(tuner):
    """Return how many trials the figures of single settings need."""
    return max(10, 2 * len(tuner.space))


def importance(effects):
    share = np.array([np.var(mean) for _, mean, _ in effects.values()])
    share, order = share / (share.sum() or 1.0), np.argsort(share)
    figure = new_figure(xaxis_title="share of the variance of the marginal effects",
                        xaxis_tickformat=".0%", margin_l=180)
    figure.add_bar(x=share[order], y=[list(effects)[i] for i in order], orientation="h")
    return "Importance", "How much the predicted score changes with each setting alone.", figure


def effects_of_settings(effects, good, text, tuner, columns=3):
    from plotly.subplots import make_subplots

    rows = -(-len(effects) // columns)
    figure = make_subplots(rows, columns, subplot_titles=list(effects))
    for i, setting in enumerate(tuner.space.settings):
        values, mean, sd = effects[setting.name]
        at = {"row": i // columns + 1, "col": i % columns + 1}
        values = [str(v) for v in values] if setting.categorical else values
        figure.add_scatter(x=values, y=mean + sd, line={"width": 0}, hoverinfo="skip", **at)
        figure.add_scatter(x=values, y=mean - sd, line={"width": 0}, hoverinfo="skip",
                           fill="tonexty", fillcolor="rgba(0,187,204,0.2)", **at)
        figure.add_scatter(x=values, y=mean, line={"color": CYAN}, **at)
        figure.add_scatter(x=tried_values(setting, good), y=[r["score"] for r in good],
                           mode="markers", marker={"size": 4, "color": GREY}, text=text,
                           hoverinfo="text", **at)
        figure.update_xaxes(type=setting.row.axis, **at)
    figure.update_layout(height=240 * rows + 60, showlegend=False)
    return ("Marginal effects", "Predicted score at the end, averaged over the tried values of all "
            "other settings, ± 1 sd; points are trials.", figure)


def table(rows):
    """Format [{column: value}] as an HTML table; a click on a column's head sorts it."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    body = ""
    for row in rows:
        cells = (f"<td>{html.escape(short(row.get(name, '')))}</td>" for name in columns)
        body += f"<tr>{''.join(cells)}</tr>"
    return (f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            "</div>")


def page(folder):
    """Return the report of a sweep's folder as HTML."""
    from plotly.offline import get_plotlyjs

    content, records, tuner = load_sweep(folder)
    terms, options = content["asked"], content["options"]
    counts = {status: sum(r["status"] == status for r in records)
              for status in ("done", "stopped", "failed")}
    title = f"Sweep of {terms['env']}"
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    parts = [f"<p>{len(records)} trials: {summary}; {terms['goal']} {html.escape(terms['metric'])}."
             "</p>"]
    if tuner.best():
        best, score, cost = tuner.best()[:3]
        import configuration

        if DECIDING & content["space"].keys():
            best = used(best, configuration.load_config(terms["env"], options))
        command = configuration.command("train", terms["env"], *options, *as_options(best))
        parts.append(f"<h2>Best settings: {short(score)} for {short(cost)}</h2>"
                     f"<pre>{html.escape(command)}</pre>")
    columns = "trial", "status", "score", "cost", "steps"
    rows = [{**{key: r[key] for key in columns}, **r["settings"], "error": r["error"] or ""}
            for r in records]
    if len(records) - counts["failed"] < enough(tuner):
        parts.append(f"<p>What each setting does is shown from {enough(tuner)} finished trials "
                     "on.</p>")
    parts.append('<p>Show only what contains <input id="filter" placeholder="text"></p>')
    for name, note, figure in sweep_figures(content, records, tuner):
        figure.update_layout(DARK, height=figure.layout.height or 480)
        figure.update_xaxes(automargin=True, title_standoff=12)
        figure.update_yaxes(automargin=True, title_standoff=12)
        plot = figure.to_html(full_html=False, include_plotlyjs=False)
        parts.append(f"<h2>{html.escape(name)}</h2><p>{html.escape(note)}</p>{plot}")
    parts.append(f"<h2>Table</h2>{table(rows)}")
    values = {"title": html.escape(title), "plotly": get_plotlyjs(), "body": "\n".join(parts)}
    template = Path(__file__).with_name("report.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: values[place[1]], template)


def write_report(path: Path, output: Path | None = None):
    """Write the report of a sweep.

    Args:
        path: the sweep's folder.
        output: the page (default: report.html in the folder).
    """
    output = Path(output or Path(path) / "report.html")
    output.write_text(page(path), "utf-8")
    return output
