"""One thread for the maths: two on a busy machine wait for each other, and the tests take ten times as long."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; the processes that tests start inherit it

# Read when Triton is imported: without a GPU its kernels are tested in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
