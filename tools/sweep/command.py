"""Sweep settings: many training runs (trials) on machines or a Ray cluster.

    python protein.py breakout --sweep.workers 2                   # two at a time
    python protein.py breakout --train.device cuda --sweep.gpus 8 --sweep.workers 2    # sixteen
    python protein.py breakout --sweep.ray auto                # as many as fit the cluster
    python protein.py report experiments/sweep_breakout        # the page of report.py

A tuner of protein.py chooses the settings of each trial, a process of `pufferl.py train`; its curve
gives the tuner (cost, score). trials.py has the trials and the sweep's folder, with which the same
command continues a sweep.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_type_hints

import numpy as np

import auto
import configuration
import data_parallel
import emulation
import environments
import loggers
import processes
import protein
import pufferl
import runs
from configuration import Entry, command
from errors import ConfigError, exit_on_error, require
from protein import Protein, front_of
from tools.options import no_resume
from tools.sweep.report import write_report
from tools.sweep.trials import (
    DECIDING,
    Ledger,
    LocalPool,
    RayPool,
    as_options,
    end_orphan,
    observe_record,
    read_json,
    short,
    used,
    write_json,
)
from vector import physical_cores

TRAINER = "pufferl.py"

# --------------------------------------------------------------------------------------------------
# The sweep


METHODS = {"protein": Protein, "random": protein.Random, "genetic": protein.ParetoGenetic}


@dataclass
class Sweep:
    method: Literal[*METHODS] = "protein"
    """How settings are chosen: protein (a model of score and cost), random or genetic (children of
    the front)."""
    num_trials: int = 100
    """Trials in all, those of earlier starts included."""
    metric: str = "environment/score"
    """What is searched for: any name in metrics.jsonl."""
    goal: Literal["maximize", "minimize"] = "maximize"
    """Whether more of the metric is better, or less."""
    cost: str = "performance/uptime"
    """What a trial costs: any name in metrics.jsonl that grows; seconds of training by default."""
    max_suggestion_cost: float | None = None
    """Trials that are expected to cost more than this are not suggested; one that costs twice as
    much is stopped (default: 3600 seconds; no limit if the cost is not performance/uptime)."""
    random_trials: int | None = None
    """Trials before the model is used (default: 16, at most a third of all)."""
    downsample: int = 5
    """Points along each training curve that the model learns from."""
    early_stop: float = 0.25
    """A trial past a quarter of its schedule is stopped, if its score has not come this share of
    the way from bad trials' scores to the best one at the same cost; 0: never."""
    workers: int | None = None
    """Trials side by side; if gpus is given, on each GPU (default: 1; on Ray what fits)."""
    gpus: int = 0
    """GPUs of this machine to use; on Ray, GPUs of each trial."""
    cpus: float = 1.0
    """CPU cores that Ray reserves for each trial, and threads that it steps environments with."""
    ray: str | None = None
    """Run the trials on this Ray cluster: its address, "auto", or "local"."""
    attempts: int = 3
    """A trial that is lost this many times (killed, or its machine went down) counts as failed."""
    name: str | None = None
    """Names the sweep, if an environment has several; its folder is DATA_DIR/sweep_ENV_NAME."""
    seed: int = 0
    """Seed of the suggestions; the trials themselves use train.seed."""
    logger: Literal["tensorboard", "wandb", "none"] = "tensorboard"
    """Where trials go besides the ledger: TensorBoard's HParams, or one W&B run each in a group."""


def make_settings(entries):
    """Return the Sweep of configuration.Entry's; raise ConfigError for a wrong one."""
    converted = (configuration.convert(entry, {"sweep": Sweep}) for entry in entries)
    settings = Sweep(**{key: value for _, key, value in converted})
    settings.metric = METRICS.get(settings.metric, settings.metric)
    if "/" not in settings.metric:
        settings.metric = f"environment/{settings.metric}"
    return settings


