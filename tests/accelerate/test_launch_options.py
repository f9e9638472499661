"""Command lines and files of `accelerate launch`, as `mt launch` reads them; nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mt_accelerate import launch as launcher
from mt_accelerate.launch import checked_values, launch_command, launch_variables, number_of_processes
from mt_accelerate.launch_options import merged, read_options
from mt_core.errors import ConfigError

PROGRAM = ["train.py"]
LINES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "train.py": ({}, PROGRAM),
    "train.py --lr 1e-3 -m": ({}, ["train.py", "--lr", "1e-3", "-m"]),
    "train.py -- --lr 1e-3": ({}, ["train.py", "--lr", "1e-3"]),
    "-- train.py --lr 1e-3": ({}, ["train.py", "--lr", "1e-3"]),
    "train.py --lr 1 -- 2": ({}, ["train.py", "--lr", "1", "--", "2"]),
    "--num_processes 2 --cpu train.py --cpu": (
        {"num_processes": 2, "use_cpu": True},
        ["train.py", "--cpu"],
    ),
    "--num-processes=2 --mixed-precision=no train.py": ({"num_processes": 2, "mixed_precision": "no"}, PROGRAM),
    "--num_processes 2 --num_processes 4 train.py": ({"num_processes": 4}, PROGRAM),
    # What published command lines have.
    "--num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no train.py": (
        {"num_processes": 2, "num_machines": 1, "mixed_precision": "no"},
        PROGRAM,
    ),
    "--multi_gpu --rdzv_backend static --same_network --main_training_function main train.py": (
        {"distributed_type": "MULTI_GPU", "rdzv_backend": "static"},
        PROGRAM,
    ),
    "--rdzv_backend=c10d --rdzv_conf timeout=90 --monitor_interval 5 --role 01 -t 3 --log_dir 7 train.py": (
        {
            "rdzv_backend": "c10d",
            "rdzv_conf": "timeout=90",
            "monitor_interval": "5",
            "role": "01",
            "tee": "3",
            "log_dir": "7",
        },
        PROGRAM,
    ),
    "--dynamo_mode max-autotune --dynamo_use_dynamic --downcast_bf16 no -q train.py": ({}, PROGRAM),
    "--downcast_bf16 --enable_cpu_affinity --debug train.py": ({"enable_cpu_affinity": True, "debug": True}, PROGRAM),
    "--gpu_ids 0,2 --machine_rank 1 -m package.train --x": (
        {"gpu_ids": "0,2", "machine_rank": 1, "module": True},
        ["package.train", "--x"],
    ),
    "--no_python ./run.sh": ({"no_python": True}, ["./run.sh"]),
    "--zero3_init_flag false --offload_param_device none --fsdp_offload_params false train.py": ({}, PROGRAM),
    "--use_megatron_lm --megatron_lm_tp_degree 2 --megatron_lm_gradient_clipping 0.5 train.py": (
        {
            "distributed_type": "MEGATRON_LM",
            "megatron_lm_config.megatron_lm_tp_degree": 2,
            "megatron_lm_config.megatron_lm_gradient_clipping": "0.5",
        },
        PROGRAM,
    ),
}


@pytest.mark.parametrize("line", LINES)
def test_a_command_line_is_read(line: str) -> None:
    options = read_options(line.split())
    assert (options.values, options.program) == LINES[line]
    assert options.config_file is None


REFUSED = {
    "--num_proceses 2 train.py": 'no option --num_proceses \\(did you mean "num_processes"\\?\\)',
    "--num_processes two train.py": "--num_processes two: it has to be a whole number",
    "--num_processes": "--num_processes needs a value",
    "--cpu": "needs a program",
    "--cpu=true train.py": "--cpu takes no value",
    "--dynamo_backend inductor train.py": "--dynamo_backend inductor: call torch.compile in the program",
    "--use_deepspeed train.py": "--use_deepspeed: MegatronLMPlugin's fields",
    "--zero_stage 3 train.py": "--zero_stage 3: MegatronLMPlugin's fields",
    "--fsdp_offload_params true train.py": "--fsdp_offload_params true: --use_megatron_lm",
    "--fp8_format E4M3 train.py": "precision.fp8_format",
    "--tpu train.py": "CPUs and CUDA GPUs",
    "--cpu --multi_gpu train.py": "--cpu and --multi_gpu",
    "--multi_gpu --num_processes 1 train.py": "at least 2 processes",
    "-m --no_python train": "--module and --no_python",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_refusal_says_why(line: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[line]):
        read_options(line.split())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rdzv_backend": "etcd"}, "rdzv_backend=etcd is not done; it can be static, c10d"),
        ({"mixed_precision": "fp12"}, "mixed_precision=fp12 is not done; it can be no, fp16, bf16, fp8"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "compute_environment=AMAZON_SAGEMAKER is not done"),
    ],
)
def test_values_are_checked_before_anything_starts(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked_values(values)


# -- the file ----------------------------------------------------------------------------------------

FILE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 4
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
"""What `accelerate config` writes."""


@pytest.mark.parametrize("variable", ["HF_HOME", "XDG_CACHE_HOME"])
def test_the_default_file_is_read_where_accelerate_has_it(tmp_path: Path, monkeypatch, capsys, variable: str) -> None:
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    path = tmp_path / ("accelerate" if variable == "HF_HOME" else "huggingface/accelerate") / "default_config.yaml"
    assert launcher._file(None, {}) is None
    path.parent.mkdir(parents=True)
    path.write_text(FILE, encoding="utf-8")
    assert launcher._file(None, {}) == path
    assert f"mt launch: reads {path}" in capsys.readouterr().err
    assert launcher._file(None, {"use_cpu": True}) is None
    assert launcher._file("other.yaml", {}) == Path("other.yaml")
    values = checked_values(merged(launcher._read(path), {"num_processes": 2}))
    assert (number_of_processes(values), launch_variables(values)["ACCELERATE_MIXED_PRECISION"]) == (2, "bf16")


def test_options_win_over_the_file() -> None:
    file = {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_tp_degree": 4}}
    assert "MEGATRON_LM_TP_DEGREE" in launch_variables(merged(file, {}))
    plain = launch_variables(merged(file, read_options(["--multi_gpu", "train.py"]).values))
    assert plain == {"ACCELERATE_MIXED_PRECISION": "no"}
    on_cpus = merged({"distributed_type": "MULTI_GPU"}, read_options(["--cpu", "train.py"]).values)
    assert on_cpus == {"distributed_type": "MULTI_CPU", "use_cpu": True}


# -- processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "values", "number"),
    [
        (3, {}, 3),
        (3, {"distributed_type": "MULTI_GPU"}, 3),
        (3, {"distributed_type": "MULTI_GPU", "num_processes": -1}, 3),
        (3, {"distributed_type": "MULTI_GPU", "num_machines": 2}, 6),
        (3, {"gpu_ids": "0,2"}, 2),
        (3, {"gpu_ids": 1}, 1),
        (3, {"use_cpu": True}, 1),
        (3, {"num_processes": 2}, 2),
        (0, {}, 1),
    ],
)
def test_every_device_has_a_process(monkeypatch, devices: int, values: dict[str, Any], number: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert number_of_processes(values) == number


def test_several_gpus_without_one_are_an_error(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="--multi_gpu: torch sees no CUDA device here; give --num_processes N"):
        number_of_processes({"distributed_type": "MULTI_GPU"})


def torchrun(values: dict[str, Any]) -> str:
    return " ".join(launch_command(values, None, PROGRAM)[3:])


def test_torchrun_gets_what_it_knows() -> None:
    line = "--num_processes 2 --tee 3 --role r --rdzv_conf a=1 --max_restarts 2 train.py"
    assert torchrun(read_options(line.split(" ")).values) == (
        "--nproc-per-node 2 --max-restarts 2 --role r --rdzv-conf a=1 --tee 3 --standalone train.py"
    )
    machines = {"num_processes": 4, "num_machines": 2, "machine_rank": 1, "main_process_ip": "127.0.0.1"}
    there = "--nproc-per-node 2 --nnodes 2 --node-rank 1"
    assert torchrun(machines) == f"{there} --master-addr 127.0.0.1 --master-port 29500 train.py"
    assert torchrun({**machines, "rdzv_backend": "c10d", "main_process_port": 29511}) == (
        f"{there} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29511 train.py"
    )
    assert torchrun({"no_python": True}) == "--nproc-per-node 1 --standalone --no-python train.py"


def test_chosen_devices_are_the_visible_ones() -> None:
    assert launch_variables({"gpu_ids": "0, 2"})["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert "CUDA_VISIBLE_DEVICES" not in launch_variables({"gpu_ids": "all"})
    assert launch_variables({"debug": True})["ACCELERATE_DEBUG_MODE"] == "true"
