import unittest

from login import digest, may_log_in

USERS = {"ada": digest("engine"), "guest": ""}


class LoginTest(unittest.TestCase):
    def test_right_password(self):
        self.assertTrue(may_log_in(USERS, "ada", "engine"))

    def test_wrong_password(self):
        self.assertFalse(may_log_in(USERS, "ada", "motor"))

    def test_empty_password(self):
        self.assertFalse(may_log_in(USERS, "ada", ""))
        self.assertFalse(may_log_in(USERS, "guest", ""))
        self.assertFalse(may_log_in(USERS, "nobody", ""))


if __name__ == "__main__":
    unittest.main()
