import unittest

from slug import slugify


class Hidden(unittest.TestCase):
    def test_as_before(self):
        self.assertEqual(slugify("  A (small) test!  "), "a-small-test")
        self.assertEqual(slugify("v2.0"), "v2-0")

    def test_accents(self):
        self.assertEqual(slugify("Crème Brûlée"), "creme-brulee")
        self.assertEqual(slugify("Ångström & Co"), "angstrom-co")

    def test_nothing_left(self):
        self.assertEqual(slugify("?!"), "untitled")
        self.assertEqual(slugify(""), "untitled")
        self.assertEqual(slugify("¡…!"), "untitled")


if __name__ == "__main__":
    unittest.main()
