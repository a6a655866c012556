"""Instances, patches, repositories, tools and episodes of the environment 'swe', and the grading of predictions."""

import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest

from sao_jax import environments, sandbox, swe_run
from sao_jax.environments.swe import environment, instances, patches, repository, small_tasks, tools, trusted
from sao_jax.environments.swe.judge import Judge
from sao_jax.environments.swe.patches import Entry
from sao_jax.tool_calls import ToolCall, ToolCallError
from tests import swe_fixtures

ROOT = pathlib.Path(__file__).resolve().parents[1]


# --- Instances -------------------------------------------------------------------------------------------------------------------


def test_lists_may_be_written_as_json_and_unknown_fields_stay():
  row, _ = swe_fixtures.parametrised()
  one = instances.parse(row, 'x')
  two = instances.parse({**row, 'FAIL_TO_PASS': json.loads(row['FAIL_TO_PASS']), 'hints_text': 'x', 'image': None}, 'x')
  assert one == two and len(one.fail_to_pass) == 9 and 'test_fmt.py::test_fmt[c, d]' in one.fail_to_pass
  assert one.key == two.key != instances.parse({**row, 'patch': ''}, 'x').key


def test_rows_of_known_projects_get_their_runner(tmp_path):
  (tmp_path / 'django__django').mkdir()
  row = {'instance_id': 'django__django-1', 'repo': 'django/django', 'base_commit': 'abc', 'problem_statement': 'x', 'test_patch': '',
         'patch': '', 'FAIL_TO_PASS': '["test_x (a.B)"]', 'PASS_TO_PASS': '[]', 'version': '4.0'}
  path = swe_fixtures.write_rows(tmp_path / 'i.jsonl', [row])
  found = instances.load(path, repositories=tmp_path)[0]
  assert found.runner == 'command' and 'runtests.py' in found.test_command and found.path == str(tmp_path / 'django__django')


@pytest.mark.parametrize('change, message', [
    ({'instance_id': '../x'}, 'instance_id must be'), ({'FAIL_TO_PASS': '[]'}, 'at least one test'), ({'FAIL_TO_PASS': '[1]'}, 'list of texts'),
    ({'FAIL_TO_PASS': 'no json'}, 'list of texts'), ({'runner': 'nose'}, 'runner must be one of'), ({'runner': 'command'}, 'test_command'),
    ({'runner': 'command', 'test_command': 'x', 'log_format': 'tap'}, 'log_format must be'), ({'files': {'../x': ''}}, 'paths inside'),
    ({'files': {'a/.git/config': ''}}, 'paths inside'), ({'files': {}}, 'base_commit is missing'), ({'problem_statement': ' '}, 'is empty'),
    ({'files': {}, 'base_commit': '-x'}, 'name of a commit'), ({'files': {}, 'base_commit': 'abc'}, 'there is no repository'),
    ({'path': 'nowhere'}, 'there is no'), ({'env': {'A': 1}}, 'object of texts'), ({'repo_path': '../x'}, 'absolute path'),
    ({'python_path': ['/x']}, 'paths inside'), ({'packages': 'nowhere'}, 'packages: there is no folder'),
    ({'packages': '.', 'image': 'x'}, 'without an image'), ({'instance_id': 'a' * 250}, 'at most 200'),
    ({'test_patch': '\ud800'}, 'halves of surrogate pairs'), ({'FAIL_TO_PASS': '[' * 100_000}, 'list of texts'),
    ({'files': {'a': 'x', 'a/b': 'y'}}, 'below another file'), ({'files': {'\ud800': 'x'}}, 'paths inside'),
    ({'env': {'A=B': 'x'}}, 'env must map'), ({'env': {'A': '\0'}}, 'env must map'), ({'env': {'': 'x'}}, 'env must map')])
def test_what_is_wrong_with_a_row_is_told_with_its_line(tmp_path, change, message):
  row, _ = swe_fixtures.flat()
  path = swe_fixtures.write_rows(tmp_path / 'i.jsonl', [row, {**row, 'instance_id': 'b', **change}])
  with pytest.raises(ValueError, match=message) as caught:
    instances.load(path)
  assert str(caught.value).startswith(f'{path}, line 2: ')


def test_files_that_are_none(tmp_path):
  row, _ = swe_fixtures.flat()
  path = tmp_path / 'i.jsonl'
  for text, message in (('', 'holds no instances'), ('{', 'not valid JSON'), ('[]', 'must be an object'), (json.dumps(row) + '\n' + json.dumps(row), 'twice')):
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
      instances.load(path)


# --- Patches ---------------------------------------------------------------------------------------------------------------------


def random_content(rng):
  kind = rng.random()
  if kind < 0.1:
    return b''
  if kind < 0.2:
    return rng.randbytes(rng.randrange(1, 2000))
  lines = [rng.choice([b'a', b'b', b'', b'-- a', b'@@ -1 +1 @@', b'c\r', b'\\ No newline at end of file']) + b'\n' for _ in range(rng.randrange(1, 40))]
  return b''.join(lines) + rng.choice([b'', b'end', b'\xff'])


NAMES = ['a.py', 'd/b c.txt', 'd/\u00fc"x.bin', 'z/t\tt', 'with space ']


def random_change(rng):
  old = {path: Entry(rng.choice([patches.FILE, patches.EXECUTABLE]), random_content(rng)) for path in NAMES if rng.random() < 0.7}
  new = {}
  for path in NAMES:
    kind = rng.random()
    if kind < 0.25:
      new[path] = None
    elif kind < 0.5 and path in old:
      lines = old[path].data.split(b'\n')
      at = rng.randrange(len(lines))
      lines[at:at + rng.randrange(2)] = [b'new'] * rng.randrange(3)
      new[path] = Entry(rng.choice([patches.FILE, patches.EXECUTABLE]), b'\n'.join(lines))
    elif kind < 0.6:
      new[path] = Entry(patches.LINK, b'target')
    else:
      new[path] = Entry(patches.FILE, random_content(rng))
  return old, new


