"""List the environments: what each is, sees and does, and what solves it.

    python pufferl.py list               # a line each
    python pufferl.py list breakout      # its rules, its settings, and what to type next

The rules are the first comment of an environment's header, or of its .ini if it has none. What it
sees and does comes from one that is made. What counts as solved is [solved] in the .ini.
"""

import argparse
import contextlib
import re
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import gymnasium

import configuration
import ocean
import processes
import vector
from auto import plural
from configuration import command, find_config
from errors import exit_on_error
from loggers import figure
from tools import aligned
from tools.options import with_envs


class Entry(NamedTuple):
    """An environment as text; sees, does and agents are None until one is made."""

    name: str
    rules: str  # the whole comment
    sees: str | None
    does: str | None
    agents: int | None
    solved: configuration.Solved | None
    ships: bool  # whether a trained policy does

    @property
    def line(self):
        """Return the first sentence of its rules, without its name."""
        sentence = re.match(r".*?(?=[.;] |[.;:]?$)", " ".join(self.rules.split()))[0]
        text = re.sub(r"^(\w+( \w+)?: |Go, )", "", sentence)
        return text[:1].upper() + text[1:]


def names():
    """List the environments with a header in ocean/ or an .ini in config/."""
    settings = {path.stem for path in (configuration.ROOT / "config").glob("*.ini")} - {"default"}
    return sorted({*ocean.names(), *settings})


def rules_of(path):
    """Return the first comment of a header or of an .ini; "" without a file."""
    text = path.read_text("utf-8") if path.exists() else ""
    if path.suffix == ".h":
        comment = re.match(r"\s*/\*(.*?)\*/", text, re.DOTALL)
        return "" if comment is None else re.sub(r"^ ?\* ?", "", comment[1].strip(),
                                                 flags=re.MULTILINE).strip()
    return "\n".join(line[1:].strip() for line in text.partition("\n[")[0].splitlines()
                     if line.startswith("#"))


def sees_and_does(env):
    """Return what an environment sees and does: ("11 × 11 uint8", "9 + 5")."""
    space, heads = env.single_observation_space, env.action_heads
    sees = (" × ".join(map(str, space.shape)) + f" {space.dtype}"
            if isinstance(space, gymnasium.spaces.Box) else str(space))
    return sees, plural(env.action_dims, "number") if heads is None else " + ".join(map(str, heads))


def look(name):
    """Return the Entry of an environment that `train` takes."""
    env_name, ini = find_config(name)
    header = ocean.FOLDER / env_name / f"{env_name}.h"
    header = header if header.exists() else Path(env_name)
    # the policy beside a header was trained with the .ini of the same name
    is_of_header = header.suffix == ".h" and ini.stem == header.stem
    rules = rules_of(header if is_of_header else ini)
    ships = is_of_header and header.with_suffix(".safetensors").exists()
    return Entry(name, rules, None, None, None, configuration.solved(name, ini), ships)


def complete(entry, args):
    """Complete an Entry by making the environment. args: from load_config."""
    with vector.load_env(entry.name, with_envs(args)) as vecenv:
        sees, does = sees_and_does(vecenv)
        return entry._replace(sees=sees, does=does, agents=vecenv.num_agents // vecenv.num_envs)


def took(solved):
    """Return what training takes until it is solved: "26 M, 79 s"."""
    if solved.steps is None:
        return ""
    return f"{float(f'{solved.steps / 1e6:.2g}'):g} M, {solved.seconds:g} s"


def table():
    """Print a line for each environment."""
    if sys.stderr.isatty():
        print("looking at all environments; the first time their headers are compiled",
              file=sys.stderr)
    with ThreadPoolExecutor(processes.cores()) as pool:
        list(pool.map(ocean.load, {*names()} & {*ocean.names()}))
    rows = [("environment", "sees", "does", "agents", "solved at", "after", "ships", "what it is")]
    for entry in map(look, names()):
        with contextlib.suppress(Exception, SystemExit):  # its package, or a file, is missing
            entry = complete(entry, configuration.load_config(entry.name))
        metric, least = entry.solved.metric if entry.solved else ("", None)
        at = ("" if least is None
              else figure(least) if metric == "score" else f"{metric} {figure(least)}")
        rows.append((entry.name, entry.sees or "-", entry.does or "-", str(entry.agents or "-"), at,
                     took(entry.solved) if entry.solved else "", "yes" if entry.ships else "",
                     entry.line))
    for line in aligned(rows, right=("agents", "solved at", "after")):
        print(line)
    print("\nsees: numbers of an observation; does: choices of each action; solved at: a mean "
          "score; after: agent steps and seconds on\ntwo cores until then; -: another package's, "
          "which is not installed here; ships: a trained policy does.\nMore of one: "
          f"{command('list', 'breakout')}")


def show(name):
    """Print all about one environment (any that `train` takes), and what to type next."""
    env_name, ini = find_config(name)
    args = configuration.load_config(name)
    entry = complete(look(name), args)
    print(f"{name}\n\n{entry.rules}\n" if entry.rules else f"{name}\n")
    print(f"sees         {entry.sees}\ndoes         {entry.does}\nagents       {entry.agents} in "
          "each environment")
    if entry.solved:
        metric, least = entry.solved.metric
        after = (f", which took {took(entry.solved)} on two cores with seed 0" if entry.solved.steps
                 else "")
        print(f"solved at    a mean {metric} of {figure(least)}{after}")
    if entry.ships:
        about = configuration.read_baseline(name)[1]
        print(f"ships        a policy with a score of {figure(about['score'])} after "
              f"{about['steps']:,} steps")
    for place in (ocean.FOLDER / env_name / f"{env_name}.h", ini):
        if place.exists():
            print(f"defined in   {place}")
    settings = {key: value for key, value in args["env"].items() if key != "num_envs"}
    if settings:
        text = ", ".join(f"{key} {value}" for key, value in settings.items())
        print(textwrap.fill(text, 110, initial_indent="settings     ", subsequent_indent=" " * 13))
    print("trains with  "
          f"{plural(args['env'].get('num_envs', 1) * args['vec']['num_envs'], 'environment')}, "
          f"{args['train']['total_timesteps']:,} steps\n")
    if entry.ships:
        print(f"watch it     {command('eval', name, '--baseline', '--eval.web')}")
    print(f"train it     {command('train', name)}")
    print(f"tune it      {command(name, script='protein.py')}")


def main(argv, program="pufferl.py list"):
    """Run `list`, of all or one environment; `program` is what errors begin with."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", nargs="?")
    name = parser.parse_args(argv).environment
    with exit_on_error(program):
        table() if name is None else show(name)
