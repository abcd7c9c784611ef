import sqlite3
import unittest

from migrate import migrate, open_database
from queries import late_orders


class Hidden(unittest.TestCase):
    def setUp(self):
        self.db = open_database(":memory:")
        migrate(self.db, to=2)
        self.db.execute("INSERT INTO customer VALUES (1, 'Ada')")
        self.db.execute("INSERT INTO orders VALUES (10, 1, '2026-03-01')")
        self.db.commit()
        migrate(self.db)

    def test_old_orders_are_open(self):
        self.assertEqual(self.db.execute("SELECT id, customer, due, status FROM orders").fetchall(),
                         [(10, 1, "2026-03-01", "open")])
        migrate(self.db)

    def test_new_orders_are_open(self):
        self.db.execute("INSERT INTO orders (id, customer, due) VALUES (11, 1, '2026-03-02')")
        self.assertEqual(self.db.execute("SELECT status FROM orders WHERE id = 11").fetchone(), ("open",))

    def test_customers_exist(self):
        with self.assertRaises(sqlite3.IntegrityError):
            self.db.execute("INSERT INTO orders (id, customer, due) VALUES (12, 9, '2026-03-02')")

    def test_late(self):
        rows = [(21, 1, "2026-01-02", "open"), (20, 1, "2026-01-01", "done"), (22, 1, "2026-01-01", "open")]
        self.db.executemany("INSERT INTO orders (id, customer, due, status) VALUES (?, ?, ?, ?)", rows)
        self.assertEqual(late_orders(self.db, "2026-02-01"), [22, 21])
        self.assertEqual(late_orders(self.db, "2026-01-02"), [22])


if __name__ == "__main__":
    unittest.main()