def after(tree, change):
  return {path: entry for path, entry in {**tree, **change}.items() if entry is not None}


@pytest.mark.parametrize('seed', range(4))
def test_what_is_written_is_read_back(seed):
  rng = random.Random(seed)
  for _ in range(40):
    old, new = random_change(rng)
    patch = patches.write(new, old.get)
    assert after(old, patches.apply(patch, old.get)) == after(old, new), patch


def git(folder, *words, **kwargs):
  return subprocess.run(['git', '-c', 'user.name=a', '-c', 'user.email=a@b', *words], cwd=folder, capture_output=True, timeout=300, **kwargs)


def lay_out(folder, tree):
  for path, entry in tree.items():
    full = folder / path
    full.parent.mkdir(parents=True, exist_ok=True)
    full.write_bytes(entry.data)
    full.chmod(entry.mode & 0o777)


def test_git_reads_what_is_written(tmp_path):
  rng = random.Random(7)
  done = 0
  for number in range(12):
    old, new = random_change(rng)
    patch = patches.write(new, old.get)
    if patch:
      folder = tmp_path / str(number)
      folder.mkdir()
      git(folder, 'init', '-q')
      lay_out(folder, old)
      result = git(folder, 'apply', '-', input=patch)
      assert result.returncode == 0, (result.stderr, patch)
      for path, entry in after(old, new).items():
        assert (os.readlink(folder / path).encode() if entry.mode == patches.LINK else (folder / path).read_bytes()) == entry.data
      done += 1
  assert done > 8


def test_what_git_writes_is_read(tmp_path):
  """Renames, copies, binary deltas, modes, links, and files without a line break at their end."""
  rng = random.Random(3)
  big = rng.randbytes(4000)
  old = {'a.bin': Entry(patches.FILE, big), 'b.txt': Entry(patches.FILE, b'1\n2\n3\n4\n5\n6\n7'), 'c.txt': Entry(patches.FILE, b'x\n' * 30)}
  new = {
      'a.bin': Entry(patches.FILE, big[:1000] + b'middle' + big[1000:]), 'b.txt': Entry(patches.EXECUTABLE, b'1\n2\n3\n4\n5\n6\n8\n'),
      'e/d.txt': Entry(patches.FILE, b'x\n' * 29 + b'y\n'), 'c.txt': None, 'ü.txt': Entry(patches.FILE, b'a'), 'empty': Entry(patches.FILE, b'')}
  git(tmp_path, 'init', '-q')
  lay_out(tmp_path, old)
  git(tmp_path, 'add', '-A')
  git(tmp_path, 'commit', '-qm', 'x')
  (tmp_path / 'c.txt').unlink()
  lay_out(tmp_path, after(old, new))
  os.symlink('b.txt', tmp_path / 'link')
  git(tmp_path, 'add', '-A')
  patch = git(tmp_path, 'diff', '--binary', '-M', '-C', '--cached').stdout
  assert b'rename from' in patch and b'delta ' in patch
  assert after(old, patches.apply(patch, old.get)) == {**after(old, new), 'link': Entry(patches.LINK, b'b.txt')}


def test_hunks_may_stand_elsewhere_but_must_fit():
  old = {'a': Entry(patches.FILE, b'0\n' * 50 + b'x\ny\nz\n' + b'0\n' * 5)}
  patch = b'--- a/a\n+++ b/a\n@@ -3,3 +3,3 @@\n x\n-y\n+Y\n z\n'
  assert patches.apply(patch, old.get)['a'].data == b'0\n' * 50 + b'x\nY\nz\n' + b'0\n' * 5
  with pytest.raises(patches.PatchError, match='does not fit'):
    patches.apply(patch.replace(b' x', b' w'), old.get)


def test_a_hunk_may_name_any_line():
  entry = patches.Entry(patches.FILE, b'a\nb\nc\nb\n')
  for line, expected in ((10**30, b'a\nb\nc\nx\n'), (2, b'a\nx\nc\nb\n')):
    patch = f'--- a/f\n+++ b/f\n@@ -{line} +1 @@\n-b\n+x\n'.encode()
    assert patches.apply(patch, lambda _: entry)['f'].data == expected
  with pytest.raises(patches.PatchError, match='does not fit'):
    patches.apply(b'--- a/f\n+++ b/f\n@@ -' + b'9' * 30 + b' +1 @@\n-q\n+x\n', lambda _: entry)


@pytest.mark.parametrize('path', ['../x', '/etc/x', 'a/../../x', '.git/config', 'a/.GIT/hooks/x', 'a//b', './a',
                                  'x' * 256, 'a/' + 'ü' * 128, 'd/' * 2000 + 'x'])
def test_paths_that_lead_elsewhere_are_refused(path):
  patch = f'diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n+x\n'
  with pytest.raises(patches.PatchError):
    patches.apply(patch.encode(), lambda _: None)


@pytest.mark.parametrize('target, written, files', [('t' * 4001, 10**6, 10), ('t', 10**6, 1), ('t' * 60, 100, 10)])
def test_what_no_box_could_hold_is_refused(monkeypatch, target, written, files):
  """It is the prediction's fault, and not that of the sandbox which cannot write it."""
  change = {f'l{i}': Entry(patches.LINK, target.encode()) for i in range(2)}
  patch = patches.write(change, lambda _: None)
  assert len(target) > 4000 or patches.apply(patch, lambda _: None) == change
  monkeypatch.setattr(patches, 'MAX_WRITTEN', written)
  monkeypatch.setattr(patches, 'MAX_FILES', files)
  with pytest.raises(patches.PatchError):
    patches.apply(patch, lambda _: None)


