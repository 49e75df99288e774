"""placeholder"""
from pathlib import Path
WEB = Path(__file__).parent / "web"
