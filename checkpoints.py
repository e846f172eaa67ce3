"""Read and write files of weights and of whole runs.

    checkpoints.save(state, path)                           # the whole file, or the one before
    weights = checkpoints.load(path)                        # {name: tensor} of any state_dict
    state = checkpoints.load(path, checkpoints.whole_run)   # of trainer_state.pt

torch.save writes a zip file, in which each tensor and the list of names have a checksum (CRC-32).
torch.load does not look at them; `load` does. A checkpoint is data: nothing in it is run
(weights_only), and only the names of WHOLE_RUN are read.
"""

import contextlib
import json
import os
import re
import warnings
import zipfile
from pathlib import Path

import torch

from errors import ConfigError
from processes import write_whole


def save(state, path):
    """Write a whole file or none, by torch.save. Raises OSError."""
    try:
        write_whole(path, lambda file: torch.save(state, file))
    except RuntimeError as error:
        # torch raises a RuntimeError if a write fails; the system's error is its __context__
        raise OSError(f"{path}: {error.__context__ or error}") from None


# --------------------------------------------------------------------------------------------------
# What a file may hold

NUMBERS = {"epoch": int, "_rollouts": int | None, "_minibatches_owed": int | float | None,
           "_rate_factor": int | float | None, "_override_lr": int | float | None,
           "best_score": int | float | None, "_recent": tuple | list | None}
# {name: type, or what a dict there holds}. A type with None may be missing; ... means every name.
WHOLE_RUN = {"model": {...: object}, "tensors": {...: torch.Tensor}, "environments": torch.Tensor,
             "others": list, "numbers": NUMBERS, "epoch": int, "global_step": int,
             "uptime": int | float, "config": str, "adam": dict | None,
             "bonus": dict | None, "metadata": object}


def check(items, form, name="it"):
    """Raise ValueError if what a file holds under `name` does not have a form."""
    if not isinstance(items, dict):
        raise ValueError(f"{name} is a {type(items).__name__}, not a dict")
    for key, kind in dict.fromkeys(items, form[...]).items() if ... in form else form.items():
        if isinstance(kind, dict):
            check(items.get(key), kind, key)
        elif not isinstance(items.get(key), kind):
            is_there = f"holds a {type(items[key]).__name__} as" if key in items else "lacks"
            raise ValueError(f"{name} {is_there} {key}")


def weights(items):
    """Return the weights in a state_dict or in a whole run.

    What a module's get_extra_state returned need not be a tensor.
    """
    if isinstance(items, dict) and {"numbers", "model"} <= items.keys():
        items = items["model"]
    check(items, {...: object})
    tensors = {name: value for name, value in items.items()
               if not str(name).endswith("_extra_state")}
    check(tensors, {...: torch.Tensor})
    if not tensors:
        raise ValueError("it holds no weights")
    return {**items, **{name: tensor.detach() for name, tensor in tensors.items()}}


def whole_run(items):
    """Return a trainer's state, of runs.Snapshot, with its configuration as a dict."""
    if isinstance(items, dict) and "numbers" not in items:
        raise ValueError("it holds nothing of a run; weights alone are for --load-model-path")
    check(items, WHOLE_RUN)
    return {"adam": None, "bonus": None, "metadata": {}, **items,
            "config": json.loads(items["config"])}


# --------------------------------------------------------------------------------------------------
# Reading


def load(path, form=weights):
    """Return what a file holds, on the CPU, in a form: `weights` or `whole_run`.

    Raises ConfigError for a file that is missing, damaged or holds something else.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"{path}: there is no such checkpoint.")
    try:
        return _read(path, form)
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}) or not a checkpoint"
                          f"{_find_newest(path, form)}") from None


def _read(path, form):
    """Return what `load` does. Raises ValueError that says what is wrong."""
    if not path.is_file():  # opening a pipe would wait for ever
        raise ValueError("it is a folder" if path.is_dir() else "it is not a file")
    try:
        with open(path, "rb") as file:
            _check_sums(file)
            with warnings.catch_warnings():  # torch warns of what `check` refuses below
                warnings.simplefilter("ignore")
                items = torch.load(file, weights_only=True, map_location="cpu")
    except ValueError:
        raise
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from None
    except Exception as error:  # damaged bytes make torch's reader raise almost anything
        foreign = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise ValueError(f"it holds {foreign[1][:80]}, which is neither a tensor nor a plain value"
                         if foreign else "torch cannot read it") from None
    return form(items)


def _check_sums(file):
    """Compare a zip file with its checksums; files of torch before 1.6 have none."""
    begin = file.read(4)
    if not begin:
        raise ValueError("it is empty")
    if begin == b"PK\x03\x04"[: len(begin)]:
        try:
            with zipfile.ZipFile(file) as entries:
                broken = entries.testzip()
        except OSError:
            raise
        except Exception:  # damaged bytes make zipfile raise almost anything
            size = file.seek(0, os.SEEK_END)
            raise ValueError(f"truncated at byte {size:,}, or its parts do not fit") from None
        if broken is not None:
            raise ValueError(f"{broken.partition('/')[2]} does not match its checksum")
    file.seek(0)


MAX_READ = 20  # files beside a damaged one that are tried


def _find_newest(path, form):
    """Return the end of a message that names the newest whole file beside `path`."""
    times = {}
    with contextlib.suppress(OSError):
        times = {other: other.stat().st_mtime for other in path.parent.glob(f"*{path.suffix}")
                 if other.name != path.name and other.is_file()}
    newest = sorted(times, key=times.get, reverse=True)[:MAX_READ]
    for kind, text in ((form, "one is {}"), (weights, "weights are {}, for --load-model-path")):
        for other in newest:
            with contextlib.suppress(ValueError):
                _read(other, kind)
                return f"; the newest whole {text.format(other)}."
    return "; there is no whole one beside it."
