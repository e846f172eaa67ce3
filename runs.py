"""What a run leaves behind: its folder, with checkpoints, and how a run resumes from it.

    experiments/breakout_20260101-120000-a1b2c3/
        config.json             the resolved settings
        metrics.jsonl           an entry a second or so; warnings.txt: warnings about them
        trainer_state.pt        all that a resume needs
        model_breakout_000100.pt, best_breakout.pt

Loggers and the dashboard are in loggers.py.
"""

import contextlib
import copy
import dataclasses
import fcntl
import hashlib
import inspect
import json
import os
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import torch

import emulation
from checkpoints import NUMBERS, load, save, whole_run
from configuration import (
    OFF,
    SECTIONS,
    Train,
    difference,
    turn_of,
)
from errors import ConfigError
from loggers import JsonLines
from models import check_weights
from processes import say, write_whole
from vector import POLICY_INPUTS, Native

# --------------------------------------------------------------------------------------------------
# The folder of a run

UNWRITABLE = ("cannot write the run's folder {}: {}. Set --data-dir to one that can be, on a disk "
              "with room for checkpoints.")


def lock(folder):
    """Lock a run's folder while it is written to: a file number that holds the lock until it is closed
    or this process ends. Raises BlockingIOError if another holds it, OSError if the disk knows no locks."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        raise
    return number


def is_running(folder):
    """Whether a process holds a run's folder, or seems to if its disk knows no locks."""
    try:
        os.close(lock(folder))
    except BlockingIOError:
        return True
    except OSError:  # a run writes its metrics every few seconds
        with contextlib.suppress(OSError):
            return time.time() - (Path(folder) / "metrics.jsonl").stat().st_mtime < 600
    return False


