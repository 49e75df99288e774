"""What the small inspection of this suite looks at."""

from maclaurin.inspection.inspect_model import Settings

SETTINGS = Settings(orders=(1, 2, 4, 12), windows=(3,), sinks=1, chunk=5)
