"""Measurements of the project itself; each file is a script with its own --help."""

import os
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def checkout(commit):
    """Return (short hash, folder) of a commit's files.

    The folder is in the system's temporary folder and stays there, so that its compiled kernels
    serve the next call.
    """
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--verify", f"{commit}^{{commit}}"],
                          capture_output=True, text=True, check=True).stdout.strip()
    folder = Path(tempfile.gettempdir()) / f"pufferl_{os.getuid()}_{name[:12]}"
    if not folder.exists():
        part = tempfile.mkdtemp(dir=folder.parent)
        files = subprocess.run([*git, "archive", name], capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", part], input=files, check=True)
        os.replace(part, folder)
    return name[:7], folder
