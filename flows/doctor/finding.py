"""What a check found, and how one check after the other is made."""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tasks.foundation.errors import BatonError
from tasks.foundation.user_code import describe

Verdict = Literal["pass", "warn", "fail", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check.

    Attributes:
        check: its name.
        verdict: whether all is well; skipped if it could not be made.
        text: what was found, with figures.
        remedy: what to do about it; empty if nothing is to be done, or if the text says it.
        value: what later checks go on with.
    """

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""
    value: Any = field(default=None, repr=False, compare=False)

    @property
    def is_usable(self) -> bool:
        """Whether later checks can build on it."""
        return self.verdict in {"pass", "warn"}

    @property
    def for_others(self) -> "Finding":
        """The same for checks that can go on with its value although it failed."""
        return self if self.value is None else replace(self, verdict="pass")


class Checks:
    """Makes checks in order; whatever one of them raises is its finding, and never ends the others."""

    def __init__(self, tell: Callable[[Finding], None]) -> None:
        """Nothing is checked yet.

        Args:
            tell: is given each finding as soon as it is known.
        """
        self._tell = tell
        self.findings: list[Finding] = []

    def make(self, check: str, work: Callable[..., Finding], *needs: Finding) -> Finding:
        """Call `work` with the values of what it needs, unless one of these is missing.

        Args:
            check: the name of the check.
            work: makes it.
            needs: findings of earlier checks.

        Returns:
            Its finding, which has been told.
        """
        finding = self._made(check, work, needs)
        self.findings.append(finding)
        self._tell(finding)
        return finding

    @property
    def failed(self) -> bool:
        """Whether any check did."""
        return any(finding.verdict == "fail" for finding in self.findings)

    def _made(self, check: str, work: Callable[..., Finding], needs: tuple[Finding, ...]) -> Finding:
        missing = [need.check for need in needs if not need.is_usable]
        if missing:
            return Finding(check=check, verdict="skipped", text=f"needs {' and '.join(missing)}, which did not pass")
        try:
            return work(*(need.value for need in needs))
        except BatonError as fault:
            return Finding(check=check, verdict="fail", text=str(fault))
        except (Exception, SystemExit) as fault:  # noqa: BLE001 - an unforeseen fault of one check must not hide the others
            if os.environ.get("BATON_DEBUG"):
                traceback.print_exception(fault)
            return Finding(check=check, verdict="fail", text=f"unexpected: {describe(fault)}")
