"""The plugin host: finds plugins through entry points, loads each one by itself, and keeps what they register.

`host[MODELS]` is the registry of a kind. All plugins are imported before the hooks of the first are checked, since a
kind may be declared by another plugin than those that register things of it.

A plugin that fails is recorded with its distribution, version, the stage and the error, and stops nobody
else. `MT_PLUGINS=a,b` loads only the plugins (entry-point names) in the list; an empty value loads none.
`MT_PLUGINS_STRICT=1` turns every problem into an error.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from importlib.metadata import Distribution, EntryPoint, distributions
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Generic, Literal

import pluggy

from mt_core import checkpoint_specs, hookspecs, specs
from mt_core.errors import MtError, PluginError, Problems, did_you_mean
from mt_core.kinds import HOOK_PREFIX, Kind, SpecT
from mt_core.specs import MODELS

ENTRY_POINT_GROUP = "mt"
ALLOW_LIST_VARIABLE = "MT_PLUGINS"
STRICT_VARIABLE = "MT_PLUGINS_STRICT"

log = logging.getLogger(__name__)
Stage = Literal["allow-list", "version", "import", "hooks", "register"]


CORE_KINDS: tuple[Kind[Any], ...] = tuple(
    value for module in (specs, checkpoint_specs) for value in vars(module).values() if isinstance(value, Kind)
)
"""The kinds of mt-core, in the order of their declarations."""


@dataclass
class Plugin:
    """One entry point of the group `mt`, loaded or not."""

    name: str
    module: str
    distribution: str
    version: str
    mt_core_range: str | None = None
    """The range of mt-core that its distribution requires; None when it states none."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences about registrations that nothing here uses."""
    loaded: bool = False

    @property
    def label(self) -> str:
        return f'plugin "{self.name}" ({self.distribution} {self.version})'


@dataclass(frozen=True)
class Candidate:
    """An entry point of the group `mt` that is installed, with what its distribution states."""

    entry_point: EntryPoint
    distribution: str
    version: str
    mt_core_range: str | None

    def plugin(self) -> Plugin:
        return Plugin(
            self.entry_point.name, self.entry_point.value, self.distribution, self.version, self.mt_core_range
        )


@dataclass(frozen=True)
class Problem:
    """Why a plugin, or a part of it, is missing."""

    stage: Stage
    message: str
    error: BaseException | None = None


@dataclass(frozen=True)
class Registration(Generic[SpecT]):
    """A spec and the plugin that brought it."""

    spec: SpecT
    plugin: Plugin


class Registry(Generic[SpecT]):
    """All registered things of one kind, by name."""

    def __init__(self, kind: Kind[SpecT], registrations: list[Registration[SpecT]]) -> None:
        self.kind = kind
        self.registrations = registrations

    def names(self) -> list[str]:
        return sorted({registration.spec.name for registration in self.registrations})

    def __iter__(self) -> Iterator[SpecT]:
        return iter([registration.spec for registration in self.registrations])

    def distinct(self) -> list[SpecT]:
        """Every spec, where all of them count without being named by a key.

        Raises PluginError for a name that more than one plugin registers.
        """
        return [self.get(spec.name) for spec in self]

    def owners(self, name: str) -> list[Plugin]:
        return [r.plugin for r in self.registrations if r.spec.name == name]

    def get(self, name: str, *, key: str | None = None, asker: str | None = None) -> SpecT:
        """The spec registered as `name`. `key` is the configuration key that names it; `asker` a key or an option that
        implies it.

        Raises PluginError when no plugin registers the name, or when more than one does.
        """
        matching = [r for r in self.registrations if r.spec.name == name]
        if len(matching) == 1:
            return matching[0].spec
        source = asker or (f"{key}={name}" if key else name)
        if not matching and (alias := self._by_alias(name, source)) is not None:
            return alias
        if matching:
            owners = " and ".join(r.plugin.label for r in matching)
            raise PluginError(
                f'{source}: {self.kind.title} named "{name}" is registered by {owners}; '
                f"keep one of them with {ALLOW_LIST_VARIABLE}, or uninstall the other"
            )
        raise PluginError(f'{source} needs {self.kind.title} named "{name}"; {self._missing(name)}')

    def _by_alias(self, name: str, source: str) -> SpecT | None:
        """The only spec with this alias, its name being logged; an error if there are two. source: what names it."""
        matching = [spec for spec in self if name in spec.aliases]
        if len(matching) == 1:
            log.warning("note: %s is called %s here", source, matching[0].name)
            return matching[0]
        if matching:
            raise PluginError(
                f"{source} is {' or '.join(sorted(spec.name for spec in matching))} here; name one of them"
            )
        return None

    def _missing(self, name: str) -> str:
        known = self.names()
        home = self.kind.homes.get(name, self.kind.home)
        if not known or name in self.kind.homes:
            return f"no installed plugin registers one (pip install {home})"
        return f"installed plugins register {', '.join(known)}{did_you_mean(name, known)}"


