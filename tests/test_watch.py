"""Evaluation counts fairly: each environment plays equally many episodes. Shipped policies load and
score; pictures, videos and the page show the game."""

import base64
import contextlib
import functools
import http.client
import io
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from conftest import find_chromium, read_until, wait_for

import configuration
import emulation
import environments
import ocean
import pufferl
from tools import watch

ROOT = Path(__file__).resolve().parent.parent

# -- counting
# ---------------------------------------------------------------------------------------------------------


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
    args = pufferl.load_config(UNEVEN, ["--eval.episodes", "400", "--vec.num-envs", "40",
                                        "--vec.backend", "serial"])
    results = watch.evaluate(UNEVEN, args)
    assert abs(results["score"].mean - 0.5) < 0.1  # the first 400 to finish would give about 0.15
    assert results["score"].error == pytest.approx(0.5 / np.sqrt(400), rel=0.05)
    assert (results["score"].min, results["score"].max) == (0, 1)
    assert results["episode_length"].max == 20


def steps_of_agents(lengths, values):
    """(resets, log) of each step of one environment whose agents report by themselves; lengths and
    values: of the episodes of each agent."""
    ends = [dict(zip(np.cumsum(one).tolist(), of, strict=True))
            for one, of in zip(lengths, values, strict=True)]
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
    # at step 3 both end within their quota: 20 and 40
    assert score.mean == np.mean([10, 20, 40, 50])
    assert (score.min, score.max) == (10, 50)


def test_reports_of_a_whole_environment_count_once():
    counted = watch.Episodes([1, 1], agents_per_env=3, always_report=True)
    for t in range(1, 9):  # agents end here and there, but a report comes every fourth step
        resets = np.array([t % 2 == 0, 0, 0, 0, t % 3 == 0, 0], np.uint8)
        report = {"score": float(t), "n": 1} if t % 4 == 0 else {}
        counted.add(np.ones(6), resets, np.ones(6),
                    lambda env, report=report: report if env == 0 or report else {})
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


class Inner(emulation.PufferEnv):
    """Holds its copies itself, as agents; agent i's episodes last LENGTHS[i] steps and return i."""

    LENGTHS = np.array([7, 11, 13, 17])

    def __init__(self, num_envs=4, buf=None):
        self.single_observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.num_agents = num_envs
        super().__init__(buf)
        self.left = self.LENGTHS.copy()

    def reset(self, seed=None):
        return self.observations, []

    def step(self, actions):
        self.left -= 1
        self.terminals[:] = self.left == 0
        self.rewards[:] = np.where(self.terminals, np.arange(self.num_agents), 0)
        infos = [{"score": float(i), "n": 1} for i in np.flatnonzero(self.terminals)]
        self.left = np.where(self.terminals, self.LENGTHS, self.left)
        return self.observations, self.rewards, self.terminals, self.truncations, infos


def test_an_environment_that_holds_its_own_copies(capsys):
    name = f"{__file__}:Inner"
    options = ["--eval.episodes", "20", "--vec.num-envs", "1", "--env.num-envs", "4",
               "--vec.backend", "serial"]
    results = watch.evaluate(name, pufferl.load_config(name, options))
    assert results["score"].mean == 1.5, "five episodes of each"
    assert "20 episodes, 85 steps of all environments" in capsys.readouterr().out


def test_episodes_without_an_end_are_an_error():
    with pytest.raises(SystemExit, match=r"3 of 3 environments did not finish 1 episodes in 5 "
                       r"steps.*eval.max_steps"):
        watch.main(["performance", "--eval.episodes", "3", "--eval.max-steps", "5"])


def test_several_agents_and_python_environments_are_evaluated():
    small = ["--env.num-agents", "4", "--env.width", "24", "--env.height", "16",
             "--env.patience", "99"]
    for name, options in (("snake", small), ("target", []),
                          ("pettingzoo/mpe/simple_spread_v3",
                           ["--vec.backend", "serial", "--vec.num-envs", "2"])):
        if "mpe" in name:
            pytest.importorskip("mpe2")
        args = pufferl.load_config(name, ["--eval.episodes", "3", *options])
        assert np.isfinite(watch.evaluate(name, args)["score"].mean)


