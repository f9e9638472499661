"""Memory does not grow with the input."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MIB = 2**20
FILE_BYTES = 64 * MIB
CAP_BYTES = 16 * MIB
MEASURE = """
import resource, sys
from mt_data.preprocess.options import PreprocessOptions
from mt_data.preprocess.run import preprocess
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def run(source, output):
    preprocess(PreprocessOptions(input=(source,), output_prefix=output, tokenizer_type="ByteLevelTokenizer",
                                 append_eod=True, workers=1, shard_mb=1))
run(sys.argv[1], sys.argv[3] + "/small")
before = peak()
run(sys.argv[2], sys.argv[3] + "/large")
print(peak() - before)
"""


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
def test_a_file_several_times_the_cap(tmp_path: Path, ending: str) -> None:
    """A first small file has everything imported and each buffer used once; then one of four times the cap."""
    line = (json.dumps({"text": "a line of text, not long. " * 400}) + "\n").encode()
    for name, size in (("small", 3 * MIB), ("large", FILE_BYTES)):
        data = line * (size // len(line))
        content = gzip.compress(data, 1) if ending.endswith("gz") else data
        (tmp_path / f"{name}.{ending}").write_bytes(content)
    command = [
        sys.executable,
        "-c",
        MEASURE,
        f"{tmp_path}/small.{ending}",
        f"{tmp_path}/large.{ending}",
        f"{tmp_path}/o",
    ]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < CAP_BYTES
