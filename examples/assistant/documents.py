"""The documentation that every Python carries, as a corpus: python documents.py FOLDER [PACKAGES ...]

A document is the documentation of a module, with the headings and docstrings of its classes and functions, or a topic
of `help()`; one of 20 is for validation. Modules are read, never imported. PACKAGES are names of modules and packages
to take, all and the topics by default.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SKIPPED = {"test", "tests", "idlelib", "site-packages", "lib2to3", "turtledemo", "ensurepip", "encodings", "pydoc_data"}
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Entry:
    """Something with a docstring. name: with its module in front; heading: as `help()` shows it."""

    name: str
    heading: str
    doc: str
    parameters: tuple[str, ...] = ()

    @property
    def is_function(self) -> bool:
        return "(" in self.heading


HELD_OUT_EVERY = 20


def modules(packages: list[str]) -> Iterator[tuple[str, ast.Module]]:
    """Public modules of the standard library in the order of their names, parsed."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        private = any(part.startswith("_") for part in name.split("."))
        if SKIPPED & set(parts) or private or (packages and name.split(".")[0] not in packages):
            continue
        try:
            yield name, ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # templates and samples of broken code


def entries(name: str, node: Documented) -> Iterator[Entry]:
    """The node with its public classes and functions, those that have a docstring."""
    doc = ast.get_docstring(node)
    if doc and not isinstance(node, ast.Module | ast.ClassDef):
        heading = f"{name}({', '.join(parameters(node.args))})"
        yield Entry(name, heading, doc, tuple(names(node.args)))
    elif doc:
        yield Entry(name, name, doc)
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name[0] != "_":
                yield from entries(f"{name}.{child.name}", child)


def names(arguments: ast.arguments) -> list[str]:
    """Names of the parameters, without self."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in every if argument.arg not in ("self", "cls")]


def parameters(arguments: ast.arguments) -> list[str]:
    """The parameters as a heading has them; values of defaults are left out."""
    listed = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
    listed += [f"*{arguments.vararg.arg}"] if arguments.vararg else ["*"] if arguments.kwonlyargs else []
    listed += [argument.arg for argument in arguments.kwonlyargs]
    listed += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return [name for name in listed if name not in ("self", "cls")]


def documents(packages: list[str]) -> Iterator[dict[str, str]]:
    for name, tree in modules(packages):
        parts = [f"{entry.heading}\n{entry.doc}" for entry in entries(name, tree)]
        if parts:
            yield {"name": name, "text": "\n\n".join(parts)}
    if not packages:
        from pydoc_data.topics import topics

        for name, text in topics.items():
            yield {"name": f"help({name!r})", "text": text}


def write(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main(folder: Path, packages: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    every = list(documents(packages))
    write(folder / "valid.jsonl", every[::HELD_OUT_EVERY])
    write(folder / "train.jsonl", (one for number, one in enumerate(every) if number % HELD_OUT_EVERY))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
