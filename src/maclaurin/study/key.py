"""The name of a run in the pool: the same for everyone who asks for the same numbers."""

from __future__ import annotations

from maclaurin.data.fingerprint import digest
from maclaurin.training.config import TrainConfig
from maclaurin.training.run_folder import FREE_KEYS

#: keys that decide no number; the device does, in the last digits
FREE = tuple(key for key in FREE_KEYS if key != "device")


def run_key(config: TrainConfig, code: str, data_fingerprint: str) -> str:
    """Digest of the config in its canonical spelling, the version of the code and the data."""
    decisive = {name: value for name, value in config.to_dict().items() if name not in FREE}
    return digest({"config": decisive, "code": code, "data": data_fingerprint})[:32]
