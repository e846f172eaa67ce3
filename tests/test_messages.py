"""The sentences that users read. Each is asserted here alone; other tests name an error's type and
the setting.

A row is (subject, type, sentence, cause). The cause is a command line of squared, which is read
and not run, or a function that fails; it may take a folder (`path`). The type None stands for a
message that is printed. The sentence is a part of the message that contains no path.
"""

import inspect
import math
import shlex

import pytest
import torch
import trainer_faults as faults
from trainers import make_trainer

import configuration
import models
from configuration import ConfigError

CONFIGURATION = [
    ("train.horizon", configuration.ConfigError, "train.horizon", "--train.horizon 0"),
]

RUNS = []  # run folders, checkpoints, loggers, names from PufferLib

TRAINER = [  # trainer, engines, models, diagnostics, processes of one run
    ("train.engine", ConfigError, "there are compiled and autograd", lambda: make_trainer(engine="fused")),
    ("train.engine", ConfigError, "Tripled is not models.MinGRUPolicy", lambda: make_trainer(**faults.TRIPLED)),
    ("train.compile", ConfigError, "the default network is compiled by hand", lambda: make_trainer(compile=True)),
    ("engine: autograd", None, "because encoder has hooks", faults.hook),
    ("DataParallel", ConfigError, "the network itself in place of its DataParallel", lambda:
     faults.construct(wrap=torch.nn.DataParallel)),
    ("vecenv", ConfigError, "expected what make or load_env gives; the two are swapped", faults.swap),
    ("policy", ConfigError, "policy is a dict, expected a torch.nn.Module", lambda: faults.construct(policy={})),
    ("vecenv", ConfigError, "vecenv is a Acrobot, expected what make or load_env gives",
     lambda: faults.construct(vecenv=faults.Acrobot())),
    ("logger", ConfigError, "Mine has no config and no artifact", lambda: faults.construct(logger=faults.Mine())),
    ("evaluate()", RuntimeError, "train() learns from a rollout, once", lambda: make_trainer().train()),
    ("load_checkpoint", RuntimeError, "this trainer was closed", faults.close_and_go_on),
    ("train.horizon", ConfigError, "this trainer was made for 8", lambda: faults.assign("horizon", 9)),
    ("train.learning_rat", ConfigError, "did you mean learning_rate", lambda: faults.assign("learning_rat", 1)),
    ("train.target_kl", ConfigError, "it was decided when", lambda: faults.assign("target_kl", "auto")),
    ("decoder", RuntimeError, "would not be trained", faults.new_decoder),
    ("rewards", FloatingPointError, "not finite, first at step 3 of the rollout, of agent 2",
     lambda: faults.meddle(rewards=((3, 2), math.nan))),
    ("action mask", FloatingPointError, "of agent 1 forbids every choice of a head: leave one", faults.forbid),
    ("logprobs", FloatingPointError, "with logits that are all -inf: leave one", faults.rule_out),
    ("train.loss", FloatingPointError, "your own function returned it",
     lambda: faults.train(make_trainer(loss=faults.nan_loss))),
    ("train.loss", UserWarning, "does not depend on the network's outputs",
     lambda: faults.train(make_trainer(loss=lambda minibatch: minibatch.advantages.mean()))),
    ("train.loss", AttributeError, "has no rewards; it has observations, logits,",
     lambda: faults.train(make_trainer(loss=lambda minibatch: minibatch.rewards))),
    ("train.loss", ConfigError, "a file that exists", lambda: make_trainer(loss="missing.py:name")),
    ("train.optimizer", ConfigError, "must be a class of torch.optim.Optimizer's kind, it is a",
     lambda: make_trainer(optimizer=faults.nan_loss)),
    ("train.optimizer", ConfigError, "is resumed by its", lambda: make_trainer(optimizer="torch.optim.sgd.SGD")),
    ("train.weight_decay", ConfigError, "is for an optimizer that takes it, and RateOnly does not",
     lambda: make_trainer(optimizer=faults.RateOnly, weight_decay=0.1)),
    ("network: Decodes", UserWarning, "returns probabilities, but logits are expected",
     lambda: faults.decode(lambda logits, value: (logits.softmax(-1), value))),
    ("network:", UserWarning, "the policy is not learnt, because no gradient leads from the logits",
     lambda: faults.decode(lambda logits, value: (logits.detach(), value))),
    ("network: Decodes", None, "does not learn what it does: before the first update", faults.noise),
    ("thread_safe", None, "write thread_safe = True into Mine", faults.say_nothing_of_threads),
    ("Returns.forward", models.NetworkFault, "must return (logits, value), got a Tensor (",
     lambda: faults.returns(lambda y: y)),
    ("Returns", models.NetworkFault, "returns 1 logits for an observation; these environments want 2",
     lambda: faults.returns(lambda y: (y[:, :1], y[:, :1]))),
    ("LostState", ConfigError, "leaves c, h in the state, which would be lost: initial_state",
     lambda: make_trainer(policy=faults.LostState)),
    ("FeedForward", ConfigError, "has no shape yet, because its layer is lazy",
     lambda: make_trainer(policy=faults.lazy)),
    ("tanh", TypeError, "needs a number with a lower and a higher finite bound", faults.squash_unbounded),
    ("Impala", TypeError, "take policy.name auto", lambda: models.Impala(faults.environment())),
    ("curves:", None, "Every reward so far is 0: there is nothing to learn from", faults.diagnose_no_rewards),
]

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
