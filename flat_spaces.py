"""Spaces as flat arrays: an observation of any nesting as one array, actions of any nesting as one row, and the checks
of what an environment returns against the spaces that it declares. emulation.py has the environments.

    flat = FlatObservation(env.observation_space)       # .flatten, .unflatten, .write; .dtype is the structured one
    action = FlatAction(env.action_space)               # .flatten, .unflatten; .heads, the options of each choice

An observation of any nesting of Dict, Tuple, Box, Discrete, MultiDiscrete, MultiBinary and Text becomes one flat array:
the bytes of one structured numpy dtype. If all its leaves have one dtype the flat array has that dtype too, else it is
uint8. A plain Box keeps its shape. Actions become Discrete, MultiDiscrete or Box.
"""

import functools
import itertools
import math
import warnings

import numpy as np
from gymnasium import spaces

from errors import EnvError


@functools.cache
def warn_once(text):
    warnings.warn(text, stacklevel=3)


def store(target, value, keys=()):
    """target[...] = value, a part of an observation; warns, once, of another kind of dtype."""
    try:
        np.copyto(target, value, "same_kind")
    except TypeError:
        target[...] = value
        if hasattr(value, "dtype"):  # Python's own numbers have none
            warn_once(f"an {name_field(keys)} is {value.dtype}, but its space says {target.dtype}: numbers that do "
                      f"not fit into {target.dtype} are changed without an error. Return {target.dtype}.")


# --------------------------------------------------------------------------------------------------
# Observations: a space as one structured dtype, and as one flat Box


def _children(space):
    """[(field name, key, subspace)] of a Dict or Tuple, None for a leaf."""
    if isinstance(space, spaces.Tuple):
        return [(f"f{i}", i, sub) for i, sub in enumerate(space.spaces)]
    if not isinstance(space, spaces.Dict):
        return None
    names = [str(key) for key in space.spaces]
    if len(set(names)) < len(names) or "" in names:  # numpy's fields need distinct names
        names = [f"f{i}" for i in range(len(names))]
    return [(name, key, sub) for name, (key, sub) in zip(names, space.spaces.items(), strict=True)]


def _leaf(space):
    """(dtype, shape, low, high) of a leaf's array."""
    if isinstance(space, spaces.Box):
        return space.dtype, space.shape, space.low, space.high
    if isinstance(space, spaces.Discrete):
        return np.dtype(space.dtype), (), space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.dtype, space.shape, space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return space.dtype, space.shape, 0, 1
    if isinstance(space, spaces.Text):  # code points, ended by zeros
        return np.dtype(np.int32), (space.max_length,), 0, 0x10FFFF
    raise TypeError(
        f"{space} cannot be made flat: Dict, Tuple, Box, Discrete, MultiDiscrete, MultiBinary "
        "and Text can. Take the part out with a wrapper, e.g. gymnasium.wrappers.FilterObservation."
    )


def outside(leaf, values, valid=None, slack=0.0):
    """Where values (..., *shape) lie outside the bounds of a leaf, or are none of its choices. With valid (n in all),
    which is 0 for dead agents, values are (n, *shape), and those of the dead lie nowhere. slack: how
    far a Box's values may lie beyond a bound, relative to it or to 1."""
    _, _, low, high = _leaf(leaf)
    if slack and isinstance(leaf, spaces.Box):
        with np.errstate(over="ignore"):
            low, high = (bound + sign * slack * np.maximum(1, np.abs(bound))
                         for bound, sign in ((low, -1), (high, 1)))
    wrong = ~((values >= low) & (values <= high))
    return wrong if valid is None else wrong & (valid.reshape(-1, *[1] * (wrong.ndim - 1)) != 0)


def name_field(keys):
    """observation['a'][0] for the keys that lead to a leaf."""
    return f"observation{''.join(f'[{key!r}]' for key in keys)}"


def space_dtype(space):
    """The numpy dtype that holds one value of `space`: structured for Dict and Tuple (fields f0, f1, ... for a Tuple),
    with a shape for an array. Fields are aligned, so that torch can view them."""
    children = _children(space)
    if children is None:
        dtype, shape, _, _ = _leaf(space)
        return np.dtype((dtype, shape))
    return np.dtype(
        {"names": [name for name, _, _ in children], "formats": [space_dtype(sub) for _, _, sub in children]},
        align=True,
    )


