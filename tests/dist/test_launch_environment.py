"""Places in a job, from what torchrun and Slurm set; layouts and commands before a run."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mt_core.config.checks import world_size
from mt_core.errors import ConfigError
from mt_core.launch import session
from mt_core.launch.environment import RankEnvironment, expand_node_list, expand_tasks_per_node, read_environment
from mt_core.launch.failure import Failure, in_order, lost_peer, ranks, report
from mt_core.launch.layout import describe
from mt_core.launch.process_group import select_device
from mt_core.launch.supervisor import Death, Supervisor
from mt_core.parallel.context import AxisSizes
from mt_core.train.build import resolve_device

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NODELIST": "node[01-03,07]",
    "SLURM_TASKS_PER_NODE": "4(x2),3",
}


def test_torchrun() -> None:
    found = read_environment(TORCHRUN)
    assert found == RankEnvironment(5, 8, 1, 4, "node01", 29500, "torchrun", launcher_has_store=True, attempt=2)
    assert not found.serves_store
    assert found.variables().items() <= TORCHRUN.items()


def test_slurm() -> None:
    found = read_environment(SLURM)
    assert found == RankEnvironment(9, 11, 1, 3, "node01", 12000 + 4711, "slurm")
    given_address = {**SLURM, "MASTER_ADDR": "ib-node01", "MASTER_PORT": "5000"}
    assert read_environment(given_address).variables()["MASTER_ADDR"] == "ib-node01"
    assert read_environment(given_address).master_port == 5000
    assert read_environment({**SLURM, **found.variables()}) == found  # once exported


SRUN = {**SLURM, "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_NODEID": "0"}
FOURTH = {**TORCHRUN, "LOCAL_RANK": "3"}


@pytest.mark.parametrize(
    ("environ", "count", "device"),
    [
        (SRUN, 1, "cuda:0"),
        (SRUN, 4, "cuda:3"),
        ({**SRUN, **read_environment(SRUN).variables()}, 1, "cuda:0"),  # as `mt train` exports them
        ({**FOURTH, "CUDA_VISIBLE_DEVICES": "3"}, 1, "cuda:0"),
        ({**FOURTH, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, "cuda:3"),
        (FOURTH, 1, None),
        ({**FOURTH, "CUDA_VISIBLE_DEVICES": "3", "MT_LAUNCH_DIR": "runs"}, 1, None),  # `mt train --nproc`
        ({}, 1, "cuda:0"),
        ({"WORLD_SIZE": "1"}, 1, "cuda:0"),
    ],
)
def test_the_model_is_on_the_gpu_that_the_session_selects(monkeypatch, environ, count, device) -> None:
    """Slurm may bind one GPU to each task; a script that torchrun starts may set CUDA_VISIBLE_DEVICES."""
    selected: list[torch.device] = []
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    if device is None:
        with pytest.raises(ConfigError, match="is number 3 of 4 on .*, which has 1 CUDA devices"):
            resolve_device("auto")
        return
    assert select_device(read_environment(), "cuda") == resolve_device("auto") == torch.device(device)
    assert selected == [torch.device(device)]


def test_a_configuration_is_checked_against_the_tasks_of_srun(monkeypatch) -> None:
    """Of commands beside `mt train`, and of Python scripts."""
    monkeypatch.setattr(os, "environ", dict(SRUN))
    monkeypatch.setattr(session, "_connected", lambda *_: nullcontext())
    with session.rank_session("cpu") as found:
        assert (found.environment.launcher, world_size()) == ("slurm", 11)


def test_no_launcher() -> None:
    assert read_environment({}) == RankEnvironment()
    batch_script = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert read_environment(batch_script) == RankEnvironment()
    assert read_environment({"RANK": "0", "WORLD_SIZE": "1"}).world_size == 1
    assert read_environment({"WORLD_SIZE": "1"}).rank == 0


def test_torchrun_inside_srun_is_torchruns() -> None:
    """One task a node: Slurm's numbers are those of nodes."""
    assert read_environment({**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", **TORCHRUN}).rank == 5


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**TORCHRUN, "RANK": "8"}, r"RANK=8 is not below WORLD_SIZE \(8\)"),
        ({**TORCHRUN, "RANK": "-1"}, r"RANK='-1' is no whole number of at least 0"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, r"LOCAL_RANK=4 is not below LOCAL_WORLD_SIZE \(4\)"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set although RANK and WORLD_SIZE are"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not below 65536"),
        ({"RANK": "0"}, "WORLD_SIZE is not set although RANK is"),
        ({"WORLD_SIZE": "2"}, "RANK is not set although WORLD_SIZE is"),
        ({**SLURM, "SLURM_PROCID": "11"}, r"SLURM_PROCID=11 is not below SLURM_NTASKS \(11\)"),
        ({**SLURM, "SLURM_LOCALID": "3"}, r"SLURM_LOCALID=3 is not below tasks on this node \(3\)"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x3)"}, r"TASKS_PER_NODE=4\(x3\) is 12 tasks, but SLURM_NTASKS=11"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "four"}, "'four'; expected a form such as"),
        ({**SLURM, "SLURM_NODELIST": ""}, "SLURM_NODELIST is not set"),
        (
            {**SLURM, "RANK": "0", "WORLD_SIZE": "11", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "RANK=0 contradicts SLURM_PROCID=9, which srun set; unset RANK",
        ),
        (
            {**SLURM, "RANK": "9", "WORLD_SIZE": "16", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "WORLD_SIZE=16 contradicts SLURM_NTASKS=11",
        ),
    ],
)
def test_contradictions_name_the_variable(variables, words) -> None:
    with pytest.raises(ConfigError, match=words):
        read_environment(variables)


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("a1,b[1-2]-ib[0-1],c", ["a1", "b1-ib0", "b1-ib1", "b2-ib0", "b2-ib1", "c"]),
        ("n[9-11].cluster", ["n9.cluster", "n10.cluster", "n11.cluster"]),
        ("rack[098-101]", ["rack098", "rack099", "rack100", "rack101"]),
    ],
)
def test_node_lists(text, nodes) -> None:
    assert expand_node_list(text) == nodes


