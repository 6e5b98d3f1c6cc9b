"""The kinds of things that kvtiers may rely on in vLLM, and how each is checked.

Every kind can be checked in the sources (``in_sources``). What can be seen on
an imported class is checked there too (``at_runtime``); order of calls and
attributes that only instances have cannot.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvtiers.connector.contract_sources import ClassSource, FunctionNode, SourceTree, uses


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken promise. ``str`` of it says what is missing and why that matters."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what} ({self.why})"


class Entry(Protocol):
    """One line of the contract."""

    def at_runtime(self) -> Iterator[Problem]:
        """Problems of the vLLM that is imported."""

    def in_sources(self, tree: SourceTree) -> Iterator[Problem]:
        """Problems of the vLLM whose files these are."""


class Role(enum.Enum):
    """Who calls a method, which decides what may change in its signature."""

    CALLED = "called"
    """We call it: our arguments must stay the first, and what follows optional."""
    OVERRIDDEN = "overridden"
    """vLLM calls ours: it may pass nothing that ours does not take."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Parameters without ``self`` or ``cls``: name to whether it must be passed."""

    required: Mapping[str, bool]
    open: bool = False

    @classmethod
    def of_source(cls, node: FunctionNode, *, bound: bool) -> Signature:
        """Read from a syntax tree. ``bound`` drops the first parameter."""
        args = node.args
        positional = [*args.posonlyargs, *args.args]
        first_default = len(positional) - len(args.defaults)
        required = {arg.arg: index < first_default for index, arg in enumerate(positional)}
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
            required[arg.arg] = default is None
        static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
        if bound and not static:
            required.pop(positional[0].arg)
        return cls(required, open=args.kwarg is not None)

    @classmethod
    def of_object(cls, function: Any, *, bound: bool) -> Signature:
        """Read from a function as a class's ``__dict__`` holds it."""
        static = isinstance(function, staticmethod)
        parameters = list(inspect.signature(inspect.unwrap(_plain(function))).parameters.values())
        if bound and not static:
            parameters = parameters[1:]
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = {p.name: p.default is p.empty for p in parameters if p.kind not in variadic}
        return cls(required, open=any(p.kind is p.VAR_KEYWORD for p in parameters))


def _plain(function: Any) -> Any:
    return function.__func__ if isinstance(function, staticmethod | classmethod) else function


@dataclass(frozen=True, slots=True)
class Method:
    """A method or function, and the parameters we know of it.

    Attributes:
        name: its name.
        params: ours, in order, blank-separated.
        why: what breaks without it.
        role: who calls it.
        newer: parameters some supported releases lack. Ours takes them.

    """

    name: str
    params: str
    why: str
    role: Role = Role.CALLED
    newer: str = ""

    def compare(self, owner: str, theirs: Signature) -> Iterator[Problem]:
        """Problems with vLLM's signature of it, ``owner`` being how to name it."""
        where = f"{owner}.{self.name}"
        ours, newer = self.params.split(), self.newer.split()
        for name in ours:
            if name not in theirs.required and not theirs.open:
                yield Problem(f"parameter {name!r} of {where}", self.why)
        known = [name for name in theirs.required if name in ours]
        if known != [name for name in ours if name in theirs.required]:
            yield Problem(f"order of the parameters of {where}: {', '.join(known)}", self.why)
        for name, required in theirs.required.items():
            foreign = name not in ours and name not in newer
            if foreign and (required or self.role is Role.OVERRIDDEN):
                yield Problem(f"{where} without the new parameter {name!r}", self.why)


def overridden(name: str, params: str, why: str, newer: str = "") -> Method:
    """A method that vLLM calls on our subclass."""
    return Method(name, params, why, Role.OVERRIDDEN, newer)


