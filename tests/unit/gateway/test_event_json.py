import json

import pytest

from gateway.detokenizer import TextOutput
from gateway.event_json import ChunkTemplate, to_json
from gateway.openai_responses import Answer, ChatFormat, CompletionFormat, FormatOptions
from specgw.types import FinishReason

TEXTS = ["dog", 'say "no"', "a\\b", "\x00\x1f\x7f", "line\nend\u2028", "größer 你好 🙂", "\ufffd"]
IDS = ["plain", '"\x00"', "\\u0000", '"\\u0000"']


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("around", IDS)
def test_a_template_writes_what_the_whole_body_is(text: str, around: str) -> None:
    def body(text: str) -> dict[str, object]:
        return {"id": around, "choices": [{"text": text, "logprobs": None}], "model": around}

    written = ChunkTemplate(body).to_json(text)

    assert written == to_json(body(text))
    assert json.loads(written) == body(text)


@pytest.mark.parametrize("form", [CompletionFormat, ChatFormat])
@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("return_token_ids", [False, True])
def test_events_are_the_chunks_of_the_outputs(
    form: type[CompletionFormat], with_usage: bool, return_token_ids: bool
) -> None:
    options = FormatOptions("print", 4, str, num_answers=2, return_token_ids=return_token_ids)
    outputs = [
        *(TextOutput(text, [place]) for place, text in enumerate(TEXTS)),
        TextOutput("", [7]),
        TextOutput("end", [8], FinishReason.STOP, "stop"),
    ]
    answers, expected = [Answer(0, [1], seed=3), Answer(1, [1], seed=4)], []
    responses = form("request", "model", options)
    twins = [Answer(0, [1], seed=3), Answer(1, [1], seed=4)]

    events: list[bytes] = []
    for output in outputs:
        for answer, twin in zip(answers, twins, strict=True):
            events += responses.events(answer, output, with_usage=with_usage)
            opening = responses.opening(twin) if twin.last is None else None
            chunk = responses.chunk(twin, twin.add(output), with_usage=with_usage)
            expected += [body for body in (opening, chunk) if body is not None]

    assert [json.loads(event) for event in events] == expected