def settings_of(tuner):
    """Return (Sweep, options of `pufferl.py train` for all trials) of a tuner.

    Raises ConfigError for a setting that does not exist.
    """
    settings, fixed = dict(tuner.sweep_settings), {}
    for name, value in settings.pop("fixed", {}).items():
        fixed |= ({f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict)
                  else {name: value})
    require("method" not in settings, "method: the tuner's class is the method.")
    settings |= {key: getattr(tuner, key) for key in (
        "metric", "num_trials", "goal", "seed", "max_suggestion_cost")}
    entries = [Entry("sweep", key, value, key) for key, value in settings.items()]
    return make_settings(entries), as_options(fixed)


def fixed_settings(names):
    """Return the settings that a command line fixes: its own, and sizes they decide."""
    names = {"train.horizon" if name == "train.batch_size" else name for name in names}
    if names & {"env.num_envs", "vec.num_envs"}:
        return names | {"vec.total_agents"}
    return names | ({"env.num_envs", "vec.num_envs"} if "vec.total_agents" in names else set())


SIZES = "vec.total_agents", "train.horizon", "train.minibatch_size"


def searched_settings(env_name, entries, options=()):
    """Return a tuner's search space, {"section.key": entry}, after checks.

    A setting without a mean gets its present value; one that is "auto", the value that the rules
    choose without measurements. If that is out of range, it is not searched and stays "auto".
    entries: a search space; None: the [sweep.*] sections. options: of `pufferl.py train`; what they
    fix is not searched. env_name None: the entries as they are. Raises ConfigError for a setting
    that does not exist.
    """
    if env_name is None:
        return entries or {}
    schema, _, names, _ = configuration.resolve(env_name, options)
    args = configuration.load_config(env_name, list(options))
    entries = protein.flatten(sections_of(args) if entries is None else entries)
    fixed = fixed_settings(names)
    varied = {name for name, entry in entries.items()
              if name not in fixed and protein.described(name, entry)["distribution"] != "none"}
    if not DECIDING & varied:  # else some trials may use them
        fixed |= configuration.unused(args).keys()
    general = configuration.load_config("default")["sweep"]
    are_free = args["train"]["horizon"] == "auto" and args["train"]["batch_size"] in (None, "auto")
    space, automatic = {}, automatic_settings(args, varied)
    for name, entry in entries.items():
        if name in SIZES and entry == general.get(f"sweep.{name}"):
            # They are chosen to fit each trial's steps, and each other.
            is_odd = name == "vec.total_agents" and count_agents(args).bit_count() > 1
            if are_free or is_odd:  # no power of two has the agents of whole environments
                continue
        if name.rpartition(".")[2] == "batch_size" and name != "vec.batch_size":
            name, entry = "train.horizon", horizons(args, protein.described(name, entry))
        section, key = find_setting(schema, name)
        entry = protein.described(name, entry)
        if entry["distribution"] == "none" or f"{section}.{key}" in fixed:
            continue
        kind, present = get_type_hints(schema[section])[key], args[section][key]
        if present == "auto":
            present = automatic.get(f"{section}.{key}", present)
        if (section, key, present) == ("vec", "total_agents", None):
            present = count_agents(args)
        if entry["distribution"] == "choice":
            entry["values"] = [configuration.coerce(text, kind, f"[sweep.{name}] values")
                               for text in entry.get("values", ())]
            is_within = present in entry["values"]
        else:
            kinds = {*getattr(kind, "__args__", (kind,))}
            require({int, float} & kinds, f"[sweep.{name}] is not a number: use distribution = "
                    "choice with values.")
            if float not in kinds:
                entry["integer"] = True
            bounds = entry.get("min"), present, entry.get("max")
            is_number = all(isinstance(value, int | float) for value in bounds)
            is_within = is_number and bounds[0] <= present <= bounds[2]
            if is_number and not is_within:
                is_automatic = args[section][key] == "auto"
                effect = "so it is not searched" if is_automatic else "so no trial has it"
                print(f"[sweep.{name}] min, max = {bounds[0]:g}, {bounds[2]:g}: the "
                      f"{'automatic' if is_automatic else 'present'} value {present:g} is outside, "
                      f"{effect}. Give another range.", file=sys.stderr)
                if is_automatic:
                    continue
        if is_within and entry.get("mean") is None:
            entry["mean"] = present
        space[f"{section}.{key}"] = entry
    protein.Space(space)
    return space


