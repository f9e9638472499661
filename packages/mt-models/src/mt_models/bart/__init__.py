"""BART, mBART, Blenderbot: an encoder and a decoder with a table of positions each."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="bart",
    doc="BART, mBART, Blenderbot, Blenderbot-small: encoder and decoder with learned positions in each stack",
    config_type=Lazy("mt_models.bart.config:BartConfig"),
    build=Lazy("mt_models.bart.model:build_bart"),
    check=Lazy("mt_models.bart.config:check_bart"),
    presets=Lazy("mt_models.bart.config:PRESETS"),
    name_maps={"hf": Lazy("mt_models.bart.hugging_face:HUGGING_FACE")},
    training_flops=Lazy("mt_models.t5.config:training_flops"),
)