class PluginHost:
    """Loaded plugins and everything they registered. Made by `load_plugins`, and passed to what needs it."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.plugins: list[Plugin] = []
        self.unknown_names: list[str] = []
        """A sentence for each name of MT_PLUGINS that no installed plugin has."""
        self.kinds: dict[str, Kind[Any]] = {kind.name: kind for kind in CORE_KINDS}
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._collected: dict[str, Registry[Any]] = {}

    # -- loading --------------------------------------------------------------------------------

    @cached_property
    def _mt_core_version(self) -> str:
        return mt_core_version()

    def import_entry_point(self, entry_point: EntryPoint, plugin: Plugin) -> object | None:
        """The module of a plugin, whose kinds are known then; None, with the reason recorded, if it has none (an error
        if the host is strict)."""
        self.plugins.append(plugin)
        if reason := _version_conflict(plugin, self._mt_core_version):
            self._record(plugin, Problem("version", reason))
            return None
        try:
            module: object = entry_point.load()
        except (Exception, SystemExit) as error:  # a plugin may raise anything while it is imported
            self._record(plugin, Problem("import", f"{type(error).__name__}: {error}", error))
            return None
        self._declare_kinds(module, plugin)
        return module

    def _declare_kinds(self, module: object, plugin: Plugin) -> None:
        declare = getattr(module, hookspecs.mt_declare_kinds.__name__, None)
        if declare is None:
            return
        try:
            for kind in declare():
                owner = self.kinds.setdefault(kind.name, kind)
                if owner != kind:
                    raise PluginError(f"kind {kind.name} is declared already, for {owner.spec_type.__name__}")
        except Exception as error:
            self._record(plugin, Problem("hooks", f"{declare.__name__}: {error}", error))

    def add(self, module: object, plugin: Plugin) -> None:
        """Register the hook implementations of an imported plugin (also how tests add one)."""
        if plugin not in self.plugins:
            self.plugins.append(plugin)
            self._declare_kinds(module, plugin)
        try:
            self._require_known_hooks(module, plugin)
            self._manager.register(module, name=plugin.name)
        except Exception as error:
            # pluggy validates after it has added the plugin; a half-registered one would be called.
            if self._manager.get_plugin(plugin.name) is module:
                self._manager.unregister(name=plugin.name)
            self._record(plugin, Problem("hooks", str(error), error))
            return
        plugin.loaded = True

    def _require_known_hooks(self, module: object, plugin: Plugin) -> None:
        """Raises PluginError for an implementation of `mt_*` that resembles no hook, or takes what its hook has not.
        A hook of a kind that no plugin here declares is noted: the distribution that asks for it is not installed."""
        registering = {kind.hook for kind in self.kinds.values()}
        known = [*registering, hookspecs.mt_declare_kinds.__name__, hookspecs.mt_check_config.__name__]
        for name in _implemented_hooks(module):
            if name in registering and (taken := _required_arguments(getattr(module, name))):
                raise PluginError(f"{name} takes no arguments, and this takes {', '.join(taken)}")
            if name in known:
                continue
            kind = name.removeprefix(HOOK_PREFIX)
            # Without the prefix, by which all names of hooks resemble one another.
            if kind == name or did_you_mean(kind, self.kinds):
                raise PluginError(f"{name} is not a hook of mt{did_you_mean(name, known)}")
            plugin.notes.append(f"{name}: no installed plugin asks for {kind}")

    def skip(self, plugin: Plugin, reason: str) -> None:
        plugin.problems.append(Problem("allow-list", reason))
        self.plugins.append(plugin)

    def _record(self, plugin: Plugin, problem: Problem) -> None:
        plugin.problems.append(problem)
        if self.strict:
            raise PluginError(f"{plugin.label}, stage {problem.stage}: {problem.message}") from problem.error

    # -- what plugins registered ----------------------------------------------------------------

    def __getitem__(self, kind: Kind[SpecT]) -> Registry[SpecT]:
        """Everything of one kind, each with its plugin. Collected once, one plugin at a time."""
        if kind.name not in self._collected:
            self._collected[kind.name] = Registry(kind, self._collect(kind))
        return self._collected[kind.name]

    def registry(self, name: str) -> Registry[Any]:
        """Everything of the kind with this name, for code that cannot import the distribution that declares it.

        Raises PluginError for a kind that no installed plugin declares.
        """
        if name not in self.kinds:
            raise PluginError(f"no installed plugin declares the kind {name}{did_you_mean(name, self.kinds)}")
        return self[self.kinds[name]]

    def _collect(self, kind: Kind[SpecT]) -> list[Registration[SpecT]]:
        registrations = []
        # Not through pluggy's caller, which stops at the first implementation that raises.
        for plugin, function in self._implementations(kind.hook):
            try:
                returned = function()
                _check_specs(returned, kind)
            except Exception as error:
                self._record(plugin, Problem("register", f"{kind.hook}: {error}", error))
                continue
            registrations += [Registration(spec, plugin) for spec in returned]
        return registrations

    def _implementations(self, hook: str) -> list[tuple[Plugin, Callable[..., Any]]]:
        # Names of entry points are those under which plugins were registered.
        by_name = {plugin.name: plugin for plugin in self.plugins if plugin.loaded}
        # None: no plugin implements it.
        caller = getattr(self._manager.hook, hook, None)
        return [(by_name[impl.plugin_name], _taking(impl)) for impl in (caller.get_hookimpls() if caller else [])]

    def check_config(self, config: Any) -> None:
        """Call the checks of the model's family and of every plugin with the resolved configuration (a
        mt_core.config.Config); their errors are raised as one."""
        problems = Problems()
        family = config.model.family
        # An unknown family is reported elsewhere, with the names of the known ones.
        models = self[MODELS]
        check = models.get(family).check if models.owners(family) else None
        if check is not None:
            with problems.collect():
                check.load()(config)
        for plugin, function in self._implementations("mt_check_config"):
            with problems.collect():
                try:
                    function(config=config, host=self)
                except MtError:
                    raise
                except Exception as error:
                    raise PluginError(f"{plugin.label}, mt_check_config: {type(error).__name__}: {error}") from error
        problems.stop_if_any()

    # -- problems -------------------------------------------------------------------------------

    def require_known_names(self) -> None:
        """Raise PluginError if the allow-list names a plugin that is not installed."""
        for sentence in self.unknown_names:
            raise PluginError(sentence)

    def duplicates(self) -> list[tuple[str, str, list[Plugin]]]:
        """(kind, name, plugins) for each name that more than one plugin registers."""
        duplicates = []
        for kind in self.kinds:
            registry = self.registry(kind)
            for name in registry.names():
                owners = registry.owners(name)
                if len(owners) > 1:
                    duplicates.append((kind, name, owners))
        return duplicates


def _taking(implementation: pluggy.HookImpl) -> Callable[..., Any]:
    """The implementation, given those of the hook's arguments that it names."""

    def call(**arguments: Any) -> Any:
        return implementation.function(**{name: arguments[name] for name in implementation.argnames})

    return call