def _leaves(space, keys=(), names=()):
    """[(keys into a value, field names, leaf space)] in order."""
    children = _children(space)
    if children is None:
        if 0 in (space.shape or ()):
            raise TypeError(f"{'/'.join(names) or 'the space'} = {space}: holds no number. Leave it out, or let each "
                            "of its sizes be 1 or more.")
        return [(keys, names, space)]
    return [leaf for name, key, sub in children for leaf in _leaves(sub, (*keys, key), (*names, name))]


def encode_text(text, length):
    points = np.zeros(length, np.int32)
    points[: len(text)] = [ord(character) for character in text]
    return points


class FlatObservation:
    """The two forms of an observation space.

    Attributes: space, the structured one; dtype, `obs_dtype`; flat_space, a Box; shape and
    flat_dtype, of the flat one. Raises TypeError for a space that has none.
    """

    def __init__(self, space):
        self.space, self.leaves = space, _leaves(space)
        self.structured = _children(space) is not None
        if not self.structured:
            dtype, shape, low, high = _leaf(space)
            self.dtype, self.flat_dtype, self.shape = dtype, dtype, shape or (1,)
            if isinstance(space, spaces.Box) and shape:
                self.flat_space = space
            else:
                self.flat_space = spaces.Box(
                    np.broadcast_to(low, self.shape).astype(dtype),
                    np.broadcast_to(high, self.shape).astype(dtype),
                    self.shape,
                    dtype.type,
                )
            return
        self.dtype = space_dtype(space)
        if self.dtype.itemsize == 0:  # nothing in it; an array needs one byte at least to be viewed
            self.dtype = np.dtype(
                {
                    "names": self.dtype.names,
                    "formats": [self.dtype[n] for n in self.dtype.names],
                    "offsets": [0] * len(self.dtype.names),
                    "itemsize": 1,
                }
            )
        leaves = [_leaf(leaf) for _, _, leaf in self.leaves]
        kinds = {dtype for dtype, _, _, _ in leaves}
        self.flat_dtype = kinds.pop() if len(kinds) == 1 and self.dtype.itemsize > 1 else np.dtype(np.uint8)
        self.shape = (self.dtype.itemsize // self.flat_dtype.itemsize,)
        low, high = np.zeros(self.shape, self.flat_dtype), np.full(self.shape, 255, np.uint8)
        if len({dtype for dtype, _, _, _ in leaves}) == 1 and self.dtype.itemsize > 1:
            parts = [
                [np.broadcast_to(bound, shape).ravel() for bound in (lowest, highest)]
                for _, shape, lowest, highest in leaves
            ]
            low, high = (np.concatenate([part[i] for part in parts]).astype(self.flat_dtype) for i in (0, 1))
        self.flat_space = spaces.Box(low, high, self.shape, self.flat_dtype.type)

    def fields(self, flat):
        """Views (n, *shape) of the leaves of flat observations (n, *flat shape), in the order of `leaves`."""
        if not self.structured:
            return [flat.reshape(len(flat), *_leaf(self.space)[1])]
        records = flat.view(self.dtype)[:, 0]
        views = []
        for _, names, _ in self.leaves:
            view = records
            for name in names:
                view = view[name]
            views.append(view)
        return views

    def find_outside(self, observations, valid, slack):
        """(how many numbers lie outside the space, the first one in words, "" for none) in the
        observations (..., *flat shape) of valid agents, valid (...). NaN counts as inside. slack:
        see `outside`."""
        count, words = 0, ""
        fields = self.fields(observations.reshape(-1, *self.shape))
        for (keys, _, leaf), values in zip(self.leaves, fields, strict=True):
            wrong = outside(leaf, values, valid, slack) & (values == values)
            if wrong.any() and not words:
                _, shape, *bounds = _leaf(leaf)
                agent, *index = np.argwhere(wrong)[0].tolist()
                low, high = (np.broadcast_to(bound, shape)[tuple(index)] for bound in bounds)
                words = (f"{name_field(keys)}{index or ''} was {values[(agent, *index)]!s}, declared "
                         f"are {low!s} to {high!s}")
            count += np.count_nonzero(wrong)
        return count, words

    def note_indistinct(self, observations, name):
        """Warn of numbers in observations (..., *flat shape), a tensor, that are several, but one in float32, in which
        a network computes."""
        wide = [isinstance(leaf, spaces.Box) and not np.can_cast(leaf.dtype, np.float32) for *_, leaf in self.leaves]
        fields = self.fields(observations.cpu().numpy().reshape(-1, *self.shape)) if any(wide) else ()
        for (keys, *_), values in itertools.compress(zip(self.leaves, fields, strict=False), wide):
            columns = values.reshape(len(values), -1)
            for column in columns[:, np.abs(columns).max(0) > 2**24].T:
                if len(np.unique(column)) > len(np.unique(column.astype(np.float32))):
                    warn_once(f"{name}: the {name_field(keys)} has numbers near "
                              f"{column[0]} that are one number in float32, so the network cannot tell them apart. "
                              "Give --train.norm-obs True, which first subtracts their mean.")
                    return

    def flatten(self, value, out=None):
        """One observation as a flat array, new or written into `out`."""
        flat = np.zeros(self.shape, self.flat_dtype) if out is None else out
        self.write(value, [view[0] if view.ndim > 1 else view[:1].reshape(()) for view in self.fields(flat[None])])
        return flat

    def write(self, value, views):
        """Write an observation into the views of its leaves; a batch of observations into those of a batch."""
        for (keys, _, leaf), view in zip(self.leaves, views, strict=True):
            part = value
            for key in keys:
                part = part[key]
            store(view, encode_text(part, leaf.max_length) if isinstance(leaf, spaces.Text) else part,
                  keys)

    def unflatten(self, flat):
        """The inverse of `flatten`: arrays are views of `flat`, Discrete values numpy scalars."""
        views = iter(self.fields(np.ascontiguousarray(flat)[None]))

        def nest(space):
            children = _children(space)
            if children is None:
                value = next(views)[0]
                if isinstance(space, spaces.Discrete):
                    return space.dtype.type(value)
                if isinstance(space, spaces.Text):
                    return "".join(map(chr, value[value != 0]))
                return np.asarray(value)
            parts = [nest(sub) for _, _, sub in children]
            return tuple(parts) if isinstance(space, spaces.Tuple) else dict(zip(space.spaces, parts, strict=True))

        return nest(self.space)


def nativize_dtype(env):
    """The structure of an environment's observations for nativize_tensor, from an environment or its `obs_dtype`:
    (torch dtype, shape, first byte, bytes) of a leaf, {field: ...} of a structure."""
    import torch

    def nest(dtype, offset):
        if dtype.names is not None:
            return {name: nest(dtype.fields[name][0], offset + dtype.fields[name][1]) for name in dtype.names}
        return torch.from_numpy(np.zeros(1, dtype.base)).dtype, dtype.shape, offset, dtype.itemsize

    env = getattr(env, "driver_env", env)  # of a vector of environments, one
    return nest(getattr(env, "obs_dtype", env), 0)


def nativize_tensor(observations, native_dtype):
    """Flat observations (..., flat) as views (..., *shape) in their own dtype: {field: tensor}, nested as the space is
    (fields f0, f1, ... for a Tuple), or the tensor itself if the space is no Dict or Tuple. Within torch.onnx.export
    observations are the fields' numbers one after another, because ONNX cannot view bytes as other numbers."""
    import torch

    if not isinstance(native_dtype, dict):
        return observations
    as_numbers, column = torch.onnx.is_in_onnx_export(), 0
    octets = observations if as_numbers else observations.view(torch.uint8)

    def nest(native):
        nonlocal column
        if isinstance(native, dict):
            return {name: nest(part) for name, part in native.items()}
        dtype, shape, offset, size = native
        if as_numbers:
            offset, size = column, math.prod(shape)
            column += size
        part = octets[..., offset : offset + size]
        part = part.to(dtype) if as_numbers else part.view(dtype)
        return part.unflatten(-1, shape) if shape else part.squeeze(-1)

    return nest(native_dtype)


# --------------------------------------------------------------------------------------------------
# Actions: any nesting as one row of integers, or of floats


class FlatAction:
    """The two forms of an action space: `space`, the environment's, and `flat_space`, a Discrete,
    MultiDiscrete or Box.

    MultiBinary and boxes of integers become one head a number. Raises TypeError for a space
    that mixes integers with floats or holds anything else, and ValueError for a box of
    integers without bounds.
    """

    def __init__(self, space):
        self.space = space
        heads, starts, lows, highs = [], [], [], []
        self.parts, self.leaves = [], _leaves(space)  # parts: (leaf, first column, columns)
        for _, _, leaf in self.leaves:
            first = len(heads) + len(lows)
            if isinstance(leaf, spaces.Discrete):
                heads.append(int(leaf.n))
                starts.append(int(leaf.start))
            elif isinstance(leaf, spaces.MultiDiscrete):
                heads += leaf.nvec.ravel().tolist()
                starts += np.broadcast_to(leaf.start, leaf.shape).ravel().tolist()
            elif isinstance(leaf, spaces.MultiBinary):
                heads += [2] * math.prod(leaf.shape)
                starts += [0] * math.prod(leaf.shape)
            elif isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.integer):
                sizes = leaf.high.astype(np.int64) - leaf.low.astype(np.int64) + 1
                heads += sizes.ravel().tolist()
                starts += leaf.low.astype(np.int64).ravel().tolist()
            elif isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating):
                lows += leaf.low.ravel().tolist()
                highs += leaf.high.ravel().tolist()
            else:
                raise TypeError(
                    f"the action space holds {leaf}; policies act in Discrete, "
                    "MultiDiscrete, MultiBinary, Box, and Dict and Tuple of these."
                )
            self.parts.append((leaf, first, len(heads) + len(lows) - first))
        if bool(heads) == bool(lows):
            what = "mixes discrete and continuous parts; policies act in one kind" if heads else "is empty"
            raise TypeError(f"the action space {space} {what}.")
        if heads and not 0 < min(heads) <= max(heads) <= 2**16:
            raise ValueError(f"the action space {space} has too many values for a discrete choice; bound it.")
        self.heads, self.starts = heads, np.array(starts, np.int64)
        self.firsts = np.cumsum([0, *heads[:-1]])  # of each head's options
        self.columns = len(heads) + len(lows)
        # In the widest dtype: rounded to a float32 a bound may lie beyond that of a float64.
        kind = np.result_type(np.float32, *(leaf.dtype for leaf, _, _ in self.parts))
        self.low, self.high = np.array(lows, kind), np.array(highs, kind)
        if lows:
            low, high = self.low.astype(np.float32), self.high.astype(np.float32)
            self.flat_space = spaces.Box(low, high, (self.columns,), np.float32)
        else:
            self.flat_space = spaces.Discrete(heads[0]) if len(heads) == 1 else spaces.MultiDiscrete(heads)
        self.start = int(space.start) if isinstance(space, spaces.Discrete) else None

    def unflatten(self, row):
        """An action of the environment from a row of integers, or of floats, which are clipped to their bounds."""
        if self.start is not None:
            return np.int64(row[0] + self.start)
        row = row + self.starts if self.heads else np.minimum(np.maximum(row, self.low), self.high)
        parts = iter(self.parts)

        def build(space):
            children = _children(space)
            if children is None:
                leaf, first, count = next(parts)
                if isinstance(leaf, spaces.Discrete):
                    return np.int64(row[first])
                return row[first : first + count].astype(leaf.dtype).reshape(leaf.shape)
            values = [build(sub) for _, _, sub in children]
            return tuple(values) if isinstance(space, spaces.Tuple) else dict(zip(space.spaces, values, strict=True))

        return build(self.space)

    def flatten(self, action):
        """The row that `unflatten` turns into this action."""
        values = []
        for keys, _, _ in _leaves(self.space):
            part = action
            for key in keys:
                part = part[key]
            values.append(np.ravel(part))
        row = np.concatenate(values)
        return (row - self.starts).astype(np.int32) if self.heads else row.astype(np.float32)

    def write_mask(self, target, mask):
        """Write an action mask into a row of heads' options: an array of all of them, or Dicts and Tuples nested as the
        space is, with a tuple of one a head for a MultiDiscrete. None allows everything. A mask that forbids a whole
        head allows all of that head: its choice does not count."""
        if mask is None:
            target[:] = 1
            return
        mask = self._options(mask)
        if mask.shape != target.shape:
            raise EnvError(
                f"an action mask has {mask.size} entries, the action space has {target.size} options.")
        target[:] = mask != 0
        if b"\0" in np.bitwise_or.reduceat(target, self.firsts).tobytes():  # half the time of .all()
            target[np.repeat(np.bitwise_or.reduceat(target, self.firsts) == 0, self.heads)] = 1

    def _options(self, mask):
        """A mask as one array of all options."""
        if isinstance(mask, dict | tuple) or (isinstance(mask, list) and any(map(np.ndim, mask))):
            parts = []
            for keys, _, _ in _leaves(self.space):
                part = mask
                for key in keys:
                    part = part[key]
                parts += part if isinstance(part, tuple | list) else [part]
            mask = np.concatenate([np.ravel(part) for part in parts])
        return np.ravel(mask)

    def check_masks(self, env, masks):
        """Whether there are any among an environment's first masks, None for none. EnvError if they are no flags."""
        given = [self._options(mask) for mask in masks if mask is not None]
        for options in given:
            if not np.isin(options, (0, 1)).all():
                raise EnvError(
                    f"{env}: an action mask has a {options[~np.isin(options, (0, 1))][0]}; expected 1 for each "
                    "action that is allowed and 0 for the others.")
        return bool(given)


