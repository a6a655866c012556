"""Runs commands and Python code that are not trusted, apart from this process and its machine. See docs/sandbox.md.

    from sao_jax import sandbox
    with sandbox.open(limits=sandbox.Limits(time_s=5.0)) as box:
      box.write('hello.py', b'print(6 * 7)')
      result = box.run(['python3', 'hello.py'])       # result.stdout == b'42\\n', result.ending == 'exited'
      session = box.python()
      session.run('x = 3')
      session.run('x + 1').value                      # '4'
"""

from sao_jax.sandbox.backends import PACKAGES
from sao_jax.sandbox.base import Limits, Mount, PathError, PythonResult, Result, SandboxError, Unavailable
from sao_jax.sandbox.box import Box, PythonSession, open  # pylint: disable=redefined-builtin
from sao_jax.sandbox.inside.collect import shorten
from sao_jax.sandbox.inside.files import FOLDER
from sao_jax.sandbox.pool import Pool

__all__ = [
    'Box', 'FOLDER', 'Limits', 'Mount', 'PACKAGES', 'PathError', 'Pool', 'PythonResult', 'PythonSession', 'Result', 'SandboxError',
    'Unavailable', 'open', 'shorten']