def automatic_settings(args, searched):
    """Return {name: value} of train's "auto" settings; {} if none is searched.

    Without measurements, so that a sweep that is continued has the same values.
    """
    train = args["train"]
    if all(train.get(name.rpartition(".")[2]) != "auto" for name in searched):
        return {}
    with environments.sample(environments.find_maker(args["env_name"]), args["env"]) as probe:
        facts = auto.facts_of(probe, count_agents(args), train["total_timesteps"])
    choices = auto.decide(configuration.replace_batch_size(train, facts.agents), facts)
    return {f"train.{key}": value for key, (value, _) in choices.items()}


def sections_of(args):
    """Return the [sweep.*] sections as a search space."""
    return {name.partition(".")[2]: dict(entry) for name, entry in args["sweep"].items()
            if name != "sweep"}


def find_setting(schema, name):
    """Return (section, key) of a setting whose name may lack its section."""
    section, _, key = name.rpartition(".")
    for guess in () if section else ("train", "policy", "rnn", "vec", "env"):
        with contextlib.suppress(ConfigError):
            return configuration.translate(guess, key, schema, "")[:2]
    return configuration.translate(section or "train", key, schema, f"[sweep.{name}]")[:2]


def count_agents(args):
    """Return the agents of all ranks that the vec and env sections describe."""
    vec, ranks = args["vec"], args["train"]["gpus"]
    if vec["total_agents"] is not None:
        return vec["total_agents"] * ranks
    maker = environments.find_maker(args["env_name"])
    with environments.sample(maker, args["env"]) as probe:
        agents = emulation.slots(probe) * ranks
    return vec["num_envs"] * environments.split_copies(maker, args["env"])[0] * agents


