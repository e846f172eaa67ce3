"""Lists of CONTRIBUTING name every place that a change touches.

A patch is applied to a copy of the project, to files of its list only, and has to work there.
"""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / ".github/CONTRIBUTING.md").read_text()


def read_places():
    """Return {title: its places} of the table and the lists of "In a fork"."""
    section = PAGE.partition("## In a fork")[2].partition("\n## ")[0]
    table, *lists = section.split("\n### ")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", table, re.M)
    return dict(rows) | {text.partition("\n")[0]: text for text in lists}


PLACES = read_places()


def files_of(*titles):
    """Return the files that rows or lists name, by path or as the module of a name."""
    text = " ".join(PLACES[title] for title in titles)
    paths = set(re.findall(r"[\w/]+\.(?:py|cu|ini|md|h)\b", text))
    modules = re.findall(r"`(\w+)\.\w", text)
    folders = "", "tools/", "tools/sweep/"
    paths |= {f"{folder}{module}.py" for module in modules for folder in folders}
    return {path for path in paths if (ROOT / path).is_file()}


class Copy:
    """A copy of the project, of which only some files may be edited."""

    def __init__(self, folder, titles):
        self.folder = folder
        self.files = files_of(*titles)
        shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(
            ".*", "experiments", "log", "gpu", "*.npy", "user_files"))

    def edit(self, path, change):
        assert path in self.files, f"CONTRIBUTING's list leaves out {path}"
        file = self.folder / path
        before = file.read_text()
        after = change(before)
        assert after != before
        file.unlink()
        file.write_text(after)

    def replace(self, path, pattern, new, count=1):
        def change(text):
            text, number = re.subn(pattern, new, text, flags=re.M)
            assert number == count, f"{path}: {pattern} is there {number} times"
            return text

        self.edit(path, change)

    def add_arguments(self, path, name, *arguments):
        """Add an argument to each call, or definition, of a function, in their order."""
        rest = iter(arguments)
        self.replace(path, rf"({name}\([^()]*)\)", lambda match: f"{match[1]}, {next(rest)})",
                     count=len(arguments))

    def run(self, *words, status=0):
        """Run Python in the copy; returns what it prints."""
        done = subprocess.run([sys.executable, *map(str, words)], cwd=self.folder, text=True,
                              capture_output=True, timeout=900)
        assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    def test(self, path, names):
        return self.run("-m", "pytest", path, "-q", "-n", "0", "-x", "-p", "no:cacheprovider",
                        "-m", "not slow", "-k", names)

    def train(self, *options, env="squared", status=0):
        """Train briefly; returns what is printed and the last entry of metrics.jsonl."""
        steps = [] if "--train.total-timesteps" in options else ["--train.total-timesteps", "4096"]
        text = self.run("pufferl.py", "train", env, "--data-dir", "runs", "--logger", "none",
                        *steps, *options, status=status)
        logs = sorted(self.folder.glob("runs/*/metrics.jsonl"),
                      key=lambda path: path.stat().st_mtime)
        return text, json.loads(logs[-1].read_text().splitlines()[-1]) if logs else {}


@pytest.fixture
def copy(tmp_path):
    """Return a function that makes the Copy for some rows."""
    folder = tmp_path / "project"
    yield lambda *titles: Copy(folder, titles)
    shutil.rmtree(folder, ignore_errors=True)


