"""The kinds of interruption of a chaos run.

Each function interrupts a running training process. It returns whether the interruption hit: the kernel reports that
the process was alive and ended as this kind of interruption ends it.
"""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.chaos_tally import HomeChecker
from tests.support.disks import SmallDisk
from tests.support.homes import commit_count, damaged, head_of, tip_of
from tests.support.run_stoppable import RESUMABLE
from tests.support.training_child import Child

_START_UP_SECONDS = 12.0
_FILE_BYTES = 16 << 10


@dataclass
class Scene:
    """A run during training, and a way to start a process on it.

    Attributes:
        in_flight: whether the last interruption hit while a save was in flight. Of a signal that the process handles,
            it tells of the moment before it was sent.
    """

    start: Callable[..., Child]
    home: Path
    disk: SmallDisk | None
    chance: random.Random
    checker: HomeChecker
    in_flight: bool = False

    def kill(self, child: Child) -> bool:
        """Send SIGKILL; returns whether it ended the process."""
        hit = child.kill()
        self.in_flight = child.save_in_flight
        return hit

    def stop(self, child: Child) -> bool:
        """Send SIGSTOP, and wait until the process is stopped; False if it has ended."""
        stopped = child.stop()
        self.in_flight = child.save_in_flight
        return stopped

    def working(self, *, commits: int = 1) -> Child | None:
        """Start a process, and wait for a random moment after at least `commits` commits; None if it finishes first.

        Half of the moments are within a save in flight, which takes a small share of the time.
        """
        before = commit_count(self.home)
        child = self.start()
        alive = child.until_commits(before + self.chance.randrange(commits, commits + 3))
        time.sleep(self.chance.uniform(0, 0.5))
        if alive and self.chance.random() < 0.5:
            alive = child.until_save_in_flight()
        return child if alive and child.alive else None


def killed_early(scene: Scene) -> bool:
    """SIGKILL between the start of the process and its first steps."""
    child = scene.start()
    time.sleep(scene.chance.uniform(0, _START_UP_SECONDS))
    return scene.kill(child)


def killed(scene: Scene, *, commits: int = 1) -> bool:
    """SIGKILL during work."""
    child = scene.working(commits=commits)
    return child is not None and scene.kill(child)


def terminated(scene: Scene) -> bool:
    """SIGTERM: the process commits and exits with work left to do."""
    child = scene.working()
    if child is None:
        return False
    scene.in_flight = child.save_in_flight
    child.process.send_signal(signal.SIGTERM)
    done = child.finish()
    if done.code == 0:  # it finished before the signal arrived
        return False
    if done.code != RESUMABLE:
        scene.checker.fault("other", f"SIGTERM gave exit code {done.code}: {done.stderr[-500:]}")
    reached, tip = done.result.get("reached"), tip_of(scene.home).step
    if reached is not None and reached != tip:
        scene.checker.fault("lost", f"SIGTERM at step {reached} left the tip at step {tip}")
    return True


def overtaken(scene: Scene) -> bool:
    """SIGSTOP while another process commits: the first process is refused as a stale writer."""
    child = scene.working()
    if child is None or not scene.stop(child):
        return False
    before = commit_count(scene.home)
    rival = scene.start("--take-over", "--max-segments", "1").finish()
    if rival.code not in {0, RESUMABLE}:
        scene.checker.fault("other", f"the rival ended with {rival.code}: {rival.stderr[-500:]}")
    rival_committed = commit_count(scene.home) > before
    mark = commit_count(scene.home)
    child.resume()
    if child.until_commits(mark + 1):
        # It was stopped between two segments, so it may continue from the rival's commit.
        child.kill()
        return rival_committed
    done = child.finish()
    if done.code != 0 and not (done.code == 1 and "error: StaleWriter" in done.stderr):
        scene.checker.fault("other", f"the stopped process ended with {done.code}: {done.stderr[-500:]}")
    return rival_committed


def torn(scene: Scene) -> bool:
    """SIGKILL, then a file of the newest checkpoint is cut in half."""
    return killed(scene, commits=2) and _damage(scene, lambda data: data[: len(data) // 2])


def flipped(scene: Scene) -> bool:
    """SIGKILL, then one bit of the newest checkpoint is flipped."""

    def flip(data: bytes) -> bytes:
        index = scene.chance.randrange(len(data))
        return data[:index] + bytes([data[index] ^ 1 << scene.chance.randrange(8)]) + data[index + 1 :]

    return killed(scene, commits=2) and _damage(scene, flip)


def littered(scene: Scene) -> bool:
    """SIGKILL, then files that a power cut can leave: an unfinished entry, a checkpoint without a manifest."""
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
    """The disk fills up. Where no small disk can be mounted, a file size limit stops the writes."""
    child = scene.working()
    if child is None or not scene.stop(child):
        return False
    if scene.disk is None:
        child.limit_files(_FILE_BYTES)
    else:
        scene.disk.fill()
    child.resume()
    done = child.finish()
    if scene.disk is not None:
        scene.disk.free()
    if done.code == 0:
        return False
    if done.code != 1 or "error: StorageError" not in done.stderr or "Traceback" in done.stderr:
        scene.checker.fault("other", f"a full disk gave exit code {done.code}: {done.stderr[-1000:]}")
    return True


def _damage(scene: Scene, change: Callable[[bytes], bytes]) -> bool:
    """Damage a file of the tip, if the run can fall back to another sound checkpoint."""
    head = head_of(scene.home)
    whole = [ref for ref in (head.retained if head else ()) if ref.path not in damaged(scene.home)]
    if head is None or head.tip is None or len(whole) < 2 or head.tip not in whole:
        return False
    file = scene.chance.choice(sorted((scene.home / head.tip.path).iterdir()))
    scene.checker.damaged_by_test.add(head.tip.path)
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
