"""The judge on repositories of many shapes, and on predictions that try to pass without a repair."""

import concurrent.futures
import dataclasses
import pathlib
import random
import shutil

import pytest

from sao_jax import sandbox
from sao_jax.environments.swe import controls, instances, patches
from sao_jax.environments.swe.judge import Judge, Measured, RepositoryFailure, command_of, outcomes
from tests import swe_cheats, swe_fixtures

SLOW_SHAPES = ('the_runner', 'slow', 'shortened', 'several_files', 'moved', 'unicode', 'package_data', 'unstable', 'in_class',
               'src_layout')
QUICK_CHEATS = (  # One of each kind; the others are slow tests only because they are many.
    'hooks_in_conftest', 'parts_of_pytest', 'prints_and_leaves', 'changes_the_report', 'the_reporter_and_its_key', 'equal_to_everything')


@pytest.fixture(scope='module')
def judge():
  return Judge(time_s=120.0)


def marked(names, quick):
  return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


SHAPES = {shape.__name__: shape for shape in swe_fixtures.SHAPES}


@pytest.mark.parametrize('name', marked(SHAPES, set(SHAPES) - set(SLOW_SHAPES)))
def test_gold_passes_and_others_do_not(judge, name):
  instance, wrong = swe_fixtures.instance(SHAPES[name])
  measured = Measured({f'test_net.py::test_{n}': 'unfit' for n in ('flaky', 'network', 'never', 'true')}) if name == 'unstable' else Measured()
  gold = judge.judge_patch(instance, instance.patch, measured=measured)
  assert gold.reason == 'resolved', (gold.detail, gold.outcomes, gold.log[-2000:])
  assert gold.controls >= 1
  assert set(gold.outcomes) == set(instance.ids) - set(measured.left_out)
  assert judge.judge_patch(instance, '', measured=measured).reason == 'empty'
  assert patches.apply(wrong.encode(), judge.base(instance).entry)
  refused = judge.judge_patch(instance, wrong, measured=measured)
  assert refused.reason == 'tests_failed', (refused.detail, refused.log[-2000:])
  assert any(refused.outcomes[test] == 'failed' for test in instance.ids if test not in measured.left_out)


def judged(judge, shape, files):
  instance, _ = swe_fixtures.instance(shape)
  return judge.judge_patch(instance, swe_fixtures.diff(dict(instance.files), files))


@pytest.mark.parametrize('name', marked(swe_cheats.CHEATS, QUICK_CHEATS))
def test_cheats_get_nothing(judge, name):
  verdict = judged(judge, swe_fixtures.flat, swe_cheats.CHEATS[name])
  assert verdict.reason in ('tests_failed', 'no_result', 'time', 'tampered', 'forged'), verdict.detail
  if name in swe_cheats.SUREST:
    assert verdict.reason == 'forged'
  if name in swe_cheats.FILES:
    assert verdict.dropped and verdict.outcomes['test_calc.py::test_add'] == 'failed'  # The original tests ran to their end.
  if name == 'changes_the_report':
    assert verdict.reason == 'tampered'


@pytest.mark.parametrize('name', marked(swe_cheats.UNITTEST, ('a_result_found_in_memory', 'loads')))
def test_cheats_with_unittest_get_nothing(judge, name):
  assert not judged(judge, swe_fixtures.with_unittest, swe_cheats.UNITTEST[name]).resolved


@pytest.mark.parametrize('name', marked(swe_cheats.COMMAND, ('asserts_nothing', 'prints')))
def test_cheats_with_a_command_get_nothing(judge, name):
  verdict = judged(judge, swe_fixtures.with_command, swe_cheats.COMMAND[name])
  assert not verdict.resolved
  assert name != 'asserts_nothing' or verdict.reason == 'tampered'


@pytest.mark.parametrize('name', marked(swe_cheats.LOG, ('prints', 'prints_more')))
def test_cheats_with_a_log_get_nothing(judge, name):
  verdict = judged(judge, swe_fixtures.with_log, swe_cheats.LOG[name])
  assert not verdict.resolved
  assert name != 'prints' or verdict.reason == 'forged'


def test_cheats_pass_where_nothing_but_the_run_is_looked_at():
  """That the surest cheats are worth the name, and the control runs the difference."""
  verdict = judged(Judge(time_s=120.0, controls=0), swe_fixtures.flat, swe_cheats.CHEATS['a_plugin_found_in_memory'])
  assert verdict.resolved and verdict.controls == 0


def test_a_repair_with_cheats_beside_it_is_judged_by_the_repair(judge):
  files = {**swe_cheats.FILES['hooks_in_conftest'], **swe_cheats.FILES['edits_the_tests'], 'calc.py': swe_cheats.CALC.replace('a - b', 'a + b')}
  verdict = judged(judge, swe_fixtures.flat, files)
  assert verdict.resolved and set(verdict.dropped) == {'conftest.py', 'test_calc.py'}


