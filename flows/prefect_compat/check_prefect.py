"""Checks in a process of its own whether Prefect can be used, while the command imports TensorFlow.

Reading Prefect's settings and asking its server takes more than a second of imports, and Python imports in one thread
at a time.

Run `python -m flows.prefect_compat.check_prefect`; a refusal is an `ErrorReport` on standard output.
"""

import sys
from typing import Final

REFUSED: Final = 2


def main() -> int:
    """Check Prefect; returns the exit code."""
    from flows.prefect_compat.require_prefect import require_prefect
    from tasks.foundation.contracts.stage_calls import ErrorReport
    from tasks.foundation.errors import BatonError

    try:
        require_prefect()
    except BatonError as fault:
        sys.stdout.write(ErrorReport.of(fault).model_dump_json())
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
