"""Memory of compiled programs on the CPU, kept between calls. Standard library only.

Every call of a compiled program takes one block for its intermediate values, hundreds of megabytes for a training step, and gives it back
at its end. By default the C library gives such blocks back to the system, so each step pays for half a million page faults and for zeroing
two gigabytes: up to a quarter of a step. `keep_freed_memory` has it keep them, and asks for huge pages.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import sys

# Parameters of glibc's mallopt, malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
RESERVE = 2**33  # Bytes of address space that the heap gets at once, at most half of the machine's; memory only when they are used.


@functools.cache
def keep_freed_memory() -> bool:
  """Has this process keep freed memory for its next allocations; returns whether the C library can. Done once, for good.

  What the process holds then stays at its highest point, which for a training run is the same at every step.
  """
  if not sys.platform.startswith('linux'):
    return False
  try:
    library = ctypes.CDLL(None)
    mallopt = library.mallopt
    library.gnu_get_libc_version  # Others have mallopt, too, with other parameters.
  except (OSError, AttributeError):
    return False
  if not all([mallopt(name, value) for name, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1))]):
    return False
  library.malloc.restype, library.malloc.argtypes, library.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
  memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  library.free(library.malloc(min(RESERVE, memory // 2)))  # The heap grows by it and stays; nothing is there to be freed where it can't.
  _ask_for_huge_pages(library)
  return True


def _ask_for_huge_pages(library: ctypes.CDLL) -> None:
  """For the heap as it is now; without them everything works, with more page faults."""
  try:
    with open('/proc/self/maps', encoding='utf-8') as file:
      heap = re.search(r'^([0-9a-f]+)-([0-9a-f]+) .*\[heap\]$', file.read(), re.MULTILINE)
  except OSError:
    return
  if heap is None or not hasattr(mmap, 'MADV_HUGEPAGE'):
    return
  start, stop = (int(address, 16) for address in heap.groups())
  start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
  library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
  library.madvise(start, stop - start, mmap.MADV_HUGEPAGE)
