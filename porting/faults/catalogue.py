"""Every fault of conversion."""

from __future__ import annotations

from concord.porting.faults import companions, configuration, files, layouts, names, numbers, tensors
from concord.porting.faults.fault import ConversionFault

ALL: tuple[ConversionFault, ...] = tuple(
    fault
    for group in (names, layouts, tensors, numbers, configuration, companions, files)
    for fault in group.FAULTS
)
"""Group by group."""

CONVERSION: dict[str, ConversionFault] = {fault.name: fault for fault in ALL}
"""By name."""
