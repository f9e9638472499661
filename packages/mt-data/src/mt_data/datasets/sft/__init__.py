"""Supervised fine-tuning on conversations.

`conversations` reads and checks them, `chat_templates` and `builtin_templates` write them as text,
`answers` finds the tokens of the answers, `encoding` keeps the tokens, `packing` puts several conversations
into one sample, and `dataset` makes the samples.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
