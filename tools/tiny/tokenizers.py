"""The tokenizers: byte-level BPE for target, draft and pard; an unlike one for the foreign."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

END, MASK = "<|endoftext|>", "<|mask|>"
END_ID, MASK_ID = 0, 1
VOCAB_SIZE = 2048

FOREIGN_SPECIAL = ["<unk>", "<s>", "</s>"]
FOREIGN_BOS_ID, FOREIGN_END_ID = 1, 2
FOREIGN_VOCAB_SIZE = 1792

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "# {{ message['role'] }}: {{ message['content'] | replace('\\n', '\\n# ') }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)


def train_tokenizer(texts: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_foreign_tokenizer(texts: tuple[str, ...]) -> Tokenizer:
    """Returns a SentencePiece-style BPE: metaspace, whole words, byte fallback, BOS."""
    learned = Tokenizer(models.BPE())
    _set_metaspace(learned)
    # By line: the newline stays out of the alphabet and falls back to its byte, as in Llama 2.
    lines = [line for text in texts for line in text.splitlines()]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    reserved = len(FOREIGN_SPECIAL) + len(byte_pieces)
    trainer = BpeTrainer(
        vocab_size=FOREIGN_VOCAB_SIZE - reserved, limit_alphabet=160, show_progress=False
    )
    learned.train_from_iterator(lines, trainer)
    model = json.loads(learned.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    vocabulary = [*FOREIGN_SPECIAL, *byte_pieces, *pieces]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(vocabulary)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    _set_metaspace(tokenizer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(FOREIGN_SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", FOREIGN_BOS_ID)]
    )
    return tokenizer


def _set_metaspace(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    # A run of spaces but its last, then a word with its one leading space.
    words = Regex(r"▁+(?=▁[^▁\n])|▁?[^▁\n]+|▁+|\n")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(words, behavior="isolated")


def tokenizer_config(*, foreign: bool) -> dict[str, object]:
    """Returns the content of tokenizer_config.json."""
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    if foreign:
        return config | {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return config | {"eos_token": END, "pad_token": END, "mask_token": MASK}


def load_or_train(path: Path, texts: tuple[str, ...], *, foreign: bool) -> Tokenizer:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        trained = train_foreign_tokenizer(texts) if foreign else train_tokenizer(texts)
        trained.save(str(path), pretty=False)
    return Tokenizer.from_file(str(path))
