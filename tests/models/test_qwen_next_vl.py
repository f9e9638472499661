"""Qwen3.5 with pictures against `transformers`: logits, loss, every gradient, maps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.qwen3_vl_reference import VISION
from tests.models.qwen_vl_reference import (
    IMAGE,
    LENGTH,
    VIDEO,
    VOCAB,
    as_reference_inputs,
    image_batch,
    texts_with_images,
)
from tests.models.test_qwen_next import prediction_tensors
from tests.models.vision_reference import (
    assert_same_training,
    built,
    config_from,
    from_reference,
    load_reference,
    randomize,
    written_like,
)

from mt_core.errors import ConfigError
from mt_core.nn.auxiliary import auxiliary_losses
from mt_core.nn.layout import parameter_layouts
from mt_models.qwen_next_vl.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": VOCAB, "hidden_size": 36, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 20, "intermediate_size": 28, "max_position_embeddings": 128, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention"] * 2, "rms_norm_eps": 1e-3,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 1], "partial_rotary_factor": 0.5,
    },
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
EXPERTS = {
    "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "shared_expert_intermediate_size": 10,
}  # fmt: skip


def make_reference(*, sparse: bool = False, tied: bool = False) -> Any:
    kind = "Moe" if sparse else ""
    vision = {key: value for key, value in VISION.items() if key != "deepstack_visual_indexes"}
    text = {key: value for key, value in TEXT.items() if not (sparse and key == "intermediate_size")}
    config = getattr(transformers, f"Qwen3_5{kind}Config")(
        vision_config=vision,
        text_config={**text, **(EXPERTS if sparse else {})},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=tied,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    return getattr(transformers, f"Qwen3_5{kind}ForConditionalGeneration")(config).float().eval()


def make_pair(host, **keys):
    reference = make_reference(**keys)
    randomize(reference)
    return from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH}), reference


@pytest.mark.parametrize("keys", [{}, {"tied": True}, {"sparse": True}], ids=["dense", "tied", "experts"])
def test_logits_loss_and_gradients_equal_the_reference(host, keys) -> None:
    """Three texts, with an image, with two, and without one."""
    model, reference = make_pair(host, **keys)
    tokens, (images, grids) = texts_with_images(), image_batch()
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    theirs = reference(**as_reference_inputs(tokens, images, grids), labels=labels)
    logits = model(tokens, images, image_grids=grids)
    assert_same_training((model, logits), (reference, theirs), labels, HUGGING_FACE)


def test_a_tower_whose_middle_states_are_used_is_refused(host) -> None:
    external = make_reference().config.to_dict()
    external["vision_config"]["deepstack_visual_indexes"] = [1]
    with pytest.raises(ConfigError, match=r"deepstack_visual_indexes=\[1\] is not supported"):
        HUGGING_FACE.read_config(external)


def test_decoding_equals_the_forward_pass(host) -> None:
    from tests.infer.decoding import cached_logits
    from tests.infer.test_qwen_vl import requested

    model, _ = make_pair(host)
    tokens, (images, grids) = texts_with_images(), image_batch()
    with torch.no_grad():
        whole = model(tokens, images, image_grids=grids)
    decoded = cached_logits(model, tokens, (3, 7, 20, 21, 22, 23, LENGTH), requested())
    torch.testing.assert_close(decoded, whole, atol=1e-4, rtol=1e-4)


# -- multi-token prediction --------------------------------------------------------------------------


def predicting_pair(host, **keys):
    """Our model with a prediction, a reference without, transformers' generic layer of prediction, and a file's
    tensors."""
    from transformers.modeling_layers import MtpLayer

    reference = make_reference(**keys)
    decoder = reference.model.language_model
    layer = MtpLayer(decoder.config, type(decoder.layers[1]), type(decoder.norm), 1)
    randomize(reference)
    randomize(layer)
    tensors = {**reference.state_dict(), **prediction_tensors(layer.state_dict())}
    external = HUGGING_FACE.held(reference.config.to_dict(), tensors)
    model = built(host, config_from(host, HUGGING_FACE.read_config(external), data={"seq_length": LENGTH}))
    load_reference(model, tensors, HUGGING_FACE)
    return model, reference, layer, tensors


def captured(module: torch.nn.Module) -> dict[str, Any]:
    """Keyword arguments of the module's next call, once it has been made."""
    arguments: dict[str, Any] = {}
    module.register_forward_pre_hook(lambda module, args, kwargs: arguments.update(kwargs), with_kwargs=True)
    return arguments


@pytest.mark.parametrize("keys", [{}, {"tied": True}, {"sparse": True}], ids=["dense", "tied", "experts"])
def test_prediction_embeds_the_images_ahead(host, keys) -> None:
    """Its loss and every gradient, of the vision transformer too, equal those of blocks of transformers that read the
    embeddings, features of images included, of the next position."""
    model, theirs, layer, tensors = predicting_pair(host, **keys)
    written = written_like(model, HUGGING_FACE, tensors)
    assert {name for name in tensors if name.startswith("mtp.")} <= set(written)
    assert all(torch.equal(written[name], tensors[name]) for name in written)
    assert HUGGING_FACE.write_config(model.config)["text_config"]["mtp_num_hidden_layers"] == 1
    tokens, (images, grids) = texts_with_images(), image_batch()
    labels = torch.randint(1, VIDEO, tokens.shape, generator=torch.Generator().manual_seed(7))
    mask = (tokens != IMAGE).float()
    arguments = captured(theirs.model.language_model)
    hidden = theirs.model(**as_reference_inputs(tokens, images, grids)).last_hidden_state
    places, embedded = arguments["position_ids"][-3:], arguments["inputs_embeds"]
    rotary = theirs.model.language_model.rotary_emb(hidden, places)
    causal = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    state = layer(F.pad(embedded[:, 1:], (0, 0, 0, 1)), hidden, rotary, causal, places[0], None)
    targets, counted = (F.pad(x[:, 1:], (0, 1)) for x in (labels, mask))
    losses = F.cross_entropy(theirs.lm_head(state).transpose(1, 2), targets, reduction="none")
    expected = 0.1 * (losses * counted).sum() / counted.sum()
    expected.backward()
    model.train()
    (loss,) = (loss for loss in auxiliary_losses(model) if loss.name == "mtp_1_loss")
    for other in auxiliary_losses(model):
        other.scale = float(other is loss)
    (0.0 * model(tokens, images, image_grids=grids, labels=labels, loss_mask=mask).sum()).backward()
    assert loss.take() == pytest.approx(expected.item(), rel=1e-5)
    gradients = {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in theirs.named_parameters()
    } | prediction_tensors({name: parameter.grad for name, parameter in layer.named_parameters()})
    layouts, parameters = parameter_layouts(model), dict(model.named_parameters())
    names = HUGGING_FACE.name_map(model.config).reading(gradients)
    for name, wanted in names.import_value(gradients.__getitem__):
        largest = wanted.abs().max().item()
        actual = layouts[name].to_canonical(parameters[name].grad)
        torch.testing.assert_close(actual, wanted, atol=5e-5 * largest + 1e-8, rtol=1e-3, msg=name)
    assert parameters["vision_projection.merger.linear_fc1.weight"].grad.abs().max() > 0
