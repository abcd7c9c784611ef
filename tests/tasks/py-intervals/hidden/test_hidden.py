import random
import unittest

from intervals import covers, merge


class Hidden(unittest.TestCase):
    def test_known(self):
        cases = [
            ([], []),
            ([(1, 2)], [(1, 2)]),
            ([(1, 4), (2, 3)], [(1, 4)]),
            ([(1, 3), (3, 5)], [(1, 5)]),
            ([(5, 8), (1, 2), (2, 3)], [(1, 3), (5, 8)]),
            ([(4, 4), (1, 2)], [(1, 2)]),
        ]
        for given, expected in cases:
            self.assertEqual(merge(given), expected, given)

    def test_random(self):
        dice = random.Random(7)
        for _ in range(300):
            begins = [dice.randrange(20) for _ in range(dice.randrange(8))]
            given = [(begin, begin + dice.randrange(6)) for begin in begins]
            merged = merge(given)
            for number in range(30):
                self.assertEqual(covers(given, number), covers(merged, number), given)
            for (_, end), (begin, _) in zip(merged, merged[1:]):
                self.assertLess(end, begin, given)


if __name__ == "__main__":
    unittest.main()
