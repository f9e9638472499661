"""What mt-moe registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.specs import CallbackSpec, CommandSpec, FeedForwardSpec, MoeDispatcherSpec

if TYPE_CHECKING:
    from mt_core.config.schema import Config
    from mt_core.plugins import PluginHost


@hookimpl
def mt_register_feed_forwards() -> list[FeedForwardSpec]:
    return [
        FeedForwardSpec(
            name="moe",
            doc="A mixture of experts",
            config_type=Lazy("mt_moe.config:MoeConfig"),
            build=Lazy("mt_moe.layer:build_moe"),
            upcycle=Lazy("mt_moe.upcycling:upcycle"),
        )
    ]


@hookimpl
def mt_register_moe_dispatchers() -> list[MoeDispatcherSpec]:
    return [
        MoeDispatcherSpec(
            name="allgather",
            doc="Every rank gets all tokens and takes those of its experts",
            config_type=Lazy("mt_moe.dispatchers.config:ExchangeConfig"),
            build=Lazy("mt_moe.dispatchers.allgather:build_allgather"),
        ),
        MoeDispatcherSpec(
            name="alltoall",
            doc="Each token goes to the ranks of its experts and to no other",
            config_type=Lazy("mt_moe.dispatchers.config:ExchangeConfig"),
            build=Lazy("mt_moe.dispatchers.alltoall:build_alltoall"),
        ),
        MoeDispatcherSpec(
            name="flex",
            doc="The kernels of DeepEP or HybridEP, where they are installed",
            config_type=Lazy("mt_moe.dispatchers.config:FlexConfig"),
            build=Lazy("mt_moe.dispatchers.flex:build_flex"),
        ),
    ]


@hookimpl
def mt_register_callbacks() -> list[CallbackSpec]:
    return [
        CallbackSpec(
            name="expert_load",
            doc="Writes expert-load.jsonl in the run directory of a model with experts",
            build=Lazy("mt_moe.load_record:build_load_file"),
            always=True,
            all_ranks=True,
        )
    ]


@hookimpl
def mt_register_commands() -> list[CommandSpec]:
    return [CommandSpec(name="moe", doc="Look at the load of experts", app=Lazy("mt_moe.plot:app"))]


@hookimpl
def mt_check_config(config: Config, host: PluginHost) -> None:
    if getattr(config.model, "moe", None) is not None:
        from mt_moe.checks import check_moe

        check_moe(config, host)
