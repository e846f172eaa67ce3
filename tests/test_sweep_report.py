"""The page of a sweep or of runs shows what their files hold."""

import json
import re

import numpy as np
import pytest
from conftest import open_chromium
from test_sweep import FAKE_SPACE, record, write_sweep

from errors import ConfigError
from protein import Random
from tools.sweep import report
from tools.sweep.trials import short

pytest.importorskip("plotly", reason="the page is made with it; pip install plotly")


@pytest.fixture
def swept(tmp_path):
    space = {**FAKE_SPACE, "train.optimizer": ["muon", "adam"]}
    ledger, rng = write_sweep(tmp_path / "sweep_x", space), np.random.default_rng(0)
    tuner = Random(search_space=space)
    failure = {"status": "failed", "score": None, "cost": None, "curve": [],
               "error": "exit 1: <broken>"}
    prediction = {"score": 0.5, "score_sd": 0.1, "cost": 3.0, "log_cost_sd": 0.2, "success": 1.0}
    for number in range(12):
        score, cost = rng.uniform([0, 1], [1, 10]).tolist()
        r = record(number, score, cost, **tuner.suggest())
        ledger.finish({**r, **(failure if number == 3 else {}),
                       "predicted": prediction if number > 8 else {}})
    return ledger


def test_report_of_a_sweep(swept):
    told, records, tuner = report.load_sweep(swept.folder)
    figures = {title: figure for title, _, figure in report.sweep_figures(told, records, tuner)}
    assert set(figures) == {"Score against cost", "Curves", "Stars", "Importance",
                            "Marginal effects"}
    star, points = figures["Stars"].data[0], figures["Score against cost"].data[0]
    menu = figures["Stars"].layout.updatemenus[0].buttons
    assert [button.label for button in menu] == list(tuner.space.names)
    assert [*star.y] == menu[0].args[0]["y"][0]
    assert (star.x, star.z, star.text) == (points.x, points.y, points.text)
    good = [r for r in records if r["status"] != "failed"]
    assert [*zip(points.customdata, points.x, points.y, strict=True)] == [
        (r["trial"], r["cost"], r["score"]) for r in good]
    assert "trial 5" in points.text[4] and "learning_rate" in points.text[4]
    assert sum(figures["Importance"].data[0].x) == pytest.approx(1)
    effects = figures["Marginal effects"].layout
    assert [effects[axis].type for axis in ("xaxis", "xaxis2", "xaxis3")] == ["log", "log", None]
    text = report.write_report(swept.folder).read_text()
    best = max(good, key=lambda r: r["score"])["settings"]["train.learning_rate"]
    assert f"--train.learning-rate {best}" in text
    assert text.count("<tr>") == 13 and "&lt;broken&gt;" in text
    assert 'src="http' not in text, "it must work without a network"
    for path in sorted((swept.folder / "trials").glob("*.json"))[7:]:
        path.unlink()
    text = report.page(swept.folder)  # settings are judged by enough trials alone
    assert re.search(r"\b10\b[^<]*trials", text) and "Importance" not in text and "Stars" in text


def test_numbers_are_for_people():
    numbers = {4070.0: "4,070", 4096: "4,096", 1e7: "10,000,000", 0.0123456: "0.01235", 12: "12",
               True: "True", -2500.4: "-2,500", float("inf"): "inf", "muon": "muon", None: "None"}
    assert {number: short(number) for number in numbers} == numbers


@pytest.fixture
def runs(tmp_path):
    """Write six runs, whose scores grow by their number a step."""
    folder = tmp_path / "runs"
    settings = [{"balls": 5}, {"balls": 5}, {}, {"distance": 3}, {"distance": 4}, {}]
    for i, env in enumerate(settings):
        name = "breakout" if i < 2 else "squared"
        run = folder / f"{name}_{i}"
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps({
            "env_name": name, "tag": ["north", "south"][i % 2], "env": env, "vec": {}, "policy": {},
            "rnn": {}, "train": {"total_timesteps": 100, "gamma": 0.9 + i / 100}}))
        entries = [{"step": s, "environment/score": s * i, "performance/uptime": s / 10}
                   for s in range(10, 101, 10)]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, entries)))
    return folder


