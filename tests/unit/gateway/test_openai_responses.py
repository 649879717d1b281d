from gateway.detokenizer import TextOutput
from gateway.openai_responses import Answer
from specgw.types import FinishReason

OUTPUTS = [TextOutput("one ", [1]), TextOutput("two", [2, 3], FinishReason.STOP)]


def test_a_whole_answer_has_all_text() -> None:
    answer = Answer(0, [7])

    for output in OUTPUTS:
        answer.add_whole(output)

    assert (answer.text, answer.token_ids) == ("one two", [1, 2, 3])


def test_a_streamed_answer_keeps_no_text() -> None:
    answer = Answer(0, [7])

    for output in OUTPUTS:
        answer.add(output)

    assert answer.text == ""
    assert (answer.token_ids, answer.ending) == ([1, 2, 3], ("stop", None))
