"""Upload a run to the Hugging Face Hub, and download a policy.

    pip install huggingface_hub && hf auth login
    python -m examples.hub experiments/breakout_20260101-120000-a1b2c3 NAME/MODEL
    python -m examples.hub NAME/MODEL      # prints the path for --load-model-path
"""

import json
import sys
from pathlib import Path

from huggingface_hub import HfApi, ModelCard, snapshot_download


def publish(folder, repository):
    """Upload settings and last checkpoint of a run's folder; returns the address."""
    folder = Path(folder)
    newest = max(folder.glob("model_*.pt"))
    env_name = json.loads((folder / "config.json").read_text())["env_name"]
    card = ModelCard(f"""---
library_name: pufferl
tags: [reinforcement-learning]
---
Play it: `python pufferl.py eval {env_name} --load-model-path {newest.name} --eval.web`
""")
    card.save(folder / "README.md")
    api = HfApi()
    api.create_repo(repository, exist_ok=True)
    return api.upload_folder(repo_id=repository, folder_path=folder,
                             allow_patterns=["README.md", "config.json", newest.name])


def download(repository):
    """Download what `publish` uploaded; returns the path of the checkpoint."""
    return max(Path(snapshot_download(repository)).glob("model_*.pt"))


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    print(publish(*sys.argv[1:]) if len(sys.argv) == 3 else download(*sys.argv[1:]))