@pytest.mark.parametrize('patch', [
    b'rubbish', b'diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n x\n', b'@@ -1 +1 @@\n', b'diff --git a/x b/x\nBinary files a/x and b/x differ\n',
    b'diff --git a/x b/x\nnew file mode 100644\nGIT binary patch\nliteral 9999999999\nzcmV\n\n', b'diff --git a/x b/x\nnew file mode 777777777\n',
    b'diff --git a/x b/x\nnew file mode 100644\nGIT binary patch\nliteral 5\nE!!!!!\n\n', b'--- "a/x\n+++ b/x\n', b'diff --git a/x b/x\nrename from y\nrename to z\n'])
def test_patches_that_are_none(patch):
  with pytest.raises(patches.PatchError):
    patches.apply(patch, {'x': Entry(patches.FILE, b'1\n')}.get)


# --- Trusted files ---------------------------------------------------------------------------------------------------------------


def test_links_and_shadows_are_left_out_and_trusted_files_come_whole():
  instance, _ = swe_fixtures.instance(swe_fixtures.src_layout)
  base = Judge().base(instance)
  found = trusted.Trusted(instance, base)
  link = lambda target: Entry(patches.LINK, target)
  text = Entry(patches.FILE, b'x')
  laid = found.lay({
      'tests': link(b'src'), 'src/shop': text, 'src/shop/good.py': text, 'out': link(b'../../etc'), 'away': link(b'/etc/passwd'),
      'src/shop/near': link(b'../shop/cart.py'), 'src/random.py': text, 'src/shop/random.py': text, 'tests/test_cart.py': None,
      'tests/new.py': text, 'src/pytest_mine.py': text, 'src/shop/cart.py/below': text, 'hooks': link(b'.git/hooks')})
  assert set(laid.change) == {'src/shop/good.py', 'src/shop/near', 'src/shop/random.py', 'tests/test_cart.py'}
  assert laid.change['tests/test_cart.py'] == found.files['tests/test_cart.py']
  assert set(laid.dropped) == {
      'tests', 'out', 'away', 'src/random.py', 'src/pytest_mine.py', 'src/shop/cart.py/below', 'hooks', 'tests/new.py', 'src/shop',
      'tests/test_cart.py'}


def test_nothing_is_imported_in_the_place_of_a_test_module():
  instance, _ = swe_fixtures.instance(swe_fixtures.flat)
  found = trusted.Trusted(instance, Judge().base(instance))
  text = Entry(patches.FILE, b'x')
  covers = ('test_calc/__init__.py', 'test_calc.so', 'test_calc.cpython-311-x86_64-linux-gnu.so', 'test_calc/__init__.abi3.so')
  laid = found.lay({**{path: text for path in (*covers, 'calc/__init__.py', 'test_calc/data.txt')}, 'test_calc': Entry(patches.LINK, b'calc')})
  assert set(laid.dropped) == {*covers, 'test_calc'}
  assert 'calc/__init__.py' in laid.change and laid.change['test_calc.py'] == found.files['test_calc.py']


def test_the_python_that_runs_the_tests_is_trusted():
  instance, _ = swe_fixtures.instance(swe_fixtures.flat)
  instance = dataclasses.replace(instance, files={**instance.files, 'env/pyvenv.cfg': 'home = /usr/bin\n', 'env/bin/python': 'x'})
  found = trusted.Trusted(instance, Judge().base(instance))
  text = Entry(patches.EXECUTABLE, b'#!/bin/sh\n')
  laid = found.lay({path: text for path in ('env/bin/python', 'env/new', '.venv/bin/python', 'lib/site-packages/a.py', 'environment.py')})
  assert set(laid.dropped) == {'env/bin/python', 'env/new', '.venv/bin/python', 'lib/site-packages/a.py'}


# --- Repositories ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def versions(tmp_path):
  folder = tmp_path / 'origin'
  first = {'a.py': 'x = 1\n', 'sub/b.txt': 'text\n', '.gitattributes': '*.txt text eol=crlf\na.py export-ignore\n'}
  commits = swe_fixtures.git_repository(folder, [first, {'a.py': 'x = "the secret of the future"\n', 'later.py': 'y = 2\n'}])
  (folder / '.git' / 'hooks').mkdir(exist_ok=True)
  hook = folder / '.git' / 'hooks' / 'post-checkout'
  hook.write_text(f'#!/bin/sh\ntouch {tmp_path}/hook_ran\n')
  hook.chmod(0o755)
  return tmp_path, folder, commits


def row_of(path, commit):
  tests = {'test_a.py': 'import a\n\n\ndef test_a():\n  assert a.x == 2\n'}
  return {
      'instance_id': 'o__r-1', 'repo': 'o/r', 'base_commit': commit, 'problem_statement': 'x must be 2', 'path': str(path),
      'patch': swe_fixtures.diff({'a.py': 'x = 1\n'}, {'a.py': 'x = 2\n'}), 'test_patch': swe_fixtures.diff({}, tests),
      'FAIL_TO_PASS': ['test_a.py::test_a'], 'PASS_TO_PASS': []}


