"""Small games with Gymnasium's interface, for tests."""

import random


class Corridor:
  """A door is `length` steps to the east or to the west; walking the other way ends it. 'look' tells where the door is."""

  def __init__(self, length=2, limit=6, broken=''):
    self.length, self.limit, self.broken, self.closed = length, limit, broken, False

  def reset(self, *, seed=None, options=None):
    self.direction = random.Random(seed).choice(('east', 'west'))
    self.place, self.turns = 0, 0
    return 'A corridor.' if options is None else f'A {options["colour"]} corridor.', {'seed': seed}

  def step(self, action):
    if self.broken == 'step':
      raise RuntimeError('the corridor fell in')
    if self.broken == 'shape':
      return 'text', 0.0, True
    self.turns += 1
    if action == 'look':
      text = f'A door to the {self.direction}.'
    elif action in ('east', 'west'):
      self.place += 1 if action == self.direction else -1
      text = 'You walk.'
    else:
      text = f'You cannot {action}.'
    won, lost = self.place == self.length, self.place < 0
    reward = float('nan') if self.broken == 'reward' else float(won)
    return (3 if self.broken == 'observation' else text), reward, won or lost, self.turns >= self.limit, {}

  def close(self):
    self.closed = True


class Two:
  """A discrete space of two actions, as Gymnasium has them, for a game that needs no library."""

  n = 2

  def contains(self, value):
    return value in (0, 1)


class Coin:
  """Guess whether the number shown is even (0) or odd (1); observations are numbers."""

  action_space = Two()

  def reset(self, *, seed=None, options=None):
    self.number = random.Random(seed).randrange(100)
    return self.number, {}

  def step(self, action):
    return self.number, 1 if action == self.number % 2 else -1, True, False, {}


def show_number(number):
  return f'The number is {number}.'


def parse_walk(text):
  if not text.startswith('go '):
    raise ValueError(f'Say "go east" or "go west", not {text!r}.')
  return text[3:]
