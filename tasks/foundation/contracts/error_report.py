"""A `BatonError` as JSON, to send it to another process."""

from typing import Literal, Self

from pydantic import Field

from tasks.foundation import errors
from tasks.foundation.contracts.base import Contract
from tasks.foundation.errors import BatonError, whole_traceback


class ErrorReport(Contract):
    """An error's class, message and fields, as JSON.

    The receiving process may run an older Baton that does not know the class. It then raises the nearest base class
    that it knows, with the same message.
    """

    schema_version: Literal[1] = 1
    error: str = Field(description="name of the class, such as NonFinite")
    bases: tuple[str, ...] = Field(default=(), description="names of its base classes, nearest first")
    message: str
    fields: dict[str, int | float | str] = Field(
        default_factory=dict, description="such as step; see BatonError.fields"
    )
    traceback: str | None = Field(default=None, description="where it was raised, and its causes")

    @classmethod
    def of(cls, error: BatonError) -> Self:
        """The report of an error."""
        name, *bases = (kind.__name__ for kind in type(error).__mro__ if issubclass(kind, BatonError))
        return cls(
            error=name,
            bases=tuple(bases),
            message=str(error),
            fields=dict(error.fields),
            traceback=whole_traceback(error),
        )

    def to_error(self) -> BatonError:
        """An error of the same class, or of the nearest base class that this version knows and can construct.

        The traceback of the other process is a note of the error, which the traceback of this process ends with.
        """
        error = self._error()
        if self.traceback is not None:
            error.add_note(f"In the other process:\n{self.traceback}")
        return error

    def _error(self) -> BatonError:
        for name in (self.error, *self.bases):
            kind = getattr(errors, name, None)
            if not (isinstance(kind, type) and issubclass(kind, BatonError)):
                continue
            if set(kind.field_names) <= self.fields.keys():
                return kind(self.message, **{field: self.fields[field] for field in kind.field_names})
        return BatonError(self.message)
