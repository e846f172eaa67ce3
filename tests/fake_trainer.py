"""Takes the place of `pufferl.py train` in tests of the sweep: it writes the same files and obeys the
same signals, but does not train.

The score rises along the schedule towards 1 - log10(learning_rate / 0.01)² / 4, the clock runs as
if 1,000 steps took a second. FAKE_SECONDS is how long it really takes. A learning rate above 0.1
fails with a FloatingPointError; one below 0.0002 runs out of memory, one below 0.00002 is killed.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

options = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
total, rate = int(options["--train.total-timesteps"]), float(options["--train.learning-rate"])
seconds = float(os.environ.get("FAKE_SECONDS", 0))
first = 0
folder = Path(options["--data-dir"]) / f"{sys.argv[2]}_{time.time_ns()}"
if "--resume" in options:
    folder = Path(options["--resume"])
    first = int((folder / "trainer_state.pt").read_text())
folder.mkdir(parents=True, exist_ok=True)
(folder / "config.json").write_text(json.dumps({"env_name": sys.argv[2], "options": options}))
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
if rate > 0.1:
    raise FloatingPointError("epoch 3: the gradient norm overflows; lower train.learning_rate.")
if rate < 0.00002:
    os.kill(os.getpid(), signal.SIGKILL)
if rate < 0.0002:
    raise MemoryError("the arena of 9 TiB")
for i in range(first, 20):
    time.sleep(seconds / 20)
    progress = (i + 1) / 20
    score = (1 - math.log10(rate / 0.01) ** 2 / 4) * progress**0.5 * (1 - math.exp(-total / 3000))
    with open(folder / "metrics.jsonl", "a") as file:
        entry = {"step": total * progress, "environment/score": score,
                 "performance/uptime": total * progress / 1000}
        file.write(json.dumps(entry) + "\n")
    if stopped:
        (folder / "trainer_state.pt").write_text(str(i + 1))
        sys.exit()
(folder / "trainer_state.pt").write_text("20")