@dataclass(frozen=True, slots=True)
class Class:
    """A class: that it exists, and what of it we use.

    Attributes:
        module: where we import it from.
        name: its name.
        why: what we need it for.
        methods: methods we call or override.
        fields: class-level names: dataclass fields, enum members.
        attributes: what its instances have; seen in the sources only.
        subclassed: a new abstract method would break our subclass.
        built: we construct it with ``fields``, so a new field needs a default.
        runtime: False where the import is heavy or needs a GPU.

    """

    module: str
    name: str
    why: str
    methods: tuple[Method, ...] = ()
    fields: str = ""
    attributes: str = ""
    subclassed: bool = False
    built: bool = False
    runtime: bool = True

    def at_runtime(self) -> Iterator[Problem]:
        """See ``Entry``."""
        if not self.runtime:
            return
        cls = _imported(self.module, self.name)
        if cls is None:
            yield Problem(f"class {self.module}.{self.name}", self.why)
            return
        for method in self.methods:
            try:
                function = inspect.getattr_static(cls, method.name)
            except AttributeError:
                yield Problem(f"method {self.name}.{method.name}", method.why)
            else:
                theirs = Signature.of_object(function, bound=True)
                yield from method.compare(self.name, theirs)
        yield from self._compare_fields(_runtime_fields(cls))
        if self.subclassed:
            yield from self._unknown_abstract(getattr(cls, "__abstractmethods__", frozenset()))

    def in_sources(self, tree: SourceTree) -> Iterator[Problem]:
        """See ``Entry``."""
        cls = tree.find(self.module, self.name)
        if not isinstance(cls, ClassSource):
            yield Problem(f"class {self.module}.{self.name}", self.why)
            return
        for method in self.methods:
            node = cls.method(method.name)
            if node is None:
                yield Problem(f"method {self.name}.{method.name}", method.why)
            else:
                yield from method.compare(self.name, Signature.of_source(node, bound=True))
        yield from self._compare_fields(cls.fields())
        missing = set(self.attributes.split()) - cls.attributes()
        for name in sorted(missing):
            yield Problem(f"attribute {self.name}.{name}", self.why)
        if self.subclassed:
            yield from self._unknown_abstract(cls.abstract_methods())

    def _compare_fields(self, defaults: Mapping[str, bool]) -> Iterator[Problem]:
        ours = self.fields.split()
        for name in ours:
            if name not in defaults:
                yield Problem(f"{self.name}.{name}", self.why)
        for name, has_default in defaults.items() if self.built else ():
            if not has_default and name not in ours:
                yield Problem(f"{self.name} without the new field {name!r}", self.why)

    def _unknown_abstract(self, abstract: frozenset[str] | set[str]) -> Iterator[Problem]:
        ours = {method.name for method in self.methods if method.role is Role.OVERRIDDEN}
        for name in sorted(abstract - ours):
            yield Problem(f"{self.name} without the new abstract method {name}", self.why)


