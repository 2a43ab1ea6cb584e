"""One thread for the maths: two on a busy machine wait for each other, and the tests take ten times as long."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; the processes that tests start inherit it
