"""Tool calls and thoughts in what a model writes, found while it writes."""

from penstock.server.parsing.choose import lead_for, params_for, parser_for, shown, takes_bare, tool_support
from penstock.server.parsing.engine import OutputParser
from penstock.server.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from penstock.server.parsing.tools import check_tools

__all__ = [
    "CallArguments", "CallStart", "Content", "Event", "OutputParser", "Reasoning", "check_tools", "lead_for",
    "params_for", "parser_for", "shown", "takes_bare", "tool_support",
]  # fmt: skip