def test_what_a_policy_thinks_of_squashed_actions_is_in_the_environments_units():
    args = pufferl.load_config("gym/Pendulum-v1", ["--policy.squash", "tanh"])
    args["eval"]["deterministic"] = True
    view = watch.View("gym/Pendulum-v1", args, 0)
    with torch.no_grad():
        view.policy.decoder.bias.fill_(3)
        view.policy.decoder.log_std.fill_(-5)
    view.decide()
    (head,) = view.thoughts()["heads"]
    assert head["taken"] == pytest.approx(head["mean"]) and 1.9 < head["taken"][0] < 2, (
        "a torque within -2..2")
    assert 0 < head["spread"][0] < 2 * math.exp(-5), "where tanh is flat, little comes of the noise"
    view.close()


# -- the policies that ship
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ocean.names() if configuration.find_baseline(name).exists()])
def test_the_policies_that_ship_play_the_environments_as_they_are_today(name):
    today = pufferl.load_config(name, [])["env"]
    today.pop("num_envs")
    assert configuration.read_baseline(name)[1]["env"] == today, "train it again, then python pufferl.py ship"


def test_a_run_is_shipped_and_plays_as_the_baseline(tmp_path, monkeypatch, capsys):
    path = tmp_path / "baseline.safetensors"
    monkeypatch.setattr(configuration, "find_baseline", lambda env_name: path)
    options = ["--data-dir", str(tmp_path), "--logger", "none", "--env.num-envs", "64",
               "--policy.hidden-size", "20"]
    trained = pufferl.train("squared", pufferl.load_config("squared", [
        *options, "--train.total-timesteps", "8192", "--rnn.num-layers", "2",
        "--env.distance", "2"]))
    run = ["--load-model-path", str(trained.run_folder), "--eval.episodes", "32"]
    watch.ship("squared", pufferl.load_config("squared", ["--data-dir", str(tmp_path), *run]))
    about = configuration.read_baseline("squared")[1]
    assert (about["steps"] == 8192 and about["policy"]["hidden_size"] == 20
            and about["env"] == {"distance": 2})
    played = watch.evaluate("squared",
                            pufferl.load_config("squared", ["--baseline", "--eval.episodes", "32"]))
    assert played["score"].mean == about["score"]
    assert "score" in capsys.readouterr().out
    best = pufferl.load_config("squared",
                               [*run[2:], "--data-dir", str(tmp_path), "--load-model-path", "best"])
    assert (watch.ship("squared", best) == path
            and configuration.read_baseline("squared")[1]["steps"] == 8192)
    with pytest.raises(pufferl.ConfigError, match="one of them"):
        watch.evaluate("squared", pufferl.load_config("squared", ["--baseline", *run]))
    monkeypatch.setattr(watch, "LARGEST_BASELINE", 1000)
    with pytest.raises(pufferl.ConfigError, match="smaller policy"):
        watch.ship("squared", pufferl.load_config("squared", run))
    (trained.run_folder / "trainer_state.pt").unlink()
    with pytest.raises(pufferl.ConfigError, match="how many steps"):
        watch.ship("squared", pufferl.load_config("squared", run))
    path.unlink()
    with pytest.raises(pufferl.ConfigError, match="no trained policy ships"):
        pufferl.load_config("squared", ["--baseline"])
    with pytest.raises(pufferl.ConfigError, match="which policy"):
        watch.ship("squared", pufferl.load_config("squared"))


def shipped():
    return [path.parent.name for path in sorted(ocean.FOLDER.glob("*/baseline.safetensors"))]


def test_shipped_policies_are_small_and_fit_their_environments():
    assert {"squared", "target", "cartpole", "memory", "breakout"} <= set(shipped())
    for name in shipped():
        assert (ocean.FOLDER / name / "baseline.safetensors").stat().st_size < watch.LARGEST_BASELINE
    for name in ("memory", "breakout"):  # the others in the slow test
        args = pufferl.load_config(name, ["--baseline"])
        vecenv = pufferl.load_env(name, {**args, "env": {**args["env"], "num_envs": 1}})
        policy = pufferl.load_policy(args, vecenv, name)
        assert all(torch.isfinite(weight).all() for weight in policy.state_dict().values())
        vecenv.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped())
