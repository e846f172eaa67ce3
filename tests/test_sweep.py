"""The ledger; sweeps with a stand-in trainer, and with the real one (slow)."""

import contextlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import start, wait_for
from test_runs_loggers import OFFLINE, read_events, read_offline

import configuration
import diagnostics
import loggers
import runs
from errors import ConfigError
from protein import Protein
from tools.sweep import command as sweep
from tools.sweep import report as sweep_report
from tools.sweep import trials as sweep_trials
from tools.sweep.trials import Curve, Ledger

FAKE = Path(__file__).with_name("fake_trainer.py")
FAKE_SPACE = {"train.learning_rate": {"distribution": "log_normal", "min": 3e-4, "max": 0.09},
              "train.total_timesteps": {"distribution": "log_normal", "min": 1000, "max": 20000}}


def record(number, score=1.0, cost=1.0, status="done", **settings):
    return {"trial": number, "settings": settings, "status": status, "score": score, "cost": cost,
            "steps": 10.0, "curve": [[1.0, score, cost]], "error": None, "predicted": {},
            "run": None, "attempts": 1}


def write_sweep(folder, space):
    """Write sweep.json of a sweep of squared; return its Ledger."""
    ledger = Ledger(folder)
    asked = {"env": "squared", "metric": "environment/score", "goal": "maximize",
             "cost": "performance/uptime"}
    sweep_trials.write_json(ledger.folder / "sweep.json",
                            {"asked": asked, "options": [], "space": space})
    return ledger


def test_one_process_at_a_time_runs_a_sweep(tmp_path, fake):
    (tmp_path / "sweep_squared").mkdir()
    lock = runs.lock(tmp_path / "sweep_squared")
    with pytest.raises(ConfigError, match="sweep_squared"):
        run_sweep(tmp_path, 1)
    os.close(lock)
    assert list(run_sweep(tmp_path, 1).results()) == [0]


def test_a_damaged_file_of_the_ledger_is_named(tmp_path):
    path = Ledger(tmp_path).trials / "00000.json"
    good = record(0)
    for content in ("", "{", "\0"):
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"00000\.json"):
            Ledger(tmp_path).results()
    path.write_text(json.dumps(good))
    assert Ledger(tmp_path).results() == {0: good}
    (tmp_path / "sweep.json").write_text('{"asked"')
    with pytest.raises(ConfigError, match=r"sweep\.json"):
        sweep_report.load_sweep(tmp_path)


# -- curves


@pytest.mark.parametrize("line", [
    "", "5", "{", '{"step": "x"}', '{"step": NaN}', '{"step": 1e999}', "[" * 100_000,
    '{"step": 1' + "0" * 400 + "}", '{"step": [1]}', "\ufffd"], ids=range(10))
