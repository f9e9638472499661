from .config import SFTDataConfig as SFTDataConfig
from .dataset import build_sft as build_sft
