from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.detokenizer import CharacterDecoder, Detokenizer, StopScanner, TextOutput
from specgw.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    Round,
    SamplingParams,
    TokenLogprobs,
)
from tests import tiny_tokenizers
from tests.tiny_tokenizers import token_id

BYTE_LEVEL = tiny_tokenizers.byte_level()
METASPACE = tiny_tokenizers.metaspace()
EOS_ID = token_id(BYTE_LEVEL, tiny_tokenizers.EOS)

TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab \"'.,\n😀👩‍👩‍👧🇩🇪你好世界e\u0301\u0308ñ\ufffd"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=30,
)
BLOCK_SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=20)


def blocks(token_ids: Sequence[int], sizes: Sequence[int]) -> Iterator[GenerateOutput]:
    """Cuts tokens into outputs of the given sizes, repeated; the last one finishes."""
    position = turn = 0
    while True:
        size = sizes[turn % len(sizes)]
        block = token_ids[position : position + size]
        position, turn = position + size, turn + 1
        is_last = position >= len(token_ids)
        yield GenerateOutput(block, FinishReason.LENGTH if is_last else None)
        if is_last:
            return


def detokenize(
    tokenizer: Tokenizer,
    outputs: Iterator[GenerateOutput],
    params: SamplingParams | None = None,
    prompt: Sequence[int] = (),
) -> list[TextOutput]:
    """Pushes outputs until one finishes."""
    request = GenerateRequest("one", prompt, params or SamplingParams())
    detokenizer = Detokenizer(tokenizer, request, EOS_ID)
    pushed = []
    for output in outputs:
        pushed.append(detokenizer.push(output))
        if pushed[-1].finish_reason is not None:
            break
    return pushed


def joined(outputs: Sequence[TextOutput]) -> str:
    return "".join(output.text for output in outputs)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte_level", "metaspace"])
@given(text=TEXTS, sizes=BLOCK_SIZES)
@settings(deadline=None)
def test_blocks_of_any_size_join_to_the_whole_text(
    tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids

    streamed = joined(detokenize(tokenizer, blocks(token_ids, sizes)))

    assert streamed == tokenizer.decode(token_ids)


@given(text=TEXTS, sizes=BLOCK_SIZES)
@settings(deadline=None)
def test_no_piece_holds_half_a_character(text: str, sizes: list[int]) -> None:
    text = text.replace("\ufffd", "")
    token_ids = BYTE_LEVEL.encode(text).ids

    pieces = [output.text for output in detokenize(BYTE_LEVEL, blocks(token_ids, sizes))]

    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte_level", "metaspace"])
@given(data=st.data(), sizes=BLOCK_SIZES)
@settings(deadline=None)
def test_tokens_that_are_no_text_give_the_same_in_any_blocks(
    tokenizer: Tokenizer, data: st.DataObject, sizes: list[int]
) -> None:
    ids = st.integers(0, tokenizer.get_vocab_size() - 1)
    token_ids = data.draw(st.lists(ids, max_size=60))

    in_blocks = joined(detokenize(tokenizer, blocks(token_ids, sizes)))
    one_by_one = joined(detokenize(tokenizer, blocks(token_ids, [1])))

    assert in_blocks == one_by_one


def test_a_byte_that_spoils_the_bytes_before_it_is_survived() -> None:
    emoji = [token_id(METASPACE, f"<0x{byte:02X}>") for byte in "😀".encode()]
    stray = token_id(METASPACE, "<0xFF>")
    word = METASPACE.encode("the dog").ids

    streamed = joined(detokenize(METASPACE, blocks([*emoji, stray, *word], [1])))

    assert streamed == "😀\ufffd the dog"


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    prompt = METASPACE.encode("the quick").ids
    whole = METASPACE.encode("the quick brown fox").ids

    streamed = joined(detokenize(METASPACE, blocks(whole[len(prompt) :], [2]), prompt=prompt))

    assert streamed == " brown fox"


def test_special_tokens_between_words_leave_no_trace() -> None:
    the, dog = METASPACE.encode("the").ids, METASPACE.encode("dog").ids
    eos = token_id(METASPACE, tiny_tokenizers.EOS)

    streamed = joined(detokenize(METASPACE, blocks([*the, eos, *dog], [1])))

    assert streamed == "the dog"


def test_special_tokens_are_kept_on_request() -> None:
    token_ids = [*BYTE_LEVEL.encode("go").ids, EOS_ID, *BYTE_LEVEL.encode("on").ids]

    kept = SamplingParams(skip_special_tokens=False)

    assert joined(detokenize(BYTE_LEVEL, blocks(token_ids, [2]), kept)) == "go<|end|>on"


def test_a_long_run_of_broken_bytes_is_not_held_for_ever() -> None:
    byte = BYTE_LEVEL.encode("😀").ids[-1]
    characters = CharacterDecoder(BYTE_LEVEL)

    pieces = [characters.push(byte) for _ in range(100)]

    assert "".join(pieces) + characters.flush() == "\ufffd" * 100
    assert sum(map(bool, pieces)) == 3


@given(
    text=st.text("ab\n", max_size=40),
    stop=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 9), min_size=1),
)
def test_stop_strings_end_the_text_where_a_reader_of_characters_would(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stop))]
    expected, found = text, None
    if ends:
        found = max((one for one in stop if text[: ends[0]].endswith(one)), key=len)
        expected = text[: ends[0] - len(found)]

    scanner, released, stopped, position, turn = StopScanner(stop), "", None, 0, 0
    while position < len(text) and stopped is None:
        size = cuts[turn % len(cuts)]
        certain, stopped = scanner.push(text[position : position + size])
        released, position, turn = released + certain, position + size, turn + 1
        assert expected.startswith(released)
    released += scanner.flush()

    assert (released, stopped) == (expected, found)


