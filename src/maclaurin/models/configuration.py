"""One Hugging Face configuration for every spec, and the sizes that have a name."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, final

from transformers import PretrainedConfig

from maclaurin.errors import InputError, NotationError, SpecError
from maclaurin.extensions import extensions_of, load_entry_points
from maclaurin.spec.head_groups import LayerAttention, specs_in
from maclaurin.wording import did_you_mean

#: format of model folders; raised when an older maclaurin would misread a newer folder
FORMAT_VERSION = 1


class MaclaurinConfig(PretrainedConfig):
    """A Llama-2 stack whose attention is a notation or catalogue name, or one per layer.

    A layer may have a different attention for each group of key-value heads (spec/head_groups.py):
    "0,2: exp/sum; 1: poly(0)+window(64,sinks=1,kept=256)/sum".
    """

    model_type = "maclaurin"
    keys_to_ignore_at_inference = ["past_key_values"]

    format_version: int = FORMAT_VERSION
    vocab_size: int = 4096
    hidden_size: int = 128
    intermediate_size: int = 344
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    #: instead of θ: the head_dim/2 frequencies of a pretrained model, and its scale on queries and keys
    rope_frequencies: list[float] | None = None
    rope_scale: float = 1.0
    #: None: as in each layer's catalogue entry; on if there is none
    rotary: bool | None = None
    rms_norm_eps: float = 1e-5
    #: options of other families with the same blocks: biases, and a norm of queries and keys
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    #: whether an offset, found by a conversion, is subtracted from the keys of every head
    key_offset: bool = False
    attention: str | list[str] = "exp/sum"
    #: attention for the first piece of a text in a cache, if not the same: "exp/sum" reads a prompt with full
    #: attention, and the cache keeps what `attention` keeps
    prompt_attention: str | None = None
    #: modules outside maclaurin that define parts of the attention; filled in when the model is saved
    imports: list[str] | None = None
    #: "scaled": normal of initializer_range, times 1/√(2·layers) if it writes to the residual stream;
    #: "torch": the defaults of nn.Linear and nn.Embedding, as in the paper's code
    initialization: str = "scaled"
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **more: Any) -> None:
        """Refuse configurations of a newer maclaurin."""
        if self.format_version > FORMAT_VERSION:
            raise InputError(
                f"this model has format {self.format_version}, but this maclaurin reads up to "
                f"{FORMAT_VERSION}: upgrade maclaurin."
            )
        super().__post_init__(**more)

    @classmethod
    def of_size(
        cls, size: Size, attention: str | list[str], vocab_size: int, **more: object
    ) -> MaclaurinConfig:
        """The configuration of one of the named sizes."""
        return cls(
            vocab_size=vocab_size,
            hidden_size=size.hidden,
            intermediate_size=size.ffn,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=size.length,
            attention=attention,
            **more,  # type: ignore[arg-type]
        )

    @property
    def kv_heads(self) -> int:
        """Key-value heads of a layer."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Size of a value, and of a key unless the layer's extras set another."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def layer_attention(self) -> list[LayerAttention]:
        """The attention of each layer."""
        texts = self.attention if isinstance(self.attention, list) else [self.attention]
        if len(texts) not in (1, self.num_hidden_layers):
            raise InputError(
                f"attention lists {len(texts)} specs for {self.num_hidden_layers} layers: give one for all "
                "layers, or one for each."
            )
        found = {text: self._layer(text) for text in texts}
        layers = texts * self.num_hidden_layers if len(texts) == 1 else texts
        return [found[text] for text in layers]

    def to_dict(self) -> dict[str, Any]:
        """The dict of transformers, with the modules that define the attention's parts."""
        texts = self.attention if isinstance(self.attention, list) else [self.attention]
        with contextlib.suppress(SpecError):  # if parts are not imported here, `imports` does not change
            specs = [spec for text in texts for spec in specs_in(text)]
            self.imports = [found.shown for found in extensions_of(specs)] or None
        return super().to_dict()

    def _layer(self, text: str) -> LayerAttention:
        """Parse a layer's attention; parts of installed packages are imported if needed, files are not."""
        try:
            return LayerAttention.read(text, self.kv_heads).with_rotary(self.rotary)
        except SpecError as problem:
            load_entry_points()
            with contextlib.suppress(SpecError):
                return LayerAttention.read(text, self.kv_heads).with_rotary(self.rotary)
            if not self.imports or not isinstance(
                problem, NotationError
            ):  # its heads are wrong, not its parts
                raise
            raise InputError(
                f"the attention {text} of this model has parts that are defined in "
                f"{', '.join(self.imports)}: import that first, or give --import {self.imports[0]} on the "
                f"command line.\n{problem}"
            ) from None


@final
@dataclass(frozen=True, slots=True)
class Size:
    """Width and depth of a Llama-2 stack; the vocabulary belongs to the tokenizer."""

    name: str
    hidden: int
    ffn: int
    heads: int
    layers: int
    length: int
    note: str = ""


SIZES = {
    size.name: size
    for size in (
        Size("pico", 64, 172, 2, 2, 128, "0.16M with a vocabulary of 512: seconds on one core"),
        Size("nano", 128, 344, 4, 4, 256, "about 1M with a small vocabulary, for a CPU"),
        Size("5m", 192, 512, 3, 4, 512, "4.9M at a vocabulary of 8192: the first of three for a ladder"),
        Size("micro", 256, 688, 4, 6, 512, "about 7M at a vocabulary of 4096"),
        Size("mini", 384, 1024, 6, 6, 512, "13.8M at a vocabulary of 4096; minutes on one GPU"),
        Size(
            "60m", 704, 1880, 11, 8, 512, "59.2M at a vocabulary of 8192: the last of that ladder, after mini"
        ),
        Size("small", 1024, 2048, 16, 20, 1024, "275M at a vocabulary of 32000, as in the paper"),
        Size("large", 3072, 6144, 16, 20, 1024, "2.08B at a vocabulary of 32000, as in the paper"),
    )
}


def size_named(name: str) -> Size:
    """The size of that name, or an error with the known ones."""
    if name not in SIZES:
        raise InputError(
            f"there is no size {name!r}; sizes are {', '.join(SIZES)}." + did_you_mean(name, list(SIZES))
        )
    return SIZES[name]
