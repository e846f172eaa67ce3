"""Evaluation counts fairly; pictures, videos, the terminal and the page show the game."""

import base64
import ctypes
import http.client
import io
import itertools
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium
import numpy as np
import psutil
import pytest
import small_envs
import torch
from conftest import open_chromium, read_until, wait_for
from PIL import Image, ImageSequence
from small_envs import Counters, Steps
from test_runs_loggers import terminal

import configuration
import emulation
import environments
import ocean
import pufferl
from tools import watch

ROOT = Path(__file__).resolve().parent.parent
SERIAL = "--vec.backend", "serial"


class Uneven(Steps):
    """Half of the episodes last one step and return 0, the others 20 steps and return 1."""

    def __init__(self, render_mode=None):
        super().__init__(change=lambda t: {"reward": float(t == 20)})
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        start = super().reset(seed=seed)
        self.limit = 1 if self.np_random.random() < 0.5 else 20
        return start

    def render(self):
        return np.full((8, 16, 3), 5 * self.t, np.uint8)


class Blind(Uneven):
    def render(self):
        return None


class Copies(Counters):
    """Holds its copies itself, as agents; agent i's episodes have at most 4 + i steps."""

    def __init__(self, num_envs=4, buf=None, seed=0):
        super().__init__(num_envs, buf, seed)


UNEVEN, BLIND, COPIES = (f"{__file__}:{name}" for name in ("Uneven", "Blind", "Copies"))
BARE = f"{small_envs.__file__}:Steps"  # has no render()


def evaluate(name, *options):
    return watch.evaluate(name, pufferl.load_config(name, [*options]))


def refuses(word, *argv):
    with pytest.raises(SystemExit, match=word):
        watch.main([*map(str, argv)])


# -- counting


def test_short_episodes_are_not_favoured():
    results = evaluate(UNEVEN, "--eval.episodes", "400", "--vec.num-envs", "40", *SERIAL)
    assert abs(results["score"].mean - 0.5) < 0.1  # the first 400 to finish would give about 0.15
    assert results["score"].error == pytest.approx(0.5 / np.sqrt(400), rel=0.05)
    assert (results["score"].min, results["score"].max) == (0, 1)
    assert results["episode_length"].max == 20


def test_each_agents_first_episodes_count():
    """At the third step both end within their quota of two: 20 and 40."""
    episodes = watch.Episodes([2], agents_per_env=2)
    for resets, score in (((1, 0), 10), ((0, 0), None), ((1, 1), 30), ((1, 0), 99), ((1, 0), 99),
                          ((0, 1), 50)):
        assert episodes.unfinished
        log = {"score": float(score), "n": sum(resets)} if score else {}
        episodes.add(np.ones(2), np.array(resets), np.ones(2), lambda env, log=log: log)
    score = episodes.statistics()["score"]
    assert not episodes.unfinished and (score.mean, score.min, score.max) == (30, 10, 50)


def test_reports_of_a_whole_environment_count_once_and_rewards_if_there_are_none():
    episodes = watch.Episodes([1, 1], agents_per_env=3, always_report=True)
    for t in range(1, 5):  # agents end here and there, but a report comes every fourth step
        assert episodes.unfinished
        resets = np.array([t % 2 == 0, 0, 0, 0, t % 3 == 0, 0], np.uint8)
        report = {"score": float(t), "n": 1} if t % 4 == 0 else {}
        episodes.add(np.ones(6), resets, np.ones(6), lambda env, report=report: report)
    assert not episodes.unfinished and episodes.statistics()["score"].mean == 4
    episodes = watch.Episodes([1], agents_per_env=1, always_report=True)
    episodes.add(np.ones(1), np.zeros(1), np.ones(1), lambda env: {"speed": 2.0, "n": 1})
    assert episodes.statistics().keys() == {"speed"}, "before an episode has ended"
    episodes = watch.Episodes([1, 1], agents_per_env=1)
    for t in range(1, 4):
        episodes.add(np.array([1.0, 2.0]), np.array([t == 2, t == 3]), np.ones(2), lambda env: {})
    results = episodes.statistics()
    assert not episodes.unfinished and results["score"] == ((2 * 1 + 3 * 2) / 2, pytest.approx(2), 2, 6)
    assert results["episode_length"].mean == 2.5


