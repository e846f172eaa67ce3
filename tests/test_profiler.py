"""The profile verb: a trace that a browser can open, a table of the stages, nothing left behind."""

import json

import pytest

import kernels
import products
import profiler


def test_a_trace_and_a_table(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    before = dict(vars(kernels)), dict(vars(products))
    profiler.main(["squared", "--env.num-envs", "64", "--vec.num-buffers", "2", "--vec.num-threads", "2",
                   "--train.minibatch-size", "1024", "--profile.epochs", "2"])  # fmt: skip
    path = tmp_path / "experiments" / "profile_squared.json"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no run's folder"
    spans = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    names = [event["name"] for event in spans]
    step, product = ("policy_step", "multiply") if products.fast() else ("mingru_step", "aten::addmm")
    assert {"advance", "sample", step, "ppo_loss", product, "aten::add_"} <= set(names)
    assert names.count("advance") == 2 * 2 * 64, "epochs × buffers × horizon"
    threads = {event["tid"] for event in spans if event["name"] in ("advance", "ppo_loss")}
    assert len(threads) == 2, "both workers"
    assert all(event["dur"] >= 0 and "ts" in event for event in spans)
    out = capfd.readouterr().out
    stages = {line.split()[0]: float(line.split()[-1].rstrip("%")) for line in out.splitlines() if line.endswith("%")}
    assert stages.keys() == {"environment", "policy", "learn", "other"}
    assert sum(stages.values()) == pytest.approx(100, abs=1)
    assert any(f" {name} " in out for name in (product, "advance", "gather", "ppo_loss")), "the costliest are named"
    assert stages["learn"] > 0 and str(path.relative_to(tmp_path)) in out
    assert (vars(kernels), vars(products)) == before, "the kernels are as they were"


def test_an_unknown_environment_is_named():
    with pytest.raises(SystemExit, match="squared"):
        profiler.main(["squarde"])
