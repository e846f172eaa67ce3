"""The page of a sweep shows what its files hold."""

import re

import numpy as np
import pytest
from conftest import open_chromium
from test_sweep import FAKE_SPACE, record, write_sweep

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
    for number in range(12):
        score, cost = rng.uniform([0, 1], [1, 10]).tolist()
        r = record(number, score, cost, **tuner.suggest())
        ledger.finish({**r, **(failure if number == 3 else {})})
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


@pytest.mark.slow
def test_report_in_a_browser(swept):
    with open_chromium("MAP * ~NOTFOUND") as (page, requests, problems):
        page.goto(report.write_report(swept.folder).as_uri())
        page.wait_for_selector(".gl-container canvas", state="attached")  # the stars
        assert page.locator(".js-plotly-plot").count() == 5
        trials, x, y = page.evaluate("""() => {
          const plot = document.querySelector(".js-plotly-plot"), points = plot.calcdata[0];
          return [plot.data[0].customdata, points.map(point => point.x),
                  points.map(point => point.y)];
        }""")
        good = [r for r in swept.results().values() if r["status"] != "failed"]
        assert trials == [r["trial"] for r in good]
        np.testing.assert_allclose([x, y], [[r[key] for r in good] for key in ("cost", "score")])
        for text, points, curves, rows in (
                ("", 11, 11, 12), ("status = failed", 0, 0, 1), ("trial 5 (done)", 1, 1, 0)):
            page.fill("#filter", text)
            shown = page.evaluate("""() => {
              const [first, second] = document.querySelectorAll(".js-plotly-plot");
              const points = [...first.querySelectorAll(".points path")];
              return [points.filter(point => point.style.opacity > 0.5).length,
                      second.querySelectorAll(".scatterlayer .js-line").length,
                      [...document.querySelectorAll("tbody tr")].filter(row => !row.hidden).length];
            }""")
            assert shown == [points, curves, rows], text
        assert problems == []
        assert all(url.startswith((page.url, "data:", "blob:")) for url in requests)