def test_an_environment_that_holds_its_own_copies(capsys):
    results = evaluate(COPIES, "--eval.episodes", "400", "--vec.num-envs", "1",
                       "--env.num-envs", "4", *SERIAL)
    assert 3 < results["episode_length"].mean < 5 and results["episode_length"].max <= 7
    episodes, steps = re.search(r"(\d+) episodes, (\d+) vector steps", capsys.readouterr().out).groups()
    assert episodes == "400" and 400 < int(steps) < 700, "100 of each"


def test_thoughts_of_squashed_actions_are_in_the_environments_units():
    args = pufferl.load_config("gym/Pendulum-v1", ["--policy.squash", "tanh",
                                                   "--eval.deterministic"])
    view = watch.View("gym/Pendulum-v1", args, 0)
    with torch.no_grad():
        view.policy.decoder.bias.fill_(3)
        view.policy.decoder.log_std.fill_(-5)
    view.decide()
    (head,) = view.thoughts()["heads"]
    assert not view.policy.training, "without dropout"
    assert head["taken"] == pytest.approx(head["mean"]) and 1.9 < head["taken"][0] < 2
    x, noise = math.atanh(head["mean"][0] / 2), math.exp(-5)
    assert [head["low"][0], head["high"][0]] == pytest.approx(
        [2 * math.tanh(x - noise), 2 * math.tanh(x + noise)])
    view.close()


SHIPPED = [name for name in ocean.names() if configuration.find_baseline(name).exists()]


def test_the_policies_that_ship_fit_their_environments_as_they_are_today():
    assert {"squared", "target", "cartpole", "memory", "breakout"} <= set(SHIPPED)
    for name in SHIPPED:
        today = pufferl.load_config(name, [])["env"]
        today.pop("num_envs")
        assert configuration.read_baseline(name)[1]["env"] == today, f"train and ship {name} again"
        assert configuration.find_baseline(name).stat().st_size < watch.LARGEST_BASELINE


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_policy_scores_what_it_says(name):
    about = configuration.read_baseline(name)[1]
    args = pufferl.load_config(name, ["--baseline", "--train.seed", "7"])
    # worlds of a thousand agents say that fewer will do
    args["eval"]["episodes"] = min(64, args["eval"]["episodes"])
    score = watch.evaluate(name, args)["score"]
    assert abs(score.mean - about["score"]) < 5 * np.hypot(score.error, about["score_error"]) + 1e-3


def test_a_run_is_shipped_and_plays_as_the_baseline(tmp_path, monkeypatch):
    header, other = tmp_path / "mine.h", tmp_path / "other.h"
    for path in (header, other):
        shutil.copy(Path(ocean.__file__).parent / "squared" / "squared.h", path)
    name, folder = str(header), ["--data-dir", str(tmp_path)]
    trained = pufferl.train(name, pufferl.load_config(name, [
        *folder, "--logger", "none", "--env.num-envs", "64", "--policy.hidden-size", "20",
        "--train.total-timesteps", "8192", "--rnn.num-layers", "2", "--env.distance", "2"]))

    def ship(model):
        return watch.ship(name, pufferl.load_config(name, [
            *folder, "--load-model-path", str(model), "--eval.episodes", "32"]))

    for model in (trained.run_folder, "best"):
        assert ship(model) == tmp_path / "mine.safetensors"
        about = configuration.read_baseline(name)[1]
        assert (about["steps"], about["policy"]["hidden_size"]) == (8192, 20)
        assert about["env"] == {"distance": 2}
        played = evaluate(name, "--baseline", "--eval.episodes", "32")
        assert played["score"].mean == about["score"]
    monkeypatch.setattr(watch, "LARGEST_BASELINE", 1000)
    with pytest.raises(pufferl.ConfigError, match=r"policy\.hidden_size"):
        ship(trained.run_folder)
    (trained.run_folder / "trainer_state.pt").unlink()
    with pytest.raises(pufferl.ConfigError, match=r"trainer_state\.pt"):
        ship(trained.run_folder)
    with pytest.raises(pufferl.ConfigError, match=r"other\.safetensors is missing"):
        pufferl.load_config(str(other), ["--baseline"])


