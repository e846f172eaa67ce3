"""Read and change the settings of a verb that takes an environment."""

import sys

import configuration
import ocean
from errors import require


def no_resume(argv):
    """Return the options of a verb; raise ConfigError if --resume is one."""
    require(not any(word.partition("=")[0] == "--resume" for word in argv),
            "--resume is for train. To use a run's weights, network and environment, give "
            "--load-model-path.")
    return argv


def with_envs(args, num_envs=1, backend="auto"):
    """Return settings with `num_envs` environments that step in one buffer."""
    vec = {**args["vec"], "backend": backend, "num_envs": 1, "total_agents": None, "num_buffers": 1,
           "num_workers": None, "batch_size": None, "device": "host"}
    return {**args, "vec": vec, "env": {**args["env"], "num_envs": num_envs}}


def read_command(argv, program, description):
    """Return (environment, its settings) from the command line of a tool.

    Print the description and exit for --help or without an environment; before the settings for
    --help of one.
    """
    if not argv or argv[0].startswith("-"):
        print(f"{description}\nenvironments: {', '.join(ocean.names())}")
        sys.exit(None if argv[:1] in (["-h"], ["--help"]) else f"{program}: which environment?")
    if {"-h", "--help"} & {*argv[1:]}:
        print(description, flush=True)
    return argv[0], configuration.load_config(argv[0], no_resume(argv[1:]))
