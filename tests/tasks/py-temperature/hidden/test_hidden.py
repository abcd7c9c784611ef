import unittest

from convert import to_celsius, to_fahrenheit
from table import print_table


class Hidden(unittest.TestCase):
    def test_convert(self):
        self.assertEqual((to_celsius(32), to_celsius(212), to_celsius(-40)), (0, 100, -40))
        self.assertEqual((to_fahrenheit(0), to_fahrenheit(100)), (32, 212))

    def test_table(self):
        self.assertEqual(print_table([[1, 200], [30, 4]]), " 1 200\n30   4")
        self.assertEqual(print_table([]), "")


if __name__ == "__main__":
    unittest.main()
