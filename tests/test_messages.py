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

CONFIGURATION = [
    ("train.horizon", configuration.ConfigError, "train.horizon", "--train.horizon 0"),
]

RUNS = []  # run folders, checkpoints, loggers, names from PufferLib

TRAINER = []  # trainer, engines, models, diagnostics, processes of one run

ENVIRONMENTS = []  # emulation, vector, workers, tensors, environments

OCEAN = []

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
