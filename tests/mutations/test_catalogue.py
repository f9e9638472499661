"""The known mutations can be applied, and name tests that there are; `python -m tests.mutations` applies them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.mutations.catalogue import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place_and_leaves_python(mutation: Mutation) -> None:
    source = (ROOT / "packages" / mutation.file).read_text()
    assert source.count(mutation.before) == 1
    compile(source.replace(mutation.before, mutation.after), mutation.file, "exec")
    assert (ROOT / mutation.tests[0].partition("::")[0]).is_file()


def test_names_are_unique() -> None:
    assert max(Counter(mutation.name for mutation in MUTATIONS).values()) == 1
