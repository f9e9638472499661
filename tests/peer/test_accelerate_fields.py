"""The fields of MegatronLMPlugin are those of Accelerate's, as its own source has them."""

from __future__ import annotations

import ast

import pytest
from tests.peer.environment import installed_alone

from mt_accelerate import MegatronLMPlugin


@pytest.mark.peer
def test_every_field_of_accelerates_plugin_is_one_of_ours() -> None:
    source = installed_alone("accelerate>=1.15") / "accelerate" / "utils" / "dataclasses.py"
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    (plugin,) = [node for node in classes if node.name == "MegatronLMPlugin"]
    theirs = {
        node.target.id for node in plugin.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert theirs == set(MegatronLMPlugin.model_fields)
