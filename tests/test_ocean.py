"""The loader of the environments in C: settings, addresses, headers of a user, caches, drawing."""

import gc
import stat
import subprocess
import sys
import weakref

import numpy as np
import pytest
from ocean_vector import ROOT, Vector, run_python

import ocean
from errors import ConfigError
from vector import Native


@pytest.mark.parametrize(("name", "options", "subject"), [
    ("breakout", {"ball_speed": float("nan")}, "ball_speed"),
    ("squared", {"distance": 2**31}, "distance"),
    ("snake", {"width": 4, "height": 4}, "num_food"),
    ("trash_pickup", {"num_bins": 5, "width": 5, "height": 5}, "num_bins"),
    ("moba", {"bot_range": 0.5, "bot_skill": 0.4}, "bot_range"),
    ("nmmo3", {"width": 60, "height": 60}, "world"),
    ("nmmo3", {"num_agents": 16000}, "16384"),
])
def test_wrong_settings(name, options, subject):
    """By type, or beside other settings; test_ocean_golden.py has the bounds of each alone."""
    with pytest.raises(ConfigError, match=subject):
        ocean.load(name).create(2, settings=options)


def test_settings_for_each_environment():
    vector = Vector("cartpole", 2, [{"max_steps": 2}, {"max_steps": 3}])
    assert [vector.step([0, 1]).truncations.tolist() for _ in range(3)] == [[0, 0], [1, 0], [0, 1]]
    # Agents may differ in number, as long as each of them sees the same.
    options = [{"num_agents": 2, "num_goals": 2}, {"num_agents": 1, "num_goals": 3}]
    mixed = ocean.load("target").create(2, settings=options)
    assert mixed.agent_offsets.tolist() == [0, 2, 3] and mixed.observation_shape == (9,)


def test_arrays_of_several_sizes():
    """Each environment plays as it does alone, and a saved state restores all of them."""
    options = [{"size": 3}, {"size": 20, "loops": 0.5}, {"size": 2}]
    whole = Vector("maze", 3, options, seed=5)
    alone = [Vector("maze", 1, one, seed=5, first_env=i) for i, one in enumerate(options)]
    assert whole.envs.heap.size == sum(vector.envs.heap.size for vector in alone)
    rng, saved, seen = np.random.default_rng(0), whole.envs.save(), []
    actions = rng.integers(0, 4, (500, 3, 1))
    for _ in range(2):
        whole.envs.load(saved)
        seen.append([whole.step(row).observations.copy() for row in actions])
    assert np.array_equal(*seen)
    for i, vector in enumerate(alone):
        for row, observations in zip(actions, seen[0], strict=True):
            assert np.array_equal(vector.step(row[i : i + 1]).observations[0], observations[i])


def test_wrong_calls():
    envs = (vector := Vector("snake", 2)).envs
    for span in ((0, 3), (-1, 2), (2, 1)):
        with pytest.raises(IndexError):
            envs.step(vector.rows, *span)
    saved = envs.save()
    with pytest.raises(ValueError, match="saved"):
        envs.load(saved[:-1])
    envs.close()
    for call in (lambda: envs.step(vector.rows), lambda: envs.load(saved), envs.render, envs.log,
                 envs.keys):
        with pytest.raises(RuntimeError, match=r"^snake:"):
            call()


def test_forgotten_environments_are_freed(monkeypatch):
    blocks, create = [], ocean.Library.create

    def record(*arguments, **options):
        envs = create(*arguments, **options)
        blocks.extend(map(weakref.ref, (envs.memory, envs.heap)))
        return envs

    monkeypatch.setattr(ocean.Library, "create", record)
    Native("snake", 2, num_buffers=1)
    with pytest.raises(ValueError, match="num_buffers"):
        Native("snake", 3, num_buffers=2)
    gc.collect()
    assert len(blocks) == 4 and not any(block() is not None for block in blocks)


