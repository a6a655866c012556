"""Registers tools, lists them with their schemas, calls them."""

import inspect
import types
import typing

NAMES = {int: 'integer', float: 'number', str: 'string', bool: 'boolean'}


class MCPServer:

  def __init__(self, name, **_):
    self.name, self._tools = name, {}

  def add_tool(self, fn, name, description=None):
    self._tools[name] = (fn, description)

  async def list_tools(self):
    listed = []
    for name, (fn, description) in self._tools.items():
      hints = typing.get_type_hints(fn)
      properties = {p: {'type': NAMES[hints[p]]} for p in inspect.signature(fn).parameters}
      schema = {'type': 'object', 'properties': properties, 'required': list(properties)}
      listed.append(types.SimpleNamespace(name=name, description=description, input_schema=schema))
    return listed

  async def call_tool(self, name, arguments):
    result = self._tools[name][0](**arguments)
    result = await result if inspect.isawaitable(result) else result
    return types.SimpleNamespace(content=[types.SimpleNamespace(text=str(result))])
