"""Measure which orders each head of a pretrained model needs as a recurrent network.

`read_inspection` and `sharp_heads` read a finished inspection; they need no torch.
"""

from maclaurin.inspection.inspection_record import (
    Inspection,
    SharpHead,
    layers_to_keep,
    read_inspection,
    sharp_heads,
)

__all__ = ["Inspection", "SharpHead", "layers_to_keep", "read_inspection", "sharp_heads"]
