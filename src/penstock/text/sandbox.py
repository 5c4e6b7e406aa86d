"""Runs chat templates of strangers: no way out, and no way to run or write without end.

Jinja's own sandbox keeps templates away from Python's internals, but not from time and memory. Here every loop turn,
call and written text is charged to a meter, operations whose one execution could be huge (repeating, joining, padding,
formatting) are checked before they run, and filters that no chat template needs are absent. The meter counts work, not
seconds: the same template and messages are refused on every machine or on none.
"""

from __future__ import annotations

import operator
import re
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from penstock.text.template_filters import (
    check_call,
    check_format,
    check_power,
    check_product,
    make_filters,
)
from penstock.text.template_meter import meter


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Sees every text before it is written, whether to the output or into a macro's or variable's buffer."""
    limit = meter()
    if not isinstance(value, str):
        limit.walk(value, text=True)
        value = str(value)
    limit.spend(1)
    limit.chars -= len(value)
    if limit.chars < 0:
        limit.fits(limit.max_text + 1)
    return value


@jinja2.pass_context
def _tick(context: Context, value: Any, units: int) -> bool:
    meter().spend(units)
    return True


@jinja2.pass_context
def _weigh(context: Context, value: Any) -> Any:
    """Charge for reading `value` once from end to end."""
    if isinstance(value, str):
        meter().spend(len(value) >> 8)
    elif isinstance(value, list | tuple | dict):
        meter().walk(value, text=False)
    return value


@jinja2.pass_context
def _concat(context: Context, value: list[Any]) -> str:
    meter().walk(value, text=True)
    return str(meter().made("".join(map(str, value))))


@jinja2.pass_context
def _made(context: Context, value: Any) -> Any:
    return meter().made(value)


class _Metering(NodeTransformer):
    """Rewrites a parsed template so that it pays for what Jinja would do without asking the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_cost(node.body)))
        if node.test is not None:
            node.test = nodes.And(_cost([node.test]), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_cost(node.body)))
        return node

    visit_CallBlock = visit_Macro
    visit_Block = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        # Template text would be written without `finalize` seeing it.
        node.nodes = [nodes.Const(n.data) if isinstance(n, nodes.TemplateData) else n for n in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes), "_concat")

    def visit_List(self, node: nodes.List | nodes.Dict | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _filter(node, "_weigh")

    visit_Dict = visit_List
    visit_Tuple = visit_List

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filter(node.expr, "_weigh")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "_weigh")
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.args:
            node.node = _filter(node.node, "_weigh")
            node.args = [_filter(arg, "_weigh") for arg in node.args]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_made") if isinstance(node.arg, nodes.Slice) else node


def _filter(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _cost(body: list[Any]) -> nodes.Filter:
    """A charge for running `body` once, by its size."""
    size = sum(1 for part in body for _ in part.find_all(nodes.Node)) + len(body)
    return _filter(nodes.Const(None, lineno=body[0].lineno if body else 1), "_tick", nodes.Const(1 + size // 6))


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; for serving it is its own content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(list(parser.parse_statements(("name:endgeneration",), drop_needle=True)), lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja environment for chat templates, with Hugging Face's extras: `tojson` (no HTML escapes, no ASCII escapes),
    `raise_exception`, `strftime_now`, `break` and `continue`, trimmed blocks."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControls, _Generation], finalize=_finalize
        )
        self.filters = make_filters() | {
            "_tick": _tick, "_weigh": _weigh, "_concat": _concat, "_made": _made,
        }  # fmt: skip
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _dict}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Metering().visit(tree)
        tree.set_environment(self)
        return tree

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        limit = meter()
        limit.spend(3)
        check_call(limit, obj, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        return limit.made(result)

    def call_binop(self, context: Context, operator_: str, left: Any, right: Any) -> Any:
        limit = meter()
        if operator_ == "**":
            check_power(left, right)
            return left**right
        if operator_ == "%":
            if isinstance(left, str):
                check_format(limit, left, right)
            return limit.made(left % right)
        if operator_ == "*":
            check_product(limit, left, right)
            return limit.made(left * right)
        if isinstance(left, str) and isinstance(right, str):
            limit.fits(len(left) + len(right))
        return limit.made(operator.add(left, right))


def _raise_exception(message: Any) -> None:
    meter().walk(message, text=True)
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if not isinstance(form, str) or len(form) > 256 or re.search(r"\d{3}", form):
        raise SecurityError("strftime_now: the format must be a short string")
    return datetime.now().strftime(form)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    made: dict[Any, Any] = dict(*args, **kwargs)
    meter().walk(made, text=False)
    return made
