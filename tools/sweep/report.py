"""The report of a sweep, or of a folder of runs: one HTML file that needs no network.

    python protein.py report experiments/sweep_breakout            # front, predictions, effects, best settings
    python protein.py report experiments                           # ordinary runs side by side, by environment

It is made of [(title, text, plotly figure)]. To add a figure, edit `sweep_figures` or `run_figures`.
"""

import contextlib
import functools
import html
import json
import re
import threading
from pathlib import Path

import numpy as np

import diagnostics
from errors import ConfigError
from protein import Protein, front_of
from tools.sweep.trials import DECIDE, TOLD, Curve, Ledger, as_options, observe_record, read_whole, short, used


def load_sweep(folder):
    """(sweep.json's content, records of the finished trials, a Protein that has observed them)."""
    folder = Path(folder)
    told = read_whole(folder / "sweep.json", TOLD)
    records = list(Ledger(folder).results().values())
    asked = told["asked"]
    tuner = Protein(search_space=told["space"], num_trials=max(1, len(records)), metric=asked["metric"],
                    goal=asked["goal"])
    for record in records:
        observe_record(tuner, record)
    return told, records, tuner


def marginal_effects(tuner, points=24, samples=48):
    """{setting: (values, mean score (points,), sd (points,))}: the predicted score of `samples` tried configurations,
    averaged, if this one setting is changed in all of them (partial dependence)."""
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


def sweep_figures(told, records, tuner):
    """[(title, text, figure)] of a sweep."""
    good = [r for r in records if r["status"] != "failed"]
    if not good:
        return []
    text = [hover_text(r) for r in good]
    figures = [against_cost(told["asked"], good, text, tuner), curves_of_trials(told["asked"], good, text)]
    if len(good) >= 4:
        figures.append(stars(told["asked"], good, text, tuner))
    if len(good) >= enough(tuner):
        tuner.fit()
        effects = marginal_effects(tuner)
        figures += [importance(effects), effects_of_settings(effects, good, text, tuner)]
    return figures


# Of the colours of tools/watch.html, as DARK is.
CYAN, GOLD, GREY = "#00bbcc", "#fabe3c", "#93a7b6"


def new_figure(**layout):
    """An empty figure. plotly is imported here, because a sweep needs it only for the report."""
    import plotly.graph_objects as go

    return go.Figure().update_layout(**layout)


def hover_text(record):
    settings = [f"{name} = {short(value)}" for name, value in record["settings"].items()]
    return "<br>".join([f"trial {record['trial']} ({record['status']})",
                        f"score {short(record['score'])}, cost {short(record['cost'])}", *settings])


def against_cost(asked, good, text, tuner):
    cost, score, number = [r["cost"] for r in good], [r["score"] for r in good], [r["trial"] for r in good]
    front = front_of([tuner.sign * s for s in score], cost)
    figure = new_figure(xaxis_type="log", xaxis_title=asked["cost"], yaxis_title=asked["metric"],
                        legend={"orientation": "h", "y": 1.12})
    figure.add_scatter(x=cost, y=score, mode="markers", name="trials", text=text, hoverinfo="text", customdata=number,
                       marker={"color": number, "colorscale": "Viridis", "size": 8,
                               "symbol": ["circle" if r["status"] == "done" else "triangle-down" for r in good],
                               "colorbar": {"title": "trial"}}, meta="trials")
    figure.add_scatter(x=[cost[i] for i in front], y=[score[i] for i in front], mode="lines", line_shape="hv",
                       name="front", line={"color": GOLD}, hoverinfo="skip")
    expected = [(r["trial"], r["predicted"]) for r in good if r["predicted"].get("score") is not None]
    figure.add_scatter(x=[p["cost"] for _, p in expected], y=[p["score"] for _, p in expected], mode="markers",
                       name="expected, ± 1 sd", visible="legendonly", marker={"symbol": "x-thin-open"},
                       error_y={"array": [p["score_sd"] for _, p in expected], "thickness": 0.6}, hoverinfo="text",
                       text=[f"trial {number}, as expected before it" for number, _ in expected])
    return ("Score against cost", "Each point is a trial (triangles: stopped early); the line is the front. "
            "Click the legend for what the model had expected.", figure)


