"""One modeling file for every spec: Llama-2 blocks around `AttentionLayer`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from maclaurin.layers.attention import AttentionLayer, ResidualLinear
from maclaurin.layers.convolution import ShortConvolution
from maclaurin.layers.gates import ForgetGateLayer, GateLinear, InputGateLayer, OutputGateLayer
from maclaurin.layers.layout import Layout
from maclaurin.models.configuration import MaclaurinConfig
from maclaurin.spec import AttentionSpec
from maclaurin.spec.extras import LayerExtras


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) ∘ W_up x)"""

    def __init__(self, config: MaclaurinConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = ResidualLinear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] → [..., hidden]."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class MaclaurinBlock(GradientCheckpointingLayer):
    """x + attention(norm x), then x + swiglu(norm x)."""

    def __init__(self, config: MaclaurinConfig, spec: AttentionSpec, extras: LayerExtras) -> None:
        super().__init__()
        head_size = config.head_dim or config.hidden_size // config.num_attention_heads
        self.self_attn = AttentionLayer(
            spec,
            extras,
            hidden_size=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_size=head_size,
            rope_theta=config.rope_theta,
        )
        self.mlp = SwiGLU(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, layout: Layout) -> Tensor:
        """[B, T, hidden] → [B, T, hidden]."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), layout)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class MaclaurinPreTrainedModel(PreTrainedModel):
    """Initialisation and what Hugging Face's tools want to know."""

    config_class = MaclaurinConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["MaclaurinBlock"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """See MaclaurinConfig.initialization; the gates' own biases come after it."""
        if isinstance(module, nn.Linear | nn.Embedding):
            self._init_matrix(module)
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, ShortConvolution | InputGateLayer | ForgetGateLayer | OutputGateLayer):
            module.reset()
        if isinstance(module, GateLinear):
            module.reset_bias()

    def _init_matrix(self, module: nn.Linear | nn.Embedding) -> None:
        if self.config.initialization == "torch":
            module.reset_parameters()
            return
        depth = 2 * self.config.num_hidden_layers if isinstance(module, ResidualLinear) else 1
        nn.init.normal_(module.weight, std=self.config.initializer_range / math.sqrt(depth))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class MaclaurinModel(MaclaurinPreTrainedModel):
    """Embedding, blocks, final norm."""

    def __init__(self, config: MaclaurinConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(MaclaurinBlock(config, *each) for each in config.layer_attention())
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        documents: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, hidden] of tokens [B, T]."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
        layout = Layout.of(position_ids, attention_mask, documents)
        for layer in self.layers:
            hidden = layer(hidden, layout)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class MaclaurinForCausalLM(MaclaurinPreTrainedModel, GenerationMixin):
    """The stack with a head that predicts the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MaclaurinConfig) -> None:
        super().__init__(config)
        self.model = MaclaurinModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **more: Any,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, vocabulary], and the loss where labels (the tokens themselves) are given."""
        hidden = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            documents=documents,
        ).last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **more)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
