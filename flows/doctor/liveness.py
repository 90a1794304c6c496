"""Estimate the peak memory of a compiled step, without its arguments, from XLA's schedule.

XLA's optimized HLO text lists the instructions of each computation in the order in which they run
(`is_scheduled=true`). A buffer is live from the instruction that creates it to the last one that reads it; the largest
sum of live buffers is the peak. A fusion needs no memory inside. The peak of a loop or branch counts where it is
called. Arguments do not count, nor do results that reuse the memory of an argument (`input_output_alias`), such as
updated variables.

This is an estimate from the CPU's program. A TPU has other fusions and layouts, and pads arrays to tiles of 8 x 128.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([^\]]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ALIASED = re.compile(r"\{(\d*)\}: \(\d+,")
# These operations return views of their operands and allocate no memory.
_NO_MEMORY = frozenset({"bitcast", "get-tuple-element", "tuple", "while", "optimization-barrier", "after-all"})
_NOT_COUNTED = frozenset({"parameter", "constant"})
_CALLS = frozenset({"while", "call", "conditional"})


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    is_root: bool


def peak_bytes(hlo: str) -> int:
    """Return the peak memory of the entry computation in bytes, without its arguments.

    Args:
        hlo: XLA's optimized, scheduled module as text.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations, entry = _computations(hlo)
    if entry is None:
        raise ValueError("the text holds no ENTRY computation")
    head = hlo.partition("\n")[0]
    aliases = re.search(r"input_output_alias=\{(.*?)\}, [a-z_]+=", head) or re.search(r"input_output_alias=(.*)", head)
    in_place = {int(index or 0) for index in _ALIASED.findall(aliases[1])} if aliases else set()
    return _peak(computations, entry, in_place=in_place)


def size_of(shape: str) -> int:
    """Return the bytes of an HLO shape such as `f32[16,8]{1,0}` or of a tuple; for a dynamic shape, the upper bound."""
    return sum(_bits(dtype) * math.prod(_sizes(sizes)) // 8 for dtype, sizes in _ARRAY.findall(shape))


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else 0


def _sizes(text: str) -> Iterable[int]:
    return (int(size) for size in re.findall(r"\d+", text))


def _computations(hlo: str) -> tuple[dict[str, list[_Instruction]], str | None]:
    computations: dict[str, list[_Instruction]] = {}
    current: list[_Instruction] | None = None
    entry = None
    for line in hlo.splitlines():
        if current is None:
            if (head := _HEAD.match(line)) and not line.startswith("HloModule"):
                current = computations.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif found := _INSTRUCTION.match(line):
            current.append(_instruction(found[2], found[3], is_root=bool(found[1])))
    return computations, entry


def _instruction(name: str, text: str, *, is_root: bool) -> _Instruction:
    shape, rest = _split_shape(text)
    op, _, arguments = rest.strip().partition("(")
    inner, after = _split_at_closing_parenthesis(arguments)
    branches = _BRANCHES.search(after)
    called = _CALLED.findall(after) + (re.findall(r"[\w.\-]+", branches[1]) if branches else [])
    return _Instruction(name, shape, op, tuple(_NAME.findall(inner)), tuple(called), is_root)


def _split_shape(text: str) -> tuple[str, str]:
    """Split off the leading shape: a tuple in parentheses, or the text up to the first space."""
    if text.startswith("("):
        inner, rest = _split_at_closing_parenthesis(text[1:])
        return inner, rest
    shape, _, rest = text.partition(" ")
    return shape, rest


def _split_at_closing_parenthesis(text: str) -> tuple[str, str]:
    """Return the text before and after the parenthesis that closes an open one."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:index], text[index + 1 :]
    return text, ""


def _peak(computations: dict[str, list[_Instruction]], name: str, *, in_place: set[int] | None = None) -> int:
    """Return the peak of one computation; without its result if `in_place` is None, because the caller counts it."""
    instructions = computations.get(name, [])
    buffers_of: dict[str, frozenset[str]] = {}  # instruction -> the instructions that allocated its value
    last: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for position, each in enumerate(instructions):
        read = frozenset[str]().union(*(buffers_of.get(operand, frozenset()) for operand in each.operands))
        for buffer in read:
            last[buffer] = position
        if each.op in _NOT_COUNTED:
            buffers_of[each.name] = frozenset()
        elif each.op in _NO_MEMORY:
            buffers_of[each.name] = read
        else:
            buffers_of[each.name] = frozenset({each.name})
            sizes[each.name] = size_of(each.shape)
            last[each.name] = position
        if each.is_root:
            for buffer in _result_buffers(each, buffers_of, in_place):
                sizes[buffer] = 0
    dying: dict[int, list[str]] = {}
    for buffer, position in last.items():
        dying.setdefault(position, []).append(buffer)
    live = peak = 0
    for position, each in enumerate(instructions):
        live += sizes.get(each.name, 0)
        inner = max((_peak(computations, called) for called in each.called), default=0) if each.op in _CALLS else 0
        peak = max(peak, live + inner)
        live -= sum(sizes.get(buffer, 0) for buffer in dying.get(position, ()))
    return peak


def _result_buffers(
    root: _Instruction, buffers_of: dict[str, frozenset[str]], in_place: set[int] | None
) -> Iterable[str]:
    """Return the buffers of the result that this computation does not allocate itself."""
    if in_place is None:
        return buffers_of[root.name]
    if root.op != "tuple":
        return buffers_of[root.name] if 0 in in_place else ()
    chosen = [operand for index, operand in enumerate(root.operands) if index in in_place]
    return frozenset[str]().union(*(buffers_of.get(operand, frozenset()) for operand in chosen))
