"""kill -9 at random moments of saving: what is left is always whole, and never older than what was reported as saved."""

import os
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.checkpoint import Checkpointer

CHILD = '''
import sys
import jax.numpy as jnp, numpy as np
from sao_jax.checkpoint import Checkpointer

made = Checkpointer(sys.argv[1], keep=2)
step = made.latest_step() or 0
values = np.random.default_rng(0).standard_normal(60_000).astype(np.float32)
print('ready', flush=True)
while True:
  step += 1
  arrays = {name: jnp.asarray(values + step) for name in 'abcd'}
  made.save(step, arrays, {'step': step, 'big': np.full(50_000, step), 'many': [np.full(3, step)] * 50})
  made.wait()
  print(step, flush=True)
'''


def check_whole(directory):
  """Opens the directory as a resumed run would; its newest step (0: none), after checking every step in it."""
  made = Checkpointer(directory, keep=2)
  like = {name: jnp.zeros(60_000, jnp.float32) for name in 'abcd'}
  values = np.random.default_rng(0).standard_normal(60_000).astype(np.float32)
  made.wait()  # A kill between saving and deleting left one too many.
  for step in made.steps():
    arrays, host = made.restore(step, like), made.restore_host(step)
    assert host['step'] == step and (host['big'] == step).all() and len(host['many']) == 50
    for array in arrays.values():
      np.testing.assert_array_equal(array, values + step)
  made.close()
  return made.latest_step() or 0


@pytest.mark.parametrize('kills', [3, pytest.param(25, marks=pytest.mark.slow)])
def test_kill_9_while_saving(tmp_path, kills):
  rng = np.random.default_rng(kills)
  newest = 0
  for _ in range(kills):
    child = subprocess.Popen([sys.executable, '-c', CHILD, str(tmp_path / 'c')], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == 'ready\n'
    # However slow the machine is, some kills come after a save.
    reported = [int(child.stdout.readline()) for _ in range(rng.integers(0, 3))]
    time.sleep(rng.uniform(0.0, 0.6))
    os.kill(child.pid, signal.SIGKILL)
    reported += [int(line) for line in child.stdout.read().split('\n')[:-1]]
    child.wait()
    found = check_whole(tmp_path / 'c')
    assert found >= max([newest, *reported])
    newest = found
  assert newest > 0
