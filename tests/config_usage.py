"""Finds which settings the code reads, by the type of what each attribute is taken from.

A small type inference over the syntax trees of `sao_jax`: a name has a settings type through its annotation (parameters, class fields),
through assignment from something that has one (`c = config.model`, `self.config = config`), through `dataclasses.replace`, or through a
function whose return is annotated. An attribute of the same name taken from anything else counts for nothing. `getattr` with a name or
with an f-string that has a fixed part counts for the fields that it can name.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import typing

from sao_jax import config as settings

CLASSES = {c.__name__: c for c in vars(settings).values() if isinstance(c, type) and dataclasses.is_dataclass(c)}
FIELDS = {name: typing.get_type_hints(c) for name, c in CLASSES.items()}
NOT_READERS = ('config.py', 'config_checks.py')  # Defining and checking a setting is not using it.


def all_settings() -> set[tuple[str, str]]:
  """(class, field) of every setting."""
  return {(name, field) for name, fields in FIELDS.items() for field in fields}


def read_settings(files: list[pathlib.Path]) -> set[tuple[str, str]]:
  """(class, field) of every setting that `files` read."""
  trees = [ast.parse(path.read_text(), str(path)) for path in files if path.name not in NOT_READERS]
  returns = {}
  members: dict[str, dict[str, str]] = {}  # Class of the code -> attribute -> type, settings classes and classes of the code alike.
  for tree in trees:
    for node in ast.walk(tree):
      if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
        returns[node.name] = _named(node.returns)
      elif isinstance(node, ast.ClassDef):
        members.setdefault(node.name, {})
  for name in CLASSES:
    members[name] = {field: hint.__name__ for field, hint in FIELDS[name].items() if dataclasses.is_dataclass(hint)}
  readers = [_Reader(returns, members) for _ in range(4)]  # A chain of assignments between classes needs a pass each.
  for reader in readers:
    for tree in trees:
      reader.visit(tree)
  return readers[-1].read


def _named(annotation: ast.expr | None) -> str:
  """Name of the class in an annotation: 'Config' of `Config`, `config.Config`, `Config | None` or `'Config'`; '' of others."""
  if isinstance(annotation, ast.Name):
    return annotation.id
  if isinstance(annotation, ast.Attribute):
    return annotation.attr
  if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
    return annotation.value.split('.')[-1]
  if isinstance(annotation, ast.BinOp):
    return _named(annotation.left) if _named(annotation.left) != 'None' else _named(annotation.right)
  return ''


class _Reader(ast.NodeVisitor):
  """One pass over all trees; `members` grows from pass to pass."""

  def __init__(self, returns: dict[str, str], members: dict[str, dict[str, str]]):
    self.returns, self.members = returns, members
    self.read: set[tuple[str, str]] = set()
    self.scopes: list[dict[str, str]] = [{}]
    self.owner = ''

  def visit_Module(self, node: ast.Module) -> None:
    self.scopes = [{}]
    self.generic_visit(node)

  def visit_ClassDef(self, node: ast.ClassDef) -> None:
    before, self.owner = self.owner, node.name
    for base in node.bases:
      self.members[node.name] = {**self.members.get(_named(base), {}), **self.members[node.name]}
    self.generic_visit(node)
    self.owner = before

  def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    scope = {a.arg: _named(a.annotation) for a in arguments}
    if self.owner and arguments and arguments[0].arg == 'self':
      scope['self'] = self.owner
      if any(_named(d) == 'property' for d in node.decorator_list):
        self.members[self.owner].setdefault(node.name, _named(node.returns))
    self.scopes.append(scope)
    self.generic_visit(node)
    self.scopes.pop()

  def visit_Lambda(self, node: ast.Lambda) -> None:
    self.scopes.append({a.arg: '' for a in node.args.args})
    self.generic_visit(node)
    self.scopes.pop()

  def visit_Assign(self, node: ast.Assign) -> None:
    self.generic_visit(node)
    for target in node.targets:
      if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple) and len(target.elts) == len(node.value.elts):
        for one, value in zip(target.elts, node.value.elts):
          self._assign(one, self.type_of(value))
      else:
        self._assign(target, self.type_of(node.value))

  def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
    self.generic_visit(node)
    if self.owner and len(self.scopes) == 1 and isinstance(node.target, ast.Name):
      self.members[self.owner].setdefault(node.target.id, _named(node.annotation))  # A field of a dataclass.
    else:
      self._assign(node.target, _named(node.annotation))

  def visit_For(self, node: ast.For) -> None:
    if isinstance(node.iter, (ast.Tuple, ast.List)) and isinstance(node.target, ast.Name):
      kinds = {self.type_of(e) for e in node.iter.elts}
      if len(kinds) == 1:
        self._assign(node.target, kinds.pop())
    self.generic_visit(node)

  def visit_Attribute(self, node: ast.Attribute) -> None:
    self.generic_visit(node)
    owner = self.type_of(node.value)
    if isinstance(node.ctx, ast.Load) and node.attr in FIELDS.get(owner, ()):
      self.read.add((owner, node.attr))

  def visit_Call(self, node: ast.Call) -> None:
    self.generic_visit(node)
    if _named(node.func) == 'getattr' and len(node.args) >= 2:
      owner, name = self.type_of(node.args[0]), node.args[1]
      parts = [name] if isinstance(name, ast.Constant) else name.values if isinstance(name, ast.JoinedStr) else []
      pattern = ''.join(re.escape(p.value) if isinstance(p, ast.Constant) else '.*' for p in parts)
      if pattern.replace('.*', ''):
        self.read |= {(owner, field) for field in FIELDS.get(owner, ()) if re.fullmatch(pattern, field)}

  def _assign(self, target: ast.expr, kind: str) -> None:
    if isinstance(target, ast.Name):
      self.scopes[-1][target.id] = kind
    elif isinstance(target, ast.Attribute) and kind:
      owner = self.type_of(target.value)
      if owner in self.members and owner not in CLASSES:
        self.members[owner].setdefault(target.attr, kind)

  def type_of(self, node: ast.expr) -> str:
    """Name of the class of an expression, '' where it is not known."""
    if isinstance(node, ast.Name):
      return next((scope[node.id] for scope in reversed(self.scopes) if node.id in scope), '')
    if isinstance(node, ast.Attribute):
      return self.members.get(self.type_of(node.value), {}).get(node.attr, '')
    if isinstance(node, ast.Call):
      name = _named(node.func)
      if name == 'replace' and node.args:
        return self.type_of(node.args[0])
      return name if name in self.members else self.returns.get(name, '')
    if isinstance(node, ast.IfExp):
      return self.type_of(node.body) or self.type_of(node.orelse)
    return ''