def load_plugins(
    *,
    allow: Iterable[str] | None = None,
    strict: bool | None = None,
    entry_points: Iterable[EntryPoint] | None = None,
) -> PluginHost:
    """Find and load all plugins.

    allow: entry-point names to load, default from MT_PLUGINS (unset: all). strict: raise PluginError at
    the first problem, default from MT_PLUGINS_STRICT. entry_points: those to use in place of the
    installed ones, for tests.

    Raises PluginError for a name in the list that no installed plugin has; with strict=False the host keeps it for
    `require_known_names`, so that `mt plugins` can show what is installed.
    """
    if allow is None and ALLOW_LIST_VARIABLE in os.environ:
        allow = [name.strip() for name in os.environ[ALLOW_LIST_VARIABLE].split(",") if name.strip()]
    # Before the environment is read: without MT_PLUGINS_STRICT unknown names are errors too, unless strict=False.
    checks_names = strict is not False
    if strict is None:
        strict = os.environ.get(STRICT_VARIABLE, "") not in ("", "0")
    host = PluginHost(strict=strict)
    allowed = None if allow is None else set(allow)
    candidates = _installed() if entry_points is None else [_describe(entry_point) for entry_point in entry_points]
    host.unknown_names = _unknown_names(allowed, candidates)
    if checks_names:
        host.require_known_names()
    modules: list[tuple[object | None, Plugin]] = []
    # Sorted, so that listings and messages do not depend on the order of directories on a disk.
    for candidate in sorted(candidates, key=lambda candidate: (candidate.entry_point.name, candidate.distribution)):
        plugin, entry_point = candidate.plugin(), candidate.entry_point
        if allowed is not None and plugin.name not in allowed:
            host.skip(plugin, f"not in {ALLOW_LIST_VARIABLE}={','.join(sorted(allowed))}")
        else:
            modules.append((host.import_entry_point(entry_point, plugin), plugin))
    # All kinds are known now, whichever plugin declares them.
    for module, plugin in modules:
        if module is not None:
            host.add(module, plugin)
    if strict:
        for kind, name, owners in host.duplicates():
            host.registry(kind).get(name)
            raise AssertionError(f"{kind} {name} has {len(owners)} owners")  # get() has raised
    return host


