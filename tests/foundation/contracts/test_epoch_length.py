"""Where epochs end, and other absolute steps at which something is due."""

import math
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.tasks.foundation.contracts.run_spec import EpochLength, Period, RunSpec, is_row_due, next_row

SIZES = st.integers(1, 300)
PERIODS = st.builds(Period, SIZES, st.integers(1, 40))


@settings(max_examples=60, derandomize=True)
@given(period=PERIODS, step=st.integers(0, 500))
def test_next_end_is_the_first_step_that_ends_a_period(period: Period, step: int) -> None:
    end = period.next_end(step)
    assert end > step
    assert period.ends_at(end)
    assert not any(period.ends_at(between) for between in range(step + 1, end))


@settings(max_examples=60, derandomize=True)
@given(period=PERIODS, number=st.integers(1, 50))
def test_period_ends_with_its_last_example(period: Period, number: int) -> None:
    step = period.end_of(number)
    assert step * period.batch >= number * period.examples > (step - 1) * period.batch
    assert period.ended_by(step) >= number > period.ended_by(step - 1)
    assert period.ends_at(step)


@settings(max_examples=30, derandomize=True)
@given(steps=st.integers(1, 50), step=st.integers(1, 500))
def test_period_of_steps_ends_at_its_multiples(steps: int, step: int) -> None:
    assert Period(steps).ends_at(step) == (step % steps == 0)
    assert Period(steps).next_end(step) == (step // steps + 1) * steps


@settings(max_examples=60, derandomize=True)
@given(examples=SIZES, batch=st.integers(1, 40), every=st.none() | st.integers(1, 20), step=st.integers(0, 200))
def test_epochs_end_with_rows_whatever_the_target(examples: int, batch: int, every: int | None, step: int) -> None:
    counted = {"global_batch_size": batch, "log_every_steps": every, "epoch_examples": examples}
    data = {"source": "digits"}
    short, long, in_steps = (
        RunSpec.model_validate(
            {"run": "a", "storage": "b", "data": data, "model": "m.py:f", "train": {**counted, **target}}
        )
        for target in ({"epochs": 1}, {"epochs": 1000}, {"steps": 7})
    )
    at_multiple, at_epoch = (each.ends_at(step) for each in (Period(every or 50), Period(examples, batch)))
    assert is_row_due(in_steps, step) == at_multiple
    assert is_row_due(short, step) == is_row_due(long, step) == (at_epoch or (every is not None and at_multiple))
    assert is_row_due(short, short.train.target)
    for spec in (short, in_steps):
        assert next_row(spec, step) == next(at for at in range(step + 1, step + 400) if is_row_due(spec, at))


def test_epoch_without_whole_batches_ends_in_a_batch() -> None:
    epoch = EpochLength(train_examples=29, global_batch_size=8)
    assert [epoch.end_of(number) for number in range(1, 5)] == [4, 8, 11, 15]
    assert epoch.steps == 4
    assert epoch.after(29) == 8
    assert Fraction(epoch.after(10)).limit_denominator(99) == Fraction(80, 29)


def test_dropped_remainder_makes_whole_batches() -> None:
    epoch = EpochLength(train_examples=29, global_batch_size=8, drop_remainder=True)
    assert (epoch.examples, epoch.steps, epoch.end_of(4), epoch.after(9)) == (24, 3, 12, 3)


def test_batch_larger_than_the_data_has_several_epochs() -> None:
    period = EpochLength(train_examples=3, global_batch_size=8).period()
    assert [period.ended_by(step) for step in range(4)] == [0, 2, 5, 8]
    assert all(period.ends_at(step) for step in range(1, 9))
    assert math.isclose(EpochLength(train_examples=3, global_batch_size=8).after(1), 8 / 3)
