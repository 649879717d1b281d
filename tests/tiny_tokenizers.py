"""Real tokenizers of a few hundred tokens, trained on a few lines."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

EOS = "<|end|>"
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog sleeps on",
    "to be or not to be: that is the question which the answer never ends",
    "she said \"stop\" and then he said 'go', so they went on and on",
    "naïve café, größer, déjà vu, 你好世界, こんにちは世界, привет мир",
]
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_level() -> Tokenizer:
    """Every byte is a token, as in GPT-2, Llama 3 and Qwen; emoji are always several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """Words carry their space and unknown characters fall back to bytes, as in SentencePiece."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", EOS, *byte_tokens], show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.add_special_tokens([EOS])
    return tokenizer


def split_byte_level() -> Tokenizer:
    """Byte-level with digits by three, composed characters and a BOS, as in Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_LLAMA3_WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<s>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text.upper() for text in CORPUS] + CORPUS[2:], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", token_id(tokenizer, "<s>"))]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """Tokens that continue a word begin with `##`, over an alphabet of bytes."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=700,
        special_tokens=["[UNK]", EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    trained.train_from_iterator(CORPUS, trainer)
    vocab = trained.get_vocab()
    for letter in sorted(alphabet):
        vocab.setdefault(f"##{letter}", len(vocab))
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("##", ""), decoders.Fuse(), decoders.ByteLevel()
    ])  # fmt: skip
    tokenizer.add_special_tokens(["[UNK]", EOS])
    return tokenizer


def bert() -> Tokenizer:
    """Word pieces that imply the spaces between them, as in BERT; no fallback to bytes."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", EOS], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, path: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Writes what a checkpoint has of a tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a token that exists."""
    found = tokenizer.token_to_id(token)
    assert found is not None
    return int(found)


def of_tokens(tokens: Sequence[str]) -> Tokenizer:
    """Has exactly these tokens, in printable ASCII, and the end-of-sequence token last."""
    vocab = {token.replace(" ", "Ġ"): index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return tokenizer
