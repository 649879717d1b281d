"""vLLM's `structured_outputs_config`: what holds for the constraints of all requests."""

from typing import ClassVar, Literal

from specgw.config_rules import Rule, Ruled

Backend = Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"]


class StructuredOutputsConfig(Ruled):
    """What holds for the constraints of all requests. Keys, defaults and rules are vLLM's."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "disable_any_whitespace",
            lambda c: not c.disable_any_whitespace or c.backend in ("xgrammar", "guidance"),
            "goes only with backend xgrammar or guidance, got {c.backend}",
        ),
        Rule(
            "disable_additional_properties",
            lambda c: not c.disable_additional_properties or c.backend == "guidance",
            "goes only with backend guidance, got {c.backend}",
        ),
    )

    backend: Backend = "auto"
    """Which library keeps texts to their constraints. `auto` is `guidance`."""
    disable_any_whitespace: bool = False
    """Lets JSON have no whitespace between its parts, for every request."""
    disable_additional_properties: bool = False
    """Lets objects have no properties but those that a schema lists, where it does not say whether
    they may, for every request."""
    reasoning_parser: str = ""
    """What tells a model's reasoning from its answer."""
    reasoning_parser_plugin: str = ""
    """Where more such parsers are."""
    enable_in_reasoning: bool = False
    """Lets constraints hold while a model reasons, too."""
