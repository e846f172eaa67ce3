"""The engines of a GPU without one, for bench/same_bits.py: what stands for it in the tests of the
project in the folder TREE.

    PYTHONPATH=TREE:TREE/tests python recorder.py CASE    # of test_devices.CASES
"""

import sys

import pytest
import test_devices

test_devices.install(pytest.MonkeyPatch(), test_devices.on_a_cpu)
trainer = test_devices.make_trainer(**test_devices.CASES[sys.argv[1]], cudagraphs=2)
for _ in range(4):
    trainer.evaluate()
    trainer.train()
trainer.save_checkpoint("trainer_state.pt")
trainer.release()
