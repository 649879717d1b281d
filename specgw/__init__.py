"""specgw: split speculative decoding as a service.

What users import is resolved on first use, so that importing the package stays light.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgw.llm import LLM as LLM
    from specgw.structured_outputs import StructuredOutputsParams as StructuredOutputsParams
    from specgw.types import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams", "StructuredOutputsParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from specgw.llm import LLM

        return LLM
    if name == "SamplingParams":
        from specgw.types import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":
        from specgw.structured_outputs import StructuredOutputsParams

        return StructuredOutputsParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
