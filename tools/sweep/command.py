"""A sweep: many training runs (trials), each a process, on one or more machines or a Ray cluster.

    python protein.py breakout --sweep.workers 2                   # two at a time
    python protein.py breakout --train.device cuda --sweep.gpus 8 --sweep.workers 2    # sixteen
    python protein.py breakout --sweep.ray auto                    # as many as the cluster has room for
    python protein.py breakout --sweep.web 8080                    # the page, live, at http://127.0.0.1:8080
    python protein.py report experiments/sweep_breakout            # the page of tools/sweep/report.py

A tuner of protein.py chooses the settings of each trial. A trial runs `pufferl.py train`; its curve tells the tuner
(cost, score). trials.py has the trials and the sweep's folder, from which the same command goes on.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

import processes
import protein
from errors import ConfigError
from protein import Protein, front_of
from tools.sweep.report import serve, write_report
from tools.sweep.trials import (
    DECIDE,
    TOLD,
    Ledger,
    LocalPool,
    RayPool,
    as_options,
    end_orphan,
    observe_record,
    read_whole,
    short,
    used,
    write_json,
)

# Our other files are imported within functions, because most import torch.

TRAINER = "pufferl.py"

# --------------------------------------------------------------------------------------------------
# The sweep


METHODS = {"protein": Protein, "random": protein.Random, "genetic": protein.ParetoGenetic, "grid": protein.Grid}


@dataclass
class Sweep:
    method: Literal[*METHODS] = "protein"
    """How settings are chosen: protein (a model of score and cost), random, genetic (children of the front) or grid."""
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
    """Trials before the model is asked (default: 16, at most a third of all)."""
    downsample: int = 5
    """Points along each training curve that the model learns from."""
    early_stop: float = 0.25
    """A trial past a quarter of its schedule is stopped, if its score has not come this share of
    the way from bad trials' scores to the best one at the same cost; 0: never."""
    workers: int | None = None
    """Trials side by side; if gpus is given, on each GPU (default: 1; on Ray what has room)."""
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
    web: int | None = None
    """Serve the report on this port of this machine (127.0.0.1) while the sweep runs."""


def settings_of(tuner):
    """(Sweep, options of `pufferl.py train` that all trials share) of a tuner that was made in
    Python. Raises ConfigError for a setting that does not exist."""
    given = dict(tuner.sweep_settings)
    fixed = {}
    for name, value in given.pop("fixed", {}).items():
        fixed |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    known = [field.name for field in dataclasses.fields(Sweep) if field.name != "method"]
    for key in given:
        if key not in known:
            raise ConfigError(f"{key}: there is no such setting of a sweep. There are: fixed, {', '.join(known)}.")
    own = {key: getattr(tuner, key) for key in ("num_trials", "metric", "goal", "seed", "max_suggestion_cost")}
    own["metric"] = metric_of(tuner.metric)
    return Sweep(**{**given, **own}), as_options(fixed)


def fixed_settings(given):
    """Names, "section.key", of the settings that the options of a command line fix: those that are given, and numbers
    of agents and environments that these override."""
    import configuration

    sizes = {f"train.{size}": f"train.{key}" for size, key in configuration.SIZES.items()}
    names = {sizes.get(name, name) for name in given}
    if names & {"env.num_envs", "vec.num_envs"}:
        return names | {"vec.total_agents"}
    return names | ({"env.num_envs", "vec.num_envs"} if "vec.total_agents" in names else set())


SIZES = "vec.total_agents", "train.horizon", "train.minibatch_size"


