"""The kinds of interruption that a training process meets in a chaos run.

Each is given a process that runs, does its harm, and returns whether it really hit: whether the kernel says that the
process was alive, and that it ended as this kind of harm ends it.
"""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.chaos_tally import Witness
from tests.support.disks import SmallDisk
from tests.support.homes import commits_of, damaged, head_of, tip_of
from tests.support.run_stoppable import RESUMABLE
from tests.support.training_child import Child

_START_UP_SECONDS = 12.0
_FILE_BYTES = 16 << 10


@dataclass
class Scene:
    """One run on its way, and how to start a process on it."""

    start: Callable[..., Child]
    home: Path
    disk: SmallDisk | None
    chance: random.Random
    witness: Witness

    def working(self, *, commits: int = 1) -> Child | None:
        """A process at a random moment of its work, after so many commits at least; None if it was done first."""
        before = commits_of(self.home)
        child = self.start()
        alive = child.until_commits(before + self.chance.randrange(commits, commits + 3))
        time.sleep(self.chance.uniform(0, 0.5))
        return child if alive and child.alive else None


def killed_early(scene: Scene) -> bool:
    """SIGKILL between the start of the process and its first steps."""
    child = scene.start()
    time.sleep(scene.chance.uniform(0, _START_UP_SECONDS))
    return child.kill()


def killed(scene: Scene, *, commits: int = 1) -> bool:
    """SIGKILL during work."""
    child = scene.working(commits=commits)
    return child is not None and child.kill()


def terminated(scene: Scene) -> bool:
    """SIGTERM: it commits what it has, and says that work is left."""
    child = scene.working()
    if child is None:
        return False
    child.process.send_signal(signal.SIGTERM)
    done = child.finish()
    if done.code == 0:  # it was done before it heard
        return False
    if done.code != RESUMABLE:
        scene.witness.fault("other", f"SIGTERM led to exit code {done.code}: {done.stderr[-500:]}")
    reached, tip = done.result.get("reached"), tip_of(scene.home).step
    if reached is not None and reached != tip:
        scene.witness.fault("lost", f"SIGTERM at step {reached} left the tip at step {tip}")
    return True


def overtaken(scene: Scene) -> bool:
    """SIGSTOP, and another process commits meanwhile: the first one's work is void, and it is told."""
    child = scene.working()
    if child is None or not child.stop():
        return False
    before = commits_of(scene.home)
    rival = scene.start("--take-over", "--max-segments", "1").finish()
    if rival.code not in {0, RESUMABLE}:
        scene.witness.fault("other", f"the rival ended with {rival.code}: {rival.stderr[-500:]}")
    passed = commits_of(scene.home) > before
    mark = commits_of(scene.home)
    child.go_on()
    if child.until_commits(mark + 1):
        # It stood between two segments, so it goes on from the rival's commit, and is right to.
        child.kill()
        return passed
    done = child.finish()
    if done.code != 0 and not (done.code == 1 and "error: StaleWriter" in done.stderr):
        scene.witness.fault("other", f"who was overtaken ended with {done.code}: {done.stderr[-500:]}")
    return passed


def torn(scene: Scene) -> bool:
    """SIGKILL, and the newest checkpoint's data end in the middle."""
    return killed(scene, commits=2) and _harm(scene, lambda data: data[: len(data) // 2])


def flipped(scene: Scene) -> bool:
    """SIGKILL, and one bit of the newest checkpoint is another."""

    def flip(data: bytes) -> bytes:
        place = scene.chance.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << scene.chance.randrange(8)]) + data[place + 1 :]

    return killed(scene, commits=2) and _harm(scene, flip)


def littered(scene: Scene) -> bool:
    """SIGKILL, and what a power cut can leave: an unfinished entry, a checkpoint without its manifest."""
    if not killed(scene):
        return False
    head = head_of(scene.home)
    if head is None:
        return True
    newest = scene.home / "log" / f"{head.number:08d}.json"
    (scene.home / "log" / f".unfinished-{scene.chance.randrange(1 << 30)}").write_bytes(newest.read_bytes()[:100])
    (scene.home / "log" / "HINT").write_bytes(b"")
    step = 0 if head.tip is None else head.tip.step + 1
    folder = scene.home / "checkpoints" / f"{step:08d}-{head.base:08d}-{scene.chance.randrange(1 << 60):032x}"
    folder.mkdir(parents=True)
    (folder / "ckpt.index").write_bytes(b"torn")
    (folder / ".unfinished-abc").write_bytes(b"torn")
    return True


def full(scene: Scene) -> bool:
    """The disk fills up under the process; where none can be mounted, its files may not grow any more."""
    child = scene.working()
    if child is None or not child.stop():
        return False
    if scene.disk is None:
        child.limit_files(_FILE_BYTES)
    else:
        scene.disk.fill()
    child.go_on()
    done = child.finish()
    if scene.disk is not None:
        scene.disk.free()
    if done.code == 0:
        return False
    if done.code != 1 or "error: StorageError" not in done.stderr or "Traceback" in done.stderr:
        scene.witness.fault("other", f"a full disk led to exit code {done.code}: {done.stderr[-1000:]}")
    return True


def _harm(scene: Scene, change: Callable[[bytes], bytes]) -> bool:
    """Change a file of the tip, unless no other whole checkpoint is left to go back to."""
    head = head_of(scene.home)
    whole = [ref for ref in (head.retained if head else ()) if ref.path not in damaged(scene.home)]
    if head is None or head.tip is None or len(whole) < 2 or head.tip not in whole:
        return False
    file = scene.chance.choice(sorted((scene.home / head.tip.path).iterdir()))
    scene.witness.harmed.add(head.tip.path)
    file.write_bytes(change(file.read_bytes()))
    return True


KINDS: dict[str, Callable[[Scene], Any]] = {
    "SIGKILL at start": killed_early,
    "SIGKILL at work": killed,
    "SIGTERM": terminated,
    "SIGSTOP + rival": overtaken,
    "torn checkpoint": torn,
    "flipped bit": flipped,
    "torn uncommitted": littered,
    "disk full": full,
}
