"""One Hugging Face model for all specs, registered with its Auto classes on import.

Needs the extra `models` (transformers).
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from maclaurin.models.cache import MaclaurinCache
from maclaurin.models.configuration import SIZES, MaclaurinConfig, Size, size_named
from maclaurin.models.model_folder import load_model, save_quietly
from maclaurin.models.modeling import MaclaurinForCausalLM, MaclaurinModel

AutoConfig.register("maclaurin", MaclaurinConfig)
AutoModel.register(MaclaurinConfig, MaclaurinModel)
AutoModelForCausalLM.register(MaclaurinConfig, MaclaurinForCausalLM)

__all__ = [
    "SIZES",
    "MaclaurinCache",
    "MaclaurinConfig",
    "MaclaurinForCausalLM",
    "MaclaurinModel",
    "Size",
    "load_model",
    "save_quietly",
    "size_named",
]
