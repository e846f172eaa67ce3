"""Command-line tools: verbs of pufferl.py and protein.py."""
