"""The interpreter of a Python session in a box: runs pieces of code one after the other in one namespace, as a notebook does.

Requests and answers are frames on descriptors 3 and 4; what the code prints goes to the process's output. The code runs in this process
and could forge an answer; an answer is as trusted as what it prints.
"""

import _sitebuiltins
import ast
import builtins
import linecache
import os
import sys

from sao_jax.sandbox.inside import collect, wire

MAX_TEXT = 20_000  # Characters of a value or an error.
MAX_DEPTH = 12  # Frames of a traceback.


def main(*packages):
  """Answers until the warden closes; `packages`: folders of further packages."""
  sys.stdin = sys.__stdin__ = open(0, encoding='utf-8', errors='replace', closefd=False)
  sys.stdout = sys.__stdout__ = open(1, 'w', 1, 'utf-8', 'backslashreplace', closefd=False)
  sys.stderr = sys.__stderr__ = open(2, 'w', 1, 'utf-8', 'backslashreplace', closefd=False)
  for name in [n for n in sys.modules if n.split('.')[0] == 'sao_jax']:
    del sys.modules[name]
  builtins.exit = builtins.quit = _sitebuiltins.Quitter('exit', 'Ctrl-D')  # The module `site`, which is slow, is left out.
  builtins.help = _sitebuiltins._Helper()
  random = sys.modules.get('random')
  if random is not None:
    random.seed()  # A copy of the warden has its numbers, too.
  request, answer = 3, 4
  os.set_inheritable(request, False)
  os.set_inheritable(answer, False)
  sys.path.insert(0, '')  # Modules that the code writes into its folder.
  sys.path += packages
  sys.argv = ['']
  space = {'__name__': '__main__', '__builtins__': __builtins__}
  number, own = 0, os.getpid()
  while True:
    frame = wire.receive(request, 1 << 26)
    if frame is None:
      return
    number += 1
    value, error = run(frame[1][0].decode('utf-8', 'replace'), space, '<input %d>' % number)
    for stream in (sys.stdout, sys.stderr):
      try:
        stream.flush()
      except BaseException:  # Whatever the code has put there.
        pass
    if os.getpid() != own:
      os._exit(0)  # The code has forked, and this is the child.
    blobs = [(x or '').encode('utf-8', 'replace') for x in (value, error)]
    try:
      wire.send(answer, {'id': frame[0]['id'], 'value': value is not None, 'error': error is not None}, blobs)
    except wire.WireError:  # The code has closed it.
      return


def run(code, space, name):
  """(the value of the last expression as a text, the error as a text), None where there is none."""
  linecache.cache[name] = (len(code), None, [line + '\n' for line in code.split('\n')], name)
  try:
    tree = ast.parse(code, name)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, 'exec'), space)
    if last is None:
      return None, None
    value = eval(compile(last, name, 'eval'), space)
    if value is None:
      return None, None
    space['_'] = value
    return collect.shorten(str(repr(value)), MAX_TEXT), None
  except BaseException as error:  # SystemExit and KeyboardInterrupt too: the session stays.
    return None, describe(error, name)


def describe(error, name):
  """The error with the part of its traceback that is the code's own."""
  try:
    import traceback  # Loaded when first needed: most code goes well.
    frames = traceback.extract_tb(error.__traceback__)
    own = [i for i, frame in enumerate(frames) if frame.filename.startswith('<input ')]
    frames = frames[own[0]:] if own else []
    note = []
    if len(frames) > MAX_DEPTH:
      note = ['  [... %d frames left out ...]\n' % (len(frames) - MAX_DEPTH)]
    shown = traceback.format_list(frames[:MAX_DEPTH // 2]) + note + traceback.format_list(frames[-MAX_DEPTH // 2:]) if note else (
        traceback.format_list(frames))
    head = ['Traceback (most recent call last):\n'] if shown else []
    text = ''.join(head + shown + traceback.format_exception_only(type(error), error))
    return collect.shorten(text.rstrip('\n'), MAX_TEXT)
  except BaseException as failure:  # The code's own __str__, or a recursion limit that it has set.
    return '%s (its text cannot be shown: %s)' % (type(error).__name__, type(failure).__name__)

