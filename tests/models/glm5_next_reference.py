"""GLM-5.3-Flash of `transformers` without its image tower: its decoder under an LM head of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.glm5_next import modeling_glm5_next as glm


class Glm5NextTextForCausalLM(glm.Glm5NextPreTrainedModel, GenerationMixin):
    """The same as Glm5NextForConditionalGeneration for text alone."""

    config_class = glm.Glm5NextTextConfig
    create_masks_for_generate = staticmethod(glm.Glm5NextForConditionalGeneration.create_masks_for_generate)

    def __init__(self, config: glm.Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = glm.Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **inputs: Any) -> MoeCausalLMOutputWithPast:
        known = {key: inputs.get(key) for key in ("attention_mask", "position_ids", "past_key_values", "use_cache")}
        asked = inputs.get("output_router_logits", False)
        outputs = self.model(input_ids, **known, output_router_logits=asked)
        sizes = (self.config.n_routed_experts, self.config.num_experts_per_tok)
        return MoeCausalLMOutputWithPast(
            logits=self.lm_head(outputs.last_hidden_state),
            past_key_values=outputs.past_key_values,
            aux_loss=glm.load_balancing_loss_func(outputs.router_logits, *sizes) if asked else None,
        )