def _imported(module: str, name: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _runtime_fields(cls: Any) -> dict[str, bool]:
    """Name to whether it has a default, for dataclasses, named tuples and enums."""
    if dataclasses.is_dataclass(cls):
        missing = dataclasses.MISSING
        return {
            f.name: f.default is not missing or f.default_factory is not missing
            for f in dataclasses.fields(cls)
        }
    members: Iterable[str] = getattr(cls, "__members__", getattr(cls, "_fields", ()))
    defaults: Mapping[str, Any] = getattr(cls, "_field_defaults", {})
    return {name: name in defaults for name in members}


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a module, which we call. ``runtime`` as in ``Class``."""

    module: str
    method: Method
    runtime: bool = True

    def at_runtime(self) -> Iterator[Problem]:
        """See ``Entry``."""
        if not self.runtime:
            return
        function = _imported(self.module, self.method.name)
        if function is None:
            yield Problem(f"function {self.module}.{self.method.name}", self.method.why)
        else:
            yield from self.method.compare(self.module, Signature.of_object(function, bound=False))

    def in_sources(self, tree: SourceTree) -> Iterator[Problem]:
        """See ``Entry``."""
        node = tree.function(self.module, [self.method.name])
        if node is None:
            yield Problem(f"function {self.module}.{self.method.name}", self.method.why)
        else:
            yield from self.method.compare(self.module, Signature.of_source(node, bound=False))


@dataclass(frozen=True, slots=True)
class Named:
    """Anything else that we import: that it exists."""

    module: str
    name: str
    why: str

    def at_runtime(self) -> Iterator[Problem]:
        """See ``Entry``."""
        if _imported(self.module, self.name) is None:
            yield Problem(f"name {self.module}.{self.name}", self.why)

    def in_sources(self, tree: SourceTree) -> Iterator[Problem]:
        """See ``Entry``."""
        if tree.find(self.module, self.name) is None:
            yield Problem(f"name {self.module}.{self.name}", self.why)


@dataclass(frozen=True, slots=True)
class SourceFact:
    """What only the sources show. The base of the kinds below.

    Attributes:
        name: what a failure calls it.
        module: where the function is.
        functions: names it has had, ``Class.method``; the first found counts.
        why: what we build on it.

    """

    name: str
    module: str
    functions: tuple[str, ...]
    why: str

    def at_runtime(self) -> Iterator[Problem]:
        """See ``Entry``: nothing can be seen."""
        return iter(())

    def in_sources(self, tree: SourceTree) -> Iterator[Problem]:
        """See ``Entry``."""
        function = tree.function(self.module, self.functions)
        if function is None:
            yield Problem(f"{self.name}: function {' or '.join(self.functions)}", self.why)
        elif (broken := self.broken(function)) is not None:
            yield Problem(f"{self.name}: {broken}", self.why)

    def broken(self, function: FunctionNode) -> str | None:
        """How the function breaks the promise, None if it keeps it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Order(SourceFact):
    """All of ``before`` stands above all of ``after`` in the function.

    Each is a name or dotted tail of one ("manager.reset_cache"), or several
    separated by ``|`` of which one is enough.
    """

    before: str = ""
    after: str = ""

    def broken(self, function: FunctionNode) -> str | None:
        """See ``SourceFact``."""
        spots = []
        for side in (self.before, self.after):
            found = sorted(spot for name in side.split("|") for spot in uses(function, name))
            if not found:
                return f"{side} in {function.name}"
            spots.append(found)
        if spots[0][-1] < spots[1][0]:
            return None
        return f"{self.before} before {self.after} in {function.name}"


@dataclass(frozen=True, slots=True)
class Says(SourceFact):
    """A statement or expression stands in the function, whatever its line breaks."""

    text: str = ""

    def broken(self, function: FunctionNode) -> str | None:
        """See ``SourceFact``."""
        found = any(
            ast.unparse(node) == self.text
            for node in ast.walk(function)
            if isinstance(node, ast.stmt | ast.expr)
        )
        return None if found else f"`{self.text}` in {function.name}"


@dataclass(frozen=True, slots=True)
class Lacks(SourceFact):
    """The function mentions ``name_used`` nowhere."""

    name_used: str = ""

    def broken(self, function: FunctionNode) -> str | None:
        """See ``SourceFact``."""
        return f"{self.name_used} in {function.name}" if uses(function, self.name_used) else None


@dataclass(frozen=True, slots=True)
class Either:
    """Releases differ here, and the connector handles each of the ways named.

    Attributes:
        name: what a failure calls it.
        ways: release that first had it, to what its sources then show.
        why: how the connector copes.

    """

    name: str
    ways: Mapping[str, SourceFact]
    why: str

    def at_runtime(self) -> Iterator[Problem]:
        """See ``Entry``: nothing can be seen."""
        return iter(())

    def observe(self, tree: SourceTree) -> list[str]:
        """Releases whose way the sources follow."""
        return [release for release, way in self.ways.items() if not any(way.in_sources(tree))]

    def in_sources(self, tree: SourceTree) -> Iterator[Problem]:
        """See ``Entry``."""
        if not self.observe(tree):
            yield Problem(f"{self.name}: none of the known ways", self.why)


@dataclass(frozen=True, slots=True)
class DuckType:
    """An object of ours stands in for vLLM's: the module may use only what it has.

    Attributes:
        module: the module that uses it.
        receivers: what it is called there, as written.
        provides: the attributes that ours has.
        why: what our object is.

    """

    module: str
    receivers: frozenset[str]
    provides: frozenset[str]
    why: str

    def at_runtime(self) -> Iterator[Problem]:
        """See ``Entry``: nothing can be seen."""
        return iter(())

    def in_sources(self, tree: SourceTree) -> Iterator[Problem]:
        """See ``Entry``."""
        module = tree.parse(self.module)
        if module is None:
            yield Problem(f"module {self.module}", self.why)
            return
        wanted = {
            node.attr
            for node in ast.walk(module)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in self.receivers
        }
        if not wanted:
            yield Problem(f"any use of {sorted(self.receivers)} in {self.module}", self.why)
        for name in sorted(wanted - self.provides):
            yield Problem(f"{self.module} asks for {name!r} of our stand-in", self.why)
