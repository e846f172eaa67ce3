"""The optimizer Muon (Jordan et al. 2024): momentum on the arena's flat gradients, each matrix of the update
orthogonalised by Newton-Schulz steps.

    optimizer = Muon(arena)               # after arena.adopt(policy), before arena.allocate
    norm = optimizer.step(learning_rate)  # clips, updates the weights; returns the gradient norm before the clip

On a CPU one call orthogonalises all matrices but large ones, which torch's products take; on a GPU a kernel takes the
small ones together. The kernels of single numbers (norm, momentum, step) are at the end of kernels.py. The whole step
in plain torch is `muon_step` in tests/reference.py.
"""

import inspect
import math

import numpy as np
import torch

import emulation
import kernels
from arena import (
    ONE,
    ZERO,
    check_array,
    check_numbers,
    constant,
    device_array,
    driver,
    f32,
    host_array,
    on_gpu,
    run,
)
from configuration import load_attribute, own_optimizer
from errors import ConfigError
from fast.products import accumulate_rows, missing

NEWTON_SCHULZ = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                 (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))


@driver
def _scale(factor, matrix, out):
    """out = factor · matrix, row by row in memory."""
    numbers, results = matrix.reshape(-1), out.reshape(-1)
    for i in range(len(numbers)):
        results[i] = factor * numbers[i]


@driver
def _orthogonalise_lanes(begin, end, updates, places, scales, memory, coefficients):
    """Orthogonalise and scale matrices of the update. places (lanes, 6) int64, a row for each matrix: its
    first number in `updates`; its rows and columns; how far it is there from one row to the next, and from one column
    to the next; where its part of `memory` begins, `room` numbers. x^T goes along with x, because to turn x anew takes
    longer than that product."""
    for lane in range(begin, end):
        first, rows, columns, down, right, place = places[lane]
        size, square = rows * columns, rows * rows
        wide, squares = memory[place : place + 4 * size], memory[place + 4 * size : place + 4 * size + 3 * square]
        x, y = wide[:size].reshape(rows, columns), wide[size : 2 * size].reshape(rows, columns)
        turned, y_turned = wide[2 * size : 3 * size].reshape(columns, rows), wide[3 * size :].reshape(columns, rows)
        gram, scaled = squares[:square].reshape(rows, rows), squares[square : 2 * square].reshape(rows, rows)
        polynomial, total = squares[2 * square :].reshape(rows, rows), 0.0
        for i in range(rows):
            for j in range(columns):
                x[i, j] = updates[first + i * down + j * right]
                total += x[i, j] * x[i, j]
        inverse = ONE / (f32(math.sqrt(total)) + f32(1e-7))
        for i in range(rows):
            for j in range(columns):
                x[i, j] *= inverse
                turned[j, i] = x[i, j]
        for s in range(len(coefficients)):
            gram[:] = ZERO
            accumulate_rows(False, turned, turned, gram)
            _scale(coefficients[s, 2], gram, scaled)
            _scale(coefficients[s, 1], gram, polynomial)
            accumulate_rows(False, gram, scaled, polynomial)
            _scale(coefficients[s, 0], x, y)
            accumulate_rows(False, polynomial, x, y)
            if s + 1 < len(coefficients):  # nothing reads the last x^T
                _scale(coefficients[s, 0], turned, y_turned)
                accumulate_rows(False, x, polynomial, y_turned)
            x, y, turned, y_turned = y, x, y_turned, turned
        for i in range(rows):
            for j in range(columns):
                updates[first + i * down + j * right] = x[i, j] * scales[lane]


def room(rows, columns):
    """Numbers that _orthogonalise_lanes works with for a matrix."""
    return 4 * rows * columns + 3 * rows * rows


def _place(tensor, flat):
    """Where the tensor's first number stands in `flat`, a float32 range that it is a part of."""
    return (tensor.data_ptr() - flat.data_ptr()) // 4


