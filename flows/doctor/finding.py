"""The result of a check, and a class that runs checks one after the other."""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tasks.foundation.errors import BatonError
from tasks.foundation.user_errors import describe_with_place

Verdict = Literal["pass", "warn", "fail", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        check: name of the check.
        verdict: pass, warn or fail; skipped if the check could not run.
        text: what the check found, with figures.
        remedy: how to fix or improve it; empty if there is nothing to do or the text says it.
        value: result for later checks to use.
    """

    check: str
    verdict: Verdict
    text: str
    remedy: str = ""
    value: Any = field(default=None, repr=False, compare=False)

    @property
    def is_usable(self) -> bool:
        """Whether later checks can use the value: the check passed or warned."""
        return self.verdict in {"pass", "warn"}

    @property
    def as_passed(self) -> "Finding":
        """The finding with verdict `pass` if it has a value, so that checks can use the value of a failed check."""
        return self if self.value is None else replace(self, verdict="pass")


class Checks:
    """Runs checks in order. An exception in one check becomes its finding; the other checks still run."""

    def __init__(self, on_finding: Callable[[Finding], None]) -> None:
        """Start without findings.

        Args:
            on_finding: called with each finding as soon as it is known.
        """
        self._on_finding = on_finding
        self.findings: list[Finding] = []

    def run(self, check: str, work: Callable[..., Finding], *needs: Finding) -> Finding:
        """Run one check, or skip it if a finding that it needs is not usable.

        Args:
            check: name of the check.
            work: called with the values of `needs`.
            needs: findings of earlier checks.

        Returns:
            The finding, after `on_finding` has received it.
        """
        finding = self._find(check, work, needs)
        self.findings.append(finding)
        self._on_finding(finding)
        return finding

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return any(finding.verdict == "fail" for finding in self.findings)

    def _find(self, check: str, work: Callable[..., Finding], needs: tuple[Finding, ...]) -> Finding:
        missing = [need.check for need in needs if not need.is_usable]
        if missing:
            return Finding(check=check, verdict="skipped", text=f"needs {' and '.join(missing)}, which did not pass")
        try:
            return work(*(need.value for need in needs))
        except BatonError as error:
            return Finding(check=check, verdict="fail", text=str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an unexpected error in one check must not hide the others
            if os.environ.get("BATON_DEBUG"):
                traceback.print_exception(error)
            return Finding(check=check, verdict="fail", text=f"unexpected: {describe_with_place(error)}")
