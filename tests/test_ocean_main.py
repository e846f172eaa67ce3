"""`python -m ocean`: planted bugs are found; pictures need no window."""

import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from conftest import slow_but

import ocean
import ocean.__main__ as cli

ROOT = Path(__file__).resolve().parent.parent

# A sound environment: a walk of 4 numbers that ends at random, or is cut after 50 steps.
SOUND = """
#define OBSERVATION float
#define LOG(X) X(perf) X(score) X(episode_return) X(episode_length) X(n)
#define SETTINGS(X)
#define HAS_ACTION_MASKS
#include "env.h"
struct Env { ENV_COMMON float at[4]; int tick; };
static const char* c_init(Env* env) { (void)env; return NULL; }
static void c_spaces(const Env* env, Spaces* spaces) {
    (void)env;
    *spaces = (Spaces){.num_agents = 1, .observation_shape = {4}, .observation_low = -1, .observation_high = 1,
                       .action_heads = {4}};
}
static void write_observation(Env* env, float* observation) {
    for (int i = 0; i < 4; i++) observation[i] = env->at[i];
    if (env->action_masks) for (int i = 0; i < 4; i++) env->action_masks[i] = 1;
}
static void c_reset(Env* env) {
    env->tick = 0;
    for (int i = 0; i < 4; i++) env->at[i] = random_float(&env->rng, -0.1f, 0.1f);
    write_observation(env, env->observations);
}
static void c_step(Env* env) {
    env->rewards[0] = 0; env->terminals[0] = env->truncations[0] = 0;
    env->at[env->actions[0]] = clampf(env->at[env->actions[0]] + 0.1f, -1, 1);
    env->tick++;
    bool over = random_int(&env->rng, 20) == 0, late = !over && env->tick >= 50;
    env->rewards[0] = over;
    if (!over && !late) { write_observation(env, env->observations); return; }
    env->terminals[0] = over; env->truncations[0] = late;
    if (WANTS_FINAL(env, late)) write_observation(env, env->final_observations);
    env->log.perf += 0.5f; env->log.episode_return += over; env->log.n += 1;
    c_reset(env);
}
static void c_render(Env* env) { (void)env; }
"""
ENDS = "random_int(&env->rng, 20) == 0, late = !over && env->tick >= 50"
REWARD, OBSERVE, FINAL = "env->rewards[0] = over;", "observation[i] = env->at[i];", "if (WANTS_FINAL(env, late))"
PLANTED = {  # what is replaced, by what (..., in turn), and what the problem or the note is about
    "stale": (OBSERVE, "if (i) observation[i] = env->at[i];", "problem", r"step.1:.*observations"),
    "unwritten reward": ("env->rewards[0] = 0; env->terminals[0]", "env->terminals[0]",
                         REWARD, "if (over) env->rewards[0] = 1;", "problem", r"step.1:.*rewards"),
    "range": ("+ 0.1f, -1, 1)", "+ 0.1f, -2, 2)", "problem", r"observation.\[.*-1\.0"),
    "nan": (REWARD, "env->rewards[0] = over ? NAN : 0;", "problem", r"step.6:.*reward.*nan"),
    "rand": ("random_int(&env->rng, 20) == 0", "rand() % 20 == 0", "problem", "rand\\(\\)"),
    "static": ("env->tick++;", "static int t; env->tick++; env->at[0] = (float)(t++ % 100) / 100;",
               "problem", "static"),
    "no end": (ENDS, "false, late = false", "problem", r"terminals.*truncations"),
    "no log": ("env->log.n += 1;", "", "problem", r"log\.n"),
    "perf": ("env->log.perf += 0.5f;", "env->log.perf += 5;", "problem", r"log\.perf.*5"),
    "final": (FINAL, "if (false)", "problem", r"step.50:.*final"),
    "final too often": (FINAL, "if (env->final_observations)", "problem", r"step.6:.*final.*truncated"),
    "final of the terminated": (FINAL, "if (late && env->final_observations)", "note", "WANTS_FINAL"),
    "final out of bounds": (FINAL, "if (WANTS_FINAL(env, late) && (env->at[0] += 9))", "problem",
                            r"step.6:.*final.*-1\.0"),
    "flag": ("env->terminals[0] = over;", "env->terminals[0] = 2 * over;", "problem", "terminals.*2"),
    "mask": ("env->action_masks[i] = 1;", "env->action_masks[i] = 0;", "problem", r"step.1:.*legal"),
    "outside": ("write_observation(env, env->observations); return;",
                "write_observation(env, env->observations); env->rewards[1] = 1; return;",
                "problem", "outside.*buffer"),
    "no reset": ("for (int i = 0; i < 4; i++) env->at[i] = random_float(&env->rng, -0.1f, 0.1f);",
                 "env->at[0] = random_float(&env->rng, 0, 1) * 0;", "note", "c_reset"),
    "log": ("env->log.perf += 0.5f;", "env->log.perf += 0.5f; env->log.score += NAN;", "problem",
            "finite.*score"),
    "vast reward": (REWARD, "env->rewards[0] = over * 5000;", "note", "^rewards.*5000"),
    "another return": ("env->log.episode_return += over;", "env->log.episode_return += ++env->log.score;",
                       "note", r"log\.episode_return"),
    "constant": (OBSERVE, "observation[i] = i == 2 ? 0.5f : env->at[i];", "note", r"1.of.4.*2\)"),
    "no reward": (REWARD, "", "note", "^no.reward"),
    "sum": (REWARD, "env->log.score += over; env->rewards[0] = over ? env->log.score : 0;", "note",
            "29.99.*90.32"),
    "unscaled": (".observation_low = -1, .observation_high = 1", ".observation_low = -1e6, .observation_high = 1e6",
                 OBSERVE, "observation[i] = 1e5f * env->at[i];", "note", r"observations.*1e\+05"),
    "in step": (ENDS, "env->tick == 20, late = false", "note", "stagger"),
    "seedless": ("random_float(&env->rng, -0.1f, 0.1f)", "0", "random_int(&env->rng, 20) == 0",
                 "env->tick == 20 + env->actions[0]", "note", "seed"),
    "blind": (OBSERVE, "observation[i] = 0.5f;", "note", r"4.of.4"),
    "save": ("(void)env; return NULL;",
             "static float kept[2048][4]; static int n; env->at = kept[n++ % 2048]; return NULL;",
             "problem", "pointer"),
    "load": ("#define HAS_ACTION_MASKS", "#define HAS_ACTION_MASKS\n#define HEAP(X) X(float*, map, 1)",
             "    env->tick = 0;", "env->tick = 0; if (!*env->map) *env->map = calloc(1, 4);",
             "env->tick++;", "env->tick++; env->at[1] = fmodf(++**env->map, 600) / 600;", "problem", "HEAP"),
    "infinite": (".observation_low = -1, .observation_high = 1",
                 ".observation_low = -INFINITY, .observation_high = INFINITY",
                 OBSERVE, "observation[i] = env->tick > 9 ? INFINITY : env->at[i];", "problem", "inf, outside"),
    "no terminal": ("env->terminals[0] = over;", "", "note", r"log\.n.*missing"),
    "counter": ("    env->tick = 0;", "", "over = random_int(&env->rng, 20) == 0", "over = false", "note",
                "one step.*counter"),
}
SANITIZED = {  # what no comparison can see: the sanitizers stop the program
    "heap": ("(void)env; return NULL;", "env->at = malloc(3 * sizeof(float)); return NULL;",
             "heap-buffer-overflow"),
    "overflow": ("env->tick++;",
                 "env->tick++; env->log.score += (float)(INT32_MAX - 10 + env->tick);", "overflow"),
    "final of none": (FINAL, "if (late || over && env->every_final)", "null pointer"),  # a C program has none
}