@pytest.mark.parametrize('kind', ['folder', pytest.param('bundle', marks=pytest.mark.slow)])
def test_the_box_holds_one_commit_and_nothing_of_the_future(versions, kind):
  tmp_path, folder, commits = versions
  path = folder
  if kind == 'bundle':
    path = tmp_path / 'r.bundle'
    assert git(folder, 'bundle', 'create', '-q', str(path), '--all').returncode == 0
  instance = instances.parse(row_of(path, commits[0]), 'x')
  judge = Judge(time_s=120.0)
  with judge.open_box(instance) as box:
    judge.base(instance).populate(box, 'python3')
    look = lambda command: box.run(['bash', '-c', command], cwd=repository.ROOT).stdout.decode()
    assert look('ls -A').split() == ['.git', '.gitattributes', 'a.py', 'sub']
    assert look('git log --all --oneline | wc -l; git status --short; git remote; git tag; git stash list; git reflog 2>&1').split() == ['1']
    assert look('cat sub/b.txt') == 'text\n'
    secret = 'for o in $(git cat-file --batch-all-objects --batch-check | cut -d" " -f1); do git cat-file -p $o 2>&1; done | grep -c secret'
    assert look(secret).strip() == '0' and look('git fsck --unreachable --no-reflogs 2>&1 | grep -c unreachable').strip() == '0'
    assert look(f'git cat-file -t {commits[1]} 2>&1; grep -rl example.invalid . ; ls .git/hooks 2>/dev/null').strip().startswith('fatal')
  assert not (tmp_path / 'hook_ran').exists()
  verdict = judge.judge_patch(instance, instance.patch)
  assert verdict.resolved, verdict.log


def test_attributes_change_no_file_of_the_new_repository(tmp_path, capfd):
  """Line ends and encodings that git would make of the files of a commit: some cannot even be added so."""
  for name, data in {'.gitattributes': b'*.bat text eol=crlf\n*.txt working-tree-encoding=UTF-16\n', 'a.bat': b'a\n', 'b.txt': b'odd'}.items():
    (tmp_path / name).write_bytes(data)
  repository.tree_script.lose(os.fsencode(tmp_path))
  assert capfd.readouterr() == ('', '')
  os.utime(tmp_path / 'a.bat', (1, 1))
  assert git(tmp_path, 'status', '--short').stdout == b'' and git(tmp_path, 'show', 'HEAD:b.txt').stdout == b'odd'


def test_repositories_that_are_not_there_are_told(versions):
  tmp_path, folder, commits = versions
  with pytest.raises(environments.EnvironmentFailure, match='There is no commit') as caught:
    Judge().base(instances.parse(row_of(folder, 'f' * 40), 'x'))
  assert caught.value.reason == 'environment_repository' and not caught.value.retry
  (tmp_path / 'no').mkdir()
  with pytest.raises(environments.EnvironmentFailure):
    Judge().base(instances.parse(row_of(tmp_path / 'no', commits[0]), 'x'))


def test_what_a_policy_leaves_comes_out_as_a_patch_and_nothing_is_followed(versions):
  tmp_path, folder, commits = versions
  instance = instances.parse(row_of(folder, commits[0]), 'x')
  judge = Judge(time_s=120.0)
  base = judge.base(instance)
  script = '''
    git config core.fsmonitor "touch /tmp/ran"; git config diff.external "touch /tmp/ran"; printf '#!/bin/sh\\nexit 1' > .git/hooks/pre-commit
    echo '*.py diff=bad -text' > .gitattributes; git update-index --assume-unchanged a.py
    echo 'x = 2' > a.py; rm sub/b.txt; printf '\\0\\1\\2' > data.bin; ln -s /etc/passwd link; ln -s a.py near; mkfifo pipe
    mkdir __pycache__ && touch __pycache__/a.pyc; head -c 6000000 /dev/zero > huge; chmod +x a.py; mkdir deep; ln -s /etc deep/dir
    printf 'x' > 'with "quotes" and ü'; git add -A; git commit -qm 'policy' --no-verify; rm -rf .git/objects; mkdir nested; git init -q nested
    echo 1 > nested/file; python3 -c "import os; os.mkdir(b'\\xff'); open(b'\\xff/f', 'w').write('x')"; true'''
  with judge.open_box(instance) as box:
    base.populate(box, 'python3')
    assert box.run(['bash', '-c', script], cwd=repository.ROOT).exit_code == 0
    change, left = repository.extract(box, 'python3', base)
    again, _ = repository.extract(box, 'python3', base)
  assert change == again
  assert change['a.py'] == Entry(patches.EXECUTABLE, b'x = 2\n') and change['sub/b.txt'] is None and change['data.bin'].data == b'\0\1\2'
  assert change['link'] == Entry(patches.LINK, b'/etc/passwd') and change['deep/dir'] == Entry(patches.LINK, b'/etc')
  assert change['nested/file'].data == b'1\n' and os.fsdecode(b'\xff/f') in change and list(left) == ['huge']
  assert not any('pycache' in path or path.startswith('.git/') or path == 'pipe' for path in change)
  patch = patches.write(change, base.entry)
  assert patches.apply(patch, base.entry) == change
  verdict = judge.judge(instance, change)
  assert verdict.resolved and {'link', 'deep/dir'} <= set(verdict.dropped), verdict.detail


def test_a_policy_that_destroys_its_box_has_changed_nothing(versions):
  _, folder, commits = versions
  instance = instances.parse(row_of(folder, commits[0]), 'x')
  judge = Judge()
  for script in ('rm -rf /box/repo', 'rm -rf /box/repo; ln -s /etc /box/repo', 'mkdir /box/.swe_out', 'ln -s /etc/passwd /box/.swe_out'):
    with judge.open_box(instance) as box:
      judge.base(instance).populate(box, 'python3')
      box.run(['bash', '-c', script])
      change, left = repository.extract(box, 'python3', judge.base(instance))
      assert not any(entry for entry in change.values()) and (left or not change)


# --- Tools -----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def toolbox():
  instance, _ = swe_fixtures.instance(swe_fixtures.flat)
  judge = Judge()
  with judge.open_box(instance) as box:
    judge.base(instance).populate(box, 'python3')
    yield tools.Toolbox(box, shell_time_s=60.0, max_output=600)


