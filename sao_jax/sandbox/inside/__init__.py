"""What runs on the other side: the code that builds a box and the warden in it. Standard library only, Python 3.9 and later."""
