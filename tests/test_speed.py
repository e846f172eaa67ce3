"""profile writes a trace and a table; autotune chooses the fastest candidate."""

import json
import time
from unittest import mock

import pytest
import trainers
from small_envs import Steps

import kernels
import pufferl
from tools import speed


def test_a_trace_and_a_table(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    before = dict(vars(kernels))
    pufferl.main(["profile", "squared", "--env.num-envs", "64", "--vec.num-buffers", "2",
                  "--vec.num-threads", "2", "--train.horizon", "16", "--train.minibatch-size",
                  "256", "--profile.epochs", "2"])
    path = tmp_path / "experiments" / "profile_squared.json"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no run's folder"
    spans = [event for event in json.loads(path.read_text())["traceEvents"]
             if event.get("ph") == "X"]
    names = [event["name"] for event in spans]
    assert {"rollout", "step", "backward_share", "draw_segments", "aten::add_"} <= {*names}
    assert names.count("advance") == 2 * 2 * 16, "epochs × buffers × horizon"
    assert len({event["tid"] for event in spans if event["name"] in ("advance", "learn")}) == 2
    assert all(event["dur"] >= 0 and "ts" in event for event in spans)
    out = capfd.readouterr().out
    stages = {line.split()[0]: float(line.split()[-1].rstrip("%")) for line in out.splitlines()
              if line.endswith("%")}
    assert stages.keys() == {"environment", "policy", "learn", "other"} and stages["learn"] > 0
    assert sum(stages.values()) == pytest.approx(100, abs=1)
    assert " advance " in out and str(path.relative_to(tmp_path)) in out
    assert vars(kernels) == before, "the kernels are as they were"


def test_a_network_without_a_normalizer_is_profiled(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    pufferl.main(["profile", "gym/MountainCarContinuous-v0", "--policy.name",
                  f"{trainers.__file__}:FixedSpread", "--rnn.name", "none", "--vec.num-envs", "2",
                  "--train.horizon", "16", "--train.minibatch-size", "32",
                  "--train.replay-ratio", "1", "--train.gamma", "0.9", "--profile.epochs", "1"])
    assert "learn " in capfd.readouterr().out


@pytest.mark.parametrize(("num_envs", "cores", "most_workers"), [
    (1, 1, 1), (1, 64, 1), (6, 2, 6), (7, 6, 7), (64, 1, 4), (64, 2, 8), (64, 6, 16), (64, 64, 64),
    (96, 2, 8), (96, 64, 96)])
def test_candidates_divide(num_envs, cores, most_workers):
    tried = speed.candidates(num_envs, python=True, package=True, cores=cores)
    assert [vec["backend"] for vec in tried[:2]] == ["serial", "package"]
    assert len(tried) == len({str(vec) for vec in tried})
    for vec in tried[2:]:
        workers, batch = vec["num_workers"], vec["batch_size"]
        batch = batch or num_envs
        assert num_envs % workers == num_envs % batch == batch % (num_envs // workers) == 0
    assert max(vec["num_workers"] or 1 for vec in tried) == most_workers
    assert num_envs != 64 or any(vec["batch_size"] == 32 for vec in tried)
    agents = num_envs * 1024
    buffers = [vec["num_buffers"] for vec in speed.candidates(agents, python=False, cores=cores)]
    assert buffers[0] == 1 and max(buffers) >= cores
    assert all(agents % n == 0 for n in buffers)


@pytest.mark.parametrize(("speeds", "best", "finalists"), [
    ([100, 300, 200], 1, 3), ([100, 295, 200, 301, 250, 10], 1, speed.FINALISTS),
    ([None, 5, 4, 3, 2, 1], 1, speed.FINALISTS)])
def test_the_fastest_or_a_simpler_one_as_fast_is_chosen(speeds, best, finalists):
    """None is the time of a candidate that cannot work."""
    candidates, lines = [], []

    def make(vec):
        if (steps := speeds[vec["num_workers"]]) is None:
            raise ValueError("it\nbroke")
        candidates.append(mock.MagicMock(**{"__enter__.return_value": lambda seconds: steps}))
        return candidates[-1]

    vecs = [{"backend": "multiprocessing", "num_workers": i, "batch_size": i}
            for i in range(len(speeds))]
    chosen, medians = speed.search(vecs, make, 0.5, lines.append)
    assert chosen["num_workers"] == best and len(medians) == finalists
    assert all(candidate.__exit__.called for candidate in candidates)
    assert speeds[0] is not None or lines[0].endswith(": it")
    with pytest.raises(RuntimeError):
        speed.search(vecs, mock.Mock(side_effect=ValueError("it")), 0.5, lines.append)


def test_the_best_command_has_the_given_options(monkeypatch, capsys):
    best = {"backend": "serial", "num_buffers": 2, "num_workers": None, "batch_size": None}
    monkeypatch.setattr(speed, "search", lambda *_: (best, {}))
    pufferl.main(["autotune", "squared", "--seconds", "1", "--vec.num-workers", "4"])
    assert capsys.readouterr().out.splitlines()[-1].endswith(
        " train squared --vec.num-workers 4 --vec.backend serial --vec.num-buffers 2 "
        "--vec.num-workers None"), "and not what equals the present settings"


class Slow(Steps):
    """A step sleeps, so that workers pay even on a busy machine."""

    def step(self, action):
        time.sleep(0.02)
        return super().step(action)


@pytest.mark.slow
def test_workers_are_found_for_a_slow_environment(capsys):
    name = f"{__file__}:Slow"
    options = ["--train.horizon", "4", "--vec.num-envs", "4", "--policy.hidden-size", "16",
               "--train.total-timesteps", "16", "--logger", "none"]
    best = pufferl.main(["autotune", name, "--seconds", "0.2", *options])
    assert best["backend"] == "multiprocessing" and best["num_workers"] >= 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert " ".join(options) in last
    args = pufferl.load_config(name, last.split(name)[1].split())
    with pufferl.load_env(name, args) as vecenv:
        assert vecenv.num_workers == best["num_workers"]