def find_mask(observation, info):
    """An environment's action mask, by the conventions of Gymnasium (info) and PettingZoo (info or observation)."""
    if "action_mask" in info:
        return info["action_mask"]
    return observation.get("action_mask") if isinstance(observation, dict) else None


# --------------------------------------------------------------------------------------------------
# What environments return: the check of the first reset and step, and infos


HAIR = 1e-6  # relative to a bound, or to 1: a number outside by less was only rounded
RESET = "observation", "info"  # what Gymnasium's reset and step return
STEP = "observation", "reward", "terminated", "truncated", "info"


def as_array(value):
    """The value as an array, one of objects if its parts have several shapes."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.array(None)


def check_returned(env, call, returned, space, shape=()):
    """Raise a EnvError if what `reset` or `step` returned is not what Gymnasium and the space say.

    env: the environment in words; call: "reset" or "step"; space: of the observations, None for
    those that are not checked; shape: of rewards and flags, (num_envs,) of a vector.
    """
    names = STEP if call == "step" else RESET
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        got = f"{len(returned)} values" if isinstance(returned, tuple | list) else describe(returned)
        raise EnvError(f"{env}: {call}() must return {', '.join(names)}, got {got}.")
    for name, value in zip(names, returned, strict=True):
        what, array = f"{env}: the {name} of {call}()", as_array(value)
        if name == "observation":
            if space is not None:
                check_value(space, value, what)
        elif name == "info":
            if not hasattr(value, "keys"):
                raise EnvError(f"{what} must be a dict, got {describe(value)}; {{}} if it is empty.")
            if "action_masks" in value:
                raise EnvError(f'{what} has "action_masks". Name the mask "action_mask".')
        elif (array.shape != shape and (shape or name != "reward" or array.shape != (1,))
              ) or array.dtype.kind not in "biuf":
            expected = f"numbers of shape {shape}" if shape else "a number" if name == "reward" else "a bool"
            got = f"shape {array.shape} of {array.dtype}" if array.shape else describe(value)
            raise EnvError(f"{env}: the {name} of {call}() must be {expected}, got {got}.")


def check_value(space, value, what):
    """Raise a EnvError that says where `value` breaks `space`: keys, type, shape, dtype or bounds. A
    float64 passes if a float32 is declared, as it can be cast; floats may be a HAIR outside."""
    children, expected, got = _children(space), None, describe(value)
    if children is not None:
        keys = [key for _, key, _ in children]
        if isinstance(space, spaces.Tuple):
            if not isinstance(value, tuple | list) or len(value) != len(keys):
                expected = f"a tuple of {len(keys)}"
        elif not isinstance(value, dict) or set(value) != set(keys):
            expected = f"a dict with the keys {', '.join(map(str, keys))}"
    elif isinstance(space, spaces.Text):
        if not isinstance(value, str) or len(value) > space.max_length or "\0" in value:
            expected = str(space)
    else:
        dtype, shape, low, high = _leaf(space)
        array = as_array(value)
        casts = np.can_cast(array.dtype, dtype, "same_kind") or (dtype.kind in "ui" and array.dtype.kind in "uib")
        if array.shape != shape:
            expected, got = f"shape {shape}", f"shape {array.shape}" if array.shape else got
        elif not casts:
            expected, got = f"dtype {dtype}", array.dtype
        elif (wrong := outside(space, array, slack=HAIR if dtype.kind == "f" else 0)).any():
            where = tuple(int(i[0]) for i in np.nonzero(np.atleast_1d(wrong)))
            got, lowest, highest = (np.atleast_1d(np.broadcast_to(part, shape))[where] for part in (array, low, high))
            expected = f"{lowest} to {highest} in element {where}"
    if expected is not None:
        raise EnvError(
            f"{what} breaks its space: expected {expected}, got {got}. Correct the space that the environment "
            "declares, or what it returns.")
    for _, key, sub in children or ():
        check_value(sub, value[key], f"{what}[{key!r}]")


def describe(value):
    shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
    return f"{value!r} ({type(value).__name__}{shape})"[:200]


def numeric_scalars(info, prefix=""):
    """{"a/b": float} of the finite numbers in an info and in the dicts within it."""
    numbers = {}
    for key, value in info.items():
        kind = type(value)
        if kind is dict:
            numbers |= numeric_scalars(value, f"{prefix}{key}/")
            continue
        if kind is not float and kind is not int:
            if not isinstance(value, int | float | np.number | np.bool_) and (
                not isinstance(value, np.ndarray) or value.size != 1 or value.dtype.kind not in "biuf"
            ):
                continue
            value = np.ravel(value)[0]
        if math.isfinite(value):
            numbers[f"{prefix}{key}" if prefix else key] = float(value)
    return numbers


def episode_means(sums, n):
    """The log of n episodes, {} for none. sums: {name: (sum, number of episodes that have it)}."""
    means = {name: total / count for name, (total, count) in sums.items() if count}
    means = {name: value for name, value in means.items() if math.isfinite(value)}
    if "episode_return" in means:
        means.setdefault("score", means["episode_return"])
    return {**means, "n": n} if n else {}


# --------------------------------------------------------------------------------------------------
# What a space holds, as a network and `auto` see it

PICTURE = 28  # pixels: a smaller picture is a grid, as MiniGrid's, which have 25 at most
IMAGE = 32  # pixels: a side of an array that is an image whatever its layout
KINDS = 32  # at most so many kinds of pieces on a board, and so long sides


def leaf_kind(space, boards=True):
    """How a space that is no Dict or Tuple is read: "choices" (one-hot),
    "image", "board" or "numbers"."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return "choices"
    if boards and _is_board(space):
        return "board"
    return "image" if _is_image(space) else "numbers"


