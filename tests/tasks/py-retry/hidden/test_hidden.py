import unittest

from retrying import retry


class Flaky:
    def __init__(self, failures, error=OSError):
        self.left, self.error, self.calls = failures, error, 0

    def __call__(self):
        self.calls += 1
        if self.calls > 50:
            raise SystemExit(1)
        if self.left:
            self.left -= 1
            raise self.error(f"call {self.calls}")
        return "done"


class Hidden(unittest.TestCase):
    def test_as_before(self):
        pauses = []
        self.assertEqual(retry(Flaky(1), OSError, sleep=pauses.append), "done")
        self.assertEqual(pauses, [0.1])
        with self.assertRaises(ValueError):
            retry(Flaky(1, ValueError), OSError, sleep=pauses.append)

    def test_pauses_double_up_to_the_longest(self):
        pauses = []
        self.assertEqual(retry(Flaky(5), OSError, attempts=6, base=1, longest=6, sleep=pauses.append), "done")
        self.assertEqual(pauses, [1, 2, 4, 6, 6])

    def test_attempts_are_limited(self):
        flaky, pauses = Flaky(10), []
        with self.assertRaisesRegex(OSError, "call 3"):
            retry(flaky, OSError, attempts=3, base=1, sleep=pauses.append)
        self.assertEqual((flaky.calls, pauses), (3, [1, 2]))


if __name__ == "__main__":
    unittest.main()
