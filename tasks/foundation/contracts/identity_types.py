"""The types of a recorded identity's values, which code relies on wherever a home is from.

Values that are only compared with others, such as the configuration of a model, may be any JSON. So may those of keys
that this version does not know.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from tasks.foundation.contracts.callback_record import CALLBACK_RECORD, CallbackRecord
from tasks.foundation.contracts.epochs import TRAIN_EXAMPLES
from tasks.foundation.contracts.identity_keys import (
    CALLBACKS,
    CONTENTS,
    MIXTURE,
    SHUFFLE,
    SIGNATURE,
    TRANSFORM_CONTENTS,
    VALIDATION,
)
from tasks.foundation.contracts.safe_names import DatasetPath

_SHOWN_CHARACTERS = 60
_BATCH: Final = "train.global_batch_size"
_DROP: Final = "train.drop_remainder"


def _callback_record(value: dict[str, Any]) -> dict[str, Any]:
    CallbackRecord.model_validate(value, extra="ignore")  # as `recorded_callbacks` reads it
    return value


_OBJECT = dict[str, Any] | None
_POSITIVE = Annotated[int, Field(ge=1, lt=2**63)]
_TYPES: Final[Mapping[str, Any]] = {
    "data.source": str,
    "data.folder": DatasetPath,
    "data.content_digest": str,
    "data.validation_folder": DatasetPath,
    VALIDATION: str | None,
    TRAIN_EXAMPLES: _POSITIVE,
    MIXTURE: _OBJECT,
    SHUFFLE: bool,
    "data.window_shards": _POSITIVE,
    TRANSFORM_CONTENTS: _OBJECT,
    "train.seed": int,
    _BATCH: _POSITIVE,
    _DROP: bool,
    "train.accumulate": _POSITIVE,
    "train.precision": str | None,
    "train.class_weight": dict[str, float] | None,
    CALLBACKS: _OBJECT,
    CALLBACK_RECORD: Annotated[dict[str, Any], AfterValidator(_callback_record)],
    "init.weights": list[Any],
    "init.freeze": list[str],
    SIGNATURE: str,
    CONTENTS: _OBJECT,
    "model.options": _OBJECT,
}


def require_types(identity: Mapping[str, Any]) -> None:
    """Refuse an identity with a value that no version of Baton writes.

    Raises:
        PydanticCustomError: names the first such key, with its value.
    """
    for key, kind in _TYPES.items():
        if key in identity:
            try:
                _adapter(kind).validate_python(identity[key])
            except ValidationError as fault:
                first = fault.errors(include_input=False, include_url=False)[0]
                below = "".join(f".{part}" for part in first["loc"])
                raise _refusal(f"{key}{below} = {_shown(identity[key])}: {first['msg']}") from fault
    examples, batch = identity.get(TRAIN_EXAMPLES), identity.get(_BATCH)
    if identity.get(_DROP) and examples is not None and batch is not None and examples < batch:
        raise _refusal(f"{_DROP} leaves no batch of {_BATCH} = {batch} in {TRAIN_EXAMPLES} = {examples}")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _refusal(words: str) -> PydanticCustomError:
    return PydanticCustomError("identity", "{words}", {"words": words})