def test_lines_of_metrics_that_are_none_are_skipped(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    assert len(Curve.read(path, "environment/score").step) == 0
    entry = '{"step": %d, "environment/score": %s, "performance/uptime": 3.0}'
    first, *others = [entry % row for row in ((1, 2.0), (2, "null"), (3, "NaN"), (4, 6.0))]
    path.write_text("\n".join([first, line, *others, '{"step": 9']))
    curve = Curve.read(path, "environment/score")
    assert (curve.step.tolist(), curve.score.tolist()) == ([1, 4], [2, 6])
    assert [entry["step"] for entry in diagnostics.read_metrics(path)] == [1, 2, 3, 4]
    loggers.JsonLines(path, first_step=1)
    assert path.read_text() == first + "\n"


@pytest.mark.parametrize("interval", [10, 100, 300])
def test_a_score_does_not_depend_on_how_often_a_run_logs(tmp_path, interval):
    """An episode ends every second step, with the step as its score."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(json.dumps({
        "step": end, "environment/score": (begin + end) / 2, "environment/n": (end - begin) / 2,
        "performance/uptime": 1.0})
        for begin, end in itertools.pairwise([*range(0, 900, interval), 900, 950, 1000])))
    score, _ = Curve.read(path, "environment/score").at(1000, 200)
    assert score == pytest.approx(900, abs=interval / 2)


def test_points_along_a_curve():
    steps = np.arange(1, 101)
    curve = Curve(steps * 10.0, steps / 100, steps * 2.0, steps * 10.0 - 10, np.ones(100))
    points = curve.points(1000, 5)
    assert [p for p, _, _ in points] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert points[-1] == (1.0, pytest.approx(0.955), 200.0), "the mean over a tenth of the schedule"
    assert [p for p, _, _ in curve.points(2000, 5)] == [0.2, 0.4, 0.5]
    assert Curve(*np.empty((5, 0))).points(1000, 5) == []


@pytest.mark.parametrize(("score", "step", "cost", "stopped"), [
    (0.2, 500, 20, True), (0.3, 500, 20, False),
    (0.2, 250, 20, True), (0.2, 249, 20, False),  # it has only begun
    (0.2, 900, 20, True), (0.2, 901, 20, False),  # it is nearly through
    (0.05, 500, 2, False), (-9.0, 500, 0.5, False)])  # at that cost none was better
def test_hopeless(score, step, cost, stopped):
    rule = {"front": [(1.0, 0.1), (10.0, 1.0)], "low": 0.0, "share": 0.25, "after": 0.25,
            "sign": 1.0}
    curve = Curve(*np.array([[step], [score], [cost], [0], [1]], float))
    assert sweep_trials.should_stop_early(curve, 1000, rule) is stopped
    assert not sweep_trials.should_stop_early(curve, 1000, None)


# -- sweeps with a stand-in trainer


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(sweep, "TRAINER", str(FAKE))


def run_sweep(folder, count, space=FAKE_SPACE, **settings):
    options = ["--data-dir", str(folder)]
    settings = sweep.Sweep(num_trials=count, logger="none", **settings)
    tuner = Protein(search_space=sweep.searched_settings("squared", space, options),
                    num_trials=count, metric=settings.metric)
    tuner.env_name = "squared"
    return sweep.Runner(tuner, settings, options).run()


def test_the_first_trial_has_the_present_settings_or_says_why_not(capsys):
    entries = {"vec.total_agents": {"distribution": "uniform_pow2", "min": 16, "max": 4096},
               "train.total_timesteps": {"distribution": "log_normal", "min": 1e6, "max": 1e8}}
    space = sweep.searched_settings("squared", entries, ["--train.gamma", "0.9"])
    assert space["vec.total_agents"]["mean"] == 1024 and not capsys.readouterr().err
    entries["train.total_timesteps"]["max"] = 2e6
    space = sweep.searched_settings("squared", entries)
    assert "mean" not in space["train.total_timesteps"]
    assert "[sweep.train.total_timesteps]" in capsys.readouterr().err


def test_automatic_settings_begin_at_their_values(tmp_path, capsys):
    """A given rate would not adapt, so trials get the automatic target_kl, too."""
    options, own = ["--data-dir", str(tmp_path), "--train.total-timesteps", "9999"], "tests/user_envs.py:PointMass"
    space, means = sweep.searched_settings(own, None, options), {"train.learning_rate": 0.0035, "train.gamma": 0.99}
    assert {name: space[name]["mean"] for name in means} == means
    lines = capsys.readouterr().err.splitlines()
    assert "train.ent_coef" not in space and "train.ent_coef" in lines[0]
    assert "train.replay_ratio" not in space and "automatic value 8" in lines[1]
    for name, added in (("squared", []), (own, ["--train.target-kl", "0.02"])):
        tuner = Protein(search_space=space, num_trials=1, metric="environment/score")
        tuner.env_name = name
        runner = sweep.Runner(tuner, sweep.Sweep(logger="none"), options)
        assert runner.options == [*options, *added, "--train.device", "cpu"]


def test_agents_that_are_no_power_of_two_are_not_searched():
    names, general = ("vec.total_agents", "train.gamma"), configuration.load_config("default")["sweep"]
    for agents, is_searched in (("8", True), ("12", False)):
        space = sweep.searched_settings("multiagent", {name: general[f"sweep.{name}"] for name in names},
                                        ["--env.num-agents", agents])
        assert ("vec.total_agents" in space) == is_searched


def test_a_file_that_was_edited_or_is_named_from_elsewhere(tmp_path, monkeypatch, capsys):
    """The same file, also by another path; scores before and after an edit are compared with a warning."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from small_envs import Walk\n")
    for name, edit in (("mine.py:Walk", ""), (f"{tmp_path}/mine.py:Walk", "# edited")):
        Path("mine.py").write_text(f"from small_envs import Walk\n{edit}")
        tuner = Protein(search_space=FAKE_SPACE)
        tuner.env_name = name
        sweep.begin(Ledger(tmp_path), tuner, sweep.Sweep(), [], configuration.load_config(name))
        assert ("edited" in capsys.readouterr().err) == bool(edit)


