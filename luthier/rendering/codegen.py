"""How chat templates are compiled, so that their environment sees output, concatenation and loops.

It extends Jinja's code generator at its seams (`visit_*`, `_output_*`); `tests/rendering` holds canaries that fail if a
release of Jinja moves them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame

from luthier.templating.codegen import BoundedCodeGenerator, announce


class TrackingCodeGenerator(BoundedCodeGenerator):
    """Compiles constants, output, ``~`` and loops so that the environment sees them."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.own({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(f"environment.own({node.data!r})")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not (isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str)):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.getitem(")  # the name is no text
        self.visit(node.node, frame)
        self.write(f", {node.arg.value!r})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        # `tracked in plain` is a method of the plain string, which would tell nobody
        if len(node.ops) != 1 or node.ops[0].op not in ("in", "notin"):
            super().visit_Compare(node, frame)
            return
        self.write("(not " if node.ops[0].op == "notin" else "(")
        self.write("environment.contains(environment.compared(")
        self.visit(node.ops[0].expr, frame)
        self.write("), environment.compared(")
        self.visit(node.expr, frame)
        self.write(")))")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.body.insert(0, _announce("enter", node.target))
        self.writeline("environment.open_loop()")
        CodeGenerator.visit_For(self, node, frame)  # `enter` takes the step
        self.writeline("environment.close_loop()")

    def visit_Assign(self, node: nodes.Assign, frame: Frame) -> None:
        super().visit_Assign(node, frame)
        # `{% set message = messages[i] %}` in a loop over indices stands for `{% for message in messages %}`
        if isinstance(node.target, nodes.Name):
            self.visit(_announce("assign", node.target), frame)

    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:
        # `{% autoescape true %}` changes what printing, `~`, macros and filters do
        if not all(isinstance(option.value, nodes.Const) and not option.value.value for option in node.options):
            self.writeline("environment.refuse_escaping()", node)
        super().visit_EvalContextModifier(node, frame)

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible  # nothing is worked out before there is a row
        return node.data

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.emit(environment.own({''.join(str(part) for part in group)!r}))"

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.emit(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(f", {node.lineno})")


def _announce(hook: str, target: nodes.Node) -> nodes.ExprStmt:
    targets = [target] if isinstance(target, nodes.Name) else target.find_all(nodes.Name)
    return announce(hook, [name.name for name in targets], target.lineno)
