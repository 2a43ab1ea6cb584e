"""What every test run shares: one thread for the maths, Triton's interpreter and no `gpu` tests where there is no GPU.

Two threads on a busy machine wait for each other, and the tests take ten times as long.
"""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported; the processes that tests start inherit it

# Read when Triton is imported: without a GPU its kernels are tested in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch  # not for runs of the gateway's tests alone

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
