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

from mt_core import checkpoint_specs, hookspecs, specs
from mt_core.errors import ConfigError, PluginError
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Kind, Lazy, Spec
from mt_core.plugins import CORE_KINDS, Plugin, PluginHost, load_plugins

PLUGIN_GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "plugins.md"
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("mt_")}
HERE = Lazy(f"{__name__}:HOOKS")


def spec(type_: type[specs.Spec], **more: Any) -> specs.Spec:
    return type_(name="example", doc="of a test", **more)


EXAMPLES: Mapping[str, specs.Spec] = {
    "mt_register_models": spec(specs.ModelSpec, config_type=HERE, build=HERE, presets=HERE),
    "mt_register_tokenizers": spec(specs.TokenizerSpec, config_type=HERE, build=HERE),
    "mt_register_datasets": spec(specs.DatasetSpec, config_type=HERE, build=HERE, sample=()),
    "mt_register_checkpoint_loaders": spec(checkpoint_specs.CheckpointLoaderSpec, detect=HERE, open=HERE),
    "mt_register_checkpoint_savers": spec(checkpoint_specs.CheckpointSaverSpec, save=HERE),
    "mt_register_moe_dispatchers": spec(specs.MoeDispatcherSpec, config_type=HERE, build=HERE),
    "mt_register_feed_forwards": spec(specs.FeedForwardSpec, config_type=HERE, build=HERE),
    "mt_register_attention_backends": spec(specs.AttentionBackendSpec, supports=HERE, build=HERE),
    "mt_register_pipeline_schedules": spec(specs.PipelineScheduleSpec, schedule=HERE),
    "mt_register_context_parallel_methods": spec(specs.ContextParallelMethodSpec, build=HERE),
    "mt_register_optimizers": spec(specs.OptimizerSpec, config_type=HERE, build=HERE),
    "mt_register_lr_schedules": spec(specs.LRScheduleSpec, config_type=HERE, build=HERE),
    "mt_register_losses": spec(specs.LossSpec, build=HERE),
    "mt_register_batch_sources": spec(specs.BatchSourceSpec, build=HERE),
    "mt_register_callbacks": spec(specs.CallbackSpec, build=HERE),
    "mt_register_run_requests": spec(specs.RunRequestSpec, answer=HERE),
    "mt_register_evaluators": spec(specs.EvaluatorSpec, build=HERE),
    "mt_register_model_transforms": spec(specs.ModelTransformSpec, applies=HERE, transform=HERE),
    "mt_register_sections": spec(specs.SectionSpec, config_type=HERE),
    "mt_register_commands": spec(specs.CommandSpec, app=HERE),
}
"""A registration for each hook that registers; a new hook needs one here."""


def host_with(**hooks: Any) -> PluginHost:
    host = PluginHost(strict=True)
    module = types.SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})
    host.add(module, Plugin("example", "nowhere", "example-distribution", "1.0"))
    return host


def test_every_hook_is_exercised() -> None:
    assert set(HOOKS) == {"mt_declare_kinds", "mt_check_config"}
    assert {kind.hook for kind in CORE_KINDS} == set(EXAMPLES)


@pytest.mark.parametrize("hook", EXAMPLES)
def test_a_hook_registers(hook: str) -> None:
    host = host_with(**{hook: lambda: [EXAMPLES[hook]]})
    (kind,) = [kind for kind in CORE_KINDS if kind.hook == hook]
    assert host[kind].get("example") is EXAMPLES[hook]
    assert host.registry(kind.name) is host[kind]
    assert [(other.name, host[other].names()) for other in CORE_KINDS if host[other].names()] == [
        (kind.name, ["example"])
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlavourSpec(Spec):
    """A flavour, selected by nobody."""


FLAVOURS = Kind("flavours", "a flavour", FlavourSpec, "nowhere")


def test_a_distribution_declares_a_kind_and_others_register_things_of_it() -> None:
    host = PluginHost(strict=True)
    sweet = FlavourSpec(name="sweet", doc="of a test")
    asks = types.SimpleNamespace(mt_declare_kinds=hookimpl(lambda: [FLAVOURS]))
    host.add(asks, Plugin("asks", "nowhere", "one", "1.0"))
    host.add(
        types.SimpleNamespace(mt_register_flavours=hookimpl(lambda: [sweet])), Plugin("has", "nowhere", "two", "1.0")
    )
    assert host.registry("flavours") is host[FLAVOURS]
    assert host[FLAVOURS].get("sweet") is sweet
    assert all(not plugin.notes for plugin in host.plugins)
    second = types.SimpleNamespace(mt_declare_kinds=hookimpl(lambda: [dataclasses.replace(FLAVOURS, title="another")]))
    with pytest.raises(PluginError, match="flavours is declared already"):
        host.add(second, Plugin("third", "nowhere", "three", "1.0"))


def test_a_thing_that_nothing_here_asks_for_is_noted() -> None:
    host = host_with(mt_register_flavours=lambda: [FlavourSpec(name="sweet", doc="of a test")])
    (plugin,) = host.plugins
    assert plugin.loaded
    assert plugin.notes == ["mt_register_flavours: no installed plugin asks for flavours"]
    with pytest.raises(PluginError, match="no installed plugin declares the kind flavours"):
        host.registry("flavours")


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


DOCUMENTED = {
    **{name: inspect.getdoc(hook) for name, hook in HOOKS.items()},
    **{kind.hook: inspect.getdoc(kind.spec_type) for kind in load_plugins().kinds.values()},
}
"""Each hook with what documents it: its own docstring, or that of the specs that it registers."""


@pytest.mark.parametrize("hook", DOCUMENTED)
def test_a_hook_is_documented(hook: str) -> None:
    assert len((DOCUMENTED[hook] or "").split()) >= 3, "a hook needs a docstring"
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


@pytest.mark.parametrize("kind", load_plugins().kinds)
def test_every_reference_of_an_installed_spec_resolves(installed: PluginHost, kind: str) -> None:
    for found in installed.registry(kind).registrations:
        assert found.spec.doc
        assert not found.spec.doc.endswith("."), f"{found.spec.name}: a doc is a phrase of a list"
        for reference in lazy_references(found.spec):
            assert reference.load() is not None, f"{found.plugin.label}: {reference}"


def test_mts_own_plugins_load_cleanly() -> None:
    host = load_plugins(strict=True)
    for kind in host.kinds:
        host.registry(kind)
    names = {entry_point.name for entry_point in entry_points(group="mt")}
    assert {"core", "models", "data", "ckpt", "moe", "cli"} <= names
    assert {plugin.name for plugin in host.plugins if plugin.loaded} == names


def test_a_plugin_module_imports_nothing_heavy() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from mt_core.plugins import load_plugins; host = load_plugins();"
        "[host.registry(kind) for kind in host.kinds]; assert not host.duplicates();"
        "print(*{'torch', 'numpy', 'pydantic', 'typer', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
