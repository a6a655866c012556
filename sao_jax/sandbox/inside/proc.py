"""Which files of /proc a box is not shown: they tell of the host, and not of its own processes."""

COVERED = (
    'kcore', 'keys', 'key-users', 'timer_list', 'kallsyms', 'kmsg', 'cmdline', 'config.gz', 'sched_debug', 'latency_stats',
    'kpagecount', 'kpageflags', 'kpagecgroup', 'vmallocinfo', 'slabinfo', 'modules')
