import unittest

from lru import LruCache


class Hidden(unittest.TestCase):
    def test_as_before(self):
        cache = LruCache(2)
        cache.put("a", 1)
        cache.put("a", 2)
        self.assertEqual(cache.get("a"), 2)
        self.assertEqual(cache.get("b", 7), 7)
        self.assertRaises(ValueError, LruCache, 0)

    def test_capacity(self):
        cache = LruCache(3)
        for key in range(10):
            cache.put(key, key)
            self.assertLessEqual(len(cache), 3)
        self.assertEqual([cache.get(key) for key in range(7, 10)], [7, 8, 9])
        self.assertIsNone(cache.get(6))

    def test_read_is_use(self):
        cache = LruCache(2)
        cache.put("a", 1)
        cache.put("b", 2)
        self.assertEqual(cache.get("a"), 1)
        cache.put("c", 3)
        self.assertEqual((cache.get("a"), cache.get("b"), cache.get("c")), (1, None, 3))


if __name__ == "__main__":
    unittest.main()
