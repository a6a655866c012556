"""Worker processes with hard limits of time and memory, for work that may hang or grow: grading, scoring, templates. No JAX."""
