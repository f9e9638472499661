"""What help texts name is there: commands, options, keys, presets, pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich import markup

from mt_cli.app import HELP, build_group
from mt_cli.config_fields import section_fields, section_names
from mt_core.config.sections import section_types
from mt_core.config.sources import installed_presets
from mt_core.plugins import PluginHost, load_plugins
from mt_core.specs import COMMANDS

ROOT = Path(__file__).parents[2]
WORDS = {"train": "train", "convert": "convert", "generate": "generate", "plan": "plan", "verify": "verify"}
"""A verb of the sentence above all commands -> the command that does it."""


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins()


@pytest.fixture(scope="module")
def tree(host: PluginHost) -> dict[str, Any]:
    """ "data preprocess" -> the command."""

    def walk(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        command = command.load() if hasattr(command, "load") else command
        yield name, command
        for part, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, f"{name} {part}".strip())

    return dict(walk(build_group(host), ""))


@pytest.fixture(scope="module")
def texts(tree: dict[str, Any], host: PluginHost) -> list[tuple[str, str]]:
    """(command, text) for each help text, its options' and its arguments' included, and for each key's."""
    found = [(name, command.help or "") for name, command in tree.items()]
    found += [(name, getattr(p, "help", None) or "") for name, command in tree.items() for p in command.params]
    found += [(spec.name, spec.doc) for spec in host[COMMANDS]]
    keys = [field for section in section_names(host) for field in section_fields(section, host)]
    return found + [("", field.doc) for field in keys]


def test_the_first_sentence_names_what_mt_does(tree: dict[str, Any]) -> None:
    verbs = re.findall(r"\b(\w+)(?:,| and\b|(?= large\b))", HELP.split(" large")[0] + ",")
    assert len(verbs) >= 3
    assert [verb for verb in map(str.lower, verbs) if WORDS.get(verb) not in tree] == []


@pytest.mark.slow
def test_commands_that_are_named_exist(texts: list[tuple[str, str]], tree: dict[str, Any]) -> None:
    missing = []
    for _, text in texts:
        for first, second in re.findall(r"\bmt ([a-z]+)(?: ([a-z-]+))?\b", text):
            group = tree.get(first)
            is_group = hasattr(group, "commands")
            if group is None or (is_group and second and f"{first} {second}" not in tree and second not in PROSE):
                missing.append(text)
    assert missing == []


PROSE = {"lists", "tells", "shows", "says", "and", "for", "or", "takes", "with"}
"""Words that follow the name of a group in a sentence."""


def test_options_that_are_named_exist(texts: list[tuple[str, str]], tree: dict[str, Any]) -> None:
    everywhere = {"--help"} | {
        option for command in tree.values() for p in command.params for option in (*p.opts, *p.secondary_opts)
    }
    foreign = {"--data-path", "--json-key"}  # Megatron's, named to be recognized
    for name, text in texts:
        own = {option for p in tree[name].params for option in (*p.opts, *p.secondary_opts)} if name else set()
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text):
            assert option in (own if own and " mt " not in f" {text}" else everywhere) | everywhere | foreign, text


@pytest.mark.slow
def test_keys_and_presets_that_are_named_exist(texts: list[tuple[str, str]], host: PluginHost) -> None:
    keys = {field.dotted for section in section_names(host) for field in section_fields(section, host)}
    keys |= {field.partition("[")[0] for field in keys} | set(section_names(host))
    presets, _ = installed_presets(host)
    sections = "|".join(section_types(load_plugins()))
    for _, text in texts:
        for key in re.findall(rf"(?<![\w./-])((?:{sections})\.[a-z_][a-z_.0-9]*[a-z0-9])(?![\w(/])", text):
            assert key in keys or key in FILES, (key, text)
        for preset in re.findall(r"--preset ([a-z][\w.-]*)", text):
            assert preset in presets, text


FILES = {"tokenizer.json", "tokenizer.model", "train.json", "train.toml", "section.key"}
"""Names of files that look like keys."""


def test_square_brackets_are_shown(tree: dict[str, Any]) -> None:
    """rich takes [name] for markup and leaves it out."""
    described = [one for command in tree.values() for one in (command, *command.params)]
    texts = [text for one in described if (text := getattr(one, "help", None)) and "[" in text]
    assert any("keys of \\[rl]" in text for text in texts)
    assert [text for text in texts if markup.render(text).plain != text.replace("\\[", "[")] == []


def test_pages_that_are_named_exist(texts: list[tuple[str, str]]) -> None:
    named = {page for _, text in texts for page in re.findall(r"\bdocs/[\w/-]+\.md", text)}
    assert named
    assert [page for page in sorted(named) if not (ROOT / page).exists()] == []
