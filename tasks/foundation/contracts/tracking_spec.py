"""Where a run's curves are sent besides its home."""

from typing import Annotated

from pydantic import Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.change_class import operational

_SHOWING = operational("says where curves are shown, not what is computed")


class MlflowSpec(Contract):
    """An MLflow server or store."""

    uri: str | None = Field(
        default=None,
        min_length=1,
        description="http://host:5000 or sqlite:////folder/mlflow.db; null: MLflow's own setting, MLFLOW_TRACKING_URI",
    )
    experiment: str = Field(default="Default", min_length=1, description="name of the experiment; made if missing")


class WandbSpec(Contract):
    """Weights & Biases, in its offline mode."""

    project: str = Field(min_length=1, description="name of the project")


class TrackingSpec(Contract):
    """Where the curves are sent. Each is made from the log, so that nothing is sent twice."""

    mlflow: Annotated[MlflowSpec | None, _SHOWING] = Field(
        default=None,
        description="{uri: address, experiment: name}: metrics and evaluations become one MLflow run; {}: MLflow's own "
        "settings; needs the extra `mlflow`",
    )
    wandb: Annotated[WandbSpec | None, _SHOWING] = Field(
        default=None,
        description="{project: name}: the same for Weights & Biases, as an offline run in <home>/wandb, which "
        "`wandb sync` uploads; storage is on a local disk; needs the extra `wandb`",
    )
