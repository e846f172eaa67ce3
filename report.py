"""The page of a sweep, or of a folder of runs: front, importance, curves, tables; one file that needs no network.

    python protein.py report experiments/sweep_breakout     # a sweep: front, predictions, effects, best settings
    python protein.py report experiments                    # ordinary runs side by side, by environment
    python protein.py breakout --sweep.web 8080             # live, at http://127.0.0.1:8080

`page` puts it together from [(title, text, plotly figure)]; to add a figure, add one to `sweep_figures` or
`run_figures`.
"""

import contextlib
import html
import json
import math
import threading
from pathlib import Path

import numpy as np

from protein import Protein, SpaceError, front_of
from trials import Curve, Ledger, as_options, observe_record, short


def load_sweep(folder):
    """(what sweep.json says, records of the finished trials, a Protein that has observed them all)."""
    folder = Path(folder)
    told = json.loads((folder / "sweep.json").read_text())
    records = list(Ledger(folder).results().values())
    asked = told["asked"]
    tuner = Protein(search_space=told["space"], num_trials=max(1, len(records)), metric=asked["metric"],
                    goal=asked["goal"])
    for record in records:
        observe_record(tuner, record)
    return told, records, tuner


def marginal_effects(tuner, points=24, samples=48):
    """{setting: (values, mean score (points,), sd (points,))}: the predicted score at the end where one setting is
    changed and the others are those of tried configurations, averaged over `samples` of these (partial dependence)."""
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


def tsne(X, perplexity=15.0, steps=300, seed=0):
    """(n, 2) map of the rows of X in which near ones stay near (van der Maaten and Hinton 2008); exact, n < 1,000."""
    n = len(X)
    squared = ((X[:, None] - X[None]) ** 2).sum(-1)
    P = np.zeros((n, n))
    for i in range(n):  # a width for each row so that it has about `perplexity` neighbours
        low, high, distance = 1e-6, 1e6, np.delete(squared[i], i)
        for _ in range(40):
            precision = math.sqrt(low * high)
            p = np.exp(-(distance - distance.min()) * precision)
            p /= p.sum()
            wide = -(p * np.log(np.maximum(p, 1e-300))).sum() > math.log(min(perplexity, (n - 1) / 3))
            low, high = (precision, high) if wide else (low, precision)
        P[i, np.arange(n) != i] = p
    P = np.maximum((P + P.T) / (2 * n), 1e-12)
    Y = 1e-2 * np.random.default_rng(seed).standard_normal((n, 2))
    speed = np.zeros_like(Y)
    for step in range(steps):
        difference = Y[:, None] - Y[None]
        near = 1 / (1 + (difference**2).sum(-1))
        np.fill_diagonal(near, 0)
        pull = (P * (4 if step < 80 else 1) - near / near.sum()) * near
        speed = (0.5 if step < 80 else 0.8) * speed - n / 3 * (pull[..., None] * difference).sum(1)
        Y = Y + speed - Y.mean(0)
    return Y