@pytest.mark.slow
def test_measuring_leaves_out_what_is_unfit(judge):
  instance, _ = swe_fixtures.instance(swe_fixtures.unstable)
  measured = judge.measure(instance, repeats=6)
  assert measured.usable
  left_out = {test.rsplit('_', 1)[1]: reason for test, reason in measured.left_out.items()}
  assert set(left_out) == {'flaky', 'network', 'never', 'true'}
  assert left_out['true'] == 'passes without a patch' and left_out['never'] == left_out['network'] == 'failed with the gold patch'
  flat, _ = swe_fixtures.instance(swe_fixtures.flat)
  assert judge.measure(flat, repeats=1) == Measured()


def test_an_instance_that_tells_nothing_is_unusable(judge):
  row, _ = swe_fixtures.flat()
  row['FAIL_TO_PASS'], row['PASS_TO_PASS'] = row['PASS_TO_PASS'], '[]'
  measured = judge.measure(instances.parse(row, 'x'), repeats=1)
  assert not measured.usable and list(measured.left_out.values()) == ['passes without a patch']


def test_lists_may_name_a_path_by_its_end(judge):
  row, _ = swe_fixtures.flat()
  tests = "import calc\nimport pytest\n\n\n@pytest.mark.parametrize('x', ['/', '/a/b.py', '//a/c', '/a*/d'])\ndef test_p(x):\n"
  row['test_patch'] = swe_fixtures.diff(swe_fixtures.FLAT, {'test_calc.py': tests + "  assert calc.add(x, '') == x\n"})
  row |= {'FAIL_TO_PASS': [f'test_calc.py::test_p[{x}]' for x in ('/', '/b.py', '//a/c', '/a*/d')], 'PASS_TO_PASS': '[]'}
  instance = instances.parse(row, 'x')
  verdict = judge.judge_patch(instance, row['patch'])
  assert verdict.resolved and verdict.controls == 4, (verdict.detail, verdict.outcomes)
  assert set(judged_files(judge, instance, {'calc.py': 'add = 3\n'}).outcomes.values()) == {'failed'}


def test_why_an_instance_cannot_run_is_told(judge):
  row, _ = swe_fixtures.flat()
  row['test_patch'] = swe_fixtures.diff(swe_fixtures.FLAT, {'test_calc.py': 'import old_thing\n\n\ndef test_add():\n  pass\n'})
  measured = judge.measure(instances.parse(row, 'x'), repeats=1)
  assert not measured.usable and measured.detail.endswith("ModuleNotFoundError: No module named 'old_thing'")


def test_a_test_patch_that_never_fitted_is_told(judge):
  row, _ = swe_fixtures.flat()
  row['test_patch'] = row['test_patch'].replace('assert calc.double(4) == 8', 'assert calc.double(5) == 10')
  with pytest.raises(RepositoryFailure, match='does not fit'):
    judge.judge_patch(instances.parse(row, 'x'), row['patch'])


def test_a_prediction_that_removes_what_the_test_patch_changes_is_judged(judge):
  """The trusted files come whole, so there is nothing that a prediction could make unfit."""
  verdict = judged(judge, swe_fixtures.flat, {'test_calc.py': 'nothing\n', 'calc.py': swe_cheats.CALC.replace('a - b', 'a + b')})
  assert verdict.resolved


def test_predictions_that_do_not_apply(judge):
  instance, _ = swe_fixtures.instance(swe_fixtures.flat)
  for patch in ('nonsense', instance.patch.replace('return a - b', 'return b - a'), instance.patch.replace('calc.py', '../calc.py')):
    assert judge.judge_patch(instance, patch).reason == 'does_not_apply'


def test_limits_end_a_prediction():
  quick = Judge(time_s=1.5)
  verdict = judged(quick, swe_fixtures.flat, {'calc.py': 'while True:\n  pass\n'})
  assert verdict.reason == 'time' and not verdict.resolved
  small = Judge(time_s=120.0, limits=dataclasses.replace(Judge.LIMITS, memory_mb=256, address_mb=512))
  assert judged(small, swe_fixtures.flat, {'calc.py': 'x = bytearray(1 << 30)\n'}).reason in ('no_result', 'tests_failed')


def test_a_setup_runs_before_the_tests_and_may_fail(judge):
  row, _ = swe_fixtures.flat()
  row['setup'] = 'test -f calc.py && echo "X = 1" >> calc.py && test ! -e broken'
  instance = instances.parse(row, 'x')
  assert judge.judge_patch(instance, row['patch']).resolved
  assert judged_files(judge, instance, {'broken': 'x'}).reason == 'setup_failed'