def _installed() -> list[Candidate]:
    """The entry points of the installed distributions. Of distributions with one name the first on sys.path counts, as
    for importlib.metadata. An entry_points.txt that is changed in place is read by the next process."""
    by_distribution: dict[str, list[Candidate]] = {}
    for folder in dict.fromkeys(map(os.path.abspath, sys.path)):
        for name, candidates in _read_folder(folder, _modification_time(folder)).items():
            # setdefault: the first folder of sys.path wins.
            by_distribution.setdefault(name, candidates)
    return [candidate for candidates in by_distribution.values() for candidate in candidates]


@lru_cache(maxsize=64)
def _read_folder(folder: str, modified: int) -> dict[str, list[Candidate]]:
    """Those of a folder of sys.path by the normalized name of their distribution; an empty list for one without any.
    modified: its time, so that it is read again after a change."""
    by_distribution: dict[str, list[Candidate]] = {}
    for distribution in distributions(path=[folder]):
        if candidates := [
            _describe(entry_point)
            for entry_point in distribution.entry_points
            if entry_point.group == ENTRY_POINT_GROUP
        ]:
            by_distribution.setdefault(_normalized(candidates[0].distribution), candidates)
    # A distribution without a plugin still hides another of its name further on in sys.path.
    for name in _distributions_in(folder):
        by_distribution.setdefault(name, [])
    return by_distribution


def _distributions_in(folder: str) -> list[str]:
    """Normalized names, from those of the metadata folders: to parse the metadata takes 100 times as long."""
    infos = (path for path in Path(folder).glob("*-info") if path.suffix in (".dist-info", ".egg-info"))
    return [_normalized(path.stem.partition("-")[0]) for path in infos]