def test_lists_name_what_is_there():
    text = " ".join(PLACES.values())
    for module, name in re.findall(r"`(\w+)\.(\w+)", text):
        paths = [ROOT / folder / f"{module}.py" for folder in ("", "fast", "tools", "tools/sweep")]
        sources = [path.read_text() for path in paths if path.exists()]
        sources += [source for source in map(Path.read_text, ROOT.glob("*.py"))
                    if f"class {module}" in source]
        assert name in ("py", "cu", "h", "ini") or any(
            re.search(rf"\b{name}\b", source) for source in sources), f"{module}.{name}"
    for path in re.findall(r"`([\w/]+\.(?:py|cu|ini|md|h))`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.slow
def test_a_penalty_on_the_logits(copy):
    """Give it a default of 0.01, which tests that compare implementations then see."""
    project = copy("A term of the loss", "... and to log it")
    source = "kernels.py"
    project.replace(source, r'(?<="vf_error_bound", "ent_coef")\)', ', "logit_coef")')
    project.replace(source, r"\) = range\(len\(LOSS_SETTINGS\)\)",
                    ", LOGIT_COEF) = range(len(LOSS_SETTINGS))")
    project.replace(source, r'"valid"\)$', '"logit_penalty", "valid")')
    project.replace(source, r"VALID\) = range\(SUMS\)", "LOGIT_PENALTY, VALID) = range(SUMS)")
    project.replace(source, r"^    sums\[VALID\] \+= ONE$",
                    "    sums[LOGIT_PENALTY] += penalty\n    sums[VALID] += ONE")
    project.add_arguments(source, "statistics_cell", "penalty", "penalty", "ZERO")
    project.replace(source, r'(?<="importance")\)$', ', "logit_penalty")')
    project.replace(source, r"(?<=^    return \()(?=ent_coef \* entropy_grad_cell)",
                    "f32(2) * settings[LOGIT_COEF] * settings[ROW_SCALE] * logit + ")
    project.replace(source, r"^( +)grad\[t, m, j\] = log_p\[j, t\] if .*$",
                    r"\1penalty += outputs[t, m, j] * outputs[t, m, j]\n\g<0>")
    project.replace(source, r"^( +)is_valid = valid\[t, n\] != 0\n +for j in range\(choices\):\n"
                            r" +penalty", r"\1penalty = ZERO\n\g<0>")

    source = "kernels.cu"
    project.replace(source, r"( +)drow\[j\] =\n +logit_grad_cell", r"\1penalty += row[j] * row[j];\n\g<0>")
    project.replace(source, r"(?<=float logprob = 0\.0f, entropy = 0\.0f, )(advantage = adv.*;)$",
                    r"penalty = 0.0f, \1", count=1)
    project.add_arguments(source, "statistics_cell", "penalty", "0.0f")

    for source in ("configuration.py", "ppo.py"):
        project.replace(source, r"^( +)ent_coef: ", r"\1logit_coef: float = 0.01\n\1ent_coef: ")
    project.replace("configuration.py", r"train\.ent_coef(?= )", "train.ent_coef train.logit_coef")
    project.replace("ppo.py", r"- args\.ent_coef \* entropy",
                    "- args.ent_coef * entropy + (args.logit_coef * y.square().sum(-1)"
                    "[batch.valid != 0].mean() if policy.heads else 0.0)")
    source = "tests/reference.py"
    project.replace(source, r'vf_error_bound=float\("inf"\),$', 'vf_error_bound=float("inf"), logit_coef=0.0,')
    project.replace(source, r"^    loss = policy_loss \+ (.*)$",
                    r"    penalty = (y**2).sum(-1).mean() if log_std is None else 0 * y.sum()"
                    r"\n    loss = logit_coef * penalty + policy_loss + \1")
    project.replace(source, r'(?<="policy_loss": policy_loss, )', '"logit_penalty": penalty, ')
    project.replace("docs/metrics.md", r"^(\| `losses/entropy`)",
                    r"| `losses/logit_penalty` | squared norm of the logits |\n\1")

    project.test("tests/test_kernels.py", "loss or statistics")
    project.test("tests/test_cuda.py", "loss")
    project.test("tests/test_cuda_cpp.py", "cell")
    project.test("tests/test_ppo.py", "says_what")
    _, free = project.train("--train.logit-coef", 0)
    _, held = project.train("--train.logit-coef", 10)
    assert held["losses/logit_penalty"] < 0.5 * free["losses/logit_penalty"]


@pytest.mark.slow
def test_metrics_of_an_environment_in_c_and_of_the_trainer(copy):
    project = copy("A metric of an environment in C", "A metric of the trainer")
    project.edit("ocean/squared/squared.h", lambda text: text.replace(
        "#define BY_TURNS\n", "#define BY_TURNS\n#define OWN_LOG(X) X(edges)\n").replace(
        "    LOG_EPISODE(", "    env->log.edges += !is_inside(env);\n    LOG_EPISODE("))
    project.replace("pufferl.py", r'^( +)metrics \|= \{"performance/sps"',
                    r'\1metrics["performance/agents"] = self.num_agents'
                    r'\n\1metrics |= {"performance/sps"')
    project.replace("docs/metrics.md", r"^(\| `performance/sps`)",
                    r"| `performance/agents` | agents |\n\1")
    _, entry = project.train("--vec.total-agents", 64)
    assert 0 < entry["environment/edges"] < 1 and entry["performance/agents"] == 64


def test_a_distribution_of_sweeps(copy):
    project = copy("A distribution of sweeps")
    project.replace("protein.py", r'^    "choice": Distribution', '    "square_root": Distribution(math.sqrt, '
                    'lambda place: place**2, lambda value: value >= 0, '
                    '"values from 0 on"),\n    "choice": Distribution')
    project.replace("docs/sweeps.md", r"^(\| `log_normal`)",
                    r"| `square_root` | its root | entropy |\n\1")
    project.run("-c", textwrap.dedent("""
        from protein import Protein
        from tools.sweep.command import searched_settings
        entry = {"distribution": "square_root", "min": 0, "max": 0.04}
        space = searched_settings("squared", {"train.ent_coef": entry})
        tuner = Protein(search_space=space)
        (setting,) = tuner.space.settings
        assert abs(setting.from_unit(0.5) - 0.01) < 1e-9
        for _ in range(20):
            settings = tuner.suggest()
            assert 0 <= settings["train.ent_coef"] <= 0.04
            tuner.observe(settings, -settings["train.ent_coef"], 1.0)
    """))


SGD = '''

class Sgd(TorchOptimizer):
    "Step against the gradient."

    def __init__(self, config, policy, arena):
        super().__init__(config, policy, arena)
        self.optimizer = torch.optim.SGD(policy.parameters(), lr=arena["rate"], fused=True)
        self.optimizer.found_inf = arena["found_inf"]
'''


@pytest.mark.slow
def test_an_optimizer(copy):
    project = copy("An optimizer's name")
    project.edit("optim.py", lambda text: text + SGD)
    project.replace("pufferl.py", r"^( +)if self\.optimizer is None:$",
                    r'\1if c["optimizer"] == "sgd":'
                    r'\n\1    self.optimizer = optim.Sgd(c, self.policy, arena)'
                    r"\n\1if self.optimizer is None:")
    project.replace("configuration.py", r'optimizer: Literal\["muon", "adam"\]',
                    'optimizer: Literal["muon", "adam", "sgd"]')
    project.replace("configuration.py", r'not in \("muon", "adam"\)',
                    'not in ("muon", "adam", "sgd")')
    project.replace("configuration.py", r'\{"adam": \(\),', '{"adam": (), "sgd": '
                    '("train.beta2", "train.eps", "train.momentum"),')
    project.replace("auto.py", r'c\["optimizer"\] == "muon"',
                    'c["optimizer"] in ("muon", "sgd")')
    options = "--train.optimizer", "sgd", "--train.learning-rate", "auto"
    _, entry = project.train(*options, "--train.total-timesteps", 65536)
    assert entry["losses/grad_norm"] > 0
    text, entry = project.train(*options, "--train.total-timesteps", 131072, "--resume", "latest")
    assert "no state of the optimizer" not in text and entry["step"] > 65536
    text, _ = project.train(*options, "--train.beta2", 0.9, status=1)
    assert "beta2" in text