class Run:
    """A run's folder: config.json, metrics.jsonl, warnings.txt, trainer_state.pt (all that a resume
    needs), the last `keep` models and the best one. folder: None writes nothing."""

    def __init__(self, folder, env_name, keep):
        self.folder, self.env_name, self.keep = folder, env_name, keep
        self.begun, self._metrics, self._held = False, None, None

    def begin(self, settings, state, first_step):
        """Make the folder, with the resolved settings and, if there is a `state`, a first
        checkpoint. Raises ConfigError if that cannot be."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._hold()
            for part in self.folder.glob("*.part"):  # of a process that was killed
                part.unlink()
            turn = 1 + max(map(turn_of, self.folder.parent.glob(f"{self.env_name}_*")), default=0)
            text = json.dumps({**settings, "turn": turn}, indent=2, default=str) + "\n"
            write_whole(self.folder / "config.json", lambda file: file.write(text.encode()))
            self._metrics = JsonLines(self.folder / "metrics.jsonl", first_step)
            if state is not None:
                save(state, self.folder / "trainer_state.pt")
        except OSError as error:
            raise ConfigError(UNWRITABLE.format(self.folder, error)) from None

    def _hold(self):
        """Lock the folder, where the disk knows locks. ConfigError if another process holds it."""
        for _ in range(5):  # is_running takes the lock for a moment
            try:
                self._held = lock(self.folder)
            except BlockingIOError:
                time.sleep(0.02)
                continue
            except OSError:
                pass
            return
        raise ConfigError(f"{self.folder}: this run is still being trained, by another process or by a trainer here "
                          "that is not closed. Wait until it has ended, or end it (Ctrl-C saves a checkpoint), and "
                          "resume then.")

    def release(self):
        """Release the folder."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def log(self, metrics, sentences, step):
        """Write an entry of metrics.jsonl; sentences: those of diagnostics.py about it."""
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
        """Where the model of an epoch lies."""
        return self.folder / f"model_{self.env_name}_{epoch:06d}.pt"

    def save(self, state, model, best):
        """Write a trainer's state, its weights to the file `model`, and the best ones unless they
        are None; remove the oldest models. Raises OSError for what cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save(state["model"], model)
        if best is not None:
            save(copies(best, "cpu"), self.folder / f"best_{self.env_name}.pt")
        save(state, self.folder / "trainer_state.pt")
        for old in sorted(self.folder.glob("model_*.pt"))[: -self.keep]:
            old.unlink()

    def unsaved(self, epoch, error):
        """The ConfigError that the last checkpoint was not written; it says what is left."""
        whole, path = "there is no whole one", self.folder / "trainer_state.pt"
        with contextlib.suppress(ConfigError):
            whole = f"the last whole one is {path}, of epoch {load(path, whole_run)['epoch']}"
        return ConfigError(
            f"the last checkpoint, of epoch {epoch}, was not written: {error}; {whole}. Free some space, and "
            f"--resume {self.folder} trains what is missing; or copy that folder to a disk with room and resume the "
            "copy. A new run writes to the folder that --data-dir names.")


# --------------------------------------------------------------------------------------------------
# Checkpoints of a whole run

def copies(tensors, device=None):
    """A dict with copies of its tensors, each with memory of its own; other values, from get_extra_state, are
    copied too. device: where the tensors go, if not where they are."""
    return {name: tensor.to(device or tensor.device, copy=True) if isinstance(tensor, torch.Tensor)
            else copy.deepcopy(tensor) for name, tensor in tensors.items()}


SCORES = ("best_score", "_recent")  # NUMBERS of trainer.statistics; the others are the trainer's


# What an exact resume rests on. A run that breaks one of these still trains, but no
# longer goes on bit for bit:
#   1. Random words are a function of counters (Philox), never drawn from a generator with a state. kernels.sample has
#      agent, step and head; kernels.draw_segments has epoch, minibatch and the place there. `_rollouts` and `epoch` are
#      saved among checkpoints.NUMBERS.
#   2. Sums have an order. Within a kernel, blocks of fixed size are added one after the other, whichever thread
#      made them. The gradients of several learners, and what ranks gather, are added in their order; all_reduce
#      adds in an order that depends on the number of ranks only. So the numbers of threads, buffers and ranks must
#      be those of before. Arrays are aligned (vector.aligned_zeros), because libraries round by address.
#   3. What outlives an epoch is saved: Snapshot._tensors, NUMBERS, the model, the optimizer, the environments' memory.
#      All else that is learnt from (advantages, ratios, the rate) is written anew in each epoch before it is read.
#   4. Sizes and buffers that were measured for a machine stand in config.json and are taken from there. The engine is
#      chosen again; if it is another one, that is said.
#   5. restore checks all but the optimizer's state (which is checked as it is loaded) before it changes anything.
#      It restores the optimizer, then environments, then the model, then the tensors (Muon's momentum among them):
#      environments that begin anew would overwrite the state and the counters.
#   6. torch's generator on the CPU is saved for networks that draw from it (dropout). A GPU's is not.
#   7. An entry is logged before the checkpoint of its epoch, so that a resume lacks none (PuffeRL._end_epoch).
# The whole list is tested by test_every_kind_of_run_resumes_bit_for_bit in tests/test_pufferl.py.


REWARD_SCALE = "discounted_returns", "return_moments", "value_targets"  # what a checkpoint calls its tensors


class Snapshot:
    """What a trainer needs to resume bit for bit: `take` makes a state of it, `restore` puts one back.
    All ranks call both."""

    def __init__(self, trainer):
        self.trainer = trainer

    def _tensors(self):
        """{name: the tensor itself} of what a checkpoint keeps beside the model."""
        buffers, scale = self.trainer.buffers, self.trainer.reward_scale
        host = buffers.host
        tensors = {name: host[name][-1] for name in POLICY_INPUTS if host[name] is not None}
        tensors |= {f"state/{name}": tensor for name, tensor in buffers.state.items()}
        tensors |= self.trainer.optimizer.tensors()
        if scale is not None:
            tensors |= zip(REWARD_SCALE, (scale.returns, scale.moments, scale.targets), strict=True)
        return {**tensors, "running_returns": buffers.running_returns, "torch_random": torch.get_rng_state()}

    def _owner(self, name):
        """What has the attribute `name` of NUMBERS."""
        return self.trainer.statistics if name in SCORES else self.trainer

    def take(self, metadata=None):
        """The state, for checkpoints.save."""
        trainer = self.trainer
        # Copies: the tensors are views of the arena, and torch.save writes all of
        # the memory behind a view.
        tensors = copies(self._tensors(), "cpu")
        environments = torch.from_numpy(trainer.vecenv.save())
        of_optimizer = trainer.optimizer.tensors()
        own = {name: tensor for name, tensor in tensors.items() if name not in of_optimizer}
        return {
            "model": copies(trainer.policy.state_dict(), "cpu"),
            "tensors": tensors,
            # of an optimizer of torch; the key keeps its old name
            "adam": None if of_optimizer else trainer.optimizer.state(),
            "environments": environments,
            "bonus": None if trainer.bonus is None else trainer.bonus.state_dict(),
            # what the ranks after rank 0 have
            "others": trainer.ranks.gather_to_first((own, environments))[1:],
            "numbers": {name: getattr(self._owner(name), name) for name in NUMBERS},
            "epoch": trainer.epoch,
            "global_step": trainer.global_step,
            "uptime": trainer.uptime,
            "config": json.dumps(trainer.args, default=str),
            "metadata": _plain(metadata or {}, "metadata"),
        }

    def restore(self, path):
        """Put a checkpoint, a file or the trainer_state.pt of a folder, into the trainer; returns what
        was saved. See PuffeRL.load_checkpoint."""
        trainer, ranks = self.trainer, self.trainer.ranks
        path = path / "trainer_state.pt" if path.is_dir() else path
        others = []

        def read():
            if not path.exists():
                raise ConfigError(f"{path}: there is no such checkpoint.")
            saved = load(path, whole_run)
            others.extend(saved.pop("others"))
            return saved, 1 + len(others)

        saved, count = ranks.first(read)
        tensors, environments = saved["tensors"], saved["environments"]
        if count == ranks.count:
            own, environments = ranks.scatter([(tensors, environments), *others])
            tensors = {**tensors, **own}
        self._say = say if ranks.rank == 0 else lambda text: None
        ours = self._tensors()
        fitting = {name for name in tensors.keys() & ours.keys() if tensors[name].shape == ours[name].shape
                   and tensors[name].is_floating_point() == ours[name].is_floating_point()}
        before = self._check(saved, path)
        self._restore_optimizer(saved["adam"], fitting, path)
        # The order of these lines matters: see number 5 of the list above.
        restored = self._restore_environments(saved["epoch"], count, tensors, ours, fitting, environments)
        trainer.policy.load_state_dict(saved["model"])
        if trainer.bonus is not None and saved["bonus"] is not None:
            trainer.bonus.load_state_dict(saved["bonus"])
        for name in restored:
            ours[name].copy_(tensors[name])
        if trainer.reward_scale is not None and "value_targets" not in tensors:  # these values are relative to 0
            trainer.reward_scale.targets.zero_()[0] = trainer.reward_scale.moments[0]
        for name in NUMBERS.keys() & saved["numbers"].keys():
            setattr(self._owner(name), name, saved["numbers"][name])
        if trainer.config["target_kl"] is None or before["learning_rate"] != trainer.config["learning_rate"]:
            trainer._rate_factor = 1.0  # it came from another rate
        trainer._steps_before = saved["global_step"] - trainer.epoch * trainer.batch_size
        return saved

    def _check(self, saved, path):
        """Say what differs from the run that was saved; returns its train section. ConfigError, before
        anything changes, for another optimizer or network."""
        args, mine, before = self.trainer.args, self.trainer.policy.state_dict(), saved["config"]
        optimizer = before["train"]["optimizer"]
        if optimizer != args["train"]["optimizer"]:
            raise ConfigError(f"{path} was trained with train.optimizer {optimizer}, which cannot be "
                              "changed at resume.")
        check_weights(saved["model"], mine, path)
        # what a run had before there were settings for it
        sections = {name: {**dataclasses.asdict(kind()), **(OFF if kind is Train else {}), **before[name]}
                    for name, kind in SECTIONS.items() if name in before}
        before = {"engine": args["engine"], **before, **sections}
        if changes := difference(before, json.loads(json.dumps(args, default=str))):
            self._say(f"changed since {path} was written: {', '.join(changes)}")
        edited = [Path(file).name for file, digest in before.get("sources", {}).items()
                  if args["sources"].get(file, digest) != digest]
        if edited:
            self._say(f"edited since {path} was written: {', '.join(edited)}. What was learnt goes on in what they "
                      "do now.")
        return before["train"]

    def _restore_optimizer(self, state, fitting, path):
        """Restore the optimizer's state, or say that the file has none. Muon's comes with the other tensors."""
        own = self.trainer.optimizer.tensors()
        if not own.keys() <= fitting or (not own and state is None):
            self._say(f"{path} holds no state of the optimizer, which begins as in a new run; the "
                      "weights go on.")
        elif not own:
            try:
                self.trainer.optimizer.load(state)
            except Exception as error:  # of an optimizer in a file, which may have changed
                raise ConfigError(f"{path}: its state of the optimizer is not one ({error}).") from None
            self.trainer.engine.refresh()

    def _restore_environments(self, epoch, count, tensors, ours, fitting, environments):
        """Restore the environments, or begin new episodes and say so; returns the names of the tensors
        that go on."""
        trainer = self.trainer
        of_optimizer = trainer.optimizer.tensors().keys()
        try:
            if count != trainer.ranks.count:
                raise ValueError(f"there were {count} ranks, now there are {trainer.ranks.count}")
            # A run may begin or cease to scale rewards, older ones have no random state, and the
            # optimizer's tensors have been looked at.
            optional = {*REWARD_SCALE, "torch_random", *of_optimizer}
            if (tensors.keys() ^ ours.keys()) - optional or (tensors.keys() & ours.keys()) - of_optimizer - fitting:
                raise ValueError("there were other agents or spaces")
            if not len(environments):
                raise ValueError("those in Python cannot be saved")
            trainer.vecenv.load(environments.numpy())
            if "torch_random" in tensors:  # of a dropout, say
                torch.set_rng_state(tensors["torch_random"])
        except ValueError as problem:
            self._say(f"all environments begin new episodes ({problem}); weights and optimizer are as they "
                      "were, but the run does not go on bit for bit.")
            trainer.vecenv.restart(trainer.vecenv.seed + epoch)
            trainer.buffers.running_returns.zero_()
            for state in trainer.buffers.state.values():
                state.zero_()
            return fitting & {*REWARD_SCALE[1:], *of_optimizer}
        return fitting


def _plain(value, name):
    """numpy's numbers and arrays as Python's and tensors, which are all that a checkpoint may hold.
    Raises ConfigError for anything else: it could be written, but not read without trust."""
    if isinstance(value, dict):
        return {_plain(key, name): _plain(one, f"{name}[{key!r}]") for key, one in value.items()}
    if isinstance(value, list | tuple):
        parts = [_plain(one, f"{name}[{i}]") for i, one in enumerate(value)]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(value.copy())
    value = value.item() if isinstance(value, np.generic) else value
    if value is not None and type(value) not in (bool, int, float, complex, str, bytes,
                                                 torch.Tensor):
        raise ConfigError(f"{name} is a {type(value).__name__}; a checkpoint holds numbers, text, "
                          "tensors, and lists, tuples and dicts of them.")
    return value


def sources(policy, vecenv, *others):
    """{file: digest} of the files in which the classes of a run's network, of its environment and of that one's
    wrappers are defined, and what else a setting names (path/to/file.py:name, or the object itself), without those of
    installed packages."""
    files = {f"{path}.py" for path, dot, _ in (str(other).partition(".py:") for other in others) if dot}
    kinds = set(map(type, policy.modules()))
    for own in (getattr(other, "func", other) for other in others if callable(other)):  # of a functools.partial
        kinds.add(own if inspect.isroutine(own) or inspect.isclass(own) else type(own))
    if isinstance(vecenv, Native):
        files.add(str(vecenv.library.header))
    else:
        kinds |= {type(env) for env in emulation.within(vecenv.driver_env)} - set(emulation.WRAPPERS)
    for kind in kinds:
        with contextlib.suppress(TypeError, OSError):  # typed into a prompt, or compiled
            files.add(inspect.getsourcefile(kind))
    python, packages = Path(sysconfig.get_paths()["stdlib"]), {"site-packages", "dist-packages"}
    own = [path for path in map(Path, filter(None, files)) if path.is_file() and python not in path.parents
           and not packages.intersection(path.parts)]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in sorted(own)}