@pytest.mark.parametrize("text", ["node[01-", "node]1[", "node[3-1]", "node[a-b]", "node[]", "", "node[1,[2]]"])
def test_malformed_node_lists(text) -> None:
    with pytest.raises(ConfigError, match="list of nodes"):
        expand_node_list(text)


@given(st.lists(st.integers(0, 9999), min_size=1, max_size=20, unique=True))
def test_any_numbers_in_brackets(numbers) -> None:
    text = ",".join(str(number) for number in numbers)
    assert expand_node_list(f"n[{text}]x,y") == [f"n{number}x" for number in numbers] + ["y"]


def test_tasks_per_node() -> None:
    assert expand_tasks_per_node("2(x3),1,16(x2)") == [2, 2, 2, 1, 16, 16]


def failure(rank: int, time: float, **changes) -> Failure:
    values = {"host": "h", "phase": "step", "step": 3, "exception": "ValueError", "message": "m", "traceback": "tb"}
    return Failure(**{"rank": rank, "time": time, "exit_code": 1, **values, **changes})


def test_a_cause_comes_before_its_followers_whatever_the_clocks_say() -> None:
    cause = failure(3, 100.0)
    followers = [failure(0, 90.0, followed=True), failure(1, 101.0, followed=True), failure(2, 105.0)]
    assert [item.rank for item in in_order([*followers, cause])] == [3, 2, 0, 1]
    text = report([*followers, cause], ended=[4])
    assert text.startswith("rank 3 on h (phase step, step 3) failed first:\n\ntb\n")
    assert "Rank 2 failed with the same error." in text
    assert "Ranks 0 and 1 followed." in text
    assert "Rank 4 had not failed and was ended." in text


def test_the_stack_of_the_late_rank_is_shown() -> None:
    reporter = failure(0, 1.0, exception="TrainingError", message="Late: rank 2", expected=True, late=(2,))
    late = failure(2, 2.0, followed=True, traceback="in read_a_slow_disk", phase="data")
    text = report([late, failure(1, 1.5, followed=True, traceback="in all_reduce"), reporter])
    assert "TrainingError: Late: rank 2\n\nThe late rank 2 on h (phase data, step 3) was here:\n\nin read_a_s" in text
    assert "in all_reduce" not in text
    assert "Ranks 1 and 2 followed." in text


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1031", True),
        (
            "NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
            True,
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ],
)
def test_errors_of_those_whose_peer_is_gone(text, is_lost) -> None:
    assert lost_peer(text) is is_lost


def test_a_signal_without_a_name_ends_a_rank(tmp_path) -> None:
    supervisor = Supervisor(None, 1, tmp_path, None, None, lambda: None)
    supervisor.deaths = {0: Death(0, -35, 1.0), 1: Death(1, -signal.SIGKILL, 2.0)}
    found = [(item.exception, item.message.partition(":")[0], item.exit_code) for item in supervisor.failures()]
    assert found == [("signal 35", "ended by this signal", 163), ("SIGKILL", "killed", 137)]


def test_ranks_in_words() -> None:
    assert ranks([1]) == "Rank 1"
    assert ranks([9, 2, 3, 4, 5, 0]) == "Ranks 0, 2-5 and 9"


def test_the_layout_before_a_run() -> None:
    text = describe(AxisSizes(tp=2, pp=2), 2, 4, arguments=["train", "my run.toml"], device_type="cuda")
    lines = text.splitlines()
    assert lines[0] == "8 ranks on 2 nodes: tensor 2 x context 1 x data 2 x pipeline 2"
    assert lines[2].split() == ["rank", "node", "local", "tp", "cp", "dp", "pp"]
    assert [line.split() for line in lines[3:11]] == [
        [str(n) for n in (rank, rank // 4, rank % 4, rank % 2, 0, rank // 2 % 2, rank // 4)] for rank in range(8)
    ]
    assert "pp groups: 0 4 | 1 5 | 2 6 | 3 7" in lines
    assert "mt train 'my run.toml' --nproc 4 --nnodes 2 --node-rank 1 --master-addr FIRST_NODE" in text
    assert "torchrun --nproc-per-node 4 --nnodes 2 --node-rank 0 --master-addr FIRST_NODE --master-port 29500 " in text
    assert "srun --nodes 2 --ntasks-per-node 4 --gpus-per-node 4 --kill-on-bad-exit=1 mt train 'my run.toml'" in text


def test_commands_have_the_given_address() -> None:
    text = describe(AxisSizes(), 2, 1, master=("10.0.0.7", 4000))
    assert text.count("--master-addr 10.0.0.7 --master-port 4000") == 4  # mt and torchrun, two nodes


def test_the_layout_of_experts_and_of_many_ranks() -> None:
    assert "rank  node  local  tp  cp  dp  pp  etp  ep  edp" in describe(AxisSizes(tp=2, ep=4, etp=1), 1, 8)
    assert "... and 16320 more ranks" in describe(AxisSizes(tp=8, pp=16), 2048, 8)
    with pytest.raises(ConfigError, match="does not divide the 6 processes"):
        describe(AxisSizes(tp=4), 1, 6)
