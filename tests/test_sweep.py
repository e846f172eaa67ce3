"""tools/sweep: the ledger under several owners and kills; sweeps with a stand-in trainer, and with the
real one (slow), on one machine and on Ray."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import start, wait_for
from test_runs_loggers import OFFLINE, wandb_records

import configuration
import diagnostics
import loggers
from protein import Protein, SpaceError
from tools.sweep import command as sweep
from tools.sweep import report as sweep_report
from tools.sweep import trials as sweep_trials
from tools.sweep.trials import Curve, Ledger

FAKE = Path(__file__).with_name("fake_trainer.py")
FAKE_SPACE = {"train.learning_rate": {"distribution": "log_normal", "min": 3e-4, "max": 0.09},
              "train.total_timesteps": {"distribution": "log_normal", "min": 1000, "max": 20000}}


# -- the ledger
# -------------------------------------------------------------------------------------------------------


def record(number, score=1.0, cost=1.0, status="done", **settings):
    return {"trial": number, "settings": settings, "status": status, "score": score, "cost": cost,
            "steps": 10.0,
            "curve": [[1.0, score, cost]], "error": None, "predicted": {}, "run": None,
            "attempts": 1}


def dead_owner(folder, number, **fields):
    """A claim whose owner does not live any more."""
    other = Ledger(folder)
    other.owner = {**other.owner, "pid": 2**22 - 7}
    claim = other.claim(number, settings={"x": number}, **fields)
    assert claim["trial"] == number
    return other, claim


def test_claims_are_exclusive(tmp_path):
    ledgers, numbers = [Ledger(tmp_path) for _ in range(6)], []

    def work(ledger):
        for _ in range(15):
            numbers.append(ledger.claim()["trial"])

    threads = [threading.Thread(target=work, args=(ledger,)) for ledger in ledgers]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(numbers) == list(range(90))
    assert Ledger(tmp_path).claim(below=90) is None
    assert not list(tmp_path.rglob("*.part"))


def test_one_result_a_trial(tmp_path):
    first, second = Ledger(tmp_path), Ledger(tmp_path)
    claim = first.claim(settings={"x": 1})
    assert second.take_over() is None, "its owner lives"
    assert first.finish(claim, record(0, score=1.0))
    assert not second.finish(claim, record(0, score=2.0))
    assert second.results()[0]["score"] == 1.0 and not second.claims()
    assert second.claim()["trial"] == 1


def test_trials_of_dead_owners_are_taken_over_by_one(tmp_path):
    for number in range(5):
        dead_owner(tmp_path, number)
    ledgers, taken = [Ledger(tmp_path) for _ in range(6)], []

    def work(ledger):
        while (claim := ledger.take_over()) is not None:
            taken.append(claim)

    threads = [threading.Thread(target=work, args=(ledger,)) for ledger in ledgers]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(claim["settings"]["x"] for claim in taken) == list(range(5))
    assert (sorted(claim["trial"] for claim in taken) == list(range(5))
            and {claim["attempts"] for claim in taken} == {1})
    assert not list(tmp_path.glob("trials/*.lost-*"))


def test_a_late_result_of_a_lost_owner_is_refused(tmp_path):
    lost, claim = dead_owner(tmp_path, 0)
    ours = Ledger(tmp_path)
    mine = ours.take_over()
    assert ours.finish(mine, record(0, score=5.0))
    assert not lost.finish(claim, record(0, score=7.0))
    assert Ledger(tmp_path).results()[0]["score"] == 5.0


def test_other_machines_are_judged_by_their_sign_of_life(tmp_path):
    far = Ledger(tmp_path)
    far.owner = {**far.owner, "host": "elsewhere"}
    far.claim(settings={"x": 1})
    ours = Ledger(tmp_path)
    assert ours.take_over() is None
    path = tmp_path / "trials" / "00000.running"
    os.utime(path, (time.time() - 50, time.time() - 50))
    far.beat()
    assert ours.take_over() is None
    os.utime(path, (time.time() - 70, time.time() - 70))
    assert ours.take_over()["settings"] == {"x": 1}


def test_death_between_result_and_claim_and_in_a_takeover(tmp_path):
    dead_owner(tmp_path, 0)
    sweep_trials.write_json(tmp_path / "trials" / "00000.json", record(0))
    ours = Ledger(tmp_path)
    assert ours.take_over() is None and ours.claims() == {}
    assert not (tmp_path / "trials" / "00000.running").exists()
    dead_owner(tmp_path, 1)
    taken = tmp_path / "trials" / "00001.lost-abc"
    os.rename(tmp_path / "trials" / "00001.running", taken)
    assert ours.take_over() is None, "who takes it over may still be at it"
    os.utime(taken, (time.time() - 70, time.time() - 70))
    assert ours.take_over()["settings"] == {"x": 1}
    dead = Ledger(tmp_path)  # one that died before it knew what to run leaves its number free
    dead.owner = {**dead.owner, "pid": 2**22 - 7}
    assert dead.claim()["trial"] == 2
    assert ours.take_over() is None and ours.claim()["trial"] == 2


def test_a_number_that_is_being_taken_over_is_nobody_elses(tmp_path, monkeypatch):
    dead_owner(tmp_path, 0)
    ours, other, seen = Ledger(tmp_path), Ledger(tmp_path), []
    appear = ours._appear

    def slowly(path, content):
        seen.extend([other.claims(), other.claim()])
        return appear(path, content)

    monkeypatch.setattr(ours, "_appear", slowly)
    mine = ours.take_over()
    assert (mine["trial"] == 0 and mine["settings"] == {"x": 0}
            and json.loads(ours._path(mine).read_text()) == mine)
    assert list(seen[0]) == [0], "a sweep must not end while it is left"
    assert seen[1]["trial"] == 1
    # another looks in this moment whether it is free
    monkeypatch.setattr(ours, "_appear", lambda path, content: False)
    dead_owner(tmp_path, 2)
    assert (ours.take_over() is None and list(ours.claims()) == [0, 1, 2]
            and ours.claim(2, below=3) is None)


def test_who_lost_a_claim_leaves_it_alone(tmp_path):
    lost, claim = dead_owner(tmp_path, 0)
    ours = Ledger(tmp_path)
    mine = ours.take_over()
    os.utime(ours._path(mine), (1, 1))
    lost.update({**claim, "child": [1, 2]})
    lost.give_back(claim)
    lost.beat()
    lost.drop(claim)
    assert (json.loads(ours._path(mine).read_text()) == mine
            and ours._path(mine).stat().st_mtime == 1)


def test_signs_of_life_go_on_while_the_owner_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(Ledger, "LEASE", 0.3)
    ledger = Ledger(tmp_path)
    path = ledger._path(ledger.claim(settings={"x": 1}))
    with ledger.alive():
        os.utime(path, (1, 1))
        wait_for(lambda: path.stat().st_mtime > 1, 10)
    time.sleep(0.2)
    os.utime(path, (1, 1))
    time.sleep(0.2)
    assert path.stat().st_mtime == 1


def test_given_back_trials_keep_their_settings_and_attempts(tmp_path):
    ledger = Ledger(tmp_path)
    ledger.give_back(ledger.claim(settings={"x": 3}, predicted={"score": 1}))
    claim = Ledger(tmp_path).take_over()
    assert (claim["settings"] == {"x": 3} and claim["attempts"] == 0
            and claim["predicted"] == {"score": 1})


# -- curves
# -----------------------------------------------------------------------------------------------------------


def write_metrics(path, entries):
    path.write_text("".join(json.dumps({"step": step, "score": score, "performance/uptime": clock}) + "\n"
                            for step, score, clock in entries) + '{"step": 9')


def test_curve_of_a_run_and_of_a_resumed_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [(10, 1.0, 1.0), (20, None, 2.0), (30, 3.0, 3.0), (40, math.nan, 4.0)])
    curve = Curve.read(path, "score")
    assert (curve.step.tolist() == [10, 30] and curve.cost.tolist() == [1, 3]
            and "performance/uptime" in curve.names)
    # the checkpoint was at 20, resumed with the clock where it stood: what
    # came after it is replaced
    write_metrics(path,
                  [(10, 1.0, 1.0), (20, 2.0, 2.0), (30, 9.0, 3.0), (30, 3.0, 3.5), (40, 4.0, 4.5)])
    curve = Curve.read(path, "score")
    assert curve.step.tolist() == [10, 20, 30, 40] and curve.score.tolist() == [1, 2, 3, 4]
    assert curve.cost.tolist() == [1, 2, 3.5, 4.5]
    assert len(Curve.read(tmp_path / "nothing", "score").step) == 0


def test_points_along_a_curve(tmp_path):
    steps = np.arange(1, 101)
    curve = Curve(steps * 10.0, steps / 100, steps * 2.0)
    points = curve.points(1000, 5)
    assert [p for p, _, _ in points] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert points[-1] == (1.0, pytest.approx(0.955), 200.0), (
        "the score is the mean over a tenth of the schedule")
    half = Curve(curve.step[:50], curve.score[:50], curve.cost[:50]).points(1000, 5)
    assert [p for p, _, _ in half] == [0.2, 0.4, 0.5]
    assert Curve(*np.empty((3, 0))).points(1000, 5) == []


def test_hopeless():
    rule = {"front": [(1.0, 0.1), (10.0, 1.0)], "floor": 0.0, "share": 0.25, "after": 0.25,
            "sign": 1.0}
    curve = lambda score, step=500.0, cost=20.0: Curve(*np.array([[step], [score], [cost]]))  # noqa: E731
    assert sweep_trials.hopeless(curve(0.2), 1000, rule) and not sweep_trials.hopeless(curve(0.3), 1000, rule)
    assert not sweep_trials.hopeless(curve(0.2, step=200), 1000, rule), "it has only begun"
    assert not sweep_trials.hopeless(curve(0.2, step=950), 1000, rule), "it is nearly through"
    assert not sweep_trials.hopeless(curve(0.05, cost=2.0), 1000, rule), "at that cost nobody was better"
    assert (not sweep_trials.hopeless(curve(-9.0, cost=0.5), 1000, rule)
            and not sweep_trials.hopeless(curve(0.2), 1000, None))


# -- sweeps with a stand-in trainer
# -----------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(sweep, "TRAINER", str(FAKE))


def run_sweep(folder, count, space=FAKE_SPACE, **settings):
    options = ["--data-dir", str(folder)]
    settings = sweep.Sweep(num_trials=count, logger="none", **settings)
    tuner = Protein(search_space=sweep.searched_settings("squared", space, options),
                    num_trials=count, metric=settings.metric)
    tuner.env_name = "squared"
    return sweep.Runner(tuner, settings, options, quiet=True).run(), tuner


def test_a_sweep_and_its_continuation(tmp_path, fake):
    ledger, _ = run_sweep(tmp_path, 8, workers=2, early_stop=0)
    results = ledger.results()
    assert list(results) == list(range(8)) and {r["status"] for r in results.values()} == {"done"}
    for r in results.values():
        steps, rate = r["settings"]["train.total_timesteps"], r["settings"]["train.learning_rate"]
        assert (r["cost"] == pytest.approx(steps / 1000) and r["steps"] == steps
                and len(r["curve"]) == 5)
        run = json.loads((ledger.folder / r["run"] / "config.json").read_text())
        assert float(run["options"]["--train.learning-rate"]) == rate
    assert results[7]["predicted"]["score"] < 1.5 and not ledger.claims()
    before = {path: path.read_text() for path in ledger.trials.iterdir()}
    ledger, _ = run_sweep(tmp_path, 10, workers=2, early_stop=0)
    assert list(ledger.results()) == list(range(10))
    assert all(path.read_text() == text for path, text in before.items()), (
        "finished trials never change")
    assert len({json.dumps(r["settings"]) for r in ledger.results().values()}) == 10
    other = {**FAKE_SPACE,
             "train.learning_rate": {"distribution": "uniform", "min": 1e-3, "max": 1}}
    with pytest.raises(SpaceError, match=r"holds another sweep.*learning_rate"):
        run_sweep(tmp_path, 10, other)


def test_failures_are_recorded_with_their_kind(tmp_path, fake):
    ledger, tuner = run_sweep(tmp_path, 5,
                              {**FAKE_SPACE, "train.learning_rate": [0.00001, 0.0001, 0.01, 0.5]})
    kinds = {r["settings"]["train.learning_rate"]: (r["status"], r["error"])
             for r in ledger.results().values()}
    for rate, (status, error) in kinds.items():
        assert status == ("done" if rate == 0.01 else "failed")
        assert rate != 0.5 or error.startswith("not finite: FloatingPointError: epoch 3")
        assert rate != 0.0001 or error.startswith("out of memory")
        assert rate != 0.00001 or error.startswith("lost 3 times: it was killed")
    assert len(tuner.observations) == 5 and len(kinds) == 4


def test_a_metric_that_is_never_logged_stops_the_sweep(tmp_path, fake):
    with pytest.raises(RuntimeError,
                       match=r"the first 5 trials all failed[\s\S]*environment/score"):
        run_sweep(tmp_path, 20, metric="environment/scroe")
    assert not Ledger(tmp_path / "sweep_squared").claims()


def test_hopeless_trials_are_stopped(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "4")
    ledger = Ledger(tmp_path / "x")
    rule = {"front": [(0.1, 0.5)], "floor": -2.0, "share": 1.0, "after": 0.25, "sign": 1.0}
    job = {"trainer": str(FAKE), "folder": str(ledger.folder / "runs" / "0"), "env": {},
           "total": 1000, "downsample": 5,
           "metric": "environment/score", "cost": "performance/uptime", "limit": 1e9, "rule": rule,
           "command": ["train", "squared", "--train.total-timesteps", "1000",
                       "--train.learning-rate", "0.0003"]}
    outcome = sweep_trials.run_trial(job)
    assert outcome["status"] == "stopped" and 0.25 < outcome["curve"][-1][0] < 0.9
    outcome = sweep_trials.run_trial({**job, "folder": job["folder"] + "b", "rule": None, "limit": 0.4})
    assert outcome["status"] == "stopped" and 0.4 < outcome["cost"] < 0.9
    outcome = sweep_trials.run_trial({**job, "folder": job["folder"] + "c", "rule": None, "limit": 0.4,
                               "metric": "scroe"})
    assert outcome["seconds"] < 3.5 and outcome["error"].startswith("scroe was never logged"), (
        "it has its limit too")
    monkeypatch.setenv("FAKE_SECONDS", "0")
    outcome = sweep_trials.run_trial({**job, "folder": job["folder"] + "d", "rule": None,
                               "cost": "performance/uptme"})
    assert outcome["error"].startswith("performance/uptme was never logged as a number; "
                                       "there are: step, ")


def test_a_trial_that_is_killed_before_its_first_metric_is_lost(tmp_path):
    job = {"folder": str(tmp_path / "run"), "env": {}, "total": 1000, "downsample": 5,
           "metric": "environment/score",
           "cost": "performance/uptime", "limit": 1e9, "rule": None, "command": [],
           "trainer": str(tmp_path / "die.py")}
    for code in ("import os; os.kill(os.getpid(), 15)", "print('stopped after this epoch')"):
        (tmp_path / "die.py").write_text(code)
        assert sweep_trials.run_trial(job)["status"] == "lost"


def test_the_last_line_of_a_failure_is_not_the_edge_of_a_box():
    box = "╭ Parsing error ───╮\n│ invalid choice   │\n╰──────────────────╯\n"
    assert sweep_trials.explain(2, box) == "exit 2: invalid choice"


def test_a_failure_is_told_by_its_error_not_by_the_advice_after_it():
    text = ("Traceback (most recent call last):\nRuntimeError: the simulator lost its licence\n(environment 0)\n"
            "The last checkpoint is whole: python pufferl.py train mine --resume x\n")
    assert sweep_trials.explain(1, text) == "exit 1: RuntimeError: the simulator lost its licence"


def test_other_weights_to_start_from_are_another_sweep(tmp_path):
    tuner, config = Protein(search_space=FAKE_SPACE), configuration.load_config("squared")
    sweep.begin(Ledger(tmp_path), tuner, sweep.Sweep(), [], config)
    with pytest.raises(SpaceError, match=r"load_model_path: nothing there, a\.pt now"):
        sweep.begin(Ledger(tmp_path), tuner, sweep.Sweep(), [],
                    {**config, "load_model_path": "a.pt"})


def test_optimize_in_python_trains(tmp_path, fake):
    tuner = Protein("squared", FAKE_SPACE, num_trials=4, workers=2, logger="none", early_stop=0,
                    fixed={"data_dir": str(tmp_path), "train": {"gamma": 0.9}})
    best = tuner.optimize()
    results = Ledger(tmp_path / "sweep_squared").results()
    assert len(results) == 4 and best == max(results.values(), key=lambda r: r["score"])["settings"]
    run = next((tmp_path / "sweep_squared" / "runs" / "00000").glob("*/config.json"))
    assert json.loads(run.read_text())["options"]["--train.gamma"] == "0.9"
    with pytest.raises(SpaceError, match="wrokers"):
        Protein("squared", FAKE_SPACE, wrokers=2)
    with pytest.raises(SpaceError, match=r"sweep\.cpus goes with --sweep\.ray"):
        Protein("squared", FAKE_SPACE, cpus=2, fixed={"data_dir": str(tmp_path)}).optimize()


def test_optimize_stopped_before_a_trial_ended_says_so(tmp_path, monkeypatch):
    tuner = Protein("squared", FAKE_SPACE, num_trials=4, workers=1, logger="none",
                    fixed={"data_dir": str(tmp_path)})
    monkeypatch.setattr(sweep.Runner, "next_claim", lambda runner: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match="the next start goes on"):
        tuner.optimize()


def test_trials_are_spread_over_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7")
    seen, release = [], threading.Event()

    def run_trial(job, stop, started):
        seen.append(job["env"]["CUDA_VISIBLE_DEVICES"])
        release.wait(10)
        return {"status": "done"}

    monkeypatch.setattr(sweep_trials, "run_trial", run_trial)
    pool = sweep_trials.LocalPool(workers=2, gpus=2)
    assert pool.slots == 4
    for trial in range(4):
        pool.submit({"trial": trial}, {"env": {}}, None)
    wait_for(lambda: len(seen) == 4, 10)
    assert sorted(seen) == ["3", "3", "5", "5"]
    release.set()
    assert len(pool.close()) == 4
    with pytest.raises(SpaceError, match="names only 3,5,7"):
        sweep_trials.LocalPool(workers=1, gpus=4)


def test_gpus_that_are_not_there_are_refused_before_a_folder_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SpaceError, match=r"sweep\.gpus is 8, but torch finds 2 here"):
        sweep.Runner(Protein("squared", num_trials=2), sweep.Sweep(gpus=8),
                     ["--train.device", "cuda", "--data-dir", str(tmp_path / "runs")])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_trial_that_somebody_else_ends_is_run_again(tmp_path, fake, monkeypatch, how):
    """A training run that is told to stop saves and ends well; one that is killed does not:
    neither ends the trial."""
    monkeypatch.setenv("FAKE_SECONDS", "2")

    def stop_it():
        running = tmp_path / "sweep_squared" / "trials" / "00000.running"
        logs = lambda: list(tmp_path.glob("sweep_squared/runs/00000/*/metrics.jsonl"))  # noqa: E731
        wait_for(lambda: logs() and len(logs()[0].read_text().splitlines()) >= 3)
        os.kill(json.loads(running.read_text())["child"][0], how)

    thread = threading.Thread(target=stop_it)
    thread.start()
    results = run_sweep(tmp_path, 1)[0].results()
    thread.join()
    assert (results[0]["status"] == "done" and results[0]["attempts"] == 2
            and results[0]["curve"][-1][0] == 1.0)
    assert results[0]["cost"] == pytest.approx(results[0]["settings"]["train.total_timesteps"]
                                               / 1000)


def start_sweep(folder, count, workers=2, seconds=1.0):
    """The sweep in a process of its own."""
    code = (f"import sys; sys.path.insert(0, {str(sweep_trials.ROOT)!r}); from tools.sweep import command; "
            f"command.TRAINER = {str(FAKE)!r}; command.main(sys.argv[1:])")
    space = [f"--sweep.{name}.{field}={value}" for name, what in FAKE_SPACE.items()
             for field, value in what.items()]
    others = [f"--sweep.{name}.distribution=none" for name in
              ("train.gamma", "train.gae_lambda", "train.ent_coef", "train.replay_ratio",
               "train.clip_coef",
               "train.vf_coef", "train.max_grad_norm", "train.horizon", "train.minibatch_size",
               "vec.total_agents", "policy.hidden_size")]
    return start(
        [sys.executable, "-c", code, "squared", "--data-dir", str(folder),
         "--sweep.num-trials", str(count),
         "--sweep.workers", str(workers), "--sweep.logger", "none", "--sweep.early-stop", "0",
         *space, *others],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "FAKE_SECONDS": str(seconds)})


@pytest.mark.slow
def test_kill_and_interrupt_lose_nothing(tmp_path):
    """kill -9, then Ctrl-C, then to the end: every trial once, running ones
    resumed where they stood."""
    files = tmp_path / "sweep_squared" / "trials"

    def steps():
        logs = sorted(tmp_path.glob("sweep_squared/runs/*/*/metrics.jsonl"))
        return [len(path.read_text().splitlines()) for path in logs]

    process = start_sweep(tmp_path, 5)
    wait_for(lambda: len(list(files.glob("*.json"))) >= 1 and len(steps()) >= 3
             and steps()[-1] >= 4)
    process.kill()
    process.communicate()
    finished = {path.name: path.read_text() for path in files.glob("*.json")}
    claimed = {path.stem: json.loads(path.read_text())["settings"]
               for path in files.glob("*.running")}
    assert claimed

    process = start_sweep(tmp_path, 5)
    wait_for(lambda: len(list(files.glob("*.json"))) > len(finished))
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and "the same command goes on" in output, output

    process = start_sweep(tmp_path, 5)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    ledger = Ledger(tmp_path / "sweep_squared")
    results = ledger.results()
    assert list(results) == list(range(5)) and {r["status"] for r in results.values()} == {"done"}
    assert all((files / name).read_text() == text for name, text in finished.items())
    assert all(results[int(number)]["settings"] == settings for number, settings in claimed.items()
               if settings)
    # resumed, not begun anew: one run folder each, and the full schedule's cost
    for r in results.values():
        assert len(list((ledger.folder / "runs" / f"{r['trial']:05d}").glob("*/config.json"))) == 1
        assert r["cost"] == pytest.approx(r["settings"]["train.total_timesteps"] / 1000, rel=1e-6)
    assert f"best settings: python pufferl.py train squared --data-dir {tmp_path} --train." in output
    assert {p.suffix for p in files.iterdir()} == {".json"}


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(tmp_path):
    """While the running trial, which would take 10 s, saves."""
    process = start_sweep(tmp_path, 1, workers=1, seconds=200)
    path = tmp_path / "sweep_squared" / "trials" / "00000.running"
    wait_for(lambda: path.exists() and json.loads(path.read_text()).get("child"))
    child = json.loads(path.read_text())["child"]
    try:
        time.sleep(1)  # until it has its own way with signals
        process.send_signal(signal.SIGINT)
        time.sleep(2)
        assert process.poll() is None, "it waits for the trial"
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=5)[0]
        assert process.returncode == -signal.SIGINT and "Traceback" not in output
    finally:
        if sweep_trials.is_alive(*child):
            os.kill(child[0], signal.SIGKILL)


@pytest.mark.slow
def test_two_sweeps_share_a_folder(tmp_path):
    processes = [start_sweep(tmp_path, 8, workers=1, seconds=0.3) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    results = Ledger(tmp_path / "sweep_squared").results()
    assert list(results) == list(range(8))
    assert len({json.dumps(r["settings"]) for r in results.values()}) == 8


def test_what_brings_no_torch():
    """The tuner by itself and the page of a finished sweep start at once."""
    heavy = "{'torch', 'numba', 'ray', 'plotly', 'configuration', 'runs', 'pufferl', 'tools.watch'}"
    code = f"import sys, tools.sweep.command; assert not {heavy} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=sweep_trials.ROOT)
    code = f"import sys, protein; assert not {heavy} & {{*sys.modules}} and 'tools.sweep.command' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=sweep_trials.ROOT)


# -- the command line
# -----------------------------------------------------------------------------------------------


def test_a_damaged_file_of_the_ledger_is_named(tmp_path):
    ledger = Ledger(tmp_path)
    good = {"trial": 0, "status": "done", "settings": {}, "curve": [], "score": 1.0,
            "cost": None, "steps": 1, "error": None}
    others = [json.dumps({**good, **wrong}) for wrong in ({"curve": 5}, {"score": "x"})]
    for content in ("", "{", "5", "[" * 100_000, "{}", *others):
        (ledger.trials / "00000.json").write_text(content)
        with pytest.raises(SpaceError, match=r"00000\.json: damaged \(\w+: .*run again"):
            Ledger(tmp_path).results()
    (ledger.trials / "00000.json").write_text(json.dumps(good))
    assert Ledger(tmp_path).results() == {0: good}
    (tmp_path / "sweep.json").write_text('{"asked": 5}')
    with pytest.raises(SpaceError, match=r"sweep\.json: damaged"):
        sweep_report.load_sweep(tmp_path)


@pytest.mark.parametrize("line", ["", "5", "{", '{"step": "x"}', '{"step": NaN}', '{"step": 1e999}',
                                  "[" * 100_000,
                                  '{"step": 1' + "0" * 400 + "}", '{"step": [1]}', "\ufffd"],
                         ids=range(10))
def test_lines_of_metrics_that_are_none_are_skipped(tmp_path, line):
    path, whole = tmp_path / "metrics.jsonl", '{"step": %d, "environment/score": 2.0, "performance/uptime": 3.0}'
    path.write_text("\n".join([whole % 1, line, whole % 2]))
    assert Curve.read(path, "environment/score").step.tolist() == [1, 2]
    loggers.JsonLines(path, first_step=1)
    assert path.read_text() == whole % 1 + "\n"
    path.write_text("\n".join([whole % 1, line, whole % 2]))
    (tmp_path / "config.json").write_text(json.dumps({"train": {"gamma": 0.9}}))
    assert [entry["step"] for entry in diagnostics.read(tmp_path)[1]] == [1, 2]


def test_split_options():
    own, space, others = sweep.split_options(
        ["--sweep.num-trials", "5", "--sweep.train.learning-rate.max=0.1", "--train.gamma", "0.9",
         "--sweep.web=0", "--help", "--sweep.env.speed.distribution", "none"])
    assert (own == ["--sweep.num-trials", "5", "--sweep.web=0", "--help"]
            and others == ["--train.gamma", "0.9"])
    assert space == {"train.learning_rate": {"max": "0.1"}, "env.speed": {"distribution": "none"}}
    with pytest.raises(SpaceError, match=r"SECTION\.KEY\.FIELD"):
        sweep.split_options(["--sweep.train.gamma", "0.9"])


def test_command_line_errors(tmp_path, capsys):
    for argv, message in ((["nowhere"], "nowhere"),
                          (["squared", "--sweep.train.gama.max", "1"], "Did you mean gamma"),
                          (["report", str(tmp_path)], "neither a sweep"),
                          (["squared", "--sweep.train.gamma.max"],
                           "[sweep.train.gamma] max is missing"),
                          (["squared", "--data-dir", str(tmp_path), "--sweep.web", "99999"],
                           "port must be 0-65535"),
                          (["squared", "--data-dir", "/proc/nowhere"], "/proc/nowhere")):
        with pytest.raises(SystemExit) as error:
            sweep.main(argv)
        assert message in str(error.value), argv
    assert "gamma is given" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        sweep.main(["squared", "--train.num-steps=32", "--env.num-envs", "64", "--data-dir",
                    "/proc/nowhere"])
    told = capsys.readouterr().out
    assert "train.horizon is given" in told and "vec.total_agents is given" in told
    sweep.main([])
    assert "report PATH" in capsys.readouterr().out


# -- what loggers get
# --------------------------------------------------------------------------------------------------


LOGGED = [{**record(0, 0.9, 30.0, **{"train.learning_rate": 0.01, "policy.hidden_size": 64}),
           "steps": 1000.0, "curve": [[0.2, 0.5, 6.0], [0.4, 0.9, 30.0]]},
          {**record(1, None, None, "failed", **{"train.learning_rate": 0.5, "policy.hidden_size": 32}), "curve": []}]


def log_all(kind, folder):
    log = sweep.make_logger(kind, folder, {"project": "pufferl", "entity": None})
    for entry in LOGGED:
        log(entry)


def test_tensorboard_holds_settings_and_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    log_all("tensorboard", tmp_path)
    assert [path.name for path in (tmp_path / "tensorboard").iterdir()] == ["00000"]
    # of two files, either may be read first
    assert len(list((tmp_path / "tensorboard" / "00000").iterdir())) == 1
    events = EventAccumulator(str(tmp_path / "tensorboard" / "00000")).Reload()
    curve = [(event.step, event.value) for event in events.Scalars("sweep/score")]
    assert curve == [(500, pytest.approx(0.5)), (1000, pytest.approx(0.9))]
    assert [event.value for event in events.Scalars("sweep/cost")] == [6.0, 30.0]
    assert events.Scalars("sweep/final_score")[0].value == pytest.approx(0.9)
    session = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = plugin_data_pb2.HParamsPluginData.FromString(session).session_start_info.hparams
    assert {name: value.number_value for name, value in settings.items()} == LOGGED[0]["settings"]


def test_wandb_holds_settings_and_curves(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs the package wandb")
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    log_all("wandb", tmp_path)
    wandb.teardown()  # what its process still held is written
    runs = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(runs) == 2
    seen = {}
    for path in runs:
        records = list(wandb_records(path))
        run = next(r.run for r in records if r.WhichOneof("record_type") == "run")
        settings = {item.key: json.loads(item.value_json) for item in run.config.update}
        rows = [{item.key or ".".join(item.nested_key): json.loads(item.value_json)
                 for item in r.history.item}
                for r in records if r.HasField("history")]
        code = next(r.exit.exit_code for r in records if r.HasField("exit"))
        seen[run.display_name] = run.run_group, list(run.tags), code
        entry = LOGGED[int(run.display_name)]
        assert {name: settings[name] for name in entry["settings"]} == entry["settings"]
        assert [(row["global_step"], row["sweep/score"], row["sweep/cost"]) for row in rows] == (
            [(500, 0.5, 6.0), (1000, 0.9, 30.0)] if entry["curve"] else [])
    assert seen == {"00000": (tmp_path.name, ["done"], 0), "00001": (tmp_path.name, ["failed"], 1)}


def test_a_logger_that_fails_does_not_end_the_sweep(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("in the way")
    log_all("tensorboard", tmp_path)
    assert "trial 0 was not logged to tensorboard" in capsys.readouterr().err


# -- real clusters and real training (slow)
# ----------------------------------------------------------------------------


@pytest.mark.slow
def test_ray_on_two_nodes_one_of_which_is_lost(tmp_path, fake, monkeypatch):
    """Trials spread over both nodes; those of a node that goes down are run
    again; each counts once."""
    pytest.importorskip("ray", reason="the cluster; pip install ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("FAKE_SECONDS", "8")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        second = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        files = tmp_path / "sweep_squared" / "trials"

        def has_begun_there():
            with contextlib.suppress(psutil.Error):
                node = psutil.Process(second.all_processes["raylet"][0].process.pid)
                return any(FAKE.name in " ".join(child.cmdline())
                           and time.time() - child.create_time() < 3
                           for child in node.children(recursive=True))
            return False

        def lose_a_node():
            wait_for(lambda: len(list(files.glob("*.json"))) >= 2 and has_begun_there(), 120)
            cluster.remove_node(second, allow_graceful=False)

        thread = threading.Thread(target=lose_a_node)
        thread.start()
        ledger, _ = run_sweep(tmp_path, 8, ray=cluster.address, early_stop=0, workers=4)
        thread.join()
    finally:
        cluster.shutdown()
    results = ledger.results()
    assert list(results) == list(range(8)) and {r["status"] for r in results.values()} == {"done"}
    assert max(r["attempts"] for r in results.values()) >= 2, "the lost node was running trials"
    assert not ledger.claims() and all(len(r["curve"]) == 5 for r in results.values())


def steps_to(run, score):
    """After how many steps a training run had this score; infinity if it never had."""
    curve = Curve.read(run / "metrics.jsonl", "environment/score")
    return min(curve.step[curve.score >= score], default=math.inf)


@pytest.mark.slow
def test_a_real_sweep_tunes_a_detuned_squared_again(tmp_path):
    """Through the command line, with the real trainer: from a tenth of the shipped learning rate
    and eight times its minibatch, to the shipped settings' steps to a score of 0.9, or 25% more.
    With both cores of a small machine to itself it takes some five minutes."""
    shipped = tmp_path / "shipped"
    subprocess.run([sys.executable, str(sweep_trials.ROOT / "pufferl.py"), "train", "squared",
                    "--data-dir", str(shipped)],
                   check=True, capture_output=True, timeout=3600)
    known = steps_to(next(shipped.glob("*")), 0.9)
    assert math.isfinite(known)
    space = {"train.learning_rate.mean": 0.003, "train.minibatch_size.mean": 32768,
             "train.total_timesteps.max": 4_000_000}
    kept = ("gamma", "gae_lambda", "replay_ratio", "clip_coef", "vf_coef",
            "max_grad_norm", "horizon")
    space |= {f"train.{key}.distribution": "none" for key in kept} | {"vec.total_agents.distribution": "none"}
    command = [sys.executable, str(sweep_trials.ROOT / "protein.py"), "squared", "--data-dir",
               str(tmp_path),
               "--sweep.num-trials", "60", "--sweep.workers", "2", "--sweep.cost", "step",
               "--policy.hidden-size", "64",
               *(f"--sweep.{name}={value}" for name, value in space.items())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "policy.hidden_size is given, so it is not searched" in done.stdout
    folder = tmp_path / "sweep_squared"
    results = Ledger(folder).results()
    assert len(results) == 60 and {r["status"] for r in results.values()} <= {"done", "stopped"}
    first = results[0]["settings"]
    assert first["train.learning_rate"] == 0.003 and first["train.minibatch_size"] == 32768
    steps = {number: steps_to(folder / r["run"], 0.9) for number, r in results.items()}
    print(f"steps to 0.9: shipped {known:,.0f}; by trial {steps}")
    assert steps[0] > 2 * known, "where it began it must be slow, or this test shows nothing"
    assert min(steps.values()) <= 1.25 * known
    assert (folder / "report.html").exists() and list((folder
                                                       / "tensorboard").glob("00000/events*"))