def sweep_figures(told, records, tuner):
    """[(title, text, figure)] of a sweep."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    asked, names = told["asked"], tuner.space.names
    good = [r for r in records if r["status"] != "failed"]
    if not good:
        return []

    def words(record):
        settings = [f"{name} = {short(value)}" for name, value in record["settings"].items()]
        return "<br>".join([f"trial {record['trial']} ({record['status']})",
                            f"score {record['score']:.5g}, cost {record['cost']:.5g}", *settings])

    cost, score = [r["cost"] for r in good], [r["score"] for r in good]
    front = front_of([tuner.sign * s for s in score], cost)
    figure = go.Figure()
    figure.add_scatter(x=cost, y=score, mode="markers", name="trials", text=[words(r) for r in good], hoverinfo="text",
                       customdata=[r["trial"] for r in good], meta="trials",
                       marker={"color": [r["trial"] for r in good], "colorscale": "Viridis", "size": 8,
                               "symbol": ["circle" if r["status"] == "done" else "triangle-down" for r in good],
                               "colorbar": {"title": "trial"}})
    figure.add_scatter(x=[cost[i] for i in front], y=[score[i] for i in front], mode="lines", line_shape="hv",
                       name="front", line={"color": "crimson"}, hoverinfo="skip")
    expected = [(r["trial"], r["predicted"]) for r in good if r["predicted"].get("score") is not None]
    figure.add_scatter(x=[p["cost"] for _, p in expected], y=[p["score"] for _, p in expected], mode="markers",
                       name="expected, ± 1 sd", visible="legendonly", marker={"symbol": "x-thin-open"},
                       error_y={"array": [p["score_sd"] for _, p in expected], "thickness": 0.6}, hoverinfo="text",
                       text=[f"trial {number}, as expected before it" for number, _ in expected])
    figure.update_layout(xaxis={"type": "log", "title": asked["cost"]}, yaxis_title=asked["metric"],
                         legend={"orientation": "h"})
    figures = [("Score against cost", "Each point is a trial (triangles: stopped early); the line is the front. "
                "Click the legend for what the model had expected.", figure)]

    figure = go.Figure()
    for r in good:
        figure.add_scatter(x=[c for _, _, c in r["curve"]], y=[s for _, s, _ in r["curve"]], mode="lines+markers",
                           name=f"{r['trial']}", text=words(r), hoverinfo="text", marker={"size": 4}, line={"width": 1})
    figure.update_layout(xaxis={"type": "log", "title": asked["cost"]}, yaxis_title=asked["metric"])
    figures.append(("Curves", "The points of each trial that the model learns from.", figure))

    if len(good) >= 4:
        tuner.fit()
        effects = marginal_effects(tuner)
        share = np.array([np.var(mean) for _, mean, _ in effects.values()])
        share = share / (share.sum() or 1.0)
        order = np.argsort(share)
        figure = go.Figure(go.Bar(x=share[order], y=[names[i] for i in order], orientation="h"))
        figure.update_layout(xaxis={"title": "share of the variance of the marginal effects", "tickformat": ".0%"},
                             margin={"l": 180})
        figures.append(("Importance", "How much the predicted score changes with each setting alone.", figure))
        columns = 3
        rows = -(-len(names) // columns)
        figure = make_subplots(rows, columns, subplot_titles=names)
        for i, (setting, (values, mean, sd)) in enumerate(zip(tuner.space.settings, effects.values(), strict=True)):
            at = {"row": i // columns + 1, "col": i % columns + 1}
            values = [str(v) for v in values] if setting.categorical else values
            figure.add_scatter(x=values, y=mean + sd, line={"width": 0}, hoverinfo="skip", showlegend=False, **at)
            figure.add_scatter(x=values, y=mean - sd, line={"width": 0}, fill="tonexty", hoverinfo="skip",
                               fillcolor="rgba(60,120,200,0.2)", showlegend=False, **at)
            figure.add_scatter(x=values, y=mean, line={"color": "rgb(60,120,200)"}, showlegend=False, **at)
            tried = [r["settings"][setting.name] for r in good]
            figure.add_scatter(x=[str(v) for v in tried] if setting.categorical else tried, y=score, mode="markers",
                               marker={"size": 4, "color": "grey"}, text=[words(r) for r in good], hoverinfo="text",
                               showlegend=False, **at)
            if setting.distribution in ("log_normal", "uniform_pow2"):
                figure.update_xaxes(type="log", **at)
        figure.update_layout(height=240 * rows + 60)
        figures.append(("Marginal effects", "Predicted score at the end, averaged over the tried values of all other "
                        "settings, ± 1 sd; points are trials.", figure))

    figures.append(("Parallel coordinates", "Drag along an axis to keep a range.", parallel(
        {name: [r["settings"][name] for r in good] for name in names} | {"cost": cost, "score": score},
        {s.name for s in tuner.space.settings if s.distribution in ("log_normal", "uniform_pow2")} | {"cost"}, score)))
    if len(good) >= 8:
        units = tuner.space.features(np.array([tuner.space.encode(r["settings"]) for r in good[:600]]))
        figures.append(similarity(units, score[:600], [words(r) for r in good[:600]]))
    return figures


def parallel(columns, logarithmic, score):
    """Parallel coordinates of {name: values}, coloured by score."""
    import plotly.graph_objects as go

    dimensions = []
    for name, values in columns.items():
        label = name.partition(".")[2] or name
        if any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
            kinds = sorted(set(map(str, values)))
            dimensions.append({"label": label, "values": [kinds.index(str(v)) for v in values],
                               "tickvals": list(range(len(kinds))), "ticktext": kinds})
        elif name in logarithmic and min(values) > 0:
            ticks = np.unique(np.round(np.linspace(math.log10(min(values)), math.log10(max(values)), 5), 2))
            dimensions.append({"label": f"{label} (log)", "values": np.log10(values), "tickvals": ticks,
                               "ticktext": [short(float(10**t)) for t in ticks]})
        else:
            dimensions.append({"label": label, "values": values})
    line = {"color": score, "colorscale": "Viridis", "showscale": True}
    return go.Figure(go.Parcoords(dimensions=dimensions, line=line))


def similarity(features, score, text):
    import plotly.graph_objects as go

    spot = tsne(np.asarray(features, dtype=float))
    figure = go.Figure(go.Scatter(x=spot[:, 0], y=spot[:, 1], mode="markers", text=text, hoverinfo="text",
                                  marker={"color": score, "colorscale": "Viridis", "showscale": True}))
    figure.update_xaxes(showticklabels=False)
    figure.update_yaxes(showticklabels=False)
    return "Similar settings", "t-SNE of the settings, coloured by score: near points have like settings.", figure


def load_runs(folder, metric, tag=None):
    """[{name, env, settings, step, score, cost, ...}] of all runs in a folder, those of sweeps included."""
    runs = []
    for path in sorted(Path(folder).glob("**/config.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
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
    """{column: value} of a run: what the table and the text at a curve show, and what the filter looks through."""
    told = {"run": run["name"], "env": run["env"], "tag": run["tag"], "score": f"{run['score']:.5g}",
            "seconds": run["cost"], "steps": run["curve"].step[-1]}
    return told | {name: run["settings"].get(name, "") for name in varied}


def varied_settings(runs):
    """The settings that differ between the runs that have them: those of another environment do not."""
    names = dict.fromkeys(name for run in runs for name in run["settings"])
    return [name for name in names if len({str(run["settings"][name]) for run in runs if name in run["settings"]}) > 1]


def run_figures(runs, metric):
    """[(title, text, figure)] of ordinary runs, by environment: curves, score against each setting, t-SNE."""
    import plotly.graph_objects as go

    figures = []
    for env in sorted({run["env"] for run in runs}):
        mine = [run for run in runs if run["env"] == env]
        varied = varied_settings(mine)
        text = ["<br>".join(f"{name} = {short(value)}" for name, value in as_row(run, varied).items()) for run in mine]
        for axis, title in (("step", "environment steps"), ("cost", "seconds")):
            figure = go.Figure()
            for run, words in zip(mine, text, strict=True):
                every = max(1, len(run["curve"].step) // 400)
                figure.add_scatter(x=getattr(run["curve"], axis)[::every], y=run["curve"].score[::every], mode="lines",
                                   name=run["name"], text=words, hoverinfo="text")
            figure.update_layout(xaxis_title=title, yaxis_title=metric, showlegend=True)
            figures.append((f"{env}: curves over {title}", "", figure))
        if varied:
            def column(name, mine=mine):
                values = [run["settings"].get(name) for run in mine]
                plain = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
                return values if plain else [str(v) for v in values]

            axes = {"seconds": [run["cost"] for run in mine]} | {name: column(name) for name in varied}
            figure = go.Figure(go.Scatter(x=axes["seconds"], y=[run["score"] for run in mine], mode="markers",
                                          text=text, hoverinfo="text"))
            buttons = [{"label": name, "method": "update", "args": [{"x": [values]}, {"xaxis.title.text": name}]}
                       for name, values in axes.items()]
            figure.update_layout(updatemenus=[{"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.15}],
                                 xaxis_title="seconds", yaxis_title=metric)
            figures.append((f"{env}: score by setting", "Choose the setting in the menu.", figure))
            numeric = [name for name in varied if not isinstance(column(name)[0], str)]
            if len(mine) >= 8 and numeric:
                X = np.array([column(name) for name in numeric], dtype=float).T[:600]
                X = np.where((X > 0).all(0), np.log(np.maximum(X, 1e-30)), X)
                X = (X - X.mean(0)) / np.maximum(X.std(0), 1e-12)
                title, note, figure = similarity(X, [run["score"] for run in mine][:600], text[:600])
                figures.append((f"{env}: {title.lower()}", note, figure))
    return figures


PAGE = """<!doctype html><html><head><meta charset="utf-8"><title>{title}</title>{refresh}<style>
body {{ font: 15px system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse; font-size: 13px }} .wide {{ overflow-x: auto }}
td, th {{ padding: 2px 8px; text-align: right; white-space: nowrap }}
th {{ cursor: pointer; border-bottom: 1px solid #999 }} tr:nth-child(even) {{ background: #f4f4f4 }}
pre {{ background: #f4f4f4; padding: 1em; overflow-x: auto }}
</style><script>{plotly}</script></head><body><h1>{title}</h1>{body}<script>
document.querySelectorAll("th").forEach(th => th.onclick = () => {{
  const body = th.closest("table").tBodies[0], down = th.dataset.down = th.dataset.down ? "" : "1";
  const key = row => {{
    const text = row.cells[th.cellIndex].textContent, value = parseFloat(text);
    return isNaN(value) ? text : value;
  }};
  const rows = [...body.rows].sort((a, b) => key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0);
  (down ? rows.reverse() : rows).forEach(row => body.append(row));
}});
const filter = document.getElementById("filter");
filter.oninput = () => {{
  const wanted = text => text.toLowerCase().includes(filter.value.toLowerCase());
  document.querySelectorAll("tbody tr").forEach(row => {{
    const heads = row.closest("table").tHead.rows[0].cells;
    row.hidden = !wanted([...row.cells].map((cell, i) => `${{heads[i].textContent}} = ${{cell.textContent}}`).join());
  }});
  document.querySelectorAll(".js-plotly-plot").forEach(plot => {{  // a curve goes; of many points the others grow faint
    const texts = plot.data.map(trace => trace.text), all = !filter.value;
    const chosen = text => all ? null : [...text.keys()].filter(i => wanted(text[i]));
    Plotly.restyle(plot, {{  // undefined leaves a trace as it is
      visible: texts.map(text => typeof text === "string" ? wanted(text) : undefined),
      selectedpoints: texts.map(text => Array.isArray(text) ? chosen(text) : undefined),
      "unselected.marker.opacity": texts.map(text => Array.isArray(text) ? 0.05 : undefined),
    }});
  }});
}};
</script></body></html>"""


def table(rows):
    """[{column: value}] as an HTML table that sorts by a click on a column's head."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    cells = ["".join(f"<td>{html.escape(short(row.get(name, '')))}</td>" for name in columns) for row in rows]
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>" + "".join(
        f"<tr>{row}</tr>" for row in cells) + "</tbody></table></div>"


def as_ini(settings):
    """{"train.learning_rate": 0.01} -> the text of an ini file."""
    sections = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append(f"{key} = {value}")
    return "\n\n".join(f"[{section}]\n" + "\n".join(lines) for section, lines in sections.items()) + "\n"


def page(folder, metric="environment/score", tag=None, refresh=None):
    """The report of a sweep's folder, or of a folder of runs, as one HTML text that needs no network."""
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
            command = " ".join(["python pufferl.py train", told["asked"]["env"], *told["options"], *as_options(best)])
            parts.append(f"<h2>Best settings: {tuner.best()[1]:.5g} for {tuner.best()[2]:.4g}</h2>"
                         f"<pre>{html.escape(command)}</pre><pre>{html.escape(as_ini(best))}</pre>")
        figures = sweep_figures(told, records, tuner)
        rows = [{**{key: r[key] for key in ("trial", "status", "score", "cost", "steps")}, **r["settings"],
                 "error": r["error"] or ""} for r in records]
    else:
        runs = load_runs(folder, metric, tag)
        if not runs:
            what = f" that log {metric}" + (f" and have the tag {tag}" if tag else "")
            raise SpaceError(f"{folder}: there is neither a sweep (sweep.json) nor are there runs{what} in it.")
        title = f"Runs in {folder.name}"
        figures = run_figures(runs, metric)
        varied = varied_settings(runs)
        rows = [as_row(run, varied) for run in runs]
    parts.append('<p>Show only what contains <input id="filter" placeholder="text"></p>')
    for name, note, figure in figures:
        figure.update_layout(template="plotly_white", margin={"t": 40, "b": 50}, height=figure.layout.height or 480)
        plot = figure.to_html(full_html=False, include_plotlyjs=False)
        parts.append(f"<h2>{html.escape(name)}</h2><p>{html.escape(note)}</p>{plot}")
    parts.append(f"<h2>Table</h2>{table(rows)}")
    meta = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return PAGE.format(title=html.escape(title), refresh=meta, plotly=get_plotlyjs(), body="\n".join(parts))


def write_report(folder, output=None, **options):
    """Write the page, by default as report.html into the folder; returns its path."""
    output = Path(output or Path(folder) / "report.html")
    output.write_text(page(folder, **options))
    return output


def serve(folder, port):
    """Serve the page on 127.0.0.1, made anew when the ledger has changed; returns the server (server_address,
    shutdown). port 0 takes a free one."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    made, lock = {"trials": -1, "page": b""}, threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            with lock:
                trials = len(list((Path(folder) / "trials").glob("*.json")))
                if made["trials"] != trials:
                    made["page"] = page(folder, refresh=30).encode()
                    made["trials"] = trials
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(made["page"])))
            self.end_headers()
            self.wfile.write(made["page"])

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
