"""kill -9 at random moments, then resume: nothing trained twice, nothing lost, and the accounting adds up."""

import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from sao_jax import config as settings
from sao_jax.parts import build

SAME = ('step', 'policy/loss', 'value/loss', 'policy/grad_norm', 'reward/mean', 'queue/staleness_max', 'rollout/length_mean')
ROOT = pathlib.Path(__file__).resolve().parents[1]
KILLS = int(os.environ.get('SAO_TEST_KILLS', '4'))  # The full check is 20.
DEADLINE_S = 1200.0
SETTINGS = (
    '--config.checkpoint.every=1', '--config.sft.steps=12', '--config.rl.policy_steps=20',
    '--config.value_pretrain.epochs=4', '--config.logging.tensorboard=False')


def start(workdir, cache, clock):
  environment = {
      **os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '', 'JAX_COMPILATION_CACHE_DIR': str(cache),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0', 'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1'}
  return subprocess.Popen(
      [sys.executable, str(ROOT / 'launch' / 'train.py'), f'--config={ROOT}/configs/tiny_debug.py', f'--workdir={workdir}',
       f'--config.clock.kind={clock}', *SETTINGS],
      env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def state_of(workdir):
  """Something that changes whenever the run gets on."""
  files = [workdir / 'metrics.jsonl', workdir / 'ledger.jsonl', workdir / 'rollouts' / 'value_pretrain.npz', workdir / 'checkpoints']
  return tuple((f.stat().st_size, f.stat().st_mtime_ns) if f.exists() else None for f in files)


def kill_at_random_moment(process, workdir, rng):
  """Waits for a random number of signs of progress, then for a random while, and kills. False if the run ended before."""
  signs, seen, deadline = rng.randrange(0, 6), state_of(workdir), time.monotonic() + DEADLINE_S
  while signs and process.poll() is None:
    assert time.monotonic() < deadline, 'the run does not get on'
    if state_of(workdir) != seen:
      signs, seen = signs - 1, state_of(workdir)
    time.sleep(0.01)
  time.sleep(rng.random() * 0.5)
  process.send_signal(signal.SIGKILL)
  _, errors = process.communicate()
  assert process.returncode in (0, -signal.SIGKILL), errors.decode()[-2000:]
  return process.returncode != 0


def finish(workdir, cache, clock):
  process = start(workdir, cache, clock)
  _, errors = process.communicate(timeout=DEADLINE_S)
  assert process.returncode == 0, errors.decode()[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize('clock', ['wall', 'virtual'])
def test_killed_again_and_again_a_run_loses_and_repeats_nothing(tmp_path, clock):
  workdir, cache, rng, kills = tmp_path / 'run', tmp_path / 'cache', random.Random(0), 0
  while kills < KILLS:
    kills += kill_at_random_moment(start(workdir, cache, clock), workdir, rng)
    if (workdir / 'summary.json').exists():
      break  # It got to its end between two kills; what it left is checked all the same.
  assert kills >= min(KILLS, 3)
  finish(workdir, cache, clock)
  check_accounting(workdir)
  if clock == 'virtual':
    finish(tmp_path / 'whole', cache, clock)
    check_same(workdir, tmp_path / 'whole')


def check_same(killed, whole):
  """Under virtual time the killed run is the one that nobody disturbed: the same batches, numbers and parameters, bit for bit."""
  assert (killed / 'ledger.jsonl').read_text() == (whole / 'ledger.jsonl').read_text()
  rows = [[{k: v for k, v in json.loads(line).items() if k in SAME} for line in (folder / 'metrics.jsonl').read_text().splitlines()]
          for folder in (killed, whole)]
  assert rows[0] == rows[1] and any(len(row) == len(SAME) for row in rows[0])
  states = []
  for folder in (killed, whole):
    parts = build(settings.from_dict(json.loads((folder / 'config.json').read_text())), folder)
    states.append(jax.device_get(parts.checkpointer.restore(parts.checkpointer.latest_step(), parts.learner.abstract_state('rl'))))
    parts.close()
  leaves = [jax.tree.leaves(state) for state in states]
  assert len(leaves[0]) == len(leaves[1]) > 20
  for a, b in zip(*leaves):
    np.testing.assert_array_equal(a, b)


def check_accounting(workdir):
  summary = json.loads((workdir / 'summary.json').read_text())
  ledger = [json.loads(line) for line in (workdir / 'ledger.jsonl').read_text().splitlines()]
  batch_size, steps = 8, 2 + 20
  assert [row['step'] for row in ledger] == list(range(ledger[0]['step'], ledger[0]['step'] + steps))  # Every step once, in order.
  trained = [ticket for row in ledger for ticket in row['tickets']]
  assert len(trained) == len(set(trained)) == steps * batch_size  # Nothing is trained twice.
  accounting = summary['accounting']
  assert accounting['trained'] == len(trained)
  assert accounting['admitted'] == accounting['trained'] + accounting['carried_over'] + sum(accounting['dropped'].values())
  assert set(trained) <= set(range(accounting['admitted']))
  lost = set(range(accounting['admitted'])) - set(trained)
  assert len(lost) == accounting['carried_over'] + sum(accounting['dropped'].values())  # Nothing is lost.
  prompts = collections.Counter(p for row in ledger for p in row['prompt_ids'])
  assert max(prompts.values()) == 1  # One rollout a prompt.
  metrics = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  rows = [row['step'] for row in metrics if 'policy_step' in row]
  assert rows == sorted(set(rows)) and len(rows) == steps
