"""Where a training's time goes: tables on the terminal, and a trace that opens in a browser.

    python profiler.py breakout                                     # the same as python pufferl.py profile breakout
    python profiler.py breakout --profile.epochs 1 --profile.output trace.json

Open the trace in https://ui.perfetto.dev (nothing leaves the browser) or in chrome://tracing: one row a thread, with
torch's operations and the kernels of kernels.py and products.py by their names. A rollout that is one call otherwise
goes step by step here, so that its parts can be seen.
"""

import contextlib
import inspect
import sys
from pathlib import Path

import torch

import kernels
import ocean
import products
import pufferl

WARM_UP = 2  # epochs that learn; compiling is not what is looked for


def profile(env_name, args):
    """Trace args["profile"]["epochs"] epochs and print where their time went; returns the trace's path."""
    settings, activities = args["profile"], [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    vecenv = pufferl.load_env(env_name, args)
    policy = pufferl.load_policy(args, vecenv, env_name)
    config = {**args["train"], "env": args["env_name"], "data_dir": None, "log_interval": 1e9}
    trainer = pufferl.PuffeRL(config, vecenv, policy)
    epochs = lambda count: [(trainer.evaluate(), trainer.train()) for _ in range(count)]  # noqa: E731
    epochs(WARM_UP + max(0, trainer.config["cudagraphs"]) if trainer.device.separate else WARM_UP)  # and capturing
    everywhere = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    with contextlib.ExitStack() as stack:
        # torch marks its own operations; the kernels and the environments are marked here
        own = {module: [name for name, function in vars(module).items() if inspect.isfunction(function)
                        and function.__module__ == module.__name__ and name[0] != "_" and name not in ("host", "run")]
               for module in (kernels, products)}  # fmt: skip
        for owner, names in (*own.items(), (vecenv, ("wait", "advance"))):
            for name in names:
                function = getattr(owner, name)
                stack.callback(setattr, owner, name, function)
                setattr(owner, name, torch.profiler.record_function(name)(function))
        trace = stack.enter_context(torch.profiler.profile(activities=activities, experimental_config=everywhere))
        trainer.mean_and_log()  # begins the stages' clocks anew
        epochs(settings["epochs"])
        trainer.mean_and_log()
    path = Path(settings["output"] or Path(args["data_dir"]) / f"profile_{trainer.env_name}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))
    print(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=40))
    print(f"{trainer.env_name}: {settings['epochs']} epochs of {trainer.batch_size:,} steps, tracing included")
    total = sum(trainer.stages.values())
    for name, seconds in trainer.stages.items():
        print(f"{name:12} {seconds:8.3f} s  {100 * seconds / total:5.1f}%")
    print(f"trace        {path}   (open it in https://ui.perfetto.dev or chrome://tracing)")
    trainer.release()
    return path


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0].startswith("-"):
        print(f"usage: python profiler.py ENV [--profile.epochs N] [--section.key value ...]\n"
              f"environments: {', '.join(ocean.names())}")
        sys.exit(None if argv[:1] in (["-h"], ["--help"]) else "profiler.py: which environment?")
    try:
        profile(argv[0], pufferl.load_config(argv[0], argv[1:]))
    except (pufferl.ConfigError, MemoryError) as error:
        sys.exit(f"profiler.py: {error}")


if __name__ == "__main__":
    main()
