"""The check of the first example's features, which may refuse the run before anything is written."""

from collections.abc import Callable

from tasks.foundation.contracts.dataset import Feature, Reading
from tasks.foundation.errors import BatonError

# Receives the features of the examples and how they were read, and may refuse the run.
FeatureCheck = Callable[[tuple[Feature, ...], Reading], None]


class FeaturesRefused(Exception):
    """A check raised an error. The data is valid, so prepared shards stay for the corrected model."""

    def __init__(self, fault: BatonError) -> None:
        super().__init__(str(fault))
        self.fault = fault


def check_features(check: FeatureCheck | None, features: tuple[Feature, ...], reading: Reading) -> None:
    """Call the check, if there is one.

    Raises:
        FeaturesRefused: it raised.
    """
    if check is None:
        return
    try:
        check(features, reading)
    except BatonError as fault:
        raise FeaturesRefused(fault) from fault
