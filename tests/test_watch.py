"""Evaluation counts fairly; shipped policies load and score; pictures, videos and the page show the game."""

import itertools

import gymnasium
import numpy as np
import pytest
import torch

import ocean
import pufferl
import watch

# -- counting ---------------------------------------------------------------------------------------------------------


class Uneven(gymnasium.Env):
    """Half of the episodes last one step and return 0, the others 20 steps and return 1."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 1 if self.np_random.random() < 0.5 else 20
        self.long = self.left > 1
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(1, np.float32), float(self.left == 0 and self.long), self.left == 0, False, {}

    def render(self):
        return np.full((8, 16, 3), 5 * self.left, np.uint8)


UNEVEN = f"{__file__}:Uneven"


def test_short_episodes_are_not_favoured():
    args = pufferl.load_config(UNEVEN, ["--eval.episodes", "400", "--vec.num-envs", "40", "--vec.backend", "serial"])
    results = watch.evaluate(UNEVEN, args)
    assert abs(results["score"].mean - 0.5) < 0.1  # the first 400 to finish would give about 0.15
    assert results["score"].error == pytest.approx(0.5 / np.sqrt(400), rel=0.05)
    assert (results["score"].min, results["score"].max) == (0, 1)
    assert results["episode_length"].max == 20


def steps_of_agents(lengths, values):
    """(resets, log) of each step of one environment whose agents report by themselves; lengths and values: of the
    episodes of each agent."""
    ends = [dict(zip(np.cumsum(one).tolist(), of, strict=True)) for one, of in zip(lengths, values, strict=True)]
    for t in range(1, max(max(one) for one in ends) + 1):
        now = [one[t] for one in ends if t in one]
        log = {"score": float(np.mean(now)), "n": len(now)} if now else {}
        yield np.array([t in one for one in ends], np.uint8), log


def test_each_agents_first_episodes_count():
    counted = watch.Episodes([2], agents_per_env=2)
    steps = steps_of_agents([[1, 2, 1, 1, 9], [3, 5]], [[10, 20, 99, 99, 99], [40, 50]])
    for resets, log in steps:
        assert counted.open
        counted.add(np.ones(2), resets, np.ones(2), lambda env, log=log: log)
        if not counted.open:
            break
    score = counted.statistics()["score"]
    assert score.mean == np.mean([10, 20, 40, 50])  # at step 3 both end within their quota: 20 and 40
    assert (score.min, score.max) == (10, 50)


def test_reports_of_a_whole_environment_count_once():
    counted = watch.Episodes([1, 1], agents_per_env=3, always_report=True)
    for t in range(1, 9):  # agents end here and there, but a report comes every fourth step
        resets = np.array([t % 2 == 0, 0, 0, 0, t % 3 == 0, 0], np.uint8)
        report = {"score": float(t), "n": 1} if t % 4 == 0 else {}
        counted.add(np.ones(6), resets, np.ones(6), lambda env, report=report: report if env == 0 or report else {})
        if not counted.open:
            break
    assert t == 4
    assert counted.statistics()["score"].mean == 4


def test_environments_that_report_nothing_are_counted_by_their_rewards():
    counted = watch.Episodes([1, 1], agents_per_env=1)
    for t in range(1, 4):
        counted.add(np.array([1.0, 2.0]), np.array([t == 2, t == 3]), np.ones(2), lambda env: {})
    results = counted.statistics()
    assert not counted.open
    assert results["score"].mean == (2 * 1 + 3 * 2) / 2
    assert results["episode_length"].mean == 2.5


def test_several_agents_and_python_environments_are_evaluated():
    small = ["--env.num-agents", "4", "--env.width", "24", "--env.height", "16", "--env.patience", "99"]
    for name, options in (("snake", small), ("target", []),
                          ("pettingzoo/mpe/simple_spread_v3", ["--vec.backend", "serial", "--vec.num-envs", "2"])):
        if "mpe" in name:
            pytest.importorskip("mpe2")
        args = pufferl.load_config(name, ["--eval.episodes", "3", *options])
        assert np.isfinite(watch.evaluate(name, args)["score"].mean)


# -- the policies that ship -------------------------------------------------------------------------------------------


def test_a_run_is_shipped_and_plays_as_the_baseline(tmp_path, monkeypatch, capsys):
    path = tmp_path / "baseline.safetensors"
    monkeypatch.setattr(pufferl, "find_baseline", lambda env_name: path)
    options = ["--data-dir", str(tmp_path), "--logger", "none", "--env.num-envs", "64", "--policy.hidden-size", "20"]
    trained = pufferl.train("squared", pufferl.load_config("squared", [
        *options, "--train.total-timesteps", "8192", "--rnn.num-layers", "2", "--env.distance", "2"]))
    run = ["--load-model-path", str(trained.run_folder), "--eval.episodes", "32"]
    watch.ship("squared", pufferl.load_config("squared", ["--data-dir", str(tmp_path), *run]))
    about = pufferl.read_baseline("squared")[1]
    assert about["steps"] == 8192 and about["policy"]["hidden_size"] == 20 and about["env"] == {"distance": 2}
    played = watch.evaluate("squared", pufferl.load_config("squared", ["--baseline", "--eval.episodes", "32"]))
    assert played["score"].mean == about["score"]
    assert "score" in capsys.readouterr().out
    with pytest.raises(pufferl.ConfigError, match="one of them"):
        watch.evaluate("squared", pufferl.load_config("squared", ["--baseline", *run]))
    monkeypatch.setattr(watch, "LARGEST_BASELINE", 1000)
    with pytest.raises(pufferl.ConfigError, match="smaller policy"):
        watch.ship("squared", pufferl.load_config("squared", run))
    path.unlink()
    with pytest.raises(pufferl.ConfigError, match="no trained policy ships"):
        pufferl.load_config("squared", ["--baseline"])
    with pytest.raises(pufferl.ConfigError, match="which policy"):
        watch.ship("squared", pufferl.load_config("squared"))


def shipped():
    return [name for name in ocean.names() if pufferl.find_baseline(name).exists()]


def test_shipped_policies_are_small_and_fit_their_environments():
    names = shipped()
    assert "squared" in names
    for name in names:
        assert pufferl.find_baseline(name).stat().st_size < watch.LARGEST_BASELINE
        args = pufferl.load_config(name, ["--baseline"])
        vecenv = pufferl.load_env(name, {**args, "env": {**args["env"], "num_envs": 1}})
        policy = pufferl.load_policy(args, vecenv, name)
        assert all(torch.isfinite(weight).all() for weight in policy.state_dict().values())
        vecenv.close()


@pytest.mark.slow
def test_shipped_policies_score_what_they_say():
    for name in shipped():
        about = pufferl.read_baseline(name)[1]
        args = pufferl.load_config(name, ["--baseline", "--train.seed", "7"])
        score = watch.evaluate(name, args)["score"]
        assert abs(score.mean - about["score"]) < 5 * np.hypot(score.error, about["score_error"]) + 1e-3, name


def test_flags_need_no_value():
    options = ["--eval.deterministic", "--eval.episodes", "3", "--train.anneal-lr", "False", "--baseline"]
    args = pufferl.load_config("squared", options)
    assert args["eval"]["deterministic"] is True and args["train"]["anneal_lr"] is False and args["baseline"] is True
    assert args["eval"]["episodes"] == 3


# -- pictures and videos ----------------------------------------------------------------------------------------------


def frames_of(path):
    """The pictures of a GIF or MP4."""
    if path.suffix == ".gif":
        from PIL import Image, ImageSequence

        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(Image.open(path))]
    reader = pytest.importorskip("imageio_ffmpeg").read_frames(str(path))
    width, height = next(reader)["size"]
    return [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_video_moves_and_is_upright(suffix, tmp_path):
    """In cartpole the golden pole stands above the cyan cart."""
    pytest.importorskip("raylib")
    path = tmp_path / f"out{suffix}"
    watch.main(["cartpole", "--baseline", "--eval.episodes", "1", "--eval.video", str(path), "--eval.seconds", "1"])
    frames = frames_of(path)
    assert len(frames) == 25  # as many as cartpole has steps in a second
    assert sum(not np.array_equal(one, other) for one, other in itertools.pairwise(frames)) >= 20
    for frame in frames:
        pole, cart = (np.argwhere(np.abs(frame.astype(int) - color).max(axis=2) < 40)
                      for color in ((250, 190, 60), (0, 187, 204)))  # fmt: skip
        assert len(pole) > 20 and len(cart) > 20
        assert pole[:, 0].mean() < cart[:, 0].mean() - 20


def test_a_picture_of_python_environments(tmp_path):
    for name in (UNEVEN, "gym/CartPole-v1", "gym/FrozenLake-v1"):
        path = tmp_path / "out.png"
        watch.main([name, "--eval.episodes", "1", "--eval.video", str(path), "--vec.backend", "serial"])
        assert path.read_bytes()[:4] == b"\x89PNG"
        path.unlink()
    text = watch.picture_of_text("\x1b[41mS\x1b[0mFFF\nFHFH")
    assert text.shape[2] == 3 and np.ptp(text) > 100


def test_videos_that_cannot_be_written_are_refused(tmp_path):
    for path, message in ((tmp_path / "out.avi", r"\.mp4, \.gif or \.png"), (tmp_path / "no" / "a.gif", "no folder")):
        with pytest.raises(SystemExit, match=message):
            watch.main(["squared", "--eval.video", str(path)])


class Blind(Uneven):
    """Draws nothing."""

    def render(self):
        return None


def test_an_environment_that_draws_nothing_says_so():
    view = watch.View(f"{__file__}:Blind", pufferl.load_config(f"{__file__}:Blind"), 0)
    with pytest.raises(pufferl.ConfigError, match=r"its render\(\) gave nothing"):
        view.picture()
    view.close()
