"""Nothing in a pickle is executed: what it may not refer to is refused and named, with the file."""

from __future__ import annotations

import argparse
import collections
import functools
import io
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mt_ckpt.pickles.inert_objects import Inert, plain
from mt_ckpt.pickles.torch_file import StoredTensor, open_torch_file
from mt_ckpt.pickles.unpickler import SafeUnpickler
from mt_core.errors import CheckpointError


class Reduces:
    """Pickles as a call."""

    def __init__(self, *call) -> None:
        self.call = call

    def __reduce__(self):
        return self.call


def load(data: bytes):
    return SafeUnpickler(io.BytesIO(data), "some.pt").load()


def touch(path: Path) -> str:
    return f"open({str(path)!r}, 'w').close()"


def attacks(path: Path) -> dict[str, object]:
    """Each would make the file `path`."""
    import builtins

    return {
        "posix.system": Reduces(os.system, (f"touch {path}",)),
        "builtins.eval": Reduces(eval, (touch(path),)),
        "builtins.exec": Reduces(exec, (touch(path),)),
        "subprocess.Popen": Reduces(subprocess.Popen, (["touch", str(path)],)),
        "builtins.open": Reduces(open, (str(path), "w")),
        "torch.load": Reduces(torch.load, (str(path),)),
        "torch.hub.load": Reduces(torch.hub.load, ("a/b", "c")),
        "torch.storage._load_from_bytes": Reduces(torch.storage._load_from_bytes, (b"",)),
        "builtins.__import__": Reduces(builtins.__import__, ("os",)),
        "operator.attrgetter": Reduces(__import__("operator").attrgetter, ("system",)),
        "runpy._run_code": Reduces(__import__("runpy")._run_code, (touch(path), {})),
        "numpy.load": Reduces(np.load, (str(path),)),
        "importlib.import_module": Reduces(__import__("importlib").import_module, ("os",)),
        "mt_core.kinds.Lazy": __import__("mt_core.specs").specs.Lazy("os:system"),
    }


@pytest.mark.parametrize("name", attacks(Path("x")))
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_call_is_refused_and_named(name, protocol, tmp_path) -> None:
    marker, leaf = tmp_path / "executed", name.rpartition(".")[2]  # protocols below 3 write Python 2's module names
    with pytest.raises(CheckpointError, match=rf"some\.pt: refused, nothing in it was executed: it refers to .*{leaf}"):
        load(pickle.dumps({"args": attacks(marker)[name]}, protocol))
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"(S'true'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'true'\no.",  # OBJ
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",  # STACK_GLOBAL
        b"cbuiltins\ngetattr\n(cbuiltins\n__import__\nS'x'\ntR.",
        b"c__builtin__\neval\n(S'1'\ntR.",
        b"cposixpath\nos\n.",
    ],
)
def test_every_opcode_that_names_something_is_watched(data) -> None:
    with pytest.raises(CheckpointError, match="refused, nothing in it was executed"):
        load(data)


def test_attributes_are_not_followed() -> None:
    """getattr is what Python 3.11 writes for members of enumerations; it does not lead from one object to another."""
    chain = Reduces(getattr, (Reduces(getattr, (argparse.Namespace, "__init__")), "__globals__"))
    with pytest.raises(CheckpointError, match="refused.*it takes the attribute '__globals__'"):
        load(pickle.dumps(chain))
    with pytest.raises(CheckpointError, match="refused.*it takes the attribute '__class__'"):
        load(pickle.dumps(Reduces(getattr, ("text", "__class__"))))


def test_a_refused_file_is_named_and_nothing_of_it_stays(tmp_path) -> None:
    torch.save({"model": {"a": torch.ones(2)}, "args": Reduces(os.system, ("true",))}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=r"bad\.pt: refused, .* it refers to posix.system"):
        open_torch_file(tmp_path / "bad.pt")


def test_classes_are_the_pickles_own() -> None:
    """State put onto a class, not an object, reaches neither another pickle nor the real class."""
    with pytest.raises(CheckpointError):
        load(b"cargparse\nNamespace\n(N}S'format_help'\nI1\nstb.")
    assert callable(argparse.Namespace.__repr__)
    assert not hasattr(argparse.Namespace, "format_help")
    assert not hasattr(Inert, "format_help")
    assert isinstance(load(pickle.dumps(argparse.Namespace(a=1), 2)), Inert)


def foreign_module() -> ModuleType:
    """A package that is not installed, with an enumeration and a class of arguments, as Megatron's are."""
    module = ModuleType("megatron.core.transformer.enums")

    class AttnBackend(Enum):
        auto = 5

    class Config:
        def __init__(self) -> None:
            self.width = 3

    for kind in (AttnBackend, Config):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    return module


