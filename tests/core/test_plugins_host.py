"""Plugins are found, loaded one by one, and a broken one is named and stops nobody else."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable
from importlib.metadata import EntryPoint, distributions, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mt_core.config.sections import section_types
from mt_core.errors import ConfigError, PluginError
from mt_core.nn.build_context import active_transforms
from mt_core.plugins import PluginHost, load_plugins
from mt_core.specs import CALLBACKS, FEED_FORWARDS, LOSSES, MODELS

GOOD = """
    from mt_core.hookspecs import hookimpl
    from mt_core.specs import Lazy, LossSpec

    @hookimpl
    def mt_register_losses():
        return [LossSpec(name="{name}", doc="of a test", build=Lazy("nowhere:build"))]
"""
Install = Callable[..., EntryPoint]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Writes a distribution with one plugin module on the path; returns its entry point, as installed ones are."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, code: str, *, version: str = "1.2.3", requires: str | None = None) -> EntryPoint:
        module = f"plugin_of_test_{tmp_path.name}_{name}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code))
        info = tmp_path / f"dist_{name}-{version}.dist-info"
        info.mkdir()
        requirement = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dist-{name}\nVersion: {version}\n{requirement}")
        (info / "entry_points.txt").write_text(f"[mt]\n{name} = {module}\n")
        found = [d for d in distributions(path=[str(tmp_path)]) if d.name == f"dist-{name}"]
        return next(iter(found[0].entry_points))

    return make


def load(*entry_points: EntryPoint, **options: object) -> PluginHost:
    return load_plugins(entry_points=entry_points, **options)  # type: ignore[arg-type]


def problem_of(host: PluginHost, name: str) -> tuple[str, str]:
    (plugin,) = [plugin for plugin in host.plugins if plugin.name == name]
    (problem,) = plugin.problems
    return problem.stage, problem.message


def test_a_registration_has_its_owner(install: Install) -> None:
    host = load(install("mine", GOOD.format(name="huber"), version="4.5", requires="mt-core>=0.1"))
    (registration,) = host[LOSSES].registrations
    assert registration.spec.name == "huber"
    plugin = registration.plugin
    assert (plugin.distribution, plugin.version, plugin.mt_core_range) == ("dist-mine", "4.5", ">=0.1")
    assert plugin.label == 'plugin "mine" (dist-mine 4.5)'
    assert plugin.loaded
    assert not plugin.problems


def test_plugins_are_found_that_are_installed_or_removed_while_the_process_runs(
    install: Install, tmp_path: Path
) -> None:
    def names() -> set[str]:
        return {plugin.name for plugin in load_plugins(allow=["late", "later"], strict=False).plugins}

    assert not names() & {"late", "later"}
    for name in ("late", "later"):
        install(name, GOOD.format(name=name))
        assert name in names()
    shutil.rmtree(tmp_path / "dist_late-1.2.3.dist-info")
    assert names() & {"late", "later"} == {"later"}


def test_the_first_distribution_of_a_name_counts_with_or_without_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for importlib.metadata, which takes Same_Name and same.name for one."""

    def write(folder: str, name: str, entry_points: str) -> None:
        info = tmp_path / folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)

    write("near", "Same_Name", "[mt]\nsame = json\n")
    write("near", "hidden", "[console_scripts]\nhidden = json:loads\n")
    for name in ("same.name", "hidden", "other"):
        write("far", name, f"[mt]\n{name[:4]} = os\n")
    for folder in ("far", "near"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    names = {"same", "hidd", "othe"}
    found = {plugin.name: plugin.module for plugin in load_plugins(allow=[], strict=False).plugins}
    expected = {point.name: point.value for point in entry_points(group="mt") if point.name in names}
    assert {name: found[name] for name in names & found.keys()} == expected == {"same": "json", "othe": "os"}


def test_the_working_directory_on_the_path_is_the_present_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("")
    for name in ("one", "two"):
        info = tmp_path / name / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[mt]\nhere-{name} = json\n")
        os.utime(tmp_path / name, ns=(0, 0))  # as after a copy that keeps times
        monkeypatch.chdir(tmp_path / name)
        found = {plugin.name for plugin in load_plugins(allow=[], strict=False).plugins}
        assert {plugin for plugin in found if plugin.startswith("here-")} == {f"here-{name}"}


@pytest.mark.parametrize(
    ("stage", "code", "says"),
    [
        ("import", "import a_module_that_is_not_there", "ModuleNotFoundError: No module named"),
        ("import", "1 / 0", "ZeroDivisionError: division by zero"),
        ("import", "def broken(:", "SyntaxError"),
        (
            "hooks",
            "from mt_core.hookspecs import hookimpl\n@hookimpl\ndef mt_register_model(): return []",
            'mt_register_model is not a hook of mt (did you mean "mt_register_models"?)',
        ),
        (
            "hooks",
            "from mt_core.hookspecs import hookimpl\n@hookimpl\ndef mt_register_losses(surprise): return []",
            "surprise",
        ),
        (
            "register",
            "from mt_core.hookspecs import hookimpl\n@hookimpl\ndef mt_register_losses(): raise RuntimeError('no GPU')",
            "mt_register_losses: no GPU",
        ),
        (
            "register",
            "from mt_core.hookspecs import hookimpl\n@hookimpl\ndef mt_register_losses(): return 'huber'",
            "must return a list of LossSpec, returned str",
        ),
        (
            "register",
            "from mt_core.hookspecs import hookimpl\n@hookimpl\ndef mt_register_losses(): pass",
            "must return a list of LossSpec, returned NoneType",
        ),
        (
            "register",
            "from mt_core.hookspecs import hookimpl\nfrom mt_core.specs import CommandSpec, Lazy\n"
            "@hookimpl\ndef mt_register_losses(): return [CommandSpec(name='x', doc='', app=Lazy('a:b'))]",
            "must return LossSpec objects, one is CommandSpec",
        ),
    ],
)
def test_a_broken_plugin_stops_nobody_else(install: Install, stage: str, code: str, says: str) -> None:
    broken, good = install("broken", code), install("zz-good", GOOD.format(name="huber"))
    host = load(broken, good)
    assert host[LOSSES].names() == ["huber"]
    assert problem_of(host, "broken")[0] == stage
    assert says in problem_of(host, "broken")[1]

    with pytest.raises(PluginError, match=r'plugin "broken" \(dist-broken 1\.2\.3\)') as strict:
        _ = load(broken, strict=True)[LOSSES]
    assert f"stage {stage}" in str(strict.value)
    assert says in str(strict.value)


def test_a_part_that_fails_leaves_the_other_parts(install: Install) -> None:
    code = GOOD.format(name="huber") + "\n    @hookimpl\n    def mt_register_callbacks(): raise OSError('disk')\n"
    host = load(install("half", code))
    assert host[CALLBACKS].names() == []
    assert host[LOSSES].names() == ["huber"]
    assert problem_of(host, "half") == ("register", "mt_register_callbacks: disk")


def test_a_plugin_of_another_mt_core_is_not_imported(install: Install) -> None:
    entry_point = install("old", "raise SystemExit('imported')", requires="mt-core<0.1,>=0.0.1")
    stage, message = problem_of(load(entry_point), "old")
    assert stage == "version"
    assert message.startswith("dist-old 1.2.3 needs mt-core<0.1,>=0.0.1, installed is 0.")
    with pytest.raises(PluginError, match="stage version"):
        load(entry_point, strict=True)


@pytest.mark.parametrize("requires", ["mt-core>=0.1", "mt_core[train] >=0.1,<100", "mt-core", "mt-core-extras>99"])
def test_a_fitting_range_loads(install: Install, requires: str) -> None:
    assert load(install("fits", GOOD.format(name="huber"), requires=requires))[LOSSES].names() == ["huber"]


def test_one_name_from_two_plugins_names_both(install: Install) -> None:
    host = load(install("a", GOOD.format(name="huber")), install("b", GOOD.format(name="huber"), version="2.0"))
    with pytest.raises(PluginError) as error:
        host[LOSSES].get("huber", key="train.loss")
    message = str(error.value)
    assert message.startswith('train.loss=huber: a loss named "huber" is registered by ')
    assert 'plugin "a" (dist-a 1.2.3) and plugin "b" (dist-b 2.0)' in message
    assert "MT_PLUGINS" in message
    ((kind, name, owners),) = host.duplicates()
    assert (kind, name, [owner.name for owner in owners]) == ("losses", "huber", ["a", "b"])


def test_specs_that_count_without_being_named_have_one_owner(install: Install) -> None:
    """With two evaluators of one name both would run, and of two sections one would silently replace the other."""
    host = load(install("a", GOOD.format(name="huber")), install("b", GOOD.format(name="huber")))
    with pytest.raises(PluginError, match=r'huber: a loss named "huber" is registered by plugin "a"'):
        host[LOSSES].distinct()
    assert [spec.name for spec in load(install("c", GOOD.format(name="focal")))[LOSSES].distinct()] == ["focal"]


def test_two_transforms_of_one_name_are_refused_where_one_is_turned_on(install: Install) -> None:
    code = """
        from mt_core import Lazy, ModelTransformSpec, hookimpl

        @hookimpl
        def mt_register_model_transforms():
            applies = Lazy("{applies}")
            return [ModelTransformSpec(name="freeze", doc="of a test", applies=applies, transform=Lazy("nowhere:f"))]
    """
    on, off = code.format(applies="operator:truth"), code.format(applies="operator:not_")
    with pytest.raises(PluginError, match='a model transform named "freeze" is registered by'):
        active_transforms(cast(Any, "a configuration"), load(install("a", on), install("b", off)))
    assert active_transforms(cast(Any, "a configuration"), load(install("d", off), install("e", off))) == []


def test_a_plugin_cannot_replace_a_section_of_mt_core(install: Install) -> None:
    code = """
        from mt_core import Lazy, SectionSpec, hookimpl

        @hookimpl
        def mt_register_sections():
            return [SectionSpec(name="train", doc="of a test", config_type=Lazy("mt_core.config.fields:Section"))]
    """
    with pytest.raises(PluginError, match=r'\[train\] is a section of mt-core, and plugin "a" .* rename it'):
        section_types(load(install("a", code)))


def test_duplicates_are_fatal_when_strict(install: Install) -> None:
    pair = [install("a", GOOD.format(name="huber")), install("b", GOOD.format(name="huber"))]
    with pytest.raises(PluginError, match=r'plugin "a".* and plugin "b"'):
        load(*pair, strict=True)


def test_the_allow_list_leaves_the_others_unimported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_points = [install("a", GOOD.format(name="huber")), install("b", "raise SystemExit('imported')")]
    monkeypatch.setenv("MT_PLUGINS", " a,")
    host = load(*entry_points)
    assert host[LOSSES].names() == ["huber"]
    assert problem_of(host, "b") == ("allow-list", "not in MT_PLUGINS=a")
    monkeypatch.setenv("MT_PLUGINS", "")
    assert load(*entry_points)[LOSSES].names() == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("alhpa", r'names alhpa, which is not installed.*did you mean "alpha"'),
        ("dist-alpha", r"names dist-alpha, which is a distribution; its plugin is called alpha:"),
    ],
)
def test_an_allow_list_with_a_typing_error_is_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    entry_points = [install("alpha", GOOD.format(name="huber"))]
    monkeypatch.setenv("MT_PLUGINS", name)
    for strict in (None, True):
        with pytest.raises(PluginError, match=words):
            load_plugins(entry_points=entry_points, strict=strict)
    tolerant = load_plugins(entry_points=entry_points, strict=False)
    with pytest.raises(PluginError, match=words):
        tolerant.require_known_names()