def test_a_shipped_policy_scores_what_it_says(name):
    about = configuration.read_baseline(name)[1]
    args = pufferl.load_config(name, ["--baseline", "--train.seed", "7"])
    # worlds of a thousand agents say that fewer will do
    args["eval"]["episodes"] = min(64, args["eval"]["episodes"])
    score = watch.evaluate(name, args)["score"]
    assert abs(score.mean - about["score"]) < 5 * np.hypot(score.error, about["score_error"]) + 1e-3


def test_flags_need_no_value():
    options = ["--eval.deterministic", "--eval.episodes", "3", "--train.anneal-lr", "False",
               "--baseline"]
    args = pufferl.load_config("squared", options)
    assert (args["eval"]["deterministic"] is True and args["train"]["anneal_lr"] is False
            and args["baseline"] is True)
    assert args["eval"]["episodes"] == 3


# -- pictures and videos
# ----------------------------------------------------------------------------------------------


def frames_of(path):
    """The pictures of a GIF or MP4."""
    if path.suffix == ".gif":
        from PIL import Image, ImageSequence

        return [np.asarray(frame.convert("RGB"))
                for frame in ImageSequence.Iterator(Image.open(path))]
    reader = pytest.importorskip("imageio_ffmpeg").read_frames(str(path))
    width, height = next(reader)["size"]
    return [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_a_video_moves_and_is_upright(suffix, tmp_path):
    """In cartpole the golden pole stands above the cyan cart."""
    pytest.importorskip("raylib")
    path = tmp_path / f"out{suffix}"
    watch.main(["cartpole", "--baseline", "--eval.episodes", "1", "--eval.video", str(path),
                "--eval.seconds", "1"])
    frames = frames_of(path)
    assert len(frames) == 25  # as many as cartpole has steps in a second
    assert sum(not np.array_equal(one, other) for one, other in itertools.pairwise(frames)) >= 20
    for frame in frames:
        pole, cart = (np.argwhere(np.abs(frame.astype(int) - color).max(axis=2) < 40)
                      for color in ((250, 190, 60), (0, 187, 204)))
        assert len(pole) > 20 and len(cart) > 20
        assert pole[:, 0].mean() < cart[:, 0].mean() - 20


def test_a_picture_of_python_environments(tmp_path):
    for name in (UNEVEN, "gym/CartPole-v1", "gym/FrozenLake-v1"):
        path = tmp_path / "out.png"
        watch.main([name, "--eval.episodes", "1", "--eval.video", str(path),
                    "--vec.backend", "serial"])
        assert path.read_bytes()[:4] == b"\x89PNG"
        path.unlink()
    text = watch.picture_of_text("\x1b[41mS\x1b[0mFFF\nFHFH")
    assert text.shape[2] == 3 and np.ptp(text) > 100


def test_videos_that_cannot_be_written_are_refused(tmp_path):
    for path, message in ((tmp_path / "out.avi", r"\.mp4, \.gif or \.png"),
                          (tmp_path / "no" / "a.gif", "no folder")):
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


class Bare(gymnasium.Env):
    """Has no render()."""

    observation_space, action_space = Uneven.observation_space, Uneven.action_space

    def reset(self, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, True, False, {}


class Always(Bare):
    """Draws without a render_mode."""

    def render(self):
        return np.zeros((8, 16, 3), np.uint8)


@pytest.mark.parametrize(("make", "settings", "draws"), [
    (Bare, {}, False), (emulation.PufferEnv, {}, False), (Always, {}, True),
    (Uneven, {"render_mode": "rgb_array"}, True), (Uneven, {}, False),
    (functools.partial(gymnasium.make, "CartPole-v1"), {"render_mode": "rgb_array"}, True)])
def test_it_is_known_whether_an_environment_draws(make, settings, draws):
    env = make() if make is not emulation.PufferEnv else object.__new__(make)
    env = emulation.wrap(env) if isinstance(env, gymnasium.Env) else env
    assert environments.can_draw(env, settings) is draws


@pytest.mark.parametrize(("name", "draws"), [("Bare", False), ("Uneven", True)])
def test_the_end_of_a_run_suggests_what_works(name, draws, tmp_path, capsys):
    name = f"{__file__}:{name}"
    pufferl.main(["train", name, "--train.total-timesteps", "512", "--data-dir", str(tmp_path), "--logger", "none",
                  "--vec.backend", "serial"])
    folder = next(tmp_path.iterdir())
    at_the_end = capsys.readouterr().out
    pufferl.main(["runs", "show", str(folder)])
    for shown, page in ((at_the_end, draws), (capsys.readouterr().out, False)):
        (line,) = [line for line in shown.splitlines() if " eval " in line]
        assert ("--eval.web" in line) is page


def test_a_video_plays_one_episode_and_is_refused_before_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watch, "evaluate", lambda *_: pytest.fail("many episodes were played"))
    path = tmp_path / "out.gif"
    watch.main([UNEVEN, "--eval.video", str(path)])
    assert "1 episode, score" in capsys.readouterr().out and path.exists()
    monkeypatch.setattr(watch.View, "advance", lambda self: pytest.fail("it was stepped"))
    with pytest.raises(SystemExit, match="Bare cannot be shown"):
        watch.main([f"{__file__}:Bare", "--eval.video", str(tmp_path / "b.gif")])


def test_a_window_that_was_not_asked_for_is_left_out_if_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(watch.ocean, "has_display", lambda: True)
    monkeypatch.setattr(watch.sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(watch, "evaluate", lambda *_: None)
    assert watch.main([f"{__file__}:Bare"]) is None
    with pytest.raises(SystemExit, match="Bare cannot be shown"):
        watch.main([f"{__file__}:Bare", "--eval.window"])


DROPPING = """
import torch
import models

class Dropping(models.FeedForward):
    def encode_observations(self, observations, state=None):
        return torch.nn.functional.dropout(super().encode_observations(observations), 0.5, self.training)
"""


def test_a_policy_is_evaluated_without_dropout(tmp_path):
    (tmp_path / "mine.py").write_text(DROPPING)
    args = pufferl.load_config("squared", ["--policy.name", f"{tmp_path}/mine.py:Dropping"])
    play = watch.Play("squared", args, 4, 0)
    play.decide()
    first = play.logits
    play.decide()
    assert torch.equal(first, play.logits) and not play.policy.training
    play.vecenv.close()


# -- the terminal
# -----------------------------------------------------------------------------------------------------


def test_the_terminal_shows_two_pixels_a_character():
    from rich.console import Console

    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor",
                      width=4, height=6)
    picture = np.zeros((4, 4, 3), np.uint8)
    picture[0] = 255, 0, 0
    picture[3] = 0, 0, 255
    console.print(watch.HalfBlocks(picture, "caption"))
    upper, lower, caption, *_ = console.file.getvalue().split("\n")
    assert upper == "\x1b[38;2;255;0;0;48;2;0;0;0m▀▀▀▀\x1b[0m"
    assert lower == "\x1b[38;2;0;0;0;48;2;0;0;255m▀▀▀▀\x1b[0m"
    assert caption == "capt"


def test_a_policy_plays_in_the_terminal(capsys):
    pytest.importorskip("raylib")
    from rich.console import Console

    options = ["--baseline", "--eval.fps", "1000"]
    view = watch.View("squared", pufferl.load_config("squared", options), watch.EVAL_SEED)
    assert view.labels == [{1: "UP", 2: "DOWN", 3: "LEFT", 4: "RIGHT"}], "the header's KEYS"
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor",
                      width=40, height=24)
    watch.show_in_terminal(view, console, steps=40)
    view.close()
    drawn = console.file.getvalue()
    assert drawn.count("▀") > 40 * 500 and "return" in drawn
    assert "48;2;250;190;60" in drawn, "the target's gold"
    assert re.search(r"\d episodes, score 1\.000", capsys.readouterr().out)
    with pytest.raises(pufferl.ConfigError, match="no terminal"):
        watch.show_in_terminal(view, Console(file=io.StringIO()))


