"""The contract of mt: hooks, specs, the plugin host, typed configuration; and the runtime that trains.

`__init__.pyi` lists the public names; each is imported when it is first used. `mt_core.plugins`, `mt_core.config` and
`mt_core.specs` work without torch, `mt_core.parallel`, `mt_core.nn`, `mt_core.optim` and `mt_core.train` need
`mt-core[train]`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