def test_a_sweep_and_its_continuation_from_python(tmp_path, fake):
    def optimize(count, space=FAKE_SPACE):
        return Protein("squared", space, num_trials=count, workers=2, logger="none", early_stop=0,
                       fixed={"data_dir": str(tmp_path), "train": {"gamma": 0.9}}).optimize()

    best, ledger = optimize(6), Ledger(tmp_path / "sweep_squared")
    results = ledger.results()
    assert list(results) == list(range(6)) and {r["status"] for r in results.values()} == {"done"}
    assert best == max(results.values(), key=lambda r: r["score"])["settings"]
    for r in results.values():
        steps, rate = r["settings"]["train.total_timesteps"], r["settings"]["train.learning_rate"]
        assert r["cost"] == pytest.approx(steps / 1000)
        assert r["steps"] == steps and len(r["curve"]) == 5
        assert r["run"].startswith(f"runs/{r['trial']:05d}/"), "the folder may be moved"
        options = json.loads((ledger.folder / r["run"] / "config.json").read_text())["options"]
        assert float(options["--train.learning-rate"]) == rate and options["--train.gamma"] == "0.9"
    assert 0 < results[5]["predicted"]["score"] < 1.5 and not ledger.claims()
    before = {path: path.read_text() for path in ledger.trials.iterdir()}
    optimize(8)
    assert len({json.dumps(r["settings"]) for r in ledger.results().values()}) == 8
    assert all(path.read_text() == text for path, text in before.items())
    uniform = {"distribution": "uniform", "min": 1e-3, "max": 1}
    with pytest.raises(ConfigError, match="learning_rate"):
        optimize(8, {**FAKE_SPACE, "train.learning_rate": uniform})


def test_failures_are_recorded_with_their_kind(tmp_path, fake):
    rates = [0.00001, 0.0001, 0.01, 0.5]
    ledger = run_sweep(tmp_path, 5, {**FAKE_SPACE, "train.learning_rate": rates}, workers=2)
    expected = {0.00001: ("failed", "lost 3 times", 3), 0.0001: ("failed", "exit 1: MemoryError", 1),
                0.01: ("done", "None", 1), 0.5: ("failed", "exit 1: FloatingPointError", 1)}
    records = {r["settings"]["train.learning_rate"]: r for r in ledger.results().values()}
    assert records.keys() == expected.keys()
    for rate, (status, error, attempts) in expected.items():
        assert (records[rate]["status"], records[rate]["attempts"]) == (status, attempts)
        assert str(records[rate]["error"]).startswith(error)


@pytest.mark.parametrize("count", [2, 20])
def test_a_metric_that_is_never_logged_stops_the_sweep(tmp_path, fake, count):
    with pytest.raises(RuntimeError, match="environment/score"):
        run_sweep(tmp_path, count, metric="environment/scroe")
    assert not Ledger(tmp_path / "sweep_squared").claims()


