"""`make bench`: measures Baton and its peers, and prints one table with the goals beside the figures.

    python -m tests.benchmarks                        all figures, about 100 minutes; writes tests/benchmarks/RESULTS.md
    python -m tests.benchmarks --quick --only abdij   the essential ones, about 18 minutes (a brings h)
    python -m tests.benchmarks --quick --only a --baton before=../old-checkout --no-peers
    python -m tests.benchmarks --trial                every path once, tiny; the figures mean nothing

Figures: a wall clock with commits, b steps a second, c input, d starts, e transfers, f commits on gs://, g the head of
a long log, h peak memory (with a), i stall at a commit, j borders of segments, k train states in memory,
l transforms, m commands, n saves of several hosts, o Parquet in place.

The machine must be idle: an arm waits, twice, while others use more than 0.3 cores, and the page says their load.
`--baton LABEL=PATH` measures another checkout in the same rounds; it needs a `.venv` of its own. `--profile` says which
threads the processor seconds of Baton's processes go to.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.benchmarks.bench import LOOKS, Bench
from tests.benchmarks.environments import Baton, free_port, peer_python, prefect_server
from tests.benchmarks.figures import (
    borders,
    cloud_commits,
    commands,
    in_place,
    others,
    shares,
    speed,
    starts,
    transforms,
    wall_clock,
)
from tests.benchmarks.machine import machine_words
from tests.benchmarks.plan import QUICK, TRIAL, WHOLE, Plan, with_rounds
from tests.benchmarks.process import until_step
from tests.benchmarks.table import as_markdown, write_results
from tests.benchmarks.workloads import Training
from tests.support.checkout import CHECKOUT

_RESULTS = Path(__file__).resolve().parent / "RESULTS.md"


_WITH_PREFECT = "abdhij"  # figures that need a flow run
_WITH_ORBIT = "abh"  # figures whose peers have an environment of their own


def _wall_clock(bench: Bench, plan: Plan) -> None:
    for wall in plan.walls:
        wall_clock.wall_clock(bench, wall)


def _speed(bench: Bench, plan: Plan) -> None:
    speed.speed(bench, plan.small, turns=plan.turns, rounds=plan.rounds)
    # Equal programs differ by 3 % from process to process: many processes, each for few turns.
    speed.speed(bench, plan.large, turns=-(-plan.turns // 3), rounds=3 * plan.rounds)
    speed.promises(bench, plan.large, turns=-(-plan.turns // 5), rounds=2 * plan.rounds - 1)


def _starts(bench: Bench, plan: Plan) -> None:
    with ExitStack() as stack:
        apis = {}
        for baton in bench.batons:
            home = bench.folder / f"server-{baton.label}"
            apis[baton.label] = stack.enter_context(prefect_server(baton, home, free_port()))
        for workload in (plan.digits, plan.large):
            starts.starts_after_kill(bench, workload, rounds=plan.start_rounds, apis=apis)
        starts.cold_starts(bench, plan.digits, rounds=plan.start_rounds)


def _stalls(bench: Bench, plan: Plan) -> None:
    for workload, interval in plan.stalls:
        borders.stalls(bench, workload, interval=interval, commits=plan.stall_commits, rounds=1)


def _borders(bench: Bench, plan: Plan) -> None:
    borders.borders(bench, plan.small, segment_seconds=plan.border_seconds, segments=plan.borders, rounds=plan.rounds)


def _input(bench: Bench, plan: Plan) -> None:
    others.input_pipeline(bench, examples=plan.input_examples, seconds=plan.input_seconds, rounds=plan.rounds)


def _transforms(bench: Bench, plan: Plan) -> None:
    transforms.transforms(bench, examples=plan.input_examples, seconds=plan.input_seconds, rounds=plan.rounds)


def _transfers(bench: Bench, plan: Plan) -> None:
    others.transfers(bench, files=plan.transfer_files, megabytes=plan.transfer_megabytes, rounds=plan.rounds)


def _cloud_commits(bench: Bench, plan: Plan) -> None:
    for milliseconds in plan.latencies:
        cloud_commits.cloud_commits(bench, plan.large, milliseconds=milliseconds, rounds=1)


def _head(bench: Bench, plan: Plan) -> None:
    others.head(bench, entries=plan.log_entries, rounds=plan.rounds)


def _train_states(bench: Bench, plan: Plan) -> None:
    others.train_states(bench, plan.medium)


def _commands(bench: Bench, plan: Plan) -> None:
    commands.commands(bench, plan.digits, rounds=plan.command_rounds)


def _shares(bench: Bench, plan: Plan) -> None:
    shares.shares(
        bench, plan.shared, hosts=plan.hosts, megabytes_per_second=plan.megabytes_per_second, rounds=plan.share_rounds
    )


def _in_place(bench: Bench, plan: Plan) -> None:
    in_place.in_place(bench, examples=plan.input_examples, seconds=plan.input_seconds, rounds=plan.rounds)


_FIGURES: dict[str, Callable[[Bench, Plan], None]] = {
    "a": _wall_clock,
    "b": _speed,
    "c": _input,
    "d": _starts,
    "e": _transfers,
    "f": _cloud_commits,
    "g": _head,
    "i": _stalls,
    "j": _borders,
    "k": _train_states,
    "l": _transforms,
    "m": _commands,
    "n": _shares,
    "o": _in_place,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and print the table.

    Returns:
        The exit code: 1 if an arm failed. A goal that is missed fails nothing.
    """
    options = _options(arguments)
    plan = TRIAL if options.trial else QUICK if options.quick else WHOLE
    if options.rounds:
        plan = with_rounds(plan, options.rounds)
    machine = machine_words()
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=options.folder))
    try:
        bench = Bench(
            folder=folder,
            batons=[_baton(words, folder) for words in ("=", *options.baton)],
            peer_python=peer_python() if _needs_peers(options) else sys.executable,
            rounds=plan.rounds,
            peers=not options.no_peers,
            profile=options.profile,
            patience=0 if options.trial else LOOKS,
        )
        if set(options.only) & set(_WITH_PREFECT):
            _warm_prefect(bench, plan)
        for name in sorted(set(options.only.replace("h", "a"))):
            _FIGURES[name](bench, plan)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    machine = f"{machine} {bench.load_words()}".strip()
    sys.stdout.write(f"{machine}\n\n{as_markdown(bench.figures)}\n")
    sys.stdout.writelines(f"- {note}\n" for note in bench.notes)
    if options.output:
        command = f"python -m tests.benchmarks {' '.join(arguments or sys.argv[1:])}".strip()
        write_results(options.output, bench.figures, machine=machine, command=command, notes=bench.notes)
    return int(any(note.startswith("failed") for note in bench.notes))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="shorter runs and fewer rounds")
    parser.add_argument("--trial", action="store_true", help="tiny models; only shows that everything runs")
    parser.add_argument("--only", default="abcdefgijklmno", metavar="LETTERS", help="figures, as abd; a brings h")
    parser.add_argument("--rounds", type=int, help="rounds of every figure; default: the plan's")
    parser.add_argument("--baton", action="append", default=[], metavar="LABEL=PATH", help="one more checkout")
    parser.add_argument("--no-peers", action="store_true", help="only Baton and the plain loop")
    parser.add_argument("--profile", action="store_true", help="processor seconds of each thread")
    parser.add_argument("--folder", type=Path, help="where the arms write; default: the folder of temporary files")
    parser.add_argument("--keep", action="store_true", help="keep what the arms wrote")
    parser.add_argument(
        "--output", type=Path, help=f"the results as Markdown; default for all figures: {_RESULTS.name}"
    )
    options = parser.parse_args(arguments)
    whole = not (options.quick or options.trial or options.baton or options.no_peers)
    if options.output is None and whole and options.only == parser.get_default("only"):
        options.output = _RESULTS
    if not set(options.only) <= set("abcdefghijklmno"):
        parser.error(f"--only {options.only}: figures are the letters a to o")
    return options


def _needs_peers(options: argparse.Namespace) -> bool:
    return not options.no_peers and bool(set(options.only) & set(_WITH_ORBIT))


def _baton(words: str, folder: Path) -> Baton:
    label, _, path = words.rpartition("=")
    checkout = Path(path).resolve() if path else CHECKOUT
    return Baton(label=label, checkout=checkout, prefect_home=folder / f"prefect-{label}")


def _warm_prefect(bench: Bench, plan: Plan) -> None:
    """Let Prefect make its database, which the first flow run in a new home waits for."""
    training = Training(steps=2, rows=1)
    for baton in bench.batons:
        bench.run(bench.baton(baton, plan.digits, training, prefect=True), until_step(training.steps))


if __name__ == "__main__":
    sys.exit(main())