# Headers of a user: dead agents and action masks; or all that is optional left out

OWN = """
#define OBSERVATION int16_t
#define LOG(X) X(perf) X(score) X(episode_return) X(episode_length) X(n) X(own)
#define SETTINGS(X) X(int, agents, 2, "agents") X(float, step, 0.5, "size")
#define HAS_VALID
#define HAS_ACTION_MASKS
#include "env.h"
struct Env { ENV_COMMON int tick, counts[3]; };
static const char* c_init(Env* env) { return env->agents < 1 ? "agents must be 1 or more" : NULL; }
static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){.num_agents = env->agents, .observation_shape = {2, 1}, .observation_low = -300,
                       .observation_high = 300, .action_heads = {3, 2}};
}
static void write(Env* env) {
    for (int i = 0; i < env->agents; i++) {
        env->observations[2 * i] = (int16_t)env->counts[i];
        env->observations[2 * i + 1] = (int16_t)env->tick;
        env->valid[i] = (env->tick + i) % 2;
        for (int k = 0; k < 5; k++) env->action_masks[5 * i + k] = (k + env->tick) % 2;
    }
}
static void c_reset(Env* env) { env->tick = 0; write(env); }
static void c_step(Env* env) {
    env->tick++;
    for (int i = 0; i < env->agents; i++) {
        env->counts[i] += env->actions[2 * i] - env->actions[2 * i + 1];
        env->rewards[i] = env->step; env->terminals[i] = env->truncations[i] = 0;
    }
    env->log.own += 3; env->log.n += 1;
    write(env);
}
static void c_render(Env* env) { (void)env; }
"""
SMALL = """
#define OBSERVATION int32_t
#include "env.h"
enum { HOLD, FIRE };
enum { RANGE = 3 << 29 };
struct Env { ENV_COMMON int tick; };
static const char* c_init(Env* env) { return NULL; }
static void c_spaces(const Env* env, Spaces* spaces) {
    *spaces = (Spaces){.num_agents = 1, .observation_shape = {1}, .observation_high = RANGE, .action_heads = {2}};
}
static void c_reset(Env* env) { env->tick = 0; env->observations[0] = random_int(&env->rng, RANGE); }
static void c_step(Env* env) {
    env->tick++;
    env->rewards[0] = env->actions[0] == FIRE;
    env->terminals[0] = env->tick == 2;
    env->truncations[0] = 0;
    if (env->terminals[0]) LOG_EPISODE(env, 0.25f, 7, 3 + 1, env->tick);
    if (env->terminals[0]) c_reset(env);
    else env->observations[0] = random_int(&env->rng, RANGE);
}
static void c_render(Env* env) {}
"""


def load_text(tmp_path, text, name="small.h"):
    (tmp_path / name).write_text(text)
    return ocean.load(str(tmp_path / name))


def test_a_header_with_dead_agents_and_masks(tmp_path):
    vector = Vector(str(load_text(tmp_path, OWN).header), 2, [{"agents": 1}, {"agents": 3}])
    envs = vector.envs
    assert envs.has_valid and envs.has_action_masks and envs.action_heads == [3, 2]
    assert envs.observation_dtype == np.int16 and envs.observation_shape == (2, 1)
    assert vector.valid.tolist() == [0, 0, 1, 0] and vector.action_masks.tolist() == [[0, 1, 0, 1, 0]] * 4
    vector.step([[2, 0], [0, 1], [1, 0], [2, 1]])
    assert vector.observations[:, :, 0].tolist() == [[2, 1], [-1, 1], [1, 1], [1, 1]]
    assert vector.valid.tolist() == [1, 1, 0, 1] and vector.action_masks.tolist() == [[1, 0, 1, 0, 1]] * 4
    assert (vector.rewards == 0.5).all()
    saved = envs.save()
    vector.step()
    envs.load(saved)
    vector.step([[0, 0]] * 4)
    assert vector.observations[:, :, 0].tolist() == [[2, 2], [-1, 2], [1, 2], [1, 2]]
    # The log is part of the saved state: two steps of two environments remain of three.
    assert envs.log() == {"perf": 0, "score": 0, "episode_return": 0, "episode_length": 0, "own": 3, "n": 4}
    assert vector.guards_are_whole()
    with pytest.raises(ValueError, match="environment 1"):
        envs.library.create(2, settings=[{}, {"agents": 0}])