def test_a_trial_is_stopped_or_lost_or_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "4")
    (tmp_path / "kill.py").write_text("import os; os.kill(os.getpid(), 15)")
    (tmp_path / "leave.py").write_text("print('stopped after this epoch')")
    rule = {"front": [(0.1, 0.5)], "low": -2.0, "share": 1.0, "after": 0.25, "sign": 1.0}
    command = ["train", "squared", "--train.total-timesteps", "1000",
               "--train.learning-rate", "0.0003"]

    def run(name, stop=None, started=None, **changes):
        return sweep_trials.run_trial({
            "trainer": str(FAKE), "folder": str(tmp_path / "runs" / name), "env": {}, "total": 1000,
            "cwd": str(tmp_path), "downsample": 5, "metric": "environment/score", "cost": "performance/uptime",
            "limit": 0.4, "rule": None, "command": command, **changes}, stop, started)

    def epochs(name):
        (state,) = tmp_path.glob(f"runs/{name}/*/trainer_state.pt")
        return int(state.read_text())

    with ThreadPoolExecutor(7) as threads:
        stop, children = threading.Event(), []
        interrupted = threads.submit(run, "e", stop, children.append, limit=1e9)
        hopeless = threads.submit(run, "a", limit=1e9, rule=rule)
        dear = threads.submit(run, "b")
        no_metric = threads.submit(run, "c", metric="scroe")
        no_cost = threads.submit(run, "d", cost="uptme", env={"FAKE_SECONDS": "0"})
        lost = [threads.submit(run, name, trainer=str(tmp_path / name), command=[])
                for name in ("kill.py", "leave.py")]
        wait_for(lambda: list(tmp_path.glob("runs/e/*/metrics.jsonl")))
        stop.set()
        assert interrupted.result()["status"] == "interrupted"
        assert not psutil.pid_exists(children[0][0])
        assert epochs("e") < 20, "it saves where it is"
        resumed = run("e", limit=1e9, env={"FAKE_SECONDS": "0"})
        assert resumed["status"] == "done" and resumed["cost"] == pytest.approx(1.0)
        assert len(list(tmp_path.glob("runs/e/*/config.json"))) == 1, "it is resumed"
    assert hopeless.result()["status"] == "stopped" and dear.result()["status"] == "stopped"
    assert 0.25 < hopeless.result()["curve"][-1][0] < 0.9 and 0.4 < dear.result()["cost"] < 0.9
    assert "scroe or performance/uptime was never" in no_metric.result()["error"]
    assert epochs("c") < 20, "it has its limit too"
    assert "score or uptme was never" in no_cost.result()["error"]
    assert [trial.result()["status"] for trial in lost] == ["lost", "lost"]


@pytest.mark.parametrize(("code", "text", "error"), [
    (2, "╭ Parsing error ───╮\n│ invalid choice   │\n╰──────────────────╯\n", "invalid choice"),
    (1, "Traceback (most recent call last):\nRuntimeError: no licence\n(environment 0)\n"
        "To continue from the last checkpoint: python pufferl.py train\n", "RuntimeError: no licence"),
    (3, "(environment 0)\nSystemExit: 3\n", "SystemExit: 3"),
    (-11, 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n'
          '  File "mine.py", line 3 in step\n  File "a.py", line 1 in b\n\nExtension modules: numpy, torch\n',
     'Fatal Python error: Segmentation fault, File "mine.py", line 3 in step'),
    (3, "", "")])
def test_a_failure_is_told_by_its_error(code, text, error):
    line = sweep_trials.explain(code, text)
    assert str(code) in line and line.endswith(error)


def test_what_a_sweep_cannot_begin_with(tmp_path, monkeypatch):
    tuner, config = Protein(search_space=FAKE_SPACE), configuration.load_config("squared")
    sweep.begin(Ledger(tmp_path), tuner, sweep.Sweep(), [], config)
    with pytest.raises(ConfigError, match=r"load_model_path.*a\.pt"):
        sweep.begin(Ledger(tmp_path), tuner, sweep.Sweep(), [],
                    {**config, "load_model_path": "a.pt"})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for setting, value, more in (("wrokers", 2, {}), ("cpus", 2, {}),
                                 ("gpus", 8, {"train.device": "cuda"})):
        with pytest.raises(ConfigError, match=setting):
            Protein("squared", FAKE_SPACE, fixed={"data_dir": str(tmp_path / "runs"), **more},
                    **{setting: value}).optimize()
    assert not (tmp_path / "runs").exists()


