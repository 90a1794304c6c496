"""How much memory a compiled step needs besides its arguments: by liveness over XLA's schedule.

XLA's optimized HLO, as text, lists the instructions of each computation in the order in which they will run
(`is_scheduled=true`). A buffer is counted from the instruction that makes it to the last one that reads it; the largest
sum is the peak. Fusions need no memory within; a loop's or a branch's own peak counts where it is called. Arguments are
not counted, nor are results that take an argument's place (`input_output_alias`): updated variables. It is an estimate:
of the CPU's program, whose fusions and layouts are not those of a TPU, which also pads arrays to tiles of 8 x 128.
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
# These name memory and make none: what they give is what they were given.
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
    """The most that the entry computation holds at one time, in bytes, besides its arguments.

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
    """Bytes of an HLO shape such as `f32[16,8]{1,0}`, or of all parts of a tuple; of a dynamic one, at most."""
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
    shape, rest = _leading(text)
    op, _, arguments = rest.strip().partition("(")
    inner, after = _closed(arguments)
    branches = _BRANCHES.search(after)
    called = _CALLED.findall(after) + (re.findall(r"[\w.\-]+", branches[1]) if branches else [])
    return _Instruction(name, shape, op, tuple(_NAME.findall(inner)), tuple(called), is_root)


def _leading(text: str) -> tuple[str, str]:
    """The shape at the beginning, which is a tuple in parentheses or goes up to a blank, and what follows."""
    if text.startswith("("):
        inner, rest = _closed(text[1:])
        return inner, rest
    shape, _, rest = text.partition(" ")
    return shape, rest


def _closed(text: str) -> tuple[str, str]:
    """What stands before the parenthesis that closes, and what stands after it."""
    depth = 1
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return text[:place], text[place + 1 :]
    return text, ""


def _peak(computations: dict[str, list[_Instruction]], name: str, *, in_place: set[int] | None = None) -> int:
    """Of one computation; without its result where the caller counts that (`in_place` is None)."""
    instructions = computations.get(name, [])
    makes: dict[str, frozenset[str]] = {}  # instruction -> those whose memory its value lies in
    last: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for place, each in enumerate(instructions):
        below = frozenset[str]().union(*(makes.get(operand, frozenset()) for operand in each.operands))
        for buffer in below:
            last[buffer] = place
        if each.op in _NOT_COUNTED:
            makes[each.name] = frozenset()
        elif each.op in _NO_MEMORY:
            makes[each.name] = below
        else:
            makes[each.name] = frozenset({each.name})
            sizes[each.name] = size_of(each.shape)
            last[each.name] = place
        if each.is_root:
            for buffer in _of_result(each, makes, in_place):
                sizes[buffer] = 0
    dying: dict[int, list[str]] = {}
    for buffer, place in last.items():
        dying.setdefault(place, []).append(buffer)
    live = peak = 0
    for place, each in enumerate(instructions):
        live += sizes.get(each.name, 0)
        inner = max((_peak(computations, called) for called in each.called), default=0) if each.op in _CALLS else 0
        peak = max(peak, live + inner)
        live -= sum(sizes.get(buffer, 0) for buffer in dying.get(place, ()))
    return peak


def _of_result(root: _Instruction, makes: dict[str, frozenset[str]], in_place: set[int] | None) -> Iterable[str]:
    """What lies in memory that is not this computation's own."""
    if in_place is None:
        return makes[root.name]
    if root.op != "tuple":
        return makes[root.name] if 0 in in_place else ()
    chosen = [operand for index, operand in enumerate(root.operands) if index in in_place]
    return frozenset[str]().union(*(makes.get(operand, frozenset()) for operand in chosen))
