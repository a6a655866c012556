"""State that tools and tasks share."""


class State:
  pass


def state_cls(cls):
  return getattr(cls, 'STATE', State)