def test_report_of_runs_of_two_environments(runs):
    found = report.load_runs(runs, "environment/score")
    assert report.varied_settings(found) == ["train.gamma", "env.distance"], (
        "balls are the same wherever there are any")
    figures = {title: figure for title, _, figure in report.run_figures(found, "environment/score")}
    curves = figures["squared: curves over seconds"].data
    assert [trace.name for trace in curves] == ["squared_2", "squared_3", "squared_4", "squared_5"]
    for i, trace in enumerate(curves, 2):
        assert {"env = squared", f"tag = {['north', 'south'][i % 2]}",
                f"train.gamma = {0.9 + i / 100:.3g}"} <= {*trace.text.split("<br>")}
    assert "env.distance = 3" in curves[1].text
    assert "env.distance" not in figures["breakout: curves over seconds"].data[0].text
    texts = tuple(trace.text for trace in curves)
    assert figures["squared: score by setting"].data[0].text == texts
    text = report.page(runs)
    assert text.count("<tr>") == 7 and "<th>env.distance</th>" in text
    assert "squared: curves over environment steps" in text
    assert report.page(runs, tag="north").count("<tr>") == 4
    with pytest.raises(ConfigError, match="west"):
        report.page(runs, tag="west")


@pytest.fixture
def browser():
    """Yield a function that opens a page; fail on its errors and requests."""
    with open_chromium("MAP * ~NOTFOUND, EXCLUDE localhost") as (page, requests, problems):
        def show(url):
            page.goto(url)
            page.wait_for_selector(".js-plotly-plot .main-svg")
            return page

        yield show
        assert all(url.startswith((page.url, "data:", "blob:")) for url in requests)
        assert problems == []


@pytest.mark.slow
def test_report_in_a_browser(swept, browser):
    page = browser(report.write_report(swept.folder).as_uri())
    assert page.locator(".js-plotly-plot").count() == 5
    page.wait_for_selector(".gl-container canvas", state="attached")  # the stars
    shown = page.evaluate("""() => {
      const plot = document.querySelector(".js-plotly-plot");
      return {trials: plot.data[0].customdata, drawn: plot.querySelectorAll(".points path").length,
              x: plot.calcdata[0].map(point => point.x), y: plot.calcdata[0].map(point => point.y),
              rows: document.querySelectorAll("tbody tr").length};
    }""")
    good = [r for r in swept.results().values() if r["status"] != "failed"]
    assert shown["trials"] == [r["trial"] for r in good]
    assert shown["drawn"] >= len(good) and shown["rows"] == 12
    np.testing.assert_allclose(shown["x"], [r["cost"] for r in good])
    np.testing.assert_allclose(shown["y"], [r["score"] for r in good])


@pytest.mark.slow
def test_the_filter_of_the_page(runs, browser):
    page = browser(report.write_report(runs).as_uri())

    def visible():
        """(curves, points not faint, rows)"""
        return page.evaluate("""() => {
          const plots = [...document.querySelectorAll(".js-plotly-plot")];
          const all = name => plots.flatMap(plot => [...plot.querySelectorAll(name)]);
          const rows = [...document.querySelectorAll("tbody tr")].filter(row => !row.hidden);
          return [all(".scatterlayer .js-line").length,
                  all(".points path").filter(path => path.style.opacity > 0.5).length, rows.length];
        }""")

    assert visible() == [12, 6, 6], "each curve over steps and over seconds"
    for text, count in (("north", 3), ("tag = south", 3), ("squared", 4), ("env.distance = 4", 1),
                        ("nowhere", 0), ("", 6)):
        page.fill("#filter", text)
        assert visible() == [2 * count, count, count], text
