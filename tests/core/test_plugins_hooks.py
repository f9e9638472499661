"""Every hook is documented, exercised, and every reference of mt's own plugins leads somewhere."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from mt_core import hookspecs, specs
from mt_core.errors import ConfigError
from mt_core.hookspecs import hookimpl
from mt_core.plugins import KINDS, Plugin, PluginHost, load_plugins
from mt_core.specs import Lazy

PLUGIN_GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "plugins.md"
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("mt_")}
HERE = Lazy(f"{__name__}:HOOKS")


def spec(type_: type[specs.Spec], **more: Any) -> specs.Spec:
    return type_(name="example", doc="of a test", **more)


EXAMPLES: Mapping[str, specs.Spec] = {
    "mt_register_models": spec(specs.ModelSpec, config_type=HERE, build=HERE, presets=HERE),
    "mt_register_tokenizers": spec(specs.TokenizerSpec, config_type=HERE, build=HERE),
    "mt_register_datasets": spec(specs.DatasetSpec, config_type=HERE, build=HERE, sample=()),
    "mt_register_checkpoint_loaders": spec(specs.CheckpointLoaderSpec, detect=HERE, open=HERE),
    "mt_register_checkpoint_savers": spec(specs.CheckpointSaverSpec, save=HERE),
    "mt_register_moe_dispatchers": spec(specs.MoeDispatcherSpec, config_type=HERE, build=HERE),
    "mt_register_feed_forwards": spec(specs.FeedForwardSpec, config_type=HERE, build=HERE),
    "mt_register_attention_backends": spec(specs.AttentionBackendSpec, supports=HERE, build=HERE),
    "mt_register_pipeline_schedules": spec(specs.PipelineScheduleSpec, schedule=HERE),
    "mt_register_context_parallel_methods": spec(specs.ContextParallelMethodSpec, build=HERE),
    "mt_register_optimizers": spec(specs.OptimizerSpec, config_type=HERE, build=HERE),
    "mt_register_lr_schedules": spec(specs.LRScheduleSpec, config_type=HERE, build=HERE),
    "mt_register_losses": spec(specs.LossSpec, build=HERE),
    "mt_register_callbacks": spec(specs.CallbackSpec, build=HERE),
    "mt_register_evaluators": spec(specs.EvaluatorSpec, build=HERE),
    "mt_register_text_scorers": spec(specs.TextScorerSpec, build=HERE),
    "mt_register_passage_retrievers": spec(specs.PassageRetrieverSpec, build=HERE),
    "mt_register_key_names": spec(specs.KeyNamesSpec, names=HERE),
    "mt_register_commands": spec(specs.CommandSpec, app=HERE),
}
"""A registration for each hook that registers; a new hook needs one here."""


def host_with(**hooks: Any) -> PluginHost:
    host = PluginHost(strict=True)
    module = types.SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})
    host.add(module, Plugin("example", "nowhere", "example-distribution", "1.0"))
    return host


def test_every_hook_is_exercised() -> None:
    assert set(HOOKS) == {*EXAMPLES, "mt_check_config"}
    assert {kind.hook for kind in KINDS.values()} == set(EXAMPLES)


@pytest.mark.parametrize("hook", EXAMPLES)
def test_a_hook_registers(hook: str) -> None:
    host = host_with(**{hook: lambda: [EXAMPLES[hook]]})
    (kind,) = [name for name, kind in KINDS.items() if kind.hook == hook]
    assert host.registry(kind).get("example") is EXAMPLES[hook]
    assert getattr(host, kind) is host.registry(kind)
    assert [(name, entry.names()) for name in KINDS if (entry := host.registry(name)).names()] == [(kind, ["example"])]


def test_mt_check_config() -> None:
    seen = []
    host = host_with(mt_check_config=lambda config: seen.append(config))
    config: Any = types.SimpleNamespace(model=types.SimpleNamespace(family="of nobody"))
    host.check_config(config)
    assert seen == [config]


def test_the_check_of_a_family_is_called_for_its_own_configurations() -> None:
    own = dataclasses.replace(EXAMPLES["mt_register_models"], check=Lazy(f"{__name__}:refuse"))
    host = host_with(mt_register_models=lambda: [own, dataclasses.replace(own, name="other", check=None)])
    host.check_config(types.SimpleNamespace(model=types.SimpleNamespace(family="other")))
    with pytest.raises(ConfigError, match="refused: example"):
        host.check_config(types.SimpleNamespace(model=types.SimpleNamespace(family="example")))


def refuse(config: Any) -> None:
    raise ConfigError(f"refused: {config.model.family}")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_documented(hook: str) -> None:
    assert len((inspect.getdoc(HOOKS[hook]) or "").split()) >= 3, "a hook needs a docstring"
    assert f"`{hook}" in PLUGIN_GUIDE.read_text(encoding="utf-8"), f"{hook} is missing in {PLUGIN_GUIDE.name}"


def lazy_references(value: Any) -> Iterator[Lazy[Any]]:
    if isinstance(value, Lazy):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from lazy_references(entry)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from lazy_references(getattr(value, field.name))


@pytest.fixture(scope="module")
def installed() -> PluginHost:
    return load_plugins()


@pytest.mark.parametrize("kind", KINDS)
def test_every_reference_of_an_installed_spec_resolves(installed: PluginHost, kind: str) -> None:
    for found in installed.registry(kind).registrations:
        assert found.spec.doc
        assert not found.spec.doc.endswith("."), f"{found.spec.name}: a doc is a phrase of a list"
        for reference in lazy_references(found.spec):
            assert reference.load() is not None, f"{found.plugin.label}: {reference}"


def test_mts_own_plugins_load_cleanly() -> None:
    host = load_plugins(strict=True)
    for kind in KINDS:
        host.registry(kind)
    names = {entry_point.name for entry_point in entry_points(group="mt")}
    assert {"core", "models", "data", "ckpt", "moe", "cli"} <= names
    assert {plugin.name for plugin in host.plugins if plugin.loaded} == names


def test_a_plugin_module_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from mt_core.plugins import KINDS, load_plugins; host = load_plugins();"
        "[host.registry(kind) for kind in KINDS]; assert not host.duplicates();"
        "print(*{'torch', 'numpy', 'pydantic', 'typer', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
