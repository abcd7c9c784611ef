import unittest

from slug import slugify


class Slug(unittest.TestCase):
    def test_spaces(self):
        self.assertEqual(slugify("Hello  World"), "hello-world")

    def test_accents(self):
        self.assertEqual(slugify("Café"), "cafe")


if __name__ == "__main__":
    unittest.main()