def test_the_shell_keeps_its_folder_and_variables(toolbox):
  assert toolbox.call('shell', {'command': 'cd / && export A="x y"; B=1'}) == ('(no output)', True)
  assert toolbox.call('shell', {'command': 'pwd; echo "$A$B"; false'}) == ('/\nx y\n(exit status 1)', True)
  assert toolbox.call('shell', {'command': 'cd /box/repo; ls'})[0].startswith('calc.py')
  assert 'syntax error' in toolbox.call('shell', {'command': 'if'})[0]
  assert toolbox.call('shell', {'command': 'exit 3'})[0] == '(exit status 3)'
  assert toolbox.call('shell', {'command': 'cat'})[0] == '(no output)'


def test_the_shell_has_limits(toolbox):
  for limit_s in (1.0, 10.0, 60.0):
    hurried = tools.Toolbox(toolbox._box, shell_time_s=limit_s, max_output=600)
    text, well = hurried.call('shell', {'command': 'echo before; sleep 1000'})
    if 'before' in text:
      break
  assert well and 'before' in text and f'more than {limit_s:g} s' in text
  text, _ = toolbox.call('shell', {'command': 'seq 100000'})
  assert len(text) < 800 and text.startswith('1\n2\n') and text.endswith('100000') and 'left out' in text
  assert toolbox.call('shell', {'command': 'a\0b'})[1] is False
  assert toolbox.call('shell', {'command': 'echo \ud800'})[1] is True
  assert toolbox.call('shell', {'command': 'echo ' + 'x' * 200_000})[1] is False


def test_the_editor(toolbox):
  edit = lambda command, path, **more: toolbox.call('editor', {'command': command, 'path': path, **more})
  assert edit('create', 'new/e.txt', file_text='one\ntwo\none\n') == ('new/e.txt is written: 3 lines', True)
  assert edit('view', 'new/e.txt') == ('     1\tone\n     2\ttwo\n     3\tone', True)
  assert edit('view', '/box/repo/new/e.txt', view_range=[2, -1]) == ('     2\ttwo\n     3\tone', True)
  assert 'stands 2 times in new/e.txt (lines 1, 3)' in edit('str_replace', 'new/e.txt', old_str='one', new_str='x')[0]
  assert edit('str_replace', 'new/e.txt', old_str='two\n', new_str='zwei\n')[1]
  assert edit('insert', 'new/e.txt', insert_line=0, new_str='zero')[1] and edit('insert', 'new/e.txt', insert_line=4, new_str='end')[1]
  assert edit('view', 'new/e.txt')[0].split() == ['1', 'zero', '2', 'one', '3', 'zwei', '4', 'one', '5', 'end']
  for _ in range(3):
    assert edit('undo_edit', 'new/e.txt')[1]
  assert edit('view', 'new/e.txt')[0].split()[1::2] == ['one', 'two', 'one']
  assert edit('undo_edit', 'new/e.txt')[0] == 'new/e.txt is deleted: it was new' and not edit('undo_edit', 'new/e.txt')[1]
  assert edit('view', '.')[0].split()[:1] == ['./calc.py'] and edit('view', 'new') == ('(the folder is empty)', True)


@pytest.mark.parametrize('arguments, message', [
    ({'command': 'view', 'path': '/etc/passwd'}, 'outside'), ({'command': 'view', 'path': '../../etc/passwd'}, 'outside'),
    ({'command': 'view', 'path': 'nowhere'}, 'nowhere'), ({'command': 'create', 'path': 'x'}, 'needs file_text'),
    ({'command': 'view', 'path': 'calc.py', 'old_str': 'x'}, 'takes no old_str'), ({'command': 'str_replace', 'path': 'calc.py', 'old_str': ''}, 'empty'),
    ({'command': 'str_replace', 'path': 'calc.py', 'old_str': 'nothing of it'}, 'does not stand'),
    ({'command': 'insert', 'path': 'calc.py', 'insert_line': 99, 'new_str': 'x'}, 'insert_line must be'),
    ({'command': 'view', 'path': 'calc.py', 'view_range': [5, 2]}, 'view_range must'), ({'command': 'create', 'path': '.', 'file_text': ''}, 'folder'),
    ({'command': 'view', 'path': 'leads_out'}, 'error'), ({'command': 'create', 'path': 'leads_out/x', 'file_text': ''}, 'error')])
def test_the_editor_tells_what_is_wrong(toolbox, arguments, message):
  toolbox.call('shell', {'command': 'ln -sfn /etc /box/repo/leads_out'})
  text, well = toolbox.call('editor', arguments)
  assert not well and text.startswith('error: ') and message in text


@pytest.mark.parametrize('seed', range(20))
def test_steps_lead_from_one_text_to_the_other(seed):
  rng = random.Random(seed)
  old = ''.join(rng.choice('abc') + '\n' for _ in range(rng.randrange(1, 30)))
  lines = old.splitlines(keepends=True)
  for _ in range(rng.randrange(1, 6)):
    at = rng.randrange(len(lines) + 1)
    lines[at:at + rng.randrange(3)] = [rng.choice('abcd') + '\n' for _ in range(rng.randrange(3))]
  new = text = ''.join(lines)
  text = old
  for before, becomes in environment.steps(old, new):
    assert tools._places(text, before, 2) == [text.index(before)]
    text = text.replace(before, becomes)
  assert text == new


# --- Episodes --------------------------------------------------------------------------------------------------------------------


def call(name, **arguments):
  return ToolCall(name, arguments, '')


def made(tmp_path, *rows, **settings):
  return environments.make('swe', source=str(swe_fixtures.write_rows(tmp_path / 'rows.jsonl', rows)), test_time_s=120.0, **settings)


