from .local import launch as launch
from .session import rank_session as rank_session
