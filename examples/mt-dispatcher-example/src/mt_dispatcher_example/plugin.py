"""What this plugin registers."""

from __future__ import annotations

from mt_core import Lazy, MoeDispatcherSpec, hookimpl


@hookimpl
def mt_register_moe_dispatchers() -> list[MoeDispatcherSpec]:
    return [
        MoeDispatcherSpec(
            name="counted",
            doc="As alltoall, and writes how many rows go to each rank",
            config_type=Lazy("mt_dispatcher_example.config:CountedConfig"),
            build=Lazy("mt_dispatcher_example.dispatcher:build_counted"),
        )
    ]