def test_a_header_may_leave_out_all_that_is_optional(tmp_path):
    library = load_text(tmp_path, SMALL)
    assert library.settings == {} and not library.has_valid and not library.has_action_masks
    assert library.log_fields == ["perf", "score", "episode_return", "episode_length", "n"]
    assert library.fps == 30 and not library.by_turns and library.create(1).keys() == ([], 0)
    vector, counts = Vector(library.header, 64), np.zeros(3)
    for _ in range(500):
        vector.step(np.ones(64))
        counts += np.bincount(vector.observations.ravel() % 3, minlength=3)
    assert vector.envs.log() == {"perf": 0.25, "score": 7, "episode_return": 4,
                                 "episode_length": 2, "n": 250 * 64}
    # Random integers: the upper half of a draw times 3 << 29 alone is two thirds of the numbers 3
    # times in 8, the others 2 times. 4 deviations; with that bias 0.08.
    assert np.abs(counts / counts.sum() - 1 / 3).max() < 0.01


@pytest.mark.parametrize(("field", "wrong"), [
    (".observation_shape = {1}", ".observation_shape = {0}"),
    (".observation_shape = {1}", ".observation_shape = {1, -2}"),
    (".action_heads = {2}", ""),
    (".action_heads = {2}", ".action_heads = {2}, .action_dims = 1"),
    (".action_heads = {2}", ".action_heads = {2, -2}"),
    (".action_heads = {2}", ".action_dims = -1"),
    (".observation_high = RANGE", ".observation_low = 1"),
    (".observation_high = RANGE", ".observation_high = 3e9f"),
])
def test_wrong_spaces_of_a_header_are_named(field, wrong, tmp_path):
    subject = wrong.split(" ")[0] or ".action_heads"
    with pytest.raises(ValueError, match=rf"^small: .*\{subject}"):
        load_text(tmp_path, SMALL.replace(field, wrong)).create(2)


def test_a_header_declares_its_keys_and_its_speed(tmp_path):
    lines = ["#define OWN_LOG(X) X(hits)", "#define BY_TURNS", "#define CLICK_COLUMNS 3",
             "#define KEYS(KEY) KEY(0, X, FIRE) KEY(0, 7, HOLD) \\",
             "    KEY(0, REST, HOLD) KEY(0, LEFT, 2) KEY(1, A, 0)"]
    library = load_text(tmp_path, "\n".join(lines) + SMALL)
    assert library.by_turns and library.fps == 10 and library.log_fields[-1] == "hits"
    keys, columns = library.create(1).keys()
    assert columns == 3
    assert keys == [(0, 0, "REST", 0), (0, ord("X"), "X", 1), (0, ord("7"), "7", 0)]
    assert load_text(tmp_path, "#define FPS 50" + SMALL).fps == 50


def test_an_edited_header_is_loaded_again(tmp_path):
    before = load_text(tmp_path, OWN)
    assert ocean.load(str(before.header)) is before
    assert stat.S_IMODE(before.path.stat().st_mode) == 0o755
    after = load_text(tmp_path, OWN.replace('"size")', r'"a \"size\", C:\\,\n" "or two")'))
    assert after.settings_help["step"] == 'a "size", C:\\,\nor two'
    assert before.settings_help["step"] == "size"


