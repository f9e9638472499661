"""Pipeline parallelism: `docs/guides/pipeline.md` explains the schedules and who runs them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
