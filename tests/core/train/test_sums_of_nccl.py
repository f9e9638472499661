"""What a deterministic run on several GPUs says of NCCL's algorithm."""

from __future__ import annotations

import pytest

from mt_core.errors import ConfigError
from mt_core.train.reporting.run_summary import sums_of_nccl


@pytest.mark.parametrize("algorithm", ["Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS", "^NVLS,NVLSTree"])
def test_an_algorithm_with_one_order_is_named(algorithm: str) -> None:
    """Those that Megatron's deterministic mode takes."""
    assert sums_of_nccl({"NCCL_ALGO": algorithm}) == f"NCCL_ALGO={algorithm}: sums over ranks have one order"


@pytest.mark.parametrize("algorithm", ["NVLS", "NVLSTree", "Ring,NVLS", "^Ring"])
def test_sums_of_a_switch_are_refused(algorithm: str) -> None:
    with pytest.raises(ConfigError, match="it can be Ring, Tree"):
        sums_of_nccl({"NCCL_ALGO": algorithm})


def test_no_algorithm_is_no_error() -> None:
    assert "NCCL_ALGO=Ring fixes one" in sums_of_nccl({})
