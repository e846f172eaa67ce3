"""Convert spaces to flat arrays, and check values against their spaces.

    flat = FlatObservation(env.observation_space)   # .flatten, .unflatten; .dtype: structured
    action = FlatAction(env.action_space)           # .unflatten; .heads, .flat_space

An observation space of any nesting (Dict, Tuple, Box, Discrete, MultiDiscrete, MultiBinary)
becomes one flat array: the bytes of one structured numpy dtype. If all leaves have one dtype, the
array has that dtype too, else uint8. A plain Box keeps its shape. Actions become Discrete,
MultiDiscrete or Box. emulation.py has the environments.
"""

import functools
import itertools
import math
import operator
import warnings

import numpy as np
from gymnasium import spaces

from errors import EnvError

MAX_OPTIONS = 2**16  # of a discrete choice: each is a logit


@functools.cache
def warn_once(text):
    warnings.warn(text, stacklevel=3)


def store(target, value, keys=()):
    """Copy a part of an observation to target; warn once of another dtype."""
    try:
        np.copyto(target, value, "same_kind")
    except TypeError:
        target[...] = value
        if hasattr(value, "dtype"):  # Python's numbers have none
            warn_once(
                f"an {name_field(keys)} is {value.dtype}, but its space says {target.dtype}: "
                f"numbers that do not fit into {target.dtype} are changed without an error. "
                f"Return {target.dtype}.")


# --------------------------------------------------------------------------------------------------
# The tree of a space


LEAVES = spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary


def _children(space):
    """Return [(field name, key, subspace)] of a Dict or Tuple, None for a leaf."""
    if isinstance(space, spaces.Tuple):
        return [(f"f{i}", i, sub) for i, sub in enumerate(space.spaces)]
    if not isinstance(space, spaces.Dict):
        return None
    return [(str(key), key, sub) for key, sub in space.spaces.items()]


def _leaves(space, keys=(), names=()):
    """Return [(keys into a value, field names, leaf space)] in order."""
    children, name = _children(space), "/".join(names) or "the space"
    if children is None and not isinstance(space, LEAVES):
        raise EnvError(f"{name} = {type(space).__name__}: cannot be made flat; Dict, Tuple, Box, "
                       "Discrete, MultiDiscrete and MultiBinary can. Take it out, e.g. with "
                       "gymnasium.wrappers.FilterObservation.")
    if children == [] or 0 in (space.shape or ()):
        raise EnvError(f"{name} = {space}: holds no number. Leave it out, or let each of its sizes "
                       "be 1 or more.")
    if children is None:
        return [(keys, names, space)]
    return [leaf for name, key, sub in children
            for leaf in _leaves(sub, (*keys, key), (*names, name))]


def _leaf(space):
    """Return (dtype, shape, low, high) of a leaf's array."""
    if isinstance(space, spaces.Box):
        return space.dtype, space.shape, space.low, space.high
    if isinstance(space, spaces.Discrete):
        return np.dtype(space.dtype), (), space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.dtype, space.shape, space.start, space.start + space.nvec - 1
    return space.dtype, space.shape, 0, 1  # MultiBinary


def _bounds(arrays):
    """Return the low and high of each number of several leaves (of `_leaf`)."""
    return [np.concatenate([np.broadcast_to(array[i], array[1]).ravel() for array in arrays])
            for i in (2, 3)]


def _get_part(value, keys):
    """Return value[keys[0]][keys[1]]..."""
    return functools.reduce(operator.getitem, keys, value)


def _nest(space, values):
    """Nest the next leaves of an iterator as the space is nested."""
    children = _children(space)
    if children is None:
        return next(values)
    parts = [_nest(sub, values) for _, _, sub in children]
    if isinstance(space, spaces.Tuple):
        return tuple(parts)
    return dict(zip(space.spaces, parts, strict=True))


def name_field(keys):
    """Write the keys that lead to a leaf as observation['a'][0]."""
    return f"observation{''.join(f'[{key!r}]' for key in keys)}"


def space_dtype(space):
    """Return the numpy dtype of one value: structured for Dict and Tuple.

    A Tuple's fields are f0, f1, ... Fields are aligned, so that torch can view them.
    """
    children = _children(space)
    if children is None:
        return np.dtype(_leaf(space)[:2])
    names, _, subspaces = zip(*children, strict=True)
    return np.dtype({"names": names, "formats": list(map(space_dtype, subspaces))}, align=True)


# --------------------------------------------------------------------------------------------------
# Observations