def test_text_that_cannot_become_a_stop_string_is_not_held() -> None:
    scanner = StopScanner(["\nUser:"])

    assert scanner.push("hello\n") == ("hello", None)
    assert scanner.push("world") == ("\nworld", None)


@pytest.mark.parametrize("position", range(9))
def test_text_and_tokens_end_together_at_every_position_of_a_block(position: int) -> None:
    letters = [token_id(BYTE_LEVEL, letter) for letter in "vwxyzVWXYZ"]
    block = [*letters[:position], token_id(BYTE_LEVEL, "!"), *letters[position:8]]
    params = SamplingParams(stop=("!",))

    (output,) = detokenize(BYTE_LEVEL, iter([GenerateOutput(block, round=Round(8, 8))]), params)

    assert output.text == "vwxyzVWXYZ"[:position]
    assert output.token_ids == block[: position + 1]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "!")
    assert output.speculation.accepted_token_count == min(position + 1, 8)
    assert sum(output.speculation.accepted_per_position) == min(position + 1, 8)


def test_a_stop_string_across_blocks_is_found_and_never_sent() -> None:
    token_ids = [token_id(BYTE_LEVEL, letter) for letter in "abXYZcd"]

    outputs = detokenize(BYTE_LEVEL, blocks(token_ids, [3]), SamplingParams(stop=("XYZ",)))

    assert [output.text for output in outputs] == ["ab", ""]
    assert outputs[-1].stop_reason == "XYZ"
    assert [len(output.token_ids) for output in outputs] == [3, 2]


def test_a_stop_token_has_no_text_and_counts() -> None:
    token_ids = BYTE_LEVEL.encode("go on").ids
    output = GenerateOutput(token_ids, FinishReason.STOP, token_ids[-1])

    (end,) = detokenize(BYTE_LEVEL, iter([output]), SamplingParams(stop_token_ids=(token_ids[-1],)))

    assert end.text == BYTE_LEVEL.decode(token_ids[:-1])
    assert end.token_ids == token_ids
    assert end.stop_reason == token_ids[-1]


@pytest.mark.parametrize(("ignore_eos", "stop_reason"), [(False, None), (True, EOS_ID)])
def test_end_of_sequence_is_no_stop_reason_unless_it_is_only_a_stop_token(
    ignore_eos: bool, stop_reason: int | None
) -> None:
    params = SamplingParams(stop_token_ids=(EOS_ID,), ignore_eos=ignore_eos)

    (end,) = detokenize(
        BYTE_LEVEL, iter([GenerateOutput([EOS_ID], FinishReason.STOP, EOS_ID)]), params
    )

    assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, stop_reason)