# -- pictures, videos, a window


def read_frames(path):
    """The pictures of a GIF, PNG or MP4."""
    if path.suffix != ".mp4":
        frames = ImageSequence.Iterator(Image.open(path))
        return [np.asarray(frame.convert("RGB")) for frame in frames]
    reader = pytest.importorskip("imageio_ffmpeg").read_frames(str(path))
    width, height = next(reader)["size"]
    return [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]


def is_upright(frame, tolerance):
    """Whether the golden pole of cartpole stands above the cyan cart."""
    pole, cart = (np.argwhere(np.abs(frame.astype(int) - color).max(axis=2) < tolerance)[:, 0]
                  for color in ((250, 190, 60), (0, 187, 204)))
    return len(pole) > 20 and len(cart) > 20 and pole.mean() < cart.mean() - 20


def test_a_video_moves_and_is_upright(tmp_path):
    pytest.importorskip("raylib")
    args = pufferl.load_config("cartpole", ["--baseline"])
    view = watch.View("cartpole", args, watch.EVAL_SEED)
    pictures = list(watch.episode_pictures(view, 1))
    view.close()
    assert len(pictures) == 25, "as many as cartpole has steps in a second"
    for suffix in (".mp4", ".gif", ".png"):
        path = tmp_path / f"out{suffix}"
        watch.write_video(pictures, str(path), view.fps)
        frames = read_frames(path)
        assert len(frames) == (1 if suffix == ".png" else 25)
        assert all(is_upright(frame, 40) for frame in frames)
        moves = sum(not np.array_equal(*pair) for pair in itertools.pairwise(frames))
        assert moves >= 20 or suffix == ".png"


@pytest.mark.parametrize(("make", "settings", "draws"), [
    (Steps, {}, False), (partial(object.__new__, emulation.PufferEnv), {}, False),
    (type("Always", (Steps,), {"render": Uneven.render}), {}, True), 
    (Uneven, {"render_mode": "rgb_array"}, True), (Uneven, {}, False),
    (partial(gymnasium.make, "CartPole-v1"), {"render_mode": "rgb_array"}, True)])
def test_it_is_known_whether_an_environment_draws(make, settings, draws):
    env = make()
    env = emulation.wrap(env) if isinstance(env, gymnasium.Env) else env
    assert environments.can_draw(env, settings) is draws


@pytest.mark.parametrize(("name", "draws"), [(BARE, False), (UNEVEN, True)])
def test_the_end_of_a_run_suggests_what_works(name, draws, tmp_path, capsys):
    pufferl.main(["train", name, "--train.total-timesteps", "512", "--data-dir", str(tmp_path),
                  "--logger", "none", *SERIAL])
    printed = [capsys.readouterr().out]
    pufferl.main(["runs", "show", str(next(tmp_path.iterdir()))])
    for text, page in zip((*printed, capsys.readouterr().out), (draws, False), strict=True):
        (line,) = [line for line in text.splitlines() if " eval " in line]
        assert ("--eval.web" in line) is page


def test_a_video_plays_one_episode_and_is_refused_before_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watch, "evaluate", lambda *_: pytest.fail("many episodes were played"))
    for name in (UNEVEN, "gym/CartPole-v1", "gym/FrozenLake-v1"):
        path = tmp_path / "out.gif"
        watch.main([name, "--eval.video", str(path)])
        assert re.search(r"(?m)^1\b", capsys.readouterr().out) and len(read_frames(path)) > 1
        path.unlink()
    monkeypatch.setattr(watch.View, "advance", lambda self: pytest.fail("it was stepped"))
    for word, name, path in (("Steps", BARE, "b.gif"), ("Blind", BLIND, "b.gif"),
                             ("eval.video", "squared", "none/a.gif")):
        refuses(word, name, "--eval.video", tmp_path / path)


