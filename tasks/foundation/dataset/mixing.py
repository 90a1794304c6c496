"""The order of a mixture: which source each position of the mixed stream is from, as a pure function.

The mixed stream consists of windows. In a window each source has the examples that its weight says; a seeded
permutation mixes them. A source's examples are taken in the order of its own stream (order.py), so the position in it
follows from how many of its examples came before. All of it is arithmetic: a far position costs one window.

`exhausted: repeat`: the stream has one phase, without end; a source that has no more examples begins its next epoch.
`exhausted: drop`: an epoch has each example once, and one phase for each set of sources that still have examples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from baton.tasks.foundation.contracts.data_spec import Exhausted, Mixture
from baton.tasks.foundation.dataset.order import hashes, seed_of

Labels = npt.NDArray[np.int64]

# A window is at least this long, so that planning it costs little per example.
_MIN_WINDOW = 1024
# Weights with a larger sum have windows that are no multiple of it.
_MAX_WINDOW = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePhase:
    """Windows of an epoch in which the same sources have examples.

    Attributes:
        number: of the phase within the epoch.
        begin: position of its first example within the epoch.
        weights: of all sources; 0 for a source that has no examples left.
        taken: examples of each source before the phase.
        left: examples of each source that are left at its begin; None: without end.
        windows: number of whole windows; another one follows, cut where sources are exhausted. None: without end.
    """

    number: int
    begin: int
    weights: tuple[int, ...]
    taken: tuple[int, ...]
    left: tuple[int, ...] | None
    windows: int | None

    @property
    def window(self) -> int:
        """Positions in a whole window."""
        return window_size(self.weights)

    def before(self, windows: int) -> tuple[int, ...]:
        """Return the examples of each source in the first `windows` windows, if none is exhausted.

        Cumulative shares are rounded down, so that the counts of all sources add up, and none is ever off by one.
        """
        total, end = sum(self.weights), windows * self.window
        bounds = [0]
        cumulative = 0
        for weight in self.weights:
            cumulative += weight
            bounds.append(end * cumulative // total)
        return tuple(after - begin for begin, after in pairwise(bounds))

    def labels(self, window: int, *, seed: int, epoch: int) -> Labels:
        """Return the source of each position in a window; the cut window has fewer positions."""
        begin, end = self.before(window), self.before(window + 1)
        counts = [after - before for before, after in zip(begin, end, strict=True)]
        words = hashes(f"mixture/{epoch}/{self.number}/{window}", seed, 0, self.window)
        labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts)[np.argsort(words, kind="stable")]
        if self.left is None:
            return labels
        kept = np.ones(len(labels), np.bool_)
        for source, (left, before) in enumerate(zip(self.left, begin, strict=True)):
            kept[np.flatnonzero(labels == source)[left - before :]] = False
        return labels[kept]


def window_size(weights: Sequence[int]) -> int:
    """Return the positions in a window: at least 1024, with at least one of each source.

    Where it can be, it is a multiple of the sum of the weights, so that all windows have the same counts.
    """
    total = sum(weights)
    if total <= _MAX_WINDOW:
        return -(-_MIN_WINDOW // total) * total
    # Counts are rounded at both ends of a window, so two examples of the rarest source are due in it.
    return max(_MIN_WINDOW, -(-2 * total // min(weight for weight in weights if weight)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """A position of the mixed stream.

    Attributes:
        epoch: of the mixture.
        phase: its phase.
        window: number within the phase.
        skip: positions of the window that come before.
        taken: position in each source's own stream.
    """

    epoch: int
    phase: MixturePhase
    window: int
    skip: int
    taken: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """The order of a mixture.

    Attributes:
        counts: training examples of each source, each at least 1.
        weights: of each source, at least 1.
        exhausted: what happens when all examples of a source were used.
        seed: the run's seed.
        epoch_examples: positions after which an epoch ends, at most all examples. With `drop`, the examples that would
            follow are left out.
    """

    counts: tuple[int, ...]
    weights: tuple[int, ...]
    exhausted: Exhausted
    seed: int
    epoch_examples: int

    @classmethod
    def of(cls, mixture: Mixture, *, seed: int, epoch_examples: int) -> "Mixing":
        """The order of a prepared mixture."""
        return cls(
            counts=tuple(each.train_examples for each in mixture.sources),
            weights=tuple(each.weight for each in mixture.sources),
            exhausted=mixture.exhausted,
            seed=seed,
            epoch_examples=epoch_examples,
        )

    @property
    def leaves_out(self) -> bool:
        """Whether examples at the end of each epoch are left out."""
        return self.exhausted == "drop" and self.epoch_examples < sum(self.counts)

    @cached_property
    def phases(self) -> tuple[MixturePhase, ...]:
        """The phases of an epoch, which are the same in each."""
        taken = (0,) * len(self.counts)
        if self.exhausted == "repeat":
            return (MixturePhase(number=0, begin=0, weights=self.weights, taken=taken, left=None, windows=None),)
        phases: list[MixturePhase] = []
        while taken != self.counts:
            left = tuple(count - before for count, before in zip(self.counts, taken, strict=True))
            weights = _reduced(weight if rest else 0 for weight, rest in zip(self.weights, left, strict=True))
            endless = MixturePhase(
                number=len(phases), begin=sum(taken), weights=weights, taken=taken, left=left, windows=None
            )
            phase = MixturePhase(
                number=endless.number,
                begin=endless.begin,
                weights=weights,
                taken=taken,
                left=left,
                windows=_whole_windows(endless, left),
            )
            phases.append(phase)
            taken = tuple(
                before + min(rest, end)
                for before, rest, end in zip(taken, left, phase.before(_all_windows(phase)), strict=True)
            )
        return tuple(phases)

    def place(self, position: int) -> StreamPosition:
        """Return where a position of the mixed stream lies, counted from 0."""
        if self.exhausted == "repeat":
            epoch, offset, phase = 0, position, self.phases[0]
        else:
            epoch, offset = divmod(position, self.epoch_examples)
            phase = next(each for each in reversed(self.phases) if each.begin <= offset)
        window, skip = divmod(offset - phase.begin, phase.window)
        labels = phase.labels(window, seed=self.seed, epoch=epoch)
        within = np.bincount(labels[:skip], minlength=len(self.counts))
        taken = tuple(
            epoch * count + earlier + before + int(here)
            for count, earlier, before, here in zip(self.counts, phase.taken, phase.before(window), within, strict=True)
        )
        return StreamPosition(epoch=epoch, phase=phase, window=window, skip=skip, taken=taken)

    def taken_before(self, position: int) -> tuple[int, ...]:
        """Return how many examples of each source's own stream come before a position of the mixed stream."""
        return self.place(position).taken

    def labels_from(self, position: int) -> Iterator[tuple[Labels, npt.NDArray[np.bool_]]]:
        """Yield, window by window, the source of each position, without end.

        Left-out examples are yielded too, because their sources' streams have them.

        Args:
            position: of the mixed stream, from 0; it lies at the begin of the first window.

        Yields:
            Indices of sources, and whether each example is kept.
        """
        at = self.place(position)
        epoch, skip = at.epoch, at.skip
        first_phase, first_window = at.phase.number, at.window
        while True:
            for phase in self.phases[first_phase:]:
                offset = phase.begin + first_window * phase.window
                window = first_window
                while phase.windows is None or window < _all_windows(phase):
                    labels = phase.labels(window, seed=self.seed, epoch=epoch)
                    kept = np.ones(len(labels), np.bool_)
                    if self.leaves_out:
                        kept[max(self.epoch_examples - offset, 0) :] = False
                    offset += len(labels)
                    yield labels[skip:], kept[skip:]
                    skip = 0
                    window += 1
                first_window = 0
            first_phase = 0
            epoch += 1


def source_seed(seed: int, source: int) -> int:
    """Return the seed of the order of a source's own stream; sources with as many shards are ordered differently."""
    high, low = seed_of(seed, -1, source)
    return (high << 31) | low


def _reduced(weights: Iterator[int]) -> tuple[int, ...]:
    given = tuple(weights)
    common = int(np.gcd.reduce(np.array(given, dtype=object)))
    return tuple(weight // common for weight in given)


def _whole_windows(phase: MixturePhase, left: Sequence[int]) -> int:
    """Return how many windows of a phase no source is exhausted in."""
    low, high = 0, sum(left) // phase.window + 1  # `low` windows are whole, `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        fits = all(count <= rest for count, rest in zip(phase.before(middle), left, strict=True))
        low, high = (middle, high) if fits else (low, middle)
    return low


def _all_windows(phase: MixturePhase) -> int:
    """Return the windows of a phase with an end: a cut one follows unless the whole ones exhaust a source."""
    if phase.windows is None or phase.left is None:
        raise ValueError("the phase has no end")
    before = phase.before(phase.windows)
    exhausts = any(
        weight and count == rest for weight, count, rest in zip(phase.weights, before, phase.left, strict=True)
    )
    return phase.windows + (not exhausts)
