"""Keep what a run leaves behind: its folder, its checkpoints, and how it resumes.

    experiments/breakout_20260101-120000-a1b2c3/
        config.json             the resolved settings
        metrics.jsonl           an entry a second or so; warnings.txt: the warnings about them
        trainer_state.pt        all that a resume needs
        model_breakout_000100.pt, best_breakout.pt

    runs.save(state, path)                      # the whole file, or the one before
    weights = runs.load(path)                   # {name: tensor} of any state_dict
    state = runs.load(path, runs.whole_run)     # of trainer_state.pt

torch.save writes a zip file, in which each tensor and the list of names have a checksum (CRC-32).
torch.load does not look at them; `load` does. A checkpoint is data: nothing in it is run
(weights_only), and only the names of WHOLE_RUN are read. Loggers and the dashboard are in
loggers.py.
"""

import contextlib
import copy
import fcntl
import json
import os
import re
import sys
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch

from configuration import check_form, saved_runs
from errors import ConfigError, require
from loggers import JsonLines
from processes import say, write_whole
from workers import POLICY_INPUTS

# --------------------------------------------------------------------------------------------------
# The folder of a run


def lock(folder):
    """Lock a folder while it is written to; returns a file number that holds the lock.

    The lock ends when that is closed or this process ends. A disk without locks locks nothing.
    Raises BlockingIOError if another process holds it.
    """
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise
    except OSError:  # the disk has no locks
        pass
    return number


class Run:
    """Write a run's folder.

    keep: model files that stay, besides the best. folder: None writes nothing.
    """

    def __init__(self, folder, env_name, keep):
        self.folder = folder
        self.env_name = env_name
        self.keep = keep
        self.begun = False
        self._metrics = None
        self._lock = None

    def begin(self, settings, state, first_step):
        """Make the folder, with the settings and a first checkpoint.

        state: None writes no checkpoint. Raises ConfigError if the folder cannot be written, or if
        another process holds it.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.folder)
            for part in self.folder.glob("*.part"):  # of a process that was killed
                part.unlink()
            turns = [saved["turn"]
                     for _, saved in saved_runs(self.folder.parent, f"{self.env_name}_*")]
            settings = {**settings, "turn": 1 + max(turns, default=0)}
            text = json.dumps(settings, indent=2, default=str) + "\n"
            write_whole(self.folder / "config.json", lambda file: file.write(text.encode()))
            self._metrics = JsonLines(self.folder / "metrics.jsonl", first_step)
            if state is not None:
                save(state, self.folder / "trainer_state.pt")
        except BlockingIOError:
            raise ConfigError(f"{self.folder}: this run is still being trained, by another process "
                              "or a trainer that is not closed. End it (Ctrl-C saves a "
                              "checkpoint), then resume.") from None
        except OSError as error:
            raise ConfigError(f"cannot write the run's folder {self.folder}: {error}. Set "
                              "--data-dir to one that can be, on a disk with room for "
                              "checkpoints.") from None

    def rewind(self, step):
        """Remove the entries after `step`; a trainer that loads a checkpoint repeats it."""
        if self._metrics is not None:
            self._metrics = JsonLines(self._metrics.path, step)

    def release(self):
        """Release the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def log(self, metrics, sentences, step):
        """Write an entry of metrics.jsonl; sentences: warnings of diagnostics.py."""
        if self._metrics is not None:
            self._metrics.log(metrics, step)
        for sentence in sentences:
            say(f"warning: {sentence}", sys.stderr)
            self.note(sentence, step)

    def note(self, sentence, step):
        """Write a line of warnings.txt."""
        if self._metrics is not None:
            with contextlib.suppress(OSError), open(self.folder / "warnings.txt", "a") as file:
                file.write(f"step {step:,}: {sentence}\n")

    def model(self, epoch):
        """Return the path of an epoch's model."""
        return self.folder / f"model_{self.env_name}_{epoch:06d}.pt"

    def save(self, state, model, best):
        """Write a trainer's state, its weights to the file `model`, and the best weights.

        best: None if they are unchanged. The oldest models are removed, and later ones, of what a
        trainer that loads a checkpoint trains again. Raises OSError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        save(state["model"], model)
        if best is not None:
            save(copies(best, "cpu"), self.folder / f"best_{self.env_name}.pt")
        save(state, self.folder / "trainer_state.pt")
        models = sorted(self.folder.glob("model_*.pt"))
        index = models.index(Path(model))
        for other in models[: max(0, index + 1 - self.keep)] + models[index + 1 :]:
            other.unlink()


# --------------------------------------------------------------------------------------------------
# Files of weights and of whole runs

NUMBERS = {"epoch": int, "_rollouts": int | None, "_minibatches_owed": float | None,
           "_rate_factor": float | None, "_override_lr": float | None,
           "best_score": int | float | None, "_recent": tuple | list | None}
# As in configuration.check_form.
WHOLE_RUN = {"model": {...: object}, "tensors": {...: torch.Tensor}, "environments": torch.Tensor,
             "others": list, "numbers": NUMBERS, "epoch": int, "global_step": int,
             "uptime": int | float, "config": str, "adam": dict | None,
             "bonus": dict | None, "metadata": object}


def save(state, path):
    """Write a whole file or none, by torch.save. Raises OSError."""
    try:
        write_whole(path, lambda file: torch.save(state, file))
    except RuntimeError as error:
        # torch raises a RuntimeError if a write fails; the system's error is its __context__
        raise OSError(f"{path}: {error.__context__ or error}") from None


def weights(items):
    """Return the weights in a state_dict or in a whole run.

    What a module's get_extra_state returned need not be a tensor.
    """
    if isinstance(items, dict) and {"numbers", "model"} <= items.keys():
        items = items["model"]
    check_form(items, {...: object})
    tensors = {name: value for name, value in items.items()
               if not str(name).endswith("_extra_state")}
    check_form(tensors, {...: torch.Tensor})
    return {**items, **{name: tensor.detach() for name, tensor in tensors.items()}}


def whole_run(items):
    """Return a trainer's state, of Snapshot, with its configuration as a dict."""
    if isinstance(items, dict) and "numbers" not in items:
        raise ValueError("it holds nothing of a run; weights alone are for --load-model-path")
    check_form(items, WHOLE_RUN)
    return {"adam": None, "bonus": None, "metadata": {}, **items,
            "config": json.loads(items["config"])}


