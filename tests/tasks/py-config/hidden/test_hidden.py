import importlib.util
import json
import tempfile
import unittest

from app.settings import DEFAULTS, load


class Hidden(unittest.TestCase):
    def file(self, **settings):
        file = tempfile.NamedTemporaryFile("w", suffix=".json", delete=False)
        json.dump(settings, file)
        file.close()
        return file.name

    def test_defaults(self):
        self.assertEqual(load({}), DEFAULTS)

    def test_file(self):
        self.assertEqual(load({"APP_CONFIG": self.file(port=1)})["port"], 1)

    def test_environment_wins(self):
        settings = load({"APP_CONFIG": self.file(port=1, host="file"), "APP_PORT": "2"})
        self.assertEqual(settings, {"port": 2, "host": "file", "debug": False})

    def test_no_legacy(self):
        self.assertIsNone(importlib.util.find_spec("app.legacy"))


if __name__ == "__main__":
    unittest.main()
