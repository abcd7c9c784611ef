"""Checks passwords against a file of users: one `name:digest` per line."""

import hashlib
import sys


def read_users(path):
    with open(path) as file:
        return dict(line.strip().split(":", 1) for line in file if ":" in line)


def digest(password):
    if not password:
        return ""
    return hashlib.sha256(password.encode()).hexdigest()


def may_log_in(users, name, password):
    return users.get(name, "") == digest(password)


if __name__ == "__main__":
    path, name, password = sys.argv[1:]
    sys.exit(0 if may_log_in(read_users(path), name, password) else 1)
