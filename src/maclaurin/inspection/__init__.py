"""A pretrained model examined as the recurrent network it is: which orders each of its heads needs.

What a finished inspection says is read with `read_inspection` and `sharp_heads`, which need no torch.
"""

from maclaurin.inspection.schema import Inspection, read_inspection
from maclaurin.inspection.sharpness import SharpHead, layers_to_keep, sharp_heads

__all__ = ["Inspection", "SharpHead", "layers_to_keep", "read_inspection", "sharp_heads"]