def _normalized(name: str) -> str:
    # The normalization of PEP 503.
    return re.sub(r"[-_.]+", "-", name).lower()


def _modification_time(folder: str) -> int:
    """In nanoseconds, -1 for what does not exist. A distribution that is installed or removed changes it."""
    try:
        return Path(folder).stat().st_mtime_ns
    except OSError:
        return -1


def _unknown_names(allowed: set[str] | None, candidates: Iterable[Candidate]) -> list[str]:
    """A sentence for each name of the allow-list that no installed plugin has."""
    plugins = {candidate.entry_point.name: candidate.distribution for candidate in candidates}
    of_distributions = {distribution: name for name, distribution in plugins.items()}
    unknown = sorted((allowed or set()) - plugins.keys())
    return [_unknown_name(name, set(plugins), of_distributions.get(name)) for name in unknown]


def _unknown_name(name: str, known: set[str], meant: str | None) -> str:
    """meant: the plugin of the distribution of this name."""
    if meant is not None:
        return (
            f"{ALLOW_LIST_VARIABLE} names {name}, which is a distribution; its plugin is called {meant}: write the "
            f"names of entry points, of {', '.join(sorted(known))}"
        )
    return (
        f"{ALLOW_LIST_VARIABLE} names {name}, which is not installed; "
        f"installed plugins are {', '.join(sorted(known))}{did_you_mean(name, known)}"
    )


def _describe(entry_point: EntryPoint) -> Candidate:
    return Candidate(entry_point, *_read_metadata(entry_point.dist))


def _read_metadata(distribution: Distribution | None) -> tuple[str, str, str | None]:
    """Its name, its version, and the range of mt-core that it requires."""
    if distribution is None:
        return "unknown distribution", "?", None
    metadata = distribution.metadata  # parsed once: Distribution.name, .version and .requires each parse the file again
    requirements = metadata.get_all("Requires-Dist") or distribution.requires or []
    return metadata["Name"], metadata["Version"], _mt_core_range(requirements)


def _mt_core_range(requirements: Iterable[str]) -> str | None:
    """The version specifier of the mt-core requirement among these, as text."""
    for line in requirements:
        if not line.replace("_", "-").lower().startswith("mt-core"):
            continue
        from packaging.requirements import Requirement  # 15 ms, and most entry points need it only here

        requirement = Requirement(line)
        # Not a requirement under a marker, such as that of an extra.
        if requirement.name.replace("_", "-").lower() == "mt-core" and requirement.marker is None:
            return str(requirement.specifier) or None
    return None


def _version_conflict(plugin: Plugin, installed: str) -> str | None:
    """installed: the version of mt-core."""
    if plugin.mt_core_range is None:
        return None
    from packaging.specifiers import SpecifierSet

    # A development version of mt-core counts as in range.
    if SpecifierSet(plugin.mt_core_range).contains(installed, prereleases=True):
        return None
    return f"{plugin.distribution} {plugin.version} needs mt-core{plugin.mt_core_range}, installed is {installed}"


def mt_core_version() -> str:
    from importlib.metadata import version

    return version("mt-core")


def _implemented_hooks(module: object) -> list[str]:
    """Names of the functions that are marked as implementations of hooks of mt."""
    # pluggy's decorator sets this attribute, `<project>_impl`.
    return [name for name in dir(module) if getattr(getattr(module, name, None), f"{hookspecs.PROJECT}_impl", None)]


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    return [name for name, parameter in signature(function).parameters.items() if parameter.default is Parameter.empty]


def _check_specs(returned: object, kind: Kind[Any]) -> None:
    if not isinstance(returned, (list, tuple)):
        raise PluginError(f"must return a list of {kind.spec_type.__name__}, returned {type(returned).__name__}")
    for spec in returned:
        if not isinstance(spec, kind.spec_type):
            raise PluginError(f"must return {kind.spec_type.__name__} objects, one is {type(spec).__name__}")