def test_a_window_without_a_display_says_what_else_there_is(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(watch.sys, "platform", "linux")
    with pytest.raises(SystemExit, match=r"--eval\.web works through an ssh tunnel"):
        watch.main(["squared", "--eval.episodes", "1", "--eval.window"])


@pytest.mark.parametrize("both", [("web", "window"), ("web", "terminal"), ("terminal", "window")])
def test_a_policy_plays_in_one_place(both):
    with pytest.raises(SystemExit, match="one of them at a time"):
        watch.main(["squared", "--eval.episodes", "1", *(f"--eval.{place}" for place in both)])


def screen(file):
    """What Xvfb shows, (height, width, 3) uint8, from the file of its -fbdir, an xwd."""
    data = Path(file).read_bytes()
    header = np.frombuffer(data[:100], ">u4")
    size, height, width, line, colors = header[[0, 5, 4, 12, 19]].tolist()
    pixels = np.frombuffer(data, np.uint8, height * line, size + 12 * colors)
    return pixels.reshape(height, line // 4, 4)[:, :width, 2::-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cartpole", UNEVEN])
def test_a_window_shows_the_game(name, tmp_path):
    """On a virtual display: it moves, and its colours and top are where they belong."""
    pytest.importorskip("raylib")
    if shutil.which("Xvfb") is None:
        pytest.skip("needs Xvfb, a display in memory (Debian: apt-get install xvfb)")
    reader, writer = os.pipe()
    display = subprocess.Popen(["Xvfb", "-displayfd", str(writer), "-screen", "0", "1280x800x24",
                                "-fbdir", tmp_path],
                               pass_fds=[writer], stderr=subprocess.DEVNULL)
    os.close(writer)
    try:
        number = os.read(reader, 16).decode().strip()
        environment = {**os.environ, "DISPLAY": f":{number}", "PYTHONPATH": str(ROOT / "tests")}
        environment.pop("WAYLAND_DISPLAY", None)
        environment.pop("SDL_VIDEODRIVER", None)  # "dummy", once a test of this process has drawn
        command = [sys.executable, str(ROOT / "pufferl.py"), "eval", name, "--eval.episodes", "1",
                   "--eval.window", "--eval.fps", "20", "--eval.max-steps", "1000"]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE)
        pictures = {}

        def look():
            assert process.poll() is None, process.stderr.read().decode()
            now = screen(tmp_path / "Xvfb_screen0")
            pictures[now.tobytes()] = now
            return len(pictures) > 6

        wait_for(look)
        process.terminate()
        assert process.wait(30) == -signal.SIGTERM
    finally:
        process.kill()
        display.terminate()
        display.wait(30)
        os.close(reader)
    if name == "cartpole":
        shown = [*pictures.values()][-1].astype(int)
        pole, cart = (np.argwhere(np.abs(shown - color).max(axis=2) < 8)
                      for color in ((250, 190, 60), (0, 187, 204)))
        assert len(pole) and len(cart) and pole[:, 0].mean() < cart[:, 0].mean()


# -- the page
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    """A process that serves the page, as a user starts it; (process, port)."""
    pytest.importorskip("raylib")
    command = [sys.executable, str(ROOT / "pufferl.py"), "eval", "squared", "--baseline", "--eval.web",
               "--eval.port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    yield process, int(re.search(r"http://127\.0\.0\.1:(\d+)", read_until(process, "http://127.0.0.1:"))[1])
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "episode" in rest and "Traceback" not in rest, rest


def ask(port, method, path, body=None, **headers):
    """(status, headers, text) of a request; headers: Host="evil.test"."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        connection.putheader("Content-Length", str(len(data)))
    connection.endheaders(data)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def order(port, **what):
    assert ask(port, "POST", "/order", what, Content_Type="application/json")[0] == 204


def test_the_page_is_for_this_machine_only(server):
    process, port = server
    listening = [one.laddr.ip for one in psutil.Process(process.pid).net_connections()
                 if one.status == "LISTEN"]
    assert listening == ["127.0.0.1"]
    # a tunnel has its own
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:1234", f"[::1]:{port}"):
        assert ask(port, "GET", "/", Host=host)[0] == 200
    for host in ("evil.test", f"evil.test:{port}", "127.0.0.1.evil.test", "localhost@evil.test", "",
                 "[", "0.0.0.0"):
        assert ask(port, "GET", "/state?after=0", Host=host)[0] == 403
        assert ask(port, "POST", "/order", {"pause": True}, Host=host, Content_Type="application/json")[0] == 403
    own = {"Host": f"localhost:{port}", "Content_Type": "application/json"}
    assert ask(port, "POST", "/order", {"speed": 10}, Origin="http://evil.test", **own)[0] == 403
    assert ask(port, "POST", "/order", {"speed": 10}, Origin="null", **own)[0] == 403
    assert ask(port, "POST", "/order", {"speed": 10}, Origin=f"http://localhost:{port}", **own)[0] == 204
    assert ask(port, "POST", "/order", {"speed": 10}, Content_Type="text/plain")[0] == 415
    assert ask(port, "POST", "/order", {"run": 1}, Content_Type="application/json")[0] == 400
    assert ask(port, "POST", "/order", {"x": "y" * 5000}, Content_Type="application/json")[0] == 413
    assert ask(port, "GET", "/../pufferl.py")[0] == 404
    assert ask(port, "GET", "/state?after=x")[0] == 400
    for name in ("", "nothing", "../ocean", "target/target.h"):
        assert ask(port, "GET", f"/still?{name}")[0] == 404
    _, headers, text = ask(port, "GET", "/")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text), "no resource from elsewhere"


def send(port, data, read=True):
    """What comes back for some bytes, or nothing for a connection that is dropped at once."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        if not read:
            # as a crash does
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return b""
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


BAD_ORDERS = ["[" * 4000, '{"seed": ' * 400, '{"step": Infinity}', '{"step": 1e999}',
              '{"agent": -Infinity}',
              '{"speed": 1' + "0" * 400 + "}", '{"seed": NaN}', '{"seed": 1e308}',
              '{"step": "\\ud800"}',
              '{"policy": {}}', '{"environment": []}', '{"pause": null, "agent": null}', "", "\x00"]


def test_orders_that_cannot_be_leave_the_page_as_it_was(server):
    """Its process says no more than its fixture allows: no traceback."""
    process, port = server
    for body in BAD_ORDERS:
        lines = ["POST /order HTTP/1.1", "Host: localhost", "Content-Type: application/json",
                 f"Content-Length: {len(body)}", "", body]
        status = int(send(port, "\r\n".join(lines).encode()).split()[1])
        assert status in (204, 400), body
        if status == 204:
            wait_for(lambda: json.loads(ask(port, "GET", "/state")[2])["environment"] == "squared")
    for path in ("//[", "/state?after=1&after=x", "/state?" + "a&" * 500, "/%00",
                 "/state?scores=-5"):
        assert send(port, f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()).split()[1] in (b"200", b"400",
                                                                                                 b"404"), path
    for begin in (b"", b"GET", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\xff\x00\r\n\r\n",
                  b"POST /order HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{"):
        send(port, begin, read=False)
    order(port, pause=False, seed=0, agent=0, speed=10)
    assert wait_for(lambda: (now := json.loads(ask(port, "GET", "/state")[2]))["problem"] is None
                    and now)
    assert process.poll() is None


def test_the_menu_has_a_picture_of_each_environment(server):
    from PIL import Image

    _, port = server
    status, _, text = ask(port, "GET", "/still?target")
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))
    assert status == 200 and max(picture.shape) == watch.STILL_SIDE
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 3