def searched_settings(env_name, given, options=()):
    """The search space as a tuner takes it, checked against the environment's settings. A setting
    without a mean gets its present value. given: a search space; None: the [sweep.*] sections.
    options: of `pufferl.py train`; what they fix is not searched. env_name None: `given` unchanged.

    Returns {"section.key": what}. Raises ConfigError for a setting that does not exist.
    """
    if env_name is None:
        return given or {}
    import configuration

    schema, _, names, _ = configuration.resolve(env_name, options)
    args = configuration.load_config(env_name, list(options))
    if given is None:
        given = {name.partition(".")[2]: dict(what) for name, what in args["sweep"].items() if name != "sweep"}
    fixed = fixed_settings(names)
    varied = {name for name, what in protein.flatten(given).items()
              if name not in fixed and protein.described(name, what)["distribution"] != "none"}
    fixed |= set() if DECIDE & varied else configuration.unused(args)  # else some trials may use them
    general = configuration.load_config("default")["sweep"] if args["train"]["horizon"] == "auto" else {}
    space = {}
    for name, what in protein.flatten(given).items():
        if name in SIZES and what == general.get(f"sweep.{name}"):
            continue  # they are chosen to fit each trial's steps, and each other; a range of your own is searched
        if name.rpartition(".")[2] == "batch_size" and name != "vec.batch_size":
            name, what = "train.horizon", horizons(args, protein.described(name, what))
        section, _, key = find_setting(schema, name).partition(".")
        if section not in schema or section == "base":
            sections = [section for section in schema if section != "base"]
            raise ConfigError(f"[sweep.{name}] there is no section {section!r}. There are: {', '.join(sections)}.")
        section, key, _ = configuration.translate(section, key, schema, f"[sweep.{name}]")
        types = configuration.types_of(schema[section])
        what = protein.described(name, what)
        takes = protein.SCALES.get(what["distribution"], protein.Scale()).takes  # Space refuses an unknown one
        if takes == "nothing" or f"{section}.{key}" in fixed:
            continue
        kinds, present = getattr(types[key], "__args__", (types[key],)), args[section][key]
        if takes == "values":
            where, texts = f"[sweep.{name}] values", what.get("values", ())
            what["values"] = [configuration.coerce(text, types[key], where) for text in texts]
            fits = present in what["values"]
        else:
            if not {int, float} & set(kinds):
                raise ConfigError(f"[sweep.{name}] is no number: take distribution = choice with values.")
            if float not in kinds:
                what["integer"] = True
            bounds = (what.get("min"), present, what.get("max"))
            fits = all(isinstance(value, int | float) for value in bounds) and bounds[0] <= present <= bounds[2]
        if fits and what.get("mean") is None:
            what["mean"] = present
        space[f"{section}.{key}"] = what
    protein.Space(space)
    return space


def find_setting(schema, name):
    """The full name, "section.key", of a setting that may be given without its section."""
    import configuration

    if "." in name:
        return name
    for section in ("train", "policy", "rnn", "vec", "env"):
        keys = {field.name for field in dataclasses.fields(schema[section])}
        renamed = configuration.foreign_options()["renamed"].get(f"{section}.{name}", "").rpartition(".")
        if name in keys or (renamed[0] == section and renamed[2] in keys):
            return f"{section}.{name}"
    return f"train.{name}"  # it does not exist: the lookup of this name raises an error


