"""Files of weights, and of a whole run. They are written whole or not at all, and not trusted.

    checkpoints.save(state, path)                           # a crash at any moment leaves the file before, or this one
    weights = checkpoints.load(path)                        # {name: tensor}: ours, PufferLib's, any state_dict
    state = checkpoints.load(path, checkpoints.WHOLE_RUN)   # trainer_state.pt, or save_checkpoint(path)'s

torch.save writes a zip file, in which each tensor and the list of names have a checksum (CRC-32),
since torch 1.6. torch.load does not look at them; `load` does. What it reads is then held
against what is expected: `weights` and `WHOLE_RUN` below. A checkpoint is data: nothing in it is
run, and nothing in it names an attribute that is set.
"""

import contextlib
import json
import math
import os
import re
import warnings
import zipfile
from pathlib import Path

import torch

from errors import ConfigError

# --------------------------------------------------------------------------------------------------
# Writing


def write_whole(path, write):
    """Have `write(file)` write a file under another name, sync it, then rename it: it is
    whole or not there at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(state, path):
    """torch.save that leaves a whole file or none; raises OSError."""
    try:
        write_whole(path, lambda file: torch.save(state, file))
    except RuntimeError as error:
        # torch raises a RuntimeError if a write fails; the system's error is its __context__
        raise OSError(f"{path}: {error.__context__ or error}") from None


# --------------------------------------------------------------------------------------------------
# What a file may hold: check(value, its name) returns the value in plain containers or raises
# ValueError.


def count(value, name):
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{name} is {short(value)} and no whole number from 0")
    return value


def number(value, name):
    if type(value) not in (int, float) or math.isnan(value):
        raise ValueError(f"{name} is {short(value)} and no number")
    return float(value)


def finite(value, name):
    if not math.isfinite(number(value, name)):
        raise ValueError(f"{name} is {value} and not finite")
    return float(value)


def above_zero(value, name):
    if finite(value, name) <= 0:
        raise ValueError(f"{name} is {value} and not above 0")
    return float(value)


def tensor(value, name):
    """Without attributes and subclasses, on the CPU."""
    if (type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided
            or value.is_quantized):
        raise ValueError(f"{name} is {short(value)} and no plain tensor")
    if value.device.type != "cpu":
        raise ValueError(f"{name} has no numbers in it")
    return torch.Tensor.detach(value)


def octets(value, name):
    value = tensor(value, name)
    if value.dtype != torch.uint8 or value.ndim != 1:
        raise ValueError(f"{name} is {value.dtype} of {value.ndim} dimensions and no row of bytes")
    return value


def dictionary(value, name):
    """A plain dict by names: a subclass may bring attributes that stand for its methods."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {short(value)} and no dict")
    items = dict(dict.items(value))
    if not all(type(key) is str for key in items):
        raise ValueError(f"{name} has keys that are no names")
    return items


def tensors(value, name):
    return {key: tensor(one, f"{name} {key}") for key, one in dictionary(value, name).items()}


def weights(value, name="the file"):
    """The weights of a network: a state_dict, or those of a whole run."""
    items = dictionary(value, name)
    if "numbers" in items and "model" in items:
        return weights(items["model"], "model")
    if not items:
        raise ValueError(f"{name} holds no weights")
    # What a module's get_extra_state returned; it need not be a tensor.
    extra = {key: one for key, one in items.items() if key.endswith("_extra_state")}
    return tensors({key: one for key, one in items.items() if key not in extra}, name) | extra


def settings(value, name):
    """A run's configuration, which is JSON."""
    if type(value) is not str:
        raise ValueError(f"{name} is {short(value)} and no text")
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON ({error})") from None
    if (not isinstance(found, dict) or not isinstance(found.get("train"), dict)
            or "optimizer" not in found["train"]):
        raise ValueError(f"{name} lacks train.optimizer")
    return found


def other_ranks(value, name):
    if type(value) is not list or not all(type(one) is tuple and len(one) == 2 for one in value):
        raise ValueError(f"{name} is {short(value)} and no list of pairs")
    return [(tensors(one, f"{name} {rank}"), octets(state, f"{name} {rank}"))
            for rank, (one, state) in enumerate(value, 1)]


def recent(value, name):
    if type(value) not in (tuple, list) or len(value) != 2 or any(type(one) not in (int, float)
                                                                  for one in value):
        raise ValueError(f"{name} is {short(value)} and not two numbers")
    return value[0], finite(value[1], name)


def optional(check):
    return lambda value, name: None if value is None else check(value, name)


# The attributes of a trainer and its statistics that loading sets. No name that a file holds is
# ever set.
NUMBERS = {"epoch": count, "_rollouts": count, "_minibatches_owed": finite,
           "_rate_factor": above_zero,
           "_override_lr": optional(finite), "best_score": number, "_recent": recent}


