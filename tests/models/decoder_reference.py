"""One decoder against `transformers`: logits, loss, every gradient, decoding and the maps, with one set of weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.infer.decoding import cached_logits, in_pieces
from torch import Tensor, nn

from mt_core.config.loading import load_config
from mt_core.config.schema import Config
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_core.specs import MODELS
from mt_models.hugging_face import HuggingFaceFamily, load_reference, to_reference

DECODERS = (
    *("gpt", "llama", "mistral", "qwen", "gemma", "phi3", "smollm3", "ministral3", "olmo", "exaone4", "seed_oss"),
    *("granite", "ernie4_5", "hunyuan", "lfm2", "lfm3", "gemma4"),
)


@dataclass
class Pair:
    """The same weights in both implementations."""

    ours: nn.Module
    theirs: nn.Module
    family: HuggingFaceFamily


def make_pair(host, reference: nn.Module, randomize, backend: str = "eager") -> Pair:
    """Randomize the reference, build ours from its configuration alone, and copy the weights through the name map."""
    reference = reference.float().eval()
    randomize(reference)
    external = reference.config.to_dict()
    family = family_of(host, external["model_type"])
    model = build_from(host, family.read_config(external), backend).eval()
    load_reference(model, reference.state_dict(), family)
    return Pair(model, reference, family)


def family_of(host, model_type: str) -> HuggingFaceFamily:
    families = [host[MODELS].get(name).name_maps["hf"].load() for name in DECODERS]
    (family,) = [family for family in families if model_type in family.model_types]
    return family


def build_from(host, keys: dict[str, Any], backend: str = "sdpa", device: str = "cpu") -> nn.Module:
    """The model of a [model] section. Raises ConfigError as a training run would."""
    common = [f"model.family={keys['family']}", "data.seq_length=4", "train.train_iters=1"]
    settings = [f"model.{key}={_toml(value)}" for key, value in keys.items() if key != "family"]
    chosen = [f"model.attention_backend={backend}"]
    config = load_config(overrides=[*common, *settings, *chosen], host=host).config
    ctx = ParallelContext(device=torch.device(device))
    return host[MODELS].get(keys["family"]).build.load()(config.model, ModelBuildContext(config, ctx, host))


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(entry)}' for key, entry in value.items())}}}"
    return json.dumps(value)


def random_tokens(vocab: int, length: int, batch: int = 2) -> Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(2))


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-4 at most and 1e-5 on average, in units of the largest value if that is above 1."""
    assert ours.shape == theirs.shape
    unit = max(1.0, theirs.abs().max().item())
    difference = (ours - theirs).abs()
    assert difference.max() < 1e-4 * unit
    assert difference.mean() < 1e-5 * unit


def assert_same_function(pair: Pair, tokens: Tensor) -> None:
    """Logits, loss and the gradient of every parameter."""
    logits = [pair.ours(tokens), pair.theirs(tokens).logits]
    assert_near(*logits)
    losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for x in logits]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    # The map is linear, but for what it adds to the weights of some norms: it carries gradients as it carries weights.
    spelling = pair.family.spelling
    gradients = {spelling(pair.ours.config, name): p.grad for name, p in pair.theirs.named_parameters()}
    # Those of buffers are compared with none.
    gradients |= {spelling(pair.ours.config, name): torch.zeros_like(x) for name, x in pair.theirs.named_buffers()}
    names = pair.family.name_map(pair.ours.config)
    added = dict(names.import_value(lambda name: torch.zeros_like(gradients[name])))
    expected = {name: value - added[name] for name, value in names.import_value(gradients.__getitem__)}
    layouts = parameter_layouts(pair.ours)
    for name, parameter in pair.ours.named_parameters():
        if not layouts[name].trained:
            assert parameter.grad is None, name
            continue
        largest = expected[name].abs().max().item()
        assert largest > 0, f"{name} has no effect in the reference"
        actual = layouts[name].to_canonical(parameter.grad)
        torch.testing.assert_close(actual, expected[name], atol=2e-5 * largest + 1e-7, rtol=1e-3, msg=name)


