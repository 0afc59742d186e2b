"""What a student's file may import: `from exercises.labkit import OutOfBlocks`.

Only names and plain data live here; no oracle, no case, no solution. The worker loads this package
before it locks itself, so it may import nothing but the standard library.
"""

from exercises.labkit.errors import LabError, OutOfBlocks
from exercises.labkit.wire_types import WIRE_TYPES, wire

__all__ = ["WIRE_TYPES", "LabError", "OutOfBlocks", "wire"]
