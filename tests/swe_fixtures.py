"""Small repositories of different shapes with a problem, a gold patch and hidden tests; rows in the SWE-bench form."""

import json
import pathlib
import subprocess
import textwrap

from sao_jax.environments.swe import instances, patches


def clean(text):
  return textwrap.dedent(text).lstrip('\n')


def tree(files):
  return {path: patches.Entry(patches.FILE, clean(text).encode()) for path, text in files.items() if text is not None}


def diff(before, after):
  """The patch from one set of files to another; paths that `after` does not name stay as they are, None deletes."""
  old = tree(before)
  change = {path: None if text is None else tree({path: text})[path] for path, text in after.items()}
  return patches.write(change, old.get).decode('utf-8', 'surrogateescape')


def row(name, base, gold, tests, fail, keep=(), wrong=None, **fields):
  """A row with its repository in it; `wrong` are the files of a repair that is none."""
  row = {
      'instance_id': f'fixture__{name}-1', 'repo': f'fixture/{name}', 'base_commit': '', 'problem_statement': f'Repair {name}.',
      'version': '1.0', 'patch': diff(base, gold), 'test_patch': diff({**base, **gold}, tests), 'FAIL_TO_PASS': json.dumps(list(fail)),
      'PASS_TO_PASS': json.dumps(list(keep)), 'files': {path: clean(text) for path, text in base.items()}, **fields}
  return row, diff(base, wrong or {})


FLAT = {'calc.py': '''
    def add(a, b):
      return a - b


    def double(a):
      return a * 2
    ''', 'test_calc.py': '''
    import calc


    def test_double():
      assert calc.double(4) == 8
    '''}
FLAT_TESTS = {'test_calc.py': '''
    import calc


    def test_double():
      assert calc.double(4) == 8


    def test_add():
      assert calc.add(2, 3) == 5
      assert calc.add(-1, 1) == 0
    '''}


def flat():
  gold = {'calc.py': clean(FLAT['calc.py']).replace('a - b', 'a + b')}
  return row('flat', FLAT, gold, FLAT_TESTS, ['test_calc.py::test_add'], ['test_calc.py::test_double'],
             {'calc.py': clean(FLAT['calc.py']).replace('a - b', 'a * b')})


def src_layout():
  base = {
      'src/shop/__init__.py': 'from shop.cart import Cart\n',
      'src/shop/cart.py': '''
          class Cart:

            def __init__(self, prices):
              self.prices = prices

            def total(self):
              return sum(self.prices[1:])
          ''',
      'tests/conftest.py': '''
          import pytest


          @pytest.fixture
          def prices():
            return [3, 4, 5]
          ''',
      'tests/test_cart.py': '''
          from shop import Cart


          def test_keeps(prices):
            assert Cart(prices).prices == [3, 4, 5]
          ''',
      'pyproject.toml': '[tool.pytest.ini_options]\naddopts = "--strict-markers"\n'}
  tests = {'tests/test_cart.py': clean(base['tests/test_cart.py']) + clean('''


      def test_total(prices):
        assert Cart(prices).total() == 12
      ''')}
  fixed = clean(base['src/shop/cart.py']).replace('self.prices[1:]', 'self.prices')
  return row('src', base, {'src/shop/cart.py': fixed}, tests, ['tests/test_cart.py::test_total'], ['tests/test_cart.py::test_keeps'],
             {'src/shop/cart.py': fixed.replace('sum', 'max')})


def package_data():
  base = {
      'units/__init__.py': '''
          import csv
          import importlib.resources


          def table():
            text = (importlib.resources.files('units') / 'data' / 'table.csv').read_text()
            return {name: float(value) for name, value in csv.reader(text.splitlines())}
          ''',
      'units/data/table.csv': 'mile,1.6\n',
      'tests/test_units.py': 'import units\n\n\ndef test_loads():\n  assert units.table()\n'}
  tests = {'tests/test_units.py': clean('''
      import units


      def test_loads():
        assert units.table()


      def test_inch():
        found = units.table()
        assert found['inch'] == 2.54
      ''')}
  return row('data', base, {'units/data/table.csv': 'mile,1.6\ninch,2.54\n'}, tests, ['tests/test_units.py::test_inch'],
             ['tests/test_units.py::test_loads'], {'units/data/table.csv': 'mile,1.6\ninch,25.4\n'})