def horizons(args, entry):
    """Turn values of batch_size into values of train.horizon."""
    agents = count_agents(args)
    values = [protein.number(value) for value in entry.get("values", ())]
    require(values and not any(value % agents for value in values),
            f"[sweep.batch_size] values = {values}: must be multiples of the {agents} agents "
            "(env.num_envs, vec.total_agents); for a range search train.horizon.")
    return {**entry, "values": [value // agents for value in values]}


METRICS = {"mean_reward": "environment/episode_return",
           "mean_episode_length": "environment/episode_length"}


class Runner:
    """Runs trials until the sweep's folder holds settings.num_trials of them.

    tuner: chooses each trial's settings, and has the environment's name. settings: a Sweep.
    options: of `pufferl.py train`, for all trials. Raises ConfigError if the folder holds another
    sweep.
    """

    def __init__(self, tuner, settings, options=()):
        import torch

        self.tuner = tuner
        self.settings = settings
        self.options = list(options)
        self.config = pufferl.load_config(tuner.env_name, self.options)
        self.interrupts = processes.Interrupts()
        gpus = torch.cuda.device_count()
        require(self.config["data_dir"],
                "data_dir = none: a sweep keeps its trials there. Name a folder.")
        require(self.config["train"]["device"] != "cuda" or settings.ray or gpus >= settings.gpus,
                f"sweep.gpus = {settings.gpus}: torch finds {gpus} here.")
        require(settings.cpus == 1 or settings.ray, f"sweep.cpus = {settings.cpus}: is for "
                "sweep.ray. On this machine use vec.num_threads.")
        name = "_".join(filter(None, ("sweep", Path(self.config["env_name"]).stem, settings.name)))
        self.folder = Path(self.config["data_dir"]) / name
        self.ledger = Ledger(self.folder)
        begin(self.ledger, tuner, settings, self.options, self.config)
        names = {"train.learning_rate"} & {*tuner.space.names}
        kl = automatic_settings(self.config, names).get("train.target_kl")
        if kl is not None and "train.target_kl" not in tuner.space.names:
            # With a given rate, target_kl auto is none.
            self.options += as_options({"train.target_kl": kl})
        if self.config["train"]["device"] == "auto":  # not all trials on the first GPU
            self.options += as_options({"train.device": "cpu"})
        self.log = make_logger(settings.logger, self.folder, self.config)
        self.observed = set()  # numbers of the trials that the tuner has observed
        self.progress = {}  # {number of a trial: what `watch_process` saw last}

    def run(self):
        """Run the trials; returns the Ledger.

        At Ctrl-C (or SIGTERM) the running trials save, and the next start resumes them; a second
        Ctrl-C ends at once. Raises RuntimeError if the first trials all fail, ConfigError if
        another process runs this sweep.
        """
        settings, ledger = self.settings, self.ledger
        with contextlib.ExitStack() as stack:
            try:
                stack.callback(os.close, runs.lock(self.folder))
            except BlockingIOError:
                raise ConfigError(f"{self.folder}: another process runs this sweep. Wait until it "
                                  "ends, stop it, or give another --sweep.name.") from None
            self.pool = (RayPool(settings.ray, settings.workers, settings.cpus, settings.gpus)
                         if settings.ray else LocalPool(settings.workers or 1, settings.gpus))
            self.say(f"sweep {self.folder}: {len(self.tuner.space)} settings "
                     f"({', '.join(self.tuner.space.names)}), {len(ledger.results())} of "
                     f"{settings.num_trials} trials done, {self.pool.slots} at a time; a line "
                     "comes as each ends")
            if settings.gpus and self.config["train"]["device"] != "cuda":
                self.say("sweep.gpus without --train.device cuda: the trials train on the CPU")
            self.waiting = [*ledger.claims().values()]  # of a sweep that was stopped or killed
            stack.enter_context(self.interrupts)
            show = stack.enter_context(processes.progress())
            stack.callback(self._close_pool)
            while not self.interrupts.requested:
                while (len(self.pool.running) < self.pool.slots
                       and not self.interrupts.requested and (claim := self.next_claim())):
                    self.submit(claim)
                if not self.pool.running:
                    break
                for claim, outcome in self.pool.finished(0.5):
                    self.settle(claim, outcome)
                show("running: " + ", ".join(
                    f"{trial} {100 * self.progress[trial].get('progress', 0):.0f}% score "
                    f"{self.progress[trial].get('score', math.nan):.4g}"
                    for trial in (claim["trial"] for claim in self.pool.running.values())))
                refuse_if_all_fail(ledger)
        self.learn()
        self.conclude()
        if not self.interrupts.requested:
            refuse_if_all_fail(ledger, 1)
        return ledger

    def _close_pool(self):
        for claim, outcome in self.pool.close():
            is_lost = outcome["status"] == "lost"
            self.settle(claim, {"status": "interrupted"} if is_lost else outcome)

    def say(self, text):
        processes.say(f"\r\033[K{text}" if sys.stdout.isatty() else text)

    def learn(self):
        """Let the tuner observe what is new in the ledger."""
        for number, record in self.ledger.results().items():
            if number not in self.observed:
                self.observed.add(number)
                observe_record(self.tuner, record)

    def next_claim(self):
        """Return the next trial, a dict with its number and settings; None after the last."""
        if self.waiting:
            claim = self.waiting.pop(0)
            end_orphan(claim)
            return claim
        self.learn()
        number = self.ledger.free_number()
        if number >= self.settings.num_trials:
            return None
        self.tuner.pending = [self.tuner.space.encode(claim["settings"])
                              for claim in self.pool.running.values()]
        return {"trial": number, "settings": self.tuner.suggest(number), "attempts": 0,
                "predicted": self.tuner.prediction}

    def submit(self, claim):
        """Start a trial."""
        settings, train = self.settings, self.config["train"]
        claim["attempts"] += 1
        self.ledger.update(claim)
        words = ["train", self.tuner.env_name, *self.options, "--logger", "none",
                 "--train.keep", "1"]
        if self.config["vec"]["num_threads"] is None and (settings.ray or self.pool.slots > 1):
            threads = (int(settings.cpus) if settings.ray
                       else physical_cores() // self.pool.slots)
            words += ["--vec.num-threads", str(max(1, threads))]
        progress = self.progress[claim["trial"]] = {}  # another thread writes to it
        words += as_options(used(claim["settings"], self.config))
        job = {"trainer": TRAINER, "command": words, "env": {}, "cwd": os.getcwd(),
               "total": claim["settings"].get("train.total_timesteps", train["total_timesteps"]),
               "folder": str(self.folder / "runs" / f"{claim['trial']:05d}"), "at": progress,
               "metric": settings.metric, "cost": settings.cost, "downsample": settings.downsample,
               "limit": 2 * self.tuner.max_suggestion_cost,
               "rule": stopping_rule(self.tuner, settings)}
        self.pool.submit(claim, job, lambda child: self.ledger.update({**claim, "child": child}))

    def settle(self, claim, outcome):
        """Record a trial's outcome; a lost trial is run again."""
        attempts = claim["attempts"]
        if outcome["status"] == "interrupted":
            self.ledger.update({**claim, "attempts": attempts - 1})
            return
        if outcome["status"] == "lost" and attempts < self.settings.attempts:
            self.say(f"trial {claim['trial']}: lost ({outcome['error']}); it is run again")
            self.submit(claim)
            return
        if outcome["status"] == "lost":
            outcome = {"status": "failed", "score": None, "cost": None, "curve": [], "steps": 0.0,
                       "error": f"lost {attempts} times: {outcome['error']}"}
        if outcome.get("run"):
            outcome["run"] = os.path.relpath(outcome["run"], self.folder)
        record = {"trial": claim["trial"], "settings": claim["settings"], **outcome,
                  "predicted": claim.get("predicted", {}), "attempts": attempts}
        self.ledger.finish(record)
        self.learn()
        self.log(record)
        self.say(describe(record, self.tuner, self.settings))

    def conclude(self):
        """Print the front and how to train with the best settings; write the report."""
        tuner = self.tuner
        if not tuner.results:
            return
        self.say(f"\n{self.settings.metric:>20}  {self.settings.cost:>20}   the front, cheapest "
                 "first")
        for config, score, cost in tuner.front():
            self.say(f"{score:20.5g}  {cost:20.5g}   " + brief(config))
        best = as_options(used(tuner.best()[0], self.config))
        self.say(f"\nbest settings: {command('train', tuner.env_name, *self.options, *best)}")
        with contextlib.suppress(ModuleNotFoundError):  # without plotly there is no report
            self.say(f"report: {write_report(self.folder)}")
        if self.interrupts.requested:
            self.say("stopped; the same command continues")


def begin(ledger, tuner, settings, options, config):
    """Write sweep.json, or check that the folder's asks for the same.

    Else trials could not be compared.
    """
    path = ledger.folder / "sweep.json"
    file, env_name = config["env_file"], tuner.env_name
    if file:
        env_name = ":".join(filter(None, (file, env_name.partition(".py:")[2])))
    terms = {"env": env_name, "metric": settings.metric, "goal": settings.goal,
             "cost": settings.cost}
    terms |= {f"sweep.{name}.{field}": value for name, entry in tuner.search_space.items()
              for field, value in entry.items()}
    terms |= {f"{section}.{key}": value for section in ("env", "vec", "policy", "rnn", "train")
              for key, value in config[section].items()
              if f"{section}.{key}" not in tuner.space.names}
    terms |= {key: config[key] for key in ("load_model_path", "baseline") if config[key]}
    terms = json.loads(json.dumps(terms, default=str))
    source = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else None
    if not path.exists():
        write_json(path, {"asked": terms, "options": list(options), "space": tuner.search_space,
                          "source": source, "created": time.time()})
        return
    whole = read_json(path)
    before = whole["asked"]
    if whole.get("source", source) != source:
        print(f"{file} was edited after this sweep began: the scores of earlier trials are of the "
              "other environment. --sweep.name NAME begins a new sweep.", file=sys.stderr)
    different = [f"{key}: {before.get(key, 'nothing')} there, {terms.get(key, 'nothing')} now"
                 for key in {**before, **terms} if before.get(key, ...) != terms.get(key, ...)]
    more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
    require(not different,
            f"{ledger.folder} holds another sweep ({'; '.join(different[:5])}{more}). Give this "
            "one a name, --sweep.name NAME (name=\"NAME\" in Python), or move the folder away.")


def stopping_rule(tuner, settings):
    """Return the rule of `should_stop_early` from the trials so far; None for too few.

    front: [(cost, score)] of all curves' points; low: the score of bad trials.
    """
    done = [o for o in tuner.observations if not o.failed]
    if not settings.early_stop or len(done) < 5:
        return None
    points = [(cost, score) for o in done for _, score, cost in o.curve]
    front = front_of([score for _, score in points], [cost for cost, _ in points])
    return {"front": [points[i] for i in front],
            "low": float(np.quantile([o.score for o in done], 0.1)),
            "share": settings.early_stop, "after": 0.25, "sign": tuner.sign}


def refuse_if_all_fail(ledger, count=5):
    """Raise RuntimeError if the first `count` trials all failed."""
    records = list(ledger.results().values())
    if len(records) >= count and all(record["status"] == "failed" for record in records):
        errors = "\n".join(f"  trial {record['trial']}: {record['error']}"
                           for record in records[:count])
        raise RuntimeError(f"the first {len(records)} trials all failed:\n{errors}\nTheir output "
                           f"is in {ledger.folder}/runs/*/output.txt; move the folder away to "
                           "begin again.")


def describe(record, tuner, settings):
    """Describe a finished trial in a line."""
    head = f"trial {record['trial']:4d} of {settings.num_trials}"
    if record["status"] == "failed":
        return f"{head}  failed: {record['error']}"
    front = any(cost == record["cost"] and score == record["score"]
                for _, score, cost in tuner.front())
    predicted = record["predicted"].get("score")
    note = ("  on the front" if front
            else "  stopped early" if record["status"] == "stopped" else "")
    expected = f" (expected {predicted:.4g})" if predicted is not None else ""
    return (f"{head}  score {record['score']:.4g}{expected}  cost {record['cost']:.4g}{note}   "
            f"{brief(record['settings'])}")


def brief(settings):
    """Join settings into a line, without the names of their sections."""
    return " ".join(f"{name.partition('.')[2]}={short(value)}" for name, value in settings.items())


def make_logger(kind, folder, config):
    """Return a function that logs a finished trial's record.

    Raises ImportError if the package is missing. Later errors lose log entries only; the ledger has
    them.
    """
    if kind == "wandb":
        import wandb  # noqa: F401

    def write(record):
        name, failed = f"{record['trial']:05d}", record["status"] == "failed"
        if failed and kind == "tensorboard":  # its page of settings needs a score
            return
        if kind == "wandb":
            logger = loggers.WandbLogger(config["project"], config["entity"], name,
                                         record["settings"], group=folder.name,
                                         tag=record["status"], folder=str(folder))
        else:
            from torch.utils.tensorboard.summary import hparams

            logger = loggers.TensorBoardLogger(folder / "tensorboard" / name)
            last = {"sweep/final_score": record["score"], "sweep/final_cost": record["cost"]}
            for summary in hparams(record["settings"], last):  # add_hparams opens a second file
                logger.writer.file_writer.add_summary(summary)
            logger.log(last, 0)
        for progress, score, cost in record["curve"]:
            step = round(record["steps"] * progress / record["curve"][-1][0])
            logger.log({"sweep/score": score, "sweep/cost": cost}, step)
        if failed:
            logger.run.finish(exit_code=1)
        logger.close()

    def log(record):
        try:
            write(record)
        except (OSError, ValueError) as error:
            processes.say(f"trial {record['trial']} was not logged to {kind} ({error})", sys.stderr)

    return log if kind != "none" else lambda record: None


# --------------------------------------------------------------------------------------------------
# Command line

USAGE = """usage: python protein.py ENV [--sweep.key value ...] [--section.key value ...]
       python protein.py report FOLDER [--output FILE]

  ENV         search the settings of [sweep.*] in config/default.ini and config/ENV.ini; the same
              command continues a sweep that was stopped
  report      write the page of a sweep's folder

  --sweep.num-trials 50 --sweep.workers 2       how to search; protein.py ENV --help lists all
  --sweep.train.learning-rate.max 0.1           where: distribution, min, max, mean, scale or values
  --sweep.train.gamma.distribution none         removes a setting
  --train.total-timesteps 10000000              fixes a setting for all trials, which is not searched
"""


def main(argv=None, program="protein.py"):
    """Run a sweep or `report`; `program` is what errors begin with."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    with exit_on_error(program, (ImportError, ValueError, RuntimeError, OSError)):
        data_parallel.refuse_ranks("sweep")
        if argv[0] == "report":
            import tyro

            print(tyro.cli(write_report, args=argv[1:], prog="protein.py report",
                           config=(tyro.conf.PositionalRequiredArgs,)))
        else:
            sweep_command(argv[0], argv[1:])


def sweep_command(env_name, argv):
    """Run the sweep of a command line."""
    words = [word for word in argv if word not in ("-h", "--help")]
    entries = list(configuration.read_options(words))
    given = [entry for entry in entries if entry.section.partition(".")[0] == "sweep"]
    options = [word for entry in entries if entry not in given
               for word in (entry.place, entry.value) if word is not True]
    args = configuration.load_config(env_name, no_resume(options))
    shipped = [Entry("sweep", key, text, f"config [sweep] {key}")
               for key, text in args["sweep"].get("sweep", {}).items()]
    settings = make_settings(shipped + [entry for entry in given if entry.section == "sweep"])
    if len(words) < len(argv):
        show_help(env_name, settings)
    space = sections_of(args)
    for entry in given:
        require(entry.section.count(".") in (0, 2),
                f"{entry.place}: is --sweep.SECTION.KEY.FIELD VALUE with a field of "
                f"{', '.join(protein.FIELDS)}, or --sweep.KEY VALUE; --help lists the keys.")
        if entry.section != "sweep":
            text, name = "" if entry.value is True else entry.value, entry.section[len("sweep."):]
            if entry.key == "values":  # not those of another distribution
                space[name] = {}
            space.setdefault(name, {})[entry.key] = text
    fixed = fixed_settings(configuration.resolve(env_name, options)[2])
    for name in space:
        if name in fixed:
            print(f"{name} is given, so it is not searched")
    limit = settings.max_suggestion_cost
    if limit is None:
        limit = 3600.0 if settings.cost == "performance/uptime" else math.inf
    tuner = METHODS[settings.method](
        search_space=searched_settings(env_name, space, options), num_trials=settings.num_trials,
        metric=settings.metric, goal=settings.goal, seed=settings.seed,
        max_suggestion_cost=limit, random_trials=settings.random_trials)
    tuner.env_name = env_name  # set last: the constructor would check settings without options
    Runner(tuner, settings, options).run()


def show_help(env_name, settings):
    """Print the settings of a sweep, through tyro, and exit."""
    import tyro

    arguments = dataclasses.make_dataclass("Arguments", [
        ("sweep", Sweep, dataclasses.field(default_factory=lambda: settings))])
    arguments.__doc__ = (f"Search hyper-parameters of {env_name}.\n\n"
                         f"{USAGE[USAGE.index('  --sweep.num'):]}")
    tyro.cli(arguments, args=["--help"], prog=f"protein.py {env_name}",
             config=(tyro.conf.FlagConversionOff,))
