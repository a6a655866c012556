"""Repository repair: a repository, a problem, tools, and hidden tests that decide. docs/swe.md tells how."""
