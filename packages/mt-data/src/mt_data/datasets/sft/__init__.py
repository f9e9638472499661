"""Supervised fine-tuning on conversations.

`record_files` and `record_formats` read records and turn them into `conversations`, `chat_templates` writes them
as text,
`answers` finds the tokens of the answers, `encoding` keeps the tokens, `packing` puts several conversations
into one sample, and `dataset` makes the samples.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
