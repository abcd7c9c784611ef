"""The asynchronous classes. `generate.py` makes their synchronous twins from them."""
