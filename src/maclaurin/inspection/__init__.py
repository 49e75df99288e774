"""A pretrained model examined as the recurrent network it is: which orders each of its heads needs.

What a finished inspection says is read with `read_inspection` and `sharp_heads`, which need no torch.
"""

from maclaurin.inspection.inspection_record import (
    Inspection,
    SharpHead,
    layers_to_keep,
    read_inspection,
    sharp_heads,
)

__all__ = ["Inspection", "SharpHead", "layers_to_keep", "read_inspection", "sharp_heads"]
