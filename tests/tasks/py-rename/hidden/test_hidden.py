import pathlib
import unittest
import warnings

from shop.basket import Basket
from shop.bill import print_bill
from shop.discount import discount_cents


class Hidden(unittest.TestCase):
    def setUp(self):
        self.basket = Basket()
        self.basket.add(1050)
        self.basket.add(9950)
        warnings.simplefilter("error", DeprecationWarning)

    def test_new_name(self):
        self.assertEqual(self.basket.total_cents(), 11000)
        self.assertEqual(print_bill(self.basket), "10.50\n99.50\ntotal 110.00")
        self.assertEqual(discount_cents(self.basket), 1100)

    def test_old_name_warns(self):
        with self.assertWarns(DeprecationWarning):
            self.assertEqual(self.basket.sum(), 11000)

    def test_no_use_of_the_old_name(self):
        for file in [*pathlib.Path("shop").glob("*.py"), *pathlib.Path("docs").glob("*.md")]:
            self.assertNotIn("basket.sum(", file.read_text(), file)
        self.assertIn("total_cents", pathlib.Path("docs/basket.md").read_text())


if __name__ == "__main__":
    unittest.main()
