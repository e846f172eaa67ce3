"""Speed: a trace that a browser can open and a table of the stages, nothing left behind; and
the search for the fastest backend, whose candidates can all work. It finds the fastest,
or a simpler one that is as fast."""

import json
import time

import gymnasium
import numpy as np
import pytest

import kernels
import vector
from tools import speed

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, env, hidden_size=8):
        super().__init__()
        self.mean, self.value = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, observations, state=None):
        x = observations.float()
        return torch.distributions.Normal(self.mean(x), torch.ones_like(self.mean(x))), self.value(x)
"""


def test_a_trace_and_a_table(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    before = dict(vars(kernels))
    speed.main(["profile", "squared", "--env.num-envs", "64", "--vec.num-buffers", "2",
                "--vec.num-threads", "2",
                   "--train.minibatch-size", "1024", "--profile.epochs", "2"])
    path = tmp_path / "experiments" / "profile_squared.json"
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no run's folder"
    spans = [event for event in json.loads(path.read_text())["traceEvents"]
             if event.get("ph") == "X"]
    names = [event["name"] for event in spans]
    assert {"advance", "step", "act", "learn", "draw", "aten::add_"} <= set(names)
    assert names.count("advance") == 2 * 2 * 64, "epochs × buffers × horizon"
    threads = {event["tid"] for event in spans if event["name"] in ("advance", "learn")}
    assert len(threads) == 2, "both workers"
    assert all(event["dur"] >= 0 and "ts" in event for event in spans)
    out = capfd.readouterr().out
    stages = {line.split()[0]: float(line.split()[-1].rstrip("%")) for line in out.splitlines()
              if line.endswith("%")}
    assert stages.keys() == {"environment", "policy", "learn", "other"}
    assert sum(stages.values()) == pytest.approx(100, abs=1)
    assert any(f" {name} " in out for name in ("act", "advance", "learn")), (
        "the costliest are named")
    assert stages["learn"] > 0 and str(path.relative_to(tmp_path)) in out
    assert vars(kernels) == before, "the kernels are as they were"


def test_what_trains_can_be_profiled(tmp_path, monkeypatch, capfd):
    """An own network without a normalizer, where norm_obs is auto and would be on for the default one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    speed.main(["profile", "gym/MountainCarContinuous-v0", "--policy.name", "net.py:Net", "--rnn.name", "none",
                "--vec.num-envs", "2", "--train.horizon", "16", "--train.minibatch-size", "32",
                "--train.replay-ratio", "1", "--train.gamma", "0.9", "--profile.epochs", "1"])
    assert "learn " in capfd.readouterr().out
    assert [p.suffix for p in (tmp_path / "experiments").iterdir()] == [".json"], "no run's folder"


def test_profile_names_an_unknown_environment():
    with pytest.raises(SystemExit, match="squared"):
        speed.main(["profile", "squarde"])


class Slow(gymnasium.Env):
    """A step sleeps, so that workers pay even on a busy machine."""

    observation_space, action_space = gymnasium.spaces.Box(0, 1, (1,), np.float32), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        time.sleep(0.02)
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("num_envs", [1, 6, 7, 64, 96])
@pytest.mark.parametrize("cores", [1, 2, 6, 64])
def test_candidates_divide(num_envs, cores):
    tried = speed.candidates(num_envs, python=True, package=True, cores=cores)
    assert ([vec["backend"] for vec in tried[:2]] == ["serial", "package"]
            and len(tried) == len({str(v) for v in tried}))
    for vec in tried[2:]:
        assert vector._divide(num_envs, vec["num_workers"], vec["batch_size"])[0] == vec["num_workers"]
    if num_envs == 64:
        assert max(vec["num_workers"] or 1 for vec in tried) == {1: 4, 2: 8, 6: 16, 64: 64}[cores]
        assert any(vec["batch_size"] == 32 for vec in tried)
    buffers = [vec["num_buffers"]
               for vec in speed.candidates(num_envs * 1024, python=False, cores=cores)]
    assert (buffers[0] == 1 and all(num_envs * 1024 % n == 0 for n in buffers)
            and max(buffers) >= cores)