def numbers(value, name):
    items = dictionary(value, name)
    unknown = items.keys() - NUMBERS.keys()
    if unknown:
        raise ValueError(f"{name} holds {short(min(unknown))}, which is none of "
                         f"{', '.join(NUMBERS)}")
    if "epoch" not in items:
        raise ValueError(f"{name} lacks epoch")
    return {key: NUMBERS[key](one, key) for key, one in items.items()}


NEEDED = {"model": weights, "tensors": tensors, "environments": octets, "others": other_ranks,
          "numbers": numbers,
          "epoch": count, "global_step": count, "uptime": finite, "config": settings}
# name: (check, value if it is missing). The metadata are the user's, so they may be anything.
OPTIONAL = {"adam": (optional(dictionary), None), "bonus": (optional(dictionary), None),
            "metadata": (lambda value, name: value, {})}


def WHOLE_RUN(value, name="the file"):
    """A trainer's state, as runs.state_of gives it, with its configuration as a dict."""
    items = dictionary(value, name)
    if not items.keys() & NEEDED.keys():
        raise ValueError("it holds nothing of a run; weights alone are for --load-model-path")
    for key in NEEDED:
        if key not in items:
            raise ValueError(f"it lacks {key}")
    found = {key: check(items[key], key) for key, check in NEEDED.items()}
    found |= {key: check(items.get(key, default), key)
              for key, (check, default) in OPTIONAL.items()}
    if found["epoch"] != found["numbers"]["epoch"]:
        raise ValueError(f"it has two epochs, {found['epoch']} and {found['numbers']['epoch']}")
    return found


def short(value):
    """A value for a message: of a tensor its size, of others the type and the beginning."""
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)}"
    if type(value) in (str, int, float, bool, type(None)):
        text = ascii(value) if type(value) is not int or abs(value) < 2**64 else "a huge number"
        return text if len(text) <= 40 else text[:37] + "..."
    return f"a {type(value).__name__}"


# --------------------------------------------------------------------------------------------------
# Reading


def load(path, check=weights):
    """What a file holds, on the CPU, as `check` (`weights` or `WHOLE_RUN`) gives it. Raises
    ConfigError for a file that cannot be read, is damaged or holds something else."""
    path = Path(path)
    try:
        return _read(path, check)
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}) or not a checkpoint{_another(path, check)}") from None


def _read(path, check):
    """As `load`; ValueError says what is wrong."""
    if not path.is_file():  # checked first, because opening a pipe would wait for ever
        raise ValueError("it is a folder" if path.is_dir() else "it is no file")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ValueError("it is empty")
            _check_sums(file, size)
            file.seek(0)
            with warnings.catch_warnings():  # torch warns of what `check` refuses below
                warnings.simplefilter("ignore")
                found = torch.load(file, weights_only=True, map_location="cpu")
    except ValueError:
        raise
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from None
    except Exception as error:  # damaged bytes make torch's reader raise almost anything
        raise ValueError(_reason(error)) from None
    return check(found)


def _check_sums(file, size):
    """Hold a zip file against its checksums. Files of before torch 1.6 are none,
    and have no checksums."""
    begin = file.read(4)
    if begin != b"PK\x03\x04"[: len(begin)]:
        return
    try:
        with zipfile.ZipFile(file) as entries:
            packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.infolist())
            broken = None if packed else entries.testzip()
    except OSError:
        raise
    except Exception:  # damaged bytes make zipfile raise almost anything
        ended = b"PK\x05\x06" in _tail(file, size)
        raise ValueError("its parts do not fit together" if ended else f"truncated at byte {size:,}") from None
    if packed:
        raise ValueError("its entries are compressed, which torch's never are")
    if broken is not None:
        raise ValueError(f"{broken.partition('/')[2]} does not match its checksum")


def _tail(file, size):
    file.seek(max(0, size - 65600))
    return file.read()


def _reason(error):
    """What torch's reader says of a file, without its advice to trust it."""
    text = str(error)
    foreign = re.search(r"GLOBAL ([\w.]+)", text)
    if foreign:
        return f"it holds {foreign[1][:80]}, which is neither a tensor nor a plain value"
    told = "" if text.startswith("Weights only") else text.partition("\n")[0].partition(". ")[0]
    if " " not in told:  # not a sentence: torch names only the byte that it could not read
        return "torch cannot read it: it is no file that torch.save wrote"
    return f"torch cannot read it: {told[:120]}"


MOST_LOOKED_AT = 20  # how many files beside a damaged one are tried


def _another(path, check):
    """The end of a message about `path`: the newest file beside it that is
    whole, if there is one."""
    beside = {}
    with contextlib.suppress(OSError):
        for other in path.parent.glob(f"*{path.suffix}"):
            if other.name != path.name and other.is_file():
                beside[other] = other.stat().st_mtime
    newest = sorted(beside, key=beside.get, reverse=True)[:MOST_LOOKED_AT]
    for kind, told in ((check, "the newest whole one is {}"),
                       (weights, "the newest whole weights are {}, for "
                                "--load-model-path")):
        for other in newest:
            with contextlib.suppress(ValueError):
                _read(other, kind)
                return f"; {told.format(other)}."
    return "; there is no whole one beside it."
