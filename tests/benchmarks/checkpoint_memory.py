"""Peak memory of a process that uploads a checkpoint of 1 GB to gs:// and downloads it.

`python -m tests.benchmarks.checkpoint_memory [--megabytes 1024]`

The server is another process. The figures are the rise of resident memory above its value when staging, or restoring,
began; the state itself is already in memory then.
"""

import argparse
import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("NO_GCE_CHECK", "true")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tests.fakes.gcs.server import fake_gcs_process

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(key: str) -> int:
    """Resident memory in bytes: VmRSS now, VmHWM the peak since `forget`."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def forget() -> int:
    gc.collect()
    _CLEAR.write_text("5")
    return resident("VmRSS")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    megabytes = parser.parse_args().megabytes
    import keras

    from tasks.foundation.accelerator.strategy import acquire
    from tasks.foundation.checkpoint.restore import restore_checkpoint
    from tasks.foundation.checkpoint.save import stage_checkpoint
    from tasks.foundation.contracts.log_entry import Origin
    from tasks.foundation.contracts.placement import AcceleratorSpec
    from tasks.foundation.runlog.log import RunLog
    from tasks.foundation.state.train_state import TrainState
    from tasks.foundation.storage.opening import open_storage

    accelerator = acquire(AcceleratorSpec(kind="cpu"), None)
    rows = megabytes << 8  # of 1,024 float32
    model = keras.Sequential([keras.Input((1,), dtype="int32"), keras.layers.Embedding(rows, 1024)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    state = TrainState(model, accelerator)
    with fake_gcs_process(("bucket",), "--no-md5") as server:
        os.environ["STORAGE_EMULATOR_HOST"] = server.url
        home = open_storage("gs://bucket/run", relative_to=Path.cwd())
        RunLog(home).append(lambda _: Origin(identity={}, environment=accelerator.environment), attempt="a")
        before = forget()
        ref = stage_checkpoint(state, home, base=0, attempt="a")
        up = resident("VmHWM") - before
        before = forget()
        restore_checkpoint(state, home, ref)
        down = resident("VmHWM") - before
    sys.stdout.write(f"checkpoint {ref.size >> 20} MiB: staging rose {up >> 20} MiB, restoring {down >> 20} MiB\n")


if __name__ == "__main__":
    main()
