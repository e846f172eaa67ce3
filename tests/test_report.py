"""report.py: what the page shows is the ledger, in figures, in its text and in a real browser."""

import json
import re
import subprocess

import numpy as np
import pytest
from conftest import find_chromium
from test_trials import FAKE_SPACE, record

from protein import Random, SpaceError
from trials import Ledger, write_json

pytest.importorskip("plotly", reason="the page is made with it; pip install plotly")
import report


@pytest.fixture
def swept(tmp_path):
    """A folder as a sweep of 12 trials leaves it."""
    ledger, rng = Ledger(tmp_path / "sweep_x"), np.random.default_rng(0)
    space = {**FAKE_SPACE, "train.optimizer": ["muon", "adam"]}
    write_json(ledger.folder / "sweep.json", {"asked": {"env": "squared", "metric": "environment/score",
                       "goal": "maximize", "cost": "performance/uptime"}, "options": [], "space": space})  # fmt: skip
    tuner = Random(search_space=space)
    for number in range(12):
        claim = ledger.claim(settings=tuner.suggest())
        r = record(number, float(rng.random()), float(1 + 9 * rng.random()), **claim["settings"])
        if number == 3:
            r |= {"status": "failed", "score": None, "cost": None, "curve": [], "error": "exit 1: <broken>"}
        if number > 8:
            r["predicted"] = {"score": 0.5, "score_sd": 0.1, "cost": 3.0, "log_cost_sd": 0.2, "success": 1.0}
        ledger.finish(claim, r)
    return ledger


def test_report_of_a_sweep(swept):
    told, records, tuner = report.load_sweep(swept.folder)
    figures = {title: figure for title, _, figure in report.sweep_figures(told, records, tuner)}
    assert set(figures) == {"Score against cost", "Curves", "Importance", "Marginal effects", "Parallel coordinates",
                            "Similar settings"}
    points = figures["Score against cost"].data[0]
    good = [r for r in records if r["status"] != "failed"]
    assert list(points.customdata) == [r["trial"] for r in good]
    assert list(points.x) == [r["cost"] for r in good] and list(points.y) == [r["score"] for r in good]
    assert "trial 5" in points.text[4] and "learning_rate" in points.text[4]
    assert sum(figures["Importance"].data[0].x) == pytest.approx(1)
    text = report.write_report(swept.folder).read_text()
    best = max(good, key=lambda r: r["score"])
    assert f"--train.learning-rate {best['settings']['train.learning_rate']}" in text and "[train]" in text
    assert text.count("<tr>") == 13 and "&lt;broken&gt;" in text
    assert 'src="http' not in text, "it must work without a network"


def test_report_of_runs_and_the_live_page(swept, tmp_path):
    from urllib.request import urlopen

    for i in range(9):
        run = tmp_path / "runs" / f"squared_{i}"
        run.mkdir(parents=True)
        sections = {"env": {}, "vec": {}, "policy": {}, "rnn": {}}
        sections["train"] = {"total_timesteps": 100, "gamma": 0.9 + i / 100}
        (run / "config.json").write_text(json.dumps({"env_name": "squared", "tag": "ab"[i % 2], **sections}))
        entries = [{"step": s, "environment/score": s * i, "performance/uptime": s / 10} for s in range(10, 101, 10)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    text = report.page(tmp_path / "runs")
    assert text.count("<tr>") == 10 and "squared: curves over environment steps" in text and "train.gamma" in text
    assert report.page(tmp_path / "runs", tag="a").count("<tr>") == 6
    with pytest.raises(SpaceError, match="have the tag c"):
        report.page(tmp_path / "runs", tag="c")
    server = report.serve(swept.folder, 0)
    host, port = server.server_address
    assert host == "127.0.0.1"
    assert "Sweep of squared" in urlopen(f"http://127.0.0.1:{port}/").read().decode()
    server.shutdown()
    server.server_close()


def test_tsne_keeps_clusters_apart():
    rng = np.random.default_rng(0)
    label = np.arange(60) % 3
    spot = report.tsne(np.eye(5)[label] * 3 + 0.1 * rng.standard_normal((60, 5)))
    distance = np.linalg.norm(spot[:, None] - spot[None], axis=-1) + 1e9 * np.eye(60)
    assert (label[distance.argmin(1)] == label).all()


@pytest.mark.slow
def test_report_in_a_browser(swept, tmp_path):
    """The page in a headless Chromium: what it shows is the ledger."""
    browser = find_chromium()
    page = report.write_report(swept.folder)
    probe = """<pre id="probe"></pre><script>window.addEventListener("load", () => setTimeout(() => {
      const plot = document.querySelector(".js-plotly-plot"), trace = plot.data[0];
      Plotly.Fx.hover(plot, [{curveNumber: 0, pointNumber: 4}]);
      const values = axis => Array.from(plot.calcdata[0], point => plot._fullLayout[axis].d2c ? point[axis[0]] : null);
      setTimeout(() => document.getElementById("probe").textContent = JSON.stringify({
        trials: Array.from(trace.customdata), drawn: plot.querySelectorAll(".points path").length,
        x: values("xaxis"), y: values("yaxis"), hover: plot.querySelector(".hoverlayer").textContent,
        rows: document.querySelectorAll("tbody tr").length}), 500);
    }, 1000));</script></body>"""
    page.write_text(page.read_text().replace("</body>", probe))
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom",
                 "--virtual-time-budget=20000", "--window-size=1250,4600", page.as_uri()]  # fmt: skip
    text = subprocess.run([browser, *arguments], capture_output=True, text=True, timeout=120).stdout
    shown = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', text).group(1))
    good = [r for r in swept.results().values() if r["status"] != "failed"]
    assert shown["trials"] == [r["trial"] for r in good] and shown["drawn"] >= len(good) and shown["rows"] == 12
    np.testing.assert_allclose(shown["x"], [r["cost"] for r in good])
    np.testing.assert_allclose(shown["y"], [r["score"] for r in good])
    assert f"trial {good[4]['trial']} (done)" in shown["hover"]