def several_files():
  base = {
      'pkg/__init__.py': '', 'pkg/text.py': 'def shout(s):\n  return s\n', 'pkg/numbers.py': 'def half(n):\n  return n // 3\n',
      'tests/__init__.py': '', 'tests/a/__init__.py': '', 'tests/a/test_same.py': 'def test_one():\n  assert True\n', 'tests/b/__init__.py': '',
      'tests/b/test_same.py': 'def test_one():\n  assert True\n'}
  tests = {
      'tests/a/test_same.py': 'from pkg.text import shout\n\n\ndef test_one():\n  assert True\n\n\ndef test_shout():\n  assert shout("a") == "A!"\n',
      'tests/b/test_same.py': 'from pkg.numbers import half\n\n\ndef test_one():\n  assert True\n\n\ndef test_half():\n  assert half(8) == 4\n'}
  gold = {'pkg/text.py': 'def shout(s):\n  return s.upper() + "!"\n', 'pkg/numbers.py': 'def half(n):\n  return n // 2\n'}
  return row('several', base, gold, tests, ['tests/a/test_same.py::test_shout', 'tests/b/test_same.py::test_half'],
             ['tests/a/test_same.py::test_one', 'tests/b/test_same.py::test_one'], {'pkg/text.py': gold['pkg/text.py']})


def unstable():
  """One test is flaky, one wants the network, one fails with the gold patch, one passes without any: all are found by measuring."""
  base = {'net.py': 'def host(url):\n  return url\n', 'test_net.py': 'def test_true():\n  assert 1 + 1 == 2\n'}
  tests = {'test_net.py': clean('''
      import os
      import socket

      import net


      def test_true():
        assert 1 + 1 == 2


      def test_host():
        assert net.host('http://a.org/b') == 'a.org'


      def test_flaky():
        assert os.urandom(1)[0] < 32


      def test_network():
        with socket.create_connection(('93.184.216.34', 80), timeout=2):
          pass


      def test_never():
        assert net.host('x') == 'never'
      ''')}
  ids = [f'test_net.py::test_{n}' for n in ('host', 'true')]
  return row('unstable', base, {'net.py': 'def host(url):\n  return url.split("/")[2] if "//" in url else url\n'}, tests, ids,
             [f'test_net.py::test_{n}' for n in ('flaky', 'network', 'never')], {'net.py': 'def host(url):\n  return url[7:]\n'})


def slow():
  base = {'wait.py': 'import time\n\n\ndef wait(n):\n  time.sleep(60 * n)\n  return n\n', 'test_wait.py': 'def test_nothing():\n  pass\n'}
  tests = {'test_wait.py': 'import wait\n\n\ndef test_nothing():\n  pass\n\n\ndef test_wait():\n  assert wait.wait(0.2) == 0.2\n'}
  gold = {'wait.py': 'import time\n\n\ndef wait(n):\n  time.sleep(n)\n  return n\n'}
  return row('slow', base, gold, tests, ['test_wait.py::test_wait'], ['test_wait.py::test_nothing'],
             {'wait.py': 'import time\n\n\ndef wait(n):\n  time.sleep(n)\n  return 0\n'})


def unicode():
  base = {
      'größe/__init__.py': '# Maße\nFAKTOR = 2\n\n\ndef größe(x):\n  return x\n',
      'tests/test_größe.py': 'def test_größe_steht():\n  assert "ä" < "ö"\n'}
  tests = {'tests/test_größe.py': clean('''
      import pytest

      from größe import größe


      def test_größe_steht():
        assert "ä" < "ö"


      @pytest.mark.parametrize('wert', ['ä', 'ö'], ids=['ein ä', 'ein ö'])
      def test_doppelt(wert):
        assert größe(wert) == wert * 2, 'überhaupt nicht'
      ''')}
  gold = {'größe/__init__.py': clean(base['größe/__init__.py']).replace('return x', 'return x * FAKTOR  # ½')}
  escaped = [r'tests/test_größe.py::test_doppelt[ein \xe4]', r'tests/test_größe.py::test_doppelt[ein \xf6]']
  return row('unicode', base, gold, tests, escaped, ['tests/test_größe.py::test_größe_steht'],
             {'größe/__init__.py': clean(base['größe/__init__.py']).replace('return x', 'return "ää"')})


def in_class():
  base = {'stack.py': '''
      class Stack:

        def __init__(self):
          self.items = []

        def push(self, item):
          self.items.append(item)

        def pop(self):
          return self.items.pop(0)
      ''', 'tests/test_stack.py': 'def test_imports():\n  import stack\n'}
  tests = {'tests/test_stack.py': clean('''
      from stack import Stack


      def test_imports():
        import stack


      class TestStack:

        def setup_method(self):
          self.stack = Stack()
          self.stack.push(1)
          self.stack.push(2)

        def test_pops_last(self):
          """The last one in."""
          assert self.stack.pop() == 2

        def test_keeps_first(self):
          self.stack.pop()
          assert self.stack.items == [1]

        class TestInner:

          def setup_method(self):
            pass

          def test_empty(self):
            assert Stack().items == []
      ''')}
  place = 'tests/test_stack.py::TestStack::'
  return row('class', base, {'stack.py': clean(base['stack.py']).replace('pop(0)', 'pop()')}, tests,
             [place + 'test_pops_last', place + 'test_keeps_first'], ['tests/test_stack.py::test_imports', place + 'TestInner::test_empty'],
             {'stack.py': clean(base['stack.py']).replace('pop(0)', 'items[-1]').replace('self.items.items', 'self.items')})


