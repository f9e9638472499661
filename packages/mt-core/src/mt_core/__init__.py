"""The contract of mt: hooks, specs, the plugin host, typed configuration; and the runtime that trains.

Nothing is imported here: `mt_core.plugins`, `mt_core.config` and `mt_core.specs` work without torch,
`mt_core.parallel`, `mt_core.nn`, `mt_core.optim` and `mt_core.train` need `mt-core[train]`.
"""
