"""Update weights: the optimizer Muon (Jordan et al. 2024), and torch's optimizers.

    optimizer = Muon(arena)               # after arena.adopt(policy), before arena.allocate
    norm = optimizer.step(learning_rate, found_inf)     # the gradient norm before clipping

Muon is momentum on the arena's flat gradients, each matrix of the update orthogonalised by
Newton-Schulz steps. On a CPU one call orthogonalises all matrices but large ones, which torch's
products take; on a GPU one kernel takes the small ones. The kernels of single numbers (norm,
momentum, step) are at the end of kernels.py. tests/reference.py has the whole step in plain torch,
`muon_step`.
"""

import inspect
import itertools
import math

import torch

import kernels
from arena import (
    ONE,
    ZERO,
    as_array,
    check_arrays,
    constant,
    driver,
    f32,
    f64,
    on_gpu,
    run,
)
from configuration import has_custom_optimizer, load_attribute, named
from errors import ConfigError
from fast.products import accumulate_rows, find_problem

NEWTON_SCHULZ = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377),
                 (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))


@driver
def _scale(factor, matrix, out):
    """Write factor · matrix to `out`, row by row in memory."""
    numbers, results = matrix.reshape(-1), out.reshape(-1)
    for i in range(len(numbers)):
        results[i] = factor * numbers[i]


@driver
def _orthogonalise_lanes(begin, end, updates, matrices, scales, memory, coefficients):
    """Orthogonalise and scale matrices of the update.

    matrices (lanes, 6) int64, a row for each matrix: its first number in `updates`; its rows and
    columns; the strides of its rows and columns there; the first of its 4 rows columns + 3 rows²
    numbers in `memory`. x^T is computed beside x: a transpose takes longer than that product.
    """
    for lane in range(begin, end):
        first, rows, columns, down, right, place = matrices[lane]
        size, square = rows * columns, rows * rows
        wide = memory[place : place + 4 * size]
        squares = memory[place + 4 * size : place + 4 * size + 3 * square]
        x = wide[:size].reshape(rows, columns)
        y = wide[size : 2 * size].reshape(rows, columns)
        turned = wide[2 * size : 3 * size].reshape(columns, rows)
        y_turned = wide[3 * size :].reshape(columns, rows)
        gram = squares[:square].reshape(rows, rows)
        scaled = squares[square : 2 * square].reshape(rows, rows)
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


def _find_offset(tensor, flat):
    """Return the index of a tensor's first number in `flat`, which it is a view of."""
    return (tensor.data_ptr() - flat.data_ptr()) // 4