def parametrised():
  base = {'fmt.py': 'def fmt(x):\n  return str(x)\n', 'test_fmt.py': 'def test_none():\n  assert None is None\n'}
  names = ['a b', 'c, d', '{e: 1}', '[f]', 'g::h', 'i/j', "k'l", 'm"n', 'o$p;q']
  tests = {'test_fmt.py': clean(f'''
      import pytest

      import fmt


      def test_none():
        assert None is None


      @pytest.mark.parametrize('x', range({len(names)}), ids={names!r})
      def test_fmt(x):
        assert fmt.fmt(x) == '<' + str(x) + '>'
      ''')}
  return row('params', base, {'fmt.py': 'def fmt(x):\n  return f"<{x}>"\n'}, tests, [f'test_fmt.py::test_fmt[{n}]' for n in names],
             ['test_fmt.py::test_none'], {'fmt.py': 'def fmt(x):\n  return f"<{x}>" if x else ""\n'})


def shortened():
  """Ids as lists made from logs have them: up to the first blank."""
  made, wrong = parametrised()
  made = dict(made, instance_id='fixture__short-1', FAIL_TO_PASS=['test_fmt.py::test_fmt[a', 'test_fmt.py::test_fmt[[f]]'])
  return made, wrong


UNITTEST = {
    'roman/__init__.py': 'def roman(n):\n  return "I" * n\n',
    'tests/__init__.py': '',
    'tests/test_roman.py': 'import unittest\n\n\nclass RomanTest(unittest.TestCase):\n\n  def test_true(self):\n    self.assertTrue(True)\n'}
UNITTEST_TESTS = {'tests/test_roman.py': clean('''
    import unittest

    from roman import roman


    class RomanTest(unittest.TestCase):

      def test_true(self):
        self.assertTrue(True)

      def test_four(self):
        """Four is written IV."""
        self.assertEqual(roman(4), 'IV')

      def test_three(self):
        for n in (1, 2, 3):
          with self.subTest(n=n):
            self.assertEqual(roman(n), 'I' * n)
    ''')}
ROMAN = {'roman/__init__.py': 'def roman(n):\n  return "I" * n if n < 4 else "IV"\n'}


def with_unittest():
  place = ' (tests.test_roman.RomanTest)'
  return row('unittest', UNITTEST, ROMAN, UNITTEST_TESTS, ['test_four' + place], ['test_true' + place, 'tests.test_roman.RomanTest.test_three'],
             {'roman/__init__.py': 'def roman(n):\n  return "I" * n if n < 4 else "VI"\n'}, runner='unittest')


def with_command():
  """A project with its own test program, and a test that its log calls by its description."""
  base = {**UNITTEST, 'tests/runtests.py': clean('''
      import sys
      import unittest

      sys.path.insert(0, '.')
      suite = unittest.defaultTestLoader.loadTestsFromNames(['tests.' + name for name in sys.argv[1:]])
      result = unittest.TextTestRunner(verbosity=2).run(suite)
      sys.exit(not result.wasSuccessful())
      ''')}
  place = ' (tests.test_roman.RomanTest)'
  return row('command', base, ROMAN, UNITTEST_TESTS, ['Four is written IV.'], ['test_true' + place, 'test_three' + place],
             {'roman/__init__.py': 'def roman(n):\n  return "I" * n if n < 4 else "VI"\n'}, runner='command', log_format='unittest',
             test_command='python3 tests/runtests.py {modules}')


def with_log():
  """A project whose own runner knows neither pytest nor unittest, and prints its results."""
  base = {
      'algebra/__init__.py': 'def square(x):\n  return x + x\n',
      'bin/test': clean('''
          import importlib.util
          import sys

          sys.path.insert(0, '.')
          failed = 0
          for path in sys.argv[1:]:
            spec = importlib.util.spec_from_file_location('checked', path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            for name in [n for n in vars(module) if n.startswith('test_')]:
              try:
                getattr(module, name)()
                print(name, 'ok')
              except Exception as error:
                failed += 1
                print(name, 'F' if isinstance(error, AssertionError) else 'E')
          sys.exit(bool(failed))
          '''),
      'algebra/tests/test_square.py': 'def test_nothing():\n  assert True\n'}
  tests = {'algebra/tests/test_square.py': (
      'from algebra import square\n\n\ndef test_nothing():\n  assert True\n\n\ndef test_square():\n  assert square(3) == 9\n')}
  return row('log', base, {'algebra/__init__.py': 'def square(x):\n  return x * x\n'}, tests, ['test_square'], ['test_nothing'],
             {'algebra/__init__.py': 'def square(x):\n  return x * 2\n'}, runner='command', log_format='sympy', trusted=['bin/*'],
             test_command='python3 bin/test {files}')


