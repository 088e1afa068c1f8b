"""How chat templates are compiled, so that their environment sees loops, comparisons, output and slices.

It extends Jinja's code generator at its seams (`visit_*`, `_output_*`); `tests/templating` holds canaries that fail if
a release of Jinja moves them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser

DICT_ATTRIBUTES = frozenset(dir(dict))


class BoundedCodeGenerator(CodeGenerator):
    """Has the environment count rounds of loops, and look at whatever is joined, compared, printed or cut."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, announce("step", [], node.lineno))
        super().visit_For(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"environment.{node.node.name}(")  # a hook (`announce`) is no call of the template's
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        if not isinstance(node.node, nodes.Name) or node.attr in DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        # `message.role` of a dict that has it, without a call; `environment.getattr` would give the same
        name = frame.symbols.ref(node.node.name)
        self.write(f"({name}[{node.attr!r}] if type({name}) is dict and {node.attr!r} in {name} else ")
        super().visit_Getattr(node, frame)
        self.write(")")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        # `a + b + c` is one call
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            terms.append(left.right)
            left = left.left
        self.write("environment.added(context, (")
        for term in (left, *reversed(terms)):
            self.visit(term, frame)
            self.write(", ")
        self.write("))")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined(context.eval_ctx.autoescape, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._compared(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        operator = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in",
                    "notin": "not in"}[node.op]  # fmt: skip
        self.write(f" {operator} ")
        self._compared(node.expr, frame)

    def _compared(self, node: nodes.Expr, frame: Frame) -> None:
        if isinstance(node, nodes.Const):  # it stands in the template, so it is small
            self.visit(node, frame)
            return
        self.write("environment.compared(")
        self.visit(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.cut(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
            return
        self.write("environment.held(")
        super().visit_Tuple(node, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.held(")
        super().visit_Dict(node, frame)
        self.write(")")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        # nothing is worked out while a template is read: what it makes is bounded where it runs
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        super()._output_child_pre(node, frame, finalize)
        self.write("environment.printed(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")
        super()._output_child_post(node, frame, finalize)


class GenerationBlock(Extension):
    """``{% generation %}``: other tools mark trained text with it; here ownership is known without, so it passes on."""

    tags = {"generation"}  # noqa: RUF012  declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_pass_on"), [], [], body).set_lineno(line)

    def _pass_on(self, caller: Callable[[], str]) -> str:
        return caller()


def announce(hook: str, names: list[str], line: int) -> nodes.ExprStmt:
    """A statement that calls the environment's method ``hook`` with some variables."""
    loaded: list[nodes.Expr] = [nodes.Name(name, "load") for name in names]
    call = nodes.Call(nodes.EnvironmentAttribute(hook), loaded, [], None, None)
    return nodes.ExprStmt(call, lineno=line)
