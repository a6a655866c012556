"""Takes every right from a process and from all that comes of it."""

from sao_jax.sandbox.inside import seccomp, system


def confine():
  """No capabilities, none to be had by setuid programs, a filter of system calls, and closed to other processes of the same user.

  Raises OSError or Refused where one of these cannot be had.
  """
  system.drop_capabilities()
  seccomp.install(system.libc)
  close_to_others()
  if system.capabilities():
    raise system.Refused('capabilities are left after they were dropped')


def close_to_others():
  """Not traceable, and its memory and descriptors not readable, for processes of the same user without capabilities."""
  system.call('dumpable', system.libc.prctl(system.PR_SET_DUMPABLE, 0, 0, 0, 0))