def moved():
  """The gold patch deletes, renames and adds files."""
  base = {
      'app/old.py': 'def name():\n  return "old"\n', 'app/unused.py': 'X = 1\n', 'app/__init__.py': 'from app.old import name\n',
      'tests/test_app.py': 'import app\n\n\ndef test_name():\n  assert app.name()\n', 'setup.cfg': '[metadata]\nname = app\n'}
  gold = {'app/old.py': None, 'app/unused.py': None, 'app/new.py': 'def name():\n  return "new"\n',
          'app/__init__.py': 'from app.new import name\n', 'setup.cfg': '[metadata]\nname = app\nversion = 2\n'}
  tests = {'tests/test_new.py': 'import app\nimport app.new\n\n\ndef test_new():\n  assert app.name() == "new"\n'}
  return row('moved', base, gold, tests, ['tests/test_new.py::test_new'], ['tests/test_app.py::test_name'],
             {'app/new.py': 'def name():\n  return "newer"\n', 'app/__init__.py': 'from app.new import name\n'})


def the_runner():
  """A repository that is pytest itself: its own copy must run the tests, or the repair is not seen."""
  import _pytest
  import pytest

  files = {}
  for package in (_pytest, pytest):
    folder = pathlib.Path(package.__file__).parent
    for path in folder.rglob('*.py'):
      files[f'src/{folder.name}/{path.relative_to(folder)}'] = path.read_text(encoding='utf-8')
  broken = files['src/_pytest/recwarn.py'].replace('return len(self._list)', 'return len(self._list) + 1')
  assert broken != files['src/_pytest/recwarn.py']
  test = clean('''
      import warnings

      import pytest


      def test_counts(recwarn):
        warnings.warn('one')
        assert len(recwarn) == 1


      def test_where():
        assert '/src/pytest/' in pytest.__file__
      ''')
  base = {**files, 'src/_pytest/recwarn.py': broken, 'testing/test_recwarn.py': 'def test_nothing():\n  pass\n'}
  keep = ['testing/test_recwarn.py::test_where']
  made = {
      'instance_id': 'fixture__runner-1', 'repo': 'fixture/runner', 'problem_statement': 'len(recwarn) is one too large.', 'version': '1',
      'patch': patches.write({'src/_pytest/recwarn.py': entry(files['src/_pytest/recwarn.py'])}, lambda p: entry(base[p])).decode(),
      'test_patch': diff({'testing/test_recwarn.py': base['testing/test_recwarn.py']}, {'testing/test_recwarn.py': test}),
      'FAIL_TO_PASS': ['testing/test_recwarn.py::test_counts'], 'PASS_TO_PASS': keep, 'files': base}
  worse = broken.replace('len(self._list) + 1', 'len(self._list) + 2')
  return made, patches.write({'src/_pytest/recwarn.py': entry(worse)}, lambda p: entry(base[p])).decode()


def entry(text):
  return patches.Entry(patches.FILE, text.encode())


SHAPES = (flat, src_layout, package_data, several_files, unstable, slow, unicode, in_class, parametrised, shortened, with_unittest, with_command,
          with_log, moved, the_runner)


def instance(shape):
  """(instance, its wrong patch) of one of `SHAPES`."""
  made, wrong = shape()
  return instances.parse(made, shape.__name__), wrong


def write_rows(path, rows):
  path.write_text(''.join(json.dumps(r) + '\n' for r in rows))
  return path


def git_repository(folder, versions):
  """A real repository with one commit for each set of files, a tag, a remote and a hook; the names of the commits."""
  run = lambda *words: subprocess.run(
      ['git', '-c', 'user.name=a', '-c', 'user.email=a@localhost', '-c', 'core.hooksPath=/dev/null', *words], cwd=folder, check=True,
      capture_output=True, text=True, timeout=300).stdout.strip()
  folder.mkdir(parents=True, exist_ok=True)
  run('init', '-q', '-b', 'main')
  commits = []
  for files in versions:
    for path, text in files.items():
      (folder / path).parent.mkdir(parents=True, exist_ok=True)
      (folder / path).write_text(clean(text))
    run('add', '-A')
    run('commit', '-q', '-m', f'version {len(commits)}')
    commits.append(run('rev-parse', 'HEAD'))
  run('tag', 'future')
  run('remote', 'add', 'origin', 'https://example.invalid/x.git')
  return commits
