"""What benchmarks count, on values made up here."""

import socket
import time

import pytest
from prometheus_client import generate_latest

from benchmarks.measurement import StepTimes, SystemId
from benchmarks.stream_client import EventStream, StreamClient
from benchmarks.systems import parse_times
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.scheduler import StepReport

ANSWER = (
    b"HTTP/1.1 200 OK\r\n\r\n"
    b'data: {"choices":[]}\n\ndata: {"choices":[1]}\n\ndata: {"choices":[2]}\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 2, 5, 7, 13, 1000])
def test_events_are_counted_however_the_stream_is_cut(size: int) -> None:
    stream = EventStream()

    counts = [stream.feed(ANSWER[start : start + size]) for start in range(0, len(ANSWER), size)]

    assert (stream.num_events, sum(counts)) == (3, 3)
    assert stream.is_complete


@pytest.mark.parametrize("answer", [ANSWER[:60], ANSWER.replace(b"200 OK", b"503 No")])
def test_a_stream_that_breaks_off_or_is_refused_is_not_complete(answer: bytes) -> None:
    stream = EventStream()

    stream.feed(answer)

    assert not stream.is_complete


def test_a_client_reads_each_stream_to_its_end_with_the_time_of_its_bytes() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        StreamClient(listener.getsockname()[1], lambda count, at: came.append(at)) as client,
    ):
        came: list[float] = []
        began = time.time()
        client.open({"prompt": "x"})
        connection, _ = listener.accept()
        with connection:
            connection.sendall(ANSWER)
        ended = time.time()
        while client.num_open:
            client.read(5)

        [stream] = client.ended
        assert (stream.num_events, stream.is_complete) == (3, True)
        assert all(began <= at <= ended for at in came)


def test_step_times_are_read_from_the_verifiers_metrics() -> None:
    metrics = VerifierMetrics()
    metrics.observe_step(StepReport(num_rows=5, forward_s=0.5, sample_s=0.25, wait_s=2.0))
    metrics.observe_answer(answer_s=4.0, draft_s=3.0)
    exposition = generate_latest(metrics.registry).decode() + "specgw_verifier_steps_total 1.0\n"

    times = parse_times(exposition)

    assert times == StepTimes(1.0, wait=2.0, draft=3.0, wire=1.0, forward=0.5, sample=0.25)
    assert times - times == StepTimes(0, 0, 0, 0, 0, 0)


def test_every_variant_is_compared_with_its_products_plain_decoding() -> None:
    system = SystemId("specgw", 7, "one process")

    assert (str(system), str(system.plain)) == ("specgw one process K=7", "specgw plain")