def curves_of_trials(asked, good, text):
    figure = new_figure(xaxis_type="log", xaxis_title=asked["cost"], yaxis_title=asked["metric"])
    for r, words in zip(good, text, strict=True):
        figure.add_scatter(x=[c for _, _, c in r["curve"]], y=[s for _, s, _ in r["curve"]], mode="lines+markers",
                           name=f"{r['trial']}", text=words, hoverinfo="text", marker={"size": 4}, line={"width": 1})
    return "Curves", "The points of each trial that the model learns from.", figure


def stars(asked, good, text, tuner):
    names = tuner.space.names
    values = {s.name: [str(r["settings"][s.name]) if s.categorical else r["settings"][s.name] for r in good]
              for s in tuner.space.settings}
    logarithmic = {s.name for s in tuner.space.settings if s.row.axis == "log"}
    score = [r["score"] for r in good]
    buttons = [{"label": name, "method": "update", "args": [
        {"y": [values[name]]}, {"scene.yaxis.title.text": name,
                                "scene.yaxis.type": "log" if name in logarithmic else "-"}]} for name in names]
    scene = {"xaxis": {"title": {"text": asked["cost"]}, "type": "log"}, "zaxis": {"title": {"text": asked["metric"]}},
             "yaxis": {"title": {"text": names[0]}, "type": "log" if names[0] in logarithmic else "-"}}
    figure = new_figure(scene=scene, height=600, updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1}])
    look = {"color": score, "colorscale": "Viridis", "showscale": True, "size": 5}
    figure.add_scatter3d(x=[r["cost"] for r in good], y=values[names[0]], z=score, mode="markers", text=text,
                         hoverinfo="text", marker=look)
    return ("Stars", "Each star is a trial, over its cost, its score and the setting of the menu; it turns until you "
            "take hold of it.", figure)


def enough(tuner):
    """How many trials there must be before the report says something about single settings."""
    return max(10, 2 * len(tuner.space))


def importance(effects):
    share = np.array([np.var(mean) for _, mean, _ in effects.values()])
    share, order = share / (share.sum() or 1.0), np.argsort(share)
    figure = new_figure(xaxis_title="share of the variance of the marginal effects", xaxis_tickformat=".0%",
                        margin_l=180)
    figure.add_bar(x=share[order], y=[list(effects)[i] for i in order], orientation="h")
    return "Importance", "How much the predicted score changes with each setting alone.", figure


