"""The configuration of a small training, in a module that ranks import quickly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.plugins import PluginHost

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Training:
    """example: the name of a file in examples/; None: the built-in corpus. overrides: what the configuration changes.

    experts: whether there are experts to be divided. whole_sequences: whether context parallelism is refused. dropped:
    keys of the example that are left out. words: the folder with sentences and their tokenizer, for an example that
    reads them.
    """

    example: str | None
    overrides: tuple[str, ...]
    experts: bool = False
    whole_sequences: bool = False
    dropped: tuple[str, ...] = ()
    words: Path | None = None

    def config(self, layout: tuple[str, ...], host: PluginHost) -> LoadedConfig:
        path = None if self.example is None else EXAMPLES / f"{self.example}.toml"
        if path is not None and self.dropped:
            path = without(path, self.dropped)
        read = [] if self.words is None else words_settings(self.words)
        return load_config(path, overrides=[*self.overrides, *read, *layout], host=host)


def without(path: Path, keys: tuple[str, ...]) -> Path:
    """A copy of an example without the lines of these keys."""
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.partition(" = ")[0] not in keys]
    copy = Path(mkdtemp(prefix="mt-cards-")) / path.name
    copy.write_text("\n".join(kept), encoding="utf-8")
    return copy


def words_settings(folder: Path) -> list[str]:
    return [
        f'tokenizer.vocab_file="{folder / "topics-tokenizer/vocab.txt"}"',
        f'data.data_path=["{folder / "topics_text_sentence"}"]',
    ]