def assert_decoding_equals_forward(model: nn.Module, tokens: Tensor, atol: float = 5e-5) -> None:
    """In pieces of several tokens, then one by one."""
    length = tokens.shape[1]
    decoded = cached_logits(model, tokens, in_pieces(length, length // 3))
    torch.testing.assert_close(decoded, model(tokens), atol=atol, rtol=1e-4)


def assert_maps_round_trip(pair: Pair) -> None:
    """Tensors bit for bit, and a configuration from which the reference builds the same model."""
    back = to_reference(pair.ours, pair.family)
    state = pair.theirs.state_dict()
    theirs = {pair.family.spelling(pair.ours.config, name): tensor for name, tensor in state.items()}
    assert set(theirs) - set(back) <= set(pair.family.copies(pair.ours.config))
    for name, tensor in back.items():
        assert torch.equal(tensor, theirs[name]), name
    external = pair.family.write_config(pair.ours.config)
    # As a saved file has them, which is of no tokenizer: defaults may be beyond a small vocabulary.
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = type(pair.theirs.config).from_dict({**external, **ids}, attn_implementation="eager")
    again = type(pair.theirs)(config).eval()
    again.load_state_dict(state)
    tokens = random_tokens(pair.ours.config.vocab_size, 9)
    assert torch.equal(again(tokens).logits, pair.theirs(tokens).logits)
    assert pair.family.read_config(external) == pair.family.read_config(again.config.to_dict())


def without_kept_ids(section: dict[str, Any]) -> dict[str, Any]:
    """Keys of [model] that decide what is computed: classes add their default ids of tokens to a file without them."""
    return {key: value for key, value in section.items() if key != "kept_token_ids"}


def computed_keys(family: HuggingFaceFamily, external: dict[str, Any]) -> dict[str, Any]:
    return without_kept_ids(family.read_config(external))


def parameter_count(model: nn.Module) -> int:
    """Of canonical tensors: padding does not count."""
    return sum(torch.Size(layout.shape).numel() for layout in parameter_layouts(model).values())


def load(host, *overrides: str, preset: str | None = None) -> Config:
    return load_config(preset=preset, overrides=["train.train_iters=1", *overrides], host=host).config


def build_preset(host, preset: str, *overrides: str) -> nn.Module:
    """On the meta device."""
    config = load(host, *overrides, preset=preset)
    ctx = ParallelContext(device=torch.device("meta"))
    return host[MODELS].get(config.model.family).build.load()(config.model, ModelBuildContext(config, ctx, host))


def without_values(kind: type[nn.Module], config: Any) -> nn.Module:
    """A model of transformers on the meta device; to draw values there takes as long as to build it."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model = kind(config)
    model.tie_weights()
    return model


def assert_presets_match(host, family: str, published: dict[str, dict], config_type, model_type) -> None:
    """Every preset of a family has the parameter count of the reference built from the published shape."""
    assert set(host[MODELS].get(family).presets.load()) >= set(published)
    for preset, shape in published.items():
        reference = without_values(model_type, config_type(**shape))
        assert parameter_count(build_preset(host, preset)) == reference.num_parameters(), preset


def assert_same_training(pair: Pair, steps: int = 20) -> None:
    """The same batches and optimizer: losses agree at every step, and fall."""
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1) for model in (pair.ours, pair.theirs)
    ]
    history = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        # Sums of neighbours, so that there is something to learn.
        tokens = torch.randint(0, 3, (8, 17), generator=generator).cumsum(1) % pair.ours.config.vocab_size
        losses = []
        for logits in (pair.ours(tokens), pair.theirs(tokens).logits):
            losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()))
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        history.append([loss.item() for loss in losses])
    for step, (ours, theirs) in enumerate(history):
        assert ours == pytest.approx(theirs, abs=1e-4), f"step {step}"
    assert history[-1][0] < history[0][0] - 0.5
