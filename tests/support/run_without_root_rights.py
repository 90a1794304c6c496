"""`run_without_prefect.py` in a process to which file permissions apply, even if root runs it."""

import ctypes
import sys

_CAPABILITY_VERSION_3 = 0x20080522
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


def give_up_root_rights() -> None:
    """Drop the two capabilities with which root ignores file permissions. Call it before threads are started."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, words = _Header(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(ctypes.byref(header), words):
        raise OSError(ctypes.get_errno(), "capget")
    for number in range(3):  # effective, permitted, inheritable
        words[number] &= ~(1 << _DAC_OVERRIDE | 1 << _DAC_READ_SEARCH)
    if libc.capset(ctypes.byref(header), words):
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":  # the imports take seconds, and not everybody who gives up rights trains
    from baton.flows.process import exits_with
    from baton.flows.train import main
    from tests.support.run_without_prefect import leave_out_report

    give_up_root_rights()
    leave_out_report()
    sys.exit(exits_with(main(sys.argv[1:])))