def outside(leaf, values, slack=0.0):
    """Mark the values (..., *shape) that are not in a leaf space.

    slack: how far a Box's values may lie beyond a bound, relative to it or to 1.
    """
    _, _, low, high = _leaf(leaf)
    if slack and isinstance(leaf, spaces.Box):
        with np.errstate(over="ignore"):
            low = low - slack * np.maximum(1, np.abs(low))
            high = high + slack * np.maximum(1, np.abs(high))
    return ~((values >= low) & (values <= high))


class FlatObservation:
    """The two forms of an observation space.

    Attributes: space, the structured one; dtype, `obs_dtype`; flat_space, a Box; shape and
    flat_dtype of the flat one; leaves. Raises EnvError for a space without a flat form.
    """

    def __init__(self, space):
        self.space = space
        self.leaves = _leaves(space)
        self.structured = _children(space) is not None
        arrays = [_leaf(leaf) for *_, leaf in self.leaves]
        has_one_dtype = len({dtype for dtype, *_ in arrays}) == 1
        self.flat_dtype = arrays[0][0] if has_one_dtype else np.dtype(np.uint8)
        if self.structured:
            self.dtype = space_dtype(space)
            self.shape = (self.dtype.itemsize // self.flat_dtype.itemsize,)
        else:
            self.dtype = self.flat_dtype
            self.shape = arrays[0][1] or (1,)
        if isinstance(space, spaces.Box) and space.shape:
            self.flat_space = space
        else:
            low, high = np.zeros(self.shape, self.flat_dtype), np.full(self.shape, 255, np.uint8)
            if has_one_dtype:  # the leaves follow each other without a gap
                low, high = (bound.astype(self.flat_dtype).reshape(self.shape)
                             for bound in _bounds(arrays))
            self.flat_space = spaces.Box(low, high, self.shape, self.flat_dtype.type)
        self._flat = np.zeros(self.shape, self.flat_dtype)
        self._views = [view[0, ...] for view in self.fields(self._flat[None])]

    def fields(self, flat):
        """View flat observations (n, *flat shape) as the leaves, [(n, *shape)]."""
        if not self.structured:
            return [flat.reshape(len(flat), *_leaf(self.space)[1])]
        records = flat.view(self.dtype)[:, 0]
        return [_get_part(records, names) for _, names, _ in self.leaves]

    def find_outside(self, observations, valid, slack):
        """Find numbers of valid agents outside the space; NaN counts as inside.

        Returns (how many, the first one in words or ""). observations (..., *flat shape), valid
        (...); slack: as of `outside`.
        """
        count, words = 0, ""
        fields = self.fields(observations.reshape(-1, *self.shape)[valid.reshape(-1) != 0])
        for (keys, _, leaf), values in zip(self.leaves, fields, strict=True):
            wrong = outside(leaf, values, slack) & (values == values)
            if wrong.any() and not words:
                _, shape, *bounds = _leaf(leaf)
                row, *index = np.argwhere(wrong)[0].tolist()
                low, high = (np.broadcast_to(bound, shape)[tuple(index)] for bound in bounds)
                words = (f"{name_field(keys)}{index or ''} was {values[(row, *index)]!s}, "
                         f"declared are {low!s} to {high!s}")
            count += np.count_nonzero(wrong)
        return count, words

    def flatten(self, value, out=None):
        """Write one observation to a flat array, by default a new one, and return it."""
        if out is None:
            out = np.zeros(self.shape, self.flat_dtype)
        if self.structured:
            self.write(value, self._views)
            value = self._flat
        store(out, value)
        return out

    def write(self, value, views):
        """Write an observation, or a batch of them, to views of its leaves."""
        for (keys, *_), view in zip(self.leaves, views, strict=True):
            store(view, _get_part(value, keys), keys)

    def unflatten(self, flat):
        """Invert `flatten`: arrays are views of `flat`, Discrete values numpy scalars."""
        fields = self.fields(np.ascontiguousarray(flat)[None])
        return _nest(self.space, (
            field[0] if isinstance(leaf, spaces.Discrete) else field[0, ...]
            for (*_, leaf), field in zip(self.leaves, fields, strict=True)))


def nativize_dtype(env):
    """Return the structure of observations that nativize_tensor takes.

    env: an environment, a vector of them, or an `obs_dtype`. A leaf is (torch dtype, shape, first
    byte, bytes), a structure {field: ...}.
    """
    import torch

    def nest(dtype, offset):
        if dtype.names is None:
            torch_dtype = torch.from_numpy(np.zeros(1, dtype.base)).dtype
            return torch_dtype, dtype.shape, offset, dtype.itemsize
        return {name: nest(field, offset + start)
                for name, (field, start, *_) in dtype.fields.items()}

    env = getattr(env, "driver_env", env)
    space = getattr(env, "single_observation_space", None)  # of an environment in C
    dtype = env if space is None else np.dtype((space.dtype, space.shape))
    return nest(getattr(env, "obs_dtype", dtype), 0)


def nativize_tensor(observations, native_dtype):
    """View flat observations (..., flat) as (..., *shape) in the leaves' dtypes.

    Returns {field: tensor}, nested as the space is (fields f0, f1, ... for a Tuple), or the tensor
    itself for a space of another kind. Within torch.onnx.export observations are the fields'
    numbers one after another, because ONNX cannot view bytes as other numbers.
    """
    import torch

    if not isinstance(native_dtype, dict):
        return observations
    in_export, column = torch.onnx.is_in_onnx_export(), 0
    octets = observations if in_export else observations.view(torch.uint8)

    def nest(native):
        nonlocal column
        if isinstance(native, dict):
            return {name: nest(part) for name, part in native.items()}
        dtype, shape, offset, size = native
        if in_export:
            offset, size = column, math.prod(shape)
            column += size
        part = octets[..., offset : offset + size]
        part = part.to(dtype) if in_export else part.view(dtype)
        return part.unflatten(-1, shape) if shape else part.squeeze(-1)

    return nest(native_dtype)


# --------------------------------------------------------------------------------------------------
# Actions


class FlatAction:
    """The two forms of an action space: a row of numbers, and the nested one.

    Attributes: space, the environment's; flat_space, a Discrete, MultiDiscrete or Box; columns of
    a row; heads, the options of each discrete choice ([] for floats), starts and firsts, the
    first number and the first option of each; low, high of floats. MultiBinary and boxes of
    integers become one head per number. Raises EnvError for other spaces, for a mix of integers
    and floats, and for integers of more than MAX_OPTIONS values.
    """

    def __init__(self, space):
        self.space = space
        self.leaves = _leaves(space)
        arrays = [_leaf(leaf) for *_, leaf in self.leaves]
        sizes = [math.prod(shape) for _, shape, *_ in arrays]
        self.parts = [  # (leaf, first column, columns)
            (leaf, first, size) for (*_, leaf), first, size
            in zip(self.leaves, itertools.accumulate(sizes, initial=0), sizes, strict=False)]
        lows, highs = _bounds(arrays)
        discrete = {dtype.kind in "biu" for dtype, *_ in arrays}
        if len(discrete) > 1:
            raise EnvError(f"the action space {space}: mixes integers and floats. Use only "
                           "discrete spaces, or only boxes of floats.")
        self.columns = len(lows)
        self.heads, self.starts = [], np.zeros(0, np.int64)
        self.low = self.high = np.zeros(0, np.float32)
        self.start = int(space.start) if isinstance(space, spaces.Discrete) else None
        if discrete == {False}:
            # in the widest dtype: rounded to float32 a bound may lie beyond that of a float64
            dtype = np.result_type(np.float32, lows, highs)
            self.low, self.high = lows.astype(dtype), highs.astype(dtype)
            self.flat_space = spaces.Box(self.low.astype(np.float32), self.high.astype(np.float32),
                                         (self.columns,), np.float32)
        else:
            self.heads = [int(high) - int(low) + 1 for low, high in zip(lows, highs, strict=True)]
            if max(self.heads) > MAX_OPTIONS:
                raise EnvError(f"the action space {space}: a choice has {max(self.heads):,} values, "
                               f"at most {MAX_OPTIONS:,} are possible. Use narrower bounds, several "
                               "choices, or a box of floats.")
            self.starts = lows.astype(np.int64)
            self.flat_space = (spaces.Discrete(self.heads[0]) if len(self.heads) == 1
                               else spaces.MultiDiscrete(self.heads))
        self.firsts = np.cumsum([0, *self.heads[:-1]])

    def unflatten(self, row):
        """Return the action of a row of integers, or of floats, which are clipped."""
        if self.start is not None:
            return np.int64(row[0] + self.start)
        row = (row + self.starts if self.heads
               else np.minimum(np.maximum(row, self.low), self.high))
        return _nest(self.space, (
            np.int64(row[first]) if isinstance(leaf, spaces.Discrete)
            else row[first : first + count].astype(leaf.dtype).reshape(leaf.shape)
            for leaf, first, count in self.parts))

    def write_mask(self, target, mask):
        """Write an action mask to a row of all heads' options; None allows all.

        mask: an array of all options, or nested as the space is, with a tuple of one mask per head
        for a MultiDiscrete. A mask that forbids a whole head allows all of it: its choice does not
        count.
        """
        if mask is None:
            target[:] = 1
            return
        mask = self._options(mask)
        if mask.shape != target.shape:
            raise EnvError(f"an action mask has {mask.size} entries; "
                           f"the action space has {target.size} options.")
        target[:] = mask != 0
        any_allowed = np.bitwise_or.reduceat(target, self.firsts)
        if b"\0" in any_allowed.tobytes():  # half the time of .all()
            target[np.repeat(any_allowed == 0, self.heads)] = 1

    def _options(self, mask):
        """Join a mask to one array of all options."""
        if isinstance(mask, dict | tuple) or (isinstance(mask, list) and any(map(np.ndim, mask))):
            parts = []
            for keys, _, _ in self.leaves:
                part = _get_part(mask, keys)
                parts += part if isinstance(part, tuple | list) else [part]
            mask = np.concatenate([np.ravel(part) for part in parts])
        return np.ravel(mask)

    def check_masks(self, env, masks):
        """Tell whether an environment gives masks at its first reset; they must be flags."""
        arrays = [self._options(mask) for mask in masks if mask is not None]
        for options in arrays:
            if not np.isin(options, (0, 1)).all():
                raise EnvError(
                    f"{env}: an action mask has a {options[~np.isin(options, (0, 1))][0]}. Give "
                    "1 for each action that is allowed and 0 for the others.")
        return bool(arrays)


def find_mask(observation, info):
    """Find the action mask where Gymnasium (info) and PettingZoo (observation) put it."""
    if "action_mask" in info:
        return info["action_mask"]
    return observation.get("action_mask") if isinstance(observation, dict) else None


# --------------------------------------------------------------------------------------------------
# What environments return: the check of the first reset and step, and infos


ROUNDING_TOLERANCE = 1e-6  # relative to a bound, or to 1: rounding alone moves a number by less
RESET = "observation", "info"  # what Gymnasium's reset and step return
STEP = "observation", "reward", "terminated", "truncated", "info"


def check_returned(env, call, returned, space, shape=(), to_array=np.asarray):
    """Raise an EnvError if `reset` or `step` returned something else than declared.

    env: the environment in words; call: "reset" or "step"; space: of the observations, None for
    those that are not checked; shape: of rewards and flags, (num_envs,) for a vector; to_array:
    makes a numpy array of one that the environment returns.
    """
    names = STEP if call == "step" else RESET
    if not isinstance(returned, tuple | list) or len(returned) != len(names):
        got = (f"{len(returned)} values" if isinstance(returned, tuple | list)
               else describe(returned))
        raise EnvError(f"{env}: {call}() must return {', '.join(names)}, got {got}.")
    if space is not None:
        check_value(env, call, space, returned[0], to_array)
    info = returned[-1]
    if not hasattr(info, "keys"):
        raise EnvError(f"{env}: the info of {call}() must be a dict, got {describe(info)}.")
    if "action_masks" in info:
        raise EnvError(
            f'{env}: the info of {call}() has "action_masks". Name the mask "action_mask".')
    for name, value in zip(names[1:-1], returned[1:-1], strict=True):
        array = np.array(None) if isinstance(value, list | tuple) else to_array(value)
        has_shape = array.shape == shape or (not shape and array.size == 1)
        if not has_shape or array.dtype.kind not in "biuf":
            kind = f"numbers of shape {shape}" if shape else "a number"
            raise EnvError(f"{env}: the {name} of {call}() must be {kind}, got {describe(value)}.")


def check_value(env, call, space, value, to_array):
    """Raise an EnvError that says where an observation breaks its space.

    A float64 passes where a float32 is declared; floats may be a ROUNDING_TOLERANCE outside.
    """
    if isinstance(space, spaces.Dict) and isinstance(value, dict):
        for key in value.keys() - {*space, "action_mask"}:
            raise EnvError(f"{env}: {call}() returns {name_field([key])}, which is not in its "
                           "space. Declare it there, or leave it out.")
    for keys, _, leaf in _leaves(space):
        (dtype, shape, low, high), expected = _leaf(leaf), None
        try:
            part = _get_part(value, keys)
            array, got = to_array(part), describe(part)
        except (AttributeError, LookupError, TypeError, ValueError):  # of another structure
            array, got = None, describe(value)
        if array is None:
            expected = f"a value of {leaf}"
        elif array.shape != shape:
            expected = f"shape {shape}"
        elif not (np.can_cast(array.dtype, dtype, "same_kind")
                  or (dtype.kind in "ui" and array.dtype.kind in "uib")):
            expected, got = f"dtype {dtype}", array.dtype
        elif (wrong := outside(leaf, array,
                               slack=ROUNDING_TOLERANCE if dtype.kind == "f" else 0)).any():
            index = tuple(np.argwhere(np.atleast_1d(wrong))[0].tolist())
            got, low, high = (np.atleast_1d(np.broadcast_to(part, shape))[index]
                              for part in (array, low, high))
            expected = f"{low} to {high} in element {index}"
        if expected is not None:
            raise EnvError(
                f"{env}: the {name_field(keys)} of {call}() breaks its space: expected {expected}, "
                f"got {got}. Correct the space that the environment declares, or what it returns.")


def describe(value):
    """Write a value and its type, or an array's shape and dtype, for an error."""
    if hasattr(value, "dtype") and value.shape:
        return f"an array of shape {tuple(value.shape)} and dtype {value.dtype}"
    return f"{' '.join(repr(value).split())} ({type(value).__name__})"[:200]


NUMBERS = int, float, np.integer, np.floating, np.bool_


def unroll_nested_dict(nested):
    """Yield ("a/b", value) of all leaves of dicts within dicts."""
    for key, value in nested.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{inner}", leaf) for inner, leaf in unroll_nested_dict(value))
        else:
            yield key, value


def numeric_scalars(info):
    """Return {"a/b": float} of the finite numbers in an info, also a nested one."""
    numbers = {}
    for name, value in unroll_nested_dict(info):
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.item()
        is_number = isinstance(value, NUMBERS) and not isinstance(value, np.timedelta64)
        if is_number and math.isfinite(value):
            numbers[str(name)] = float(value)
    return numbers


def episode_means(sums, n):
    """Return the log of n episodes, {} for none.

    sums: {name: (sum, number of episodes that have it)}.
    """
    means = {name: total / count for name, (total, count) in sums.items() if count}
    means = {name: value for name, value in means.items() if math.isfinite(value)}
    if "episode_return" in means:
        means.setdefault("score", means["episode_return"])
    return {**means, "n": n} if n else {}


# --------------------------------------------------------------------------------------------------
# What a space holds, for a network and for `auto`

PICTURE = 28  # pixels: a smaller picture is a grid, as MiniGrid's, which have 25 at most
IMAGE = 32  # pixels: an array with such sides is an image whatever its layout
KINDS = 32  # the most kinds of pieces on a board, and its longest side


def leaf_kind(space, boards=True):
    """Tell how to read a leaf: "choices" (one-hot), "image", "board" or "numbers"."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return "choices"
    if not isinstance(space, spaces.Box):
        return "numbers"
    if boards and _is_board(space):
        return "board"
    return "image" if _is_image(space) else "numbers"


def _is_image(space):
    """Tell whether a Box is a picture.

    Three dimensions of uint8, 5 × 5 or more; of IMAGE × IMAGE or more also a plane, a stack,
    uint16, and floats within [0, 1] or [0, 255].
    """
    if len(space.shape) not in (2, 3, 4):
        return False
    if space.dtype == np.uint8 and len(space.shape) == 3:
        return shorter_side(space) >= 5
    return shorter_side(space) >= IMAGE and (space.dtype in (np.uint8, np.uint16) or (
        space.dtype.kind == "f" and space.low.min() == 0 and space.high.max() in (1, 255)))


def _is_board(space):
    """Tell whether a Box is a grid of few kinds of pieces."""
    if space.dtype.kind not in "iub" or len(space.shape) not in (2, 3):
        return False
    shorter, longer = sorted(space.shape)[-2:]
    return (shorter >= 3 and longer <= KINDS
            and int(space.high.max()) - int(space.low.min()) < KINDS)


def shorter_side(space):
    """Return an image's shorter side; the smallest of its last sizes are channels."""
    return sorted(space.shape[-3:])[-2]


def action_bounds(space):
    """Return (low, high) of a Box, each (A,) float64; None for another space.

    Infinite where there is no bound. Many environments write "no bound" as a huge number, often
    float32's largest: within a range of over 2e9 one beyond 1e9 counts as none.
    """
    if not isinstance(space, spaces.Box):
        return None
    low, high = (bound.astype(np.float64).ravel() for bound in (space.low, space.high))
    vast = high / 2 - low / 2 > 1e9
    return np.where(vast & (low < -1e9), -np.inf, low), np.where(vast & (high > 1e9), np.inf, high)