def test_an_interrupt_ends_optimize(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.Runner, "next_claim",
                        lambda runner: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        Protein("squared", FAKE_SPACE, logger="none", fixed={"data_dir": str(tmp_path)}).optimize()


def test_trials_are_spread_over_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    begun = threading.Barrier(4)  # four trials at a time

    def run_trial(job, stop, started):
        begun.wait(10)
        return job["env"]["CUDA_VISIBLE_DEVICES"]

    monkeypatch.setattr(sweep_trials, "run_trial", run_trial)
    pool = sweep_trials.LocalPool(workers=2, gpus=2)
    assert pool.slots == 4
    for trial in range(4):
        pool.submit({"trial": trial}, {"env": {}}, None)
    assert sorted(gpu for _, gpu in pool.close()) == ["3", "3", "5", "5"]


def start_sweep(folder, count):
    code = f"""if True:
        import sys
        sys.path[:0] = {str(sweep_trials.ROOT)!r}, {str(FAKE.parent)!r}
        from pathlib import Path
        from test_sweep import FAKE, run_sweep, sweep
        sweep.TRAINER = str(FAKE)
        run_sweep(Path({str(folder)!r}), {count}, workers=2, early_stop=0)"""
    return start([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                 text=True, env={**os.environ, "FAKE_SECONDS": "1"})


@pytest.mark.slow
def test_kill_and_interrupt_lose_nothing(tmp_path):
    """kill -9, then Ctrl-C, then to the end: each trial once, running ones resumed."""
    folder = tmp_path / "sweep_squared"
    files = folder / "trials"

    def has_begun():
        logs = sorted(folder.glob("runs/*/*/metrics.jsonl"))
        return len(logs) >= 3 and len(logs[-1].read_text().splitlines()) >= 4

    process = start_sweep(tmp_path, 5)
    wait_for(lambda: list(files.glob("*.json")) and has_begun())
    process.kill()
    process.communicate()
    finished = {path: path.read_text() for path in files.glob("*.json")}
    claims = {int(path.stem): json.loads(path.read_text())["settings"]
              for path in files.glob("*.running")}
    assert claims
    for is_interrupted in (True, False):
        process = start_sweep(tmp_path, 5)
        if is_interrupted:
            wait_for(lambda: len(list(files.glob("*.json"))) > len(finished))
            process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
    results = Ledger(folder).results()
    assert list(results) == list(range(5)) and {r["status"] for r in results.values()} == {"done"}
    assert all(path.read_text() == text for path, text in finished.items())
    assert claims == {number: results[number]["settings"] for number in claims}
    for r in results.values():  # resumed: one run folder each, and the full schedule's cost
        assert len(list((folder / "runs" / f"{r['trial']:05d}").glob("*/config.json"))) == 1
        assert r["cost"] == pytest.approx(r["settings"]["train.total_timesteps"] / 1000, rel=1e-6)
    assert f"python pufferl.py train squared --data-dir {tmp_path} --train." in output
    assert {path.suffix for path in files.iterdir()} == {".json"}


def test_the_tuner_and_the_report_import_no_torch():
    code = """if True:
        import sys
        heavy = {"torch", "numba", "ray", "plotly", "configuration", "runs", "pufferl", "tools.watch"}
        import protein, tools.sweep.report
        assert not heavy & {*sys.modules}"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=sweep_trials.ROOT)


@pytest.mark.parametrize(("options", "name"), [
    ("--sweep.train.gamma.max", "sweep.train.gamma"), ("--data-dir /proc/nowhere", "/proc/nowhere")])
def test_errors_of_the_command_line(options, name):
    with pytest.raises(SystemExit, match=name):
        sweep.main(["squared", *options.split()])


def test_a_sweep_under_torchrun_is_refused(monkeypatch):
    """Its trials would wait for the other ranks."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="one process"):
        sweep.main(["squared"])


LOGGED = [{**record(0, 0.9, 30.0, **{"train.learning_rate": 0.01, "policy.hidden_size": 64}),
           "steps": 1000.0, "curve": [[0.2, 0.5, 6.0], [0.4, 0.9, 30.0]]},
          {**record(1, None, None, "failed", **{"train.learning_rate": 0.5,
                                                "policy.hidden_size": 32}), "curve": []}]


def log_all(kind, folder):
    log = sweep.make_logger(kind, folder, {"project": "pufferl", "entity": None})
    for entry in LOGGED:
        log(entry)


def test_tensorboard_holds_settings_and_curves(tmp_path, capsys):
    from tensorboard.plugins.hparams import plugin_data_pb2

    log_all("tensorboard", tmp_path)
    assert len(list(tmp_path.rglob("events*"))) == 1, "of two files, either may be read first"
    metrics, events = read_events(tmp_path / "tensorboard" / "00000")
    assert metrics == {"sweep/score": {500: 0.5, 1000: pytest.approx(0.9)},
                       "sweep/cost": {500: 6.0, 1000: 30.0}, "sweep/final_cost": {0: 30.0},
                       "sweep/final_score": {0: pytest.approx(0.9)}}
    session = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(session).session_start_info.hparams
    assert {name: value.number_value for name, value in settings.items()} == LOGGED[0]["settings"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tensorboard").write_text("in the way")
    log_all("tensorboard", tmp_path / "other")
    assert "tensorboard" in capsys.readouterr().err, "a logger that fails does not end the sweep"


def test_wandb_holds_settings_and_curves(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the package wandb")
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    log_all("wandb", tmp_path)
    wandb.teardown()  # what its process still held is written
    paths = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(paths) == 2
    for path in paths:
        metrics, settings, records = read_offline(path)
        run, entry = records["run"], LOGGED[int(records["run"].display_name)]
        assert (run.run_group, list(run.tags)) == (tmp_path.name, [entry["status"]])
        assert entry["settings"].items() <= settings.items()
        curve = {"sweep/score": {500: 0.5, 1000: 0.9}, "sweep/cost": {500: 6.0, 1000: 30.0}}
        assert {name: metrics[name] for name in curve.keys() & metrics} == (
            curve if entry["curve"] else {})
        assert records["exit"].exit_code == (entry["status"] == "failed")


# -- real clusters and real training


@pytest.mark.slow
def test_ray_on_two_nodes_one_of_which_is_lost(tmp_path, fake, monkeypatch):
    pytest.importorskip("ray", reason="the cluster; pip install ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("FAKE_SECONDS", "8")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})

    def trials_of(node):
        """Return the seconds for which each trial of the node runs."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        return [time.time() - child.create_time() for child in raylet.children(recursive=True)
                if FAKE.name in " ".join(child.cmdline())]

    def lose_a_node():
        def has_begun_there():
            with contextlib.suppress(psutil.Error):
                return min(trials_of(second), default=9) < 3

        wait_for(lambda: len(Ledger(tmp_path / "sweep_squared").results()) >= 2
                 and has_begun_there(), 120)
        cluster.remove_node(second, allow_graceful=False)

    try:
        second = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        thread = threading.Thread(target=lose_a_node)
        thread.start()
        ledger = run_sweep(tmp_path, 8, ray=cluster.address, early_stop=0, workers=4)
        thread.join()
    finally:
        cluster.shutdown()
    results = ledger.results()
    assert list(results) == list(range(8)) and {r["status"] for r in results.values()} == {"done"}
    assert max(r["attempts"] for r in results.values()) >= 2, "the lost node was running trials"
    assert not ledger.claims() and all(len(r["curve"]) == 5 for r in results.values())


@pytest.mark.slow
def test_a_real_sweep_tunes_a_detuned_squared(tmp_path):
    """From a tenth of the learning rate, halve the steps to a score of 0.9."""
    fixed = ("train.gamma", "train.gae_lambda", "train.replay_ratio", "train.clip_coef",
             "train.vf_coef", "train.max_grad_norm", "train.horizon", "vec.total_agents")
    command = [sys.executable, str(sweep_trials.ROOT / "protein.py"), "squared",
               "--data-dir", str(tmp_path), "--sweep.num-trials", "45", "--sweep.workers", "2",
               "--sweep.cost", "step", "--policy.hidden-size", "64",
               "--sweep.train.learning_rate.mean=0.003", "--sweep.train.minibatch_size.mean=32768",
               "--sweep.train.total_timesteps.max=4000000",
               *(f"--sweep.{name}.distribution=none" for name in fixed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "sweep_squared"
    results = Ledger(folder).results()
    assert len(results) == 45 and {r["status"] for r in results.values()} <= {"done", "stopped"}
    steps = []  # to a score of 0.9, infinity without
    for r in results.values():
        curve = Curve.read(folder / r["run"] / "metrics.jsonl", "environment/score")
        steps.append(min(curve.step[curve.score >= 0.9], default=math.inf))
    assert min(steps) < 0.5 * steps[0]
    assert (folder / "report.html").exists()
    assert list((folder / "tensorboard").glob("00000/events*"))
