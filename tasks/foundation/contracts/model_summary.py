"""The layers and parameters of a model, as a run's home has them."""

from pydantic import Field

from tasks.foundation.contracts.base import Contract


class LayerSummary(Contract):
    """One layer of a model."""

    name: str
    kind: str = Field(description="its class")
    output_shape: str | None = Field(default=None, description="with None for the batch; None: Keras does not know it")
    parameters: int = Field(ge=0, description="numbers in its weights, which another layer may share")


class ModelSummary(Contract):
    """What `model.summary()` of Keras shows. A variable that several layers share counts once in the sums."""

    layers: tuple[LayerSummary, ...] = Field(description="the layers of the model itself, without those inside of them")
    trainable: int = Field(ge=0, description="numbers in trainable weights")
    frozen: int = Field(ge=0, description="numbers in other weights, such as the means of batch normalization")
    optimizer: int = Field(ge=0, description="numbers in the optimizer's variables")

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        return self.trainable + self.frozen