class Fake:
    def __init__(self, speed):
        self.speed, self.open = speed, True

    def run(self, seconds):
        assert self.open and seconds == 0.5
        return self.speed

    def close(self):
        self.open = False


def best_of(speeds):
    """search over candidates with these speeds in place of measurements; None cannot work."""
    tried = [{"backend": "multiprocessing", "num_workers": i, "batch_size": i}
             for i in range(len(speeds))]
    made = []

    def make(vec):
        if speeds[vec["num_workers"]] is None:
            raise ValueError("it\nbroke")
        made.append(Fake(speeds[vec["num_workers"]]))
        return made[-1]

    lines = []
    best, medians = speed.search(tried, make, 0.5, lines.append)
    assert not any(one.open for one in made)
    return best["num_workers"], medians, lines


def test_the_fastest_or_a_simpler_equal_is_chosen():
    assert best_of([100, 300, 200])[0] == 1
    assert best_of([100, 295, 200, 301, 250, 10])[0] == 1  # within 3% of the fastest, and simpler
    best, medians, lines = best_of([None, 5, 4, 3, 2, 1])
    assert best == 1 and len(medians) == speed.FINALISTS and "cannot: it" in lines[0]
    with pytest.raises(RuntimeError, match="no backend"):
        best_of([None, None])


def test_flags_are_what_differs():
    present = {"backend": "multiprocessing", "num_workers": 4, "batch_size": None}
    assert speed.flags({"backend": "serial", "num_workers": None, "batch_size": None}, present) == (
        "--vec.backend serial --vec.num-workers None"
    )
    assert speed.flags({"backend": "multiprocessing", "num_workers": 4, "batch_size": None}, present) == ""


@pytest.mark.slow
def test_the_command_line_finds_workers_for_a_slow_environment(capsys):
    """Four environments that sleep: more workers than one are several times as
    fast, and the flags work."""
    import pufferl

    name = f"{__file__}:Slow"
    options = ["--train.horizon", "4", "--vec.num-envs", "4", "--policy.hidden-size", "16",
               "--train.total-timesteps", "16", "--logger", "none"]
    best = speed.main(["autotune", name, "--seconds", "0.2", *options])
    assert best["backend"] == "multiprocessing" and best["num_workers"] >= 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert " ".join(options) in last
    args = pufferl.load_config(name, last.split(name)[1].split())
    with pufferl.load_env(name, args) as vecenv:
        assert vecenv.num_processes == best["num_workers"]


def test_the_best_command_has_the_given_options(monkeypatch, capsys):
    best = {"backend": "native", "num_buffers": 2}
    monkeypatch.setattr(speed, "search", lambda *args: (best, {}))
    speed.main(["autotune", "squared", "--seconds", "1", "--train.horizon", "16"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(" train squared --train.horizon 16 --vec.backend native "
                         "--vec.num-buffers 2")


def test_an_environment_that_raises_is_shown_by_its_own_lines(tmp_path):
    path = tmp_path / "boom.py"
    path.write_text("import gymnasium\n\nclass Boom(gymnasium.Env):\n"
                    "    observation_space = action_space = gymnasium.spaces.Discrete(2)\n\n"
                    "    def reset(self, seed=None, options=None):\n        return 0, {}\n\n"
                    "    def step(self, action):\n        raise RuntimeError('boom')\n")
    with pytest.raises(SystemExit, match=r"(?s)own code:.*boom.py.*in step.*RuntimeError: boom"):
        speed.main(["profile", f"{path}:Boom", "--logger", "none", "--vec.backend", "serial"])


def test_an_unknown_environment_is_an_error():
    with pytest.raises(SystemExit, match="Did you mean CartPole-v1"):
        speed.main(["autotune", "gym/CartPol-v1"])
