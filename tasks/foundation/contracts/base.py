"""The base of everything that is handed from room to room."""

from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.foundation.errors import BatonError


class Contract(BaseModel):
    """A frozen value; unknown keys are refused and nothing is coerced."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants")

    def to_json(self) -> bytes:
        """UTF-8 JSON, indented: these files are read by people too."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes, *, where: str, error: type[BatonError]) -> Self:
        """Parse, or raise `error` naming the place and the first fault."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as fault:
            first = fault.errors()[0]
            key = ".".join(str(part) for part in first["loc"]) or "the whole"
            message = f"{where}: not a readable {cls.__name__}: {key}: {first['msg']}"
            raise error(message) from fault
