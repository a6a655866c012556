"""A stand-in for the mcp library: tools that are called in this process."""
