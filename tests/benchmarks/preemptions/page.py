"""The table and the picture of the replay."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tests.benchmarks.preemptions.measure import BATON, Measured, Replayed
from tests.benchmarks.preemptions.schedules import Schedule
from tests.benchmarks.preemptions.simulation import Seconds, goodput

ORACLE = "oracle"
_RARE = 2800.0  # seconds; a mean of 50 minutes, as drawn
_CAUSES = {"kept": "#2f7d4f", "commit": "#e0a526", "start": "#7a8fa6", "lost": "#b5413b"}
_LABELS = {
    "kept": "training that is kept",
    "commit": "commits",
    "start": "starts",
    "lost": "training that is lost",
}
# Of the picture: panels beside each other, and pixels.
_COLUMNS, _PANEL, _NAMES, _ROW, _GAP = 2, 320, 300, 20, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One schedule, simulated.

    Attributes:
        schedule: of losses.
        notice: seconds before a loss.
        seconds: where the time went, by arm; the oracle is one of them.
        measured: costs by arm, as in the names of `seconds` up to a comma.
    """

    schedule: Schedule
    notice: float
    seconds: Mapping[str, Seconds]
    measured: Mapping[str, Measured]

    @property
    def name(self) -> str:
        """Schedule and notice."""
        return f"{self.schedule.name}, {f'{self.notice:g} s of notice' if self.notice else 'no notice'}"

    def goodput(self, name: str) -> float:
        """Share of the time that an arm kept."""
        if name == ORACLE:
            return self.seconds[name].kept / self.seconds[name].total
        return goodput(self.seconds[name], self.measured[name.split(",", maxsplit=1)[0]].costs)

    @property
    def over_peer_if_left_is_lost(self) -> float:
        """Baton's goodput over the best peer's, with the rest of each notice as time in which nothing is trained."""
        ours = self.seconds[BATON]
        return self.goodput(BATON) * ours.total / (ours.total + ours.left) / self.best_peer

    @property
    def best_peer(self) -> float:
        """The best of the peers, at whatever interval; NaN without peers."""
        return max((self.goodput(name) for name in self.seconds if name not in {ORACLE, BATON}), default=math.nan)


def table(scenarios: Sequence[Scenario]) -> str:
    """Goodput of each arm in each scenario, as Markdown."""
    names = list(scenarios[0].seconds)
    head = ["schedule", *names, "Baton / oracle", "Baton / best peer"]
    rows = [
        [
            each.name,
            *(f"{each.goodput(name):.1%}" for name in names),
            f"{each.goodput(BATON) / each.goodput(ORACLE):.1%}",
            f"{each.goodput(BATON) / each.best_peer:.2f}",
        ]
        for each in scenarios
    ]
    return _markdown([head, *rows])


def _kept(scenarios: Sequence[Scenario]) -> tuple[str, str, str]:
    """Baton's goodput over the best peer's, the least with notice, and the least over the oracle's with rare losses."""
    over_peer = [each.goodput(BATON) / each.best_peer for each in scenarios]
    noticed = [ratio for ratio, each in zip(over_peer, scenarios, strict=True) if each.notice]
    rare = [each.goodput(BATON) / each.goodput(ORACLE) for each in scenarios if each.schedule.mean >= _RARE]
    return (
        f"{min(over_peer):.3f} to {max(over_peer):.3f}",
        f"{min(noticed, default=math.nan):.3f}",
        f"{min(rare, default=math.nan):.1%}",
    )


def conclusion(scenarios: Sequence[Scenario]) -> str:
    """What the table says, in one sentence, as Markdown."""
    over_peer, noticed, rare = _kept(scenarios)
    return (
        f"**Baton keeps {over_peer} of the goodput of the best peer at its best interval (goal: 1.00), {noticed} or "
        f"more with notice (goal: 1.02), and {rare} or more of the oracle's where machines live 50 minutes and more "
        "(goal: 97 %).**\n"
    )


def left_words(scenarios: Sequence[Scenario]) -> str:
    """What the notice is worth if the next machine comes only when the old one is lost, as Markdown."""
    lost = [each.over_peer_if_left_is_lost for each in scenarios if each.notice]
    return (
        "If the next machine came only when the old one is lost, Baton would keep "
        f"{min(lost, default=math.nan):.3f} to {max(lost, default=math.nan):.3f} of the best peer's with notice.\n"
    )


def bound_words(bound: Sequence[Scenario]) -> str:
    """What Baton keeps if a commit costs it all the time until it is durable, as Markdown."""
    over_peer, noticed, rare = _kept(bound)
    return (
        "What a commit costs is a small difference of long rows. If it cost Baton all the "
        f"{bound[0].measured[BATON].costs.commit:.2f} s until it is durable, Baton would keep {over_peer} of the best "
        f"peer's, {noticed} or more with notice, and {rare} or more of the oracle's.\n"
    )


def costs_table(measured: Mapping[str, Measured]) -> str:
    """What was measured, as Markdown; ranges over the rounds."""
    head = ["", "start, s", "a commit costs, s", "durable after, s", "speed"]
    rows = [
        [
            name,
            f"{one.costs.start:.1f} ({min(one.starts):.1f} to {max(one.starts):.1f})",
            f"{one.costs.commit:.2f} ({min(one.commits):.2f} to {max(one.commits):.2f})",
            f"{one.costs.durable:.2f}",
            f"{one.costs.speed:.3f} ({min(one.speeds):.3f} to {max(one.speeds):.3f})",
        ]
        for name, one in measured.items()
    ]
    return _markdown([head, *rows])


