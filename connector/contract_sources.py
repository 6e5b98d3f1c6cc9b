"""Reads vLLM's sources without importing them.

Enough of Python's scoping to answer "what does this class have, its bases
included", for a release that is not installed and on a machine without torch.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_MAX_HOPS = 8
"""Re-exports followed from one ``__init__`` to the next before giving up."""


@dataclass(frozen=True)
class ClassSource:
    """A class as written, with where it was found."""

    tree: SourceTree
    module: str
    node: ast.ClassDef

    def lineage(self) -> Iterator[ClassSource]:
        """The class, then its bases depth first, as far as they are vLLM's."""
        yield self
        for base in self.node.bases:
            name = ast.unparse(base).split("[")[0]
            found = self.tree.find(self.module, name)
            if isinstance(found, ClassSource):
                yield from found.lineage()

    def method(self, name: str) -> FunctionNode | None:
        """The method that an instance would run."""
        for source in self.lineage():
            for node in source.node.body:
                if isinstance(node, FunctionNode) and node.name == name:
                    return node
        return None

    def abstract_methods(self) -> set[str]:
        """Names declared abstract and not implemented nearer to the class."""
        seen: dict[str, bool] = {}
        for source in self.lineage():
            for node in source.node.body:
                if isinstance(node, FunctionNode):
                    marked = any("abstractmethod" in ast.unparse(d) for d in node.decorator_list)
                    seen.setdefault(node.name, marked)
        return {name for name, abstract in seen.items() if abstract}

    def fields(self) -> dict[str, bool]:
        """Class-level names with whether they have a default: fields, enum members."""
        found: dict[str, bool] = {}
        for source in self.lineage():
            for node in source.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    found.setdefault(node.target.id, node.value is not None)
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        found.setdefault(ast.unparse(target), True)
        return found

    def attributes(self) -> set[str]:
        """What an instance has: fields, methods, properties and ``self.x = …``."""
        found = set(self.fields())
        for source in self.lineage():
            for node in ast.walk(source.node):
                if isinstance(node, FunctionNode):
                    found.add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    found.add(ast.unparse(node).removeprefix("self."))
        return found


class SourceTree:
    """A folder that holds ``vllm/``.

    Args:
        root: the folder above ``vllm``, or the package's own folder.

    """

    def __init__(self, root: Path) -> None:
        self.root = root.parent if root.name == "vllm" else root

    @functools.cached_property
    def version(self) -> str:
        """Release of the sources, "unknown" if they do not say."""
        try:
            text = (self.root / "vllm" / "_version.py").read_text()
        except OSError:
            return "unknown"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = {ast.unparse(target) for target in node.targets}
                if names & {"__version__", "version"} and isinstance(node.value.value, str):
                    return node.value.value
        return "unknown"

    @functools.cache  # noqa: B019 -- a tree lives as long as one check
    def parse(self, module: str) -> ast.Module | None:
        """Syntax tree of a module, None if there is no such file."""
        base = self.root.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return ast.parse(path.read_text(), str(path))
        return None

    def find(
        self, module: str, name: str, hops: int = _MAX_HOPS
    ) -> ClassSource | FunctionNode | ast.expr | None:
        """What a name means in a module, imports followed."""
        tree = self.parse(module)
        for node in tree.body if tree is not None else ():
            if isinstance(node, ast.ClassDef) and node.name == name:
                return ClassSource(self, module, node)
            if isinstance(node, FunctionNode) and node.name == name:
                return node
            if isinstance(node, ast.AnnAssign | ast.Assign) and _assigns(node, name):
                return node.value or ast.Constant(None)
        return self._imported(tree, name, hops) if tree is not None and hops else None

    def _imported(
        self, tree: ast.Module, name: str, hops: int
    ) -> ClassSource | FunctionNode | ast.expr | None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find(node.module, alias.name, hops - 1)
        return None

    def function(self, module: str, names: Sequence[str]) -> FunctionNode | None:
        """The first of ``names`` that exists: ``function`` or ``Class.method``."""
        for name in names:
            owner, _, method = name.rpartition(".")
            found = self.find(module, owner or method)
            if isinstance(found, ClassSource):
                found = found.method(method)
            if isinstance(found, FunctionNode):
                return found
        return None


def uses(function: ast.AST, name: str) -> list[tuple[int, int]]:
    """Where a function mentions ``name`` or something that ends in ``.name``, in order."""
    return sorted(
        (node.lineno, node.col_offset)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute | ast.Name)
        and f".{ast.unparse(node)}".endswith(f".{name}")
    )


def _assigns(node: ast.AnnAssign | ast.Assign, name: str) -> bool:
    targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)
