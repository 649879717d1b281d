"""What a drafter is given beside its model."""

import os
import sys
import threading

import pytest

from proposer_svc.model_drafter import load_model_drafter
from specgw.config import parse_config

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.mark.skipif(sys.platform != "linux", reason="has no priorities of threads")
@pytest.mark.parametrize(
    ("yield_cores", "listen", "yields"),
    [
        ("auto", "unix:/tmp/p.sock", True),
        ("auto", "127.0.0.1:50052", True),
        ("auto", "0.0.0.0:50052", False),
        ("on", "0.0.0.0:50052", True),
        ("off", "127.0.0.1:50052", False),
    ],
)
@pytest.mark.parametrize("draft", ["tiny/draft", "tiny/pard"])
def test_its_thread_yields_the_cores_to_a_target_on_this_machine(
    draft: str, yield_cores: str, listen: str, yields: bool
) -> None:
    args = parse_config({
        "model": "tiny/target",
        "speculative_config": {
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": 4,
            "parallel_drafting": draft == "tiny/pard",
        },
        "specgw": {
            "allow_insecure": True,
            "proposer": {"yield_cores": yield_cores, "listen": listen, "kv_cache_tokens": 256},
        },
        "max_model_len": 128,
    })  # fmt: skip
    drafter = load_model_drafter(args)
    priorities: list[int] = []

    def enter() -> None:
        drafter.enter_thread()
        priorities.append(os.getpriority(os.PRIO_PROCESS, 0))

    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()

    assert priorities == [19 if yields else before]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
