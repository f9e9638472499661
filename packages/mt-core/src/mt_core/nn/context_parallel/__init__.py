"""Context parallelism: attention over sharded sequences. `docs/guides/context-parallel.md` explains the methods."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