@pytest.mark.parametrize('shape', [swe_fixtures.flat, swe_fixtures.moved])
def test_a_demonstration_is_rewarded(tmp_path, shape):
  env = made(tmp_path, shape()[0])
  task = env.sample_task(0, 'train', 0)
  first = env.reset(task)
  assert first.messages[0]['role'] == 'system' and first.messages[1]['content'] == f'Repair {shape.__name__}.'
  turns = env.demonstration(task, np.random.default_rng(0))
  for turn in turns:
    result = env.step_calls([call(name, **arguments) for name, arguments in turn.calls], turn.text)
  assert result.terminated and result.reward == 1.0 and set(result.metrics) == set(env.metric_names)
  assert result.metrics['submitted'] == result.metrics['resolved'] == 1 and result.metrics['tool_calls'] == len(turns)
  assert result.metrics['diff_lines'] >= 2 and result.metrics['errors'] == 0
  env.close()


def test_turns_without_calls_wrong_calls_and_the_last_turn(tmp_path):
  env = made(tmp_path, swe_fixtures.flat()[0], max_turns=3, predictions=str(tmp_path / 'out'))
  env.reset(env.sample_task(0, 'test', 0))
  result = env.step_calls([], 'thinking aloud')
  assert result.observation.messages[0]['role'] == 'user' and not result.terminated
  result = env.step_calls([ToolCallError('not valid JSON', ''), *[call('shell', command='true')] * 9], '')
  assert [m['role'] for m in result.observation.messages] == ['tool'] * 9 and result.metrics['errors'] == 2
  result = env.step_calls([call('shell', command='sed -i s/-/+/ calc.py')], '')
  assert result.terminated and result.reward == 1.0 and result.metrics['submitted'] == 0
  written = json.loads((tmp_path / 'out' / 'fixture__flat-1.json').read_text())
  assert written['instance_id'] == 'fixture__flat-1' and '+  return a + b' in written['model_patch']
  with pytest.raises(RuntimeError):
    env.step_calls([], '')
  env.close()


def test_a_long_episode_goes_on_with_a_summary(tmp_path):
  env = made(tmp_path, swe_fixtures.flat()[0], compaction='summary', max_turns=4, judge=False)
  opening = env.reset(env.sample_task(0, 'test', 0)).messages
  said = env.step_calls([call('shell', command='touch kept')], '').observation.messages
  assert 'summary' in env.compact((*opening, {'role': 'assistant', 'content': '...'}, *said), 9).messages[-1]['content']
  result = env.step_calls([call('submit')], 'I made a file.')
  assert result.observation.restart and result.observation.messages[-1]['content'].endswith('I made a file.') and not result.terminated
  assert 'kept' in env.step_calls([call('shell', command='ls')], '').observation.messages[0]['content']
  assert env.step_calls([], '').terminated  # The summary was a turn, too.
  env.close()


def test_the_shell_imports_what_the_tests_import(tmp_path):
  env = made(tmp_path, swe_fixtures.src_layout()[0])
  env.reset(env.sample_task(0, 'test', 0))
  told = env.step_calls([call('shell', command='cd /tmp && python3 -c "import numpy, shop; print(shop.__file__)"')], '')
  assert '/box/repo/src/shop/__init__.py' in told.observation.messages[0]['content']
  env.close()


def test_an_episode_that_is_cut_writes_what_is_there(tmp_path):
  env = made(tmp_path, swe_fixtures.flat()[0], judge=False, predictions=str(tmp_path / 'out'))
  env.reset(env.sample_task(0, 'test', 0))
  env.step_calls([call('shell', command='sed -i s/-/+/ calc.py')], '')
  env.close()
  assert 'a + b' in json.loads((tmp_path / 'out' / 'fixture__flat-1.json').read_text())['model_patch']


def test_replies(tmp_path):
  env = environments.make('swe', generated=60, interface='reply', conversation='raw', stop_strings=('\n',), test_time_s=120.0, test_share=0.3)
  sizes = {split: env.task_sets(split)[0].size for split in ('train', 'test')}
  assert sum(sizes.values()) == 60 and min(sizes.values()) > 5
  task = env.sample_task(3, 'train', 0)
  stub = env.reset(task).text
  assert stub.endswith('return ')
  right = env.demonstration(task, np.random.default_rng(0))[0]
  assert env.step(right + 'rest of a token').reward == 1.0
  env.reset(task)
  assert env.step('x\n').reward == 0.0
  chat = environments.make('swe', generated=60, interface='reply', test_time_s=120.0, test_share=0.3)
  chat.reset(task)
  assert chat.step(chat.demonstration(task, np.random.default_rng(0))[0]).reward == 1.0
  chat.reset(task)
  result = chat.step('I do not know.')
  assert result.reward == 0.0 and result.metrics['submitted'] == 0


@pytest.mark.parametrize('settings, message', [
    ({'interface': 'mail'}, 'interface must be'), ({'conversation': 'raw'}, "interface='reply'"), ({'source': ''}, 'source must be a file'),
    ({'source': 'nowhere.jsonl'}, 'There is no file'), ({'source': {'train': 'x'}}, 'source must be'), ({'max_turns': 0}, 'max_turns must be'),
    ({'controls': -1}, 'controls must be'), ({'unknown': 1}, 'Unknown setting')])
def test_settings_are_checked(tmp_path, settings, message):
  path = swe_fixtures.write_rows(tmp_path / 'rows.jsonl', [swe_fixtures.flat()[0]])
  with pytest.raises(ValueError, match=message):
    environments.make('swe', **{'source': str(path), **settings})