def test_held_text_is_given_back_when_the_output_breaks_off() -> None:
    request = GenerateRequest("one", [1], SamplingParams(stop=("dog",)))
    detokenizer = Detokenizer(BYTE_LEVEL, request)
    token_ids = [token_id(BYTE_LEVEL, "d"), *BYTE_LEVEL.encode("😀").ids[:2]]

    assert detokenizer.push(GenerateOutput(token_ids)).text == ""
    assert detokenizer.flush().text == "d\ufffd"


def scanned(stop: Sequence[str], pieces: Sequence[str], num_passed: int, keeps: bool) -> str:
    """Returns the text up to the first stop string that ends after `num_passed` pieces."""
    scanner = StopScanner(stop, keeps_stop=keeps)
    text = ""
    for count, piece in enumerate(pieces, start=1):
        certain, found = scanner.push(piece, may_stop=count > num_passed)
        text += certain
        if found is not None:
            return text
    return text + scanner.flush()


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=9),
    st.integers(0, 9),
    st.booleans(),
)
def test_a_stop_string_counts_where_it_ends(
    stop: list[str], pieces: list[str], num_passed: int, keeps: bool
) -> None:
    """Against the definition: the first end behind the text that may not stop, of the longest."""
    text = "".join(pieces)
    first = len("".join(pieces[:num_passed]))
    ends = [
        (end, -len(one), one)
        for one in stop
        for end in range(first + 1, len(text) + 1)
        if text[:end].endswith(one)
    ]
    expected = text
    if ends:
        end, _, one = min(ends)
        expected = text[: end if keeps else end - len(one)]

    assert scanned(stop, pieces, num_passed, keeps) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 4])
def test_min_tokens_holds_back_stop_strings_for_exactly_that_many(
    min_tokens: int, size: int
) -> None:
    token = BYTE_LEVEL.encode("a", add_special_tokens=False).ids
    assert len(token) == 1
    params = SamplingParams(stop=("a",), min_tokens=min_tokens)

    outputs = detokenize(BYTE_LEVEL, blocks(token * 9, [size]), params)

    assert sum(len(output.token_ids) for output in outputs) == min_tokens + 1
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert joined(outputs) == "a" * min_tokens


def test_a_stop_token_has_text_if_asked_for() -> None:
    token_ids = BYTE_LEVEL.encode("the dog", add_special_tokens=False).ids
    output = GenerateOutput(token_ids, FinishReason.STOP, token_ids[-1])

    for keeps, expected in ((False, token_ids[:-1]), (True, token_ids)):
        params = SamplingParams(stop_token_ids=(token_ids[-1],), include_stop_str_in_output=keeps)
        [whole] = detokenize(BYTE_LEVEL, iter([output]), params)
        assert whole.text == BYTE_LEVEL.decode(expected)
        assert (whole.token_ids, whole.stop_reason) == (token_ids, token_ids[-1])


def test_output_that_is_not_detokenized_has_tokens_only() -> None:
    token_ids = BYTE_LEVEL.encode("the dog").ids

    outputs = detokenize(BYTE_LEVEL, blocks(token_ids, [2]), SamplingParams(detokenize=False))

    assert joined(outputs) == ""
    assert [i for output in outputs for i in output.token_ids] == token_ids


@given(text=TEXTS, sizes=BLOCK_SIZES, stop=st.text("ab n", min_size=1, max_size=3))
def test_log_probabilities_end_where_the_tokens_do(text: str, sizes: list[int], stop: str) -> None:
    token_ids = BYTE_LEVEL.encode(text).ids
    scored = (
        output._replace(
            logprobs=tuple(TokenLogprobs((token_id,), (-1.0,), 1) for token_id in output.token_ids),
        )
        for output in blocks(token_ids, sizes)
    )

    for output in detokenize(BYTE_LEVEL, scored, SamplingParams(stop=(stop,))):
        assert [one.token_ids[0] for one in output.logprobs] == list(output.token_ids)