class Muon:
    """Optimize the weights of an arena that has adopted its modules.

    The global norm is clipped to `max_grad_norm`; m = mu·m + g, u = g + mu·m. Every matrix
    (further dimensions flattened; transposed if it has more rows than columns) is divided by its
    Frobenius norm, orthogonalised by five Newton-Schulz steps and scaled by
    sqrt(max(1, rows/cols)); vectors take u itself; w = w·(1 - lr·weight_decay) - lr·u. A zero
    gradient gives a zero step.

    batched: for a GPU. All small matrices are multiplied at once, padded with zeros to one shape,
    because a launch takes longer than a small product; so are large ones of one shape.
    """

    # Bounds of rows² · columns (rows <= columns). Batched matrices up to SMALL are padded to one
    # shape. On a CPU one call takes those up to MOST with at most LONG columns, each on one thread:
    # larger ones need torch's products, which have several threads. These are faster with few rows
    # and many columns, too (docs/findings.md).
    SMALL, MOST, LONG = 2**23, 2**24, 2**12

    def __init__(self, arena, momentum=0.95, weight_decay=0.0, max_grad_norm=1.5, batched=False):
        self.arena = arena
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.max_grad_norm = max_grad_norm
        shapes = {}  # (rows, columns), rows <= columns -> [(name of the update, is_tall, scale)]
        for name, (shape, _, group) in list(arena._specs.items()):
            if group != "weights":
                continue
            update = "updates/" + name.partition("/")[2]
            arena.register(update, shape, group="updates")
            arena.register("momentum/" + name.partition("/")[2], shape, group="momentum")
            if len(shape) >= 2:
                rows, columns = shape[0], math.prod(shape[1:])
                wide = (min(rows, columns), max(rows, columns))
                is_tall, scale = rows > columns, max(1, rows / columns) ** 0.5
                shapes.setdefault(wide, []).append((update, is_tall, scale))
        one_call = [] if batched or find_problem() else [
            shape for shape in sorted(shapes, key=math.prod)
            if shape[0] * math.prod(shape) <= self.MOST and shape[1] <= self.LONG]
        matrices = [(shape, *member) for shape in one_call for member in shapes.pop(shape)]
        self._matrices = matrices[::2] + matrices[1::2]  # equal work for two threads
        for i, ((rows, columns), *_) in enumerate(self._matrices):
            # see _orthogonalise_lanes
            arena.register(f"muon/{i}", (4 * rows * columns + 3 * rows * rows,), group="muon")
        self._by_torch = [] if batched else list(itertools.chain.from_iterable(shapes.values()))
        self._shapes = self._join_shapes(shapes) if batched else {}
        for (rows, columns), members in self._shapes.items():
            for name, width in (("x", columns), ("y", columns), ("gram", rows)):
                arena.register(f"muon/{rows}x{columns}/{name}", (len(members), rows, width),
                               group="muon")
        # clip's scale, momentum, decay, learning rate
        arena.register("muon/scalars", (4,), group="muon")
        self._arrays = None

    @classmethod
    def _join_shapes(cls, shapes):
        """Return `shapes`, joined where the padded shape stays small."""
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

    def tensors(self):
        """Return {name: tensor}, which a checkpoint saves and loads in place."""
        return {"momentum": self.arena.flat("momentum")}

    def _bind(self):
        arena = self.arena
        self._gradients, self._scalars = arena.flat("gradients"), arena["muon/scalars"]
        self._arrays = [as_array(array) for array in (
            *map(arena.flat, ("gradients", "momentum", "updates", "weights")), self._scalars)]
        self._places = self._results = self._scales = self._work = None
        if self._shapes:  # batched
            self._places, self._results, self._scales = map(as_array, self._bind_batched())
            self._work = as_array(arena.flat("muon"))
        if self._matrices:
            self._lanes = self._bind_matrices(arena.flat("updates"))

    def _bind_matrices(self, updates):
        """Return the arguments of `run` for _orthogonalise_lanes.

        These are the number of matrices, the nanoseconds of each, about, and the arrays.
        """
        memory = self.arena.flat("muon")
        matrices = []
        for i, ((rows, columns), name, is_tall, _) in enumerate(self._matrices):
            strides = (1, rows) if is_tall else (columns, 1)
            matrices.append((_find_offset(self.arena[name], updates), rows, columns, *strides,
                             _find_offset(self.arena[f"muon/{i}"], memory)))
        scales = torch.tensor([scale for *_, scale in self._matrices], dtype=torch.float32)
        operations = sum(2 * rows * rows * (3 * columns + rows)
                         for _, rows, columns, *_ in matrices)
        # 100 operations a nanosecond
        nanoseconds = int(len(NEWTON_SCHULZ) * (operations / len(matrices)) / 100)
        coefficients = torch.tensor(NEWTON_SCHULZ, dtype=torch.float32)
        arrays = updates, torch.tensor(matrices), scales, memory, coefficients
        return len(matrices), nanoseconds, *map(as_array, arrays)

    def _bind_batched(self):
        """Return (places, results, scales), each with an entry for each weight's number.

        places: where its update goes in the group "muon", -1 for vectors. results: where the result
        is there. scales: the factor of the result.
        """
        updates, work = self.arena.flat("updates"), self.arena.flat("muon")
        places = torch.full((2, *updates.shape), -1, dtype=torch.int32)
        scales = torch.ones(updates.shape, dtype=torch.float32)
        order = torch.arange(len(work), dtype=torch.int32)
        for (rows, columns), members in self._shapes.items():
            for way, name in enumerate("xy"):  # matrices go into x, results are in y
                matrices = self.arena[f"muon/{rows}x{columns}/{name}"]
                offset = _find_offset(matrices, work)
                slots = order.as_strided(matrices.shape, matrices.stride(), offset)
                for slot, (name, is_tall, scale) in zip(slots, members, strict=True):
                    update = self.arena[name]
                    first, (height, width) = _find_offset(update, updates), update.flatten(1).shape
                    numbers = slice(first, first + update.numel())
                    slot = (slot.t() if is_tall else slot)[:height, :width]
                    places[way, numbers] = slot.reshape(-1)
                    scales[numbers] = scale
        return *places.to(work.device), scales.to(work.device)

    def step(self, learning_rate, found_inf):
        """Update all weights; return the gradient norm before clipping.

        learning_rate, found_inf: float32 tensors (). found_inf is set to 1 if the norm is not
        finite; while it is not 0, nothing changes. On a GPU nothing waits, and the norm is a
        tensor.
        """
        if self._arrays is None:
            self._bind()
        gradients, momentum, updates, weights, scalars = self._arrays
        if on_gpu(self._gradients):
            norm = self._clip(learning_rate, found_inf)
        else:
            norm = kernels.gradient_norm(self._gradients)
            found_inf.fill_(bool(found_inf) or not math.isfinite(norm))
            if found_inf:
                return norm
            rate = float(learning_rate)
            scale = min(1.0, self.max_grad_norm / (norm + 1e-6))
            scalars[:] = scale, self.momentum, 1.0 - rate * self.weight_decay, rate
        run(kernels._nesterov_lanes, len(updates), 1, gradients, momentum, updates, scalars,
            self._places, self._work)
        if self._matrices:
            run(_orthogonalise_lanes, *self._lanes)
        for name, is_tall, scale in self._by_torch:
            matrix = self.arena[name].flatten(1)
            matrix = matrix.t() if is_tall else matrix
            torch.mul(orthogonalise(matrix.unsqueeze(0))[0], scale, out=matrix)
        for rows, columns in self._shapes:
            self._orthogonalise_batched(*(self.arena[f"muon/{rows}x{columns}/{name}"]
                                          for name in ("x", "y", "gram")))
        run(kernels._apply_lanes, len(weights), 1, weights, updates, scalars, self._results,
            self._scales, self._work)
        return norm

    def _clip(self, learning_rate, found_inf):
        """Write the scalars, with the factor that clips, on a GPU; return the norm."""
        gradients, scalars = self._gradients, self._scalars
        norm = torch.empty((), dtype=torch.float64, device=gradients.device)
        flat, rate, *written = check_arrays(
            "Muon", gradients=(gradients, tuple(gradients.shape), f32),
            learning_rate=(learning_rate.view(1), (1,), f32),
            found_inf=(found_inf.view(1), (1,), f32), norm=(norm.view(1), (1,), f64),
            scalars=(scalars, (4,), f32))
        kernels._launch_sum(
            "clip", -(-len(flat) // 8), 1, gradients, (len(flat),), written, flat,
            float(self.max_grad_norm), self.momentum, self.weight_decay, rate)
        return norm

    def _orthogonalise_batched(self, x, y, gram):
        """Write the matrices in x, orthogonalised, to y; small ones overwrite x and gram."""
        count, rows, columns = x.shape
        if not on_gpu(x) or rows * rows * columns > self.SMALL:
            y.copy_(orthogonalise(x))
            return
        tiles = count * -(-rows // kernels.STRIP) * -(-columns // kernels.ACROSS)
        properties = torch.cuda.get_device_properties(x.device)
        blocks = min(tiles, properties.multi_processor_count)
        coefficients = constant(("Newton-Schulz",), x,
                                lambda: torch.tensor(NEWTON_SCHULZ, dtype=torch.float32))
        arrived = constant(("barrier", torch.cuda.current_stream().cuda_stream), x,
                           lambda: torch.zeros(2, dtype=torch.int32))
        # cooperative, because blocks wait for each other
        kernels.CUDA.launch("newton_schulz", blocks, kernels.CREW, count, rows, columns,
                            len(NEWTON_SCHULZ), *map(as_array, (coefficients, x, y, gram, arrived)),
                            cooperative=True)


def orthogonalise(x):
    """Return matrices (n, rows, columns), rows <= columns, orthogonalised by torch."""
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = (x / (norms + 1e-7)).contiguous()
    for a, b, c in NEWTON_SCHULZ:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


class TorchOptimizer:
    """Step an optimizer of torch, or a custom one (train.optimizer my_file.py:Class).

    The interface is Muon's: the gradients' global norm is clipped first, and once it is not finite
    nothing changes. The learning rate is the trainer's; groups of a custom optimizer keep their
    ratio to it. If a custom optimizer replaces `parameter.data` or `.grad`, `step` copies the
    weights back and makes both views of the arena again.
    """

    def __init__(self, config, policy, arena):
        self.arena = arena
        self.max_grad_norm = config["max_grad_norm"]
        self.is_custom = has_custom_optimizer(config)
        self.parameters = {f"policy.{name}": parameter
                           for name, parameter in policy.named_parameters()}
        if self.is_custom:
            make = load_attribute("train.optimizer", config["optimizer"])
            # 0 is passed only to a class that names weight_decay, else the class's default remains
            has_decay = "weight_decay" in inspect.signature(make).parameters
            decay = ({"weight_decay": config["weight_decay"]}
                     if has_decay or config["weight_decay"] else {})
            rate = config["learning_rate"]
            try:
                self.optimizer = make(policy.parameters(), lr=rate, **decay)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"train.optimizer = {named(make)}: {error}. Give a "
                                  "torch.optim.Optimizer.") from error
            self.ratios = [group["lr"] / rate for group in self.optimizer.param_groups]
            self.given = "lr", *decay
            return
        self.given = "lr",
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=arena["rate"].fill_(config["learning_rate"]), eps=config["eps"],
            capturable=config["device"] == "cuda", betas=(config["momentum"], config["beta2"]),
            weight_decay=config["weight_decay"], fused=True)
        self.optimizer.found_inf = arena["found_inf"]

    def step(self, learning_rate, found_inf):
        """Update all weights; return the gradient norm before clipping, a tensor.

        learning_rate: arena["rate"], which AdamW reads. found_inf, arena["found_inf"], is set to 1
        if the norm is not finite; while it is not 0, nothing changes.
        """
        gradients = self.arena.flat("gradients")
        norm = torch.as_tensor(kernels.gradient_norm(gradients))
        found_inf.copy_((found_inf != 0) | ~norm.isfinite())
        gradients.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        if not self.is_custom:  # torch's step reads found_inf
            self.optimizer.step()
        elif not found_inf:
            for group, ratio in zip(self.optimizer.param_groups, self.ratios, strict=True):
                group["lr"] = ratio * float(learning_rate)
            self.optimizer.step()
            for name, parameter in self.parameters.items():
                weight = self.arena[f"weights/{name}"]
                if parameter.data_ptr() != weight.data_ptr():
                    weight.copy_(parameter.data)
                    parameter.data = weight
                parameter.grad = self.arena[f"gradients/{name}"]
        return norm

    def tensors(self):
        """Return {}: `state` has everything that a checkpoint saves."""
        return {}

    def state(self):
        """Return what a checkpoint saves of torch's optimizer, for `load`."""
        state = self.optimizer.state_dict()
        for group in state["param_groups"]:
            group["lr"] = float(group["lr"])  # a view of the arena
        return state

    def load(self, state):
        """Continue from `state()` of another run, with this run's settings."""
        groups = state["param_groups"] if self.is_custom else self.state()["param_groups"]
        given = [{name: group[name] for name in self.given if name in group}
                 for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict({**state, "param_groups": groups})
        for group, values in zip(self.optimizer.param_groups, given, strict=True):
            group |= values
