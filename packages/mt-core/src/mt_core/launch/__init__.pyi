from .environment import RankEnvironment as RankEnvironment
from .environment import read_environment as read_environment
from .local import launch as launch
from .session import RankSession as RankSession
from .session import rank_session as rank_session