def replayed_table(replayed: Mapping[str, Replayed]) -> str:
    """The real replay beside its simulation, as Markdown."""
    head = ["", "real", "simulated", "difference", "steps kept"]
    rows = [
        [name, f"{one.real:.1%}", f"{one.simulated:.1%}", f"{one.difference:+.1%}", str(one.steps)]
        for name, one in replayed.items()
    ]
    return _markdown([head, *rows])


def picture(scenarios: Sequence[Scenario]) -> str:
    """Draw where the time went, a panel for each scenario, as SVG."""
    names = list(scenarios[0].seconds)
    parts = []
    for number, scenario in enumerate(scenarios):
        line, column = divmod(number, _COLUMNS)
        left, top = _NAMES + column * (_PANEL + _GAP), _GAP + line * (_ROW * len(names) + 2 * _GAP)
        parts.append(_text(scenario.name, left, top - 6))
        for row, name in enumerate(names):
            begin, y = float(left), top + row * _ROW
            for cause, color in _CAUSES.items():
                width = _PANEL * getattr(scenario.seconds[name], cause) / scenario.seconds[name].total
                parts.append(f'<rect x="{begin:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" fill="{color}"/>')
                begin += width
            parts.append(_text(f"{scenario.goodput(name):.0%}", left + 4, y + 13, 'fill="white"'))
            if column == 0:
                parts.append(_text(name, left - 8, y + 13, 'text-anchor="end"'))
    lines = -(-len(scenarios) // _COLUMNS)
    width, height = _NAMES + _COLUMNS * (_PANEL + _GAP), lines * (_ROW * len(names) + 2 * _GAP) + _GAP
    for number, (cause, color) in enumerate(_CAUSES.items()):
        x = _GAP + number * (width - _GAP) / len(_CAUSES)
        parts.append(f'<rect x="{x:.0f}" y="{height - 20}" width="12" height="12" fill="{color}"/>')
        parts.append(_text(_LABELS[cause], x + 18, height - 10))
    box = f'width="{width}" height="{height}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f'<rect {box} fill="white"/>',
            *parts,
            "</svg>\n",
        )
    )


def _text(words: str, x: float, y: float, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{escape(words)}</text>'


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Measured costs and their title."""

    title: str
    measured: Mapping[str, Measured]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealReplay:
    """The replay with real processes.

    Attributes:
        title: of the workload.
        interval: seconds between commits.
        lives: seconds that each machine lived.
        measured: costs, by arm.
        replayed: what came of it, by arm.
        same: whether Baton's bits are those of a run that nothing interrupted.
    """

    title: str
    interval: float
    lives: Sequence[float]
    measured: Mapping[str, Measured]
    replayed: Mapping[str, Replayed]
    same: bool


def document(
    machine: str, scenarios: Sequence[Scenario], bound: Sequence[Scenario], costs: Table, real: RealReplay
) -> str:
    """The page, as Markdown."""
    lives = ", ".join(f"{each:.0f}" for each in real.lives)
    machines = len(scenarios[0].schedule.up_times)
    bits = "the same bits as" if real.same else "OTHER BITS than"
    return "\n".join(
        (
            "# What preemptions leave of the time\n",
            conclusion(scenarios),
            f"{machine}\n",
            "Goodput is the share of the machines' time that went into training that is kept. The first table is",
            f"**simulated** from the costs in the second one, over {machines} machines. The oracle knows when each",
            "machine is lost: it has the lowest costs of all, and makes one commit that survives at the very moment of",
            "the loss. Baton has its default, `checkpoint.every_seconds: auto`, and learns how often it is lost.",
            "The peers commit at Young's interval for the true mean, which nobody knows beforehand, or each half hour.",
            "On a notice Baton commits and ends; the peers do not act on it. All are started again at once when their",
            "process ends: what is left of a notice is time of the old machine, in which the next one trains.\n",
            table(scenarios),
            left_words(scenarios),
            bound_words(bound),
            "![Where the time went](preemptions.svg)\n",
            "The green part is the time of steps that are kept. The number in it is the goodput, which also counts",
            "how fast the steps were.\n",
            f"## What was measured: {costs.title}\n",
            costs_table(costs.measured),
            "A start is the time from the process to its first step, with the checkpoint restored and, of Baton, with",
            "Prefect. What a commit costs is the time that the rows of metrics from it to the next commit took longer,",
            "the median of four commits. Speed is that of a step over the fastest arm's, while the arms train by turns",
            "of seconds. Medians, with the range over the rounds; each round has processes of its own.\n",
            f"## The same with real processes: {real.title}\n",
            f"{len(real.lives)} machines of {lives} seconds, each ended with SIGKILL, a commit each {real.interval:g}",
            "seconds of all arms, beside a simulation of the same lives from these costs:\n",
            costs_table(real.measured),
            replayed_table(real.replayed),
            f"Baton's newest checkpoint has {bits} that of a run that nothing interrupted. The peers do not promise",
            "that: their data begins anew at each start.\n",
        )
    )


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines) + "\n"
