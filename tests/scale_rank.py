"""One rank of test_scale.py; its results go to FOLDER/rank{R}.pt."""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from trainers import NETWORKS, initial_state
from trainers import make_trainer as make_small
from trainers import run_epochs as run

import data_parallel
import kernels
import pufferl

AGENTS, HORIZON, DRAWN = 12, 8, 10  # of a rank; agents an environment times 12, steps, segments

CASES = {  # name -> (environment, its settings, network, train settings)
    "fused": ("cartpole", {"max_steps": 5}, "mingru", {}),
    "continuous": ("cartpole", {"continuous": True}, "mingru", {"optimizer": "adam"}),
    "lstm": ("cartpole", {"max_steps": 5}, "lstm", {"max_minibatch_size": 3 * HORIZON}),
    "dead agents": ("target", {"num_agents": 4, "patience": 6}, "mingru", {}),
}


def make_trainer(case, num_envs, folder, **settings):
    env, env_kwargs, network, train = CASES[case]

    def change(policy):
        if data_parallel.connect().rank > 0:  # rank 0's weights must win
            for parameter in policy.parameters():
                parameter.data.add_(1.0)

    settings = {"minibatch_size": 2 * DRAWN * HORIZON, "log_interval": 1e9, "seed": 7, **train, **settings}
    return make_small(folder, env, NETWORKS[network], num_envs=num_envs, env_kwargs=env_kwargs, num_buffers=1,
                      num_threads=1, change=change, **settings)


def learn_from_given_segments(trainer, members):
    """Return gradient and statistics of a minibatch of fixed draws of these ranks."""
    found, agents, index, weights = {}, trainer.num_agents // len(members), [], []
    for i, rank in enumerate(members):
        generator = np.random.default_rng(rank)
        index += [*(np.sort(generator.integers(0, agents, DRAWN)) + i * agents)]
        weights += [*generator.uniform(0.5, 2.0, DRAWN).astype(np.float32)]

    def draw(priorities, cumulative, out, out_weights, **options):
        out.copy_(torch.tensor(index))
        out_weights.copy_(torch.tensor(weights))
        found["first"] = options["first"]

    def update():
        found["gradient"] = trainer.arena.flat("gradients").clone()
        found["settings"] = trainer.buffers.settings.clone()

    before = kernels.draw_segments, trainer._step_optimizer
    kernels.draw_segments, trainer._step_optimizer = draw, update
    trainer._minibatches_owed = 1.0
    dict.__setitem__(trainer.config, "replay_ratio", 0.0)
    found["losses"] = trainer.train()
    kernels.draw_segments, trainer._step_optimizer = before
    return found


def keep(trainer):
    arrays = {name: tensor.clone() for name, tensor in trainer.storage.items() if tensor is not None}
    arrays |= {name: getattr(trainer.buffers, name).clone() for name in ("logprobs", "values", "bootstraps")}
    return arrays, initial_state(trainer)


def run_epochs(trainer, epochs):
    run(trainer, epochs)
    return trainer.arena.flat("weights").clone()


def message(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}", getattr(error, "elsewhere", False)


def fail():
    raise pufferl.ConfigError("it cannot be")


def full_disk(*_):
    raise OSError("No space left on device")


def main(folder):
    group, seen = data_parallel.connect(), {}
    for case in CASES:
        num_envs = AGENTS // 4 if case == "dead agents" else AGENTS
        trainer = make_trainer(case, num_envs, folder)
        weights = trainer.arena.flat("weights").clone()
        trainer.evaluate()
        # many more on one rank than on the other: the mean is over all that live
        if case == "dead agents":
            trainer.storage["valid"][2:, : 10 * group.rank + 1] = 0
        arrays, state = keep(trainer)
        seen[case] = {"weights": weights, "arrays": arrays, "state": state,
                      **learn_from_given_segments(trainer, [group.rank])}
        trainer.release()

    whole = make_trainer("fused", AGENTS, folder, replay_ratio=1.3)
    seen["whole"] = run_epochs(whole, 4)
    seen["environment"], seen["global_step"] = dict(whole.environment), whole.global_step
    whole.run.save = full_disk  # which rank 0 calls
    seen["lost"] = message(whole.close)
    half = make_trainer("fused", AGENTS, folder, replay_ratio=1.3)
    run_epochs(half, 2)
    half.save_checkpoint(folder / "half.pt")
    resumed = make_trainer("fused", AGENTS, folder, replay_ratio=1.3)
    resumed.load_checkpoint(folder / "half.pt")
    seen["resumed"] = run_epochs(resumed, 2)
    if group.rank == 1:  # what only a mistake in a user's code can do
        resumed.arena.flat("weights")[3] += 1e-6
    seen["unequal"] = message(lambda: group.check_equal(resumed.arena.flat("weights"), "the weights"))

    seen["sum"] = group.sum(np.array([1.0 + group.rank, 1e-17]))
    seen["any"] = [group.any(flag) for flag in (False, group.rank == 1, True)]
    seen["first"] = group.first(lambda: "only " + "once"), message(lambda: group.first(fail))
    seen["shared"] = group.share(group.rank), group.gather(group.rank), group.scatter(["a", "b"])
    logs = ([{}, {"score": 4.0, "n": 1}], [{"score": 1.0, "n": 3}, {}],
            [{"extra": 2.0, "n": 1}, {"score": 5.0, "n": 2}])
    seen["logs"] = [group.merge_log(log[group.rank]) for log in (*logs, ({}, {}))]
    seen["seeds"] = message(lambda: make_trainer("fused", AGENTS, folder, seed=group.rank))
    seen["few"] = message(lambda: make_trainer("fused", AGENTS, folder, minibatch_size=HORIZON))
    seen["gpus"] = message(lambda: make_trainer("fused", AGENTS, folder, gpus=5))
    torch.save(seen, folder / f"rank{group.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
