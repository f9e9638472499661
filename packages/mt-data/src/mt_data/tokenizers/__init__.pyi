from .base import BaseTokenizer as BaseTokenizer
from .bert_wordpiece import BertWordPieceTokenizer as BertWordPieceTokenizer
from .byte_level import ByteLevelTokenizer as ByteLevelTokenizer
from .gpt2_bpe import GPT2BPETokenizer as GPT2BPETokenizer
from .hugging_face import HuggingFaceTokenizer as HuggingFaceTokenizer
from .sentence_piece import SentencePieceTokenizer as SentencePieceTokenizer
from .tik_token import TikTokenizer as TikTokenizer
