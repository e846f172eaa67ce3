"""The sentences that users read. Each is asserted here alone; other tests name an error's type and
the setting.

A row is (subject, type, sentence, cause). The cause is a command line of squared, which is read
and not run, or a function that fails; it may take a folder (`path`). The type None stands for a
message that is printed. The sentence is a part of the message that contains no path.
"""

import inspect
import shlex

import pytest

import configuration
import pufferl
from protein import Random, Space, SpaceError
from tools.sweep import command as sweep
from tools.sweep.command import searched_settings

CONFIGURATION = [
    ("train.horizon", configuration.ConfigError, "train.horizon", "--train.horizon 0"),
]

RUNS = []  # run folders, checkpoints, loggers, names from PufferLib

TRAINER = []  # trainer, engines, models, diagnostics, processes of one run

ENVIRONMENTS = []  # emulation, vector, workers, tensors, environments

OCEAN = []

KERNELS = []  # kernels, arena, fast/, devices



def verb(words):
    """A cause: a command of pufferl.py, or of protein.py; FOLDER is the test's folder."""
    def run(path):
        command, *argv = [word.replace("FOLDER", str(path)) for word in shlex.split(words)]
        sweep.main(argv) if command == "sweep" else pufferl.main([command, *argv])

    return run


def searched(entry, name="train.gamma"):
    return lambda: searched_settings("squared", {name: entry})


TOOLS = [  # eval, export, sweep, history, watch, speed
    ("eval.max_steps", SystemExit, "Raise eval.max_steps where they are meant to be that long.",
     verb("eval performance --eval.episodes 1 --eval.max-steps 5")),
    ("eval.episodes", SystemExit, "must be 1 or more.", verb("eval squared --eval.episodes 0")),
    ("eval.video", SystemExit, "must end in .mp4, .gif or .png.",
     verb("eval squared --eval.video a.avi")),
    ("--eval.web", SystemExit, "--eval.window: one of them at a time.",
     verb("eval squared --eval.web --eval.window")),
    ("ship", SystemExit, "which policy? --load-model-path latest, or a run's folder",
     verb("ship squared")),
    ("eval", SystemExit, "which environment?", verb("eval")),
    ("--export.c", SystemExit, "compiles the environment, but gym/CartPole-v1 is not one in C.",
     verb("export gym/CartPole-v1 --export.c FOLDER")),
    ("--baseline", None, "neither --load-model-path nor --baseline: this is an untrained policy",
     verb("export squared --export.flat FOLDER/a.bin")),
    ("--data-dir", SystemExit, "--profile.output says where else.",
     verb("profile squared --data-dir none")),
    ("squarde", SystemExit, "did you mean squared or snake?", verb("profile squarde")),
    ("runs show", SystemExit, "which run? python pufferl.py runs lists them.", verb("runs show")),
    ("nothing", SystemExit, "no folder, no run in", verb("runs show nothing --data-dir FOLDER")),
    ("breakout", None, "python pufferl.py train breakout makes one",
     verb("runs breakout --data-dir FOLDER")),
    ("config.json", SystemExit, "not a run's folder, or its config.json is damaged",
     verb("plot FOLDER")),
    ("train.gamma", SpaceError, "has no distribution: one of uniform", searched({"min": 0, "max": 1})),
    ("train.gamma", SpaceError, "maen: there is no such field. Did you mean mean?",
     searched({"distribution": "uniform", "min": 0, "max": 1, "maen": 1})),
    ("train.optimizer", SpaceError, "is no number: take distribution = choice with values.",
     searched({"distribution": "uniform", "min": 0, "max": 1}, "train.optimizer")),
    ("sweep.trian.gamma", SpaceError, "there is no section 'trian'. There are: env, vec,",
     searched([1, 2], "trian.gamma")),
    ("there is nothing to search", SpaceError, "no [sweep.SECTION.KEY] section", lambda: Space({})),
    ("optimize()", SpaceError, "needs an objective, or the tuner an env_name.",
     lambda: Random(search_space={"env.x": [1, 2]}).optimize()),
    ("sweep_squared", SystemExit, "holds another sweep (train.gamma: 0.9 there, ",
     lambda path: [verb(f"sweep squared --data-dir FOLDER --train.gamma {gamma} --sweep.num-trials 0"
                        " --sweep.logger none")(path) for gamma in (0.9, 0.8)]),
    ("train.horizon", None, "train.horizon is given, so it is not searched",
     verb("sweep squared --data-dir FOLDER --train.horizon 32 --sweep.num-trials 0 "
          "--sweep.logger none")),
    ("--sweep.train.gamma", SystemExit, "is --sweep.SECTION.KEY.FIELD VALUE with a field of",
     verb("sweep squared --sweep.train.gamma 0.9")),
    ("report", SystemExit, "there is neither a sweep (sweep.json) nor are there runs",
     verb("sweep report FOLDER")),
]

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
