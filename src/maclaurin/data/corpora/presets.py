"""Short names of the data sets the paper used.

The hub holds them whole: `limit_documents` says how many documents of the stream are wanted.
"""

from __future__ import annotations

PRESETS: dict[str, str] = {
    # the crawl of December 2024 that the 2B models and the long rows were trained on
    "fineweb": "hf:HuggingFaceFW/fineweb:CC-MAIN-2024-51",
    "slimpajama": "hf:cerebras/SlimPajama-627B",
    # the Pile without its copyrighted parts; hf:EleutherAI/the_pile_deduplicated is the other choice
    "pile": "hf:monology/pile-uncopyrighted",
}