def load(path, form=weights):
    """Return what a file holds, on the CPU, in a form: `weights` or `whole_run`.

    Raises ConfigError for a file that is missing, damaged or holds something else.
    """
    path = Path(path)
    require(path.exists(), f"{path}: there is no such checkpoint.")
    try:
        return _read(path, form)
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}) or not a checkpoint"
                          f"{_find_newest(path)}") from None


def _read(path, form):
    """Return what `load` does. Raises ValueError that says what is wrong."""
    if not path.is_file():  # opening a pipe would wait for ever
        raise ValueError("it is a folder" if path.is_dir() else "it is not a file")
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what check_form refuses below
            begin = file.read(4)
            if begin == b"PK\x03\x04"[: len(begin)]:  # files of torch before 1.6 have no sums
                broken = zipfile.ZipFile(file).testzip()
                if broken is not None:
                    raise ValueError(f"{broken.partition('/')[2]} does not match its checksum")
            file.seek(0)
            items = torch.load(file, weights_only=True, map_location="cpu")
    except ValueError:
        raise
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from None
    except Exception as error:  # damaged bytes make both readers raise almost anything
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ValueError(f"it holds {foreign[1][:80]}, which is neither a tensor nor a plain value"
                         if foreign else f"truncated at byte {path.stat().st_size:,}, or torch "
                         "cannot read it") from None
    return form(items)


