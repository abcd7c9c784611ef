"""Calls that are repeated after errors."""

import time


def retry(call, errors, attempts=5, base=0.1, longest=2.0, sleep=time.sleep):
    while True:
        try:
            return call()
        except errors:
            sleep(base)
