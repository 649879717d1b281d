"""specgw: split speculative decoding as a service.

`LLM` and `SamplingParams` are resolved on first use, so that importing the package stays light.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgw.llm import LLM as LLM
    from specgw.types import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from specgw.llm import LLM

        return LLM
    if name == "SamplingParams":
        from specgw.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