def plant(tmp_path, source):
    header = tmp_path / "planted.h"
    header.write_text(source.replace("float at[4];", "float* at;") if "env->at = " in source
                      else source)
    return str(header)


def run(tmp_path, source):
    return cli.check(ocean.load(plant(tmp_path, source)), {}, steps=20_000)


def test_a_sound_environment_is_clean(tmp_path):
    assert run(tmp_path, SOUND) == ([], [])


@pytest.mark.parametrize("bug", slow_but(PLANTED, *list(PLANTED)[::3]))
def test_planted_bugs_are_found(tmp_path, bug):
    *edits, kind, pattern = PLANTED[bug]
    source = SOUND
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert old in SOUND
        source = source.replace(old, new)
    problems, notes = run(tmp_path, source)
    texts = problems if kind == "problem" else notes
    assert any(re.search(pattern, text) for text in texts), problems + notes


def test_a_reward_is_looked_at_on_each_step(tmp_path):
    """After 3,000 steps only each sixteenth is compared."""
    source = SOUND.replace("env->rewards[0] = over;", "env->rewards[0] = (env->log.score += 1) == 3500 ? NAN : over;")
    (problem,), _ = cli.check(ocean.load(plant(tmp_path, source)), {}, steps=40_000)
    assert re.search(r"step.3500:.*reward.*nan", problem)