def test_a_page_has_scores_before_an_episode_has_ended_on_it(server):
    """An episode of the Breakout policy that ships takes four minutes on the page."""
    _, port = server
    order(port, environment="breakout", pause=False)

    def state(name):
        now = json.loads(ask(port, "GET", "/state")[2])
        return now["environment"] == name and now

    now = wait_for(lambda: (now := state("breakout")) and len(now["ahead"]) == watch.Page.AHEAD and now)
    assert now["count"] == 0
    assert now["mean"] == pytest.approx(np.mean(now["ahead"])) and now["mean"] > 700 and now["error"] > 0
    order(port, environment="squared")
    wait_for(lambda: state("squared"))


def test_states_and_orders(server):
    """What the page asks for, without a browser."""
    _, port = server

    def state(after=-1, run="", scores=0):
        return json.loads(ask(port, "GET", f"/state?after={after}&run={run}&scores={scores}")[2])

    first = state()
    assert first["environment"] == "squared" and len(first["heads"][0]["probabilities"]) == 5
    assert sum(first["heads"][0]["probabilities"]) == pytest.approx(1)
    order(port, speed=2000)
    later = wait_for(lambda: (now := state(first["number"], first["run"]))["count"] > 20 and now)
    assert len(later["scores"]) == later["count"] and later["number"] > first["number"]
    rest = state(scores=later["count"] - 3, run=later["run"])
    assert rest["first_score"] == later["count"] - 3 and rest["scores"][:3] == later["scores"][-3:]
    order(port, pause=True)
    still = wait_for(lambda: (now := state())["paused"] and now)
    order(port, step=2)
    assert wait_for(lambda: (now := state())["steps"] == still["steps"] + 2 and now)["paused"]
    order(port, seed=11, speed=10, pause=True)
    one = wait_for(lambda: (now := state())["seed"] == 11 and now)
    assert one["count"] == one["steps"] == 0 and one["run"] != still["run"]
    picture = base64.b64decode(one["picture"])
    order(port, seed=11)
    two = wait_for(lambda: (now := state())["run"] != one["run"] and now)
    assert base64.b64decode(two["picture"]) == picture, "the same seed begins the same episode"
    order(port, speed=float("nan"))
    assert "the speed is nan" in wait_for(lambda: (now := state())["problem"] and now)["problem"]
    order(port, environment="no/such.py:thing")
    wait_for(lambda: "no environment" in (state()["problem"] or ""))
    order(port, environment="target")
    other = wait_for(lambda: (now := state())["environment"] == "target" and now)
    assert other["problem"] is None and other["agents"] == 8 and len(other["heads"]) == 2
    order(port, agent=5)
    wait_for(lambda: state()["agent"] == 5)
    order(port, environment="pendulum", policy="untrained")
    assert wait_for(lambda: (now := state())["environment"] == "pendulum" and now)["heads"][0]["spread"][0] > 0
    order(port, environment="squared", pause=False)
    wait_for(lambda: state()["environment"] == "squared")