def test_strictness_comes_from_the_environment(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = install("broken", "1 / 0")
    for value, strict in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("MT_PLUGINS_STRICT", value)
        if strict:
            with pytest.raises(PluginError, match="ZeroDivisionError"):
                load(broken)
        else:
            assert problem_of(load(broken), "broken")[0] == "import"


def test_a_missing_name_says_what_there_is(install: Install) -> None:
    host = load(install("a", GOOD.format(name="huber")))
    with pytest.raises(
        PluginError, match=r'train\.loss=huber2 needs a loss .*register huber \(did you mean "huber"\?\)'
    ):
        host[LOSSES].get("huber2", key="train.loss")
    with pytest.raises(PluginError, match=r'needs a feed-forward named "moe"; .*pip install mt-moe'):
        host[FEED_FORWARDS].get("moe")
    with pytest.raises(PluginError, match="no installed plugin registers one .pip install mt-models"):
        host[MODELS].get("gpt", key="model.family")


def test_check_config_lets_a_plugin_object(install: Install) -> None:
    check = """
        from mt_core.errors import ConfigError
        from mt_core.hookspecs import hookimpl

        @hookimpl
        def mt_check_config(config):
            {statement}
    """
    config = SimpleNamespace(model=SimpleNamespace(family="of nobody"))
    refuses = load(install("refuses", check.format(statement="raise ConfigError(f'not with {config.model.family}')")))
    with pytest.raises(ConfigError, match="not with of nobody"):
        refuses.check_config(config)
    fails = load(install("fails", check.format(statement="config.no_such_section")))
    with pytest.raises(PluginError, match=r'plugin "fails" .*mt_check_config: AttributeError'):
        fails.check_config(config)
    load(install("agrees", check.format(statement="pass"))).check_config(config)


def test_the_order_of_plugins_does_not_depend_on_the_disk(install: Install) -> None:
    entry_points = [install(name, GOOD.format(name=f"loss-{name}")) for name in ("c", "a", "b")]
    assert [p.name for p in load(*entry_points).plugins] == [p.name for p in load(*entry_points[::-1]).plugins]
