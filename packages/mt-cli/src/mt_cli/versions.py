"""Versions of the installed distributions of mt and of its plugins."""

from __future__ import annotations

from mt_core.plugins import PluginHost


def distribution_versions(host: PluginHost) -> dict[str, str]:
    """Distribution -> version, for each that brings a plugin; mt's own first."""
    found = {plugin.distribution: plugin.version for plugin in host.plugins}
    return {name: found[name] for name in sorted(found, key=lambda name: (not name.startswith("mt-"), name))}


def version_lines(host: PluginHost) -> list[str]:
    versions = distribution_versions(host)
    width = max(map(len, versions), default=0)
    return [f"{name:<{width}}  {version}" for name, version in versions.items()]
