"""The same bytes from a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mt_core.errors import DataError
from mt_data.preprocess.options import PreprocessOptions
from mt_data.preprocess.readers import MalformedRecord
from mt_data.preprocess.run import preprocess

Options = Callable[..., PreprocessOptions]


@pytest.mark.slow
def test_a_cluster_gives_the_same_bytes(prep: Any, tmp_path: Path, corpus: Path, options: Options) -> None:
    distributed = pytest.importorskip("distributed", reason="Dask is not installed")
    import gzip

    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\nbad\n')
    cluster = distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        processes=False,
        dashboard_address=None,
        protocol="tcp",
        local_directory=str(tmp_path),
    )
    with cluster:
        on_dask = {"executor": "dask", "dask_scheduler": cluster.scheduler_address, "workers": None}
        report = preprocess(options(corpus, packed, shard_mb=0.0008, **on_dask))
        assert report.shards > 4
        assert prep.files_of(report) == prep.expected_files(prep.TEXTS * 2)
        with pytest.raises(MalformedRecord, match=r"bad\.jsonl, line 2"):
            preprocess(options(bad, output_prefix=str(tmp_path / "bad"), **on_dask))


def test_no_scheduler(corpus: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_data.preprocess.dask_executor.CONNECT_SECONDS", 0.5)
    with pytest.raises(DataError, match=r"--dask-scheduler 127\.0\.0\.1:9 cannot be reached"):
        preprocess(options(corpus, executor="dask", dask_scheduler="127.0.0.1:9", workers=None))
