from .environments.tool_environment import ToolEnvironment as ToolEnvironment
from .environments.turns import TurnEncoder as TurnEncoder
from .reward_models.scorer import RewardScorer as RewardScorer