def test_a_broken_sandbox_is_a_failure_of_the_environment(tmp_path, monkeypatch):
  env = made(tmp_path, swe_fixtures.flat()[0])
  task = env.sample_task(0, 'test', 0)

  def refuse(*args, **kwargs):
    raise sandbox.Unavailable('nothing works here')

  with monkeypatch.context() as patch:
    patch.setattr(sandbox, 'open', refuse)
    with pytest.raises(environments.EnvironmentFailure, match='nothing works here') as caught:
      env.reset(task)
  assert caught.value.reason == 'environment_sandbox'
  env.reset(task)
  env._box.close()
  with pytest.raises(environments.EnvironmentFailure) as caught:
    env.step_calls([call('shell', command='true')], '')
  assert caught.value.reason == 'environment_sandbox'
  env.close()


def test_a_repository_that_cannot_be_laid_out_loses_the_rollout_and_not_the_run(tmp_path, monkeypatch):
  def refuse(*_, **__):
    raise repository.RepositoryError('git is not installed')

  env = made(tmp_path, swe_fixtures.flat()[0])
  instance, _ = swe_fixtures.instance(swe_fixtures.flat)
  monkeypatch.setattr(repository.FolderBase, 'populate', refuse)
  for call_it in (lambda: env.reset(env.sample_task(0, 'test', 0)), lambda: Judge().judge_patch(instance, instance.patch)):
    with pytest.raises(environments.EnvironmentFailure, match='git is not installed') as caught:
      call_it()
    assert caught.value.reason == 'environment_repository'
  env.close()


@pytest.mark.parametrize('warm', [0, 1])
def test_a_box_that_comes_after_the_end_is_ended(tmp_path, monkeypatch, warm):
  """`close` may come while the box of a hanging reset is made."""
  boxes, connect = [], sandbox.backends.connect

  def connected(*arguments):
    boxes.append(connect(*arguments))
    return boxes[-1]

  env = made(tmp_path, swe_fixtures.flat()[0], warm=warm, memory_mb=1000 + warm)
  monkeypatch.setattr(sandbox.backends, 'connect', connected)
  env.close()
  with pytest.raises(environments.EnvironmentFailure, match='closed while'):
    env.reset(env.sample_task(0, 'test', 0))
  if warm:
    assert not env._pool._taken
    env._pool.close()
  assert boxes and all(box.process.poll() is not None for box in boxes)


# --- Items of HumanEval and MBPP -------------------------------------------------------------------------------------------------

MBPP = {'task_id': 8, 'text': 'Write a function to find squares.', 'code': 'import math\r\ndef squares(nums):\r\n\treturn [n * n for n in nums]\r\n',
        'test_list': ['assert squares([1, 2])==[1, 4]', 'assert squares([3])==[9]'], 'test_setup_code': '', 'challenge_test_list': []}
HUMANEVAL = {
    'task_id': 'HumanEval/7', 'prompt': 'def inc(x: int) -> int:\n    """Adds one."""\n', 'entry_point': 'inc', 'canonical_solution': '    return x + 1\n',
    'test': 'def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(-1) == 0\n'}


@pytest.mark.parametrize('item, completion', [
    (MBPP, False), (MBPP, True), (HUMANEVAL, False), (json.loads(json.dumps(MBPP).replace('squares', '_squares')), False),
    (json.loads(json.dumps(HUMANEVAL).replace('inc', 'solution')), False)])  # A private name, and the name of the module.
def test_items_are_instances(item, completion):
  instance = instances.parse(small_tasks.row(item, completion=completion), 'x')
  judge = Judge(time_s=120.0)
  assert judge.judge_patch(instance, instance.patch).reason == 'resolved'
  wrong = swe_fixtures.diff(dict(instance.files), {'solution.py': 'def squares(nums):\n  return nums\n\n\ndef inc(x):\n  return x\n'})
  assert judge.judge_patch(instance, wrong).reason == 'tests_failed'
  if completion:
    assert patches.apply(instance.patch.encode(), judge.base(instance).entry)['solution.py'].data.startswith(instance.files['solution.py'].encode())


@pytest.mark.parametrize('item', [{}, {**MBPP, 'code': 'def ('}, {**MBPP, 'test_list': []}, {**MBPP, 'test_list': ['assert other(1)']}])
def test_items_that_are_none(item, tmp_path):
  path = swe_fixtures.write_rows(tmp_path / 'items.jsonl', [MBPP, item])
  with pytest.raises(ValueError, match='line 2'):
    environments.make('swe', source=str(path), items=True)


# --- Grading predictions ---------------------------------------------------------------------------------------------------------


class CountingJudge(Judge):

  def __init__(self):
    super().__init__(time_s=120.0)
    self.judged = []
    self.broken = False

  def judge_patch(self, instance, patch, **more):
    if self.broken:
      raise environments.EnvironmentFailure('gone')
    self.judged.append(instance.instance_id)
    return super().judge_patch(instance, patch, **more)