def _find_newest(path):
    """Return the end of a message that names the newest whole weights beside `path`."""
    files = path.parent.glob(f"*{path.suffix}")
    for other in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        with contextlib.suppress(ValueError):
            _read(other, weights)
            return f"; the newest whole weights are {other}."
    return "; there are no whole ones beside it."


def check_weights(saved, expected, path):
    """Check the weights of a file against those of a network.

    Raises ConfigError that names the first one that the other lacks, or that has another shape or
    kind of numbers.
    """
    def describe(tensor):
        if not isinstance(tensor, torch.Tensor):
            return "missing" if tensor is None else type(tensor).__name__
        return f"{tuple(tensor.shape)} {'floats' if tensor.is_floating_point() else 'integers'}"

    for name in {**saved, **expected}:
        there, here = saved.get(name), expected.get(name)
        require(describe(there) == describe(here),
                f"{path} is of another network: {name} is {describe(there)} there and "
                f"{describe(here)} here. Name its environment and --policy.name, undo changes of "
                "its class and of the env, policy and rnn settings, or begin a new run.")


# --------------------------------------------------------------------------------------------------
# Checkpoints of a whole run


def copies(tensors, device=None):
    """Copy a dict of tensors, each into its own memory, and other values.

    device: where the tensors go, if not where they are. Other values are of get_extra_state.
    """
    return {name: value.to(device or value.device, copy=True) if isinstance(value, torch.Tensor)
            else copy.deepcopy(value) for name, value in tensors.items()}


def difference(before, after):
    """List the settings that differ in two config.json, of sections that both have."""
    sections = [name for name in ("env", "vec", "policy", "rnn", "train", "versions", "engine")
                if before.get(name) and after.get(name)]
    one, other = ({f"{section}.{key}": value for section in sections
                   for key, value in config[section].items()} for config in (before, after))
    return [f"{name}: {one.get(name, 'missing')} is now {other.get(name, 'missing')}"
            for name in {**one, **other} if one.get(name, ...) != other.get(name, ...)]


SCORES = ("best_score", "_recent")  # NUMBERS of trainer.statistics; the others are the trainer's


# What an exact resume depends on. Without one of these a run still trains, but does not continue
# bit for bit:
#   1. The trainer's random words are a function of counters (Philox); no generator has a state.
#      kernels.sample counts agent, step and head; kernels.draw_segments counts epoch, minibatch and
#      draw. `_rollouts` and `epoch` are saved among NUMBERS.
#   2. Sums have an order. A kernel sums blocks of fixed size, in any thread, and then adds the
#      blocks' sums in their order. The gradients of several learners, and what ranks gather, are
#      added in their order; all_reduce adds in an order that depends on the number of ranks only.
#      So the numbers of threads, buffers and ranks must be those of before. Arrays are aligned
#      (vector.aligned_zeros), because libraries round by address.
#   3. State that the next epoch reads is saved: Snapshot._tensors, NUMBERS, the model, the
#      optimizer, the environments' memory. All other inputs of an update (advantages, ratios, the
#      learning rate) are computed after each rollout, before the first minibatch, by
#      _update_schedules, _scale_rewards, _compute_all_advantages and _update_value_offset, in
#      this order.
#   4. Sizes and buffers that were measured for a machine are in config.json and are taken from
#      there. The engine is chosen again; if it is another one, a line says so.
#   5. Snapshot.restore checks the files first, and changes nothing if they do not fit. Then it
#      restores in this order: torch optimizer, environments, model, bonus, tensors (Muon's momentum
#      among them), numbers. Loading a torch optimizer may still fail, so it comes before all
#      changes. If the environments cannot be restored, they begin new episodes, and the recurrent
#      state, one of the tensors, is set to zero. _rate_factor is one of the numbers and may be
#      reset after them.
#   6. A network may draw from torch's generator (dropout). Its state on the CPU is saved, that on
#      a GPU is not.
#   7. PuffeRL.train updates the normalizer, then _end_epoch counts the epoch, adapts the rate and
#      logs before it saves a checkpoint, so that a checkpoint includes all four. PuffeRL.evaluate
#      counts `_rollouts` after a rollout. PuffeRL._write_back advances the counter of minibatches
#      (in kernels.write_back if segments are drawn) after draw_segments and _step_optimizer have
#      read it.
# tests/test_pufferl.py (test_every_kind_of_run_resumes_bit_for_bit), test_runs.py and test_scale.py
# test it.