@contextlib.contextmanager
def browser():
    """A page of headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    program = find_chromium()
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--host-resolver-rules=MAP evil.test 127.0.0.1"])
        yield opened.new_page(viewport={"width": 1400, "height": 900})
        opened.close()


def test_a_state_has_no_nan():
    state = watch.without_nan({"value": float("nan"),
                               "heads": [{"probabilities": (1.0, float("inf"))}], "count": 3})
    assert state == {"value": None, "heads": [{"probabilities": [1.0, None]}], "count": 3}


def test_the_page_in_a_browser(server, tmp_path):
    _, port = server
    with browser() as page:
        requests, problems = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console",
                lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(f"http://localhost:{port}/")
        wait_for(lambda: page.evaluate("!!state && state.environment === 'squared' && "
                                       "!!values.length"))

        def picture(name="picture"):
            return page.evaluate(f"$('{name}').toDataURL()")

        pictures = {picture()}
        wait_for(lambda: pictures.add(picture()) or len(pictures) > 4)
        page.click("#pause")
        wait_for(lambda: page.inner_text("#pause") == "Play" and page.is_visible("#paused"))
        still = picture(), page.evaluate("state.steps")
        time.sleep(1)
        assert (picture(), page.evaluate("state.steps")) == still, "pause stops"
        page.click("#step")
        wait_for(lambda: page.evaluate("state.steps") == still[1] + 1 and picture() != still[0])
        page.keyboard.press("Space")
        wait_for(lambda: page.evaluate("!state.paused"))
        order(port, speed=300)
        counts, curves = [], set()
        for _ in range(3):
            count = counts[-1] if counts else 0
            wait_for(lambda count=count: page.evaluate("scores.length") > count + 5)
            counts.append(page.evaluate("scores.length"))
            curves.add(picture("scores"))
        assert len(curves) == 3, "the curve grows"
        assert (page.evaluate("scores.length === state.count")
                and page.inner_text("#mean").startswith(("0.9", "1.0")))
        assert page.locator(".bar").count() == 5 and page.locator(".bar.chosen").count() == 1
        page.fill("#seed", "42")
        page.press("#seed", "Enter")
        wait_for(lambda: page.evaluate("state.seed") == 42)
        page.select_option("#environment", "cartpole")
        wait_for(lambda: page.evaluate("state.environment === 'cartpole' && values.length > 3"))
        assert page.title() == "cartpole – watch" and page.locator(".bar").count() == 2
        assert page.inner_text("#mean") != "–", "with no episode ended it is the return so far"
        page.evaluate("$('menu').scrollIntoView()")
        wait_for(lambda: page.evaluate("document.querySelector('.tile img')?.naturalWidth > 99"))
        page.click(".tile[value=target]")
        wait_for(lambda: page.evaluate("document.querySelector('.tile.chosen').value") == "target")
        page.evaluate("scrollTo(0, 0)")
        shape = page.evaluate("(box => box.width / "
                              "box.height)($('screen').getBoundingClientRect())")
        drawn = page.evaluate("$('picture').width / $('picture').height")
        assert shape == pytest.approx(drawn, rel=0.02), "no bands"
        page.screenshot(path=tmp_path / "page.png")
        assert problems == [] and all(url.startswith((f"http://localhost:{port}/", "data:"))
                                      for url in requests)
        refused = page.goto(f"http://evil.test:{port}/")  # another name for this machine
        assert refused.status == 403
        order(port, environment="squared")


@pytest.mark.parametrize(("session", "line"), [
    ("", "ssh -L 8899:127.0.0.1:8899 this-machine"),
    ("10.0.0.2 50000 10.0.0.1 22", "ssh -L 8899:127.0.0.1:8899 me@10.0.0.1"),
    ("fe80::2 50000 fe80::1 2222", "ssh -p 2222 -L 8899:127.0.0.1:8899 me@fe80::1"),
])
def test_the_line_that_forwards_the_port(session, line, monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", session)
    monkeypatch.setenv("USER", "me")
    assert watch.tunnel(8899) == line


@pytest.mark.parametrize(("wanted", "session", "display", "opened"), [
    (True, "", ":0", True), (False, "", ":0", False),
    (True, "10.0.0.2 50000 10.0.0.1 22", ":0", False),
    (True, "", "", False)])
def test_the_page_is_opened_where_it_can_be_seen(wanted, session, display, opened,
                                                 monkeypatch, capsys):
    class Page:
        port, view = 1234, SimpleNamespace(scores=[])
        __init__, run, close = (lambda self, *_: None,) * 3

    found = []
    monkeypatch.setattr(watch, "Page", Page)
    monkeypatch.setattr(watch.webbrowser, "open", found.append)
    monkeypatch.setattr(watch.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "platform", "linux")
    for name, value in (("SSH_CONNECTION", session), ("DISPLAY", display), ("WAYLAND_DISPLAY", "")):
        monkeypatch.setenv(name, value)
    args = {"eval": {"open": wanted}, "baseline": False, "load_model_path": None}
    watch.show_on_page("breakout", args)
    assert found == ["http://127.0.0.1:1234"] * opened
    shown = capsys.readouterr().out
    assert ("http://127.0.0.1:1234" in shown and watch.tunnel(1234) in shown
            and ("your own" in shown) == bool(session))


@pytest.mark.slow
def test_playing_needs_no_more_than_what_make_demo_installs():
    """A policy is loaded, asked, drawn and shown without what only requirements.txt has."""
    code = """if True:
        import sys
        from tools import watch
        view = watch.View("squared", watch.pufferl.load_config("squared", ["--baseline"]), 1)
        view.decide()
        watch.png(view.picture(), 100)
        print(" ".join({name.partition(".")[0] for name in sys.modules}))
    """
    others = ["scipy", "rich", "tensorboard", "plotly", "imageio_ffmpeg", "threadpoolctl",
              "matplotlib"]
    hide = f"import sys; sys.modules.update(dict.fromkeys({others}))\n"  # None: their import fails
    done = subprocess.run([sys.executable, "-c", hide + code], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"torch", "numba", "safetensors", "PIL", "raylib"} <= set(done.stdout.split())
