"""Multi-process runs: starting the ranks, their environment, their phases, and handling of failures.

`local` starts ranks on this node. `environment` reads this process's rank from the variables of any launcher.
`session` is the context manager around a rank's program.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