# names in a checkpoint of RewardScale's returns, moments and targets
REWARD_SCALE = "discounted_returns", "return_moments", "value_targets"


class Snapshot:
    """Copy what a trainer needs to resume bit for bit, and restore it.

    All ranks call `take` and `restore`.
    """

    def __init__(self, trainer):
        self.trainer = trainer

    def _tensors(self):
        """Return {name: tensor} of what a checkpoint keeps beside the model, not copies."""
        buffers, scale = self.trainer.buffers, self.trainer.reward_scale
        host = buffers.host
        tensors = {name: host[name][-1] for name in POLICY_INPUTS if host[name] is not None}
        tensors |= {f"state/{name}": tensor for name, tensor in buffers.state.items()}
        tensors |= self.trainer.optimizer.tensors()
        if scale is not None:
            values = scale.returns, scale.moments, scale.targets
            tensors |= zip(REWARD_SCALE, values, strict=True)
        return {**tensors, "torch_random": torch.get_rng_state()}

    def _owner(self, name):
        """Return the object with the attribute `name` of NUMBERS."""
        return self.trainer.statistics if name in SCORES else self.trainer

    def take(self, metadata=None):
        """Return the state, for `save`."""
        trainer = self.trainer
        # Copies: the tensors are views of the arena, and torch.save writes all of
        # the memory behind a view.
        tensors = copies(self._tensors(), "cpu")
        vecenv = trainer.vecenv
        environments = torch.from_numpy(np.empty(0, np.uint8) if vecenv.closed else vecenv.save())
        optimizer = trainer.optimizer.tensors()
        of_rank = {name: tensor for name, tensor in tensors.items() if name not in optimizer}
        return {
            "model": copies(trainer.policy.state_dict(), "cpu"),
            "tensors": tensors,
            # of any optimizer of torch
            "adam": None if optimizer else trainer.optimizer.state(),
            "environments": environments,
            "bonus": None if trainer.bonus is None else trainer.bonus.state_dict(),
            # of the ranks after rank 0
            "others": trainer.ranks.gather_to_first((of_rank, environments))[1:],
            "numbers": {name: getattr(self._owner(name), name) for name in NUMBERS},
            "epoch": trainer.epoch,
            "global_step": trainer.global_step,
            "uptime": trainer.uptime,
            "config": json.dumps(trainer.args, default=str),
            "metadata": _plain(metadata or {}, "metadata"),
        }

    def restore(self, path):
        """Put a checkpoint, a file or a folder's, into the trainer; returns it.

        See PuffeRL.load_checkpoint.
        """
        trainer, ranks = self.trainer, self.trainer.ranks
        path = path / "trainer_state.pt" if path.is_dir() else path
        others = []

        def read():
            saved = load(path, whole_run)
            others.extend(saved.pop("others"))
            return saved, 1 + len(others)

        saved, count = ranks.first(read)
        tensors, environments = saved["tensors"], saved["environments"]
        if count == ranks.count:
            of_rank, environments = ranks.scatter([(tensors, environments), *others])
            tensors = {**tensors, **of_rank}
        self._say = say if ranks.rank == 0 else lambda text: None
        ours = self._tensors()
        fitting = {name for name in tensors.keys() & ours.keys()
                   if (tensors[name].shape, tensors[name].dtype)
                   == (ours[name].shape, ours[name].dtype)}
        # The order from here to the end matters: see number 5 of the list above.
        before = self._check(saved, path)
        self._restore_optimizer(saved["adam"], fitting, path)
        restored = self._restore_environments(saved["epoch"], count, tensors, ours, fitting,
                                              environments)
        trainer.policy.load_state_dict(saved["model"])
        if trainer.bonus is not None and saved["bonus"] is not None:
            trainer.bonus.load_state_dict(saved["bonus"])
        for name in restored:
            ours[name].copy_(tensors[name])
        for name in NUMBERS.keys() & saved["numbers"].keys():
            setattr(self._owner(name), name, saved["numbers"][name])
        rate = trainer.config["learning_rate"]
        if trainer.config["target_kl"] is None or before["learning_rate"] != rate:
            trainer._rate_factor = 1.0  # the saved one belongs to another rate
        trainer.global_step = saved["global_step"]
        return saved

    def _check(self, saved, path):
        """Print what differs from the saved run; returns its train section.

        Raises ConfigError, before anything changes, for another optimizer or network.
        """
        args, before = self.trainer.args, saved["config"]
        optimizer = before["train"]["optimizer"]
        require(optimizer == args["train"]["optimizer"], f"{path} was trained with train.optimizer "
                f"{optimizer}, which cannot be changed at resume.")
        check_weights(saved["model"], self.trainer.policy.state_dict(), path)
        if changes := difference(before, json.loads(json.dumps(args, default=str))):
            self._say(f"changed since {path} was written: {', '.join(changes)}")
        return before["train"]

    def _restore_optimizer(self, state, fitting, path):
        """Restore the optimizer's state, or print that the file has none.

        Muon's is among the other tensors.
        """
        optimizer = self.trainer.optimizer
        names = optimizer.tensors().keys()
        if not names <= fitting or (not names and state is None):
            self._say(f"{path} holds no state of the optimizer, which begins as in a new run; the "
                      "weights are restored.")
        elif not names:
            optimizer.load(state)
            self.trainer.engine.refresh()

    def _restore_environments(self, epoch, count, tensors, ours, fitting, environments):
        """Restore the environments, or begin new episodes and print why.

        count: ranks of the checkpoint. fitting: names of its tensors whose shape and dtype fit.
        Returns the names of the tensors to restore.
        """
        trainer = self.trainer
        optimizer = trainer.optimizer.tensors().keys()
        try:
            if count != trainer.ranks.count:
                raise ValueError(f"there were {count} ranks, now there are {trainer.ranks.count}")
            # rewards may be scaled in one of the runs only; _restore_optimizer has checked the
            # tensors of the optimizer
            optional = {*REWARD_SCALE, "torch_random", *optimizer}
            if ((tensors.keys() ^ ours.keys()) - optional
                    or (tensors.keys() & ours.keys()) - optimizer - fitting):
                raise ValueError("there were other agents or spaces")
            if not len(environments):
                raise ValueError("those in Python cannot be saved")
            trainer.vecenv.load(environments.numpy())
            if "torch_random" in tensors:  # of a dropout, say
                torch.set_rng_state(tensors["torch_random"])
        except ValueError as problem:
            self._say(f"all environments begin new episodes ({problem}); weights and optimizer are "
                      "restored, but the run does not continue bit for bit.")
            trainer.vecenv.restart(trainer.vecenv.seed + epoch)
            for state in trainer.buffers.state.values():
                state.zero_()
            return fitting & {*REWARD_SCALE[1:], *optimizer}
        return fitting


def _plain(value, name):
    """Convert numpy's numbers and arrays to Python's and tensors.

    A checkpoint holds no others. Raises ConfigError for anything else: it could be written, but not
    read without trust.
    """
    if isinstance(value, dict):
        return {_plain(key, name): _plain(one, f"{name}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(one, f"{name}[{i}]") for i, one in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    value = value.item() if isinstance(value, np.generic) else value
    require(value is None or type(value) in (bool, int, float, complex, str, bytes, torch.Tensor),
            f"{name} is a {type(value).__name__}; a checkpoint holds numbers, text, tensors, and "
            "lists, tuples and dicts of them.")
    return value