def judged_files(judge, instance, files):
  return judge.judge_patch(instance, swe_fixtures.diff(dict(instance.files), files))


def test_an_instance_may_bring_its_packages(judge, tmp_path):
  """Its own pytest, a module and a plugin are there, and the packages of this Python are not."""
  metadata = {'plug-1.dist-info/METADATA': 'Name: plug\nVersion: 1\n', 'plug-1.dist-info/entry_points.txt': '[pytest11]\nplug = plug\n'}
  for path, text in {**metadata, 'plug.py': 'import pytest\n\n\n@pytest.fixture\ndef five():\n  return 5\n'}.items():
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(text)
  for name in ('pytest', '_pytest', 'pluggy', 'iniconfig', 'packaging', 'pygments', 'py'):
    for found in pathlib.Path(pytest.__file__).parents[1].glob(f'{name}*'):
      if found.name in (name, f'{name}.py') or found.name.startswith(f'{name}-'):
        (shutil.copytree if found.is_dir() else shutil.copy)(found, tmp_path / found.name)
  for place in (tmp_path.parents[1], tmp_path.parent, tmp_path):
    place.chmod(0o755)
  row, _ = swe_fixtures.flat()
  tests = 'import importlib.util\n\nimport calc\n\n\ndef test_add(five):\n  assert calc.add(2, 3) == five\n'
  tests += '  assert importlib.util.find_spec("numpy") is None\n'
  row |= {'packages': str(tmp_path), 'test_patch': swe_fixtures.diff(swe_fixtures.FLAT, {'test_calc.py': tests}), 'PASS_TO_PASS': '[]'}
  instance = instances.parse(row, 'x')
  verdict = judge.judge_patch(instance, row['patch'])
  assert verdict.resolved and verdict.controls == 1, (verdict.detail, verdict.log)
  assert judged_files(judge, instance, {'calc.py': 'def add(a, b):\n  return 6\n'}).reason == 'tests_failed'


def test_a_missing_interpreter_is_a_failure_and_no_verdict(judge):
  row, _ = swe_fixtures.flat()
  with pytest.raises(Exception) as caught:
    judge.judge_patch(instances.parse({**row, 'python': 'python-that-is-not-there'}, 'x'), row['patch'])
  assert getattr(caught.value, 'reason', '') == 'environment_sandbox'
  assert isinstance(sandbox.SandboxError(), Exception)


# --- Outcomes from reports -------------------------------------------------------------------------------------------------------


def reports(test, **changes):
  return [{'id': test, 'when': when, 'outcome': 'passed', 'raised': False, 'xfail': False, **changes} for when in ('setup', 'call', 'teardown')]


def test_all_that_is_said_of_a_test_must_be_good():
  good = reports('a.py::t')
  of = lambda rows: outcomes(rows, ['a.py::t'], pytest=True)['a.py::t']
  assert of(good) == 'passed' and of([]) == 'missing' and of(good[:2]) == 'failed' and of([good[0], good[2]]) == 'failed'
  assert of(good + [{**good[1], 'outcome': 'failed'}]) == 'failed'
  assert of([{**good[1], 'raised': True}, good[0], good[2]]) == 'failed'
  assert of([good[0], {**good[1], 'outcome': 'skipped', 'raised': True}, good[2]]) == 'failed'
  assert of([good[0], {**good[1], 'outcome': 'skipped', 'raised': True, 'xfail': True}, good[2]]) == 'xfailed'
  assert of([good[0], {**good[1], 'xfail': True}, good[2]]) == 'failed'  # Passed against expectation.
  assert of([None, 3, {'id': 4}, *good]) == 'passed'


@pytest.mark.parametrize('listed, id, names', [
    ('test_x (a.b.C)', 'a.b.C.test_x', ()), ('test_x (a.b.C.test_x)', 'a.b.C.test_x', ()), ('a.b.C.test_x', 'a.b.C.test_x', ()),
    ('Says what it does.', 'a.b.C.test_x', ('test_x (a.b.C)\nSays what it does.', 'Says what it does.')),
    ('test_x (a.b.C)', 'other', ('test_x (a.b.C)',))])
def test_forms_of_unittest_ids(listed, id, names):
  report = {'id': id, 'names': list(names), 'when': 'call', 'outcome': 'passed', 'raised': False, 'xfail': False}
  assert outcomes([report], [listed, 'test_y (a.b.C)'], pytest=False) == {listed: 'passed', 'test_y (a.b.C)': 'missing'}


def test_commands_are_filled_in_and_quoted():
  row, _ = swe_fixtures.with_command()
  instance = instances.parse({**row, 'test_command': 'run {files} -- {modules} -- {ids}'}, 'x')
  assert command_of(instance, ['tests/a b.py', 'tests/c/d.py', 'data.txt'], ["it's"]) == (
      """run 'tests/a b.py' tests/c/d.py -- 'a b' c.d -- 'it'"'"'s'""")