def effects_of_settings(effects, good, text, tuner, columns=3):
    from plotly.subplots import make_subplots

    rows = -(-len(effects) // columns)
    figure = make_subplots(rows, columns, subplot_titles=list(effects))
    for i, (setting, (values, mean, sd)) in enumerate(zip(tuner.space.settings, effects.values(), strict=True)):
        at = {"row": i // columns + 1, "col": i % columns + 1}
        values = [str(v) for v in values] if setting.categorical else values
        figure.add_scatter(x=values, y=mean + sd, line={"width": 0}, hoverinfo="skip", showlegend=False, **at)
        figure.add_scatter(x=values, y=mean - sd, line={"width": 0}, fill="tonexty", hoverinfo="skip",
                           fillcolor="rgba(0,187,204,0.2)", showlegend=False, **at)
        figure.add_scatter(x=values, y=mean, line={"color": CYAN}, showlegend=False, **at)
        tried = [r["settings"][setting.name] for r in good]
        figure.add_scatter(x=[str(v) for v in tried] if setting.categorical else tried, y=[r["score"] for r in good],
                           mode="markers", marker={"size": 4, "color": GREY}, text=text, hoverinfo="text",
                           showlegend=False, **at)
        figure.update_xaxes(type=setting.row.axis, **at)
    figure.update_layout(height=240 * rows + 60)
    return ("Marginal effects", "Predicted score at the end, averaged over the tried values of all other settings, "
            "± 1 sd; points are trials.", figure)


def load_runs(folder, metric, tag=None):
    """[{name, env, settings, step, score, cost, ...}] of all runs in a folder, or in its sweeps."""
    runs = []
    for path in sorted(Path(folder).glob("**/config.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            config = json.loads(path.read_text())
            curve = Curve.read(path.parent / "metrics.jsonl", metric)
            settings = {f"{section}.{key}": value for section in ("env", "vec", "policy", "rnn", "train")
                        for key, value in config[section].items()}
            if len(curve.step) and (tag is None or config.get("tag") == tag):
                score, cost = curve.at(curve.step[-1], settings["train.total_timesteps"] / 10)
                runs.append({"name": str(path.parent.relative_to(folder)), "env": config["env_name"], "curve": curve,
                             "tag": config.get("tag") or "", "settings": settings, "score": score, "cost": cost})
    return runs


def as_row(run, varied):
    """{column: value} of a run: shown in the table and beside its curve, and searched by the page's filter."""
    told = {"run": run["name"], "env": run["env"], "tag": run["tag"], "score": f"{run['score']:.5g}",
            "seconds": run["cost"], "steps": run["curve"].step[-1]}
    return told | {name: run["settings"].get(name, "") for name in varied}


def varied_settings(runs):
    """The settings that have more than one value among the runs that have them."""
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    return [name for name in names if len({str(run["settings"][name]) for run in runs if name in run["settings"]}) > 1]


def run_figures(runs, metric):
    """[(title, text, figure)] of ordinary runs, for each environment: curves and score against
    each setting."""
    figures = []
    for env in sorted({run["env"] for run in runs}):
        mine = [run for run in runs if run["env"] == env]
        varied = varied_settings(mine)
        text = ["<br>".join(f"{name} = {short(value)}" for name, value in as_row(run, varied).items()) for run in mine]
        for axis, title in (("step", "environment steps"), ("cost", "seconds")):
            figure = new_figure(xaxis_title=title, yaxis_title=metric, showlegend=True)
            for run, words in zip(mine, text, strict=True):
                every = max(1, len(run["curve"].step) // 400)
                figure.add_scatter(x=getattr(run["curve"], axis)[::every], y=run["curve"].score[::every], mode="lines",
                                   name=run["name"], text=words, hoverinfo="text")
            figures.append((f"{env}: curves over {title}", "", figure))
        if varied:
            def column(name, mine=mine):
                values = [run["settings"].get(name) for run in mine]
                plain = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
                return values if plain else [str(v) for v in values]

            axes = {"seconds": [run["cost"] for run in mine]} | {name: column(name) for name in varied}
            buttons = [{"label": name, "method": "update", "args": [{"x": [values]}, {"xaxis.title.text": name}]}
                       for name, values in axes.items()]
            figure = new_figure(updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.15}],
                                xaxis_title="seconds", yaxis_title=metric)
            figure.add_scatter(x=axes["seconds"], y=[run["score"] for run in mine], mode="markers", text=text,
                               hoverinfo="text")
            figures.append((f"{env}: score by setting", "Choose the setting in the menu.", figure))
    return figures


# The page's Content-Security-Policy: it loads nothing; plotly compiles code and makes images.
SOURCES = "script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data: blob:; "


def table(rows):
    """[{column: value}] as an HTML table; a click on a column's head sorts it."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    cells = ["".join(f"<td>{html.escape(short(row.get(name, '')))}</td>" for name in columns) for row in rows]
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>" + "".join(
        f"<tr>{row}</tr>" for row in cells) + "</tbody></table></div>"


def page(folder, metric="environment/score", tag=None, refresh=None):
    """The report of a sweep's folder, or of a folder of runs, as one HTML text
    that needs no network."""
    from plotly.offline import get_plotlyjs

    folder, parts = Path(folder), []
    if (folder / "sweep.json").exists():
        told, records, tuner = load_sweep(folder)
        counts = {status: sum(r["status"] == status for r in records) for status in ("done", "stopped", "failed")}
        title = f"Sweep of {told['asked']['env']}"
        parts.append(f"<p>{len(records)} trials: " + ", ".join(f"{n} {status}" for status, n in counts.items()) + "; "
                     f"{told['asked']['goal']} {html.escape(told['asked']['metric'])}.</p>")
        if tuner.best():
            best = tuner.best()[0]
            if DECIDE & told["space"].keys():
                import configuration

                best = used(best, configuration.load_config(told["asked"]["env"], told["options"]))
            command = " ".join(["python pufferl.py train", told["asked"]["env"], *told["options"], *as_options(best)])
            parts.append(f"<h2>Best settings: {short(tuner.best()[1])} for {short(tuner.best()[2])}</h2>"
                         f"<pre>{html.escape(command)}</pre>")
        figures = sweep_figures(told, records, tuner)
        rows = [{**{key: r[key] for key in ("trial", "status", "score", "cost", "steps")}, **r["settings"],
                 "error": r["error"] or ""} for r in records]
    else:
        runs = load_runs(folder, metric, tag)
        if not runs:
            what = f" that log {metric}" + (f" and have the tag {tag}" if tag else "")
            others = ", ".join(str(path.parent) for path in folder.parent.glob(f"{folder.name}*/sweep.json"))
            raise ConfigError(f"{folder}: there is neither a sweep (sweep.json) nor are there runs{what} in it."
                              + (f" There is {others}." if others else ""))
        title = f"Runs in {folder.name}"
        figures = run_figures(runs, metric)
        varied = varied_settings(runs)
        rows = [as_row(run, varied) for run in runs]
    if (folder / "sweep.json").exists() and len(records) - counts["failed"] < enough(tuner):
        parts.append(f"<p>What each setting does is shown from {enough(tuner)} finished trials on.</p>")
    parts.append('<p>Show only what contains <input id="filter" placeholder="text"></p>')
    for name, note, figure in figures:
        figure.update_layout(diagnostics.DARK, height=figure.layout.height or 480)
        figure.update_xaxes(automargin=True, title_standoff=12).update_yaxes(automargin=True, title_standoff=12)
        plot = figure.to_html(full_html=False, include_plotlyjs=False)
        parts.append(f"<h2>{html.escape(name)}</h2><p>{html.escape(note)}</p>{plot}")
    parts.append(f"<h2>Table</h2>{table(rows)}")
    meta = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    filled = {"title": html.escape(title), "refresh": meta, "plotly": get_plotlyjs(), "body": "\n".join(parts)}
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], Path(__file__).with_name("report.html").read_text())


def write_report(path: Path, output: Path | None = None, metric: str = "environment/score", tag: str | None = None):
    """Write the report of a sweep's folder, or of a folder of runs.

    Args:
        path: a sweep's folder, or one of runs such as experiments.
        output: the page (default: report.html in the folder).
        metric: what runs are compared by; a sweep's own metric is used in any case.
        tag: only runs with this tag.
    """
    output = Path(output or Path(path) / "report.html")
    output.write_text(page(path, metric, tag))
    return output


def serve(folder, port):
    """Serve the report on 127.0.0.1; it is made again whenever the ledger has changed. Returns the
    server (server_address, shutdown). port 0 takes a free one."""
    from tools import watch

    lock, made = threading.Lock(), functools.lru_cache(1)(lambda trials: page(folder, refresh=30))

    class Requests(watch.Requests):
        def do_GET(self):
            if self.refuse():
                return
            if self.path != "/":
                self.answer(404, "there is / only")
                return
            with lock:
                text = made(len(list((Path(folder) / "trials").glob("*.json"))))
            self.answer(200, text, "text/html; charset=utf-8", SOURCES)

    server = watch.Server(port, Requests)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
