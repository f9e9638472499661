"""`mt plugins`."""

from __future__ import annotations

import json

import pytest

from mt_cli import main
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.plugins import CORE_KINDS, Plugin, PluginHost, Problem
from mt_core.specs import LossSpec


def test_every_registration_has_its_owner(mt) -> None:
    outcome = mt("plugins")
    assert outcome.code == 0
    assert ["sdpa", "mt-core", "0.1.0", "torch's", "scaled_dot_product_attention"] in outcome.lines
    assert ["models", "mt-models", "0.1.0", "mt-core", "<0.2,>=0.1", "loaded"] in outcome.lines


def test_json_holds_the_same(mt) -> None:
    found = json.loads(mt("plugins", "--json").out)
    kinds = {kind.name for kind in CORE_KINDS} - {"sections"}
    assert kinds <= {entry["kind"] for entry in found["registrations"]}
    adam = {"kind": "optimizers", "name": "adam", "plugin": "core", "distribution": "mt-core", "version": "0.1.0"}
    assert any(adam.items() <= entry.items() for entry in found["registrations"])
    assert {plugin["name"] for plugin in found["plugins"]} >= {"core", "models", "data", "ckpt", "moe", "tools", "cli"}
    assert found["duplicates"] == []
    assert found["allow_list"] is None
    assert found["strict"] is False


def test_one_kind(mt) -> None:
    found = json.loads(mt("plugins", "--json", "--kind", "losses").out)
    assert {entry["kind"] for entry in found["registrations"]} == {"losses"}
    outcome = mt("plugins", "--kind", "loss")
    assert outcome.code == 2
    assert outcome.err.startswith("error: --kind loss: kinds are models, tokenizers")
    assert '(did you mean "losses"?)' in outcome.err


@pytest.fixture
def troubled(monkeypatch: pytest.MonkeyPatch) -> PluginHost:
    """One plugin that is missing, one that fails to register, two of one name, one left out."""
    host = PluginHost()
    missing = Problem("import", "ModuleNotFoundError: No module named 'cuda_things'")
    host.plugins.append(Plugin("gone", "gone.plugin", "dist-gone", "1.0", problems=[missing]))
    outside = Problem("allow-list", "not in MT_PLUGINS=a")
    host.plugins.append(Plugin("outside", "outside.plugin", "dist-outside", "1.0", problems=[outside]))
    loss = LossSpec(name="huber", doc="twice", build=Lazy("a:b"))
    for name, value in {"a": [loss], "b": [loss], "half": 3}.items():
        hook = staticmethod(hookimpl(lambda value=value: value))
        host.add(type("Module", (), {"mt_register_losses": hook}), Plugin(name, "m", f"dist-{name}", "2.0"))
    monkeypatch.setattr(main, "load_plugins", lambda **_: host)
    return host


def test_problems_are_shown_with_their_reason(mt, troubled: PluginHost) -> None:
    outcome = mt("plugins")
    assert outcome.code == 0
    assert "plugin \"gone\" (dist-gone 1.0), import: ModuleNotFoundError: No module named 'cuda_things'" in outcome.out
    assert 'plugin "half" (dist-half 2.0), register: mt_register_losses: must return a list' in outcome.out
    assert "losses: huber is registered by a and b; neither is used" in outcome.out
    states = {
        line[0]: " ".join(line[3:]) for line in outcome.lines if len(line) > 3 and line[1:2] == [f"dist-{line[0]}"]
    }
    assert states == {
        "gone": "missing",
        "outside": "left out by MT_PLUGINS",
        "a": "loaded",
        "b": "loaded",
        "half": "a part is missing",
    }


def test_problems_exit_1_when_strict(mt, troubled: PluginHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MT_PLUGINS_STRICT", "1")
    outcome = mt("plugins", "--json")
    assert outcome.code == 1
    found = json.loads(outcome.out)
    assert found["duplicates"] == [{"kind": "losses", "name": "huber", "plugins": ["a", "b"]}]
    problems = {plugin["name"]: plugin["problems"] for plugin in found["plugins"]}
    assert problems["gone"] == [{"stage": "import", "message": "ModuleNotFoundError: No module named 'cuda_things'"}]
