"""Paged cache: one example of shared prefixes in six drawings, from the block tables of the engine's own cache."""

from __future__ import annotations

from collections.abc import Callable

from scripts.figures.axes import Axes
from scripts.figures.engine_play import Asked, Play
from scripts.figures.registry import figure
from scripts.figures.svg import Canvas

BLOCK = 4
SYSTEM = "You are a terse assistant . Answer now"
WORDS: list[str] = []


def tokens(text: str) -> list[int]:
    """A token a word."""
    for word in text.split():
        if word not in WORDS:
            WORDS.append(word)
    return [WORDS.index(word) for word in text.split()]


A = Asked("A", tokens(f"{SYSTEM} What is 2 + 2"), tokens("It is 4 , I think ."))
B = Asked("B", tokens(f"{SYSTEM} Name a colour"), tokens("Blue is one of them , surely ."))
C = Asked("C", tokens(f"{SYSTEM} What is 2 + 3 ?"), tokens("It is 5"))
D = Asked("D", tokens("Count up to six : one two three four"), tokens("five six seven"))


def new_play() -> Play:
    return Play(blocks=9, block_size=BLOCK, budget=32, longest=20, max_requests=4)


def until(stage: int) -> tuple[Play, str]:
    """The cache after each of the six stages of the example, and what has happened."""
    play = new_play()
    play.add(A)
    play.step()
    if stage == 1:
        return play, "Request A arrives; its prompt of 13 tokens is computed"
    for _ in range(4):
        play.step()
    if stage == 2:
        return play, "A has decoded four tokens, whose keys and values fill block 3 and begin block 4"
    play.add(B)
    play.step()
    if stage == 3:
        return play, "Request B begins with the same 8 tokens: it shares blocks 0 and 1 and computes the others"
    while "A" in [play.name_of(sequence) for sequence in play.scheduler.running]:
        play.step()
    if stage == 4:
        return play, "A has ended; its full blocks keep their content until they are needed"
    play.add(C)
    play.step()
    if stage == 5:
        return play, "Request C finds 12 of its 14 tokens: block 2, which nobody used, is in use again"
    play.add(D)
    play.step()
    return play, "Request D shares nothing; blocks without content are taken first, then the oldest content"