# --- Controls --------------------------------------------------------------------------------------------------------------------

SOURCE = '''
import unittest
import pytest


def test_literal():
  x = 3
  assert x == 3


def test_text():
  assert str(3) == '3', 'message'


def test_list():
  assert [1, [2]] == [1, [2]]


def test_plain():
  assert (1 <
          2)


def test_helper(): check(1)


def test_loop():
  for x in range(3):
    assert x < 3


def test_raises():
  with pytest.raises(ValueError):
    int('x')


def test_early():
  if True:
    return
  assert 1 == 1


def check(x):
  assert x


class C(unittest.TestCase):

  def test_equal(self):
    """Says
    something."""
    self.assertEqual(sorted([2, 1]), [1, 2])

  def test_in(self):
    self.assertIn('a', 'abc')

  def test_almost(self):
    self.assertAlmostEqual(0.1 + 0.2, 0.3, places=6)
'''


def run_test(source, names):
  space = {}
  exec(compile(source, 'x', 'exec'), space)  # pylint: disable=exec-used
  if len(names) == 1:
    space[names[0]]()
  else:
    getattr(space[names[0]](names[1]), names[1])()


NAMES = [(n,) for n in ('test_literal', 'test_text', 'test_list', 'test_plain', 'test_helper', 'test_loop', 'test_raises', 'test_early')]
NAMES += [('C', n) for n in ('test_equal', 'test_in', 'test_almost')]


@pytest.mark.parametrize('seed', range(12))
def test_spoiled_tests_fail_and_the_others_still_pass(seed):
  for names in NAMES:
    run_test(SOURCE, names)
  wanted = random.Random(seed).sample(NAMES, 5)
  data, done = controls.spoiled(SOURCE.encode(), wanted, random.Random(seed))
  assert sorted(done) == sorted(wanted)
  for names in NAMES:
    if names in wanted:
      with pytest.raises(AssertionError):
        run_test(data.decode(), names)
    else:
      run_test(data.decode(), names)


@pytest.mark.parametrize('text, other', [
    ('a == b', 'a != b'), ('a is not None', 'a is None'), ('a is None', 'a is not None'), ('x  not  in ys', 'x  in ys'),
    ('f(x) in (1, 2)', 'f(x) not in (1, 2)'), ('a <= b', 'a > b'), ('f(x)', 'not f(x)'), ('not f(x)', 'f(x)'), ('not (a or b)', '(a or b)'), ('a and b', 'not (a and b)'),
    ('1 < x < 3', 'not 1 < x < 3'), ('(a or b) == (c)', '(a or b) != (c)'), ('"ä==" == x', '"ä==" != x'), ('a is (not b)', 'a is not (not b)'),
    ('a == b if c else d', 'not (a == b if c else d)'), ('f(1,\n  2) == g(\n3)', 'f(1,\n  2) != g(\n3)'), ('a.b[0]', 'not a.b[0]'),
    ('a  # ==\n  == b', 'not a  # ==\n  == b')])
def test_the_opposite_looks_like_what_a_person_writes(text, other):
  assert controls.opposite(text) == other


ASKS = '''
def test_open():
  door = Door()
  assert is_open(door)
  assert door.state in ('open', 'ajar')
  assert not is_shut(door)
  assert door.state == other.state
'''


def test_a_control_is_not_known_by_its_form():
  for seed in range(40):
    data, done = controls.spoiled(ASKS.encode(), [('test_open',)], random.Random(seed))
    assert done and data != ASKS.encode() and b'not (' not in data


def test_what_cannot_be_spoiled_is_left_alone():
  source = ('import pytest\n\n\n@pytest.mark.xfail\ndef test_a():\n  assert 0\n\n\ndef test_b():\n  yield 1\n\n\n'
            'def test_c():\n  pytest.xfail("x")\n\n\nif 1:\n  def test_d():\n    pass\n')
  data, done = controls.spoiled(source.encode(), [('test_a',), ('test_b',), ('test_c',), ('test_d',), ('test_e',)], random.Random(0))
  assert data == source.encode() and not done
  for broken in (b'def test_a(:\n', b'\xff\xfe', b'def test_a():\n  pass\r\r'):
    assert controls.spoiled(broken, [('test_a',)], random.Random(0)) == (broken, [])


def test_sources_are_parsed_from_many_threads():
  """CPython 3.11 raises SystemError where two threads parse at once."""
  source = SOURCE.encode() * 3
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda seed: controls.spoiled(source, NAMES[-3:], random.Random(seed))[1], range(60)))
  assert len(found) == 60