def test_what_cannot_be_shown_is_refused(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(watch.sys, "platform", "linux")
        refuses("eval.window", "squared", "--eval.window")
    # a window that is not asked for is left out if nothing is drawn
    monkeypatch.setattr(watch.ocean, "has_display", lambda: True)
    monkeypatch.setattr(watch.sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(watch, "evaluate", lambda *_: None)
    assert watch.main([BARE]) is None
    refuses("Steps", BARE, "--eval.window")


def test_a_window_shows_the_game(monkeypatch):
    view = watch.View(UNEVEN, pufferl.load_config(UNEVEN, [*SERIAL, "--eval.fps", "1000"]), 0)
    raylib, shown = mock.MagicMock(), []
    raylib.WindowShouldClose.side_effect = [False, False, False, True]
    raylib.IsKeyPressed.side_effect = [0, 0, 0, 0, 1, 0]  # space, then the right arrow

    def update(*_):
        address = raylib.ffi.cast.call_args[0][1]
        pixels = (ctypes.c_uint8 * (8 * 16 * 4)).from_address(address)
        shown.append(np.frombuffer(pixels, np.uint8).reshape(8, 16, 4).copy())

    raylib.UpdateTexture.side_effect = update
    monkeypatch.setitem(sys.modules, "raylib", raylib)
    watch.show_in_window(view)
    assert view.step == 2 and (shown[2] == shown[1]).all() and (shown[0] != shown[1]).any()
    np.testing.assert_array_equal(shown[2][..., :3], view.picture())
    assert (shown[2][..., 3] == 255).all()
    assert raylib.InitWindow.call_args[0][:2] == (16 * 45, 8 * 45)
    view.close()


@pytest.mark.parametrize(("size", "repeats"), [
    ((9, 4), 4),  # the height limits it
    ((8, 6), 8)])
def test_the_terminal_shows_two_pixels_a_character(size, repeats):
    console = terminal(*size)
    picture = np.zeros((4, 4, 3), np.uint8)
    picture[0] = 255, 0, 0
    picture[3] = 0, 0, 255
    console.print(watch.half_blocks(picture, "caption", size))
    rows = [(255, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 255)]
    rows = np.repeat(rows, repeats // 4, axis=0).reshape(-1, 6).tolist()
    expected = ["\x1b[38;2;{};{};{};48;2;{};{};{}m".format(*row) + f"{'▀' * repeats}\x1b[0m"
                for row in rows]
    assert console.file.getvalue().split("\n")[:-1] == [*expected, "caption"[: size[0]]]


def test_a_policy_plays_in_the_terminal(capsys):
    pytest.importorskip("raylib")
    options = ["--baseline", "--eval.fps", "1000"]
    view = watch.View("squared", pufferl.load_config("squared", options), watch.EVAL_SEED)
    assert view.labels == {(0, 1): "UP", (0, 2): "DOWN", (0, 3): "LEFT", (0, 4): "RIGHT"}
    console = terminal(40, 24)
    watch.show_in_terminal(view, console, steps=40)
    view.close()
    drawn = console.file.getvalue()
    assert drawn.count("▀") > 40 * 500 and "return" in drawn
    assert "48;2;250;190;60" in drawn, "the target's gold"
    assert re.search(r"(?m)^\d .*\b1\.000", capsys.readouterr().out), "episodes and their score"
    with pytest.raises(pufferl.ConfigError, match=r"eval\.terminal"):
        watch.show_in_terminal(view, SimpleNamespace(is_terminal=False))


# -- the page


@pytest.fixture(scope="module")
def server():
    """A process that serves the page, as a user starts it; (process, port)."""
    pytest.importorskip("raylib")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "pufferl.py"), "eval", "squared", "--baseline", "--eval.web",
         "--eval.port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    line = read_until(process, "http://127.0.0.1:")
    yield process, int(re.search(r"http://127\.0\.0\.1:(\d+)", line)[1])
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "episode" in rest and "Traceback" not in rest, rest


def ask(port, method, path, body=None, **headers):
    """(status, headers, text) of a request; headers: Host="evil.test"."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body),
                       {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read().decode()


def order(port, status=200, **keys):
    headers = {"Content_Type": "application/json", **keys.pop("headers", {})}
    assert ask(port, "POST", "/order", keys, **headers)[0] == status


def state(port, after=-1):
    return json.loads(ask(port, "GET", f"/state?after={after}")[2])


def wait_for_state(port, **fields):
    return wait_for(lambda: (now := state(port)) and fields.items() <= now.items() and now, 90)


def test_the_page_is_for_this_machine_only(server):
    process, port = server
    listening = [one.laddr.ip for one in psutil.Process(process.pid).net_connections()
                 if one.status == "LISTEN"]
    assert listening == ["127.0.0.1"]
    # a tunnel has a port of its own
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", "localhost:1234", f"[::1]:{port}"):
        assert ask(port, "GET", "/", Host=host)[0] == 200
    for host in ("evil.test", f"evil.test:{port}", "127.0.0.1.evil.test", "localhost@evil.test", "",
                 "[", "0.0.0.0"):
        assert ask(port, "GET", "/state?after=0", Host=host)[0] == 403
        order(port, 403, paused=True, headers={"Host": host})
    for origin, status in (("http://evil.test", 403), ("null", 403), (f"http://localhost:{port}", 200)):
        order(port, status, speed=10, headers={"Host": f"localhost:{port}", "Origin": origin})
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).split()[1] == b"403"
    order(port, 400, speed=10, headers={"Content_Type": "text/plain"})
    order(port, 400, x="y" * 10000)
    for path in ("/../pufferl.py", "/state?after=x", "/still?", "/still?nothing",
                 "/still?../ocean", "/still?target/target.h"):
        assert ask(port, "GET", path)[0] == 404
    _, headers, text = ask(port, "GET", "/")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text), "no resource from elsewhere"


def test_states_and_orders(server):
    _, port = server
    first = state(port)
    (head,) = first["heads"]
    assert first["environment"] == "squared" and len(head["probabilities"]) == 5
    assert sum(head["probabilities"]) == pytest.approx(1)
    order(port, speed=2000)
    still = wait_for(lambda: (now := state(port, first["number"]))["count"] > 20 and now)
    assert len(still["scores"]) == still["count"] and still["number"] > first["number"]
    order(port, seed=11, speed=10, paused=True)
    one = wait_for_state(port, seed=11)
    assert one["count"] == one["steps"] == 0 and one["run"] != still["run"]
    order(port, seed=11)
    two = wait_for(lambda: (now := state(port))["run"] != one["run"] and now)
    assert two["picture"] == one["picture"], "the same seed begins the same episode"
    for name, value in (("environment", "no.py:x"), ("policy", "no.pt"), ("seed", "x"), ("x", 1)):
        order(port, **{name: value})
        wait_for(lambda word=name if value == 1 else value: word in (state(port)["problem"] or ""))
    order(port, environment="target")
    other = wait_for_state(port, environment="target")
    assert (other["problem"], other["agents"], len(other["heads"])) == (None, 8, 2)
    order(port, agent=5)
    wait_for_state(port, agent=5)
    order(port, environment="squared", policy="untrained")
    wait_for_state(port, environment="squared", policy="untrained")
    status, _, text = ask(port, "GET", "/still?target")
    picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))
    assert status == 200 and picture.shape[2] == 3
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 3


def test_a_state_has_no_nan():
    state = {"value": math.nan, "heads": [-math.inf, 1.0, math.inf], "text": "it is NaN"}
    text = watch.NOT_JSON.sub("null", json.dumps(state))
    assert json.loads(text, parse_constant=pytest.fail) == state | {"value": None,
                                                                    "heads": [None, 1.0, None]}


def test_the_page_in_a_browser(server):
    _, port = server
    order(port, paused=False, environment="squared", policy="given")  # the tests share this server
    with open_chromium("MAP * ~NOTFOUND, EXCLUDE localhost") as (page, requests, problems):
        page.goto(f"http://localhost:{port}/")

        def wait(expression):
            wait_for(lambda: page.evaluate(expression))

        def picture(name="picture"):
            return page.evaluate(f"$('{name}').toDataURL()")

        wait("!!state && state.environment === 'squared' && !!values.length")
        page.click("#pause")
        wait_for(lambda: page.inner_text("#pause") == "Play" and page.is_visible("#paused"))
        still = picture(), page.evaluate("state.steps")
        page.click("#step")
        wait_for(lambda: page.evaluate("state.steps") == still[1] + 1 and picture() != still[0])
        page.keyboard.press("Space")
        wait("!state.paused")
        order(port, speed=300)
        curve = picture("scores")
        wait_for(lambda: picture("scores") != curve)
        wait("scores.length > 5 && state.mean > 0.8")
        assert page.locator(".bar").count() == 5 and page.locator(".bar.chosen").count() == 1
        page.fill("#seed", "42")
        page.press("#seed", "Enter")
        wait("state.seed === 42")
        page.select_option("#environment", "cartpole")
        wait("state.environment === 'cartpole' && values.length > 3")
        assert page.title() == "cartpole – watch" and page.locator(".bar").count() == 2
        page.evaluate("$('menu').scrollIntoView()")
        wait("document.querySelector('.tile img')?.naturalWidth > 99")
        page.click(".tile[value=target]")
        wait("document.querySelector('.tile.chosen').value === 'target'")
        shape, drawn = (page.evaluate(f"(box => box.width / box.height)({box})") for box in
                        ("$('screen').getBoundingClientRect()", "$('picture')"))
        assert shape == pytest.approx(drawn, rel=0.02), "no bands"
        ours = (f"http://localhost:{port}/", "data:")
        assert problems == [] and all(url.startswith(ours) for url in requests)


@pytest.mark.parametrize(("wanted", "session", "display", "is_opened"), [
    (True, "", ":0", True), (False, "", ":0", False), (True, "", "", False),
    (True, "10.0.0.2 50000 10.0.0.1 22", ":0", False)])
def test_the_page_is_opened_where_it_can_be_seen(wanted, session, display, is_opened, monkeypatch,
                                                 capsys):
    page, browse = mock.Mock(), mock.Mock()
    page.server.server_port, page.view.scores = 1234, []
    monkeypatch.setattr(watch, "Page", lambda *_: page)
    monkeypatch.setattr(watch.webbrowser, "open", browse)
    monkeypatch.setattr(watch.signal, "signal", mock.Mock())
    monkeypatch.setattr(sys, "platform", "linux")
    for name, value in (("SSH_CONNECTION", session), ("DISPLAY", display), ("WAYLAND_DISPLAY", "")):
        monkeypatch.setenv(name, value)
    args = {"eval": {"open": wanted}, "baseline": False, "load_model_path": None}
    watch.show_on_page("breakout", args)
    assert browse.called == is_opened
    assert "ssh -L 1234:127.0.0.1:1234 " in capsys.readouterr().out


@pytest.mark.slow
def test_playing_needs_no_more_than_what_make_demo_installs():
    others = ["scipy", "tensorboard", "plotly", "imageio_ffmpeg", "threadpoolctl", "matplotlib"]
    code = f"""if True:
        import sys
        sys.modules.update(dict.fromkeys({others}))  # None: their import fails
        from tools import watch
        view = watch.View("squared", watch.pufferl.load_config("squared", ["--baseline"]), 1)
        view.decide()
        watch.png(view.picture(), 100)
        print(" ".join({{name.partition(".")[0] for name in sys.modules}}))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"torch", "numba", "safetensors", "PIL", "raylib"} <= set(done.stdout.split())
