"""A cache that forgets what was used least recently."""

from collections import OrderedDict


class LruCache:
    def __init__(self, capacity):
        if capacity < 1:
            raise ValueError("capacity is at least 1")
        self.capacity = capacity
        self.entries = OrderedDict()

    def get(self, key, default=None):
        if key not in self.entries:
            return default
        return self.entries[key]

    def put(self, key, value):
        if key in self.entries:
            self.entries.move_to_end(key)
        self.entries[key] = value
        if len(self.entries) > self.capacity + 1:
            self.entries.popitem(last=False)

    def __len__(self):
        return len(self.entries)