class Muon:
    """Muon (Jordan et al. 2024) over an arena that has adopted its modules.

    Clip the global norm to `max_grad_norm`; m = mu·m + g, u = g + mu·m; every matrix (further dimensions flattened;
    transposed if it has more rows than columns) is divided by its Frobenius norm and orthogonalised by five
    Newton-Schulz steps, then scaled by sqrt(max(1, rows/cols)); vectors take u itself;
    w = w·(1 - lr·weight_decay) - lr·u. A zero gradient gives a zero step. With `together`, for a GPU,
    all small matrices are multiplied together, padded with zeros to one shape, because a launch
    takes longer than a small product. Large ones of one shape are, too.
    """

    # Bounds of rows² · columns (rows <= columns). With `together`, matrices up to SMALL are padded to one shape.
    # Without it, one call takes those up to MOST with at most LONG columns, each on one thread: larger ones want
    # several threads, which torch's products have. These are quicker with few rows and many columns, too (docs/LOG.md).
    SMALL, MOST, LONG = 2**23, 2**24, 2**12

    def __init__(self, arena, momentum=0.95, weight_decay=0.0, max_grad_norm=1.5, together=False):
        self.arena, self.momentum, self.weight_decay, self.max_grad_norm = arena, momentum, weight_decay, max_grad_norm
        names = [name for name, spec in arena._specs.items() if spec[2] == "weights"]
        if not names:
            raise ValueError("optim.Muon: the arena has adopted no module; call arena.adopt(policy) first.")
        shapes = {}  # (rows, columns), rows <= columns -> [(update's name, transposed?, scale)]
        for name in names:
            shape = arena._specs[name][0]
            update = "updates/" + name.partition("/")[2]
            arena.register(update, shape, group="updates")
            arena.register("momentum/" + name.partition("/")[2], shape, group="momentum")
            if len(shape) >= 2:
                rows, columns = shape[0], math.prod(shape[1:])
                wide = (min(rows, columns), max(rows, columns))
                shapes.setdefault(wide, []).append((update, rows > columns, max(1, rows / columns) ** 0.5))
        fit = [] if together or missing() else [
            shape for shape in sorted(shapes, key=math.prod)
            if shape[0] * math.prod(shape) <= self.MOST and shape[1] <= self.LONG]
        matrices = [(shape, *member) for shape in fit for member in shapes.pop(shape)]
        self._matrices = matrices[::2] + matrices[1::2]  # so that two threads have as much to do
        for i, ((rows, columns), *_) in enumerate(self._matrices):
            arena.register(f"muon/{i}", (room(rows, columns),), group="muon")
        self._shapes = self._joined(shapes) if together else shapes
        for (rows, columns), members in self._shapes.items():
            wide, square = (rows, columns), (rows, rows)
            for name, shape in (("x", wide), ("y", wide), ("s", square), ("p", square)):
                arena.register(f"muon/{rows}x{columns}/{name}", (len(members), *shape), group="muon")
        arena.register("muon/scalars", (4,))  # clip's scale, momentum, decay, learning rate
        self._together, self._groups, self.frozen = together and bool(shapes), None, []

    @classmethod
    def _joined(cls, shapes):
        """`shapes` with those joined that stay small if padded to the largest rows and columns."""
        joined = {}
        for shape in sorted(shapes, key=math.prod, reverse=True):
            for other in reversed(joined):
                rows, columns = map(max, shape, other)
                if rows * rows * columns <= cls.SMALL:
                    joined[rows, columns] = joined.pop(other) + shapes[shape]
                    break
            else:
                joined[shape] = shapes[shape]
        return joined

    def freeze(self, names):
        """From now on these weights (names in the arena's order) and momenta do not change."""
        self.frozen, self._groups = names, None

    def tensors(self):  # {name: tensor}, which a checkpoint keeps and loads in place
        return {"momentum": self.arena.flat("momentum")}

    def _bind(self):
        self._groups = []
        for (rows, columns), members in self._shapes.items():
            work = [self.arena[f"muon/{rows}x{columns}/{name}"] for name in "xysp"]
            matrices = []
            for update, transposed, scale in members:
                matrix = self.arena[update].flatten(1)
                matrices.append((matrix.t() if transposed else matrix, scale))
            self._groups.append((work, matrices))
        flats = [self.arena.flat(group) for group in ("gradients", "momentum", "updates", "weights")]
        flats += self._bind_together() if self._together else ()
        if self._matrices:
            self._lanes = self._bind_matrices(flats[2])
        view = device_array if flats[0].is_cuda else host_array
        self._parts = [[view(flat[part]) for flat in flats] for part in self.arena.without("weights", self.frozen)]

    def _bind_matrices(self, updates):
        """What `run` needs for _orthogonalise_lanes: how many matrices, about how many nanoseconds each
        takes, and the arrays."""
        if on_gpu(updates):
            raise ValueError("optim.Muon: these weights are on a GPU; give together=True.")
        memory = self.arena.flat("muon")
        places = [(_place(self.arena[name], updates), rows, columns, *((1, rows) if transposed else (columns, 1)),
                   _place(self.arena[f"muon/{i}"], memory))
                  for i, ((rows, columns), name, transposed, _) in enumerate(self._matrices)]
        scales = torch.tensor([scale for *_, scale in self._matrices], dtype=torch.float32)
        operations = sum(2 * rows * rows * (3 * columns + rows) for _, rows, columns, *_ in places) / len(places)
        nanoseconds = int(len(NEWTON_SCHULZ) * operations / 100)  # 100 operations in each of them
        arrays = updates, torch.tensor(places), scales, memory, torch.tensor(NEWTON_SCHULZ, dtype=torch.float32)
        return len(places), nanoseconds, *map(host_array, arrays)

    def _bind_together(self):
        """(places, results, scales), one for each number in a weight: where its update goes in the
        group "muon" (-1 for vectors), where the result stands there, and what multiplies that."""
        updates, work = self.arena.flat("updates"), self.arena.flat("muon")
        places = torch.full((2, *updates.shape), -1, dtype=torch.int32)
        scales = torch.ones(updates.shape, dtype=torch.float32)
        order = torch.arange(len(work), dtype=torch.int32)
        for members, (group, _) in zip(self._shapes.values(), self._groups, strict=True):
            for way, matrices in enumerate(group[:2]):  # matrices go into x, results are in y
                slots = order.as_strided(matrices.shape, matrices.stride(), _place(matrices, work))
                for slot, (name, transposed, scale) in zip(slots, members, strict=True):
                    update = self.arena[name]
                    first, (rows, columns) = _place(update, updates), update.flatten(1).shape
                    here = slice(first, first + update.numel())
                    places[way, here] = (slot.t() if transposed else slot)[:rows, :columns].reshape(-1)
                    scales[here] = scale
        return *places.to(work.device), scales.to(work.device)

    def step(self, learning_rate, found_inf=None):
        """Update all weights; returns the gradient norm before the clip; if that is not finite, nothing changes.

        The learning rate may be a float32 tensor (). found_inf, a float32 tensor (), becomes 1 if the norm is not
        finite; while it is not 0, nothing changes. On a GPU nothing waits, and the norm returned is a tensor.
        """
        if self._groups is None:
            self._bind()
        for name in self.frozen:
            self.arena[f"gradients/{name}"].zero_()  # an engine may have written one for a frozen weight
        scalars, gradients = self.arena["muon/scalars"], self.arena.flat("gradients")
        if on_gpu(gradients):
            norm = self._clip(gradients, learning_rate, scalars, found_inf)
        else:
            norm = kernels.gradient_norm(gradients)
            if found_inf is not None:
                found_inf.fill_(bool(found_inf) or not math.isfinite(norm))
            if not math.isfinite(norm) or found_inf:
                return norm
            learning_rate = float(learning_rate)
            decay = 1.0 - learning_rate * self.weight_decay
            host_array(scalars)[:] = min(1.0, self.max_grad_norm / (norm + 1e-6)), self.momentum, decay, learning_rate
        scalars = check_array("Muon", "scalars", scalars, (4,))
        if self._together:
            flat = self.arena.flat("muon")
            work = check_array("Muon", "flat", flat, tuple(flat.shape))
            for gradients, momentum, updates, _, places, *_ in self._parts:
                run(kernels._nesterov_cuda, len(places), 1, gradients, momentum, updates, scalars, places, work)
            for matrices, _ in self._groups:
                self._orthogonalise_together(*matrices)
            for _, _, updates, weights, _, results, scales in self._parts:
                run(kernels._apply_cuda, len(results), 1, weights, updates, scalars, results, scales, work)
            return norm
        for gradients, momentum, updates, _ in self._parts:
            run(kernels._nesterov_lanes, len(updates), 1, gradients, momentum, updates, scalars)
        if self._matrices:
            run(_orthogonalise_lanes, *self._lanes)
        for (x, y, gram, polynomial), matrices in self._groups:
            for normalised, (matrix, _) in zip(x, matrices, strict=True):
                torch.div(matrix, torch.linalg.vector_norm(matrix) + 1e-7, out=normalised)
            self._orthogonalise(x, y, gram, polynomial)
            for orthogonal, (matrix, scale) in zip(y, matrices, strict=True):
                torch.mul(orthogonal, scale, out=matrix)
        for _, _, updates, weights in self._parts:
            run(kernels._apply_lanes, len(weights), 1, weights, updates, scalars)
        return norm

    def _clip(self, gradients, learning_rate, scalars, found_inf):
        """Write `scalars`, with the scale that clips, on a GPU; returns the norm as a tensor."""
        flat = check_array("Muon", "gradients", gradients, tuple(gradients.shape))
        norm = torch.empty((), dtype=torch.float64, device=gradients.device)
        found_inf = torch.zeros_like(scalars[kernels.SCALE]) if found_inf is None else found_inf
        rate = learning_rate.view(1) if isinstance(learning_rate, torch.Tensor) else learning_rate
        written = (check_array("Muon", "found_inf", found_inf.view(1), (1,)),
                   check_array("Muon", "norm", norm.view(1), (1,), np.float64),
                   check_array("Muon", "scalars", scalars, (4,)))
        kernels._launch_sum(
            "clip", -(-len(flat) // 8), 1, gradients, (len(flat),), written, flat, float(self.max_grad_norm),
            self.momentum, self.weight_decay, check_numbers("Muon", "learning_rate", rate, 1, np.float32, norm))
        return norm

    def _orthogonalise_together(self, x, y, gram, polynomial):
        """The matrices in x orthogonalised into y; x and gram are overwritten, and of large ones polynomial."""
        count, rows, columns = x.shape
        if not on_gpu(x) or rows * rows * columns > self.SMALL:
            torch.div(x, torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7, out=x)
            self._orthogonalise(x, y, gram, polynomial)
            return
        tiles = count * -(-rows // kernels.STRIP) * -(-columns // kernels.ACROSS)
        blocks = min(tiles, torch.cuda.get_device_properties(x.device).multi_processor_count)
        arrays = [check_array("Muon", "matrices", part, tuple(part.shape)) for part in (x, y, gram)]
        coefficients = constant(("Newton-Schulz",), x, lambda: torch.tensor(NEWTON_SCHULZ, dtype=torch.float32))
        arrived = constant(("barrier", torch.cuda.current_stream().cuda_stream), x,
                           lambda: torch.zeros(2, dtype=torch.int32))
        kernels.CUDA.launch("newton_schulz", blocks, kernels.CREW, count, rows, columns, len(NEWTON_SCHULZ),
                            coefficients, *arrays, arrived, cooperative=True)  # its blocks wait for each other

    @staticmethod
    def _orthogonalise(x, y, gram, polynomial):
        """The matrices in x, each divided by its norm, orthogonalised into y;
        all four are overwritten."""
        for a, b, c in NEWTON_SCHULZ:  # an odd number of steps: the last one writes y
            torch.bmm(x, x.mT, out=gram)
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
            torch.baddbmm(x, polynomial, x, beta=a, out=y)
            x, y = y, x


class TorchOptimizer:
    """An optimizer of torch, or of your own (train.optimizer my_file.py:Class), behind
    Muon's `step`: the gradients' global norm is clipped first, and once it is not finite
    nothing changes. The learning rate is the trainer's. An optimizer of your own may replace
    `parameter.data` or `.grad`: after each step both are put back into the arena."""

    def __init__(self, config, policy, arena):
        self.arena, self.max_grad_norm, self.own = arena, config["max_grad_norm"], own_optimizer(config)
        self.parameters = {f"policy.{name}": parameter
                           for name, parameter in policy.named_parameters()}
        self.frozen = []
        if self.own:
            make = load_attribute("train.optimizer", config["optimizer"])
            named = "weight_decay" in inspect.signature(make).parameters  # by its own keyword, or by **keywords
            decay = {"weight_decay": config["weight_decay"]} if named or config["weight_decay"] else {}
            self.optimizer = make(policy.parameters(), lr=config["learning_rate"], **decay)
            return
        gpu = config["device"] == "cuda"
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=arena["rate"].fill_(config["learning_rate"]), eps=config["eps"],
            capturable=gpu, betas=(config["momentum"], config["beta2"]),
            weight_decay=config["weight_decay"], fused=True)
        self.optimizer.found_inf = arena["found_inf"]

    def freeze(self, names):
        """From now on the parameters of these names, in the arena, and their state stay as they
        are; all others are trained."""
        self.frozen = names

    def step(self, rate, found_inf):
        """One step at the learning rate in the tensor `rate`; returns the norm before the clip, a
        tensor. found_inf becomes 1 if that is not finite; while it is not 0, nothing changes."""
        for name in self.frozen:
            self.arena[f"gradients/{name}"].zero_()  # an engine may have written it
            self.parameters[name].grad = None  # torch skips parameters without a gradient
        gradients = self.arena.flat("gradients")
        norm = torch.as_tensor(kernels.gradient_norm(gradients))
        found_inf.copy_((found_inf != 0) | ~norm.isfinite())
        gradients.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        if not self.own:  # torch's step looks at found_inf itself
            self.optimizer.step()
        elif not found_inf:
            for group in self.optimizer.param_groups:
                group["lr"] = float(rate)
            self.optimizer.step()
            for name, parameter in self.parameters.items():
                weight = self.arena[f"weights/{name}"]
                if parameter.data_ptr() != weight.data_ptr():
                    weight.copy_(parameter.data)
                    parameter.data = weight
                parameter.grad = self.arena[f"gradients/{name}"]
        for name in self.frozen:
            self.parameters[name].grad = self.arena[f"gradients/{name}"]
        return norm

    def tensors(self):
        """What a checkpoint keeps by name and loads in place: nothing, `state` has it all."""
        return {}

    def state(self):
        """What a checkpoint keeps of torch's optimizer, for `load`."""
        state = self.optimizer.state_dict()
        for group in state["param_groups"]:
            group["lr"] = float(group["lr"])  # a view of the arena
        return state

    def load(self, state):
        """Go on from what `state` gave; Adam's settings are this run's."""
        groups = state["param_groups"] if self.own else self.state()["param_groups"]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict({**state, "param_groups": groups})
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def check_optimizer(cls, weight_decay):
    """ConfigError if a custom train.optimizer is not made and stepped as TorchOptimizer does it."""
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(f"train.optimizer: must be a class of torch.optim.Optimizer's kind, it is a "
                          f"{type(cls).__name__}; to change what one is made with, give a subclass whose __init__ "
                          "takes (parameters, lr).")
    if not emulation.takes(cls, "lr"):
        raise ConfigError(f"train.optimizer = {cls.__name__}: is made as Class(parameters, lr=learning_rate), but "
                          "takes no lr.")
    if weight_decay and not emulation.takes(cls, "weight_decay"):
        raise ConfigError(f"train.weight_decay = {weight_decay}: is for an optimizer that takes it, and {cls.__name__} "
                          "does not; leave it at 0.")
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(f"train.optimizer = {cls.__name__}: its step must do without a closure; the gradients are "
                          "there when it is called.")
