"""A stand-in for the verifiers library: as much of its v1 interface as the adapter touches. Tests that need more use the library itself."""