@pytest.fixture
def foreign(monkeypatch) -> ModuleType:
    module = foreign_module()
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", ModuleType("megatron.core"))
    monkeypatch.setitem(sys.modules, "megatron.core.transformer", ModuleType("megatron.core.transformer"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("protocol", [2, 4])
def test_megatrons_classes_become_stand_ins(foreign, protocol) -> None:
    value = argparse.Namespace(
        backend=foreign.AttnBackend.auto,
        config=foreign.Config(),
        signal=signal.SIGTERM,
        dtype=torch.bfloat16,
        size=torch.Size([2, 3]),
        random=np.arange(3),
        table=collections.OrderedDict(a=1),
        chosen={1, 2},
        partial=functools.partial(foreign.Config),
    )
    data = pickle.dumps(value, protocol)
    sys.modules.pop(foreign.__name__)
    found = load(data).attributes
    assert found["backend"].arguments in ((5,), ("auto",))
    assert found["config"].attributes == {"width": 3}
    assert found["dtype"] is torch.bfloat16
    assert found["size"] == (2, 3)
    assert found["table"] == {"a": 1}
    assert found["chosen"] == {1, 2}
    assert "AttnBackend" in plain(found)["backend"]
    assert plain(found)["dtype"] == "torch.bfloat16"


def test_a_damaged_pickle_is_an_error_of_ours() -> None:
    whole = pickle.dumps({"a": [1, 2, 3] * 50})
    for end in range(1, len(whole), 7):
        with pytest.raises(CheckpointError, match=r"some\.pt: damaged"):
            load(whole[:end])


def test_tensors_that_reach_outside_their_storage_are_refused(tmp_path) -> None:
    file = tmp_path / "a.pt"
    torch.save({"a": torch.arange(10.0)}, file)
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    for old, new in ((b"K\n\x85", b"K\x0b\x85"), (b"QK\x00K\n", b"QK\x05K\n")):
        changed = {name: data.replace(old, new) if name.endswith(".pkl") else data for name, data in members.items()}
        assert changed != members
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in changed.items():
                archive.writestr(name, data)
        with pytest.raises(CheckpointError, match="damaged: a tensor reaches beyond the bytes of its storage"):
            open_torch_file(file).value["a"].read()


def test_nothing_but_tensors_is_read_from_a_storage(tmp_path) -> None:
    file = tmp_path / "a.pt"
    torch.save({"a": torch.arange(10.0), "n": {"b": torch.ones(2, dtype=torch.bool)}}, file)
    value = open_torch_file(file).value
    assert isinstance(value["a"], StoredTensor)
    assert value["n"]["b"].dtype == torch.bool


def laughs(make: Any, levels: int = 40) -> Any:
    """A container that holds the one before it twice, `levels` times: 2**levels entries in some hundred bytes."""
    value: Any = make(["ha", "ha"])
    for _ in range(levels):
        value = make([value, value])
    return value


def deep(levels: int, value: Any = None) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def inside_itself() -> list[Any]:
    value: list[Any] = []
    value.append([value])
    return value


def nested(levels: int) -> bytes:
    """Lists within lists; pickle.dumps itself would need a stack as deep."""
    return b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."


HOSTILE = {
    "lists": (pickle.dumps({"model": laughs(list)}), r"repeats \d+ entries until they are \d"),
    "tuples": (pickle.dumps({"model": laughs(tuple)}), "repeat"),
    "dictionaries": (pickle.dumps(laughs(lambda pair: dict(enumerate(pair)))), "repeats"),
    "attributes": (pickle.dumps(argparse.Namespace(model=laughs(list))), "repeats"),
    "a list in itself": (pickle.dumps({"model": inside_itself()}), "contains itself"),
    "200,000 levels": (nested(200_000), "is nested more than 200 levels deep"),
    "270 levels, half of them met before": (pickle.dumps([half := deep(150), deep(120, half)]), "nested more than 200"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTILE)
def test_objects_that_are_endless_to_walk_through_are_refused(case: str) -> None:
    data, message = HOSTILE[case]
    with pytest.raises(CheckpointError, match=f"file.pt: refused: the object in it .*{message}"):
        SafeUnpickler(io.BytesIO(data), "file.pt").load()


TOWER = b")" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(40))
"""Pairs of the pair before, 40 levels of them."""
KEYS = {
    "of a dictionary": b"}(" + TOWER + b"K\x01u",
    "of a dictionary, one by one": b"}" + TOWER + b"K\x01s",
    "of a dictionary that is made at once": b"(" + TOWER + b"K\x01d",
    "in a set": b"\x8f(" + TOWER + b"\x90",
    "in a set that is made of a list": b"cbuiltins\nset\n](" + TOWER + b"e\x85R",
    "in a list that is in a tuple": b"}](" + TOWER + b"e\x85K\x01s",
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_that_are_endless_to_hash_are_refused_before_they_are_built(case: str) -> None:
    with pytest.raises(CheckpointError, match="file.pt: refused: .* keys or tuples that repeat .* no checkpoint does"):
        SafeUnpickler(io.BytesIO(b"\x80\x04" + KEYS[case] + b"."), "file.pt").load()


def test_many_keys_that_are_each_just_short_enough() -> None:
    """A thousand keys of 2^19 entries."""
    small = b")" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(19)) + b"q\x70"
    data = b"\x80\x02}(" + small + b"K\x01" + b"h\x70K\x01" * 1000 + b"u."
    with pytest.raises(CheckpointError, match="keys or tuples that repeat"):
        SafeUnpickler(io.BytesIO(data), "file.pt").load()


def test_storages_have_names() -> None:
    """Other objects could be endless to print."""
    storage = b"X\x07\x00\x00\x00storagectorch\nFloatStorage\n]X\x03\x00\x00\x00cpuK\x01"
    with pytest.raises(CheckpointError, match=r"it has a storage named \[\]"):
        SafeUnpickler(io.BytesIO(b"\x80\x02(" + storage + b"tQ."), "file.pt").load()


def test_what_checkpoints_share_is_not_refused() -> None:
    common = argparse.Namespace(**{f"key{n}": list(range(50)) for n in range(400)})
    content = {"args": common, "groups": [{"args": common} for _ in range(100)], "deep": deep(150)}
    content |= {("layer", n, (4, 4)): n for n in range(5000)}
    assert SafeUnpickler(io.BytesIO(pickle.dumps(content)), "file.pt").load()["groups"]
