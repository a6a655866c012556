"""What runs inside the sandbox: sent as text and run with `python -I -c`. Standard library only, Python 3.6 and later."""