def command(*arguments):
    return subprocess.run([sys.executable, "-m", "ocean", *arguments], cwd=ROOT,
                          capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("bug", SANITIZED)
def test_sanitizers_stop_the_check(tmp_path, bug):
    old, new, word = SANITIZED[bug]
    assert old in SOUND
    result = command(plant(tmp_path, SOUND.replace(old, new)), "--check", "--steps", "2000")
    if re.search(r"no.sanitizers", result.stderr):
        pytest.skip("needs the compiler's sanitizers")
    assert word in result.stderr and "planted.h:" in result.stderr and result.returncode != 0


def test_memory_that_nobody_frees(tmp_path):
    source = SOUND.replace("env->tick++;", "env->tick++; void* volatile lost = malloc(64); (void)lost;")
    result = command(plant(tmp_path, source), "--check", "--steps", "20000")
    if re.search(r"no.sanitizers", result.stderr):
        pytest.skip("needs the compiler's sanitizers")
    assert re.search(r"memory.*\d,\d+,\d+.*1,250", result.stdout), result.stdout
    result = command("snake", "--check", "--steps", "20000")  # its observations are large
    assert "memory" not in result.stdout, result.stdout


def test_command_line(tmp_path):
    assert command().stdout.split() == ocean.names()
    for arguments, name in ((["sqared"], "squared"), (["squared", "--set", "distanc=3", "--png", "x.png"], "distance")):
        result = command(*arguments)
        assert result.returncode != 0 and name in result.stderr
    pytest.importorskip("raylib", reason="drawing needs the raylib_software wheel")
    from PIL import Image

    picture = tmp_path / "squared.png"
    drawn = command("squared", "--set", "distance=3", "--png", str(picture), "--steps", "2")
    assert drawn.returncode == 0 and "RAYLIB" not in drawn.stderr  # nothing of raylib's own start
    assert drawn.stdout.count("\n") == 1 and str(picture) in drawn.stdout
    assert Image.open(picture).size == (714, 714)


def test_a_key_that_saves_a_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("raylib", reason="drawing needs the raylib_software wheel")
    from PIL import Image

    f12, right = 301, 262  # KEY_F12, KEY_RIGHT of raylib.h
    # first: without a display it sets the driver for all that is drawn later in this process
    raylib = ocean._raylib()
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    is_closed = mock.Mock(side_effect=[False] * 5 + [True])
    monkeypatch.setattr(raylib, "WindowShouldClose", is_closed)
    monkeypatch.setattr(raylib, "IsKeyPressed", lambda key: key == f12 and is_closed.call_count == 3)
    monkeypatch.setattr(raylib, "IsKeyDown", lambda key: key == right)
    monkeypatch.chdir(tmp_path)
    cli.play(ocean.load("breakout"), {}, at_random=False, seed=0)
    png, = tmp_path.iterdir()
    assert png.name in capsys.readouterr().out
    with Image.open(png) as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("RGB").getcolors(1 << 16)) > 2, "a blank picture"


def test_sanitizers_of_any_compiler(tmp_path, monkeypatch):
    (tmp_path / "cc").symlink_to(ocean.find_compiler())
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(cli.os, "execve", lambda path, arguments, environment: None)
    assert not cli.restart_with_sanitizers()


@pytest.mark.parametrize("debug", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_program_without_python(tmp_path, monkeypatch, capsys, debug):
    monkeypatch.setattr(cli, "find_raylib", lambda compiler: None)
    cli.standalone(ocean.load("squared"), {"distance": 1234567}, tmp_path / "program", debug)
    assert f"{tmp_path / 'program'} distance=1234567" in capsys.readouterr().out
    result = subprocess.run([tmp_path / "program", "distance=2", "--episodes", "7"],
                            capture_output=True, text=True)
    assert result.returncode == 0 and re.search(r"^n +7$", result.stdout, re.M), result.stderr
    assert b".debug_info" in (tmp_path / "program").read_bytes(), "perf reads it"
    assert (b"__asan" in (tmp_path / "program").read_bytes()) == debug


def test_a_program_with_the_systems_raylib(tmp_path, monkeypatch, capsys):
    """It compiles; test_export.py plays the same file in a browser, in raylib's place."""
    unresolved = ["-Wl,--unresolved-symbols=ignore-all"]
    monkeypatch.setattr(cli, "find_raylib", lambda compiler: unresolved)
    monkeypatch.setattr(sys, "argv", ["ocean", "squared", "--standalone", str(tmp_path / "program")])
    assert cli.main() == 0
    assert "with a window" in capsys.readouterr().out


@pytest.mark.parametrize(("drift", "expected"), [(0.0, 0), (1.0, 50)])
def test_returns_of_random_play(drift, expected):
    """The agents of an environment share their rewards."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(50):
        played = cli.RandomPlay(2)
        for episode in range(40):
            rewards = np.repeat(rng.normal(drift * episode, 1, 2), 20)
            played.add(rewards, np.zeros(40, bool))
            played.add(rewards, np.ones(40, bool))
        found += played.find_drift() is not None
    assert found == expected