def drawn(stage: int) -> Canvas:
    play, event = until(stage)
    canvas = Canvas(880, 300, f"Paged cache, stage {stage} of the example: {event}")
    canvas.text(12, 22, f"{stage}. {event}", style="big")
    tables = {play.name_of(s): [b for b in s.tables[0].blocks if b is not None] for s in play.scheduler.running}
    fills = {"A": 0, "B": 1, "C": 2, "D": 3}
    canvas.text(12, 50, "tables", style="muted")
    for row, (name, blocks) in enumerate(tables.items()):
        y = 60 + row * 34
        canvas.cell(12, y, 26, 24, name, f"c{fills[name]}")
        for place, block in enumerate(blocks):
            canvas.cell(46 + place * 30, y, 28, 24, str(block), "none", style="small")
    canvas.text(240, 50, "blocks", style="muted")
    named = set(play.pool._keys)
    for block in range(play.pool.count):
        x, y = 240 + (block % 3) * 212, 60 + (block // 3) * 66
        users = [name for name, blocks in tables.items() if block in blocks]
        held = play.content.get(block, []) if users or block in named else []
        canvas.text(x, y + 21, str(block), style="muted")
        for place in range(BLOCK):
            words = WORDS[held[place]] if place < len(held) else ""
            fill = "none" if not held or place >= len(held) else f"c{fills[users[0]]}" if users else "grey"
            canvas.cell(x + 14 + place * 46, y, 46, 30, words, fill, style="small")
        note = f"used by {' and '.join(users)}" if users else "unused" if block in named else "free"
        canvas.text(x + 14, y + 43, note + (", can be found" if block in named else ""), style="small muted")
    order = list(play.pool._unused)
    canvas.text(12, 284, "next to be taken: " + (", ".join(map(str, order)) or "none"), style="muted")
    return canvas


def _stage(number: int) -> Callable[[], Canvas]:
    return lambda: drawn(number)


for _number in range(1, 7):
    figure(f"cache-{_number}")(_stage(_number))


@figure("cache-chain")
def chain() -> Canvas:
    """Keys of the blocks of A and C: each depends on all tokens before."""
    canvas = Canvas(880, 196, "The key of a block is a hash of the key before it and of the block's tokens")
    play = new_play()
    for row, asked in enumerate((A, C)):
        y = 30 + row * 84
        keys = play.manager.new_keys(b"").extend(asked.prompt, len(asked.prompt))
        canvas.text(12, y + 20, asked.name, style="big")
        for number, key in enumerate(keys):
            x = 44 + number * 272
            words = " ".join(WORDS[token] for token in asked.prompt[number * BLOCK : (number + 1) * BLOCK])
            canvas.cell(x, y, 156, 32, words, "c0", style="small")
            canvas.text(x + 2, y + 48, f"key {key.hex()[:8]}", style="mono small")
            if number + 1 < len(keys):
                canvas.arrow(x + 160, y + 16, x + 266, y + 16)
                canvas.text(x + 212, y + 10, "hashed along", anchor="middle", style="small muted")
        rest = " ".join(WORDS[token] for token in asked.prompt[len(keys) * BLOCK :])
        canvas.cell(44 + len(keys) * 272 - 108, y, 60, 32, rest, "none", style="small")
    canvas.text(
        44,
        190,
        "Equal keys mean equal tokens from the beginning on. A block that is not full has no key.",
        style="muted",
    )
    return canvas


BYTES_PER_ELEMENT = 2


@figure("cache-bytes")
def bytes_per_token() -> Canvas:
    """Bytes that a token takes in the cache, from the presets' own configurations."""
    from mt_core.config.loading import load_config

    presets = (
        "gpt2-124m",
        "llama2-7b",
        "llama3-8b",
        "llama3-70b",
        "mixtral-8x7b",
        "qwen2.5-7b",
        "gemma2-9b",
        "deepseek-v3",
    )
    canvas = Canvas(880, 44 + 30 * len(presets), "Bytes that a token takes in the cache in bf16, by preset")
    rows = []
    for name in presets:
        model = load_config(preset=name, overrides=["train.train_iters=1"]).config.model
        rows.append((name, *_kept(model)))
    most = max(size for _, size, _ in rows)
    canvas.text(12, 20, "KiB in the cache for each token, bf16", style="big")
    for row, (name, size, kind) in enumerate(rows):
        y = 34 + row * 30
        canvas.text(12, y + 16, name)
        width = 380 * size / most
        canvas.rect(130, y, width, 22, "c0")
        canvas.text(136 + width, y + 16, f"{size / 1024:,.0f} KiB  ({kind})", style="muted")
    return canvas


def _kept(model) -> tuple[float, str]:  # type: ignore[no-untyped-def]
    layers = model.num_layers
    latent = getattr(model, "kv_lora_rank", None)
    if latent:
        width = latent + model.qk_pos_emb_head_dim
        return layers * width * BYTES_PER_ELEMENT, f"{layers} layers, one latent of {width}"
    groups = getattr(model, "num_query_groups", None) or model.num_attention_heads
    size = getattr(model, "kv_channels", None) or model.hidden_size // model.num_attention_heads
    return 2 * layers * groups * size * BYTES_PER_ELEMENT, f"{layers} layers, {groups} key-value heads of {size}"


REQUESTS = [
    Asked("1", range(100, 122), [1] * 9, 0),
    Asked("2", range(200, 230), [1] * 5, 0),
    Asked("3", range(300, 306), [1] * 12, 1),
    Asked("4", range(400, 440), [1] * 4, 2),
    Asked("5", range(500, 508), [1] * 7, 6),
]


def schedule_picture(play: Play, title: str, note: str) -> Canvas:
    steps = play.run(REQUESTS)
    canvas = Canvas(max(120 + 40 * len(steps), 620), 268, title)
    canvas.text(12, 20, note, style="big")
    canvas.legend(12, 44, [("c1", "prompt"), ("c0", "decode"), ("grey", "waits"), ("c4", "preempted")])
    for number, step in enumerate(steps):
        x = 84 + number * 40
        canvas.text(x + 19, 66, str(number), anchor="middle", style="small muted")
        for row, asked in enumerate(REQUESTS):
            y, chunk = 74 + row * 30, step.chunks.get(asked.name)
            if chunk:
                is_prompt = chunk[0] + chunk[1] <= len(asked.prompt) or chunk[1] > 1
                canvas.cell(x, y, 38, 26, str(chunk[1]), "c1" if is_prompt else "c0", style="small")
            elif asked.name in step.preempted:
                canvas.rect(x, y, 38, 26, "c4", stroke="rule")
            elif asked.name in step.waiting:
                canvas.rect(x, y, 38, 26, "grey", stroke="rule")
        total = sum(count for _, count in step.chunks.values())
        canvas.text(x + 19, 240, str(total), anchor="middle", style="small")
        canvas.text(x + 19, 258, str(step.used), anchor="middle", style="small")
    for row, asked in enumerate(REQUESTS):
        canvas.text(12, 91 + row * 30, f"request {asked.name}")
    canvas.text(12, 66, "step", style="muted small")
    canvas.text(12, 240, "positions", style="small muted")
    canvas.text(12, 258, "blocks used", style="small muted")
    return canvas


@figure("scheduler-chunked-prefill")
def chunked_prefill() -> Canvas:
    """Enough memory: prompts share the budget of a step with sequences that decode."""
    play = Play(blocks=60, block_size=4, budget=24, longest=60)
    return schedule_picture(
        play,
        "Positions that each forward pass computes for each request, with a budget of 24",
        "max_tokens_per_step = 24, memory for all",
    )


@figure("scheduler-preemption")
def preemption() -> Canvas:
    """Little memory: the sequence that came last gives up its blocks."""
    play = Play(blocks=18, block_size=4, budget=24, longest=60)
    return schedule_picture(
        play,
        "The same requests with 18 blocks of 4 positions: a sequence is preempted and computed again",
        "The same requests in a cache of 18 blocks",
    )


@figure("scheduler-budgets")
def budgets() -> Canvas:
    """Steps until the first token of each request, over the budget of a step."""
    canvas = Canvas(660, 320, "Steps until each request's first token, over max_tokens_per_step")
    axes = Axes(canvas, (8, 96), (0, 20), x_log=True, x_ticks=[8, 16, 24, 32, 48, 64, 96])
    axes.frame("max_tokens_per_step", "steps until the first token")
    numbers = (8, 12, 16, 20, 24, 32, 48, 64, 96)
    for colour, asked in enumerate(REQUESTS):
        points = []
        for budget in numbers:
            steps = Play(blocks=60, block_size=4, budget=budget, longest=60).run(REQUESTS)
            done = next(n for n, s in enumerate(steps) if sum(s.chunks.get(asked.name, (0, 0))) >= len(asked.prompt))
            points.append((budget, done + 1 - asked.arrival))
        axes.curve(points, colour)
        axes.points(points, colour)
    axes.legend([f"request {one.name}, prompt of {len(one.prompt)}" for one in REQUESTS])
    return canvas