def _is_image(space):
    """Three dimensions of uint8, 5 × 5 or more; of IMAGE × IMAGE or more also a plane, a stack, uint16, and floats
    within [0, 1] or [0, 255]."""
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3, 4):
        return False
    if space.dtype == np.uint8 and len(space.shape) == 3:
        return shorter_side(space) >= 5
    return shorter_side(space) >= IMAGE and (space.dtype in (np.uint8, np.uint16) or (
        space.dtype.kind == "f" and space.low.min() == 0 and space.high.max() in (1, 255)))


def _is_board(space):
    if (not isinstance(space, spaces.Box) or space.dtype.kind not in "iub"
            or len(space.shape) not in (2, 3)):
        return False
    sides = sorted(space.shape)[-2:]
    return (sides[0] >= 3 and sides[1] <= KINDS
            and int(space.high.max()) - int(space.low.min()) < KINDS)


def shorter_side(space):
    """The shorter side of an image; the smallest of its last three sizes is taken for the channels."""
    return sorted(space.shape[-3:])[-2]


def action_bounds(space):
    """(low, high) of a Box's numbers, each (A,) float64, infinite where there is none; None for another space. Many
    environments write "no bound" as a huge number, often float32's largest: within a range of over 2e9 one beyond 1e9
    counts as none."""
    if not isinstance(space, spaces.Box):
        return None
    low, high = (bound.astype(np.float64).ravel() for bound in (space.low, space.high))
    vast = high / 2 - low / 2 > 1e9
    return np.where(vast & (low < -1e9), -np.inf, low), np.where(vast & (high > 1e9), np.inf, high)