def test_an_edited_file_that_a_header_includes(tmp_path, capsys):
    """Also in a folder whose name make would split; its warnings are printed once."""
    rules = tmp_path / "my # rules" / "step.h"
    rules.parent.mkdir()
    rules.write_text("#define STEP 1\n")
    text = SMALL.replace("env->tick++;", "env->tick += STEP; if (env->tick = 3) env->tick = 0;")
    text = text.replace('"env.h"', '"env.h"\n#include "my # rules/step.h"')
    before = load_text(tmp_path, text)
    assert capsys.readouterr().err.count("-Wparentheses") == 1
    assert load_text(tmp_path, text) is before and not capsys.readouterr().err
    rules.write_text("#define STEP 2\n")
    assert load_text(tmp_path, text).path != before.path


@pytest.mark.parametrize(("right", "wrong", "subject"), [
    ("c_render(", "c_rendr(", "c_render"),
    ("env->tick++;", "env->tick = next(env->tick);", "next"),
    ('"env.h"', '"absent.h"', "absent"),
])
def test_compiler_message_is_shown(right, wrong, subject, tmp_path):
    with pytest.raises(ConfigError, match=f"error:.*{subject}"):
        load_text(tmp_path, SMALL.replace(right, wrong))


# Processes of their own


def copy_ocean(folder):
    """The code with which a process loads squared from a copy of ocean/."""
    for path in (ROOT / "ocean").rglob("*.*"):
        if path.suffix in (".py", ".h", ".c") and path.is_file():
            (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(ROOT)).write_bytes(path.read_bytes())
    return f"""
import sys, warnings
sys.path.insert(0, {str(folder)!r})
warnings.showwarning = lambda text, *_: print(text)
import ocean
try: print(ocean.load("squared").path)
except ValueError as error: print(error)
"""


def test_two_processes_compile_at_once(tmp_path):
    code = copy_ocean(tmp_path)
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    assert len(list((tmp_path / "ocean" / ".build").iterdir())) == 1


def test_cache_elsewhere_and_no_compiler(tmp_path):
    code = copy_ocean(tmp_path)
    (tmp_path / "ocean" / ".build").write_text("in the way, as in a tree that cannot be written")
    path = run_python(code, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert path.startswith(str(tmp_path / "cache" / "ocean" / "squared-"))
    assert "gcc" in run_python(code, PATH=str(tmp_path), CC="")
    assert "'no-such-compiler'" in run_python(code, CC="no-such-compiler")
    assert "'ccache gcc'" in run_python(code, CC="ccache gcc")


BESIDE_PYGAME = """
import sys
sys.path[:0] = ["tests", "."]
from ocean_vector import Vector
def use_pygame():
    import pygame
    pygame.init()
    surface = pygame.display.set_mode((64, 48))
    surface.fill((255, 0, 0))
    pygame.display.flip()
    assert pygame.image.tobytes(surface, "RGB")[:3] == bytes([255, 0, 0])
vector = Vector("squared", 1)
pictures = []
for step in sys.argv[1:]:
    use_pygame() if step == "pygame" else pictures.append(vector.envs.render(0))
assert (pictures[0] == pictures[-1]).all() and pictures[0].max() > 200
try: vector.envs.render(1)
except IndexError: print("both")
"""


@pytest.mark.parametrize("order", ["raylib pygame raylib", "pygame raylib pygame raylib"])
def test_drawing_beside_pygame(order):
    """Both wheels bring an SDL of their own, which must not take the other's functions."""
    pytest.importorskip("raylib", reason="drawing needs the raylib_software wheel")
    pytest.importorskip("pygame", reason="needs pygame, of the extras")
    assert "both" in run_python(BESIDE_PYGAME, *order.split(), SDL_VIDEODRIVER="dummy",
                                SDL_AUDIODRIVER="dummy")


def test_training_needs_no_raylib():
    assert "stepped" in run_python("""
import sys
sys.modules["raylib"] = None
sys.path[:0] = ["tests", "."]
from ocean_vector import Vector
try: Vector("breakout", 1).step().envs.render(0)
except ValueError: print("stepped")
""")