def horizons(args, what):
    """The values of train.horizon that give these batch sizes. ConfigError if one is no multiple of the agents."""
    import configuration

    agents, values = configuration.count_agents(args), [protein.number(value) for value in what.get("values", ())]
    if not values:
        raise ConfigError("[sweep.batch_size] must be a list of values; for a range take train.horizon.")
    if any(value % agents for value in values):
        raise ConfigError(f"[sweep.batch_size] values = {values}: each must be a multiple of the {agents} agents "
                          "(env.num_envs, vec.total_agents), the horizon times which it is.")
    return {**what, "values": [value // agents for value in values]}


METRICS = {"mean_reward": "environment/episode_return", "mean_episode_length": "environment/episode_length"}


def metric_of(name):
    """A metric's name in metrics.jsonl; `name` may be another library's, or lack "environment/"."""
    return METRICS.get(name) or (name if "/" in name else f"environment/{name}")


class Runner:
    """Runs trials until the sweep's folder holds settings.num_trials of them, old ones included.

    tuner: chooses each trial's settings, and has the environment's name. settings: a Sweep.
    options: of `pufferl.py train`, for all trials. Raises ConfigError if the folder holds another
    sweep.
    """

    def __init__(self, tuner, settings, options=(), quiet=False):
        import torch

        import pufferl

        self.tuner, self.settings, self.options = tuner, settings, list(options)
        self.config, self.interrupts = pufferl.load_config(tuner.env_name, self.options), processes.Interrupts()
        if self.config["data_dir"] is None:
            raise ConfigError("a sweep keeps its trials in --data-dir, which must not be none.")
        if self.config["train"]["device"] == "cuda" and not settings.ray and torch.cuda.device_count() < settings.gpus:
            raise ConfigError(f"sweep.gpus is {settings.gpus}, but torch finds {torch.cuda.device_count()} here.")
        if settings.cpus != 1 and not settings.ray:
            raise ConfigError("sweep.cpus goes with --sweep.ray; on this machine --vec.num-threads says it.")
        name = "_".join(filter(None, ("sweep", Path(self.config["env_name"]).stem, settings.name)))
        self.folder = Path(self.config["data_dir"]) / name
        self.ledger = Ledger(self.folder)
        begin(self.ledger, tuner, settings, self.options, self.config)
        self.log = make_logger(settings.logger, self.folder, self.config)
        self.quiet = quiet
        self.known = set()  # numbers of the trials that the tuner has observed

    def run(self):
        """Returns the Ledger. At Ctrl-C (or SIGTERM) the running trials save, and the next start
        resumes them; a second Ctrl-C ends at once. RuntimeError if the first trials all fail,
        ConfigError if another process runs this sweep."""
        with lock_folder(self.folder):
            self._run_trials()
        self.learn()
        self.conclude()
        return self.ledger

    def _run_trials(self):
        settings, ledger = self.settings, self.ledger
        self.pool = (RayPool(settings.ray, settings.workers, settings.cpus, settings.gpus) if settings.ray else
                     LocalPool(settings.workers or 1, settings.gpus))
        server = serve(self.folder, settings.web) if settings.web is not None else None
        self.say(f"sweep {self.folder}: {len(self.tuner.space)} settings ({', '.join(self.tuner.space.names)}), "
                 f"{len(ledger.results())} of {settings.num_trials} trials done, {self.pool.slots} at a time; "
                 "a line comes as each ends")
        if settings.gpus and self.config["train"]["device"] != "cuda":
            self.say("sweep.gpus without --train.device cuda: the trials train on the CPU")
        if server:
            self.say(f"report: http://127.0.0.1:{server.server_address[1]}")
        self.waiting = [*ledger.claims().values()]  # of a sweep that was stopped or killed
        with self.interrupts, processes.progress() as show:
            try:
                while not self.interrupts.requested:
                    while len(self.pool.claims) < self.pool.slots and not self.interrupts.requested:
                        claim = self.next_claim()
                        if claim is None:
                            break
                        self.submit(claim)
                    if not self.pool.claims:
                        break
                    for claim, outcome in self.pool.finished(0.5):
                        self.settle(claim, outcome)
                    if not self.quiet:
                        show(status_line(self.pool.claims))
                    refuse_if_all_fail(ledger)
            finally:
                for claim, outcome in self.pool.close():
                    self.settle(claim, outcome if outcome["status"] != "lost" else {"status": "interrupted"})
                if server:
                    server.shutdown()
                    server.server_close()

    def say(self, text):
        if not self.quiet:
            processes.say(f"\r\033[K{text}" if sys.stdout.isatty() else text)

    def learn(self):
        """Tell the tuner what is new in the ledger."""
        for number, record in self.ledger.results().items():
            if number not in self.known:
                self.known.add(number)
                observe_record(self.tuner, record)

    def next_claim(self):
        """The next trial to run: a dict with its number and settings; None if there is none left."""
        if self.waiting:
            claim = self.waiting.pop(0)
            end_orphan(claim)
            return claim
        self.learn()
        number = self.ledger.free_number()
        if number >= self.settings.num_trials:
            return None
        self.tuner.pending = [self.tuner.space.encode(claim["settings"]) for claim in self.pool.claims]
        settings = self.tuner.suggest(number)
        if settings is None:  # the grid is finished
            return None
        return {"trial": number, "settings": settings, "attempts": 0, "predicted": self.tuner.prediction}

    def submit(self, claim):
        """Start a trial."""
        from vector import physical_cores

        settings = self.settings
        claim["attempts"] += 1
        self.ledger.update({key: value for key, value in claim.items() if key != "at"})
        command = ["train", self.tuner.env_name, *self.options, "--logger", "none", "--train.keep", "1"]
        if self.config["vec"]["num_threads"] is None and (settings.ray or self.pool.slots > 1):
            threads = int(settings.cpus) if settings.ray else physical_cores() // self.pool.slots
            command += ["--vec.num-threads", str(max(1, threads))]
        total = claim["settings"].get("train.total_timesteps", self.config["train"]["total_timesteps"])
        claim["at"] = {}  # `attend`, in another thread, writes the trial's progress here
        command += as_options(used(claim["settings"], self.config))
        job = {"trainer": TRAINER, "command": command, "env": {}, "total": total,
               "folder": str(self.folder / "runs" / f"{claim['trial']:05d}"), "at": claim["at"],
               "metric": settings.metric, "cost": settings.cost, "downsample": settings.downsample,
               "limit": 2 * self.tuner.max_suggestion_cost, "rule": stopping_rule(self.tuner, settings)}
        self.pool.submit(claim, job, lambda child: self.ledger.update({**claim, "at": None, "child": child}))

    def settle(self, claim, outcome):
        """Write down a trial's outcome; a lost trial is run again."""
        attempts = claim["attempts"]
        if outcome["status"] == "interrupted":
            self.ledger.update({**claim, "at": None, "attempts": attempts - 1})
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
        if not tuner.observations:
            return
        self.say(f"\n{self.settings.metric:>20}  {self.settings.cost:>20}   the front, cheapest first")
        for config, score, cost in tuner.front():
            self.say(f"{score:20.5g}  {cost:20.5g}   " + brief(config))
        if tuner.best():
            options = " ".join([tuner.env_name, *self.options, *as_options(used(tuner.best()[0], self.config))])
            self.say(f"\nbest settings: python pufferl.py train {options}")
        with contextlib.suppress(ModuleNotFoundError):  # without plotly there is no report
            self.say(f"report: {write_report(self.folder)}")
        if self.interrupts.requested:
            self.say("stopped; the same command goes on from here")


@contextlib.contextmanager
def lock_folder(folder):
    """Hold a sweep's folder. ConfigError if another process does."""
    import runs

    number = None
    try:
        number = runs.lock(folder)
    except BlockingIOError:
        raise ConfigError(f"{folder}: another process runs this sweep. Wait until it ends, or stop it, or give "
                          "another name, --sweep.name NAME.") from None
    except OSError:  # this disk knows no locks
        pass
    try:
        yield
    finally:
        if number is not None:
            os.close(number)


def status_line(claims):
    """The running trials in a line."""
    return "running: " + ", ".join(
        f"{claim['trial']} {100 * claim['at'].get('progress', 0):.0f}% score {claim['at'].get('score', math.nan):.4g}"
        for claim in claims)


def begin(ledger, tuner, settings, options, config):
    """Write sweep.json. If the folder has one, check that it asks for the same, or trials could not be compared."""
    path = ledger.folder / "sweep.json"
    asked = {"env": tuner.env_name, "metric": settings.metric, "goal": settings.goal, "cost": settings.cost}
    asked |= {f"sweep.{name}.{field}": value for name, what in tuner.search_space.items()
              for field, value in (what if isinstance(what, dict) else {"values": list(what)}).items()}
    asked |= {f"{section}.{key}": value for section in ("env", "vec", "policy", "rnn", "train")
              for key, value in config[section].items() if f"{section}.{key}" not in tuner.space.names}
    asked |= {key: config[key] for key in ("load_model_path", "baseline") if config[key]}
    asked = json.loads(json.dumps(asked, default=str))
    whole = {"asked": asked, "options": list(options), "space": tuner.search_space, "created": time.time()}
    if not path.exists():
        write_json(path, whole)
        return
    held = read_whole(path, TOLD)["asked"]
    different = [f"{key}: {held.get(key, 'nothing')} there, {asked.get(key, 'nothing')} now"
                 for key in {**held, **asked} if held.get(key, "nothing") != asked.get(key, "nothing")]
    if different:
        more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
        what = "; ".join(different[:5]) + more
        raise ConfigError(
            f"{ledger.folder} holds another sweep ({what}). Give this one a name of its own, --sweep.name "
            "NAME (name=\"NAME\" in Python), or move the folder away.")


def stopping_rule(tuner, settings):
    """The rule that `hopeless` takes, from the trials so far: [(cost, score)] of all curves' points, and the floor."""
    done = [o for o in tuner.observations if not o.failed]
    if not settings.early_stop or len(done) < 5:
        return None
    points = [(cost, score) for o in done for _, score, cost in o.curve]
    front = front_of([score for _, score in points], [cost for cost, _ in points])
    return {"front": [points[i] for i in front], "floor": float(np.quantile([o.score for o in done], 0.1)),
            "share": settings.early_stop, "after": 0.25, "sign": tuner.sign}


def refuse_if_all_fail(ledger, count=5):
    """RuntimeError if the first `count` trials all failed: then their settings are not the cause."""
    records = list(ledger.results().values())
    if len(records) >= count and all(record["status"] == "failed" for record in records):
        errors = "\n".join(f"  trial {record['trial']}: {record['error']}" for record in records[:count])
        raise RuntimeError(f"the first {len(records)} trials all failed:\n{errors}\n"
                           f"Their output is in {ledger.folder}/runs/*/output.txt; move the folder away to begin anew.")


def describe(record, tuner, settings):
    """A finished trial in a line."""
    head = f"trial {record['trial']:4d} of {settings.num_trials}"
    if record["status"] == "failed":
        return f"{head}  failed: {record['error']}"
    front = any(cost == record["cost"] and score == record["score"] for _, score, cost in tuner.front())
    expected = record["predicted"].get("score")
    note = "  on the front" if front else "  stopped early" if record["status"] == "stopped" else ""
    known = f" (expected {expected:.4g})" if expected is not None else ""
    return f"{head}  score {record['score']:.4g}{known}  cost {record['cost']:.4g}{note}   {brief(record['settings'])}"


def brief(settings):
    """Settings in one line, without the names of their sections."""
    return " ".join(f"{name.partition('.')[2]}={short(value)}" for name, value in settings.items())


def make_logger(kind, folder, config):
    """A function that takes each finished trial's record. Raises ImportError if the package is
    missing. Later errors only lose log entries: the sweep goes on, and the ledger has all."""
    import loggers

    if kind == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ImportError("--sweep.logger wandb needs the package wandb: pip install wandb")

    def write(record):
        """A trial's settings, and its curve over steps."""
        name, failed = f"{record['trial']:05d}", record["status"] == "failed"
        if failed and kind == "tensorboard":  # its page of settings needs a score, which a failed trial lacks
            return
        if kind == "wandb":
            logger = loggers.WandbLogger(config["project"], config["entity"], name, record["settings"],
                                         group=folder.name, tag=record["status"], folder=str(folder))
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
            loggers.warn(f"trial {record['trial']} was not logged to {kind} ({error})")

    return log if kind != "none" else lambda record: None


# --------------------------------------------------------------------------------------------------
# Command line

USAGE = """usage: python protein.py ENV [--sweep.key value ...] [--section.key value ...]
       python protein.py report PATH [--output FILE] [--metric NAME] [--tag TAG]

  ENV         search the settings of [sweep.*] in config/default.ini and config/ENV.ini; the same command goes on
              where it was stopped
  report      the page of a sweep's folder, or of a folder of runs

  --sweep.num-trials 50 --sweep.workers 2       how it is searched; python protein.py ENV --help lists all
  --sweep.train.learning-rate.max 0.1           where to search: distribution, min, max, mean, scale or values
  --sweep.train.gamma.distribution none         takes a setting out
  --train.total-timesteps 10000000              fixes a setting for all trials, and takes it out
"""


def split_options(argv):
    """Command line -> (--sweep.key options, {setting: {field: text}}, all
    other options as they are)."""
    sweep, space, others, i = [], {}, [], 0
    while i < len(argv):
        name, equals, value = argv[i].partition("=")
        taken = [argv[i]]
        if not equals and i + 1 < len(argv) and not argv[i + 1].startswith("--"):
            value = argv[i + 1]
            taken.append(value)
        i += len(taken)
        parts = name.removeprefix("--").replace("-", "_").split(".")
        if parts[0] == "sweep" and len(parts) == 4:
            space.setdefault(f"{parts[1]}.{parts[2]}", {})[parts[3]] = value
        elif parts[0] == "sweep" and len(parts) != 2:
            raise ConfigError(
                f"{name}: is --sweep.SECTION.KEY.FIELD VALUE with a field of {', '.join(protein.FIELDS)}, "
                "or --sweep.KEY VALUE; --help lists the keys.")
        else:
            (sweep if parts[0] == "sweep" or name in ("-h", "--help") else others).extend(taken)
    return sweep, space, others


def main(argv=None, program="protein.py"):
    """The command line; program: the name in front of errors."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    try:
        if argv[0] == "report":
            import tyro

            print(tyro.cli(write_report, args=argv[1:], prog="protein.py report",
                           config=(tyro.conf.PositionalRequiredArgs,)))
        else:
            sweep_command(argv[0], argv[1:])
    except (ImportError, ValueError, RuntimeError, OSError, OverflowError, MemoryError) as error:  # Overflow: a port
        sys.exit(f"{program}: {str(error) or type(error).__name__}")


def sweep_command(env_name, argv):
    import tyro

    import configuration

    sweep_options, space_options, options = split_options(argv)
    args = configuration.load_config(env_name, configuration.no_resume(options))
    schema, shipped = {"sweep": Sweep}, {}
    for key, text in args["sweep"].get("sweep", {}).items():
        _, key, value = configuration.convert(configuration.Entry("sweep", key, text, f"config [sweep] {key}"), schema)
        shipped[key] = value
    for i, word in enumerate(sweep_options):
        name, equals, value = word.partition("=")
        if name.startswith("--sweep."):
            key = configuration.translate("sweep", name[8:].replace("-", "_"), schema, name)[1]
            sweep_options[i] = f"--sweep.{key.replace('_', '-')}{equals}{value}"
    arguments = dataclasses.make_dataclass("Arguments", [("sweep", Sweep, dataclasses.field(
        default_factory=lambda: Sweep(**shipped)))])
    arguments.__doc__ = f"Search hyper-parameters of {env_name}.\n\n{USAGE[USAGE.index('  --sweep.num'):]}"
    settings = tyro.cli(arguments, args=sweep_options, prog=f"protein.py {env_name}",
                        config=(tyro.conf.FlagConversionOff,)).sweep
    settings.metric = metric_of(settings.metric)

    space = {name.partition(".")[2]: dict(what) for name, what in args["sweep"].items() if name != "sweep"}
    for name, fields in space_options.items():
        space.setdefault(name, {}).update(fields)
    fixed = fixed_settings(configuration.resolve(env_name, options)[2])
    for name in [name for name in space if name in fixed]:
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
