"""The sentences that users read. Each is asserted here alone; other tests name an error's type and
the setting.

A row is (subject, type, sentence, cause). The cause is a command line of squared, which is read
and not run, or a function that fails; it may take a folder (`path`). The type None stands for a
message that is printed. The sentence is a part of the message that contains no path.
"""

import inspect
import shlex

import gymnasium
import numpy as np
import pytest

import configuration
import ocean
import ocean.gymnasium
import vector

CONFIGURATION = [
    ("train.horizon", configuration.ConfigError, "train.horizon", "--train.horizon 0"),
]

RUNS = []  # run folders, checkpoints, loggers, names from PufferLib

TRAINER = []  # trainer, engines, models, diagnostics, processes of one run

ENVIRONMENTS = []  # emulation, vector, workers, tensors, environments


def create(name, num_envs=2, **settings):
    return lambda: ocean.load(name).create(num_envs, settings=settings)


def step_gym(name, action):
    def step():
        env = ocean.gymnasium.OceanEnv(name)
        env.reset(seed=0)
        env.step(action)

    return step


def compile_small(right, wrong):
    from test_ocean import SMALL, load_text

    return lambda path: load_text(path, SMALL.replace(right, wrong)).create(2)


def check_planted(bug):
    from test_ocean_main import PLANTED, SOUND, plant

    import ocean.__main__ as cli

    source = SOUND.replace(*PLANTED[bug][:2]) if bug else SOUND
    return lambda path: cli.run_check(ocean.load(plant(path, source)), {}, 20_000)


OCEAN = [
    ("breakot", ValueError, "did you mean breakout", lambda: ocean.load("breakot")),
    ("CartPole-v1", ValueError, "Gymnasium's is gym/CartPole-v1", lambda: ocean.load("CartPole-v1")),
    ("breakout", ValueError, "no setting 'framskip': did you mean frameskip", create("breakout", framskip=4)),
    ("frameskip", TypeError, "must be an integer of 32 bits, got 4.5", create("breakout", frameskip=4.5)),
    ("continuous", TypeError, "must be true or false", create("breakout", continuous=2)),
    ("ball_speed", TypeError, "must be a finite number of 32 bits", create("breakout", ball_speed=1e300)),
    ("max_ball_speed", ValueError, "must be at most 512", create("breakout", max_ball_speed=2000.0)),
    ("komi", ValueError, "no integer", create("go", komi=7.0)),
    ("settings", ValueError, "is a list of 1, but there are 2 environments",
     lambda: ocean.load("cartpole").create(2, settings=[{}])),
    ("cartpole", ValueError, "must have the same spaces",
     lambda: ocean.load("cartpole").create(2, settings=[{}, {"continuous": True}])),
    ("rows", ValueError, "must be contiguous",
     lambda: ocean.rows(np.zeros((4, 4))[:, ::2], None, None, None, None)),
    ("snake", RuntimeError, "these environments are closed",
     lambda: (envs := ocean.load("snake").create(2), envs.close(), envs.save())),
    ("snake", ValueError, "was not saved from 2 environments",
     lambda: ocean.load("snake").create(2).load(ocean.load("snake").create(3).save())),
    ("num_buffers", ValueError, "can be 1, 3", lambda: vector.Native("snake", 3, num_buffers=2)),
    (".num_agents", ValueError, "c_spaces gives no .num_agents", compile_small(".num_agents = 1", ".num_agents = 0")),
    ("small.h", RuntimeError, "does not compile", compile_small("env->tick++;", "env->tock++;")),
    ("breakout", ValueError, "actions lie within 0 and 2, got 3", step_gym("breakout", 3)),
    ("pendulum", ValueError, "an action is NaN", step_gym("pendulum", np.full(1, np.nan))),
    ("target", ValueError, "has 8 agents", step_gym("target", 0)),
    ("reset()", gymnasium.error.ResetNeeded, "comes first",
     lambda: ocean.gymnasium.OceanEnv("breakout").step(0)),
    ("observations", None, "c_step does not write observations", check_planted("stale")),
    ("final", None, "its final observation is not written", check_planted("final")),
    ("no problem", None, "no problem found", check_planted(None)),
]

KERNELS = []  # kernels, arena, fast/, devices

TOOLS = []  # eval, export, sweep, history, watch, speed

TABLE = CONFIGURATION + RUNS + TRAINER + ENVIRONMENTS + OCEAN + KERNELS + TOOLS


@pytest.mark.parametrize(("subject", "kind", "sentence", "cause"), TABLE,
                         ids=[f"{row[0]}-{index}" for index, row in enumerate(TABLE)])
def test_a_message_says(subject, kind, sentence, cause, tmp_path, capsys):
    def fail():
        if isinstance(cause, str):
            return configuration.load_config("squared", shlex.split(cause))
        return cause(tmp_path) if inspect.signature(cause).parameters else cause()

    if kind is None:
        fail()
        output = capsys.readouterr()
        said = output.out + output.err
    else:
        with pytest.raises(kind) as error:
            fail()
        said = str(error.value)
    assert sentence in " ".join(said.split()) and subject in said
