"""The arrays of a client of PFLlib in a pickle of NumPy, which is parsed: nothing in it is run."""

import pickletools
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

OPCODES = 1000  # NumPy writes a hundred: memory and time stay bounded
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = (
    *("BININT", "BININT1", "BININT2", "BINUNICODE", "SHORT_BINUNICODE", "GLOBAL"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
)
_KINDS = ("f2", "f4", "f8", *(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)))


def read_arrays(content: bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """x and y of a pickled array of {"x": x, "y": y}; ValueError if it holds anything else."""
    match _parse(content):
        case [[_, _, (_, (), _, False, [["x", x, "y", y]])]]:
            return _to_array("x", x), _to_array("y", y)
    raise ValueError("it holds more or less than two arrays")


def _to_array(name: str, part: object) -> NDArray[Any]:
    match part:
        case [_, _, (_, tuple(shape), [_, (kind, *_), (_, order, *_)], fortran, bytes(content))]:
            if kind in _KINDS and order in ("<", ">", "|"):
                values = np.frombuffer(content, np.dtype(order + kind))
                return values.reshape(shape, order="F" if fortran else "C")
    raise ValueError(f"{name} is no array of numbers")


def _parse(content: bytes) -> list[Any]:
    """The stack of a pickle: a call is [function, arguments, state], a dictionary a list."""
    stack, marks, memo = list[Any](), list[int](), dict[object, Any]()
    for opcode, value, _ in islice(pickletools.genops(content), OPCODES):
        match opcode.name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "EMPTY_LIST" | "EMPTY_DICT":
                stack.append([])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                start = marks.pop() if name == "TUPLE" else len(stack) - int(name[-1])
                stack[start:] = [tuple(stack[start:])]
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                memo[len(memo) if value is None else value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "STACK_GLOBAL" | "REDUCE":
                stack[-2:] = [stack[-2:]]
            case "APPEND" | "BUILD" | "SETITEMS" as name:
                start = marks.pop() if name == "SETITEMS" else -1
                items = stack[start:]
                del stack[start:]
                stack[-1].extend(items)
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case name if name in _VALUES:
                stack.append(value)
            case name:
                raise ValueError(f"{name} is no part of an array")
    return stack