def test_predictions_go_in_and_out_and_grading_resumes(tmp_path):
  rows = [swe_fixtures.flat()[0], swe_fixtures.with_unittest()[0], swe_fixtures.with_log()[0]]
  path = str(swe_fixtures.write_rows(tmp_path / 'rows.jsonl', rows))
  found = instances.load(path)
  request, judge = swe_run.Request(source=path, workers=2), CountingJudge()
  predictions = swe_run.read_predictions('gold', found)
  predictions[found[1].instance_id]['model_patch'] = swe_fixtures.with_unittest()[1]
  del predictions[found[2].instance_id]
  report = swe_run.grade(found, predictions, request, tmp_path / 'out', judge=judge)
  assert report['resolved_ids'] == [found[0].instance_id] and report['unresolved_ids'] == [found[1].instance_id]
  assert (report['total_instances'], report['submitted_instances'], report['judged']) == (3, 2, 3) and len(judge.judged) == 2
  assert swe_run.read_predictions(str(tmp_path / 'out' / 'predictions.jsonl'), found) == predictions
  folder = tmp_path / 'out' / 'logs' / found[0].instance_id
  assert sorted(p.name for p in folder.iterdir()) == ['patch.diff', 'report.json', 'test_output.txt']
  status = json.loads((folder / 'report.json').read_text())['tests_status']
  assert status['FAIL_TO_PASS']['success'] == list(found[0].fail_to_pass) and 'passed' in (folder / 'test_output.txt').read_text()
  predictions[found[2].instance_id] = {'model_name_or_path': 'x', 'model_patch': ''}
  judge.broken = True
  predictions[found[1].instance_id]['model_patch'] = found[1].patch
  report = swe_run.grade(found, predictions, request, tmp_path / 'out', judge=judge)
  assert report['error_ids'] == [found[1].instance_id] and report['empty_patch_ids'] == [found[2].instance_id] and report['judged'] == 2
  judge.broken = False
  report = swe_run.grade(found, predictions, request, tmp_path / 'out', judge=judge)
  assert judge.judged[2:] == [found[1].instance_id] and report['resolved_instances'] == 2
  with pytest.raises(ValueError, match='other settings'):
    swe_run.grade(found, predictions, swe_run.Request(source=path, controls=3), tmp_path / 'out', judge=judge)


@pytest.mark.parametrize('text, message', [
    ('{"instance_id": "fixture__flat-1"}\nx', 'line 2'), ('[1]', 'must be an object'), ('{"instance_id": "b", "model_patch": 3}', 'model_patch must be'),
    ('{"instance_id": "b", "model_patch": "\\ud800"}', 'half of a surrogate pair'), ('[' * 100_000, 'line 1: not valid JSON'),
    ('{"instance_id": "b", "model_patch": ""}', 'holds no prediction for any'),
    ('[{"instance_id": "fixture__flat-1"}, {"instance_id": "fixture__flat-1"}]', 'two predictions')])
def test_predictions_that_are_none(tmp_path, text, message):
  found = [swe_fixtures.instance(swe_fixtures.flat)[0]]
  (tmp_path / 'p.json').write_text(text)
  with pytest.raises(ValueError, match=message):
    swe_run.read_predictions(str(tmp_path / 'p.json'), found)


def test_predictions_of_other_forms(tmp_path):
  found = [swe_fixtures.instance(swe_fixtures.flat)[0]]
  (tmp_path / 'p.json').write_text(json.dumps({'fixture__flat-1': {'model_patch': None, 'model_name_or_path': 'm'}}))
  assert swe_run.read_predictions(str(tmp_path / 'p.json'), found) == {'fixture__flat-1': {'model_name_or_path': 'm', 'model_patch': ''}}


@pytest.mark.slow
def test_the_command_measures_and_grades(tmp_path):
  path = swe_fixtures.write_rows(tmp_path / 'rows.jsonl', [swe_fixtures.flat()[0], swe_fixtures.with_command()[0]])
  start = [sys.executable, 'launch/evaluate.py', '--benchmark=swe', f'--benchmark_path={path}']
  run = lambda *words: subprocess.run([*start, *words], cwd=ROOT, capture_output=True, text=True, timeout=1800)
  measured = run(f'--measure={tmp_path}/m.jsonl', '--repeats=1')
  assert measured.returncode == 0 and json.loads(measured.stdout)['usable'] == 2, measured.stderr
  for name, resolved in (('gold', 2), ('empty', 0)):
    graded = run(f'--predictions={name}', f'--measured={tmp_path}/m.jsonl', f'--output={tmp_path}/{name}')
    assert graded.returncode == 0 and json.loads(graded.stdout)['resolved_instances'] == resolved, graded.stderr
  assert f'resolved {resolved} of 2' in graded.stderr
  wrong = run('--predictions=gold', '--num_samples=2')
  assert wrong.returncode == 1 and '--num_samples is not for' in wrong.stderr


@pytest.mark.slow
def test_a_policy_makes_predictions_that_are_graded(tmp_path):
  """A random model calls no tool; after its turns the repository is taken as it is, and the whole goes on where it was stopped."""
  import jax

  from sao_jax import config as settings
  from sao_jax.config import ModelConfig
  from sao_jax.models import pretrained, transformer
  from tests import tokenizer_factory

  tokenizer = tokenizer_factory.chatml()
  model = ModelConfig(
      vocab_size=tokenizer.vocab_size + 5, embed_dim=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=64, max_length=4096)
  params = jax.jit(lambda key: transformer.init(transformer.Policy, model, key))(jax.random.key(0))
  pretrained.save_params(tmp_path / 'tiny', model, params, tokenizer)
  values = settings.default_dict()
  values['model'] |= {'pretrained': str(tmp_path / 'tiny'), 'tokenizer': 'pretrained'}
  values['sampler'] |= {'slots': 2, 'sessions': 2}
  rows = [swe_fixtures.flat()[0], swe_fixtures.with_unittest()[0]]
  path = str(swe_fixtures.write_rows(tmp_path / 'rows.jsonl', rows))
  found = instances.load(path)
  evaluate = lambda: swe_run.evaluate_policy(
      settings.from_dict(values), found, swe_run.Request(source=path), workdir=None, step=None, output=str(tmp_path / 'out'), max_turns=2,
      max_turn_tokens=8, max_tokens=None, temperature=1.0, model_name='tiny')
  report = evaluate()
  assert report['empty_patch_instances'] == 2 and report['resolved_instances'] == 0 and report['submitted_instances'] == 2
  episode = tmp_path / 'out' / 'episodes' / f'{found[1].instance_id}.json'
  episode.write_text(json.dumps({'instance_id': found[1].instance_id, 'model_patch': found[1].patch}))
  assert evaluate()['resolved_ids'] == [found[1].instance_id]
